"""Requests that wait for a grammar, and what their grammars hear of the ids that they keep."""

from __future__ import annotations

import contextlib
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsparkd.errors import InvariantError, RequestError
from dsparkd.executor.plan import RowFailure
from dsparkd.messages import Grammar
from dsparkd.scheduler.agreement import Intent
from dsparkd.scheduler.request import State

GRAMMAR = Grammar(kind="regex", text="[a-z]+")
PHASES = ("launch", "land")


def test_g20_a_request_without_its_grammar_holds_nothing_and_holds_up_nobody(lab, pair):
    """G-20, decisions.md 15: neighbours finish, no page is used, and only the grammar brings the admission."""
    rank = pair.ranks[0]
    rank.submit(lab.request("held", 9), grammar=GRAMMAR)
    rank.submit(lab.request("free", 9))
    for _ in range(30):
        pair.tick()
        if "free" in rank.deltas and rank.deltas["free"][-1].finish:
            break
        assert "held" not in {row.request_id for plan in rank.device.plans for row in plan.rows}
    assert rank.output("free") == lab.expected(lab.request("free", 9), 64)
    assert (rank.admitted, rank.memory.slots.num_used) == (["free"], 0)
    assert rank.queue.counts()[State.GRAMMAR_WAIT] == 1
    assert rank.snapshots[-1].outstanding_requests == 1

    matcher = lab.FakeMatcher()
    rank.grammars.settle(rank.grammars.tickets[0], matcher)
    pair.drain()

    assert rank.admitted == ["free", "held"]
    ids, _ = rank.output("held")
    assert (ids, "stop") == lab.expected(lab.request("held", 9), 64) or len(ids) == 8
    assert matcher.told == list(ids)
    rank.assert_nothing_held()
    assert rank.value("dsparkd_grammar_resolutions_total", "compile") == 1
    assert "held" in {name for record in rank.loop.records for name in record.settled}


def test_a_grammar_in_memory_admits_at_once(lab, pair):
    """G-11: no tick between the frame and its plan; each choice has a matcher of its own (G-17)."""
    rank = pair.ranks[0]
    matchers = []

    def fresh():
        matchers.append(lab.FakeMatcher())
        return matchers[-1]

    rank.grammars.known[GRAMMAR] = fresh
    rank.submit(lab.request("a", 9), lab.request("b", 9, choice=1), grammar=GRAMMAR)
    pair.tick()
    assert rank.admitted == ["a", "b"]
    assert len(rank.device.plans[0].rows) == 2
    pair.drain()
    assert [matcher.told for matcher in matchers] == [list(rank.output(name)[0]) for name in "ab"]
    assert rank.value("dsparkd_grammar_resolutions_total", "memory") == 2


@pytest.mark.parametrize("is_good", [True, False])
def test_a_grammar_that_comes_while_it_is_asked_for_settles_its_request_once(lab, pair, is_good):
    """G-11: the grammar thread may be done before the tick thread looks; settled twice, the request ended the rank."""
    rank = pair.ranks[0]
    error = RequestError("no rule is named x", status=400, code="invalid_grammar")
    rank.grammars.quick[GRAMMAR] = lab.FakeMatcher if is_good else lambda: error
    rank.submit(lab.request("a", 9), lab.request("b", 9, choice=1), grammar=GRAMMAR)
    pair.drain()
    assert rank.admitted == (["a", "b"] if is_good else [])
    assert [answer.request_id for answer in rank.refused] == ([] if is_good else ["a", "b"])
    rank.assert_nothing_held()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_bad_grammar_is_refused_before_admission_with_its_own_status(lab, pair, at_once):
    """decisions.md 15: Refused, never Admitted; nothing reaches the detokenizer."""
    rank = pair.ranks[1]
    error = RequestError("no rule is named x", status=400, code="invalid_grammar", retry_after_s=3)
    if at_once:
        rank.grammars.known[GRAMMAR] = lambda: error
    rank.submit(lab.request("bad", 9), lab.request("worse", 9), grammar=GRAMMAR)
    pair.tick()
    if not at_once:
        assert rank.refused == []
        for ticket in rank.grammars.tickets:
            rank.grammars.settle(ticket, error)
        pair.tick()
    assert [(answer.request_id, answer.status, answer.code, answer.retry_after_s) for answer in rank.refused] == [
        ("bad", 400, "invalid_grammar", 3),
        ("worse", 400, "invalid_grammar", 3),
    ]
    assert (rank.admitted, rank.deltas) == ([], {})
    rank.assert_nothing_held()
    assert rank.value("dsparkd_grammar_failures_total", "invalid") == 2
    rank.submit(lab.request("bad", 9))  # the id is free again
    pair.drain()
    assert rank.admitted == ["bad"]


