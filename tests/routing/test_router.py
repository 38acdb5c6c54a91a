"""Router over real channels with stand-in ranks."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from dsparkd.config import LimitsConfig
from dsparkd.errors import BoardError, FatalError, InvariantError, PeerError, RequestError, StartError
from dsparkd.messages import (
    Abort,
    Admitted,
    Farewell,
    LoadSnapshot,
    Progress,
    Refused,
    RoutedBatch,
    SamplingParams,
    Shutdown,
    StartFailed,
)
from dsparkd.routing import router
from dsparkd.routing.router import Item
from tests.routing.fakes import (
    Clock,
    FakeBackend,
    make_config,
    make_finish,
    make_item,
    make_ready,
    make_snapshot,
    metric,
    started_backend,
    text_delta,
)


def items(*ranks: int | None, prefix: str = "r", num_prompt_tokens: int = 4) -> list:  # type: ignore[type-arg]
    return [make_item(f"{prefix}{index}", rank, num_prompt_tokens) for index, rank in enumerate(ranks)]


async def delivered(backend: FakeBackend, count: int) -> None:
    await backend.until(lambda: sum(len(rank.request_ids) for rank in backend.ranks) == count)


def frames(backend: FakeBackend) -> list[list[list[str]]]:
    """Request ids by rank and frame."""
    return [[[r.request_id for r in batch.requests] for batch in rank.batches] for rank in backend.ranks]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((0, 0, 0), [[["r0", "r1", "r2"]], []]),
        ((1, 1, 1), [[], [["r0", "r1", "r2"]]]),
        ((0, None, 1, None, 0), [[["r0", "r3", "r4"]], [["r1", "r2"]]]),
        ((None, None), [[["r0"]], [["r1"]]]),
        ((1, 0), [[["r1"]], [["r0"]]]),
    ],
)
async def test_r02_r06_frames_by_rank_in_item_order(ranks: tuple[int | None, ...], expected: object) -> None:
    """R-02, R-04, R-06, R28: a uniform batch is one frame; any other at most one a rank, the first item's rank never
    applied to another, order inside a frame kept."""
    async with started_backend() as backend:
        await backend.router.submit(items(*ranks))
        await delivered(backend, len(ranks))
        assert frames(backend) == expected


async def test_r04_64_uniform_items_are_one_frame_with_its_number() -> None:
    """R-04, R-12: frames count from 1 per rank, which the rank's snapshots refer to."""
    async with started_backend() as backend:
        await backend.router.submit(items(*[1] * 64))
        await backend.router.submit(items(*[1] * 64, prefix="s"))
        await delivered(backend, 128)
        assert [(batch.dp_rank, batch.frame, len(batch.requests)) for batch in backend.ranks[1].batches] == [
            (1, 1, 64),
            (1, 2, 64),
        ]
        assert metric(backend.registry, "dsparkd_routed_batches_total", dp_rank="1", delivery="whole") == 2
        assert metric(backend.registry, "dsparkd_routed_requests_total", dp_rank="1", route="explicit") == 128


async def test_r09_dispatch_time_is_set_once_on_every_item() -> None:
    """R-09: the router adds its stamp and keeps the earlier ones."""
    clock = Clock()
    async with started_backend(clock=clock) as backend:
        await backend.router.submit(items(0, 0))
        await delivered(backend, 2)
        for request in backend.ranks[0].batches[0].requests:
            stamps = (request.received_ns, request.encoded_ns, request.tokenized_ns, request.dispatched_ns)
            assert stamps == (1, 2, 3, clock.now_ns)


async def test_r10_a_replay_routes_alike() -> None:
    """R-10: two runs of one log give one assignment."""

    async def run() -> list[list[list[str]]]:
        async with started_backend(clock=Clock()) as backend:
            for number, size in enumerate((3, 1, 7, 2, 5)):
                await backend.router.submit(items(*[None] * size, prefix=f"{number}.", num_prompt_tokens=size))
            await delivered(backend, 18)
            return frames(backend)

    assert await run() == await run()


