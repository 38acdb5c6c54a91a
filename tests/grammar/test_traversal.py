"""Every traversal against XGrammar's scalar calls, and the proof that each gives at start."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import xgrammar
from numpy.typing import NDArray

from dsparkd.errors import CapabilityError, InvariantError
from dsparkd.grammar.matcher import ffi_matcher
from dsparkd.grammar.traversal import BatchedTraversal, StockTraversal, find_batched_call, open_traversal, prove
from dsparkd.native.traversal import MatcherHandle, NativeTraversal, NodeState, Traversal, Walk, WalkStatus
from tests.grammar.grammars import (
    PADDED_SIZE,
    STOP_ID,
    Case,
    allowed_ids,
    compile_all,
    draw_case,
    scalar_rows,
    tokenizer_info,
)

NODES = 6
WORDS = -(-PADDED_SIZE // 32)


class FakeBatch:
    """The batched call of D-02, over XGrammar's scalar ones: what a version that has it would bring."""

    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads

    def batch_traverse_draft_tree(
        self,
        matchers: Sequence[MatcherHandle],
        retrieve_next_token: NDArray[np.int64],
        retrieve_next_sibling: NDArray[np.int64],
        draft_tokens: NDArray[np.int64],
        bitmask: NDArray[np.int32],
        indices: Sequence[int],
        root_positions: Sequence[int],
        time_threshold: float,
    ) -> list[bool]:
        """Walk each matcher's tree as the control does; rows that are refused come back as zeros."""
        num_nodes = draft_tokens.shape[1]
        walk = Walk(
            draft_tokens.copy(),
            np.zeros((len(draft_tokens) * num_nodes, bitmask.shape[1]), np.int32),
            PADDED_SIZE if bitmask.shape[1] == WORDS else bitmask.shape[1] * 32,
            0,
            (retrieve_next_token, retrieve_next_sibling),
        )
        walk.begin(len(draft_tokens))
        for matcher, tree, root in zip(matchers, indices, root_positions, strict=True):
            walk.add(matcher, tree, root)
        StockTraversal().run(walk, 0)
        bitmask[:] = walk.mask
        bitmask[walk.nodes.reshape(-1) != NodeState.USABLE] = 0
        return [True] * len(matchers)


@pytest.fixture(scope="module")
def info() -> xgrammar.TokenizerInfo:
    return tokenizer_info()


@pytest.fixture(scope="module")
def grammars(info: xgrammar.TokenizerInfo) -> list[xgrammar.CompiledGrammar]:
    return compile_all(info)


def open_one(name: str) -> Traversal:
    match name:
        case "native, 1 thread":
            return NativeTraversal.open(1)
        case "native, 3 threads":
            return NativeTraversal.open(3)
        case "batched":
            return BatchedTraversal(find_batched_call(FakeBatch), 1)
        case _:
            return StockTraversal()


OWN = ["native, 1 thread", "native, 3 threads", "per_matcher"]


@pytest.fixture(params=[*OWN, "batched"])
def traversal(request: pytest.FixtureRequest) -> Iterator[Traversal]:
    opened = open_one(request.param)
    yield opened
    opened.close()


@pytest.fixture(params=OWN)
def own_traversal(request: pytest.FixtureRequest) -> Iterator[Traversal]:
    """Those that call the matchers themselves, and so know what became of each."""
    opened = open_one(request.param)
    yield opened
    opened.close()


def make_walk(num_trees: int, num_nodes: int = NODES, max_commits: int = 4) -> Walk:
    """Memory full of what an earlier step left behind."""
    mask = np.full((num_trees * num_nodes, WORDS), 0x5A5A5A5A, np.int32)
    walk = Walk(np.zeros((num_trees, num_nodes), np.int64), mask, PADDED_SIZE, max_commits)
    walk.begin(num_trees)
    return walk


def run_cases(traversal: Traversal, cases: list[Case]) -> tuple[Walk, list[xgrammar.GrammarMatcher]]:
    walk = make_walk(len(cases))
    matchers = [case.matcher() for case in cases]
    for tree, (case, matcher) in enumerate(zip(cases, matchers, strict=True)):
        walk.drafts[tree] = case.drafts
        walk.add(ffi_matcher(matcher), tree, commits=case.commits)
    traversal.run(walk, 0)
    return walk, matchers


