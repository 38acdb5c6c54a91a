"""What can be resumed, what is kept for whom, and what goes first."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dsparkd.errors import InvariantError
from dsparkd.kv.pages import IdAllocator, PageAllocator
from dsparkd.kv.radix import Node, PrefixTree

PAGE = 4


class Cache:
    """A tree with its allocators, and a request's life in two calls."""

    def __init__(self, num_pages: int = 17, num_snapshots: int = 8) -> None:
        self.pages = PageAllocator(num_pages)
        self.snapshots = IdAllocator(0, num_snapshots)
        self.tree = PrefixTree(self.pages, self.snapshots, PAGE)

    def put(self, ids: Sequence[int]) -> Node:
        """Compute a prefix of whole pages and let go of it."""
        pages = self.tree.allocate_pages(len(ids) // PAGE)
        snapshot = self.tree.allocate_snapshot()
        assert pages is not None
        assert snapshot is not None
        node, kept = self.tree.insert(ids, pages, snapshot)
        self.pages.retain(kept)
        self.pages.release(pages)
        self.pages.release(kept)
        return node

    def hit(self, ids: Sequence[int]) -> int:
        """Tokens that a prompt would be spared."""
        found = self.tree.match([*ids, 0])
        return 0 if found is None else found.num_tokens


def ids(*pages: int) -> list[int]:
    """A sequence whose pages are numbered."""
    return [page * 10 + offset for page in pages for offset in range(PAGE)]


def test_match_finds_the_deepest_snapshot() -> None:
    """A page chain alone is not resumable: only a boundary with a snapshot is (model.md 4.4)."""
    cache = Cache()
    cache.put(ids(1, 2))
    cache.put(ids(1, 2, 3, 4))

    assert cache.hit(ids(1, 2, 3, 4, 5)) == 4 * PAGE
    assert cache.hit(ids(1, 2, 3, 9)) == 2 * PAGE
    assert cache.hit(ids(1, 9)) == 0


def test_a_match_returns_the_pages_of_the_whole_path() -> None:
    """The page table of a resumed sequence starts with them, in order."""
    cache = Cache()
    node = cache.put(ids(1, 2, 3))
    found = cache.tree.match([*ids(1, 2, 3), 7])

    assert found is not None
    assert found.node is node
    assert found.num_tokens == len(found.pages) * PAGE == 12
    assert found.pages[-1] == node.page
    assert node.parent is not None
    assert found.pages[-2] == node.parent.page


@pytest.mark.parametrize(("length", "expected"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_at_least_one_token_is_left_to_compute(length: int, expected: int) -> None:
    """Logits are not cached: the usable boundary of n tokens is page * floor((n - 1) / page)."""
    cache = Cache()
    for depth in (1, 2, 3):
        cache.put(ids(1, 2, 3)[: depth * PAGE])

    found = cache.tree.match([*ids(1, 2, 3), 99][:length])

    assert (0 if found is None else found.num_tokens) == expected


def test_the_key_is_the_whole_path_not_the_page() -> None:
    """Equal tokens after different beginnings have different states."""
    cache = Cache()
    cache.put(ids(1, 5))
    assert cache.hit(ids(2, 5)) == 0


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [((1, 2, 8), 2), ((1, 9), 1), ((9, 2), 0), ((1, 2, 3), 3), ((1, 2, 3, 4), 3)],
)
def test_shared_tokens_count_pages_without_a_snapshot_too(sequence: tuple[int, ...], expected: int) -> None:
    """Where sequences part is where the next snapshot pays; it is never the whole of a prompt."""
    cache = Cache()
    cache.put(ids(1, 2, 3))
    assert cache.tree.shared_tokens([*ids(*sequence), 0]) == expected * PAGE
    assert cache.tree.shared_tokens(ids(1, 2, 3)) == 2 * PAGE
    assert cache.hit(ids(1, 2, 8)) == 0


def test_a_page_that_the_tree_has_is_kept_and_the_newcomers_freed() -> None:
    """Two requests computed one prefix at once: it is stored once, and both go on with the same pages."""
    cache = Cache()
    first = cache.tree.allocate_pages(2)
    second = cache.tree.allocate_pages(2)
    assert first is not None
    assert second is not None
    cache.tree.insert(ids(1, 2), first, cache.snapshots.allocate())

    _, chain = cache.tree.insert(ids(1, 2), second, cache.snapshots.allocate())

    assert list(chain) == first
    assert cache.snapshots.num_used == 1


def test_least_recently_used_prefix_goes_first() -> None:
    """A match is a use."""
    cache = Cache(num_pages=7)
    cache.put(ids(1, 2))
    cache.put(ids(3, 4))
    cache.put(ids(5, 6))
    cache.hit(ids(1, 2))

    assert cache.tree.allocate_pages(1) is not None

    assert cache.hit(ids(3, 4)) == 0
    assert cache.hit(ids(1, 2)) == cache.hit(ids(5, 6)) == 2 * PAGE


def test_evicting_a_long_chain_falls_back_to_its_shallower_snapshot() -> None:
    """The tail goes, the common beginning stays."""
    cache = Cache(num_pages=6)
    cache.put(ids(1))
    cache.put(ids(1, 2, 3, 4))

    assert cache.tree.allocate_pages(2) is not None

    assert cache.hit(ids(1, 2, 3, 4)) == PAGE
    assert cache.pages.num_cached == 1
    assert cache.pages.num_free == 2


def test_a_lost_snapshot_takes_its_useless_tail_along() -> None:
    """Pages below the last snapshot can never be resumed from: keeping them would be a leak."""
    cache = Cache(num_snapshots=2)
    cache.put(ids(1))
    cache.put(ids(1, 2, 3))
    cache.hit(ids(1))
    cache.put(ids(7))  # takes the snapshot of (1, 2, 3)

    assert cache.hit(ids(1, 2, 3)) == PAGE
    assert cache.pages.num_cached == 2


def test_a_snapshot_in_the_middle_goes_without_its_pages() -> None:
    """What is below it still needs them."""
    cache = Cache(num_snapshots=2)
    cache.put(ids(1))
    cache.put(ids(1, 2))
    cache.put(ids(8))

    assert cache.hit(ids(1)) == 0
    assert cache.hit(ids(1, 2)) == 2 * PAGE
    assert cache.pages.num_cached == 3


def test_pages_of_a_running_chain_are_not_evicted() -> None:
    """A request's page table would point at another one's tokens."""
    cache = Cache(num_pages=5)
    cache.put(ids(1, 2))
    found = cache.tree.match([*ids(1, 2), 0])
    assert found is not None
    cache.pages.retain(found.pages)

    assert cache.tree.allocate_pages(3) is None
    taken = cache.tree.allocate_pages(2)

    assert taken is not None
    assert not set(taken) & set(found.pages)


def test_eviction_passes_over_a_prefix_that_runs() -> None:
    """Its pages would not come free, so dropping its snapshot would only lose the prefix."""
    cache = Cache(num_pages=5)
    cache.put(ids(1, 2))
    cache.put(ids(3, 4))
    found = cache.tree.match([*ids(1, 2), 0])
    assert found is not None
    cache.pages.retain(found.pages)
    cache.hit(ids(3, 4))  # the running one is the least recently used

    assert cache.tree.allocate_pages(1) is not None

    assert cache.hit(ids(1, 2)) == 2 * PAGE


def test_a_locked_snapshot_is_not_evicted() -> None:
    """Between match and step a slot is still to be filled from it."""
    cache = Cache(num_snapshots=1)
    node = cache.put(ids(1))
    cache.tree.lock(node)
    held = node.snapshot

    assert cache.tree.allocate_snapshot() is None
    assert held is not None
    cache.tree.drop_snapshot(node, held)
    assert node.snapshot == held

    cache.tree.unlock(node)
    assert cache.tree.allocate_snapshot() == held
    assert cache.hit(ids(1)) == 0


def test_a_replaced_snapshot_leaves_its_pages_to_the_deeper_one() -> None:
    """While decoding, the newest boundary replaces the one before: one snapshot a sequence."""
    cache = Cache()
    node = cache.put(ids(1, 2))
    assert node.snapshot is not None
    old = node.snapshot
    cache.put(ids(1, 2, 3))
    cache.tree.drop_snapshot(node, old)

    assert cache.snapshots.num_used == 1
    assert cache.hit(ids(1, 2)) == 0
    assert cache.hit(ids(1, 2, 3)) == 3 * PAGE
    cache.tree.drop_snapshot(node, old)  # gone already: nothing happens
    assert cache.snapshots.num_used == 1


def test_pages_that_somebody_else_holds_do_not_enter_below_a_page_that_he_does_not() -> None:
    """A page held without the path above it cannot be evicted, and all of that path would count as if it could."""
    cache = Cache(num_pages=9, num_snapshots=2)

    def leave(sequence: Sequence[int], pages: list[int]) -> None:
        """As a request does at a boundary, which then goes on with the tree's pages."""
        snapshot = cache.tree.allocate_snapshot()
        assert snapshot is not None
        _, kept = cache.tree.insert(sequence, pages, snapshot)
        cache.pages.retain(kept)
        cache.pages.release(pages[: len(kept)])
        pages[: len(kept)] = kept

    def take(count: int) -> list[int]:
        pages = cache.tree.allocate_pages(count)
        assert pages is not None
        return pages

    first = take(2)
    leave(ids(1, 2), first)
    second = cache.tree.match([*ids(1, 2), 0])
    assert second is not None
    cache.pages.retain(second.pages)
    for stranger in (8, 9):  # their snapshots push the first one out, and with it the path
        pages = take(1)
        leave(ids(stranger), pages)
        cache.pages.release(pages)
    third = take(1)
    leave(ids(1), third)
    first += take(1)
    leave(ids(1, 2, 3), first)
    fourth = take(2)
    leave(ids(1, 2), fourth)
    for pages in (first, third, fourth):
        cache.pages.release(pages)

    available = cache.pages.num_free + cache.pages.num_cached

    assert cache.pages.num_used == 2
    assert len(take(available)) == available


def test_misuse_is_an_invariant_error() -> None:
    """Each would corrupt the tree silently."""
    cache = Cache()
    node = cache.put(ids(1))
    with pytest.raises(InvariantError):
        cache.tree.unlock(node)
    assert node.parent is not None
    with pytest.raises(InvariantError):
        cache.tree.lock(node.parent)
    for wrong_ids, pages in ((ids(1)[:3], [1]), ([], []), (ids(1, 2), [1])):
        with pytest.raises(InvariantError):
            cache.tree.insert(wrong_ids, pages, 0)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["start", "finish"]), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
        max_size=40,
    ),
    num_snapshots=st.integers(1, 6),
)
def test_every_cached_page_can_be_evicted(steps: list[tuple[str, list[int]]], num_snapshots: int) -> None:
    """Admission counts free plus cached pages as available; a cached page that cannot go would break its promise."""
    cache = Cache(num_pages=13, num_snapshots=num_snapshots)
    running: list[tuple[list[int], list[int]]] = []
    for action, path in steps:
        if action == "finish" and running:
            tokens, pages = running.pop(0)
            snapshot = cache.tree.allocate_snapshot()
            if snapshot is not None:
                _, chain = cache.tree.insert(tokens, pages, snapshot)
                cache.pages.retain(chain)
                cache.pages.release(pages)
                pages = list(chain)
            cache.pages.release(pages)
        elif action == "start":
            tokens = ids(*path)
            found = cache.tree.match([*tokens, 0])
            prefix = list(found.pages) if found is not None else []
            cache.pages.retain(prefix)
            grown = cache.tree.allocate_pages(len(path) - len(prefix))
            if grown is None:
                cache.pages.release(prefix)
            else:
                running.append((tokens, prefix + grown))
        held = {page for _, pages in running for page in pages}
        assert cache.pages.num_used == len(held)

    available = cache.pages.num_free + cache.pages.num_cached
    taken = cache.tree.allocate_pages(available)

    assert taken is not None
    assert len(set(taken)) == available
    assert not set(taken) & {page for _, pages in running for page in pages}
    assert cache.snapshots.num_used == 0 or running
