"""The loop of two ranks: nothing leaks, nothing starves, everything ends once, whatever clients and memory do."""

from __future__ import annotations

import contextlib
import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from dsparkd.errors import InvariantError, PeerError
from dsparkd.executor.plan import StepKind
from dsparkd.messages import RoutedBatch, Shutdown

FLAVOURS = (
    {},
    {"ignore_eos": True},
    {"prompt_logprobs": True, "top_logprobs": 1},
    {"stop_ids": [3, 4, 5, 6]},
    {"min_tokens": 6, "stop_ids": [3, 4, 5, 6]},
    {"stop_strings": ["c", "de", "fgh"]},
)
OPERATION = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(0, 1),  # rank
        st.integers(1, 5),  # items
        st.integers(0, 3),  # which common beginning
        st.integers(1, 40),  # prompt length
        st.integers(1, 20),  # max_tokens
        st.sampled_from(FLAVOURS),
    ),
    st.tuples(st.just("abort"), st.integers(0, 1_000)),
    st.tuples(st.just("tick"), st.integers(1, 6)),
)


def play(lab, pair, script):
    """Run a script and return the submitted requests by rank, and the ids that were aborted."""
    submitted, aborted = [], set()
    for step, operation in enumerate(script):
        if operation[0] == "submit":
            _, rank, items, family, length, max_tokens, flavour = operation
            batch = []
            for item in range(items):
                common = [(family * 5 + index) % lab.VOCAB for index in range(length)]
                prompt = [*common, (step + item) % lab.VOCAB]
                batch.append(lab.request(f"r{step}-{item}", prompt, max_tokens, **flavour))
            pair.ranks[rank].submit(*batch)
            submitted += [(rank, request) for request in batch]
        elif operation[0] == "abort" and submitted:
            rank, request = submitted[operation[1] % len(submitted)]
            pair.ranks[rank].abort(request.request_id)
            aborted.add(request.request_id)
        elif operation[0] == "tick":
            pair.tick(operation[1])
    return submitted, aborted


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=st.lists(OPERATION, max_size=25),
    num_pages=st.integers(17, 40),
    num_snapshots=st.integers(0, 6),
    max_rows=st.integers(1, 6),
    max_drafts=st.sampled_from([None, 0, 1, 3]),
    chunk_pages=st.sampled_from([1, 2, 4, 7, 16]),
    snapshot_pages=st.integers(1, 5),
    decode_graphs=st.booleans(),
)
def test_every_request_ends_once_with_its_own_ids_and_leaves_nothing(
    lab, script, num_pages, num_snapshots, max_rows, max_drafts, chunk_pages, snapshot_pages, decode_graphs
):
    """R-15, R31: any order of submits, aborts and memory pressure, with drafts (1, 3), without (0), overlapped (None);
    chunks from a page to a whole prompt with many page ends.

    The device checks each page and ring it is shown. D-10: ids behind an end exist nowhere, not in a prefix hit either.
    """
    num_pages += 1 if max_drafts else 0  # the longest sequence needs room for its drafts too
    sizes = lab.Sizes(
        num_pages,
        max_rows,
        num_snapshots,
        chunk_pages * lab.PAGE,
        snapshot_pages,
        max_drafts=max_drafts or 0,
        overlap=max_drafts is None,
        decode_graphs=decode_graphs,
    )
    with contextlib.closing(lab.Pair(sizes)) as pair:
        submitted, aborted = play(lab, pair, script)
        pair.drain()
        for rank, request in submitted:
            ids, reason = pair.ranks[rank].output(request.request_id)
            expected, why = lab.expected(request, pair.sizes.max_context)
            if request.request_id in aborted and reason == "abort":
                assert ids == expected[: len(ids)]
            else:
                assert (ids, reason) == (expected, why)
            first = pair.ranks[rank].deltas[request.request_id][0]
            if request.sampling.prompt_logprobs and ids:
                assert tuple(entry.token_id for entry in first.prompt_logprobs) == request.prompt_ids
        for rank in pair.ranks:
            rank.assert_nothing_held()
            rank.assert_prefixes_are_true()


def test_plans_depend_on_messages_alone(lab):
    """A recorded log replays to the same plans (architecture.md 4), although clocks and sockets differ."""
    script = [
        ("submit", 0, 5, 1, 30, 12, {}),
        ("tick", 3),
        ("submit", 1, 3, 1, 30, 12, {"stop_ids": [3]}),
        ("abort", 2),
        ("tick", 5),
        ("submit", 0, 4, 1, 25, 9, {"prompt_logprobs": True}),
    ]
    plans = []
    for run in range(2):
        with contextlib.closing(lab.Pair(lab.Sizes(num_pages=20))) as pair:
            pair.clock.now_ns += run * 10**9
            play(lab, pair, script)
            pair.drain()
            plans.append([rank.device.plans for rank in pair.ranks])

    assert plans[0] == plans[1]


def test_one_frame_is_queued_whole_before_anything_is_planned(lab, pair):
    """R-04: the first plan that sees one of 64 items finds all 64 in the queue."""
    rank = pair.ranks[0]
    rank.submit(*[lab.request(f"b{item}", 3) for item in range(64)])

    pair.tick()

    assert rank.admitted == [f"b{item}" for item in range(64)]
    assert sum(rank.queue.counts().values()) == 64
    assert rank.device.plans[0].rows


