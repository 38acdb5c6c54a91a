"""Router: API batches to ranks, ranks' answers and detokenizer's text back to whoever submitted.

It owns the parent's three channels, the load board and every request that has not ended. One task a channel reads,
one task a rank sends, so frames and aborts reach a rank in the order in which they were decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, assert_never

import msgspec

from dsparkd import metrics
from dsparkd.config import Config
from dsparkd.errors import BoardError, FatalError, InvariantError, PeerError, RequestError, StartError
from dsparkd.ipc.channel import AsyncChannel
from dsparkd.messages import (
    Abort,
    Admitted,
    CrashReport,
    Farewell,
    FromDetokenizer,
    FromRank,
    Grammar,
    LoadSnapshot,
    MetricsFrame,
    Progress,
    RankReady,
    Refused,
    RoutedBatch,
    Shutdown,
    StartFailed,
    TextDelta,
    TextDeltas,
    TokenizedRequest,
    ToRank,
)
from dsparkd.routing.load import NUM_RANKS, Load, LoadBoard, RankHealth, judge_ranks

State = Literal["starting", "serving", "draining", "failed"]
RETRY_AFTER_S = 1
# Log-probabilities of prompt tokens and alternatives that may be under way at once: a whole prompt's come in one frame,
# about 27 bytes each from the detokenizer (250 at worst), and take 225 here. More would overflow the channels' bounds,
# which count an overflow as a stuck process and end the server.
MAX_PROMPT_LOGPROBS = 1_000_000


class Item(NamedTuple):
    """One request of an API batch and the rank that it names, if any."""

    request: TokenizedRequest
    dp_rank: int | None


def num_prompt_logprobs(request: TokenizedRequest) -> int:
    """Log-probabilities that a request's first text brings along, alternatives included."""
    sampling = request.sampling
    return len(request.prompt_ids) * (1 + (sampling.top_logprobs or 0)) if sampling.prompt_logprobs else 0


class RequestHandle:
    """One request that is on its way or running; the router moves it, its Submission shows it."""

    def __init__(self, submission: Submission, index: int, request: TokenizedRequest, dp_rank: int, frame: int) -> None:
        self.submission = submission
        self.index = index
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_prompt_logprobs = num_prompt_logprobs(request)
        self.dp_rank = dp_rank
        self.frame = frame
        self.answered = False  # the rank said Admitted or Refused
        self.finished = False
        self.left = False  # the client is gone: text for it is dropped


class Submission:
    """One API batch as its client's task sees it: admission first, then text of all its items as it comes.

    buffer_bytes bounds what may come while the last text is still being written to the client; beyond it the batch
    counts as overrun: its client does not read.
    """

    def __init__(self, router: Router, buffer_bytes: int) -> None:
        self.handles: list[RequestHandle] = []
        self._router = router
        self._buffer_bytes = buffer_bytes
        self._arrived: list[tuple[int, TextDelta]] = []
        self._arrived_bytes = 0
        self._is_writing = False
        self._failure: RequestError | None = None
        self._change = asyncio.Event()
        self._overrun = asyncio.Event()

    async def admitted(self) -> None:
        """Wait until every item is in its rank's queue. Raises the first refusal, and aborts the other items."""
        while self._failure is None:
            self._change.clear()
            if all(handle.answered for handle in self.handles):
                return
            await self._change.wait()
        self.abort()
        raise self._failure

    async def receive(self) -> list[tuple[int, TextDelta]]:
        """Wait for text and return (item index, delta) of everything that has come; empty when all items have ended.

        Raises RequestError when the server fails under the batch, after the text that came before.
        """
        self._is_writing = False
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            if all(handle.finished for handle in self.handles):
                return []
            self._change.clear()
            await self._change.wait()
        arrived, self._arrived, self._arrived_bytes = self._arrived, [], 0
        self._is_writing = True
        return arrived

    async def overrun(self) -> None:
        """Wait until more text waits than the client may leave unread; for ever if it reads."""
        await self._overrun.wait()

    def abort(self) -> None:
        """The client left: end exactly the items that have not ended."""
        for handle in self.handles:
            if not handle.finished:
                handle.left = True
                self._router.abort(handle.request_id)

    def deliver(self, index: int, delta: TextDelta) -> None:
        """Take one delta; for the router."""
        self._arrived.append((index, delta))
        self._arrived_bytes += _size(delta)
        # However much comes in one turn of the loop: whoever waits for it has not had a chance to read it yet.
        if self._is_writing and self._arrived_bytes > self._buffer_bytes:
            self._overrun.set()
        self._change.set()

    def fail(self, error: RequestError) -> None:
        """Take the first failure; for the router."""
        self._failure = self._failure or error
        self._change.set()

    def notice(self) -> None:
        """Look again at the handles; for the router."""
        self._change.set()


