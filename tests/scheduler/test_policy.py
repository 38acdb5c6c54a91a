"""Which rows a step holds: order, shares, boundaries, and who pays when memory runs out."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import StepKind
from dsparkd.scheduler.policy import Limits
from dsparkd.scheduler.request import State


def rows_of(rank, last=1):
    """(request, start, tokens) of each row of the last plans."""
    return [
        [(row.request_id, row.start, len(row.input_ids)) for row in plan.rows] for plan in rank.device.plans[-last:]
    ]


def rank_prompt(lab, request_id, length):
    """The prompt that a request of this name and length has."""
    return lab.request(request_id, length).prompt_ids


def test_a_batch_spreads_over_ticks_in_item_order(lab):
    """R-05: 64 items over a budget of four ticks: order kept, none dropped, none twice."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_pages=400, max_rows=64, chunk_tokens=64))) as pair:
        rank = pair.ranks[0]
        rank.submit(*[lab.request(f"i{item}", 4, max_tokens=1) for item in range(64)])
        pair.tick(4)

        planned = [
            row[0] for plan in rank.device.plans for row in (r for r in plan.rows) for row in [(row.request_id,)]
        ]
        assert planned == [f"i{item}" for item in range(64)]
        assert [sum(len(row.input_ids) for row in plan.rows) for plan in rank.device.plans] == [64] * 4


def test_an_oversized_item_leaves_half_of_the_budget_to_its_siblings(lab):
    """R-05: the short ones behind it do not wait for all of its chunks."""
    with contextlib.closing(lab.Pair(lab.Sizes(chunk_tokens=16, max_rows=8))) as pair:
        rank = pair.ranks[0]
        rank.submit(
            lab.request("big", 50, max_tokens=1), *[lab.request(f"s{item}", 4, max_tokens=1) for item in range(4)]
        )
        pair.tick(2)

        assert rows_of(rank, 2) == [
            [("big", 0, 8), ("s0", 0, 4), ("s1", 0, 4)],
            [("big", 8, 8), ("s2", 0, 4), ("s3", 0, 4)],
        ]


def test_nothing_of_the_budget_is_left_while_somebody_can_use_it(lab):
    """R-05: the half that siblings did not need goes back to the oversized one."""
    with contextlib.closing(lab.Pair(lab.Sizes(chunk_tokens=16, max_rows=8))) as pair:
        rank = pair.ranks[0]
        rank.submit(lab.request("big", 50, max_tokens=1), lab.request("s", 3, max_tokens=1))
        pair.tick()
        assert rows_of(rank)[0] == [("big", 0, 12), ("s", 0, 3)]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), chunk=st.sampled_from([4, 16, 64]))