def test_masks_equal_the_scalar_calls_bit_by_bit(
    traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]
) -> None:
    """D-02, D-14, D-15, O-12: usable rows are XGrammar's own, all others are all ones, never zero."""
    draw = random.Random(1)
    lengths = set()
    for _ in range(12):
        cases = [draw_case(draw.choice(grammars), NODES, draw) for _ in range(20)]

        walk, _ = run_cases(traversal, cases)

        for tree, case in enumerate(cases):
            expected = scalar_rows(case)
            got = walk.mask[tree * NODES : (tree + 1) * NODES]
            usable = int(walk.usable_rows[tree])
            assert usable == len(expected)
            assert np.array_equal(got[:usable], expected)
            assert (got[usable:] == -1).all()
            assert got.any(axis=1).all()
            assert walk.num_accepted[tree] == len(case.commits)
            assert walk.status(tree) == (WalkStatus.WALKED if len(expected) else WalkStatus.ENDED)
            lengths.add(usable)
    assert lengths == set(range(NODES + 1))


def test_matchers_end_where_their_commits_put_them(
    traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]
) -> None:
    """D-02: drafts leave no trace; decisions 6: commits are told exactly once."""
    draw = random.Random(2)
    cases = [draw_case(draw.choice(grammars), NODES, draw) for _ in range(40)]

    _, matchers = run_cases(traversal, cases)

    for case, matcher in zip(cases, matchers, strict=True):
        expected = case.matcher()
        for token_id in case.commits:
            expected.accept_token(token_id)
        assert matcher._debug_print_internal_state() == expected._debug_print_internal_state()


def random_tree(num_nodes: int, draw: random.Random) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """Links of a random tree whose parents stand before their children, and the parents."""
    parents = [-1] + [draw.randrange(node) for node in range(1, num_nodes)]
    next_token, next_sibling = np.full(num_nodes, -1, np.int64), np.full(num_nodes, -1, np.int64)
    for node in range(num_nodes - 1, 0, -1):
        next_sibling[node] = next_token[parents[node]]
        next_token[parents[node]] = node
    return next_token, next_sibling, parents


def test_trees_with_roots_and_unnamed_trees(traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]) -> None:
    """D-02: each node's row is what the path from the root to it allows; what nobody names is all ones."""
    draw = random.Random(3)
    num_nodes, num_trees = 9, 6
    seen = {True: 0, False: 0}
    for _ in range(25):
        links = [random_tree(num_nodes, draw) for _ in range(num_trees)]
        walk = Walk(
            np.zeros((num_trees, num_nodes), np.int64),
            np.full((num_trees * num_nodes, WORDS), 7, np.int32),
            PADDED_SIZE,
            0,
            (np.stack([link[0] for link in links]), np.stack([link[1] for link in links])),
        )
        walk.begin(num_trees)
        named = draw.sample(range(num_trees), 4)
        cases = {}
        for tree in named:
            case = draw_case(draw.choice(grammars), num_nodes, draw)
            matcher = case.matcher()
            for node in range(num_nodes):  # siblings that the grammar likes make deeper trees
                allowed = allowed_ids(matcher, PADDED_SIZE) if not matcher.is_terminated() else [0]
                walk.drafts[tree, node] = draw.choice(allowed) if draw.random() < 0.8 else draw.randrange(PADDED_SIZE)
            root = draw.choice([0, 0, 1, 2])
            cases[tree] = (case, root)
            walk.add(ffi_matcher(matcher), tree, root)

        traversal.run(walk, 0)

        for tree in range(num_trees):
            rows = walk.mask[tree * num_nodes : (tree + 1) * num_nodes]
            if tree not in cases:
                assert (rows == -1).all()
                continue
            case, root = cases[tree]
            for node in range(num_nodes):
                expected = path_row(case, links[tree][2], walk.drafts[tree], root, node)
                usable = walk.nodes[tree, node] == NodeState.USABLE
                if node < root:
                    assert (rows[node] == -1).all()
                    continue
                assert usable == (expected is not None)
                assert (rows[node] == (-1 if expected is None else expected)).all()
                seen[bool(usable) and node != root] += 1
    assert min(seen.values()) > 50, "the trees are too easy or too hard to show anything"


