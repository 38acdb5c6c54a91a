"""Two ranks in one process: real loops, queues and socket channels over a fake device that checks what it is told.

The device's token is a pure function of the sequence, so any mistake in scheduling shows as a wrong id; its pages,
rings and snapshots hold what a real one's would, so any mistake in memory shows as foreign content.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import pytest

from dsparkd import system
from dsparkd.errors import PeerError, RequestError
from dsparkd.executor.costs import CostTable
from dsparkd.executor.plan import Plan, RowFailure, RowOutput, Speculation, StepKind, StepOutput
from dsparkd.grammar.cache import CacheState
from dsparkd.ipc.channel import Channel
from dsparkd.messages import (
    Abort,
    Admitted,
    Farewell,
    Grammar,
    LoadSnapshot,
    MetricsFrame,
    Refused,
    RoutedBatch,
    SamplingParams,
    TokenDelta,
    TokenDeltas,
    TokenizedRequest,
    TokenLogprob,
    decode_from_rank,
    decode_to_detokenizer,
    decode_to_rank,
)
from dsparkd.metrics import Tally
from dsparkd.native import exchange as native
from dsparkd.scheduler.account import Account
from dsparkd.scheduler.agreement import Agreement
from dsparkd.scheduler.exchange import Exchange, GlooExchange, NativeExchange
from dsparkd.scheduler.grammars import GrammarDesk
from dsparkd.scheduler.loop import Bounds, Lines, Loop, Parts
from dsparkd.scheduler.policy import Limits, Planner
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory
from dsparkd.scheduler.results import Committer
from dsparkd.scheduler.speculation import SpeculationPlanner

VOCAB = 29
EOS = 1
THINK_END = 2
PAGE = 4
VIOLATION = RowFailure(500, "grammar_violation", "a mask was wrong")


def next_token(ids: Sequence[int]) -> int:
    """The fake model: the id that follows a sequence."""
    state = 7
    for token in ids:
        state = (state * 1103515245 + token * 12345 + 1) % (1 << 31)
    return (state >> 8) % VOCAB


def expected_output(request: TokenizedRequest, max_context: int) -> tuple[tuple[int, ...], str]:
    """What the request must produce however it is scheduled: ids and finish reason."""
    sampling, out = request.sampling, list[int]()
    limit = min(sampling.max_tokens, max_context - len(request.prompt_ids))
    while True:
        token = next_token((*request.prompt_ids, *out))
        may_stop = len(out) >= sampling.min_tokens
        out.append(token)
        if may_stop and ((token == EOS and not sampling.ignore_eos) or token in sampling.stop_ids):
            return tuple(out), "stop"
        text = b"".join(Texts().token_bytes(token) for token in out if token != EOS).decode()
        if any(stop in text for stop in sampling.stop_strings):
            return tuple(out), "stop"
        if len(out) >= limit:
            return tuple(out), "length"


class FakeDevice:
    """Pages, slots and snapshots as plain data; every read is checked against the sequence it should belong to."""

    def __init__(self) -> None:
        self.pages: dict[int, dict[int, int]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.plans: list[Plan] = []
        self.counts: list[tuple[int, int]] = []
        self.failing: dict[str, RowFailure] = {}
        self.commits: list[int] = []  # grammars of each call of commit_grammars
        self.events: list[str] = []  # what the host did, in order
        self.inner_slots = range(0)
        self._flying: list[int] = []
        self._last: tuple[RowOutput, ...] = ()

    def launch(self, plan: Plan, counts: tuple[int, int]) -> Callable[[], StepOutput]:
        """The device runs in order, so what it does shows at once; what came of it only when the host lands."""
        number = len(self.plans)
        assert self._flying in ([], [number - 1]), "two steps fly already"
        self._flying.append(number)
        self.events.append(f"launch {number}")
        output = self._step(plan, counts)
        self._last = tuple(each for each, row in zip(output.rows, plan.rows, strict=True) if row.sampling is not None)

        def land() -> StepOutput:
            assert self._flying[:1] == [number], "a step lands twice, or before an older one"
            del self._flying[0]
            self.events.append(f"land {number}")
            return output

        return land

    def _step(self, plan: Plan, counts: tuple[int, int]) -> StepOutput:
        self.plans.append(plan)
        self.counts.append(counts)
        for row in plan.rows:
            if row.matcher is not None:
                row.matcher.take_queue()
        for start in plan.slot_starts:
            held = () if start.snapshot is None else self.snapshots[start.snapshot]
            assert len(held) == start.position, "a slot is filled from a snapshot of another position"
            self.slots[start.slot] = held
        self._check_disjoint(plan)
        outputs = tuple(self._run(row, plan.speculation) for row in plan.rows)
        ends = {row.slot: (row.start, row.start + len(row.input_ids)) for row in plan.rows}
        gathered = [save.inner_slot for save in plan.snapshot_saves if save.inner_slot is not None]
        assert len(set(gathered)) == len(gathered)
        assert set(gathered) <= set(self.inner_slots)
        for save in plan.snapshot_saves:
            held = self.slots[save.slot]
            start, end = ends[save.slot]
            if save.inner_slot is not None:
                assert start + PAGE <= save.position < end, "a window before it is not all the chunk's"
            elif plan.speculation is None:
                assert len(held) == save.position
            # What a window wrote behind its accepted ids is nobody's prefix: a request that resumes from it is told so.
            self.snapshots[save.snapshot] = held[: save.position]
        return StepOutput(outputs)

    def commit_grammars(self, matchers: Sequence[FakeMatcher]) -> list[RowFailure | None]:
        self.commits.append(len(matchers))
        return [matcher.failure if matcher.commit() else VIOLATION for matcher in matchers]

    def _check_disjoint(self, plan: Plan) -> None:
        """No two rows share a slot, and no row writes a page that another one reads or writes."""
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        readers: dict[int, list[int]] = {}
        for row in plan.rows:
            for page in row.page_table:
                readers.setdefault(page, []).append(row.slot)
        most = plan.speculation.max_drafts if plan.speculation is not None else 0
        for row in plan.rows:
            first, last = row.start // PAGE, (row.start + len(row.input_ids) + most - 1) // PAGE
            for page in row.page_table[first : last + 1]:
                assert readers[page] == [row.slot], "a written page is shared"

    def _run(self, row, speculation: Speculation | None) -> RowOutput:  # type: ignore[no-untyped-def]
        ids = row.prompt_ids + row.output_ids
        end = row.start + len(row.input_ids)
        assert row.slot > 0
        assert 0 not in row.page_table
        assert len(set(row.page_table)) == len(row.page_table)
        if row.follows is not None:
            assert row.input_ids == (0,), "the host knows an id that has not landed"
            assert row.matcher is None, "a mask for an id that the host does not know"
            ids += self._last[row.follows].token_ids
        else:
            assert ids[row.start : end] == row.input_ids
        assert self.slots[row.slot] == ids[: row.start], "the rings belong to another sequence or position"
        for position in range(row.start):
            page = row.page_table[position // PAGE]
            assert self.pages[page][position % PAGE] == ids[position], "a cached page has another content"
        for position in range(row.start, end):
            self.pages.setdefault(row.page_table[position // PAGE], {})[position % PAGE] = ids[position]
        self.slots[row.slot] = ids[:end]
        prompt_logprobs = None
        if row.prompt_top_logprobs is not None:
            assert row.num_logits == len(row.input_ids)
            told = ids[row.start + 1 : min(end + 1, len(row.prompt_ids))]
            prompt_logprobs = tuple(TokenLogprob(token, -1.0) for token in told)
        if row.sampling is None:
            assert row.matcher is None, "a row that samples nothing has no use for a mask"
            return RowOutput((), prompt_logprobs=prompt_logprobs)
        if row.request_id in self.failing:
            return RowOutput((0,), failure=self.failing[row.request_id])
        assert end == len(ids)
        if speculation is not None:
            return self._verify(row, ids, speculation.max_drafts)
        token = next_token(ids)
        logprobs = None if row.sampling.top_logprobs is None else (TokenLogprob(token, -0.5),)
        return RowOutput((token,), logprobs, prompt_logprobs)

    def _verify(self, row, ids: tuple[int, ...], most: int) -> RowOutput:  # type: ignore[no-untyped-def]
        """Draft some ids right, by chance; the window's refused ids stay in pages that the plan must have given it."""
        right = hash_of(row.request_id) * 7 + sum(ids) * 13
        accepted = right % (most + 1)
        run: list[int] = []
        for _ in range(accepted + 1):
            run.append(next_token((*ids, *run)))
        kept = (*ids, *run[:-1])
        for place in range(most):
            position = len(ids) + place
            self.pages.setdefault(row.page_table[position // PAGE], {})[position % PAGE] = (
                kept[position] if position < len(kept) else -1
            )
        self.slots[row.slot] = kept
        logprobs = None
        if row.sampling.top_logprobs is not None:
            logprobs = tuple(TokenLogprob(token, -0.5) for token in run)
        chances = tuple(1.0 / (2 + place) for place in range(most))
        return RowOutput(tuple(run), logprobs, None, num_drafts=most, num_verified=most, survival=chances)


class FakeMatcher:
    """Hears ids as dsparkd.grammar.matcher.Matcher does; refuses those in `refused`."""

    def __init__(self, refused: frozenset[int] = frozenset()) -> None:
        self.handle = object()
        self.grammar: Grammar | None = None
        self.is_stuck = False
        self.failure: RowFailure | None = None  # of its last commit
        self.told: list[int] = []
        self._queue: list[int] = []
        self._refused = refused

    def queue(self, ids: Sequence[int]) -> None:
        self._queue += ids

    def take_queue(self) -> list[int]:
        taken, self._queue = self._queue, []
        self.told += taken
        return taken

    def commit(self) -> bool:
        return not self._refused & set(self.take_queue())


class FakeTicket:
    """A wait that a test ends."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.begun_ns = 0
        self.source = "compile"
        self.outcome: FakeMatcher | RequestError | None = None
        self.is_cancelled = False
        self.waits = True

    def matcher(self) -> FakeMatcher:
        if isinstance(self.outcome, RequestError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class FakeCache:
    def state(self) -> CacheState:
        return CacheState(0, 0, 0, 0, {"bytes": 0, "entries": 0, "oversized": 0, "flush": 0})


class FakeService:
    """Gives grammars when a test says so; `known` are there at once, `quick` come while they are asked for."""

    def __init__(self, wake: int) -> None:
        self.cache = FakeCache()
        self.tickets: list[FakeTicket] = []
        self.known: dict[Grammar, Callable[[], FakeMatcher | RequestError]] = {}
        self.quick: dict[Grammar, Callable[[], FakeMatcher | RequestError]] = {}
        self.deadline_ns: int | None = None
        self.looks = 0
        self.condemned: list[Grammar] = []
        self._wake = wake
        self._done: list[FakeTicket] = []

    def request(self, grammar: Grammar) -> FakeTicket:
        ticket = FakeTicket(grammar)
        self.tickets.append(ticket)
        if grammar in self.known:
            ticket.outcome = self.known[grammar]()
            ticket.source = "memory"
            ticket.waits = False
        if grammar in self.quick:
            self.settle(ticket, self.quick[grammar]())
        return ticket

    def settle(self, ticket: FakeTicket, outcome: FakeMatcher | RequestError) -> None:
        ticket.outcome = outcome
        self._done.append(ticket)
        os.eventfd_write(self._wake, 1)

    def condemn(self, grammar: Grammar) -> None:
        self.condemned.append(grammar)

    def cancel(self, ticket: FakeTicket) -> None:
        ticket.is_cancelled = True

    def drain(self) -> list[FakeTicket]:
        self.looks += 1
        done, self._done = [ticket for ticket in self._done if not ticket.is_cancelled], []
        return done

    def next_deadline_ns(self) -> int | None:
        return self.deadline_ns

    def take_events(self) -> list[tuple[str, str, float]]:
        return []


class Texts:
    """Id n reads as the n-th letter; EOS is special."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id % 26])

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


class FakeWatch:
    """Counts instead of killing."""

    def __init__(self) -> None:
        self.armed = 0
        self.disarmed = 0

    def arm(self) -> None:
        self.armed += 1

    def disarm(self) -> None:
        self.disarmed += 1


class FakeClock:
    """Monotonic nanoseconds that move by a microsecond a look, and by hand."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        self.now_ns += 1_000
        return self.now_ns


class Meeting:
    """A gather of two threads, in place of gloo."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._words: list[tuple[int, ...]] = [(), ()]

    def gather_for(self, rank: int) -> Callable[[Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]:
        def gather(words: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
            self._words[rank] = tuple(words)
            try:
                self._barrier.wait(10)
                both = (self._words[0], self._words[1])
                self._barrier.wait(10)
            except threading.BrokenBarrierError as error:
                raise PeerError("the peer did not come") from error
            return both

        return gather


def make_exchanges(kind: str) -> tuple[Exchange, Exchange]:
    """Both ranks' ends of an exchange of a kind, for two threads."""
    peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if kind == "gloo":
        meeting = Meeting()
        return tuple(GlooExchange(rank, meeting.gather_for(rank), peers[rank]) for rank in (0, 1))
    memory = system.sealed_memory("test", native.region_bytes())
    native.init_region(memory, session=1, digest=1)
    events = [system.eventfd(), system.eventfd()]
    made = []
    for rank in (0, 1):
        attachment = native.Attachment.open(memory, rank, session=1, digest=1, timeout_s=10.0, spin_s=20e-6)
        # Each process has descriptors of its own.
        kicks = (os.dup(events[rank]), os.dup(events[1 - rank]))
        made.append(NativeExchange(rank, attachment, kicks, peers[rank]))
    for number in (memory, *events):
        os.close(number)
    return tuple(made)


@dataclass
class Sizes:
    """A small rank."""

    num_pages: int = 33
    max_rows: int = 4
    num_snapshots: int = 8
    chunk_tokens: int = 16
    snapshot_pages: int = 4
    max_context: int = 64
    queue_items: int = 256
    max_prefill_streak: int = 4
    max_drafts: int = 0
    table: CostTable | None = None  # windows are compact where there is one
    overlap: bool = False
    decode_graphs: bool = False


class Rank:
    """One rank's loop and the far ends of its channels."""

    def __init__(self, dp_rank: int, sizes: Sizes, exchange: Exchange, clock: Callable[[], int]) -> None:
        self.dp_rank = dp_rank
        self.sizes = sizes
        self.device = FakeDevice()
        self.tally = Tally()
        self.queue = RequestQueue()
        self.memory = Memory(
            num_pages=sizes.num_pages,
            num_slots=sizes.max_rows + 1,
            num_snapshots=sizes.num_snapshots,
            page_tokens=PAGE,
        )
        self.watch = FakeWatch()
        first = sizes.max_rows + 1
        self.device.inner_slots = range(first, first + sizes.chunk_tokens // PAGE)
        limits = Limits(sizes.chunk_tokens, PAGE, sizes.snapshot_pages * PAGE, 2 * PAGE, sizes.max_drafts)
        self.planner = Planner(self.queue, self.memory, limits)
        parent_here, parent_there = socket.socketpair()
        text_here, text_there = socket.socketpair()
        options = {"send_timeout_s": 5.0, "max_pending_bytes": 1 << 26}
        self.parent = Channel(parent_there, decode_from_rank, name="rank", **options)
        self.detokenizer = Channel(text_there, decode_to_detokenizer, name="rank", **options)
        self._own = (
            Channel(parent_here, decode_to_rank, name="parent", **options),
            Channel(text_here, decode_to_rank, name="detokenizer", **options),
        )
        self.exchange = exchange
        wake = system.eventfd()
        self.grammars = FakeService(wake)
        self.desk = GrammarDesk(self.grammars, wake)
        self.loop = Loop(
            Bounds(
                dp_rank=dp_rank,
                queue_items=sizes.queue_items,
                max_context_tokens=sizes.max_context,
                max_frames_per_tick=256,
                max_prefill_streak=sizes.max_prefill_streak,
                heartbeat_s=0.1,
                farewell_s=5.0,
                overlap=sizes.overlap,
                decode_graphs=sizes.decode_graphs,
            ),
            Lines(*self._own, self.exchange, self._publish),
            Parts(
                self.queue,
                self.memory,
                self.planner,
                Committer(self.queue, self.memory, Texts(), frozenset({EOS}), THINK_END, self.device.commit_grammars),
                self.device,
                self.desk,
                speculation=SpeculationPlanner(
                    sizes.max_drafts, sizes.max_rows, is_compact=sizes.table is not None, table=sizes.table
                ),
            ),
            Account(dp_rank, self.tally, clock),
            self.watch,
            clock,
        )
        self.frame = 0
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.admitted: list[str] = []
        self.refused: list[Refused] = []
        self.snapshots: list[LoadSnapshot] = []
        self.frames: list[MetricsFrame] = []
        self.farewells: list[str] = []

    def _publish(self, snapshot: LoadSnapshot) -> None:
        self.snapshots.append(snapshot)

    def submit(self, *requests: TokenizedRequest, grammar: Grammar | None = None) -> None:
        self.frame += 1
        self.parent.send_nowait(RoutedBatch(self.dp_rank, self.frame, requests, grammar))

    def abort(self, request_id: str) -> None:
        self.parent.send_nowait(Abort(request_id))

    def collect(self) -> None:
        """Read everything that the loop has sent, and send what did not fit into the socket."""
        self.parent.flush_nowait()
        for message in self.parent.receive_nowait():
            match message:
                case Admitted():
                    self.admitted.append(message.request_id)
                case Refused():
                    self.refused.append(message)
                case MetricsFrame():
                    self.frames.append(message)
                case Farewell():
                    self.farewells.append(f"parent:{message.source}")
        for message in self.detokenizer.receive_nowait():
            if isinstance(message, TokenDeltas):
                for delta in message.deltas:
                    self.deltas.setdefault(delta.request_id, []).append(delta)
            else:
                self.farewells.append(f"detokenizer:{message.source}")

    def output(self, request_id: str) -> tuple[tuple[int, ...], str]:
        """Ids and finish reason as the detokenizer got them; the end must come last and once."""
        deltas = self.deltas[request_id]
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert [delta.options is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        assert deltas[-1].finish is not None
        return tuple(token for delta in deltas for token in delta.token_ids), deltas[-1].finish.reason

    def value(self, name: str, *labels: str) -> float:
        return self.tally.frame()[0].get("\0".join((name, str(self.dp_rank), *labels)), 0.0)

    def assert_nothing_held(self) -> None:
        """An idle rank holds no slot and no page but those that the prefix tree caches."""
        assert len(self.queue) == 0
        assert self.memory.slots.num_used == 0
        assert self.memory.pages.num_used == 0
        assert self.memory.pages.num_free + self.memory.pages.num_cached == self.sizes.num_pages - 1
        assert self.memory.snapshots.num_used == len(self.memory.tree._by_use), "a snapshot that nobody holds"

    def assert_prefixes_are_true(self) -> None:
        """Pages and snapshots of the prefix tree hold what its keys say, also those that nobody resumes from."""
        paths = [(self.memory.tree._root, ())]
        while paths:
            node, ids = paths.pop()
            for key, child in node.children.items():
                own = tuple(array("I", key))
                held = self.device.pages[child.page]
                assert tuple(held[place] for place in range(PAGE)) == own
                if child.snapshot is not None:
                    assert self.device.snapshots[child.snapshot] == ids + own
                paths.append((child, ids + own))

    def close(self) -> None:
        for channel in (self.parent, self.detokenizer, *self._own):
            channel.close()
        self.exchange.close()
        os.close(self.desk.fileno())


@dataclass
class Pair:
    """Two ranks that tick in lock-step in one thread, or run in two."""

    sizes: Sizes = field(default_factory=Sizes)
    kind: str = "gloo"

    def __post_init__(self) -> None:
        exchanges = make_exchanges(self.kind)
        self.clock = FakeClock()
        self.ranks = tuple(Rank(rank, self.sizes, exchanges[rank], self.clock) for rank in (0, 1))
        self.agreements: list[Agreement] = []
        self.threads = ThreadPoolExecutor(2) if self.sizes.table is not None else None

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            offers = [rank.loop.offer() for rank in self.ranks]
            payloads = [payload for _, payload in offers]
            acts = [
                functools.partial(rank.loop.act, proposal, *payloads)
                for rank, (proposal, _) in zip(self.ranks, offers, strict=True)
            ]
            # Compact windows are agreed in a second exchange, in which each rank waits for the other one.
            run = map if self.threads is None else self.threads.map
            agreed = list(run(lambda act: act(), acts))
            assert agreed[0] == agreed[1]
            self.agreements.append(agreed[0])
            for rank in self.ranks:
                rank.collect()

    def drain(self, limit: int = 2_000) -> int:
        """Tick until nothing is left; returns the number of ticks."""
        for ticks in range(limit):
            self.tick()
            if not any(len(rank.queue) for rank in self.ranks) and self.agreements[-1].kind is StepKind.IDLE:
                return ticks + 1
        raise AssertionError(f"work left after {limit} ticks: {[rank.queue.counts() for rank in self.ranks]}")

    def close(self) -> None:
        if self.threads is not None:
            self.threads.shutdown()
        for rank in self.ranks:
            rank.close()


def make_request(
    request_id: str, prompt: Sequence[int] | int, max_tokens: int = 8, **sampling: object
) -> TokenizedRequest:
    """A request; an integer prompt is a length, with ids of its own."""
    if isinstance(prompt, int):
        prompt = [(hash_of(request_id) + index * 7) % VOCAB for index in range(prompt)]
    params = msgspec.convert({"max_tokens": max_tokens, "seed": 1, **sampling}, SamplingParams)
    return TokenizedRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=params,
        received_ns=1,
        encoded_ns=2,
        tokenized_ns=3,
        dispatched_ns=4,
    )


def hash_of(text: str) -> int:
    return sum((index + 1) * ord(letter) for index, letter in enumerate(text))


@dataclass(frozen=True)
class Lab:
    """Everything that a test builds with, as one session fixture: test modules cannot import from each other."""

    Sizes = Sizes
    Pair = Pair
    FakeDevice = FakeDevice
    FakeMatcher = FakeMatcher
    Texts = Texts
    Meeting = Meeting
    exchanges = staticmethod(make_exchanges)
    request = staticmethod(make_request)
    expected = staticmethod(expected_output)
    next_token = staticmethod(next_token)
    PAGE = PAGE
    EOS = EOS
    THINK_END = THINK_END
    VOCAB = VOCAB


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()