def test_no_item_waits_longer_than_the_work_before_it(lab, lengths, chunk):
    """R-05: no starvation: the first token comes at the latest when all earlier prompts would have been computed."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_pages=400, max_rows=16, chunk_tokens=chunk))) as pair:
        rank = pair.ranks[0]
        rank.submit(*[lab.request(f"i{item}", length, max_tokens=1) for item, length in enumerate(lengths)])
        finished = {}
        for tick in range(200):
            pair.tick()
            for request_id in rank.deltas:
                finished.setdefault(request_id, tick)
        for item in range(len(lengths)):
            # Each prompt ends at most two chunks on a part of a page or at a boundary, where a tick may be cut short.
            work = sum(-(-length // 4) * 4 + 8 for length in lengths[: item + 1])
            assert finished[f"i{item}"] <= 2 * work / chunk + 2 * item + 3


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), chunk=st.sampled_from([4, 12, 64]))
def test_chunks_stay_in_the_budget_and_leave_a_snapshot_at_each_boundary(lab, lengths, chunk):
    """decisions.md 10: wherever scheduler.chunk_tokens cuts a prompt, the boundaries inside a chunk are kept, too."""
    sizes = lab.Sizes(num_pages=400, max_rows=16, num_snapshots=64, chunk_tokens=chunk)
    with contextlib.closing(lab.Pair(sizes)) as pair:
        rank = pair.ranks[0]
        rank.submit(*[lab.request(f"i{item}", length, max_tokens=1) for item, length in enumerate(lengths)])
        pair.drain()
        for plan in rank.device.plans:
            assert sum(len(row.input_ids) for row in plan.rows) <= chunk
            for row in plan.rows:
                length, end = len(row.prompt_ids), row.start + len(row.input_ids)
                boundaries = {*range(16, length, 16), (length - 1) // lab.PAGE * lab.PAGE}
                boundaries |= {length} if length % lab.PAGE == 0 else set()
                assert end % lab.PAGE == 0 or end == length
                saved = [save.position for save in plan.snapshot_saves if save.slot == row.slot]
                assert saved == sorted(boundary for boundary in boundaries if row.start < boundary <= end)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(3, []), (4, [4]), (5, [4]), (15, [12]), (16, [12, 16]), (40, [16, 32, 36, 40]), (41, [16, 32, 40])],
)
def test_prefill_snapshots_are_on_the_grid_and_at_the_last_page_end(lab, pair, length, expected):
    """decisions.md 10: every kv.snapshot_pages, at the last page end, and at the prompt's end if that is one."""
    pair.ranks[0].submit(lab.request("x", length, max_tokens=1))
    pair.drain()
    saves = [save.position for plan in pair.ranks[0].device.plans for save in plan.snapshot_saves]
    assert saves == expected


def test_a_prompt_within_the_budget_has_its_first_token_in_one_step(lab, pair):
    """The last page end is kept out of the middle of the chunk: a snapshot costs a prompt no step of its own."""
    rank = pair.ranks[0]
    rank.submit(lab.request("a", 7, max_tokens=1), lab.request("b", 9, max_tokens=1))
    pair.tick()
    plan = rank.device.plans[-1]
    assert [(row.request_id, row.start, len(row.input_ids)) for row in plan.rows] == [("a", 0, 7), ("b", 0, 9)]
    assert [(save.slot, save.position, save.inner_slot) for save in plan.snapshot_saves] == [(1, 4, 5), (2, 8, 6)]
    assert set(rank.deltas) == {"a", "b"}
    again = lab.request("c", rank_prompt(lab, "b", 9), max_tokens=1)
    rank.submit(again)
    pair.tick()
    assert rows_of(rank)[0] == [("c", 8, 1)]


