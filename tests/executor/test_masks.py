"""Masks: what a walk says of each row, what becomes of a row that has none, and what the sampler does with them."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsparkd.errors import InvariantError
from dsparkd.executor.masks import Held, Masker, allowed_ids
from dsparkd.executor.plan import PlanRow, RowFailure
from dsparkd.executor.sampler import Sampler, SampleRow
from dsparkd.grammar.matcher import Matcher
from dsparkd.grammar.traversal import StockTraversal, open_traversal
from dsparkd.messages import SamplingParams
from dsparkd.native.traversal import Traversal, Walk, WalkStatus

VOCAB = 300  # 256 bytes, the end, and padding that the tokenizer does not have
STOP = 256
WORDS = -(-VOCAB // 32)
GREEDY = SamplingParams(max_tokens=9, seed=1, temperature=0.0)
SEEDED = SamplingParams(max_tokens=9, seed=5, temperature=1.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def info() -> xgrammar.TokenizerInfo:
    entries = [bytes([byte]) for byte in range(256)] + [b""]
    return xgrammar.TokenizerInfo(entries, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[STOP])


def matcher_of(info: xgrammar.TokenizerInfo, ebnf: str) -> Matcher:
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return Matcher(compiler.compile_grammar(xgrammar.Grammar.from_ebnf(ebnf)))


def row(name: str, matcher: Matcher | None) -> PlanRow:
    return PlanRow(name, 1, (5,), 8, (1,), 1, GREEDY, (5,), (), matcher=matcher)


def masker_of(traversal: Traversal, rows: int = 8, width: int = 1) -> Masker:
    return Masker(traversal, rows, width, VOCAB, timeout_s=5.0)


@pytest.fixture(params=["native", "per_matcher"])
def traversal(request: pytest.FixtureRequest, info: xgrammar.TokenizerInfo) -> Traversal:
    return open_traversal(request.param, 1, info)


def ids_of(words: torch.Tensor) -> list[set[int]]:
    return [set(np.flatnonzero(allowed.numpy()).tolist()) for allowed in allowed_ids(words, VOCAB)]


def test_d14_rows_without_a_grammar_have_no_mask_and_a_step_without_one_no_walk(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-14: mask rows belong to constrained rows alone, in plan order; without any, nothing is touched."""
    masker = masker_of(traversal)
    assert masker.fill([row("a", None), row("b", None)]) is None

    masks = masker.fill(
        [row("a", None), row("b", matcher_of(info, 'root ::= "x" | "y"')), row("c", matcher_of(info, 'root ::= "z"'))]
    )
    assert masks is not None
    assert (masks.rows, masks.failures) == ({1: Held(0, 0, 1), 2: Held(1, 0, 1)}, {})
    assert ids_of(masks.words) == [{ord("x"), ord("y")}, {ord("z")}]