def test_a_batch_that_does_not_fit_is_refused_whole(lab):
    """R-07: room 63 for a batch of 64 queues none of it; room 64 takes it."""
    with contextlib.closing(lab.Pair(lab.Sizes(queue_items=64))) as pair:
        rank = pair.ranks[0]
        rank.submit(lab.request("first", 3, max_tokens=50, ignore_eos=True))
        pair.tick()
        rank.submit(*[lab.request(f"b{item}", 3) for item in range(64)])
        pair.tick()

        assert len(rank.queue) == 1
        assert [(answer.status, answer.code) for answer in rank.refused] == [(429, "queue_full")] * 64
        assert {answer.request_id for answer in rank.refused} == {f"b{item}" for item in range(64)}
        assert all(answer.retry_after_s for answer in rank.refused)

        pair.drain()
        rank.submit(*[lab.request(f"c{item}", 3) for item in range(64)])
        pair.tick()

        assert len(rank.refused) == 64
        assert len(rank.admitted) == 65


@pytest.mark.parametrize("length", [64, 65, 500])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(lab, pair, length):
    """R23: there would be no room for a single output token."""
    pair.ranks[1].submit(lab.request("fits", 5), lab.request("long", length))
    pair.tick()

    answers = pair.ranks[1].refused
    assert [(answer.request_id, answer.status) for answer in answers] == [("fits", 400), ("long", 400)]
    assert str(length) in answers[0].message
    assert "64" in answers[0].message
    assert len(pair.ranks[1].queue) == 0


@pytest.mark.parametrize("room", [1, 2, 7])
def test_output_ends_with_length_at_the_edge_of_the_context(lab, pair, room):
    """R23: prompt and output together never exceed engine.max_context_tokens."""
    request = lab.request("edge", pair.sizes.max_context - room, max_tokens=1000, ignore_eos=True)
    pair.ranks[0].submit(request)
    pair.drain()

    ids, reason = pair.ranks[0].output("edge")
    assert (len(ids), reason) == (room, "length")


def test_each_request_carries_six_times_in_order(lab, pair):
    """R-09: received, encoded, tokenized, dispatched, delivered, first planned: set once, never decreasing."""
    pair.ranks[0].submit(*[lab.request(f"t{item}", 20) for item in range(12)])
    pair.tick()
    requests = pair.ranks[0].queue.all()
    pair.tick(3)
    early = {request.request_id: request.first_planned_ns for request in requests if request.first_planned_ns}
    pair.drain()

    assert len(requests) == 12
    for request in requests:
        message = request.message
        times = [message.received_ns, message.encoded_ns, message.tokenized_ns, message.dispatched_ns]
        times += [request.delivered_ns, request.first_planned_ns]
        assert all(times)
        assert times == sorted(times)
        assert early.get(request.request_id, request.first_planned_ns) == request.first_planned_ns


def test_one_receive_takes_at_most_its_share_of_frames(lab, pair):
    """R-16: 300 queued frames are taken as 256 and 44, none of them cut."""
    rank = pair.ranks[0]
    for number in range(299):
        rank.abort(f"unknown{number}")
    rank.submit(lab.request("last", 3), lab.request("too", 3))
    pair.tick()
    assert rank.admitted == []
    assert not pair.agreements[-1].park, "a rank with frames in memory must not sleep on its socket"
    pair.tick()
    assert rank.admitted == ["last", "too"]


def test_a_frame_for_the_other_rank_fails_the_pair(lab, pair):
    """R-17: a bug in the parent, named with the frame's number."""
    pair.ranks[0].parent.send_nowait(RoutedBatch(1, 17, (lab.request("x", 3),)))
    with pytest.raises(PeerError, match="frame 17"):
        pair.tick()


def test_a_frame_out_of_order_fails_the_pair(lab, pair):
    """R-17: frames count up; a repeated one would queue a batch twice."""
    pair.ranks[0].submit(lab.request("x", 3))
    pair.tick()
    pair.ranks[0].parent.send_nowait(RoutedBatch(0, 1, (lab.request("y", 3),)))
    with pytest.raises(PeerError, match="frame 1"):
        pair.tick()


@pytest.mark.parametrize(
    "body",
    [
        b"\x84\xa4type\xabRoutedBatch\xa7dp_rank\x00\xa5frame\x01\xa8requests\x90",  # no item
        b"\x83\xa4type\xa5Abort\xaarequest_id\xa1x\xa5extra\x01",  # an unknown field
        b"\x81\xa4type\xa4Nope",
    ],
)
def test_a_malformed_frame_fails_the_pair(pair, body):
    """R-17: whatever does not decode is a bug in the parent; the error has the frame's number."""
    rank = pair.ranks[0]
    rank.abort("first")
    rank.parent._sock.sendall(len(body).to_bytes(4, "little") + body)
    with pytest.raises(InvariantError, match="frame 2"):
        pair.tick()


