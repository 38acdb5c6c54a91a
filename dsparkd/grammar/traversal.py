"""Which traversal runs: the native pool, or a configured control; each proves itself at start or the server stops.

All have one meaning (native/traversal.h); the controls are XGrammar's own calls in a Python loop.
"""

from __future__ import annotations

import inspect
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import xgrammar
from numpy.typing import NDArray
from xgrammar.tvm_ffi_binding import GrammarMatcher

from dsparkd.errors import CapabilityError, InvariantError
from dsparkd.grammar.matcher import ffi_matcher
from dsparkd.native.traversal import NativeTraversal, NodeState, Traversal, Walk, WalkStatus

Kind = Literal["native", "per_matcher", "batched"]

# A literal with every kind of value, a pattern with a long tail, and a recursion.
_PROOF_GRAMMARS = (
    r"""root ::= "{\"name\": \"" [a-zA-Z ]* "\", \"sizes\": [" [0-9]+ (", " [0-9]+)* "]}" """,
    r"""root ::= ("the " | "a ")* [a-z]+ ("ing" | "ed") [.!?]""",
    r"""root ::= "(" root ")" root | "" """,
)
_PROOF_NODES = 6
_PROOF_CHAINS = 12


def open_traversal(kind: Kind, num_threads: int, info: xgrammar.TokenizerInfo) -> Traversal:
    """Open what `grammar.traversal` names and prove it. Raises CapabilityError; nothing else is tried."""
    traversal: Traversal
    if kind == "native":
        traversal = NativeTraversal.open(num_threads)
    elif kind == "batched":
        traversal = BatchedTraversal(find_batched_call(xgrammar.BatchGrammarMatcher), num_threads)
    else:
        traversal = StockTraversal()
    try:
        prove(traversal, kind, info)
    except CapabilityError:
        traversal.close()
        raise
    return traversal


class StockTraversal:
    """`grammar.traversal = "per_matcher"`: XGrammar's scalar calls, one matcher after the other."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock

    def run(self, walk: Walk, deadline_ns: int) -> None:
        """See Traversal."""
        _require_sound(walk)
        _clear(walk)
        for request in range(walk.num_matchers):
            status = _open_request(walk, request)
            if status == WalkStatus.WALKED and not walk.commits_only:
                status = self._walk_one(walk, request, deadline_ns)
            _settle(walk, request, status)

    def _walk_one(self, walk: Walk, request: int, deadline_ns: int) -> WalkStatus:
        """Fill the rows of one request's tree from its root on."""
        tree, root = int(walk.indices[request]), int(walk.roots[request])
        order = _reachable(walk, tree, root)
        if order is None:
            return WalkStatus.NOT_A_TREE
        rows = np.zeros((len(order), walk.num_words), np.int32)  # refused and unreached rows end up as zeros
        handle = walk.matchers[request]
        assert isinstance(handle, GrammarMatcher)
        left_s = (deadline_ns - self._clock()) / 1e9 if deadline_ns else -1.0
        late = bool(deadline_ns) and left_s <= 0
        try:
            if not late:
                late = not handle.traverse_draft_tree(*_subtree(walk, tree, order), rows, left_s, None)
            if late:
                rows[:] = 0
                handle.fill_next_token_bitmask(rows, 0, False)
        except RuntimeError as error:
            walk.set_message(request, str(error))
            return WalkStatus.MATCHER_FAILED
        _keep_rows(walk, tree, order, rows)
        return _walk_outcome(walk, tree, root, late and len(order) > 1)

    def stuck(self) -> tuple[int, int]:
        """None: a step that does not end holds the caller, and its watchdog ends the rank."""
        return 0, 0

    def close(self) -> None:
        """Nothing to end."""