def path_row(
    case: Case, parents: list[int], drafts: NDArray[np.int64], root: int, node: int
) -> NDArray[np.int32] | None:
    """The row of a node by accepting the path from the root to it; None where it is refused or not below the root."""
    path: list[int] = []
    while node != root:
        if node < root:
            return None
        path.insert(0, int(drafts[node]))
        node = parents[node]
    matcher = case.matcher()
    if matcher.is_terminated():
        return None
    for token_id in path:
        if token_id not in allowed_ids(matcher, PADDED_SIZE) or not matcher.accept_token(token_id):
            return None
        if matcher.is_terminated():
            return None
    row = np.zeros((1, WORDS), np.int32)
    ffi_matcher(matcher).fill_next_token_bitmask(row, 0, False)
    return row[0]


def test_a_root_inside_a_chain_leaves_the_rows_before_it_free(
    traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]
) -> None:
    """D-16: while a row thinks, what stands before the end of thinking is free, and usable for acceptance."""
    matcher = xgrammar.GrammarMatcher(grammars[3])
    walk = make_walk(1)
    walk.drafts[0] = [5, 6, 7, ord("("), ord(")"), ord("(")]
    walk.add(ffi_matcher(matcher), 0, root=2)

    traversal.run(walk, 0)

    assert walk.usable_rows[0] == NODES
    assert (walk.mask[:2] == -1).all()
    assert np.array_equal(walk.mask[2], scalar_rows(Case(grammars[3], [], [], [0]))[0])
    assert np.array_equal(walk.mask[2:], scalar_rows(Case(grammars[3], [], [], [0, *walk.drafts[0, 3:].tolist()])))


def test_bad_commits_end_their_request_alone(traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]) -> None:
    """D-11: a kept id that the grammar refuses is reported with how far it came; its neighbours are right."""
    walk = make_walk(4)
    commits = ([ord("("), ord("x")], [ord("("), ord(")"), STOP_ID, ord("(")], [1 << 32 | ord("(")], [ord("(")])
    matchers = [xgrammar.GrammarMatcher(grammars[3]) for _ in commits]
    for tree, (matcher, ids) in enumerate(zip(matchers, commits, strict=True)):
        walk.add(ffi_matcher(matcher), tree, commits=ids)

    traversal.run(walk, 0)

    refused = WalkStatus.COMMIT_REFUSED
    assert [walk.status(i) for i in range(4)] == [refused, refused, refused, WalkStatus.WALKED]
    assert walk.num_accepted[:4].tolist() == [1, 3, 0, 1]
    assert walk.usable_rows[:4].tolist() == [0, 0, 0, 1]
    assert (walk.mask[: 3 * NODES] == -1).all()


def test_odd_handles_get_their_own_status(own_traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]) -> None:
    """Null, another type of object, the same matcher twice, another vocabulary: neighbours are not touched."""
    other = xgrammar.TokenizerInfo([b"a", b"b", b""], vocab_size=3, stop_token_ids=[2])
    foreign = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(other, max_threads=1).compile_regex("a*b"))
    good = xgrammar.GrammarMatcher(grammars[0])
    again = xgrammar.GrammarMatcher(grammars[3])
    handles = [None, grammars[0]._handle, ffi_matcher(again), ffi_matcher(foreign), ffi_matcher(again), good._handle]
    walk = make_walk(len(handles))
    for tree, handle in enumerate(handles):
        walk.add(handle, tree)

    own_traversal.run(walk, 0)

    assert [walk.status(request) for request in range(len(handles))] == [
        WalkStatus.BAD_HANDLE,
        WalkStatus.BAD_HANDLE,
        WalkStatus.WALKED,
        WalkStatus.MATCHER_FAILED,
        WalkStatus.REPEATED_HANDLE,
        WalkStatus.WALKED,
    ]
    assert walk.message(3)
    assert walk.message(5) == ""
    assert walk.usable_rows[: len(handles)].tolist() == [0, 0, 1, 0, 0, 1]
    assert np.array_equal(walk.mask[5 * NODES], scalar_rows(Case(grammars[0], [], [], [0]))[0])


