"""Python's face of the native traversal: the memory of a walk, and the pool that walks.

Importing this loads tvm_ffi and with it the library that the compiled part calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
import tvm_ffi  # noqa: F401  (loads the library whose names dsparkd.native._traversal needs)
from numpy.typing import NDArray

from dsparkd.errors import CapabilityError, InvariantError
from dsparkd.native._traversal import ffi, lib

FEATURE = 'grammar.traversal = "native"'
REMEDY = 'reinstall dsparkd with the wheels that it names, or set grammar.traversal = "per_matcher"'

_MATCHER = "xgrammar.tvm_ffi_binding.GrammarMatcher"
# What each method takes and returns, in tvm-ffi's own words: what traversal.c was written for.
_SIGNATURES = {
    "accept_token": ("bool", (_MATCHER, "int", "bool")),
    "fill_next_token_bitmask": ("bool", (_MATCHER, "Any", "int", "bool")),
    "rollback": ("None", (_MATCHER, "int")),
    "is_terminated": ("bool", (_MATCHER,)),
}


class WalkStatus(IntEnum):
    """What became of one request; after the first three its matcher may be used again."""

    WALKED = lib.DSPARKD_WALKED
    ENDED = lib.DSPARKD_ENDED
    LATE = lib.DSPARKD_LATE
    COMMIT_REFUSED = lib.DSPARKD_COMMIT_REFUSED
    MATCHER_FAILED = lib.DSPARKD_MATCHER_FAILED
    NO_TOKEN = lib.DSPARKD_NO_TOKEN
    BAD_HANDLE = lib.DSPARKD_BAD_HANDLE
    REPEATED_HANDLE = lib.DSPARKD_REPEATED_HANDLE
    NOT_A_TREE = lib.DSPARKD_NOT_A_TREE
    STUCK = lib.DSPARKD_STUCK


class NodeState(IntEnum):
    """Whether a node's row says what may follow it; a row that does not is all ones."""

    UNSEEN = lib.DSPARKD_UNSEEN
    USABLE = lib.DSPARKD_USABLE
    REFUSED = lib.DSPARKD_REFUSED


class MatcherHandle(Protocol):
    """An object of tvm-ffi: what XGrammar's GrammarMatcher holds as `_handle`."""

    def __chandle__(self) -> int:
        """Address of the object."""


class MethodInfo(Protocol):
    """One entry of tvm-ffi's table of a type's methods."""

    name: str
    metadata: dict[str, str] | None
    func: MatcherHandle | None