async def test_r11_explicit_items_count_for_the_balance() -> None:
    """R-11: 32 explicit items on rank 0, then 32 free ones: the free ones go to rank 1."""
    async with started_backend() as backend:
        await backend.router.submit(items(*[0] * 32))
        await backend.router.submit(items(*[None] * 32, prefix="f"))
        await delivered(backend, 64)
        assert len(backend.ranks[1].request_ids) == 32
        assert metric(backend.registry, "dsparkd_load_requests", dp_rank="0", source="speculative") == 32


async def test_r11_the_load_is_taken_back_when_items_end() -> None:
    """R-11: by their last text, by a refusal, and after an abort."""
    async with started_backend() as backend:
        submission = await backend.router.submit(items(0, 0, 0))
        await delivered(backend, 3)
        await backend.say(text_delta("r0", "x", finish=make_finish()))
        await backend.ranks[0].channel.send(Refused("r1", 400, "bad", None, "no"))
        backend.router.abort("r2")
        await backend.until(lambda: backend.router.outstanding() == 0)
        assert metric(backend.registry, "dsparkd_load_requests", dp_rank="0", source="speculative") == 0
        assert submission.handles[0].finished


async def test_r12_snapshots_are_read_from_the_load_board() -> None:
    """R-10, R-12: a rank that reports work gets fewer items."""
    async with started_backend() as backend:
        backend.board[0] = make_snapshot(0, 1, outstanding_tokens=1000)
        await backend.router.submit(items(None, None))
        await delivered(backend, 2)
        assert backend.ranks[1].request_ids == ["r0", "r1"]
        assert metric(backend.registry, "dsparkd_load_refreshes_total", result="fresh") == 1


async def test_load_gauges_fall_when_the_ranks_idle_though_nothing_is_routed() -> None:
    """R36 as a gauge: what a rank said last is shown at the scrape, not what it said when a request was last routed."""
    async with started_backend() as backend:
        backend.board[0] = make_snapshot(0, 1, outstanding_tokens=1000, outstanding_requests=3)
        await backend.router.submit(items(0, 0))
        shown = {"dp_rank": "0", "source": "snapshot"}
        sent = {"dp_rank": "0", "source": "speculative"}
        assert metric(backend.registry, "dsparkd_load_tokens", **shown) == 1000
        assert metric(backend.registry, "dsparkd_load_requests", **sent) == 2

        backend.board[0] = make_snapshot(0, 2, frame=1, outstanding_tokens=0, outstanding_requests=0, published_ns=5)

        assert metric(backend.registry, "dsparkd_load_tokens", **shown) == 0
        assert metric(backend.registry, "dsparkd_load_requests", **shown) == 0
        assert metric(backend.registry, "dsparkd_load_requests", **sent) == 0


async def refused(backend: FakeBackend, batch: list) -> RequestError:  # type: ignore[type-arg]
    """The refusal, after checking that nothing was queued or counted."""
    before = backend.router.outstanding()
    with pytest.raises(RequestError) as caught:
        await backend.router.submit(batch)
    await asyncio.sleep(0.01)
    assert backend.router.outstanding() == before
    assert sum(len(rank.request_ids) for rank in backend.ranks) == before
    return caught.value


@pytest.mark.parametrize("rank", [-1, 2, True, 10**30])
async def test_r03_ranks_that_do_not_exist_are_400(rank: int) -> None:
    """R-01, R-03, R28: one bad item refuses the whole batch, names its index, and the router lives on."""
    async with started_backend() as backend:
        error = await refused(backend, items(0, 0, rank))
        assert (error.status, error.code) == (400, "invalid_dp_rank")
        assert "item 2" in error.message
        await backend.router.submit(items(0))


async def test_r03_a_rank_that_left_is_503_and_the_other_serves() -> None:
    """R-03: in range but not ready; balanced items avoid it."""
    async with started_backend() as backend:
        await backend.ranks[1].channel.send(Farewell("rank1"))
        await backend.ranks[0].channel.send(Progress(0, "mark", 1, 1))
        await backend.until(lambda: len(backend.progress) == 2)
        await asyncio.sleep(0.01)
        error = await refused(backend, items(0, 1))
        assert (error.status, error.code, error.retry_after_s) == (503, "dp_rank_unavailable", 1)
        await backend.router.submit(items(None, None))
        await delivered(backend, 2)
        assert backend.ranks[0].request_ids == ["r0", "r1"]