def test_the_last_page_end_is_kept_where_snapshots_lack(lab):
    """It is the one that an equal prompt resumes from, and the next turn behind it."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_snapshots=1, chunk_tokens=64))) as pair:
        pair.ranks[0].submit(lab.request("x", 41, max_tokens=1))
        pair.drain()
        (save,) = (save for plan in pair.ranks[0].device.plans for save in plan.snapshot_saves)
        assert save.position == 40


@pytest.mark.parametrize("length", [9, 16, 20, 33])
def test_an_equal_prompt_computes_only_its_last_page(lab, pair, length):
    """decisions.md 10: warm equals cold, and cached_tokens says what was spared (R36)."""
    prompt = list(range(length))
    first, second = (lab.request(name, [token % lab.VOCAB for token in prompt], max_tokens=4) for name in "ab")
    pair.ranks[0].submit(first)
    pair.drain()
    pair.ranks[0].submit(second)
    pair.drain()

    assert pair.ranks[0].output("a") == pair.ranks[0].output("b")
    cached = pair.ranks[0].deltas["b"][-1].finish.cached_tokens
    assert cached == (length - 1) // lab.PAGE * lab.PAGE
    assert pair.ranks[0].value("dsparkd_cached_prompt_tokens_total", "device") == cached


def test_the_end_of_a_common_beginning_gets_a_snapshot_from_the_second_user_on(lab, pair):
    """model.md 4.4: a system prompt shorter than the snapshot grid would never be hit: each prompt ends elsewhere."""
    system = [token % lab.VOCAB for token in range(10)]  # two pages and a half
    users = [lab.request(f"u{user}", [*system, *[20 + user] * 9], max_tokens=2) for user in range(4)]
    for request in users:
        pair.ranks[0].submit(request)
        pair.drain()
    assert [pair.ranks[0].deltas[request.request_id][-1].finish.cached_tokens for request in users] == [0, 0, 8, 8]
    for request in users:
        assert pair.ranks[0].output(request.request_id) == lab.expected(request, 64)
    saved = [save.position for plan in pair.ranks[0].device.plans for save in plan.snapshot_saves]
    assert saved.count(8) == 1, "who resumes from it does not save it again"


def test_choices_of_one_prompt_compute_it_once(lab, pair):
    """n = 4 arrives as four requests at once: one prefill, and three that start where it left a snapshot."""
    prompt = [token % lab.VOCAB for token in range(42)]
    choices = [lab.request(f"c{choice}", prompt, max_tokens=3) for choice in range(4)]
    stranger = lab.request("stranger", 6, max_tokens=1)
    pair.ranks[0].submit(*choices, stranger)
    pair.tick()
    assert [row[0] for row in rows_of(pair.ranks[0])[0]] == ["c0", "stranger"], "others go past those that wait"
    pair.drain()
    deltas = pair.ranks[0].deltas
    assert [deltas[request.request_id][-1].finish.cached_tokens for request in choices] == [0, 40, 40, 40]
    for request in choices:
        assert pair.ranks[0].output(request.request_id) == lab.expected(request, 64)


def test_a_request_does_not_wait_for_a_prefix_that_nobody_computes_any_more(lab, pair):
    """The first choice is aborted in the middle: the second takes over."""
    prompt = [token % lab.VOCAB for token in range(42)]
    choices = [lab.request(f"c{choice}", prompt, max_tokens=3) for choice in range(2)]
    pair.ranks[0].submit(*choices)
    pair.tick(2)
    pair.ranks[0].abort("c0")
    pair.drain()
    assert pair.ranks[0].output("c1") == lab.expected(choices[1], 64)
    assert pair.ranks[0].deltas["c1"][-1].finish.cached_tokens == 32


def test_the_next_turn_resumes_behind_the_last_answer(lab, pair):
    """decisions.md 10: the last page end crossed while decoding carries a snapshot, the ones before it do not."""
    first = lab.request("turn1", 6, max_tokens=20, ignore_eos=True)
    pair.ranks[0].submit(first)
    pair.drain()
    answer, _ = pair.ranks[0].output("turn1")
    history = [*first.prompt_ids, *answer]  # 26 ids, of which 25 have been computed: page ends at 4 and 24
    pair.ranks[0].submit(lab.request("turn2", [*history, 3, 5], max_tokens=3))
    pair.drain()

    assert pair.ranks[0].deltas["turn2"][-1].finish.cached_tokens == 24
    assert pair.ranks[0].output("turn2")[0] == lab.expected(lab.request("turn2", [*history, 3, 5], max_tokens=3), 64)[0]
    saved = [save.position for plan in pair.ranks[0].device.plans for save in plan.snapshot_saves]
    assert saved[:6] == [4, 8, 12, 16, 20, 24]


def test_decoding_keeps_one_snapshot_a_sequence(lab, pair):
    """decisions.md 10: the newest replaces the one before, the prefill's own stays."""
    pair.ranks[0].submit(lab.request("x", 6, max_tokens=30, ignore_eos=True))
    pair.drain()
    assert pair.ranks[0].memory.snapshots.num_used == 2