def test_g19_an_abort_during_the_compile_takes_only_its_own_wait_along(lab, pair):
    """G-19: the ticket is given back, the client's answer is a refusal, the others go on."""
    rank = pair.ranks[0]
    rank.submit(lab.request("leaves", 9), lab.request("stays", 9), grammar=GRAMMAR)
    pair.tick()
    rank.abort("leaves")
    pair.tick()
    leaves, stays = rank.grammars.tickets
    assert (leaves.is_cancelled, stays.is_cancelled) == (True, False)
    assert [(answer.request_id, answer.status, answer.code) for answer in rank.refused] == [
        ("leaves", 503, "request_aborted")
    ]
    rank.grammars.settle(leaves, lab.FakeMatcher())  # it was on its way already
    rank.grammars.settle(stays, lab.FakeMatcher())
    pair.drain()
    assert rank.admitted == ["stays"]
    assert rank.value("dsparkd_grammar_failures_total", "aborted") == 1
    rank.assert_nothing_held()


def test_g21_a_tick_asks_once_however_many_wait(lab, pair):
    """G-21: one look a tick; nothing is called for each request that waits."""
    rank = pair.ranks[0]
    rank.submit(*(lab.request(f"r{number}", 5) for number in range(40)), grammar=GRAMMAR)
    pair.tick()
    before = rank.grammars.looks
    pair.tick(5)
    assert rank.grammars.looks - before == 5
    assert len(rank.grammars.tickets) == 40


def test_ranks_sleep_while_a_grammar_is_compiled_and_wake_for_it(lab, pair):
    """decisions.md 16: idle ticks would take the processor from the compile; its event or the deadline ends a park."""
    rank = pair.ranks[0]
    rank.submit(lab.request("held", 9), grammar=GRAMMAR)
    pair.tick(2)
    assert pair.agreements[-1].park
    assert Intent.MAY_PARK in rank.loop._intent()

    rank.loop._flush()
    assert not rank.loop._wait(0.01)
    rank.grammars.settle(rank.grammars.tickets[0], lab.FakeMatcher())
    began = time.monotonic()
    assert rank.loop._wait(30)
    assert time.monotonic() - began < 20
    assert not rank.loop._wait(0.0), "an event that was heard of must not wake again"
    pair.tick()
    assert not pair.agreements[-1].park
    pair.drain()


def test_a_parked_rank_looks_around_when_somebody_has_waited_enough(lab, pair):
    """G-20: the service fails a ticket when it is asked, so the nearest deadline bounds the sleep."""
    rank = pair.ranks[0]
    rank.grammars.deadline_ns = pair.clock() + 3_000_000
    assert rank.loop._next_look_ns(pair.clock() + 10**12) == rank.grammars.deadline_ns
    assert rank.loop._next_look_ns(5) == 5
    assert not rank.loop._wait(0.0)
    pair.clock.now_ns += 10_000_000
    assert rank.loop._wait(0.0)


def test_a_grammar_where_grammars_are_off_is_a_bug_of_the_parent(lab, pair):
    """The parent refuses such requests, so one that comes through is no client's doing (R-17)."""
    rank = pair.ranks[0]
    rank.loop._parts = rank.loop._parts.__class__(
        rank.queue, rank.memory, rank.planner, rank.loop._parts.committer, rank.device
    )
    rank.submit(lab.request("x", 5), grammar=GRAMMAR)
    with pytest.raises(InvariantError, match="grammars are off"):
        pair.ranks[0].loop.offer()