class Walk:
    """The memory of one walk, made once and filled again each step. Owned by the thread that walks.

    b trees of n nodes; node 0 of a chain is the anchor. V ids, words = ceil(V / 32).
    drafts [b, n] int64 and mask [b * n, words] int32 belong to the caller (the mask may be pinned memory).
    next_token and next_sibling, [n] or [b, n] int64, give first child and next sibling of each node, -1 for none;
    without them every tree is a chain. max_commits bounds the ids that one `add` may carry.

    Raises InvariantError for another shape or type, or memory that is not contiguous: XGrammar ignores strides.
    """

    def __init__(
        self,
        drafts: NDArray[np.int64],
        mask: NDArray[np.int32],
        vocab_size: int,
        max_commits: int,
        links: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> None:
        _require(drafts, np.int64, (2,), "drafts")
        self.capacity, self.num_nodes = capacity, num_nodes = drafts.shape
        self.next_token, self.next_sibling = links if links is not None else _chain(num_nodes)
        for name, array in (("next_token", self.next_token), ("next_sibling", self.next_sibling)):
            _require(array, np.int64, (1, 2), name)
            if array.shape not in ((num_nodes,), drafts.shape):
                raise InvariantError(f"{name} has the shape {array.shape} for drafts of {drafts.shape}")
        if self.next_token.shape != self.next_sibling.shape:
            raise InvariantError(f"links have the shapes {self.next_token.shape} and {self.next_sibling.shape}")
        _require(mask, np.int32, (2,), "mask")
        self.num_words = -(-vocab_size // 32)
        if mask.shape != (capacity * num_nodes, self.num_words):
            raise InvariantError(f"mask has the shape {mask.shape}, not {(capacity * num_nodes, self.num_words)}")
        if not mask.flags.writeable:
            raise InvariantError("mask cannot be written")
        self.drafts, self.mask, self.vocab_size, self.max_commits = drafts, mask, vocab_size, max_commits
        self.num_trees = 0
        self.matchers: list[MatcherHandle | None] = []  # keeps them alive while C holds their addresses
        self.handles = np.zeros(capacity, np.uint64)
        self.indices = np.zeros(capacity, np.int32)
        self.roots = np.zeros(capacity, np.int32)
        self.num_commits = np.zeros(capacity, np.int32)
        self.commits = np.zeros((capacity, max_commits), np.int64)
        self.commits_only = False
        self.grammars = np.zeros(capacity, np.int32)
        self.budgets_ns = np.zeros(capacity, np.int64)
        self.nodes = np.zeros(drafts.shape, np.uint8)
        self.usable_rows = np.zeros(capacity, np.int32)
        self.num_accepted = np.zeros(capacity, np.int32)
        self.statuses = np.zeros(capacity, np.int32)
        self.spent_ns = np.zeros(capacity, np.int64)
        self._messages = np.zeros((capacity, lib.DSPARKD_MESSAGE_BYTES), np.uint8)
        self._scratch = (np.zeros(capacity, np.int32), np.zeros(capacity, np.uint8))
        self.struct = ffi.new("dsparkd_walk *", self._fields())

    def _fields(self) -> dict[str, object]:
        owners, is_stuck = self._scratch
        return {
            "num_nodes": self.num_nodes,
            "num_words": self.num_words,
            "max_commits": self.max_commits,
            "vocab_size": self.vocab_size,
            "matchers": ffi.cast("void *const *", self.handles.ctypes.data),
            "indices": ffi.cast("const int32_t *", self.indices.ctypes.data),
            "roots": ffi.cast("const int32_t *", self.roots.ctypes.data),
            "num_commits": ffi.cast("const int32_t *", self.num_commits.ctypes.data),
            "commits": ffi.cast("const int64_t *", self.commits.ctypes.data),
            "grammars": ffi.cast("const int32_t *", self.grammars.ctypes.data),
            "budgets_ns": ffi.cast("const int64_t *", self.budgets_ns.ctypes.data),
            "next_token": ffi.cast("const int64_t *", self.next_token.ctypes.data),
            "next_sibling": ffi.cast("const int64_t *", self.next_sibling.ctypes.data),
            "link_stride": 0 if self.next_token.ndim == 1 else self.num_nodes,
            "drafts": ffi.cast("const int64_t *", self.drafts.ctypes.data),
            "mask": ffi.cast("int32_t *", self.mask.ctypes.data),
            "nodes": ffi.cast("uint8_t *", self.nodes.ctypes.data),
            "usable_rows": ffi.cast("int32_t *", self.usable_rows.ctypes.data),
            "num_accepted": ffi.cast("int32_t *", self.num_accepted.ctypes.data),
            "statuses": ffi.cast("int32_t *", self.statuses.ctypes.data),
            "spent_ns": ffi.cast("int64_t *", self.spent_ns.ctypes.data),
            "messages": ffi.cast("char *", self._messages.ctypes.data),
            "owners": ffi.cast("int32_t *", owners.ctypes.data),
            "is_stuck": ffi.cast("uint8_t *", is_stuck.ctypes.data),
        }

    @property
    def num_matchers(self) -> int:
        """Requests of this step."""
        return len(self.matchers)

    def begin(self, num_trees: int, *, commits_only: bool = False) -> None:
        """Start a step of `num_trees` trees, 0..capacity, with no request yet.

        commits_only: requests are told their commits, and nothing is walked; mask and nodes stay as they are.
        """
        if not 0 <= num_trees <= self.capacity:
            raise InvariantError(f"a walk of {num_trees} trees in memory for {self.capacity}")
        self.num_trees = num_trees
        self.commits_only = commits_only
        self.matchers.clear()

    def add(
        self,
        matcher: MatcherHandle | None,
        tree: int,
        root: int = 0,
        commits: Sequence[int] = (),
        grammar: int | None = None,
        budget_ns: int = 0,
    ) -> int:
        """Add a request: `commits` are the ids that the last step kept and its matcher does not know yet.

        Rows before root are left unconstrained. grammar: the number of the first request of the same grammar, None for
        a request whose grammar no earlier one has. budget_ns: processor time after which the native pool gives the
        request up, 0 for none. Returns the request's index into usable_rows, statuses and so on.
        """
        request = len(self.matchers)
        if request == self.capacity or len(commits) > self.max_commits:
            raise InvariantError(
                f"request {request} with {len(commits)} commits in memory for {self.capacity} with {self.max_commits}"
            )
        self.handles[request] = 0 if matcher is None else matcher.__chandle__()
        self.indices[request] = tree
        self.roots[request] = root
        self.num_commits[request] = len(commits)
        self.commits[request, : len(commits)] = commits
        self.grammars[request] = request if grammar is None else grammar
        self.budgets_ns[request] = budget_ns
        self.matchers.append(matcher)
        return request

    def status(self, request: int) -> WalkStatus:
        """What became of a request of the last walk."""
        return WalkStatus(int(self.statuses[request]))

    def message(self, request: int) -> str:
        """What the request's matcher raised; empty when it raised nothing."""
        return bytes(self._messages[request]).split(b"\0", 1)[0].decode(errors="replace")

    def set_message(self, request: int, text: str) -> None:
        """Note what a matcher raised; for the traversals that are written in Python."""
        raw = text.encode()[: lib.DSPARKD_MESSAGE_BYTES - 1] + b"\0"
        self._messages[request, : len(raw)] = np.frombuffer(raw, np.uint8)


class Traversal(Protocol):
    """What walks: the native pool, or one of the configured controls in dsparkd.grammar.traversal."""

    def run(self, walk: Walk, deadline_ns: int) -> None:
        """Commit, walk and give back every request of the walk; deadline_ns is CLOCK_MONOTONIC, 0 for none.

        Each request's outcome is in walk's arrays. Raises InvariantError for a batch that makes no sense.
        """

    def stuck(self) -> tuple[int, int]:
        """How many steps that were given up still run, and nanoseconds of processor time of the longest."""

    def close(self) -> None:
        """End threads; no walk may run."""


class NativeTraversal:
    """A pool of threads of one process; a forked child cannot use it. Owned by the thread that walks."""

    def __init__(self, methods: dict[str, MatcherHandle], matcher_type: int, num_threads: int) -> None:
        """Raises CapabilityError when the installed tvm-ffi is not the one that this was built against."""
        self._methods = methods  # keeps the functions alive
        fields: dict[str, object] = {"matcher_type": matcher_type}
        for name, method in methods.items():
            fields[name] = ffi.cast("void *", method.__chandle__())
        out = ffi.new("dsparkd_pool **")
        code = lib.dsparkd_traversal_open(ffi.new("dsparkd_methods *", fields), num_threads, out)
        if code == lib.DSPARKD_OTHER_VERSION:
            built, loaded = versions()
            missing = f"tvm-ffi {built[0]}.{built[1]} (found {loaded[0]}.{loaded[1]}.{loaded[2]})"
            raise CapabilityError(FEATURE, missing, REMEDY)
        if code != lib.DSPARKD_OK:
            raise CapabilityError(FEATURE, f"{num_threads} threads", "set a smaller grammar.traversal_threads")
        self._pool: object | None = out[0]

    @classmethod
    def open(cls, num_threads: int) -> NativeTraversal:
        """Find the installed XGrammar's methods and start num_threads threads; who walks only waits for them.

        Raises CapabilityError when a method is missing or takes something else than this was written for.
        """
        from xgrammar.tvm_ffi_binding import GrammarMatcher

        info = vars(GrammarMatcher)["__tvm_ffi_type_info__"]
        return cls(find_methods(info.type_key, info.methods), info.type_index, num_threads)

    def run(self, walk: Walk, deadline_ns: int) -> None:
        """See Traversal; without Python's lock."""
        if self._pool is None:
            raise InvariantError("a walk on a closed traversal")
        walk.struct.num_matchers = walk.num_matchers
        walk.struct.num_trees = walk.num_trees
        walk.struct.commits_only = int(walk.commits_only)
        walk.struct.deadline_ns = deadline_ns
        code = lib.dsparkd_traversal_walk(self._pool, walk.struct)
        if code == lib.DSPARKD_FORKED:
            raise InvariantError("a walk in a process forked from the one that opened the traversal")
        if code == lib.DSPARKD_BUSY:
            raise InvariantError("two walks at once on one traversal")
        if code == lib.DSPARKD_NO_RESOURCES:
            raise InvariantError("no thread can be started in the place of one whose grammar step does not end")
        if code != lib.DSPARKD_OK:
            raise InvariantError("a walk with an index or root out of range, or two requests for one tree")

    def stuck(self) -> tuple[int, int]:
        """See Traversal."""
        if self._pool is None:
            return 0, 0
        longest_ns = ffi.new("int64_t[1]")
        return lib.dsparkd_traversal_stuck(self._pool, longest_ns), longest_ns[0]

    def close(self) -> None:
        """See Traversal."""
        if self._pool is not None:
            lib.dsparkd_traversal_close(self._pool)
            self._pool = None


def versions() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Versions of tvm-ffi's C interface: built against, and loaded."""
    built, loaded = ffi.new("int32_t[3]"), ffi.new("int32_t[3]")
    lib.dsparkd_traversal_versions(built, loaded)
    return tuple(built[i] for i in range(3)), tuple(loaded[i] for i in range(3))


def find_methods(type_key: str, methods: Sequence[MethodInfo]) -> dict[str, MatcherHandle]:
    """Pick the methods that the traversal calls. Raises CapabilityError for a missing or another signature."""
    if type_key != _MATCHER:
        raise CapabilityError(FEATURE, f"the type {_MATCHER} (found {type_key})", REMEDY)
    found: dict[str, MatcherHandle] = {}
    by_name = {method.name: method for method in methods}
    for name, wanted in _SIGNATURES.items():
        method = by_name.get(name)
        if method is None or method.func is None:
            raise CapabilityError(FEATURE, f"GrammarMatcher.{name}", REMEDY)
        if _signature(method) != wanted:
            missing = f"GrammarMatcher.{name}{wanted[1]} -> {wanted[0]} (found {_signature(method)})"
            raise CapabilityError(FEATURE, missing, REMEDY)
        found[name] = method.func
    return found


def _signature(method: MethodInfo) -> tuple[str, tuple[str, ...]] | None:
    """(return type, parameter types) as tvm-ffi describes them; None for a method without a description."""
    try:
        arguments = json.loads((method.metadata or {})["type_schema"])["named_args"]
        (returned,) = arguments["return"]
        return returned["type"], tuple(parameter["type"] for parameter in arguments["params"])
    except (KeyError, TypeError, ValueError):
        return None


def _require(array: NDArray[np.int64] | NDArray[np.int32], dtype: type, ndims: tuple[int, ...], name: str) -> None:
    if array.dtype != dtype or array.ndim not in ndims or not array.flags.c_contiguous:
        raise InvariantError(
            f"{name} is {array.dtype} of shape {array.shape}, contiguous: {array.flags.c_contiguous}; "
            f"wanted {np.dtype(dtype)}, contiguous, with {' or '.join(map(str, ndims))} axes"
        )


def _chain(num_nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    next_token = np.arange(1, num_nodes + 1, dtype=np.int64)
    next_token[-1:] = -1
    return next_token, np.full(num_nodes, -1, np.int64)
