"""Where an output ends: the earliest event, and nothing behind it exists."""

from __future__ import annotations

import pytest

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import Plan, PlanRow, RowOutput, SnapshotSave, StepKind, StepOutput
from dsparkd.messages import TokenLogprob
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory, Request, State
from dsparkd.scheduler.results import Committer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Bench:
    """One request in decode, ready to be given any run of ids."""

    def __init__(self, lab, max_context: int = 64, prompt: object = (2, 3, 4), **sampling: object) -> None:
        self.queue = RequestQueue()
        self.memory = Memory(num_pages=32, num_slots=3, num_snapshots=4, page_tokens=lab.PAGE)
        device = lab.FakeDevice()
        self.committer = Committer(
            self.queue, self.memory, lab.Texts(), frozenset({lab.EOS}), lab.THINK_END, device.commit_grammars
        )
        message = lab.request("x", prompt, **{"max_tokens": 50, **sampling})
        self.request = Request(message, arrival=1, delivered_ns=1, max_context_tokens=max_context)
        self.queue.add([self.request])
        assert self.memory.admit(self.request, 0)
        self.queue.start(self.request)

    def give(self, *ids: int, logprobs: bool = False, save: SnapshotSave | None = None):
        """Commit one step that accepted these ids, and return the delta."""
        request = self.request
        start = request.num_computed
        row = PlanRow(
            request_id="x",
            slot=request.slot,
            input_ids=request.ids[start:],
            start=start,
            page_table=tuple(request.pages),
            num_logits=1,
            sampling=request.message.sampling,
            prompt_ids=request.message.prompt_ids,
            output_ids=request.output_ids,
        )
        told = tuple(TokenLogprob(token, -1.0) for token in ids) if logprobs else None
        plan = Plan(StepKind.DECODE, (row,), snapshot_saves=(save,) if save is not None else ())
        self.committed = self.committer.commit(plan, StepOutput((RowOutput(ids, told),)))
        return self.committed.deltas[0]


def letters(text: str) -> list[int]:
    """Ids whose text is this word; `b` is EOS and hidden."""
    return [LETTERS.index(letter) for letter in text]


def test_a_stop_before_the_length_cap_wins(lab):
    """R21: [10, 11, STOP, 20, 21, 22] under a cap of 5 is "stop" at 3, not "length" at 5."""
    bench = Bench(lab, max_tokens=5, stop_ids=(12,))
    delta = bench.give(10, 11, 12, 20, 21, 22)

    assert delta.token_ids == (10, 11, 12)
    assert (delta.finish.reason, delta.finish.matched, delta.finish.output_tokens) == ("stop", 12, 3)


def test_the_length_cap_before_a_stop_wins(lab):
    """R21: ids behind the cap exist nowhere, a stop among them does not count."""
    delta = Bench(lab, max_tokens=2, stop_ids=(12,)).give(10, 11, 12)
    assert delta.token_ids == (10, 11)
    assert (delta.finish.reason, delta.finish.matched) == ("length", None)


def test_a_stop_at_the_cap_is_a_stop(lab):
    """R21: both at one id: the client asked for the stop."""
    delta = Bench(lab, max_tokens=3, stop_ids=(12,)).give(10, 11, 12, 13)
    assert (delta.token_ids, delta.finish.reason) == ((10, 11, 12), "stop")


@pytest.mark.parametrize("position", range(6))
def test_a_stop_id_cuts_a_run_at_any_place(lab, position):
    """U-07: ids, log-probabilities and usage end at the same id."""
    run = [20] * 6
    run[position] = lab.EOS
    delta = Bench(lab, top_logprobs=0).give(*run, logprobs=True)
    assert len(delta.token_ids) == len(delta.logprobs) == delta.finish.output_tokens == position + 1


def test_a_stop_string_over_two_tokens_ends_the_output(lab):
    """decisions.md 2: matched on the rank, on bytes; the text is cut before it, the ids are kept up to its end."""
    bench = Bench(lab, stop_strings=("lo",))
    assert bench.give(*letters("hel")).finish is None
    delta = bench.give(*letters("oxx"))
    assert delta.token_ids == tuple(letters("o"))
    assert (delta.finish.reason, delta.finish.matched, delta.finish.cut_bytes) == ("stop", "lo", 2)