def test_an_abort_takes_only_its_own_request_along(lab, pair):
    """R-15: exact id, never a prefix; unknown ids are ignored; siblings are unchanged."""
    rank = pair.ranks[0]
    requests = [lab.request(name, 9, max_tokens=12) for name in ("a", "ab", "abc", "abcd")]
    rank.submit(*requests)
    pair.tick(2)
    rank.abort("ab")
    rank.abort("nobody")
    pair.drain()

    assert rank.output("ab")[1] == "abort"
    for request in (requests[0], *requests[2:]):
        assert rank.output(request.request_id) == lab.expected(request, pair.sizes.max_context)


@pytest.mark.parametrize("ticks", [0, 1, 3])
def test_abort_frees_everything_in_every_state(lab, pair, ticks):
    """R31: aborted while it waits (0), prefills (1) and decodes (3)."""
    rank = pair.ranks[0]
    rank.submit(lab.request("x", 30, max_tokens=20, ignore_eos=True))
    pair.tick(ticks)
    rank.abort("x")
    pair.tick()

    assert rank.output("x")[1] == "abort"
    rank.assert_nothing_held()
    assert rank.value("dsparkd_requests_total", "abort") == 1


def test_an_idle_rank_takes_part_and_says_so(lab, pair):
    """X-11, R38: only rank 0 has work; rank 1 joins each step with no rows and the same counts."""
    pair.ranks[0].submit(lab.request("x", 10, max_tokens=4, ignore_eos=True))
    pair.drain()

    idle, busy = pair.ranks[1].device, pair.ranks[0].device
    assert [plan.kind for plan in idle.plans] == [plan.kind for plan in busy.plans]
    assert idle.counts == busy.counts
    assert all(not plan.rows for plan in idle.plans)
    assert pair.ranks[1].value("dsparkd_ticks_total", "idle_peer") == len(idle.plans)


def test_decode_rows_ride_along_with_the_peers_prefill(lab, pair):
    """X-11 as amended: no stream pauses for a peer's prompts, so each tick yields one token."""
    pair.ranks[1].submit(lab.request("stream", 3, max_tokens=12, ignore_eos=True))
    pair.tick(2)
    before = len(pair.ranks[1].deltas["stream"])
    pair.ranks[0].submit(*[lab.request(f"p{item}", 40, max_tokens=1) for item in range(4)])
    pair.tick(4)

    assert [agreement.kind for agreement in pair.agreements[-4:]] == [StepKind.MIXED] * 4
    assert len(pair.ranks[1].deltas["stream"]) == before + 4
    assert all(len(plan.rows) == 1 for plan in pair.ranks[1].device.plans[-4:])


def test_endless_prefill_leaves_room_for_decode_ticks(lab, pair):
    """X-14: with max_prefill_streak 4, every fifth tick is a decode tick, and the stream never waits longer."""
    pair.ranks[1].submit(lab.request("stream", 3, max_tokens=40, ignore_eos=True))
    pair.tick(2)
    gaps, last = [], len(pair.agreements)
    for number in range(30):
        pair.ranks[0].submit(lab.request(f"p{number}", 40, max_tokens=1))
        pair.tick()
        if len(pair.ranks[1].device.plans[-1].rows):
            gaps.append(len(pair.agreements) - last)
            last = len(pair.agreements)

    kinds = [agreement.kind for agreement in pair.agreements[2:]]
    assert kinds[:10] == ([StepKind.MIXED] * 4 + [StepKind.DECODE]) * 2
    assert max(gaps) <= 5


@pytest.mark.parametrize("graphs", [True, False])
def test_both_ranks_replay_decode_ticks_and_nothing_else(lab, pair, graphs):
    """P-05, X-10, X-12: by the agreement alone; a rank without rows and one whose chunks sit the tick out, too."""
    for rank in pair.ranks:
        rank.loop._bounds = dataclasses.replace(rank.loop._bounds, decode_graphs=graphs)
    pair.ranks[1].submit(lab.request("stream", 3, max_tokens=40, ignore_eos=True))
    pair.tick(3)  # a prefill, then decode ticks beside an idle rank
    for number in range(12):
        pair.ranks[0].submit(lab.request(f"p{number}", 40, max_tokens=1))
        pair.tick()

    for rank in pair.ranks:
        seen = [(plan.kind, plan.replays) for plan in rank.device.plans]
        assert set(seen) == {
            (StepKind.PREFILL, False),
            (StepKind.MIXED, False),
            (StepKind.DECODE, graphs),
        }
        steps = sum(kind is StepKind.DECODE for kind, _ in seen)
        assert rank.value("dsparkd_decode_steps_total", "eager", "none") == steps  # this device captures nothing