def test_prompt_logprobs_bypass_the_prefix_cache(lab, pair):
    """decisions.md 7: a cached token has no logits, so every prompt token is computed."""
    prompt = list(range(20))
    pair.ranks[0].submit(lab.request("plain", prompt, max_tokens=1))
    pair.drain()
    pair.ranks[0].submit(lab.request("echo", prompt, max_tokens=2, prompt_logprobs=True, top_logprobs=3))
    pair.drain()

    first = pair.ranks[0].deltas["echo"][0]
    assert [entry.token_id for entry in first.prompt_logprobs] == prompt
    assert first.prompt_logprobs[0].logprob is None
    assert all(entry.logprob is not None for entry in first.prompt_logprobs[1:])
    assert pair.ranks[0].deltas["echo"][-1].finish.cached_tokens == 0
    rows = [row for plan in pair.ranks[0].device.plans for row in plan.rows if row.request_id == "echo"]
    assert [row.prompt_top_logprobs for row in rows] == [3, 3, 3, None]
    assert [row.num_logits for row in rows] == [8, 8, 4, 1]


def test_rows_of_logits_are_bounded_whatever_clients_ask_for(lab):
    """A step's logits are in no memory budget: one prompt at a time is read, in small chunks; others go past it."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_rows=8, chunk_tokens=64, num_pages=100))) as pair:
        rank = pair.ranks[0]
        echoes = [lab.request(f"e{item}", 30, max_tokens=2, prompt_logprobs=True) for item in range(3)]
        plain = lab.request("plain", 8, max_tokens=1)
        rank.submit(*echoes, plain)
        pair.tick()
        assert rows_of(rank)[0] == [("e0", 0, 8), ("plain", 0, 8)]
        pair.drain()
        for plan in rank.device.plans:
            assert sum(row.num_logits for row in plan.rows if row.prompt_top_logprobs is not None) <= 8
        for request in (*echoes, plain):
            assert rank.output(request.request_id) == lab.expected(request, 64)


def test_under_pressure_the_youngest_pays_and_resumes_first(lab):
    """architecture.md 5: no error to an admitted request; ids are those of an undisturbed run."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_pages=17, max_rows=3, num_snapshots=2))) as pair:
        rank = pair.ranks[0]
        requests = [lab.request(f"r{item}", 10, max_tokens=40, ignore_eos=True) for item in range(4)]
        rank.submit(*requests)
        retracted = []
        for _ in range(300):
            pair.tick()
            for request in rank.queue.all():
                if request.num_retractions and request.request_id not in retracted:
                    retracted.append(request.request_id)
                    older = [other for other in rank.queue.running() if other.arrival < request.arrival]
                    assert older or request.state is not State.WAITING
                    assert request.output_ids, "it keeps what it has said"
        assert rank.value("dsparkd_retractions_total") > 0
        assert "r0" not in retracted
        for request in requests:
            assert rank.output(request.request_id) == lab.expected(request, 64)
        order = [request_id for request_id in rank.deltas if rank.deltas[request_id][-1].finish]
        assert order[0] == "r0"


def test_cached_tokens_are_those_of_the_first_admission(lab):
    """R36: what a retract makes cheap to repeat was computed once, so it is no saving of the client's."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_pages=17, max_rows=2))) as pair:
        rank = pair.ranks[0]
        rank.submit(*[lab.request(f"r{item}", 10, max_tokens=40, ignore_eos=True) for item in range(2)])
        pair.drain()
        assert rank.value("dsparkd_retractions_total") > 0
        assert any(start.position for plan in rank.device.plans for start in plan.slot_starts), "it resumed"
        assert [rank.deltas[name][-1].finish.cached_tokens for name in ("r0", "r1")] == [0, 0]


def test_a_retracted_request_goes_before_new_ones(lab):
    """It was promised progress already; R-05's order is that of arrival."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_pages=17, max_rows=2))) as pair:
        rank = pair.ranks[0]
        rank.submit(*[lab.request(f"r{item}", 10, max_tokens=40, ignore_eos=True) for item in range(2)])
        while not any(request.num_retractions for request in rank.queue.all()):
            pair.tick()
            assert len(pair.agreements) < 200
        rank.submit(lab.request("new", 10, max_tokens=1))
        pair.tick()
        assert [request.request_id for request in rank.queue.waiting()] == ["r1", "new"]
        pair.drain()