def test_rows_that_end_together_tell_their_grammars_in_one_call(lab, pair):
    """D-28, decisions.md 6: each such call wakes threads and waits for Python's lock."""
    rank = pair.ranks[0]
    rank.grammars.known[GRAMMAR] = lab.FakeMatcher
    names = [f"r{number}" for number in range(5)]
    rank.submit(*(lab.request(name, 5, max_tokens=1, choice=at) for at, name in enumerate(names)), grammar=GRAMMAR)
    pair.drain()
    assert sum(rank.device.commits) == 5
    assert len(rank.device.commits) < 5
    assert [len(rank.output(name)[0]) for name in names] == [1] * 5


def test_d17_a_last_step_that_takes_too_long_ends_its_request_alone_and_its_grammar(lab, pair):
    """D-17, decisions.md 6: the ids of a row that ends are told to a matcher that may take for ever, too."""
    rank = pair.ranks[0]
    slow, late = lab.FakeMatcher(), RowFailure(504, "grammar_traversal_timeout", "too long")
    slow.failure, slow.is_stuck, slow.grammar = late, True, GRAMMAR
    rank.grammars.known[GRAMMAR] = lambda: slow
    other = Grammar(kind="regex", text="b")
    rank.grammars.known[other] = lab.FakeMatcher
    rank.submit(lab.request("slow", 5, max_tokens=1), grammar=GRAMMAR)
    rank.submit(lab.request("quick", 5, max_tokens=1), grammar=other)
    pair.drain()
    ends = {name: rank.deltas[name][-1].finish for name in ("slow", "quick")}
    assert (ends["slow"].reason, ends["slow"].status, ends["slow"].code) == ("error", late.status, late.code)
    assert ends["quick"].reason != "error"
    assert rank.grammars.condemned == [GRAMMAR]
    assert rank.value("dsparkd_grammar_failures_total", "traversal") == 1
    rank.assert_nothing_held()


def thinking(lab, name, length=9, **sampling):
    return msgspec.structs.replace(lab.request(name, length, **sampling), starts_in_reasoning=True)


def test_d16_the_grammar_hears_of_ids_behind_the_reasoning_alone(lab, pair):
    """D-16: while a row thinks it may not end, and its grammar waits; only kept ids behind the end id are heard."""
    rank = pair.ranks[0]
    matchers = {}
    names = [f"t{number}" for number in range(12)]
    for name in names:
        matcher = matchers[name] = lab.FakeMatcher()
        rank.grammars.known[GRAMMAR] = lambda matcher=matcher: matcher
        rank.submit(thinking(lab, name, max_tokens=40), grammar=GRAMMAR)
        pair.tick()
    pair.drain()
    switched = 0
    for name in names:
        ids, _ = rank.output(name)
        end = ids.index(lab.THINK_END) if lab.THINK_END in ids else len(ids)
        assert matchers[name].told == list(ids[end + 1 :])
        switched += end < len(ids)
        for plan in rank.device.plans:
            for row in plan.rows:
                if row.request_id == name and row.sampling is not None:
                    assert row.is_thinking == (lab.THINK_END not in row.output_ids)
                    assert row.matcher is matchers[name]
    assert 0 < switched < len(names), "the script must have both"
    assert rank.value("dsparkd_mask_steps_total", "thinking_only") > 0