def test_a_decode_turn_does_not_lose_a_prefills_start(lab):
    """X-14: a chunk that sits out a decode tick keeps its slot's pending start, also one from a snapshot."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_prefill_streak=1, num_pages=64))) as pair:
        shared = list(range(20))
        pair.ranks[0].submit(lab.request("warm", [*shared, 1], max_tokens=1))
        pair.drain()
        pair.ranks[1].submit(lab.request("stream", 3, max_tokens=30, ignore_eos=True))
        pair.tick(2)
        requests = [lab.request(f"p{item}", [*shared, item, 9], max_tokens=2) for item in range(4)]
        for request in requests:
            pair.ranks[0].submit(request)
            pair.tick()
        pair.drain()
        for request in requests:
            assert pair.ranks[0].output(request.request_id) == lab.expected(request, 64)
            assert pair.ranks[0].deltas[request.request_id][-1].finish.cached_tokens == 20


def test_a_snapshot_is_published_after_each_tick(lab, pair):
    """L-13: by the tick thread, with the frame taken in, so the router keeps later frames' counts on top."""
    pair.tick()
    pair.ranks[0].submit(lab.request("x", 10, max_tokens=5, ignore_eos=True))
    pair.tick(3)

    told = pair.ranks[0].snapshots
    assert [snapshot.sequence for snapshot in told] == [1, 2, 3, 4]
    assert [snapshot.tick for snapshot in told] == [1, 2, 3, 4]
    assert [snapshot.frame for snapshot in told] == [0, 1, 1, 1]
    assert told[0].outstanding_requests == 0
    assert told[-1].outstanding_requests == 1


def test_outstanding_tokens_count_what_is_not_computed(lab, pair):
    """R-12: uncomputed prompt tokens, plus one a decode row; waiting requests whole."""
    rank = pair.ranks[0]
    rank.submit(*[lab.request(f"w{item}", 16, max_tokens=9, ignore_eos=True) for item in range(6)])
    pair.tick()
    by_hand = sum(request.num_tokens - request.num_computed for request in rank.queue.all())
    assert rank.snapshots[-1].outstanding_tokens == by_hand
    pair.tick(6)
    by_hand = sum(request.num_tokens - request.num_computed for request in rank.queue.all())
    assert rank.snapshots[-1].outstanding_tokens == by_hand
    assert rank.snapshots[-1].waiting_requests == rank.queue.num_waiting > 0


def test_counters_equal_the_events(lab, pair):
    """M-02: a scripted run's counters are exactly what was sent and produced."""
    rank = pair.ranks[0]
    requests = [lab.request(f"m{item}", 5 + item, max_tokens=6) for item in range(7)]
    rank.submit(*requests)
    pair.tick(2)
    rank.abort("m6")
    ticks = pair.drain() + 2

    outputs = [rank.output(request.request_id) for request in requests]
    for outcome in ("stop", "length", "abort"):
        expected = sum(reason == outcome for _, reason in outputs)
        assert rank.value("dsparkd_requests_total", outcome) == expected
    assert rank.value("dsparkd_output_tokens_total") == sum(len(ids) for ids, _ in outputs)
    assert rank.value("dsparkd_prompt_tokens_total") == sum(len(request.prompt_ids) for request in requests)
    assert rank.value("dsparkd_exchange_calls_total", "plan") == ticks
    kinds = ("prefill", "mixed", "decode", "idle_peer", "idle")
    assert sum(rank.value("dsparkd_ticks_total", kind) for kind in kinds) == ticks
    phases = ("receive", "plan", "agree", "launch", "commit", "publish")
    parts = sum(rank.value("dsparkd_scheduler_phase_seconds_total", phase) for phase in phases)
    assert parts == pytest.approx(rank.value("dsparkd_scheduler_phase_seconds_total", "tick"))


def test_a_metrics_frame_is_sent_each_second(lab, pair):
    """M-03: cumulative, at least once a second of ticks."""
    pair.tick()
    num_first = len(pair.ranks[0].frames)
    pair.tick(3)
    assert len(pair.ranks[0].frames) == num_first
    pair.clock.now_ns += 1_000_000_000
    pair.tick()
    assert len(pair.ranks[0].frames) == num_first + 1
    key = "dsparkd_exchange_calls_total\x000\x00plan"
    assert pair.ranks[0].frames[-1].values[key] == len(pair.agreements)


def test_shutdown_aborts_what_is_left_and_both_ranks_stop_at_one_exchange(lab, pair):
    """X-27, L-33: rank 1 never saw the message and still leaves after the same exchange."""
    pair.ranks[0].submit(lab.request("a", 10, max_tokens=50, ignore_eos=True))
    pair.ranks[1].submit(lab.request("b", 10, max_tokens=50, ignore_eos=True))
    pair.tick(3)
    pair.ranks[0].parent.send_nowait(Shutdown())
    pair.tick()

    assert pair.agreements[-1].stop
    assert pair.ranks[0].output("a")[1] == "abort"
    for rank in pair.ranks:
        rank.loop._leave()
        rank.collect()
        rank.assert_nothing_held()
        assert sorted(rank.farewells) == [f"detokenizer:rank{rank.dp_rank}", f"parent:rank{rank.dp_rank}"]
    assert pair.ranks[1].output("b")[1] == "abort"
    assert pair.ranks[1].value("dsparkd_requests_total", "abort") == 1
    key = "dsparkd_requests_total\x001\x00abort"
    assert pair.ranks[1].frames[-1].values[key] == 1, "M-03: the last window reaches the parent"


def test_a_stopping_rank_admits_nothing(lab, pair):
    """L-34: a batch behind the Shutdown is refused, not queued."""
    pair.ranks[0].parent.send_nowait(Shutdown())
    pair.ranks[0].submit(lab.request("late", 3))
    pair.tick()
    assert [(answer.status, answer.code) for answer in pair.ranks[0].refused] == [(503, "shutting_down")]


