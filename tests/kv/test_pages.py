"""Ids are handed out once, come back once, and every count is true at every moment."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dsparkd.errors import InvariantError
from dsparkd.kv.pages import IdAllocator, PageAllocator


def test_ids_are_unique_while_held_and_reused_after() -> None:
    """Two owners of one slot would overwrite each other's rings."""
    slots = IdAllocator(1, 3)
    held = [slots.allocate() for _ in range(3)]
    assert sorted(held) == [1, 2, 3]
    assert (slots.num_free, slots.num_used) == (0, 3)

    slots.free(held[1])

    assert slots.allocate() == held[1]


@pytest.mark.parametrize("wrong", [0, 4, -1, 2])
def test_freeing_an_id_that_nobody_holds_is_a_bug(wrong: int) -> None:
    """A double free would give one slot to two requests later, far from the cause."""
    slots = IdAllocator(1, 3)
    slots.allocate()  # 1
    with pytest.raises(InvariantError):
        slots.free(wrong)


def test_an_empty_free_list_is_the_callers_mistake() -> None:
    """Running out is a decision of the policy, never an exception in a step."""
    with pytest.raises(InvariantError):
        IdAllocator(0, 0).allocate()
    with pytest.raises(InvariantError):
        PageAllocator(4).allocate(4)


def test_page_zero_is_never_handed_out() -> None:
    """Padding writes to page 0 (U-05)."""
    pages = PageAllocator(8)
    assert sorted(pages.allocate(7)) == list(range(1, 8))
    assert pages.num_free == 0
    with pytest.raises(InvariantError):
        pages.retain([0])


def test_a_page_is_free_only_after_its_last_holder() -> None:
    """A shared prefix survives the first of the requests that use it."""
    pages = PageAllocator(3)
    (page,) = pages.allocate(1)
    pages.retain([page])
    pages.release([page])
    assert pages.num_free == 1
    pages.release([page])
    assert pages.num_free == 2
    with pytest.raises(InvariantError):
        pages.release([page])


def test_a_page_of_the_tree_alone_is_cached_not_used() -> None:
    """Cached pages are what admission may count on beside the free ones."""
    pages = PageAllocator(3)
    (page,) = pages.allocate(1)
    pages.enter_tree(page)
    assert (pages.num_free, pages.num_used, pages.num_cached) == (1, 1, 0)
    pages.release([page])
    assert (pages.num_free, pages.num_used, pages.num_cached) == (1, 0, 1)
    pages.retain([page])
    assert (pages.num_free, pages.num_used, pages.num_cached) == (1, 1, 0)
    pages.release([page])
    pages.leave_tree(page)
    assert (pages.num_free, pages.num_used, pages.num_cached) == (2, 0, 0)


def test_the_trees_hold_is_not_a_requests_to_release() -> None:
    """One release too many by a request must not free a cached prefix under a later one."""
    pages = PageAllocator(3)
    (page,) = pages.allocate(1)
    pages.enter_tree(page)
    pages.release([page])
    with pytest.raises(InvariantError, match="prefix tree alone"):
        pages.release([page])
    with pytest.raises(InvariantError, match="twice"):
        pages.enter_tree(page)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release", "enter", "leave"]), st.integers(0, 30))))
def test_counts_equal_a_recount_after_any_history(history: list[tuple[str, int]]) -> None:
    """The policy decides by these counts; one that drifts ends in an exception much later."""
    pages = PageAllocator(10)
    holders: dict[int, int] = {}
    in_tree: set[int] = set()
    for action, pick in history:
        known = sorted(holders.keys() | in_tree)
        page = known[pick % len(known)] if known else 0
        if action == "allocate" and pages.num_free:
            (taken,) = pages.allocate(1)
            assert taken not in holders
            assert taken not in in_tree
            holders[taken] = 1
        elif action == "retain" and page:
            pages.retain([page])
            holders[page] = holders.get(page, 0) + 1
        elif action == "release" and page in holders:
            pages.release([page])
            holders[page] -= 1
            if not holders[page]:
                del holders[page]
        elif action == "enter" and page in holders and page not in in_tree:
            pages.enter_tree(page)
            in_tree.add(page)
        elif action == "leave" and page in in_tree:
            pages.leave_tree(page)
            in_tree.remove(page)
        assert pages.num_used == len(holders)
        assert pages.num_cached == len(in_tree - holders.keys())
        assert pages.num_free == 9 - len(holders.keys() | in_tree)