async def test_r07_a_batch_that_does_not_fit_whole_is_refused_whole() -> None:
    """R-07: room 63, batch 64: 429 with Retry-After, and it is never split; room 64: accepted."""
    config = make_config(limits=LimitsConfig(max_batch_items=64, queue_items=64))
    async with started_backend(config) as backend:
        await backend.router.submit(items(0, prefix="one"))
        error = await refused(backend, items(*[0] * 64))
        assert (error.status, error.code, error.retry_after_s) == (429, "queue_full", 1)
        await backend.say(text_delta("one0", "", finish=make_finish()))
        await backend.ranks[0].channel.send(Admitted("one0", 1))
        await backend.until(lambda: backend.router.outstanding() == 0)
        await backend.router.submit(items(*[0] * 64))
        await delivered(backend, 65)


async def test_r07_balanced_items_use_the_room_of_both_ranks() -> None:
    """R-07: a mixed batch fits while the ranks together have room, and not one item more."""
    config = make_config(limits=LimitsConfig(max_batch_items=8, queue_items=8))
    async with started_backend(config) as backend:
        await backend.router.submit(items(*[0] * 8))
        await backend.router.submit(items(*[None] * 8, prefix="f"))
        error = await refused(backend, items(None, prefix="g"))
        assert error.code == "queue_full"


async def test_prompt_log_probabilities_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in one frame a prompt: more than the channels hold would look like a stuck process, and end all."""
    monkeypatch.setattr(router, "MAX_PROMPT_LOGPROBS", 100)

    def asked(request_id: str, tokens: int) -> Item:
        sampling = SamplingParams(max_tokens=1, seed=0, top_logprobs=4, prompt_logprobs=True)
        request = msgspec.structs.replace(make_item(request_id, 0).request, prompt_ids=(7,) * tokens, sampling=sampling)
        return Item(request, 0)

    async with started_backend() as backend:
        await backend.router.submit([asked("a", 10), asked("b", 5)])
        await delivered(backend, 2)

        error = await refused(backend, [asked("c", 6)])

        assert (error.status, error.code, error.retry_after_s) == (429, "queue_full", 1)
        await backend.router.submit([asked("d", 5), *items(0)])
        await backend.say(text_delta("a", "x", finish=make_finish()))
        await backend.until(lambda: backend.router.outstanding() == 3)
        await backend.router.submit([asked("c", 10)])


async def test_r07_batches_beyond_the_limit_are_400() -> None:
    """R-07: limits.max_batch_items, and the empty batch."""
    config = make_config(limits=LimitsConfig(max_batch_items=2))
    async with started_backend(config) as backend:
        assert (await refused(backend, items(0, 0, 0))).code == "batch_too_large"
        assert (await refused(backend, [])).status == 400


async def test_r14_ids_are_unique_while_alive() -> None:
    """R-14: a duplicate inside a batch and of a running id are 409; a finished id may come again."""
    async with started_backend() as backend:
        twins = [make_item("a"), make_item("a")]
        assert (await refused(backend, twins)).status == 409
        await backend.router.submit([make_item("a", 0)])
        error = await refused(backend, [make_item("b"), make_item("a")])
        assert (error.status, error.code) == (409, "duplicate_request_id")
        await backend.ranks[0].channel.send(Admitted("a", 1))
        await backend.say(text_delta("a", "x", finish=make_finish()))
        await backend.until(lambda: backend.router.outstanding() == 0)
        await backend.router.submit([make_item("a", 0)])


async def test_r14_an_id_stays_taken_until_its_rank_has_answered() -> None:
    """R-14: text and admission travel on different channels; a late Admitted must not admit a newer request."""
    async with started_backend() as backend:
        await backend.router.submit([make_item("a", 0)])
        await backend.say(text_delta("a", "x", finish=make_finish()))
        await backend.until(lambda: backend.router.outstanding() == 0)
        with pytest.raises(RequestError, match="in use"):
            await backend.router.submit([make_item("a", 0)])
        await backend.ranks[0].channel.send(Admitted("a", 1))
        await asyncio.sleep(0.01)
        await backend.router.submit([make_item("a", 0)])


async def test_admission_waits_for_every_item() -> None:
    """Decision 15: the status line may leave only when all items are in their queues."""
    async with started_backend() as backend:
        submission = await backend.router.submit(items(0, 1))
        waiting = asyncio.ensure_future(submission.admitted())
        await backend.ranks[0].channel.send(Admitted("r0", 1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await backend.ranks[1].channel.send(Admitted("r1", 1))
        await waiting


async def test_one_refusal_refuses_the_batch_and_aborts_its_siblings() -> None:
    """R-01, decision 15: a rank's refusal keeps its status and code, and no sibling goes on unseen."""
    async with started_backend() as backend:
        submission = await backend.router.submit(items(0, 1))
        await delivered(backend, 2)
        await backend.ranks[1].channel.send(Admitted("r1", 1))
        await backend.ranks[0].channel.send(Refused("r0", 429, "queue_full", "prompt", "full", 3))
        with pytest.raises(RequestError) as caught:
            await submission.admitted()
        error = caught.value
        assert (error.status, error.code, error.param, error.retry_after_s) == (429, "queue_full", "prompt", 3)
        await backend.until(lambda: backend.ranks[1].aborted == ["r1"])
        assert backend.ranks[0].aborted == []