def _size(delta: TextDelta) -> int:
    """Estimate the bytes that a delta becomes on the wire."""
    size = 64 + len(delta.text)
    for entries in (delta.logprobs, delta.prompt_logprobs):
        size += sum(64 * (1 + len(entry.top)) for entry in entries or ())
    return size


class Router:
    """Owned by the parent's event loop; `run` must run for anything else to move.

    board: reads what stands in a rank's place on the load board; raises BoardError. clock: CLOCK_MONOTONIC nanoseconds.
    on_progress: called for each start-up stage of a child. on_crash: called with what a failing rank says of its end.
    """

    def __init__(
        self,
        config: Config,
        channels: tuple[AsyncChannel[FromRank], AsyncChannel[FromRank]],
        detokenizer: AsyncChannel[FromDetokenizer],
        registry: metrics.Registry,
        *,
        board: Callable[[int], LoadSnapshot | None],
        clock: Callable[[], int] = time.monotonic_ns,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_crash: Callable[[CrashReport], None] = lambda report: None,
    ) -> None:
        self.state: State = "starting"
        self._limits = config.limits
        self._health = config.health
        self._channels = channels
        self._detokenizer = detokenizer
        self._registry = registry
        self._clock = clock
        self._on_progress = on_progress
        self._on_crash = on_crash
        self._read_place = board
        self._board = LoadBoard(config.routing.policy, config.routing.load_refresh_s, clock, self._read_own)
        self._live: dict[str, RequestHandle] = {}
        self._outboxes: tuple[asyncio.Queue[ToRank], ...] = tuple(asyncio.Queue() for _ in range(NUM_RANKS))
        self._outstanding = [0] * NUM_RANKS  # requests of each rank that have not ended
        self._prompt_logprobs = 0  # of all requests that have not ended
        self._frames = [0] * NUM_RANKS
        self._ready: list[RankReady | None] = [None] * NUM_RANKS
        self._crash_reports: dict[int, bytes] = {}
        self._detokenizer_ready = False
        self._available = [False] * NUM_RANKS
        self._said_farewell = [False] * NUM_RANKS
        self._started: asyncio.Future[tuple[RankReady, RankReady]] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        registry.before_scrape(self._set_gauges)

    async def run(self) -> None:
        """Move messages until every peer has said farewell. Raises FatalError when one ends or misbehaves first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                senders = [tasks.create_task(self._send_to_rank(rank)) for rank in range(NUM_RANKS)]
                readers = [tasks.create_task(self._read_rank(rank)) for rank in range(NUM_RANKS)]
                readers.append(tasks.create_task(self._read_detokenizer()))
                await asyncio.wait(readers, return_when=asyncio.ALL_COMPLETED)
                for sender in senders:
                    sender.cancel()
        except ExceptionGroup as group:
            fatal = group.subgroup(FatalError)
            raise fatal.exceptions[0] if fatal is not None else group.exceptions[0] from group

    async def started(self) -> tuple[RankReady, RankReady]:
        """Wait until both ranks and the detokenizer are warm; from then on the state is "serving".

        Raises StartError when one of them cannot start.
        """
        return await asyncio.shield(self._started)

    def begin_drain(self) -> None:
        """Refuse new work from now on."""
        if self.state != "failed":
            self.state = "draining"

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is outstanding; False when timeout_s was not enough."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        """Have the ranks end every request; their clients still get the finish reason."""
        for handle in self._live.values():
            if not handle.finished:
                self._outboxes[handle.dp_rank].put_nowait(Abort(handle.request_id))

    def fail_all(self, reason: str) -> None:
        """The server is lost: every client gets a readable error, and nothing new is taken."""
        self.state = "failed"
        self._available = [False] * NUM_RANKS
        for handle in list(self._live.values()):
            self._fail(handle, RequestError(reason, status=503, code="server_failed"))

    def send_shutdown(self) -> None:
        """Tell both ranks to leave their loops."""
        for outbox in self._outboxes:
            outbox.put_nowait(Shutdown())

    async def receive_last_words(self) -> None:
        """Take in what failing ranks still say, until they end. Call after `run` has ended."""
        await asyncio.gather(*(self._read_last_words(rank) for rank in range(NUM_RANKS)))

    async def _read_last_words(self, rank: int) -> None:
        with contextlib.suppress(FatalError):
            while True:
                for message in await self._channels[rank].receive():
                    match message:
                        case CrashReport():
                            self._crash_reports[rank] = message.report
                        case MetricsFrame():
                            self._registry.apply(message)
                        case _:
                            pass  # its request has been failed

    def describe_crash(self) -> dict[str, object]:
        """What a crash report holds of the router: its requests, and what each rank said of its own end."""
        return {
            "state": self.state,
            "outstanding": list(self._outstanding),
            "load": [dataclasses.asdict(self._board.speculative_load(rank)) for rank in range(NUM_RANKS)],
            "ranks": [
                msgspec.Raw(self._crash_reports[rank]) if rank in self._crash_reports else None
                for rank in range(NUM_RANKS)
            ],
        }

    def outstanding(self) -> int:
        """Requests that have not ended."""
        return sum(self._outstanding)

    def rank_ready(self) -> tuple[RankReady | None, ...]:
        """What each rank said when it became warm."""
        return tuple(self._ready)

    def health(self) -> list[RankHealth]:
        """Judge the ranks by what they said last; waits for nobody."""
        try:
            known = [snapshot for rank in range(NUM_RANKS) if (snapshot := self._read_place(rank)) is not None]
        except BoardError:
            return [RankHealth(rank, False, "unreadable") for rank in range(NUM_RANKS)]
        return judge_ranks(known, self._clock(), max_age_s=self._health.max_age_s, max_skew_s=self._health.max_skew_s)

    async def submit(self, items: Sequence[Item], grammar: Grammar | None = None) -> Submission:
        """Send a whole API batch on its way, or nothing of it. grammar: what each answer must match.

        Items that all name one rank leave as one frame; otherwise at most one frame a rank leaves, and items without
        a rank go to the least loaded one. Raises RequestError; then nothing was sent or counted.
        """
        self._require_serving()
        self._require_unique(items)
        self._require_few_prompt_logprobs(items)
        ranks = self._assign(items)
        submission = Submission(self, self._limits.stream_buffer_bytes)
        explicit = [item.dp_rank is not None for item in items]
        whole = all(explicit) and len(set(ranks)) == 1
        delivery = "single" if len(items) == 1 else "whole" if whole else "per_rank"
        now = self._clock()
        batches: dict[int, list[TokenizedRequest]] = {}
        for index, (item, rank) in enumerate(zip(items, ranks, strict=True)):
            request = msgspec.structs.replace(item.request, dispatched_ns=now)
            batches.setdefault(rank, []).append(request)
            handle = RequestHandle(submission, index, request, rank, self._frames[rank] + 1)
            submission.handles.append(handle)
            self._live[handle.request_id] = handle
            self._outstanding[rank] += 1
            self._prompt_logprobs += handle.num_prompt_logprobs
            self._board.add(rank, handle.frame, handle.num_prompt_tokens)
            route = "explicit" if explicit[index] else "balanced"
            self._registry.tally.inc(metrics.ROUTED_REQUESTS, str(rank), route)
        self._idle.clear()
        for rank, requests in batches.items():
            self._frames[rank] += 1
            self._outboxes[rank].put_nowait(RoutedBatch(rank, self._frames[rank], tuple(requests), grammar))
            self._registry.tally.inc(metrics.ROUTED_BATCHES, str(rank), delivery)
        return submission

    def abort(self, request_id: str) -> None:
        """Tell the request's rank, by exact id, that the client left; nothing happens for one that has ended."""
        handle = self._live.get(request_id)
        if handle is not None and not handle.finished:
            self._outboxes[handle.dp_rank].put_nowait(Abort(request_id))

    def _read_own(self, rank: int) -> LoadSnapshot | None:
        """What a rank says of itself; None also where its place holds anything else."""
        try:
            snapshot = self._read_place(rank)
        except BoardError:
            return None
        return snapshot if snapshot is not None and snapshot.dp_rank == rank else None

    def _require_serving(self) -> None:
        match self.state:
            case "serving":
                return
            case "starting":
                raise RequestError(
                    "the server is starting; try again soon", status=503, code="starting", retry_after_s=5
                )
            case "draining":
                raise RequestError(
                    "the server is stopping; try another one", status=503, code="draining", retry_after_s=5
                )
            case "failed":
                raise RequestError("the server has failed and will restart", status=503, code="server_failed")
            case _:
                assert_never(self.state)

    def _require_unique(self, items: Sequence[Item]) -> None:
        seen: set[str] = set()
        for index, item in enumerate(items):
            request_id = item.request.request_id
            if request_id in seen or request_id in self._live:
                raise RequestError(
                    f"item {index}: request id {request_id!r} is in use; choose another or wait until it has ended",
                    status=409,
                    code="duplicate_request_id",
                    param="request_id",
                )
            seen.add(request_id)

    def _require_few_prompt_logprobs(self, items: Sequence[Item]) -> None:
        wanted = sum(num_prompt_logprobs(item.request) for item in items)
        if wanted and self._prompt_logprobs + wanted > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"the {wanted} log-probabilities of prompt tokens make more than {MAX_PROMPT_LOGPROBS} under way; "
                "try again later, or send fewer prompts, a smaller n or fewer logprobs",
                status=429,
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )

    def _assign(self, items: Sequence[Item]) -> list[int]:
        """Choose a rank for every item, in item order. Raises RequestError; changes nothing."""
        if not 0 < len(items) <= self._limits.max_batch_items:
            raise RequestError(
                f"the batch has {len(items)} items; send 1..{self._limits.max_batch_items}", code="batch_too_large"
            )
        for index, item in enumerate(items):
            self._require_rank(index, item.dp_rank)
        self._registry.tally.inc(metrics.LOAD_REFRESHES, self._board.refresh())
        room = [self._limits.queue_items - outstanding for outstanding in self._outstanding]
        planned = [Load()] * NUM_RANKS
        ranks: list[int] = []
        for item in items:
            rank = item.dp_rank if item.dp_rank is not None else self._least_loaded(room, planned)
            if rank is None or room[rank] <= 0:
                raise RequestError(
                    "the queue has no room for the whole batch; try again later or send fewer items",
                    status=429,
                    code="queue_full",
                    retry_after_s=RETRY_AFTER_S,
                )
            room[rank] -= 1
            planned[rank] = planned[rank] + Load(1, len(item.request.prompt_ids))
            ranks.append(rank)
        return ranks

    def _require_rank(self, index: int, dp_rank: int | None) -> None:
        if dp_rank is None and any(self._available):
            return
        if dp_rank is not None and (isinstance(dp_rank, bool) or not 0 <= dp_rank < NUM_RANKS):
            raise RequestError(
                f"item {index}: rank {dp_rank!r} does not exist; use 0..{NUM_RANKS - 1} or leave it out",
                code="invalid_dp_rank",
                param="routed_dp_rank",
            )
        if dp_rank is None or not self._available[dp_rank]:
            raise RequestError(
                f"item {index}: rank {'any' if dp_rank is None else dp_rank} takes no requests now; try again later",
                status=503,
                code="dp_rank_unavailable",
                param="routed_dp_rank",
                retry_after_s=RETRY_AFTER_S,
            )

    def _least_loaded(self, room: Sequence[int], planned: Sequence[Load]) -> int | None:
        """Take the available rank with room and the least work, or None."""
        ranks = [rank for rank in range(NUM_RANKS) if self._available[rank] and room[rank] > 0]
        return min(ranks, key=lambda rank: self._board.order(rank, planned[rank]), default=None)

    def _end(self, handle: RequestHandle) -> None:
        """Take the load back. The id stays taken until the rank has answered: a late answer must meet no new owner."""
        if not handle.finished:
            handle.finished = True
            self._outstanding[handle.dp_rank] -= 1
            self._prompt_logprobs -= handle.num_prompt_logprobs
            self._board.take_back(handle.dp_rank, handle.frame, handle.num_prompt_tokens)
        if handle.answered:
            self._live.pop(handle.request_id, None)
        handle.submission.notice()
        if not self.outstanding():
            self._idle.set()

    def _fail(self, handle: RequestHandle, error: RequestError) -> None:
        handle.answered = True
        if not handle.finished:
            handle.submission.fail(error)
        self._end(handle)

    async def _send_to_rank(self, rank: int) -> None:
        outbox = self._outboxes[rank]
        while True:
            message = await outbox.get()
            try:
                await self._channels[rank].send(message)
            except PeerError as error:
                self._available[rank] = False
                self._fail_undelivered(rank, message)
                while not outbox.empty():
                    self._fail_undelivered(rank, outbox.get_nowait())
                if self._said_farewell[rank]:
                    return
                raise PeerError(f"rank {rank}: {error}") from error

    def _fail_undelivered(self, rank: int, message: ToRank) -> None:
        """Fail the items of a frame that never reached its rank; the other rank does not get them."""
        if not isinstance(message, RoutedBatch):
            return
        error = RequestError(f"rank {rank} was lost before it took the request", status=503, code="dp_rank_unavailable")
        for request in message.requests:
            handle = self._live.get(request.request_id)
            if handle is not None:
                self._fail(handle, error)

    async def _read_rank(self, rank: int) -> None:
        while True:
            try:
                messages = await self._channels[rank].receive()
            except PeerError as error:
                self._available[rank] = False
                raise PeerError(f"rank {rank}: {error}") from error
            for message in messages:
                self._take_from_rank(rank, message)
                if isinstance(message, Farewell):
                    return

    def _take_from_rank(self, rank: int, message: FromRank) -> None:
        match message:
            case Admitted():
                self._take_admitted(message)
            case Refused():
                self._take_refused(message)
            case MetricsFrame():
                self._registry.apply(message)
            case Progress():
                self._on_progress(message)
            case CrashReport():
                self._crash_reports[rank] = message.report
                self._on_crash(message)
            case RankReady():
                if message.dp_rank != rank:
                    raise InvariantError(f"the channel of rank {rank} says that it is rank {message.dp_rank}")
                self._ready[rank] = message
                self._finish_start()
            case StartFailed():
                self._fail_start(message)
            case Farewell():
                self._available[rank] = False
                self._said_farewell[rank] = True
            case _:
                assert_never(message)

    async def _read_detokenizer(self) -> None:
        while True:
            try:
                messages = await self._detokenizer.receive()
            except PeerError as error:
                raise PeerError(f"detokenizer: {error}") from error
            for message in messages:
                self._take_from_detokenizer(message)
                if isinstance(message, Farewell):
                    return

    def _take_from_detokenizer(self, message: FromDetokenizer) -> None:
        match message:
            case TextDeltas():
                for delta in message.deltas:
                    self._take_delta(delta)
            case Progress():
                self._on_progress(message)
                if message.stage == "detokenizer_ready":
                    self._detokenizer_ready = True
                    self._finish_start()
            case StartFailed():
                self._fail_start(message)
            case Farewell():
                pass
            case _:
                assert_never(message)

    def _take_admitted(self, message: Admitted) -> None:
        handle = self._live.get(message.request_id)
        if handle is None:
            return
        handle.answered = True
        handle.submission.notice()
        if handle.finished:
            self._end(handle)

    def _take_refused(self, message: Refused) -> None:
        handle = self._live.get(message.request_id)
        if handle is None:
            return
        error = RequestError(
            message.message,
            status=message.status,
            code=message.code,
            param=message.param,
            retry_after_s=message.retry_after_s,
        )
        self._fail(handle, error)

    def _take_delta(self, delta: TextDelta) -> None:
        handle = self._live.get(delta.request_id)
        if handle is None or handle.finished:
            return
        if not handle.left:
            handle.submission.deliver(handle.index, delta)
        if delta.finish is not None:
            self._end(handle)

    def _finish_start(self) -> None:
        """Once everybody is warm: serve."""
        first, second = self._ready
        if first is None or second is None or not self._detokenizer_ready or self._started.done():
            return
        self._available = [True] * NUM_RANKS
        if self.state == "starting":
            self.state = "serving"
        self._started.set_result((first, second))

    def _fail_start(self, message: StartFailed) -> None:
        if not self._started.done():
            kind = StartError if message.exit_code == StartError.exit_code else FatalError
            self._started.set_exception(kind(f"{message.role}: {message.error}"))

    def _set_gauges(self, tally: metrics.Tally) -> None:
        tally.set(metrics.READY, to=float(self.state == "serving"))
        for rank in range(NUM_RANKS):
            label = str(rank)
            for source, load in zip(("snapshot", "speculative"), self._board.current(rank), strict=True):
                tally.set(metrics.LOAD_REQUESTS, label, source, to=load.requests)
                tally.set(metrics.LOAD_TOKENS, label, source, to=load.tokens)
            snapshot = self._read_own(rank)
            if snapshot is not None:
                tally.set(metrics.SNAPSHOT_AGE, label, to=(self._clock() - snapshot.published_ns) / 1e9)
