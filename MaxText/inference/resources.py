"""Who owns which slot and which page: the two resources of a request, counted on the host.

A request holds one slot (its recurrent state) and as many pages as its tokens need (its latents). With a data
axis, every rank has its own slots and pages, and a request stays within its rank.

Dims: S slots, N pages of a slot, G pages of the pool.
"""

import numpy as np


class Resources:
  """Slots and pages of an engine, each free or owned by exactly one slot's request.

  Attributes:
    page_size: tokens of a page.
    table: [S, N] int32 pages of each slot in order; G where there is none.
  """

  def __init__(self, *, slots: int, pages: int, page_size: int, pages_per_slot: int, ranks: int = 1):
    """Starts with everything free.

    Args:
      slots: S, requests at a time, over all ranks.
      pages: G, over all ranks.
      page_size: tokens of a page.
      pages_per_slot: N, the most that one request may own.
      ranks: parts that neither share slots nor pages.

    Raises:
      ValueError: the ranks do not divide slots and pages.
    """
    if slots % ranks or pages % ranks:
      raise ValueError(f"{ranks} ranks do not divide {slots} slots and {pages} pages")
    self.page_size = page_size
    self._ranks, self._slots, self._pages = ranks, slots, pages
    self._free_slots = [_numbers(rank, slots // ranks) for rank in range(ranks)]
    self._free_pages = [_numbers(rank, pages // ranks) for rank in range(ranks)]
    self._owned: dict[int, list[int]] = {}
    self.table = np.full((slots, pages_per_slot), pages, np.int32)

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
    return min(self.table.shape[1], self._pages // self._ranks) * self.page_size

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
    """Returns the pages of a slot in the order of its tokens."""
    return tuple(self._owned[slot])


def _numbers(rank: int, size: int) -> list[int]:
  """Numbers of one rank, the lowest to be taken first."""
  return list(range((rank + 1) * size - 1, rank * size - 1, -1))