async def test_text_of_all_items_comes_in_one_wake_up() -> None:
    """Many deltas a wake-up: the client's task sees everything that has come, in order."""
    async with started_backend() as backend:
        submission = await backend.router.submit(items(0, 1))
        await backend.say(text_delta("r0", "a"), text_delta("r1", "b"), text_delta("r0", "c", finish=make_finish()))
        arrived = await submission.receive()
        assert [(index, delta.text) for index, delta in arrived] == [(0, "a"), (1, "b"), (0, "c")]
        await backend.say(text_delta("r1", "d", finish=make_finish("length")))
        assert [delta.text for _, delta in await submission.receive()] == ["d"]
        assert await submission.receive() == []


async def test_r15_a_client_that_leaves_takes_exactly_its_own_items() -> None:
    """R-15: one Abort with the exact id for each unfinished item, also where one id is a prefix of another."""
    async with started_backend() as backend:
        await backend.router.submit([make_item("a1", 0)])
        leaving = await backend.router.submit([make_item("a", 0), make_item("b", 0)])
        await delivered(backend, 3)
        await backend.say(text_delta("b", "done", finish=make_finish()))
        await backend.until(lambda: leaving.handles[1].finished)
        leaving.abort()
        await backend.until(lambda: backend.router.outstanding() == 1)
        assert backend.ranks[0].aborted == ["a"]
        leaving.abort()
        await asyncio.sleep(0.01)
        assert backend.ranks[0].aborted == ["a"]


async def test_r15_an_abort_never_overtakes_its_request() -> None:
    """R-15: frames and aborts leave in the order in which they were decided."""
    async with started_backend() as backend:
        submission = await backend.router.submit([make_item("a", 0)])
        submission.abort()
        await backend.until(lambda: len(backend.ranks[0].received) == 2)
        assert [type(message) for message in backend.ranks[0].received] == [RoutedBatch, Abort]


async def test_unread_text_beyond_the_buffer_is_an_overrun() -> None:
    """Decision 17: the client that does not read is found by what comes while it is being written to; a burst that
    nobody had a chance to read yet is none."""
    config = make_config(limits=LimitsConfig(stream_buffer_bytes=4096))
    async with started_backend(config) as backend:
        submission = await backend.router.submit(items(0, 0))
        overrun = asyncio.ensure_future(submission.overrun())
        for _ in range(3):
            await backend.say(text_delta("r0", "x" * 10_000))
        assert await submission.receive()
        await backend.say(text_delta("r0", "y"))
        await asyncio.sleep(0.01)
        assert not overrun.done()
        await backend.say(text_delta("r0", "x" * 4096))
        await asyncio.wait_for(overrun, 5)