def test_the_last_plans_are_kept_for_a_crash_report(lab, pair):
    """R38: 256 agreements with both ranks' votes and this rank's rows, without the ids themselves."""
    pair.ranks[0].submit(lab.request("x", 5, max_tokens=3, ignore_eos=True))
    pair.tick(300)
    records = pair.ranks[0].loop.records
    assert len(records) == 256
    assert records[-1].tick == 300
    assert records[0].rows == ()

    pair.ranks[0].submit(lab.request("y", 5, max_tokens=3, ignore_eos=True))
    pair.tick()
    row = pair.ranks[0].loop.records[-1].rows[0]
    assert (row.request_id, row.start, row.num_tokens) == ("y", 0, 5)
    assert records[-1].rank0.vote.num_tokens == 5


def test_an_error_of_the_device_ends_the_pair_with_the_plan_of_its_step(lab, pair):
    """R38: nothing runs the step again on another path, and the record names the rows that the device was given."""
    rank = pair.ranks[0]
    calls = []

    def fail(plan, counts):
        calls.append(plan)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rank.submit(lab.request("x", 5, max_tokens=8, ignore_eos=True))
    pair.tick(2)
    rank.device.launch = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pair.tick()
    assert len(calls) == 1
    (row,), (kept,) = calls[0].rows, rank.loop.records[-1].rows
    assert (kept.request_id, kept.slot, kept.start) == ("x", row.slot, row.start)


def test_a_full_channel_fails_the_pair_instead_of_blocking(lab, pair):
    """decisions.md 17: the detokenizer stopped reading; a bounded queue, then PeerError."""
    rank = pair.ranks[0]
    rank._own[1]._max_pending_bytes = 1 << 12
    rank.detokenizer.receive_nowait = list

    def serve_without_a_reader():
        for number in range(400):
            items = [lab.request(f"f{number}-{item}", 1, max_tokens=1, stop_strings=["z" * 500]) for item in range(8)]
            rank.submit(*items)
            pair.tick(2)

    with pytest.raises(PeerError, match="detokenizer does not read"):
        serve_without_a_reader()


@pytest.fixture
def overlapped(lab):
    """A pair that plans and launches a decode step while the one before it runs."""
    with contextlib.closing(lab.Pair(lab.Sizes(overlap=True, decode_graphs=True))) as made:
        yield made


def flows(lab, pair, *names, ticks=3, **sampling):
    """Requests of rank 0 that decode, with a step that flies behind the last tick."""
    options = {"max_tokens": 20, "ignore_eos": True} | sampling
    requests = [lab.request(name, 3, **options) for name in names]
    pair.ranks[0].submit(*requests)
    pair.tick(ticks)
    return requests


def test_a_decode_step_is_launched_before_the_one_before_it_has_landed(lab, overlapped):
    """Overlap: each step is on the device when the host reads the one before; deltas come a tick late."""
    flows(lab, overlapped, "x", max_tokens=6)
    overlapped.drain()

    device = overlapped.ranks[0].device
    assert device.events[:6] == ["launch 0", "launch 1", "land 0", "launch 2", "land 1", "launch 3"]
    assert [row.follows for plan in device.plans for row in plan.rows] == [None, 0, 0, 0, 0, 0]
    assert len(device.plans) == 6, "max_tokens is known ahead: nothing runs behind it"
    assert device.events[-1] == "land 5"
    ids, reason = overlapped.ranks[0].output("x")
    assert (len(ids), reason) == (6, "length")
    assert overlapped.ranks[0].value("dsparkd_steps_ahead_total") == 5
    assert overlapped.ranks[0].value("dsparkd_dropped_rows_total") == 0
    assert overlapped.ranks[1].value("dsparkd_steps_ahead_total") == 0
    assert overlapped.ranks[1].device.counts == device.counts


