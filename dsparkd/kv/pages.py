"""Who holds which page, slot and snapshot: free lists and reference counts over plain ids. Owned by the tick thread.

A page is free, used (some request holds it) or cached (the prefix tree alone holds it). Ids index device storage that
kv/pool.py owns; nothing here touches memory. Free ids are reused last in, first out, so a replay hands out the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsparkd.errors import InvariantError


class IdAllocator:
    """Ids first .. first + count - 1, each held by at most one owner: slots and boundary snapshots."""

    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._free = list(range(first + count - 1, first - 1, -1))
        self._is_free = [True] * count

    @property
    def num_free(self) -> int:
        """Ids that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Ids that somebody holds."""
        return len(self._is_free) - len(self._free)

    def allocate(self) -> int:
        """Take one id. Raises InvariantError when none is free: the caller looks at num_free first."""
        if not self._free:
            raise InvariantError("allocate from an empty free list")
        taken = self._free.pop()
        self._is_free[taken - self._first] = False
        return taken

    def free(self, held: int) -> None:
        """Give one id back. Raises InvariantError for an id that is free already or never existed."""
        index = held - self._first
        if not 0 <= index < len(self._is_free) or self._is_free[index]:
            raise InvariantError(f"free of id {held}, which nobody holds")
        self._is_free[index] = True
        self._free.append(held)


class PageAllocator:
    """Pages 1 .. num_pages - 1 with reference counts; page 0 takes the writes of padding and is never handed out.

    Every holder counts one: each request whose page table names the page, and the prefix tree.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._in_tree = [False] * num_pages
        self._num_cached = 0

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out."""
        return len(self._holders) - 1

    @property
    def num_free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that the prefix tree alone holds; all of them can be evicted."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Pages that some request holds."""
        return self.num_pages - self.num_free - self._num_cached

    def is_cached(self, page: int) -> bool:
        """Whether the prefix tree is the page's only holder."""
        return self._in_tree[page] and self._holders[page] == 1

    def is_shared(self, page: int) -> bool:
        """Whether the page has more than one holder."""
        return self._holders[page] > 1

    def allocate(self, count: int) -> list[int]:
        """Take count pages, one holder each. Raises InvariantError when fewer are free."""
        if count > len(self._free):
            raise InvariantError(f"allocate {count} pages of {len(self._free)} free ones")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a holder to each page. Raises InvariantError for a page without any."""
        for page in pages:
            self._require_held(page)
            self._num_cached -= self.is_cached(page)
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a holder from each page; the last one frees it. Raises InvariantError for a page without any."""
        for page in pages:
            self._require_held(page)
            if self.is_cached(page):
                raise InvariantError(f"release of page {page}, which the prefix tree alone holds")
            self._holders[page] -= 1
            self._num_cached += self.is_cached(page)
            if not self._holders[page]:
                self._free.append(page)

    def enter_tree(self, page: int) -> None:
        """Make the prefix tree one more holder. Raises InvariantError when it is one or the page is free."""
        self._require_held(page)
        if self._in_tree[page]:
            raise InvariantError(f"page {page} is in the prefix tree twice")
        self._holders[page] += 1
        self._in_tree[page] = True

    def leave_tree(self, page: int) -> None:
        """Take the tree's hold away; frees the page if it was the last. Raises InvariantError if there is none."""
        if not self._in_tree[page]:
            raise InvariantError(f"page {page} is not in the prefix tree")
        self._num_cached -= self.is_cached(page)
        self._in_tree[page] = False
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def _require_held(self, page: int) -> None:
        if not 0 < page < len(self._holders) or not self._holders[page]:
            raise InvariantError(f"page {page} is not held by anybody")