async def test_r08_a_frame_that_cannot_be_delivered_fails_all_its_items() -> None:
    """R-08: 503 for each, none retried on the other rank, and the pair fails."""
    async with started_backend() as backend:
        backend.ranks[0].channel.close()
        submission = await backend.router.submit(items(*[0] * 64))
        with pytest.raises(RequestError) as caught:
            await submission.admitted()
        assert caught.value.status == 503
        with pytest.raises(PeerError, match="rank 0"):
            await backend.running
        backend.router.fail_all("rank 0 was lost")
        assert backend.router.outstanding() == 0
        assert backend.ranks[1].request_ids == []


async def test_l38_failure_reaches_every_client_after_its_text() -> None:
    """L-38: text that had come is kept, then a readable error; nothing new is taken."""
    async with started_backend() as backend:
        submission = await backend.router.submit(items(0, 1))
        await backend.say(text_delta("r0", "a"), text_delta("r1", "b", finish=make_finish()))
        await backend.until(lambda: submission.handles[1].finished)
        backend.router.fail_all("rank 1 ended unexpectedly")
        assert len(await submission.receive()) == 2
        with pytest.raises(RequestError, match="rank 1 ended") as caught:
            await submission.receive()
        assert caught.value.status == 503
        with pytest.raises(RequestError, match="has failed"):
            await backend.router.submit(items(0, prefix="s"))


async def test_failure_spares_a_batch_that_had_ended() -> None:
    """A client whose answer is complete must not get an error for it."""
    async with started_backend() as backend:
        submission = await backend.router.submit(items(0))
        await backend.say(text_delta("r0", "all", finish=make_finish()))
        await backend.until(lambda: backend.router.outstanding() == 0)
        backend.router.fail_all("later")
        assert [delta.text for _, delta in await submission.receive()] == ["all"]
        assert await submission.receive() == []


async def test_l34_draining_admits_nothing_and_ends_with_the_last_request() -> None:
    """L-33, L-34: 503 for new work, a deadline for old work, then an abort that clients see as finish reason."""
    async with started_backend() as backend:
        submission = await backend.router.submit(items(0))
        await delivered(backend, 1)
        backend.router.begin_drain()
        with pytest.raises(RequestError) as caught:
            await backend.router.submit(items(0, prefix="s"))
        assert (caught.value.status, caught.value.code) == (503, "draining")
        assert not await backend.router.drained(0.01)
        backend.router.abort_all()
        assert await backend.router.drained(5)
        arrived = await submission.receive()
        assert arrived[-1][1].finish is not None
        assert arrived[-1][1].finish.reason == "abort"
        backend.router.send_shutdown()
        await backend.until(lambda: all(Shutdown() in rank.received for rank in backend.ranks))


async def test_l35_run_ends_quietly_after_all_three_farewells() -> None:
    """L-35: end-of-file after a farewell is no failure, and text before it still arrives."""
    async with started_backend() as backend:
        submission = await backend.router.submit(items(0))
        await delivered(backend, 1)
        await backend.ranks[0].channel.send(Farewell("rank0"))
        await backend.ranks[0].channel.send(Progress(0, "unread", 1, 1))
        backend.ranks[0].channel.close()
        await asyncio.sleep(0.01)
        backend.router.abort("r0")  # a client that leaves now is no failure either
        await backend.say(text_delta("r0", "late", finish=make_finish()))
        assert [delta.text for _, delta in await submission.receive()] == ["late"]
        await backend.ranks[1].channel.send(Farewell("rank1"))
        await backend.detokenizer.send(Farewell("detokenizer"))
        await asyncio.wait_for(backend.running, 5)