def test_nothing_of_an_earlier_step_is_reported_again(
    own_traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]
) -> None:
    """The memory is used for every step; a message or count of another request would be believed."""
    other = xgrammar.TokenizerInfo([b"a", b"b", b""], vocab_size=3, stop_token_ids=[2])
    foreign = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(other, max_threads=1).compile_regex("a*b"))
    good = xgrammar.GrammarMatcher(grammars[3])
    walk = make_walk(1)
    walk.add(ffi_matcher(good), 0, commits=[ord("("), ord(")")])
    own_traversal.run(walk, 0)
    assert walk.num_accepted[0] == 2
    walk.begin(1)
    walk.add(ffi_matcher(foreign), 0)
    own_traversal.run(walk, 0)
    assert walk.message(0)
    assert walk.num_accepted[0] == 0
    walk.begin(1)
    walk.add(ffi_matcher(good), 0)
    own_traversal.run(walk, 0)
    assert walk.message(0) == ""
    assert walk.status(0) == WalkStatus.WALKED


def test_a_deadline_that_is_over_shortens_chains_to_their_root(
    own_traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]
) -> None:
    """decisions 1: a late walk still gives every request the row that it needs to choose one id."""
    walk = make_walk(3)
    matchers = [xgrammar.GrammarMatcher(grammars[3]) for _ in range(3)]
    for tree, matcher in enumerate(matchers):
        walk.drafts[tree] = [0] + [ord("(")] * 5
        walk.add(ffi_matcher(matcher), tree, commits=[ord("(")])

    own_traversal.run(walk, 1)

    assert {walk.status(request) for request in range(3)} == {WalkStatus.LATE}
    assert walk.usable_rows[:3].tolist() == [1, 1, 1]
    expected = scalar_rows(Case(grammars[3], [], [ord("(")], [0]))
    assert all(np.array_equal(walk.mask[tree * NODES], expected[0]) for tree in range(3))
    assert (walk.mask.reshape(3, NODES, WORDS)[:, 1:] == -1).all()
    walk.begin(3)
    for tree, matcher in enumerate(matchers):
        walk.add(ffi_matcher(matcher), tree)
    own_traversal.run(walk, time.monotonic_ns() + 60 * 10**9)
    assert walk.usable_rows[:3].tolist() == [NODES] * 3, "the late walk left its matchers where they were"


def test_a_late_walk_from_inside_a_chain_still_has_the_row_of_its_root(
    own_traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]
) -> None:
    """D-16, decisions 1: rows before the root are free and usable, the root has its row, nothing behind it has."""
    walk = make_walk(2)
    matchers = [xgrammar.GrammarMatcher(grammars[3]) for _ in range(2)]
    for tree, (root, matcher) in enumerate(zip((2, NODES - 1), matchers, strict=True)):
        walk.drafts[tree] = [5] * (root + 1) + [ord("(")] * (NODES - root - 1)
        walk.add(ffi_matcher(matcher), tree, root=root)

    own_traversal.run(walk, 1)

    # The root of the second is the chain's last node: nothing of it could come late.
    assert [walk.status(request) for request in range(2)] == [WalkStatus.LATE, WalkStatus.WALKED]
    assert walk.usable_rows[:2].tolist() == [3, NODES]
    start = scalar_rows(Case(grammars[3], [], [], [0]))[0]
    rows = walk.mask.reshape(2, NODES, WORDS)
    assert (rows[0, :2] == -1).all()
    assert np.array_equal(rows[0, 2], start)
    assert (rows[0, 3:] == -1).all()
    assert (rows[1, :-1] == -1).all()
    assert np.array_equal(rows[1, -1], start)
    walk.begin(2)
    for tree, matcher in enumerate(matchers):
        walk.drafts[tree] = [5, ord("("), ord(")"), 0, 0, 0]
        walk.add(ffi_matcher(matcher), tree)
    own_traversal.run(walk, 0)
    assert all(np.array_equal(walk.mask[tree * NODES], start) for tree in range(2)), "the matchers stand at the start"