# matchers, next_token, next_sibling, drafts, mask, indices, root_positions, time_threshold -> one flag per matcher
BatchedCall = Callable[..., Sequence[bool]]
_BATCHED_PARAMETERS = (
    "matchers",
    "retrieve_next_token",
    "retrieve_next_sibling",
    "draft_tokens",
    "bitmask",
    "indices",
    "root_positions",
    "time_threshold",
)


def find_batched_call(batch_matcher: type) -> Callable[[int], BatchedCall]:
    """Return what makes XGrammar's own batched call for a number of threads.

    Raises CapabilityError: no released version up to 0.2.9 has it (D-02, O-11).
    """
    feature = 'grammar.traversal = "batched"'
    remedy = 'set grammar.traversal = "native"'
    method = getattr(batch_matcher, "batch_traverse_draft_tree", None)
    if method is None:
        raise CapabilityError(feature, "BatchGrammarMatcher.batch_traverse_draft_tree in xgrammar", remedy)
    found = tuple(inspect.signature(method).parameters)[1:]
    if found != _BATCHED_PARAMETERS:
        raise CapabilityError(feature, f"batch_traverse_draft_tree{_BATCHED_PARAMETERS} (found {found})", remedy)
    return lambda num_threads: getattr(batch_matcher(max_threads=num_threads), method.__name__)