def test_include_stop_leaves_the_stop_in_the_text(lab):
    """messages.py: only what follows the stop string inside its last token is cut."""
    delta = Bench(lab, stop_strings=("lo",), include_stop=True).give(*letters("hello"))
    assert (delta.finish.matched, delta.finish.cut_bytes) == ("lo", 0)
    delta = Bench(lab, stop_ids=(14,), include_stop=True).give(*letters("hello"))
    assert (delta.finish.matched, delta.finish.cut_bytes) == (14, 0)


def test_a_visible_stop_id_is_not_shown(lab):
    """Its text is cut like a stop string's; a hidden one has none."""
    assert Bench(lab, stop_ids=(14,)).give(*letters("hello")).finish.cut_bytes == 1
    assert Bench(lab).give(*letters("cb")).finish.cut_bytes == 0


def test_hidden_tokens_are_not_in_the_text_that_stops_are_found_in(lab):
    """skip_special_tokens: the client sees "ac", so the stop string "ac" is there, and "bc" is not."""
    bench = Bench(lab, stop_strings=("bc", "ac"), ignore_eos=True)
    delta = bench.give(*letters("abc"))
    assert delta.finish.matched == "ac"
    assert delta.finish.cut_bytes == 2


def test_ignore_eos_goes_on_but_an_explicit_stop_id_does_not(lab):
    """D-26: ignore_eos concerns the model's own end only."""
    assert Bench(lab, ignore_eos=True).give(10, lab.EOS, 11).finish is None
    assert Bench(lab, ignore_eos=True, stop_ids=(lab.EOS,)).give(10, lab.EOS, 11).token_ids == (10, lab.EOS)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
def test_no_stop_counts_before_min_tokens(lab, min_tokens):
    """D-26, R21: a stop id or string that ends earlier is text like any other; a later one still counts."""
    delta = Bench(lab, min_tokens=min_tokens, stop_ids=(12,)).give(10, 12, 11, 12, 13)
    assert len(delta.token_ids) == (2 if min_tokens <= 1 else 4 if min_tokens <= 3 else 5)
    delta = Bench(lab, min_tokens=min_tokens, stop_strings=("hi",)).give(*letters("hihix"))
    assert len(delta.token_ids) == (2 if min_tokens <= 1 else 4 if min_tokens <= 3 else 5)
    assert (delta.finish is None) == (min_tokens == 4)


def test_the_context_edge_is_a_length(lab):
    """R23: 3 prompt tokens in a context of 8 leave room for 5."""
    delta = Bench(lab, max_context=8).give(10, 11, 12, 13, 14, 15, 16)
    assert (len(delta.token_ids), delta.finish.reason) == (5, "length")


def test_the_first_delta_carries_the_options_and_only_the_first(lab):
    """messages.TokenDelta: the detokenizer opens a stream by them."""
    bench = Bench(lab, stop_strings=("zz",))
    first, second = bench.give(10), bench.give(11)
    assert first.options.stop_strings == ("zz",)
    assert second.options is None


def test_a_request_that_ends_holds_nothing(lab):
    """R31: slot and pages are free in the same commit, and the request is in its last state."""
    bench = Bench(lab, max_tokens=1)
    bench.give(10)
    assert bench.request.state is State.FINISHED
    assert bench.memory.slots.num_used == bench.memory.pages.num_used == len(bench.queue) == 0
    with pytest.raises(InvariantError):
        bench.memory.release(bench.request)


def test_an_abort_before_any_output_still_opens_and_ends_the_stream(lab):
    """decisions.md 15: from Admitted on, a request ends through the detokenizer."""
    bench = Bench(lab)
    delta, ended = bench.committer.abort(bench.request)
    assert delta.options is not None
    assert (delta.token_ids, delta.finish.reason, delta.finish.output_tokens) == ((), "abort", 0)
    assert ended.request is bench.request
    with pytest.raises(InvariantError):
        bench.committer.abort(bench.request)


