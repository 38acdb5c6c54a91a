"""Prefix tree over whole pages: which computed prefixes can be resumed, and what is evicted first.

A node is one page of tokens below its parent's, so the path from the root spells a prefix and is its chained key. A
prefix is resumable only where a node also carries a boundary snapshot: what a sequence keeps outside its pages, as it
stood at that page's end (window rows, compressor overlap). Hence one rule for every shape of the tree: **a leaf
carries a snapshot**; a tail without one could never be resumed from and is cut at once.

A node's `page` and `snapshot` are its residence on the device. A further tier adds its own residence beside them and
becomes a step of `_drop_snapshot`, the only place where a prefix leaves the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsparkd.errors import InvariantError
from dsparkd.kv.pages import IdAllocator, PageAllocator


class Node:
    """One cached page. snapshot: the boundary state at its end, if kept. locks: requests about to resume from it."""

    __slots__ = ("children", "key", "locks", "page", "parent", "snapshot")

    def __init__(self, key: bytes, parent: Node | None, page: int) -> None:
        self.key = key
        self.parent = parent
        self.page = page
        self.children: dict[bytes, Node] = {}
        self.snapshot: int | None = None
        self.locks = 0


@dataclass(frozen=True, slots=True)
class Match:
    """A resumable prefix: its last node, its pages in order, the snapshot at its end and its length in tokens."""

    node: Node
    pages: tuple[int, ...]
    snapshot: int
    num_tokens: int


class PrefixTree:
    """Owned by the tick thread. Holds one reference on each of its pages and owns each of its snapshots."""

    def __init__(self, pages: PageAllocator, snapshots: IdAllocator, page_tokens: int) -> None:
        self._pages = pages
        self._snapshots = snapshots
        self._page_tokens = page_tokens
        self._root = Node(b"", None, 0)
        # Every node with a snapshot, least recently used first: a dict keeps its order of insertion.
        self._by_use: dict[Node, None] = {}

    def match(self, ids: Sequence[int]) -> Match | None:
        """Find the longest resumable proper prefix of ids, and mark it as used.

        At least one id is left over, because logits are not cached. Pages and snapshot stay valid only until the next
        call that may evict: retain the pages and lock the node first.
        """
        node, pages = self._root, list[int]()
        found: Match | None = None
        for key in self._keys(ids, (len(ids) - 1) // self._page_tokens):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
            if node.snapshot is not None:
                found = Match(node, tuple(pages), node.snapshot, len(pages) * self._page_tokens)
        if found is not None:
            self._touch(found.node)
        return found

    def shared_tokens(self, ids: Sequence[int]) -> int:
        """Tokens of the longest proper prefix of ids that somebody has computed, resumable or not.

        Where it is longer than a match, sequences part at a boundary without a snapshot, typically behind a common
        system prompt: whoever computes it again should leave one there.
        """
        node, depth = self._root, 0
        for key in self._keys(ids, (len(ids) - 1) // self._page_tokens):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            depth += 1
        return depth * self._page_tokens

    def lock(self, node: Node) -> None:
        """Keep the node's snapshot until `unlock`: a slot is about to be filled from it."""
        if node.snapshot is None:
            raise InvariantError("lock of a node without a snapshot")
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises InvariantError without one."""
        if not node.locks:
            raise InvariantError("unlock of a node that is not locked")
        node.locks -= 1

    def insert(self, ids: Sequence[int], pages: Sequence[int], snapshot: int) -> tuple[Node, tuple[int, ...]]:
        """Add the prefix ids, whole pages of tokens, with the snapshot at its end; the tree owns the snapshot now.

        Returns the last node and the tree's pages for the prefix. Where the tree had a page already it keeps its own,
        and the caller goes on with that one: holders of a page then always hold the whole path above it, so that every
        cached page can really be evicted. A snapshot that the node has already is kept and the new one freed. Where
        the rule could not be kept, nothing is added and the snapshot freed; the node and the pages are then those of
        the part of the prefix that the tree has.
        """
        count, rest = divmod(len(ids), self._page_tokens)
        if rest or not count or len(pages) < count:
            raise InvariantError(f"insert of {len(ids)} tokens in {len(pages)} pages of {self._page_tokens}")
        node, chain = self._root, list[int]()
        keys = list(self._keys(ids, count))
        while len(chain) < count and (child := node.children.get(keys[len(chain)])) is not None:
            node = child
            chain.append(node.page)
        missing = list(zip(keys, pages, strict=False))[len(chain) :]
        # Whoever else holds one of these got it together with the caller's pages above, not with the tree's: the tree's
        # would look evictable, and stand above a page that is not.
        if list(pages[: len(chain)]) != chain and any(self._pages.is_shared(page) for _, page in missing):
            self._snapshots.free(snapshot)
            return node, tuple(chain)
        for key, page in missing:
            child = node.children[key] = Node(key, node, page)
            self._pages.enter_tree(page)
            node = child
            chain.append(page)
        if node.snapshot is None:
            node.snapshot = snapshot
        else:
            self._snapshots.free(snapshot)
        self._touch(node)
        return node, tuple(chain)

    def drop_snapshot(self, node: Node, snapshot: int) -> None:
        """Give up a snapshot that has been replaced further down; nothing happens if it is gone or about to be used."""
        if node.snapshot == snapshot and not node.locks:
            self._drop_snapshot(node)

    def allocate_pages(self, count: int) -> list[int] | None:
        """Take pages for a request, evicting prefixes that nobody uses, least recently used first; None if too few."""
        if count > self._pages.num_free + self._pages.num_cached:
            return None
        if count > self._pages.num_free:
            self._evict_pages(count)
        return self._pages.allocate(count)

    def allocate_snapshot(self) -> int | None:
        """Take a snapshot id, evicting the least recently used snapshot if none is free; None if all are locked."""
        if not self._snapshots.num_free:
            victim = next((node for node in self._by_use if not node.locks), None)
            if victim is None:
                return None
            self._drop_snapshot(victim)
        return self._snapshots.allocate()

    def free_snapshot(self, snapshot: int) -> None:
        """Give back a snapshot id that was allocated and never inserted."""
        self._snapshots.free(snapshot)

    def _evict_pages(self, count: int) -> None:
        """Evict until count pages are free; the caller knows that enough are cached.

        The snapshot goes before its pages, and only leaves are taken: a page in the middle of a path is useful to
        everything below it. Cutting a leaf may make its parent one, so the order is walked until it is enough.
        """
        while self._pages.num_free < count:
            before = self._pages.num_free
            for node in list(self._by_use):
                if not node.children and self._pages.is_cached(node.page) and not node.locks:
                    self._drop_snapshot(node)
                    if self._pages.num_free >= count:
                        return
            if self._pages.num_free == before:
                raise InvariantError(f"{self._pages.num_cached} cached pages, and none can be evicted")

    def _drop_snapshot(self, node: Node) -> None:
        """Free a node's snapshot and the tail that cannot be resumed without it."""
        if node.snapshot is None or node.locks:
            raise InvariantError("drop of a snapshot that is locked or missing")
        self._snapshots.free(node.snapshot)
        node.snapshot = None
        del self._by_use[node]
        while node.parent is not None and not node.children and node.snapshot is None:
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            self._pages.leave_tree(node.page)
            node = parent

    def _touch(self, node: Node) -> None:
        self._by_use.pop(node, None)
        self._by_use[node] = None

    def _keys(self, ids: Sequence[int], count: int) -> Iterator[bytes]:
        """Keys of the first count pages: the ids as packed 32-bit words, a fraction of a tuple's size."""
        size = self._page_tokens
        for start in range(0, count * size, size):
            yield array("I", ids[start : start + size]).tobytes()