class BatchedTraversal:
    """`grammar.traversal = "batched"`: XGrammar's own batched call, where the installed version has one."""

    def __init__(
        self,
        make_call: Callable[[int], BatchedCall],
        num_threads: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._call = make_call(num_threads)
        self._clock = clock

    def run(self, walk: Walk, deadline_ns: int) -> None:
        """See Traversal. Raises InvariantError for a list of flags of the wrong length (D-17)."""
        _require_sound(walk)
        _clear(walk)
        live = []
        for request in range(walk.num_matchers):
            status = _open_request(walk, request)
            if status == WalkStatus.WALKED and not walk.commits_only:
                live.append(request)
            else:
                _settle(walk, request, status)
        if walk.commits_only:
            return
        mask = walk.mask[: walk.num_trees * walk.num_nodes]
        left_s = max((deadline_ns - self._clock()) / 1e9, 1e-9) if deadline_ns else -1.0
        flags = self._call(
            [walk.matchers[request] for request in live],
            walk.next_token,
            walk.next_sibling,
            walk.drafts[: walk.num_trees],
            mask,
            [int(walk.indices[request]) for request in live],
            [int(walk.roots[request]) for request in live],
            left_s,
        )
        if len(flags) != len(live):
            raise InvariantError(f"{len(flags)} flags from a batched traversal of {len(live)} matchers")
        written = mask.reshape(walk.num_trees, walk.num_nodes, walk.num_words).copy()
        mask[:] = -1
        for request, completed in zip(live, flags, strict=True):
            tree, root = int(walk.indices[request]), int(walk.roots[request])
            order = _reachable(walk, tree, root)
            if order is None:
                _settle(walk, request, WalkStatus.NOT_A_TREE)
                continue
            rows = written[tree][order]
            if not completed:  # which of its rows are whole is not known
                rows[:] = 0
            _keep_rows(walk, tree, order, rows)
            _settle(walk, request, _walk_outcome(walk, tree, root, not completed))

    def stuck(self) -> tuple[int, int]:
        """None, as in StockTraversal."""
        return 0, 0

    def close(self) -> None:
        """The call's object owns its threads."""


def _require_sound(walk: Walk) -> None:
    """Raise InvariantError for the batches that the native call refuses."""
    count = walk.num_matchers
    indices, roots = walk.indices[:count], walk.roots[:count]
    if (
        len(set(indices.tolist())) != count
        or not ((indices >= 0) & (indices < walk.num_trees)).all()
        or not ((roots >= 0) & (roots < walk.num_nodes)).all()
    ):
        raise InvariantError("a walk with an index or root out of range, or two requests for one tree")


def _clear(walk: Walk) -> None:
    if walk.commits_only:
        return
    walk.mask[: walk.num_trees * walk.num_nodes] = -1
    walk.nodes[: walk.num_trees] = NodeState.UNSEEN


def _open_request(walk: Walk, request: int) -> WalkStatus:
    """Check a request's matcher and tell it its commits; WALKED when it may be walked."""
    walk.set_message(request, "")
    walk.num_accepted[request] = 0
    walk.spent_ns[request] = 0
    handle = walk.matchers[request]
    if not isinstance(handle, GrammarMatcher):
        return WalkStatus.BAD_HANDLE
    if (walk.handles[:request] == walk.handles[request]).any():
        return WalkStatus.REPEATED_HANDLE
    try:
        for token_id in walk.commits[request, : walk.num_commits[request]].tolist():
            if not 0 <= token_id < walk.vocab_size or not handle.accept_token(token_id, False):
                return WalkStatus.COMMIT_REFUSED
            walk.num_accepted[request] += 1
        return WalkStatus.ENDED if handle.is_terminated() else WalkStatus.WALKED
    except RuntimeError as error:
        walk.set_message(request, str(error))
        return WalkStatus.MATCHER_FAILED


def _links(walk: Walk, tree: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if walk.next_token.ndim == 1:
        return walk.next_token, walk.next_sibling
    return walk.next_token[tree], walk.next_sibling[tree]


def _reachable(walk: Walk, tree: int, root: int) -> list[int] | None:
    """Nodes of the tree below root, root first, parents before children; None when the links make no tree."""
    next_token, next_sibling = (links.tolist() for links in _links(walk, tree))
    order, seen, pending = [root], {root}, [next_token[root]]
    while pending:
        node = pending.pop()
        if node < 0:
            continue
        if node >= walk.num_nodes or node < root or node in seen:
            return None
        seen.add(node)
        order.append(node)
        pending += [next_sibling[node], next_token[node]]
    return order


def _subtree(walk: Walk, tree: int, order: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Links and drafts of the nodes in `order`, numbered as they stand there, for a call that begins at node 0."""
    place = np.full(walk.num_nodes + 1, -1, np.int64)  # the last entry is where a link of -1 points
    place[order] = np.arange(len(order))
    next_token, next_sibling = (place[links[order]] for links in _links(walk, tree))
    next_sibling[0] = -1
    return next_token, next_sibling, walk.drafts[tree][order]


def _keep_rows(walk: Walk, tree: int, order: list[int], rows: NDArray[np.int32]) -> None:
    """Write the rows that allow anything to their nodes; the others stay all ones."""
    # Bits behind the last id mean nothing and may be set.
    usable = rows[:, :-1].any(axis=1) | (rows[:, -1] & _last_bits(walk.vocab_size) != 0)
    nodes = np.array(order)[usable]
    walk.mask[tree * walk.num_nodes + nodes] = rows[usable]
    walk.nodes[tree, nodes] = NodeState.USABLE


def _last_bits(vocab_size: int) -> np.int32:
    """The bits of a row's last word that belong to ids."""
    return np.uint32(0xFFFFFFFF >> (31 - (vocab_size - 1) % 32)).view(np.int32)


def _walk_outcome(walk: Walk, tree: int, root: int, late: bool) -> WalkStatus:
    if walk.nodes[tree, root] != NodeState.USABLE:
        return WalkStatus.LATE if late else WalkStatus.NO_TOKEN
    return WalkStatus.LATE if late else WalkStatus.WALKED


def _settle(walk: Walk, request: int, status: WalkStatus) -> None:
    """Write a request's status and usable rows."""
    walk.statuses[request] = status
    if walk.commits_only:
        walk.usable_rows[request] = 0
        return
    tree, root = int(walk.indices[request]), int(walk.roots[request])
    if status in (WalkStatus.WALKED, WalkStatus.LATE):
        walk.nodes[tree, :root] = NodeState.USABLE
    usable = walk.nodes[tree] == NodeState.USABLE
    walk.usable_rows[request] = walk.num_nodes if usable.all() else int(np.argmin(usable))


def prove(traversal: Traversal, kind: Kind, info: xgrammar.TokenizerInfo) -> None:
    """Raise CapabilityError unless the traversal gives what XGrammar's scalar calls give, on three grammars (D-01).

    Chains of drafts of a fixed seed, most of them with a refused id somewhere; commits included.
    """
    draw = random.Random(0)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compiled = [compiler.compile_grammar(text) for text in _PROOF_GRAMMARS]
    words = -(-info.vocab_size // 32)
    drafts = np.zeros((_PROOF_CHAINS, _PROOF_NODES), np.int64)
    mask = np.zeros((_PROOF_CHAINS * _PROOF_NODES, words), np.int32)
    walk = Walk(drafts, mask, info.vocab_size, _PROOF_NODES)
    walk.begin(_PROOF_CHAINS)
    matchers, expected = [], []
    for chain in range(_PROOF_CHAINS):
        grammar = compiled[chain % len(compiled)]
        ids = _draw_chain(xgrammar.GrammarMatcher(grammar), info.vocab_size, draw)
        committed = draw.randrange(3)
        drafts[chain, 1:] = ids[committed : committed + _PROOF_NODES - 1]
        expected.append(_scalar_rows(xgrammar.GrammarMatcher(grammar), ids[:committed], drafts[chain], words))
        matchers.append(xgrammar.GrammarMatcher(grammar))
        walk.add(ffi_matcher(matchers[-1]), chain, commits=ids[:committed])
    traversal.run(walk, 0)
    for chain, rows in enumerate(expected):
        got = mask[chain * _PROOF_NODES : (chain + 1) * _PROOF_NODES]
        usable = int(walk.usable_rows[chain])
        if usable != len(rows) or not (got[:usable] == rows).all() or not (got[usable:] == -1).all():
            raise CapabilityError(
                f'grammar.traversal = "{kind}"',
                f"the masks of XGrammar's own calls (chain {chain}: {usable} rows of {len(rows)})",
                "reinstall dsparkd with the wheels that it names",
            )


def _draw_chain(matcher: xgrammar.GrammarMatcher, vocab_size: int, draw: random.Random) -> list[int]:
    """Ids for commits and drafts: the first three are allowed, a later one is refused now and then."""
    row = np.zeros((1, -(-vocab_size // 32)), np.int32)
    ids: list[int] = []
    refused = draw.randrange(3, 2 * _PROOF_NODES)
    for place in range(_PROOF_NODES + 3):
        if place == refused or (ids and matcher.is_terminated()):
            break
        ffi_matcher(matcher).fill_next_token_bitmask(row, 0, False)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size])
        stops = set(matcher.stop_token_ids)
        choices = (
            [token_id for token_id in allowed.tolist() if token_id not in stops] if place < 3 else allowed.tolist()
        )
        if not choices:
            break
        ids.append(draw.choice(choices))
        if not matcher.accept_token(ids[-1]):
            break
    return [*ids, *itertools.repeat(draw.randrange(vocab_size), 2 * _PROOF_NODES - len(ids))]


def _scalar_rows(
    matcher: xgrammar.GrammarMatcher, commits: list[int], drafts: NDArray[np.int64], words: int
) -> NDArray[np.int32]:
    """The usable rows of a chain by the stock call: up to the first that is all zeros."""
    for token_id in commits:
        matcher.accept_token(token_id)
    rows = np.zeros((len(drafts), words), np.int32)
    next_token = np.arange(1, len(drafts) + 1)
    next_token[-1] = -1
    next_sibling = np.full(len(drafts), -1)
    ffi_matcher(matcher).traverse_draft_tree(next_token, next_sibling, drafts.copy(), rows, -1.0, None)
    row_is_empty = ~rows.any(axis=1)
    return rows[: int(np.argmax(row_is_empty)) if row_is_empty.any() else len(rows)]