@pytest.mark.parametrize("who", ["rank 0", "rank 1", "detokenizer"])
async def test_a_peer_that_ends_without_farewell_is_fatal(who: str) -> None:
    """L-30's channel side: the error names who is gone."""
    async with started_backend() as backend:
        channels = {"rank 0": backend.ranks[0].channel, "rank 1": backend.ranks[1].channel}
        channels.get(who, backend.detokenizer).close()  # type: ignore[call-overload]
        with pytest.raises(PeerError, match=who):
            await backend.running


async def test_nothing_is_taken_before_everybody_is_warm() -> None:
    """L-16: starting is 503 `starting`; both ranks and the detokenizer must report."""
    backend = FakeBackend(make_config())
    await backend.open()
    try:
        await backend.ranks[0].channel.send(make_ready(0))
        await backend.ranks[1].channel.send(make_ready(1))
        await asyncio.sleep(0.01)
        assert backend.router.state == "starting"
        with pytest.raises(RequestError) as caught:
            await backend.router.submit(items(0))
        assert (caught.value.status, caught.value.code) == (503, "starting")
        await backend.detokenizer.send(Progress(-1, "detokenizer_ready", 1, 1))
        ready = await backend.router.started()
        assert [message.dp_rank for message in ready] == [0, 1]
        assert backend.router.state == "serving"
    finally:
        await backend.close()


@pytest.mark.parametrize(("code", "kind"), [(78, StartError), (70, FatalError)])
async def test_a_child_that_cannot_start_says_why(code: int, kind: type[Exception]) -> None:
    """L-40: the start ends with the child's own words and exit code."""
    backend = FakeBackend(make_config())
    await backend.open()
    try:
        await backend.ranks[1].channel.send(StartFailed("rank1", code, "no such tensor"))
        with pytest.raises(kind, match="rank1: no such tensor") as caught:
            await backend.router.started()
        assert getattr(caught.value, "exit_code") == code  # noqa: B009  both kinds have it
    finally:
        await backend.close()


async def test_a_rank_that_claims_to_be_the_other_is_fatal() -> None:
    """A mixed-up wiring must not serve."""
    backend = FakeBackend(make_config())
    await backend.open()
    try:
        await backend.ranks[0].channel.send(make_ready(1))
        with pytest.raises(InvariantError, match="rank 0"):
            await backend.running
    finally:
        await backend.close()


async def test_l12_l11_health_judges_by_the_monotonic_clock_alone() -> None:
    """L-12: ages come from the injected monotonic clock; there is no wall clock to be set."""
    clock = Clock()
    async with started_backend(clock=clock) as backend:
        for rank in range(2):
            backend.board[rank] = make_snapshot(rank, 1, published_ns=clock.now_ns)
        assert [verdict.reason for verdict in backend.router.health()] == ["ok", "ok"]
        clock.advance(30.1)
        assert [verdict.reason for verdict in backend.router.health()] == ["stale", "stale"]


async def test_l11_a_board_that_cannot_be_read_makes_both_ranks_unwell() -> None:
    """L-11, L-14: unreadable is unhealthy; requests are still routed, by what was sent alone."""
    async with started_backend() as backend:

        def broken(dp_rank: int) -> LoadSnapshot | None:
            raise BoardError("never whole")

        backend.read_place = broken
        assert [verdict.reason for verdict in backend.router.health()] == ["unreadable", "unreadable"]
        await backend.router.submit(items(None, None))
        await delivered(backend, 2)
        assert (backend.ranks[0].request_ids, backend.ranks[1].request_ids) == (["r0"], ["r1"])


async def test_l11_a_snapshot_in_another_ranks_place_is_a_duplicate_and_no_load() -> None:
    """L-11, R-13: what stands in a rank's place must be its own."""
    async with started_backend() as backend:
        for place in range(2):
            backend.board[place] = make_snapshot(0, 1, published_ns=time.monotonic_ns(), outstanding_tokens=9)
        assert [verdict.reason for verdict in backend.router.health()] == ["duplicate", "missing"]
        assert metric(backend.registry, "dsparkd_load_tokens", dp_rank="1", source="snapshot") == 0