def test_a_committed_prefix_is_keyed_by_ids_that_were_kept(lab):
    """D-10's shape: ids behind a stop are in no page that the tree offers."""
    bench = Bench(lab, stop_ids=(12,))
    bench.give(10, 11, 12, 20, 21)
    assert bench.memory.tree.match([2, 3, 4, 10, 11, 12, 20, 21, 5]) is None


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("has_grammar", [False, True])
def test_u07_d10_a_run_is_cut_at_its_stop_with_a_grammar_or_without(lab, position, has_grammar):
    """U-07, D-10: ids, usage and what the grammar hears end at the same id; what fell away is counted."""
    bench = Bench(lab)
    matcher = bench.request.matcher = lab.FakeMatcher() if has_grammar else None
    bench.give(10)
    run = [20, 21, 22, 23, 24, 25]
    run[position] = lab.EOS
    delta = bench.give(*run)
    assert delta.token_ids == tuple(run[: position + 1])
    assert delta.finish.output_tokens == 2 + position
    assert bench.committed.num_truncated == (5 - position if has_grammar else 0)
    if matcher is not None:
        assert matcher.told == [10, *run[: position + 1]]


@pytest.mark.parametrize(("stop_at", "kept"), [(None, True), (13, True), (12, False), (11, False)])
def test_d10_a_snapshot_behind_the_last_kept_id_is_given_back(lab, stop_at, kept):
    """D-10: a page end inside a window is a boundary only if the row is accepted, and not cut, up to there.

    The id in the page's last place is 12: where it is the last one kept, it has not been through plain decoding.
    """
    bench = Bench(lab, stop_ids=(stop_at,) if stop_at is not None else ())
    bench.give(10)
    bench.memory.grow(bench.request, 6)
    snapshot = bench.memory.tree.allocate_snapshot()
    run = (20, 21, 11, 12, 13, 14)
    bench.give(*run, save=SnapshotSave(bench.request.slot, snapshot, 2 * lab.PAGE))
    match = bench.memory.tree.match([2, 3, 4, 10, 20, 21, 11, 12, 13, 14])
    assert (match is not None) == kept
    assert bench.memory.snapshots.num_used == int(kept)
    if match is not None:
        assert match.num_tokens == 2 * lab.PAGE


def test_prompt_logprobs_that_are_computed_again_are_not_told_twice(lab):
    """A prefill that was put back starts anew; each prompt token still has exactly one entry, in order."""
    bench = Bench(lab, prompt=9, prompt_logprobs=True)
    request, prompt = bench.request, bench.request.message.prompt_ids

    def chunk(end):
        start = request.num_computed
        row = PlanRow(
            "x", request.slot, prompt[start:end], start, tuple(request.pages), end - start, None, prompt, (), 0
        )
        told = tuple(TokenLogprob(token, -float(end)) for token in prompt[start + 1 : end + 1])
        bench.committer.commit(Plan(StepKind.PREFILL, (row,)), StepOutput((RowOutput((), None, told),)))

    chunk(4)
    bench.memory.release(request)
    bench.queue.put_back(request)
    assert bench.memory.admit(request, 0)
    bench.queue.start(request)
    chunk(3)
    chunk(8)

    assert [entry.token_id for entry in request.prompt_logprobs] == list(prompt)
    assert [entry.logprob for entry in request.prompt_logprobs] == [None, -4, -4, -4, -4, -8, -8, -8, -8]


def test_an_output_of_another_step_is_a_bug(lab):
    """A row that ran where the request does not stand would put foreign tokens into its pages."""
    bench = Bench(lab)
    plan = Plan(StepKind.DECODE, ())
    with pytest.raises(InvariantError, match="1 outputs for 0 rows"):
        bench.committer.commit(plan, StepOutput((RowOutput(()),)))
    with pytest.raises(InvariantError, match="got no id"):
        bench.give()