def test_a_refused_commit_before_a_walk_from_inside_a_chain_leaves_no_row_to_use(
    traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]
) -> None:
    """D-11, D-15, D-16: no row of the chain is told apart, none is zero; the neighbour's root has its row."""
    walk = make_walk(2)
    matchers = [xgrammar.GrammarMatcher(grammars[3]) for _ in range(2)]
    for tree, (matcher, kept) in enumerate(zip(matchers, ("x", "("), strict=True)):
        walk.drafts[tree] = [5, 6, 7, ord(")"), 0, 0]
        walk.add(ffi_matcher(matcher), tree, root=2, commits=[ord(kept)])

    traversal.run(walk, 0)

    assert [walk.status(request) for request in range(2)] == [WalkStatus.COMMIT_REFUSED, WalkStatus.WALKED]
    assert walk.num_accepted[:2].tolist() == [0, 1]
    assert walk.usable_rows[0] == 0
    assert (walk.mask[:NODES] == -1).all()
    expected = scalar_rows(Case(grammars[3], [], [ord("(")], [0, ord(")"), 0, 0]))
    assert walk.usable_rows[1] == 2 + len(expected)
    assert np.array_equal(walk.mask[NODES + 2 : NODES + 2 + len(expected)], expected)
    assert (walk.mask[NODES : NODES + 2] == -1).all()


def test_a_grammar_that_no_token_can_follow_is_reported(own_traversal: Traversal) -> None:
    """O-12: where every token is forbidden the row is not handed on as zeros: the request ends, or the chain does."""
    info = xgrammar.TokenizerInfo([b"a", b"", b""], vocab_size=3, stop_token_ids=[2])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    blank = '{"type": "token", "token": 1}'
    behind = f'{{"type": "sequence", "elements": [{{"type": "const_string", "value": "a"}}, {blank}]}}'
    walk = Walk(np.zeros((2, 3), np.int64), np.zeros((6, 1), np.int32), 3, 1)
    walk.begin(2)
    matchers = [
        xgrammar.GrammarMatcher(compiler.compile_structural_tag(f'{{"type": "structural_tag", "format": {format}}}'))
        for format in (blank, behind)
    ]
    for tree, matcher in enumerate(matchers):
        walk.add(ffi_matcher(matcher), tree)

    own_traversal.run(walk, 0)

    assert [walk.status(request) for request in range(2)] == [WalkStatus.NO_TOKEN, WalkStatus.WALKED]
    assert walk.usable_rows[:2].tolist() == [0, 1]
    assert (walk.mask[:, 0] & 0b111).tolist() == [0b111] * 3 + [0b001] + [0b111] * 2


def test_batches_that_make_no_sense_are_bugs(traversal: Traversal, grammars: list[xgrammar.CompiledGrammar]) -> None:
    """D-02: repeated or outer indices and roots outside of the tree raise, and no matcher is told anything."""
    matchers = [xgrammar.GrammarMatcher(grammars[3]) for _ in range(2)]
    for indices, roots in (
        ((0, 0), (0, 0)),
        ((0, 2), (0, 0)),
        ((0, -1), (0, 0)),
        ((0, 1), (0, NODES)),
        ((0, 1), (-1, 0)),
    ):
        walk = make_walk(2)
        for matcher, tree, root in zip(matchers, indices, roots, strict=True):
            walk.add(ffi_matcher(matcher), tree, root, commits=[ord("(")])
        with pytest.raises(InvariantError):
            traversal.run(walk, 0)
    assert all(ord(")") not in (ids := allowed_ids(matcher, PADDED_SIZE)) and STOP_ID in ids for matcher in matchers)


