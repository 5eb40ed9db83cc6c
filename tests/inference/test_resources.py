"""Slots and pages: nothing is ever owned twice, lost, or taken from another rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.inference.resources import Resources

S, PAGES, J, N, RANKS = 6, 24, 4, 5, 2
G = PAGES // RANKS


def check(resources):
  """Every page and slot is free or owned once, and the table says the same."""
  owned = {
    slot: resources.owned(slot)
    for slot in range(S)
    if resources.table[slot, 0] < G or slot in resources._owned
  }
  pages = [(resources.rank(slot), page) for slot, each in owned.items() for page in each]
  assert len(set(pages)) == len(pages) == resources.used_pages
  assert all(0 <= page < G for _, page in pages)
  assert resources.used_pages + resources.free_pages == PAGES
  for rank in range(RANKS):
    assert resources.free_pages_of(rank) + sum(owner == rank for owner, _ in pages) == G
  assert resources.used_slots + resources.free_slots == S
  for slot, each in owned.items():
    assert resources.table[slot].tolist() == [*each, *[G] * (N - len(each))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["acquire", "grow", "release"]), st.integers(0, 23)), max_size=40))
def test_nothing_is_owned_twice_or_lost(events):
  resources, held = Resources(slots=S, pages=PAGES, page_size=J, pages_per_slot=N, ranks=RANKS), []
  for event, number in events:
    if event == "acquire":
      before = resources.free_slots, resources.free_pages
      slot = resources.acquire(number)
      if slot is None:
        assert (resources.free_slots, resources.free_pages) == before
      else:
        held.append(slot)
        assert len(resources.owned(slot)) == -(-number // J)
    elif held and event == "grow":
      slot = held[number % len(held)]
      before = resources.owned(slot)
      grown = resources.grow(slot, number)
      assert resources.owned(slot)[: len(before)] == before
      assert grown == (len(resources.owned(slot)) * J >= number)
    elif held:
      resources.release(held.pop(number % len(held)))
    check(resources)
  for slot in held:
    resources.release(slot)
  assert (resources.free_slots, resources.free_pages) == (S, PAGES)
  assert np.all(resources.table == G)


def test_a_request_longer_than_the_table_is_never_admitted():
  resources = Resources(slots=1, pages=100, page_size=J, pages_per_slot=N)
  assert resources.longest == N * J
  assert resources.acquire(N * J + 1) is None and resources.acquire(N * J) == 0


def test_ranks_have_to_divide():
  with pytest.raises(ValueError, match="2 ranks do not divide 3 slots and 8 pages"):
    Resources(slots=3, pages=8, page_size=J, pages_per_slot=N, ranks=2)