@settings(max_examples=40, deadline=None)
@given(num_pages=st.integers(17, 24), lengths=st.lists(st.integers(3, 30), min_size=2, max_size=6), data=st.data())
def test_d09_d12_every_kept_id_is_heard_once_whatever_is_retracted_or_aborted(lab, num_pages, lengths, data):
    """D-09, D-12: under any memory pressure a grammar has heard exactly the output of its request."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_pages, 4, 2))) as pair:
        rank = pair.ranks[0]
        matchers = []
        for number, length in enumerate(lengths):
            matcher = lab.FakeMatcher()
            matchers.append(matcher)
            grammar = msgspec.structs.replace(GRAMMAR, text=str(number))
            rank.grammars.known[grammar] = lambda matcher=matcher: matcher
            rank.submit(lab.request(f"r{number}", length, max_tokens=30), grammar=grammar)
            pair.tick(data.draw(st.integers(0, 4)))
        aborted = data.draw(st.integers(0, len(lengths)))
        rank.abort(f"r{aborted}")
        pair.drain()
        for number, matcher in enumerate(matchers):
            ids, reason = rank.output(f"r{number}")
            # What an aborted one kept last needs to be told to nobody.
            assert matcher.told == list(ids) or (reason == "abort" and matcher.told == list(ids)[: len(matcher.told)])


def test_d11_a_row_that_fails_ends_alone(lab, pair):
    """D-11, D-17: status, code and message reach the detokenizer's last delta; neighbours' ids do not change.

    Nothing more is asked of its grammar, whose step may have been given up and still run.
    """
    rank = pair.ranks[0]
    rank.grammars.known[GRAMMAR] = lab.FakeMatcher
    names = ["a", "b", "c"]
    rank.submit(*(lab.request(name, 7, max_tokens=12) for name in names), grammar=GRAMMAR)
    pair.tick(4)
    rank.device.failing["b"] = RowFailure(504, "grammar_traversal_timeout", "too long")
    pair.drain()
    finish = rank.deltas["b"][-1].finish
    assert (finish.reason, finish.status, finish.code, finish.error) == (
        "error",
        504,
        "grammar_traversal_timeout",
        "too long",
    )
    assert rank.deltas["b"][-1].token_ids == ()
    for name in ("a", "c"):
        assert rank.output(name) == lab.expected(lab.request(name, 7, max_tokens=12), 64)
    assert rank.value("dsparkd_requests_total", "error") == 1
    assert rank.value("dsparkd_grammar_failures_total", "traversal") == 1
    assert sum(rank.device.commits) == len(names) - 1
    rank.assert_nothing_held()


def test_d11_a_last_id_that_the_grammar_refuses_fails_the_request(lab, pair):
    """D-11: the row takes part in no walk any more, so its end asks the grammar itself."""
    request = lab.request("x", 7, max_tokens=3, ignore_eos=False)
    ids, reason = lab.expected(request, 64)
    rank = pair.ranks[0]
    rank.grammars.known[GRAMMAR] = lambda: lab.FakeMatcher(frozenset({ids[-1]}))
    rank.submit(request, grammar=GRAMMAR)
    pair.drain()
    finish = rank.deltas["x"][-1].finish
    assert (finish.reason, finish.status, finish.code) == ("error", 500, "grammar_violation")
    assert rank.value("dsparkd_grammar_failures_total", "violation") == 1
    assert reason in ("stop", "length")


def test_d26_the_end_of_a_closed_grammar_ends_before_min_tokens(lab, pair):
    """D-26: the sampler lets the end through only where nothing else may follow, and then it must end the text."""
    for number in range(200):
        request = lab.request(f"q{number}", 5, max_tokens=30, min_tokens=30)
        plain = lab.request(f"q{number}", 5, max_tokens=30)
        if lab.expected(plain, 64)[1] == "stop":
            break
    rank = pair.ranks[0]
    rank.grammars.known[GRAMMAR] = lab.FakeMatcher
    rank.submit(request, grammar=GRAMMAR)
    pair.drain()
    assert rank.output(request.request_id) == lab.expected(plain, 64)


def test_a_grammar_keeps_steps_from_being_launched_ahead(lab):
    """D-08: a mask needs the id before it on the host; beside a row with a grammar each step lands in its tick."""
    with contextlib.closing(lab.Pair(lab.Sizes(overlap=True))) as pair:
        rank = pair.ranks[0]
        rank.grammars.known[GRAMMAR] = lab.FakeMatcher
        rank.submit(lab.request("free", 3, max_tokens=12, ignore_eos=True))
        rank.submit(lab.request("held", 3, max_tokens=4, ignore_eos=True), grammar=GRAMMAR)
        pair.drain()

    ids, _ = rank.output("held")
    with_grammar = [number for number, plan in enumerate(rank.device.plans) if any(r.matcher for r in plan.rows)]
    assert with_grammar == list(range(len(ids)))
    assert rank.device.events[: 2 * len(ids)] == [f"{what} {number}" for number in with_grammar for what in PHASES]
    assert rank.output("free") == lab.expected(lab.request("free", 3, 12, ignore_eos=True), 64)
    assert rank.value("dsparkd_steps_ahead_total") > 0