@pytest.mark.parametrize(
    ("next_token", "next_sibling", "root"),
    [
        ([1, 2, 0], [-1, -1, -1], 0),
        ([1, -1, -1], [-1, 1, -1], 0),
        ([1, 3, -1], [-1, -1, -1], 0),
        ([1, 2, -1], [-1, 2, -1], 0),
        ([1, 0, -1], [-1, -1, -1], 1),
    ],
    ids=["back to the root", "its own sibling", "out of the tree", "reached twice", "before the root"],
)
def test_links_that_make_no_tree_end_their_request(
    own_traversal: Traversal,
    grammars: list[xgrammar.CompiledGrammar],
    next_token: list[int],
    next_sibling: list[int],
    root: int,
) -> None:
    """A cycle must not walk for ever, a link not into another tree, and the matcher is given back unharmed."""
    links = (np.array(next_token, np.int64), np.array(next_sibling, np.int64))
    walk = Walk(np.full((2, 3), ord("("), np.int64), np.zeros((6, WORDS), np.int32), PADDED_SIZE, 1, links)
    walk.begin(2)
    matcher = xgrammar.GrammarMatcher(grammars[3])
    before = matcher._debug_print_internal_state()
    walk.add(ffi_matcher(matcher), 0, root)

    own_traversal.run(walk, 0)

    assert walk.status(0) == WalkStatus.NOT_A_TREE
    assert walk.usable_rows[0] == 0
    assert (walk.mask == -1).all()
    assert matcher._debug_print_internal_state() == before


class Skewed:
    """A traversal that works and then gets one thing wrong."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._inner = StockTraversal()

    def run(self, walk: Walk, deadline_ns: int) -> None:
        self._inner.run(walk, deadline_ns)
        last = walk.num_trees - 1
        if self._fault == "one bit":
            walk.mask[last * walk.num_nodes, 3] ^= 1 << 7
        elif self._fault == "one row less":
            walk.usable_rows[last] -= 1
        elif self._fault == "a zero row":
            walk.mask[(last + 1) * walk.num_nodes - 1] = 0

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("fault", ["one bit", "one row less", "a zero row"])
def test_a_traversal_that_differs_in_anything_does_not_start(info: xgrammar.TokenizerInfo, fault: str) -> None:
    """D-01: the start names the key; a sound one passes the same proof."""
    prove(Skewed("none"), "native", info)
    with pytest.raises(CapabilityError, match=r"grammar\.traversal"):
        prove(Skewed(fault), "native", info)


@pytest.mark.parametrize("kind", ["native", "per_matcher"])
def test_what_is_configured_opens_with_its_proof(info: xgrammar.TokenizerInfo, kind: str) -> None:
    """D-01, O-11: released wheels are enough for both."""
    opened = open_traversal("native" if kind == "native" else "per_matcher", 2, info)
    assert isinstance(opened, NativeTraversal if kind == "native" else StockTraversal)
    opened.close()


def test_the_batched_call_that_no_release_has_is_refused_at_start(info: xgrammar.TokenizerInfo) -> None:
    """D-01, O-11: without the call, or with another signature, the start fails and nothing else is tried."""
    with pytest.raises(CapabilityError, match="batch_traverse_draft_tree"):
        open_traversal("batched", 1, info)

    class Other:
        def batch_traverse_draft_tree(self, matchers: list[object], drafts: list[int]) -> None:
            """Takes something else."""

    with pytest.raises(CapabilityError, match="batch_traverse_draft_tree"):
        find_batched_call(Other)
    prove(BatchedTraversal(find_batched_call(FakeBatch), 1), "batched", info)


def test_a_batched_call_may_leave_rows_unfinished_but_none_out(grammars: list[xgrammar.CompiledGrammar]) -> None:
    """D-17: a false flag takes its own request's rows away; a list of another length is a bug."""

    class Unfinished(FakeBatch):
        def batch_traverse_draft_tree(self, *arguments: object) -> list[bool]:  # type: ignore[override]
            flags = super().batch_traverse_draft_tree(*arguments)  # type: ignore[arg-type]
            return [False, *flags[1:]]

    walk = make_walk(3)
    matchers = [xgrammar.GrammarMatcher(grammars[3]) for _ in range(3)]
    for tree, matcher in enumerate(matchers):
        walk.add(ffi_matcher(matcher), tree)

    BatchedTraversal(lambda threads: Unfinished(threads).batch_traverse_draft_tree, 1).run(walk, 0)

    assert [walk.status(request) for request in range(3)] == [WalkStatus.LATE, WalkStatus.WALKED, WalkStatus.WALKED]
    assert walk.usable_rows[:3].tolist() == [0, 1, 1]
    walk.begin(3)
    for tree, matcher in enumerate(matchers):
        walk.add(ffi_matcher(matcher), tree)
    with pytest.raises(InvariantError, match="flags"):
        BatchedTraversal(lambda _: lambda *_: [True], 1).run(walk, 0)