def test_without_overlap_every_step_lands_in_its_tick(lab, pair):
    """The device is never ahead of the host unless that is on."""
    flows(lab, pair, "x")
    pair.drain()
    events = pair.ranks[0].device.events
    assert events == [f"{what} {number}" for number in range(len(events) // 2) for what in ("launch", "land")]


def test_what_a_step_gives_behind_an_end_exists_nowhere(lab, overlapped):
    """D-10, U-07: a stop id is seen when the next step runs already: its id is in no output, usage or prefix."""
    (request,) = flows(lab, overlapped, "x", ignore_eos=False, stop_ids=list(range(2, 22)), min_tokens=3)
    overlapped.drain()

    rank = overlapped.ranks[0]
    assert rank.output("x") == lab.expected(request, overlapped.sizes.max_context)
    ids, reason = rank.output("x")
    assert reason == "stop"
    assert rank.deltas["x"][-1].finish.output_tokens == len(ids)
    assert rank.value("dsparkd_output_tokens_total") == len(ids)
    assert rank.value("dsparkd_dropped_rows_total") == 1
    assert len(rank.device.plans) == len(ids) + 1
    rank.assert_nothing_held()


def test_a_boundary_behind_an_end_is_no_prefix(lab, overlapped):
    """D-10: the step that is dropped may cross a page end; its snapshot goes back, and the next turn starts before."""
    rank = overlapped.ranks[0]
    for length in range(1, 9):
        prompt = [(length * 3 + index) % lab.VOCAB for index in range(length)]
        first = lab.next_token(prompt)
        second = lab.next_token([*prompt, first])
        request = lab.request(f"x{length}", prompt, stop_ids=[second], ignore_eos=True)
        rank.submit(request)
        overlapped.drain()
        assert rank.output(request.request_id) == lab.expected(request, overlapped.sizes.max_context)
        rank.assert_nothing_held()
        turn = lab.request(f"y{length}", [*prompt, first, second, 5, 6, 7], max_tokens=1)
        rank.submit(turn)
        overlapped.drain()
        assert rank.output(turn.request_id) == lab.expected(turn, overlapped.sizes.max_context)
        rank.assert_nothing_held()
    assert rank.value("dsparkd_dropped_rows_total") > 0


def test_an_abort_takes_the_step_that_flies_along(lab, overlapped):
    """R-15, R31: aborted between a launch and its landing; the id may be used again at once, siblings go on."""
    requests = flows(lab, overlapped, "a", "b", "c")
    rank = overlapped.ranks[0]
    before = sum((delta.token_ids for delta in rank.deltas["b"]), ())
    rank.abort("b")
    again = lab.request("b", 9, max_tokens=4, ignore_eos=True)
    overlapped.tick()
    rank.deltas["old b"] = rank.deltas.pop("b")
    rank.submit(again)
    overlapped.drain()

    assert rank.output("old b") == (before, "abort")
    assert rank.output("b") == lab.expected(again, overlapped.sizes.max_context)
    for request in (requests[0], requests[2]):
        assert rank.output(request.request_id) == lab.expected(request, overlapped.sizes.max_context)
    assert rank.value("dsparkd_dropped_rows_total") == 1


def test_an_id_that_comes_again_with_its_abort_is_another_request(lab, overlapped):
    """R-14: the row that flies belongs to the one that has gone, though its id is alive when it lands."""
    flows(lab, overlapped, "b")
    rank = overlapped.ranks[0]
    again = lab.request("b", 9, max_tokens=4, ignore_eos=True)
    rank.abort("b")
    rank.submit(again)
    overlapped.tick()
    ends = [delta.finish is not None for delta in rank.deltas["b"]].index(True)
    rank.deltas["b"] = rank.deltas["b"][ends + 1 :]
    overlapped.drain()

    assert rank.output("b") == lab.expected(again, overlapped.sizes.max_context)
    rank.assert_nothing_held()


def test_nobody_who_flies_is_put_back(lab):
    """Out of pages: the step lands first, so that the youngest is put back with all of its ids."""
    with contextlib.closing(lab.Pair(lab.Sizes(num_pages=18, overlap=True, decode_graphs=True))) as pair:
        requests = flows(lab, pair, "a", "b", "c", "d", max_tokens=40)
        pair.drain()
        rank = pair.ranks[0]
        for request in requests:
            assert rank.output(request.request_id) == lab.expected(request, pair.sizes.max_context)
        assert rank.value("dsparkd_retractions_total") > 0
        assert rank.value("dsparkd_steps_ahead_total") > 0
        rank.assert_nothing_held()


def test_a_prompt_joins_the_rows_that_fly(lab, overlapped):
    """A mixed step is launched over a decode step, and the next ones are planned over it: its chunks' ends are known.

    Ids are counted over the rows that sample: a chunk that ends no prompt stands between them and gives none.
    """
    stream = flows(lab, overlapped, "stream")[0]
    late = [lab.request("long", 20, max_tokens=4, ignore_eos=True), lab.request("late", 5, max_tokens=4)]
    overlapped.ranks[0].submit(*late)
    overlapped.tick(3)
    device = overlapped.ranks[0].device
    assert [agreement.kind for agreement in overlapped.agreements[-3:]] == [
        StepKind.MIXED,
        StepKind.MIXED,
        StepKind.DECODE,
    ]
    assert [[(row.request_id, row.start, row.follows) for row in plan.rows] for plan in device.plans[-3:]] == [
        [("stream", 5, 0), ("long", 0, None), ("late", 0, None)],
        [("stream", 6, 0), ("late", 5, 1), ("long", 8, None)],
        [("stream", 7, 0), ("long", 20, 2), ("late", 6, 1)],
    ]
    first, second, third = range(len(device.plans) - 3, len(device.plans))
    assert device.events[-6:] == [
        f"launch {first}",
        f"land {first - 1}",
        f"land {first}",
        f"launch {second}",
        f"launch {third}",
        f"land {second}",
    ]
    overlapped.drain()
    for request in (stream, *late):
        assert overlapped.ranks[0].output(request.request_id) == lab.expected(request, overlapped.sizes.max_context)
    overlapped.ranks[0].assert_nothing_held()


@pytest.mark.parametrize("decode_graphs", [False, True])
def test_ids_behind_chunks_do_not_wait_for_a_launch_kernel_by_kernel(lab, decode_graphs):
    """Such a launch takes as long as a short chunk itself: the step before lands first, in the tick of the next one."""
    with contextlib.closing(lab.Pair(lab.Sizes(overlap=True, decode_graphs=decode_graphs))) as pair:
        rank = pair.ranks[0]
        rank.submit(lab.request("x", 20, max_tokens=4, ignore_eos=True))
        pair.tick(3)
        assert [plan.kind for plan in rank.device.plans] == [StepKind.PREFILL, StepKind.PREFILL, StepKind.DECODE]
        ahead = ["launch 2", "land 1"] if decode_graphs else ["land 1", "launch 2"]
        assert rank.device.events == ["launch 0", "land 0", "launch 1", *ahead]
        assert rank.device.plans[2].rows[0].follows == 0
        pair.drain()
        assert rank.device.events[-1] == "land 4"
        rank.assert_nothing_held()


@pytest.mark.parametrize("length", range(1, 9))
def test_a_row_that_follows_holds_the_pages_of_its_tokens_and_no_more(lab, overlapped, length):
    """A page taken too early is one that others are put back for."""
    rank = overlapped.ranks[0]
    rank.submit(lab.request("x", length, max_tokens=9, ignore_eos=True))
    overlapped.tick()
    while (request := rank.queue.find("x")) is not None:
        (row,) = rank.device.plans[-1].rows
        assert len(request.pages) == -(-(row.start + len(row.input_ids)) // lab.PAGE)
        overlapped.tick()
    assert [plan.rows[0].start for plan in rank.device.plans] == [0, *range(length, length + 8)]


@pytest.mark.parametrize("length", range(1, 9))
def test_overlapped_steps_keep_the_page_ends_that_others_keep(lab, length):
    """Decision 10: also the one that the first row behind a prompt's end crosses, before that end has landed."""
    seen = []
    for overlap in (False, True):
        with contextlib.closing(lab.Pair(lab.Sizes(overlap=overlap, decode_graphs=overlap))) as pair:
            pair.ranks[0].submit(lab.request("x", length, max_tokens=9, ignore_eos=True))
            pair.drain()
            plans = pair.ranks[0].device.plans
            seen.append([(save.position, save.inner_slot) for plan in plans for save in plan.snapshot_saves])
    assert seen[0] == seen[1]
    # Every page end that was computed, which is all but that of the last id.
    assert [position for position, _ in seen[0]] == list(range(lab.PAGE, length + 9, lab.PAGE))


def test_a_chunk_whose_prompt_is_read_lands_at_once(lab, overlapped):
    """Its log-probabilities say where the next chunk has to end."""
    request = lab.request("echo", 20, max_tokens=2, prompt_logprobs=True, ignore_eos=True)
    overlapped.ranks[0].submit(request)
    overlapped.tick(3)
    assert overlapped.ranks[0].device.events == [
        f"{what} {number}" for number in range(3) for what in ("launch", "land")
    ]
    overlapped.drain()
    assert overlapped.ranks[0].output("echo") == lab.expected(request, overlapped.sizes.max_context)


def test_a_prefix_can_be_resumed_from_while_the_chunk_that_leaves_it_flies(lab, overlapped):
    """The device runs what reads a page or a snapshot behind what writes it, whenever the host learns of the ids."""
    rank = overlapped.ranks[0]
    prompt = [token % lab.VOCAB for token in range(10)]
    choices = [lab.request(f"c{choice}", prompt, max_tokens=3, ignore_eos=True) for choice in range(2)]
    rank.submit(*choices)
    overlapped.tick(2)
    assert rank.device.events == ["launch 0", "land 0", "launch 1"]
    assert [(row.request_id, row.start) for row in rank.device.plans[1].rows] == [("c0", 10), ("c1", 8)]
    overlapped.drain()
    for request in choices:
        assert rank.output(request.request_id) == lab.expected(request, overlapped.sizes.max_context)


@pytest.mark.parametrize("ticks", [1, 2, 3])
def test_an_abort_takes_the_chunk_that_flies_along(lab, overlapped, ticks):
    """R-15: its pages and its slot go at once, what it left in the tree stays, its snapshots are given back once."""
    rank = overlapped.ranks[0]
    prompt = [token % lab.VOCAB for token in range(40)]
    rank.submit(lab.request("gone", prompt, max_tokens=3))
    overlapped.tick(ticks)
    rank.abort("gone")
    again = lab.request("again", prompt, max_tokens=3)
    rank.submit(again)
    overlapped.drain()
    assert rank.output("gone")[1] == "abort"
    assert rank.output("again") == lab.expected(again, overlapped.sizes.max_context)
    assert rank.deltas["again"][-1].finish.cached_tokens == {1: 16, 2: 32, 3: 36}[ticks]
    rank.assert_nothing_held()


def test_rows_fly_beside_the_peers_prompts(lab, overlapped):
    """X-11 as amended: a mixed step of which this rank has decode rows alone leaves it ahead."""
    stream = flows(lab, overlapped, "stream")[0]
    overlapped.ranks[1].submit(*[lab.request(f"p{item}", 40, max_tokens=1) for item in range(3)])
    overlapped.tick(3)
    assert [agreement.kind for agreement in overlapped.agreements[-3:]] == [StepKind.MIXED] * 3
    number = len(overlapped.ranks[0].device.plans) - 1
    assert overlapped.ranks[0].device.events[-1] == f"land {number - 1}"
    overlapped.drain()
    assert overlapped.ranks[0].output("stream") == lab.expected(stream, overlapped.sizes.max_context)


def test_a_stop_lands_what_flies_before_anything_is_let_go(lab, overlapped):
    """X-27, L-33: rank 1, which heard of no stop, still hands out the ids of the step that it had launched."""
    for rank in overlapped.ranks:
        rank.submit(lab.request("x", 10, max_tokens=50, ignore_eos=True))
    overlapped.tick(4)
    told = len(overlapped.ranks[1].deltas["x"])
    overlapped.ranks[0].parent.send_nowait(Shutdown())
    overlapped.tick()

    assert overlapped.agreements[-1].stop
    for rank in overlapped.ranks:
        launched = len(rank.device.plans)
        rank.loop._leave()
        rank.collect()
        assert rank.device.events[-1] == f"land {launched - 1}"
        assert rank.output("x")[1] == "abort"
        rank.assert_nothing_held()
    assert len(overlapped.ranks[1].output("x")[0]) == told + 1


def test_a_stop_outside_of_an_agreement_lands_what_flies(lab, overlapped):
    """X-24: whichever way the loop is left, no step stays behind."""
    flows(lab, overlapped, "x")
    rank = overlapped.ranks[0]
    assert rank.device.events[-1] == "land 1"
    rank.loop._leave()
    assert rank.device.events[-1] == "land 2"


def test_nobody_parks_over_a_step_that_flies(lab, overlapped):
    """X-28: a result to read is work, though no request is left that waits for it."""
    flows(lab, overlapped, "x")
    overlapped.ranks[0].abort("x")
    overlapped.tick()
    assert (overlapped.agreements[-1].kind, overlapped.agreements[-1].park) == (StepKind.IDLE, False)
    overlapped.tick()
    assert overlapped.agreements[-1].park
    overlapped.ranks[0].assert_nothing_held()


def test_overlapped_steps_give_what_others_give(lab):
    """Path invariance: the same deltas, counts and prefixes with overlap on and off, for one script."""
    script = [
        ("submit", 0, 4, 1, 30, 12, FLAVOURS[5]),
        ("tick", 3),
        ("submit", 1, 3, 1, 30, 12, FLAVOURS[4]),
        ("submit", 0, 2, 2, 9, 20, FLAVOURS[2]),
        ("tick", 5),
        ("submit", 0, 4, 1, 25, 9, FLAVOURS[3]),
        ("submit", 1, 2, 3, 5, 20, FLAVOURS[1]),
    ]
    seen = []
    for overlap in (False, True):
        with contextlib.closing(lab.Pair(lab.Sizes(num_pages=30, overlap=overlap, decode_graphs=overlap))) as pair:
            submitted, _ = play(lab, pair, script)
            pair.drain()
            told = [pair.ranks[rank].deltas[request.request_id] for rank, request in submitted]
            finishes = [deltas[-1].finish for deltas in told]
            ids = [tuple(token for delta in deltas for token in delta.token_ids) for deltas in told]
            logprobs = [tuple(entry for delta in deltas for entry in delta.logprobs or ()) for deltas in told]
            prompts = [deltas[0].prompt_logprobs for deltas in told]
            seen.append((ids, logprobs, prompts, [(f.reason, f.matched, f.output_tokens) for f in finishes]))
            ahead = sum(rank.value("dsparkd_steps_ahead_total") for rank in pair.ranks)
            assert bool(ahead) == overlap

    assert seen[0] == seen[1]


def test_when_a_rank_reads_its_results_is_its_own_matter(lab, overlapped):
    """X-10, X-26: one rank ahead, the other not: the same steps of the same sizes, in the same order."""
    other = overlapped.ranks[1].loop
    other._bounds = dataclasses.replace(other._bounds, overlap=False)
    requests = [lab.request(f"r{item}", 3 + item, max_tokens=9 + item, ignore_eos=True) for item in range(6)]
    for request in requests:
        for rank in overlapped.ranks:
            rank.submit(request)
        overlapped.tick(2)
    overlapped.drain()

    ahead, behind = overlapped.ranks
    assert [plan.kind for plan in ahead.device.plans] == [plan.kind for plan in behind.device.plans]
    assert ahead.device.counts == behind.device.counts
    assert ahead.value("dsparkd_steps_ahead_total") > 0
    assert behind.value("dsparkd_steps_ahead_total") == 0
    for request in requests:
        for rank in overlapped.ranks:
            assert rank.output(request.request_id) == lab.expected(request, 64)


def test_an_error_that_shows_when_a_step_lands_ends_the_pair_with_both_plans(lab, overlapped):
    """R38: what fails on the device shows a tick late; the records hold that step's rows and those launched over it."""
    flows(lab, overlapped, "x")
    rank = overlapped.ranks[0]
    launch = rank.device.launch

    def fail(plan, counts):
        launch(plan, counts)

        def land():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return land

    rank.device.launch = fail
    overlapped.tick()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        overlapped.tick()
    failed, over = list(rank.loop.records)[-2:]
    assert [row.request_id for row in (*failed.rows, *over.rows)] == ["x", "x"]
    assert over.rows[0].start == failed.rows[0].start + 1