def test_a_walk_tells_each_grammar_what_its_row_kept_exactly_once(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-09, decisions.md 6: the queue is applied by the next walk, and by that one alone."""
    masker = masker_of(traversal)
    matcher = matcher_of(info, 'root ::= "ab" "a"')
    allowed = []
    for kept in (b"", b"a", b"b", b"a"):
        matcher.queue(tuple(kept))
        masks = masker.fill([row("x", matcher)])
        assert masks is not None
        allowed.append(ids_of(masks.words)[0])
    assert allowed == [{ord("a")}, {ord("b")}, {ord("a")}, {STOP}]
    masks = masker.fill([row("x", matcher)])
    assert masks is not None
    assert ids_of(masks.words) == [{STOP}]


def test_d20_ids_without_a_token_are_in_no_mask(info: xgrammar.TokenizerInfo, traversal: Traversal) -> None:
    """D-20: padding behind the tokenizer's ids is never allowed, however wide the grammar."""
    masks = masker_of(traversal).fill([row("x", matcher_of(info, r"root ::= [\x00-\U0010FFFF]*"))])
    assert masks is not None
    assert max(ids_of(masks.words)[0]) == STOP


def test_d11_an_id_that_the_grammar_refuses_fails_its_row_alone(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-11, D-15: its mask is all ones, never all zeros; the neighbour's is right."""
    masker = masker_of(traversal)
    wrong, right = matcher_of(info, 'root ::= "ab"'), matcher_of(info, 'root ::= "ab"')
    wrong.queue((ord("z"),))
    right.queue((ord("a"),))
    masks = masker.fill([row("wrong", wrong), row("free", None), row("right", right)])
    assert masks is not None
    assert {index: failure.code for index, failure in masks.failures.items()} == {0: "grammar_violation"}
    assert masks.words[0].tolist() == [-1] * WORDS
    assert ids_of(masks.words)[1] == {ord("b")}

    ended = matcher_of(info, 'root ::= "a"')
    ended.queue((ord("a"), STOP)[:1])
    masker.fill([row("ended", ended)])
    ended.queue((STOP,))
    masks = masker.fill([row("ended", ended)])
    assert masks is not None
    assert masks.failures[0].status == 500


@pytest.mark.parametrize(
    ("status", "usable", "expected"),
    [
        (WalkStatus.WALKED, 1, None),
        (WalkStatus.LATE, 1, None),
        (WalkStatus.LATE, 0, (504, "grammar_traversal_timeout")),
        (WalkStatus.ENDED, 0, (500, "grammar_violation")),
        (WalkStatus.COMMIT_REFUSED, 0, (500, "grammar_violation")),
        (WalkStatus.NO_TOKEN, 0, (400, "grammar_dead_end")),
        (WalkStatus.MATCHER_FAILED, 0, (500, "grammar_traversal_failed")),
        (WalkStatus.BAD_HANDLE, 0, InvariantError),
        (WalkStatus.REPEATED_HANDLE, 0, InvariantError),
        (WalkStatus.NOT_A_TREE, 0, InvariantError),
    ],
)
def test_each_status_of_a_walk_has_its_radius(
    info: xgrammar.TokenizerInfo, status: WalkStatus, usable: int, expected: object
) -> None:
    """D-17 as decisions.md 1 has it: 504 only where even the first row is missing; our own mistakes are the pair's."""

    class Scripted:
        def run(self, walk: Walk, deadline_ns: int) -> None:
            assert deadline_ns == 7 + 5_000_000_000
            walk.mask[: walk.num_trees] = -1
            walk.statuses[:2] = (WalkStatus.WALKED, status)
            walk.usable_rows[:2] = (1, usable)
            walk.set_message(1, "it is broken")

        def close(self) -> None:
            pass

    masker = Masker(Scripted(), 4, 1, VOCAB, timeout_s=5.0, clock=lambda: 7)
    rows = [row(name, matcher_of(info, 'root ::= "a"')) for name in ("a", "b")]
    if expected is InvariantError:
        with pytest.raises(InvariantError, match=status.name):
            masker.fill(rows)
        return
    masks = masker.fill(rows)
    assert masks is not None
    failure = masks.failures.get(1)
    assert (failure is None) == (expected is None)
    if failure is not None:
        assert isinstance(failure, RowFailure)
        assert (failure.status, failure.code) == expected
    assert 0 not in masks.failures


THINK_END = 7


def test_d14_each_draft_has_the_row_behind_it_and_the_anchor_is_not_told_again(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-14: mask row place * W + j is what may follow draft j; the matcher stands where it stood, so a walk repeats."""
    masker = masker_of(traversal, width=4)
    matcher = matcher_of(info, 'root ::= "abcd" | "axy"')
    matcher.queue((ord("a"),))
    for _ in range(2):
        masks = masker.fill([row("free", None), row("x", matcher)], [(1, 2, 3), tuple(b"bc")])
        assert masks is not None
        assert masks.rows == {1: Held(0, 0, 3)}
        assert ids_of(masks.words)[:3] == [{ord("b"), ord("x")}, {ord("c")}, {ord("d")}]
        assert masks.words[3].tolist() == [-1] * WORDS


@pytest.mark.parametrize(
    ("drafts", "usable"),
    [(b"zbc", 1), (b"azc", 2), (b"abz", 3), (b"abc", 4), (b"ab", 3), (b"", 1), (b"ab\xff", 3)],
)
def test_d15_rows_behind_a_refused_draft_are_ones_and_are_not_usable(
    info: xgrammar.TokenizerInfo, traversal: Traversal, drafts: bytes, usable: int
) -> None:
    """D-15, decisions.md 1: wherever a chain breaks, no row is all zeros, and none behind it may be drawn from.

    Chains shorter than the masks' width end where their drafts do.
    """
    masker = masker_of(traversal, width=4)
    masker.fill([row("long", matcher_of(info, 'root ::= "abcd"'))], [tuple(b"abc")])  # must not be walked again
    masks = masker.fill([row("x", matcher_of(info, 'root ::= "abcd"'))], [tuple(drafts)])
    assert masks is not None
    assert masks.rows[0].usable == usable
    rows = ids_of(masks.words)
    assert rows[:usable] == [{ord(letter)} for letter in "abcd"[:usable]]
    assert all(masks.words[j].tolist() == [-1] * WORDS for j in range(usable, 4))


def test_d15_the_row_behind_a_draft_that_ends_the_text_is_not_usable(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-15, decisions.md 1: the end can be accepted as the id behind the draft before it, and nothing follows it."""
    masks = masker_of(traversal, width=4).fill([row("x", matcher_of(info, 'root ::= "a"'))], [(ord("a"), STOP, STOP)])
    assert masks is not None
    assert masks.rows[0].usable == 2
    assert ids_of(masks.words)[1] == {STOP}


@pytest.mark.parametrize("place", [1, 2, 3, None])
def test_d16_a_grammar_holds_the_rows_from_the_draft_on_that_ends_the_reasoning(
    info: xgrammar.TokenizerInfo, traversal: Traversal, place: int | None
) -> None:
    """D-16: rows before it are all ones and usable, its own row is the start; without it the grammar is not walked."""
    masker = Masker(traversal, 8, 4, VOCAB, timeout_s=5.0, think_end_id=THINK_END)
    matcher = matcher_of(info, 'root ::= "abcd"')
    drafts = [50, 51, 52]
    if place is not None:
        drafts[place - 1 :] = [THINK_END, *b"abc"][: 4 - place]
    thinking = dataclasses.replace(row("x", matcher), is_thinking=True)
    masks = masker.fill([thinking], [tuple(drafts)])
    if place is None:
        assert masks is None
        return
    assert masks is not None
    assert masks.rows == {0: Held(0, place, 4)}
    assert all(masks.words[j].tolist() == [-1] * WORDS for j in range(place))
    assert ids_of(masks.words)[place:] == [{ord(letter)} for letter in "abcd"[: 4 - place]]
    # The switch becomes state through the kept ids alone: the next walk starts anew.
    masks = masker.fill([dataclasses.replace(thinking, is_thinking=False)])
    assert masks is not None
    assert ids_of(masks.words)[0] == {ord("a")}


def test_d16_a_grammar_that_fails_behind_the_reasoning_fails_nobody_yet(info: xgrammar.TokenizerInfo) -> None:
    """D-16: the draft that ends the reasoning may be refused; what is wrong shows when the grammar holds the anchor."""

    class Failing:
        def run(self, walk: Walk, deadline_ns: int) -> None:
            walk.mask[:] = -1
            walk.statuses[0] = WalkStatus.NO_TOKEN
            walk.usable_rows[0] = 0

        def close(self) -> None:
            pass

    masker = Masker(Failing(), 4, 4, VOCAB, timeout_s=5.0, think_end_id=THINK_END)
    thinking = dataclasses.replace(row("x", matcher_of(info, 'root ::= "a"')), is_thinking=True)
    masks = masker.fill([thinking], [(50, THINK_END, 51)])
    assert masks is not None
    assert masks.failures == {}
    assert masks.rows == {0: Held(0, 2, 2)}
    masks = masker.fill([dataclasses.replace(thinking, is_thinking=False)])
    assert masks is not None
    assert masks.failures[0].code == "grammar_dead_end"


def words_of(*sets: set[int]) -> torch.Tensor:
    words = np.zeros((len(sets), WORDS * 32), np.uint8)
    for place, ids in enumerate(sets):
        words[place, list(ids)] = 1
    return torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32))


def sampler() -> Sampler:
    return Sampler([True] * (STOP + 1) + [False] * (VOCAB - STOP - 1), (STOP,), CPU)


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("params", [GREEDY, SEEDED, msgspec.structs.replace(SEEDED, top_k=3, temperature=2.0)])
def test_d14_four_masked_rows_move_no_bit_of_the_twelve_others(params: SamplingParams) -> None:
    """D-14: ids and log-probabilities of unconstrained rows are those of a step without any mask."""
    logits, params = logits_of(16), msgspec.structs.replace(params, top_logprobs=2)
    masked = {2: 0, 3: 1, 9: 2, 15: 3}
    rows = [SampleRow(i, params, (5,), (), 40 + i, masked.get(i)) for i in range(16)]
    plain = [one._replace(mask_row=None) for one in rows]
    words = words_of({1, 2}, {7}, {STOP}, {100, 200, 250})
    own = sampler()
    without = own.choose(logits.clone(), plain)
    chosen = own.choose(logits.clone(), rows, words=words)
    for i in range(16):
        if i in masked:
            assert chosen.token_ids[i] in ids_of(words)[masked[i]]
        else:
            assert (chosen.token_ids[i], chosen.logprobs[i]) == (without.token_ids[i], without.logprobs[i])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_choice_is_the_best_of_what_is_allowed(temperature: float) -> None:
    """The mask comes before temperature and filters, and the noise of the ids that stay is the same."""
    logits = logits_of(1)
    params = SamplingParams(max_tokens=9, seed=5, temperature=temperature)
    allowed = {3, 40, 41, 90, 200}
    (got,) = sampler().choose(logits.clone(), [SampleRow(0, params, (5,), (), 7, 0)], words=words_of(allowed)).token_ids
    bare = torch.full_like(logits, -math.inf)
    bare[0, list(allowed)] = logits[0, list(allowed)]
    (expected,) = Sampler([True] * VOCAB, (STOP,), CPU).choose(bare, [SampleRow(0, params, (5,), (), 7)]).token_ids
    assert got == expected


def test_penalties_and_biases_let_no_forbidden_id_back_in() -> None:
    """A bias of 100 or a penalty that lifts a score must not undo the mask."""
    params = SamplingParams(
        max_tokens=9, seed=5, temperature=0.0, logit_bias=((9, 100.0),), repetition_penalty=0.1, presence_penalty=-2.0
    )
    (got,) = (
        sampler().choose(logits_of(1), [SampleRow(0, params, (9, 10), (9, 10), 7, 0)], words=words_of({4, 5})).token_ids
    )
    assert got in {4, 5}


def test_decisions_7_logprobs_are_those_before_the_mask() -> None:
    """decisions.md 7: of the model's distribution, whatever the mask left of it."""
    params = SamplingParams(max_tokens=9, seed=5, temperature=0.0, top_logprobs=1)
    logits = logits_of(1)
    choices = sampler().choose(logits.clone(), [SampleRow(0, params, (5,), (), 7, 0)], words=words_of({4}))
    told = choices.logprobs[0]
    assert told is not None
    assert choices.token_ids == (4,)
    assert told.logprob == pytest.approx(float(logits[0].log_softmax(-1)[4]), abs=1e-5)
    assert told.top[0][0] != 4


@pytest.mark.parametrize(("allowed", "expected"), [({STOP}, {STOP}), ({STOP, 8}, {8}), ({8, 9}, {9}), ({9}, {9})])
def test_d26_min_tokens_holds_back_the_end_only_where_another_id_is_allowed(
    allowed: set[int], expected: set[int]
) -> None:
    """D-26: stop ids of the client too; a row whose ids are all ends keeps them."""
    params = SamplingParams(
        max_tokens=9, seed=5, temperature=0.0, min_tokens=5, stop_ids=(8,) if STOP not in allowed else ()
    )
    (got,) = (
        sampler()
        .choose(torch.zeros(1, VOCAB), [SampleRow(0, params, (5,), (), 7, 0)], words=words_of(allowed))
        .token_ids
    )
    assert got in expected


def test_d16_reasoning_before_a_grammar_cannot_end_the_text() -> None:
    """D-16, D-24: an answer that ends there would be no sentence of its grammar."""
    logits = torch.zeros(2, VOCAB)
    logits[:, STOP] = 50.0
    rows = [SampleRow(0, GREEDY, (5,), (), 7, None, True), SampleRow(1, GREEDY, (5,), (), 7, None, False)]
    got = sampler().choose(logits, rows).token_ids
    assert got[0] != STOP
    assert got[1] == STOP


def test_a_mask_that_is_named_must_be_there() -> None:
    """A row with a grammar is never sampled without its mask."""
    with pytest.raises(InvariantError, match="no masks"):
        sampler().choose(logits_of(1), [SampleRow(0, GREEDY, (5,), (), 7, 0)])


def test_the_stock_traversal_is_one_of_the_two(info: xgrammar.TokenizerInfo) -> None:
    """`grammar.traversal` chooses; both were walked above."""
    assert isinstance(open_traversal("per_matcher", 1, info), StockTraversal)


GRAMMARS = (
    r'root ::= "{\"n\": " [0-9]{1,4} ", \"s\": \"" [^"\\\x00-\x1f]{0,5} "\"}"',
    'root ::= ("the " | "a ")* [a-z]+ ("ing" | "ed") [.!?]',
    'root ::= "(" root ")" root | ""',
    'root ::= [éß漢]{1,3} | "x"*',
    'root ::= "yes" | "no" | "yesterday"',
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), temperature=st.sampled_from([0.0, 0.7, 2.0]))
def test_d24_every_answer_is_a_prefix_of_a_sentence_and_a_finished_one_is_a_sentence(
    info: xgrammar.TokenizerInfo, traversal: Traversal, seed: int, temperature: float
) -> None:
    """D-24 without drafts: any logits, any grammars together in a step; a fresh matcher is the oracle."""
    generator = torch.Generator().manual_seed(seed)
    masker, own = masker_of(traversal), sampler()
    params = SamplingParams(max_tokens=30, seed=seed, temperature=temperature)
    matchers = [matcher_of(info, text) for text in GRAMMARS]
    outputs: list[list[int]] = [[] for _ in matchers]
    live = list(range(len(matchers)))
    for position in range(24):
        rows = [row(str(place), matchers[place]) for place in live]
        masks = masker.fill(rows)
        if masks is None:
            break
        assert masks.failures == {}
        logits = torch.randn(len(live), VOCAB, generator=generator) * 4
        samples = [SampleRow(i, params, (5,), tuple(outputs[place]), position, i) for i, place in enumerate(live)]
        for place, token in zip(live, own.choose(logits, samples, words=masks.words).token_ids, strict=True):
            outputs[place].append(token)
            matchers[place].queue((token,))
        live = [place for place in live if outputs[place][-1] != STOP]
    for text, ids in zip(GRAMMARS, outputs, strict=True):
        oracle = matcher_of(info, text)
        oracle.queue(ids)
        assert oracle.commit(), (text, bytes(ids[:-1]))
        assert oracle.is_terminated == (STOP in ids)
