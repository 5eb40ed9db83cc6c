"""Who owns which slot and which page: the two resources of a request, counted on the host.

A request holds one slot (its recurrent state) and as many pages as its tokens need (its latents). With a data
axis, every rank has its own slots and pages, and a request stays within its rank. Slots are numbered over all
ranks, pages within their own.

Dims: S slots, N pages of a slot, G pages of a rank.
"""

import numpy as np

from MaxText.common.errors import ConfigError, InputError
from MaxText.models.sharding import Layout, nearest_multiples


class Resources:
  """Slots and pages of an engine, each free or owned by exactly one slot's request.

  Attributes:
    page_size: tokens of a page.
    table: [S, N] int32 pages of each slot in order, numbers of its rank; G where there is none.
  """

  def __init__(self, *, slots: int, pages: int, page_size: int, pages_per_slot: int, ranks: int = 1):
    """Starts with everything free.

    Args:
      slots: S, requests at a time, over all ranks.
      pages: of all ranks together.
      page_size: tokens of a page.
      pages_per_slot: N, the most that one request may own.
      ranks: parts that neither share slots nor pages.

    Raises:
      ValueError: the ranks do not divide slots and pages.
    """
    if slots % ranks or pages % ranks:
      raise ValueError(f"{ranks} ranks do not divide {slots} slots and {pages} pages")
    self.page_size = page_size
    self._ranks, self._slots, self._pages = ranks, slots, pages // ranks
    self._free_slots = [_numbers(rank * slots // ranks, slots // ranks) for rank in range(ranks)]
    self._free_pages = [_numbers(0, self._pages) for _ in range(ranks)]
    self._owned: dict[int, list[int]] = {}
    self.table = np.full((slots, pages_per_slot), self._pages, np.int32)

  @property
  def free_slots(self) -> int:
    """Slots without a request."""
    return sum(map(len, self._free_slots))

  @property
  def free_pages(self) -> int:
    """Pages that no slot owns."""
    return sum(map(len, self._free_pages))

  @property
  def used_slots(self) -> int:
    """Slots with a request."""
    return len(self._owned)

  @property
  def used_pages(self) -> int:
    """Pages that some slot owns."""
    return sum(map(len, self._owned.values()))

  @property
  def longest(self) -> int:
    """Tokens of the longest request that could ever be held."""
    return min(self.table.shape[1], self._pages) * self.page_size

  def rank(self, slot: int) -> int:
    """Returns the rank that a slot, its pages and its request belong to."""
    return slot // (self._slots // self._ranks)

  def free_pages_of(self, rank: int) -> int:
    """Returns the pages of a rank that no slot owns."""
    return len(self._free_pages[rank])

  def pages_for(self, tokens: int) -> int:
    """Returns the pages that so many tokens of one request take."""
    return -(-tokens // self.page_size)

  def choice(self, tokens: int) -> int | None:
    """Returns the rank in which `acquire` would hold `tokens`: the one with most free pages; None if none."""
    need = self.pages_for(tokens)
    able = [r for r in range(self._ranks) if self._free_slots[r] and len(self._free_pages[r]) >= need]
    if not able or need > self.table.shape[1]:
      return None
    return max(able, key=lambda r: (len(self._free_pages[r]), -r))

  def acquire(self, tokens: int) -> int | None:
    """Gives a free slot with pages for `tokens`, of the rank with most free pages, or None."""
    rank = self.choice(tokens)
    if rank is None:
      return None
    slot = self._free_slots[rank].pop()
    self._owned[slot] = []
    self.grow(slot, tokens)
    return slot

  def grow(self, slot: int, tokens: int) -> bool:
    """Gives a slot the pages that `tokens` need; False, and nothing changes, where they are not free."""
    owned, free = self._owned[slot], self._free_pages[self.rank(slot)]
    missing = self.pages_for(tokens) - len(owned)
    if missing > len(free) or len(owned) + missing > self.table.shape[1]:
      return False
    for _ in range(missing):
      self.table[slot, len(owned)] = free[-1]
      owned.append(free.pop())
    return True

  def release(self, slot: int) -> None:
    """Frees a slot and its pages."""
    self._free_pages[self.rank(slot)].extend(reversed(self._owned.pop(slot)))
    self._free_slots[self.rank(slot)].append(slot)
    self.table[slot] = self._pages

  def owned(self, slot: int) -> tuple[int, ...]:
    """Returns the pages of a slot in the order of its tokens, numbered within its rank."""
    return tuple(self._owned[slot])


def _numbers(first: int, count: int) -> list[int]:
  """So many numbers, the lowest to be taken first."""
  return list(range(first + count - 1, first - 1, -1))


def ranks_of(layout: Layout, slots: int, pages: int) -> int:
  """Returns the ranks of a mesh: the parts into which it splits the latents.

  Args:
    layout: of the devices.
    slots: of all ranks together.
    pages: of all ranks together.

  Raises:
    ConfigError: rows and latents are split so differently that a row has no place.
    InputError: slots or pages do not divide over the ranks, with the nearest numbers that do.
  """
  rows, ranks = layout.parts("activation_batch"), layout.parts("cache_batch")
  if max(rows, ranks) % min(rows, ranks):
    raise ConfigError(
      f"{layout.name}: activation_batch is split into {rows} parts and cache_batch into {ranks}; "
      "to serve, one number has to divide the other"
    )
  for key, number, parts in (("slots", slots, layout.row_multiple), ("pages", pages, ranks)):
    if number % parts:
      nearest = " or ".join(map(str, nearest_multiples(number, parts)))
      raise InputError(
        f"{layout.name}: {key}={number} does not divide over {parts} ranks; nearest that do: {nearest}"
      )
  return ranks