def test_one_request_at_the_context_limit_always_fits(lab):
    """decisions.md 11: the pool holds one sequence of the longest length, and everything else gives way to it."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_pages=17, max_rows=4))) as pair:
        rank = pair.ranks[0]
        longest = lab.request("long", 30, max_tokens=100, ignore_eos=True)
        others = [lab.request(f"o{item}", 12, max_tokens=40, ignore_eos=True) for item in range(5)]
        rank.submit(longest, *others)
        pair.drain()
        for request in (longest, *others):
            assert rank.output(request.request_id) == lab.expected(request, 64)


def test_rows_never_exceed_max_rows(lab, pair):
    """scheduler.max_rows is the number of slots."""
    pair.ranks[0].submit(*[lab.request(f"r{item}", 3, max_tokens=9, ignore_eos=True) for item in range(11)])
    pair.drain()
    widths = [len(plan.rows) for plan in pair.ranks[0].device.plans]
    assert max(widths) == pair.sizes.max_rows


def test_rows_are_in_execution_order(lab, pair):
    """Decode rows first, then chunks (executor/plan.py)."""
    pair.ranks[0].submit(lab.request("a", 3, max_tokens=9, ignore_eos=True))
    pair.tick(2)
    pair.ranks[0].submit(lab.request("b", 9, max_tokens=2, ignore_eos=True))
    pair.tick()
    plan = pair.ranks[0].device.plans[-1]
    assert plan.kind is StepKind.MIXED
    assert [(row.request_id, len(row.input_ids)) for row in plan.rows] == [("a", 1), ("b", 9)]


def test_a_single_token_output_never_joins_a_decode_batch(lab, pair):
    """D-27: max_tokens = 1 is answered from the prefill's own logits, with and without neighbours, echo or not."""
    requests = [
        lab.request(f"q{echo}{top}", 9, max_tokens=1, prompt_logprobs=echo, top_logprobs=top)
        for echo in (False, True)
        for top in (None, 0, 2)
    ]
    pair.ranks[0].submit(lab.request("neighbour", 3, max_tokens=30, ignore_eos=True))
    pair.tick(2)
    pair.ranks[0].submit(*requests)
    pair.drain()
    names = {request.request_id for request in requests}
    decoded = [
        row.request_id
        for plan in pair.ranks[0].device.plans
        for row in plan.rows
        if row.output_ids and row.request_id in names
    ]
    assert decoded == []
    for request in requests:
        assert pair.ranks[0].output(request.request_id) == lab.expected(request, 64)
        deltas = pair.ranks[0].deltas[request.request_id]
        assert (deltas[0].logprobs is not None) == (request.sampling.top_logprobs is not None)
        assert (deltas[0].prompt_logprobs is not None) == request.sampling.prompt_logprobs


@pytest.mark.parametrize("max_drafts", [0, 127, 128, 300])
def test_a_window_never_reaches_over_two_page_ends(max_drafts):
    """The one snapshot of a row would be taken at the last of them, and the page before it could never be resumed."""
    with contextlib.nullcontext() if max_drafts < 128 else pytest.raises(InvariantError, match="pages of 128"):
        Limits(1024, 128, 2048, 512, max_drafts)
    if max_drafts < 128:
        for start in range(128):
            ends = [end for end in range(start + 1, start + 2 + max_drafts) if end % 128 == 0]
            assert len(ends) <= 1


@pytest.mark.parametrize("length", range(9, 13))
def test_the_widest_window_saves_one_page_end_at_most(lab, length):
    """A window as long as a page (four tokens here), wherever it begins: one snapshot a row, at the end of a page."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_drafts=3))) as pair:
        rank = pair.ranks[0]
        request = lab.request("x", length, max_tokens=24)
        rank.submit(request)
        pair.drain()
        assert rank.output("x") == lab.expected(request, 64)
        drafting = [plan for plan in rank.device.plans if plan.speculation is not None]
        positions = [save.position for plan in drafting for save in plan.snapshot_saves]
        assert positions
        assert all(position % 4 == 0 for position in positions)
        assert max(len(plan.snapshot_saves) for plan in drafting) == 1
        rank.assert_nothing_held()
