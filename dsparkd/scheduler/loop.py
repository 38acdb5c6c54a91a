"""One tick: receive, plan, agree, step, commit, publish; and the park between two of them.

The loop is the tick thread's whole life. Nothing in it blocks except the exchange, the step and the park: what it sends
waits in bounded queues, and a channel that stays full is a failure of the pair.
"""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar, assert_never

import msgspec

from dsparkd.errors import ExchangeStopped, InvariantError, PeerError, RequestError
from dsparkd.executor.plan import Plan, Speculation, StepKind, StepOutput
from dsparkd.ipc.channel import Channel as Line
from dsparkd.messages import (
    Abort,
    Admitted,
    Farewell,
    LoadSnapshot,
    Refused,
    RoutedBatch,
    Shutdown,
    TokenDelta,
    TokenDeltas,
    ToRank,
)
from dsparkd.native.exchange import NUM_FIELDS, NUM_WORDS, Words
from dsparkd.scheduler.account import Account
from dsparkd.scheduler.agreement import (
    Agreement,
    Channel,
    Drafting,
    Intent,
    Payload,
    PlanExtra,
    PlanVote,
    combine,
    exchanges_tier,
    vote,
)
from dsparkd.scheduler.exchange import Exchange
from dsparkd.scheduler.grammars import GrammarDesk
from dsparkd.scheduler.policy import NOTHING_FLIES, Flying, Planner, Proposal
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory, Request, State
from dsparkd.scheduler.results import Committed, Committer, Ended, Launched
from dsparkd.scheduler.speculation import SpeculationPlanner

if TYPE_CHECKING:
    from dsparkd.grammar.cache import Ticket

T = TypeVar("T")

NUM_RECORDS = 256
RETRY_AFTER_S = 1  # a queue slot frees with each request that ends; a client need not wait longer than that


class Stepper(Protocol):
    """What the loop needs of an executor."""

    def launch(self, plan: Plan, counts: tuple[int, int]) -> Callable[[], StepOutput]:
        """Launch one step together with the peer; counts: tokens of both ranks, in rank order.

        What is returned waits for its outputs. It is called once, at the latest before the second next step.
        """


class TickWatch(Protocol):
    """Fails the process when a tick does not end."""

    def arm(self) -> None:
        """Start the time limit anew."""

    def disarm(self) -> None:
        """Stop it: the rank parks or leaves."""


class Seat(Protocol):
    """Where the tick thread wakes after a park."""

    def take(self) -> None:
        """Wake on a processor that is not the peer's."""

    def leave(self) -> None:
        """Run wherever there is room; called after each tick that is followed by another one."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the loop; see config.py for their keys. overlap: only where nothing is drafted."""

    dp_rank: int
    queue_items: int
    max_context_tokens: int
    max_frames_per_tick: int
    max_prefill_streak: int
    heartbeat_s: float
    farewell_s: float
    decode_graphs: bool = False
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """What the loop talks through. publish: puts a snapshot where router and health look for it; never blocks."""

    parent: Line[ToRank]
    detokenizer: Line[NoReturn]
    exchange: Exchange
    publish: Callable[[LoadSnapshot], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a tick works with.

    grammars: None where requests have none; seat: where processors are few; speculation: None where nothing is drafted.
    """

    queue: RequestQueue
    memory: Memory
    planner: Planner
    committer: Committer
    stepper: Stepper
    grammars: GrammarDesk | None = None
    seat: Seat | None = None
    speculation: SpeculationPlanner | None = None


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that has been launched and not landed. land: waits for its outputs."""

    plan: Plan
    launched: Launched
    land: Callable[[], StepOutput]

    @property
    def ids(self) -> Flying:
        """By request, which of its ids is the request's."""
        sampling = [row for row in self.plan.rows if row.sampling is not None]
        return {row.request_id: index for index, row in enumerate(sampling)}


@dataclass(frozen=True, slots=True)
class RowRecord:
    """A plan's row without its ids."""

    request_id: str
    slot: int
    start: int
    num_tokens: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class TickRecord:
    """One tick as a crash report shows it: both votes, what came of them, and this rank's rows.

    settled: requests whose wait for a grammar ended before the tick was planned.
    """

    tick: int
    rank0: Payload
    rank1: Payload
    agreement: Agreement
    rows: tuple[RowRecord, ...]
    settled: tuple[str, ...] = ()


class Loop:
    """Owned and run by the tick thread.

    clock: CLOCK_MONOTONIC nanoseconds; it stamps, and decides nothing of a plan but how much is drafted and verified,
    which both ranks agree on (X-25) and no id depends on.
    """

    def __init__(
        self, bounds: Bounds, lines: Lines, parts: Parts, account: Account, watch: TickWatch, clock: Callable[[], int]
    ) -> None:
        self._bounds = bounds
        self._lines = lines
        self._parts = parts
        self._account = account
        self._watch = watch
        self._clock = clock
        self._tick = 0
        self._arrivals = 0
        self._frame = 0
        self._snapshots = 0
        self._prefill_streak = 0
        self._retractions = 0
        self._stopping = False
        self._flight: Flight | None = None
        self._begun_ns = 0  # when the last step was agreed, 0 unless it was a decode step
        self._speculated: Speculation | None = None  # how it drafted
        self._deltas: list[TokenDelta] = []
        self._ended: list[Ended] = []
        self._settled: list[str] = []
        self.records: deque[TickRecord] = deque(maxlen=NUM_RECORDS)

    def run(self) -> None:
        """Tick until both ranks agree to stop, or the parent ends the wait for the other one; then say farewell.

        Raises FatalError.
        """
        while True:
            self._watch.arm()
            proposal, payload = self.offer()
            try:
                both = self._exchange(payload)
            except ExchangeStopped:
                # Either Shutdown has come, too, or the parent has closed its channel: then this raises PeerError.
                self._receive()
                break
            agreement = self.act(proposal, *both)
            if agreement.stop:
                break
            if agreement.park:
                self._watch.disarm()
                if self._parts.seat is not None:
                    self._parts.seat.take()
                self._park()
            elif self._parts.seat is not None:
                # The first step has been launched. From here on a seat would keep this rank behind whoever runs there.
                self._parts.seat.leave()
        self._watch.arm()
        self._leave()
        self._watch.disarm()

    def offer(self) -> tuple[Proposal, Payload]:
        """First half of a tick: take in what has arrived, plan, and state this rank's vote."""
        self._tick += 1
        self._account.begin_tick()
        self._receive()
        self._take_grammars()
        self._account.lap("receive")
        if self._flight is not None and not self._parts.planner.has_room(self._flight.ids):
            self._land()
        proposal = self._parts.planner.propose(self._flight.ids if self._flight is not None else NOTHING_FLIES)
        own = vote(
            num_chunk_tokens=proposal.num_chunk_tokens,
            num_chunk_logit_rows=proposal.num_chunk_logit_rows,
            num_decode_rows=len(proposal.decode_rows),
            decode_graphs=self._bounds.decode_graphs,
        )
        payload = Payload(own, self._extra(own, proposal, self._time_step()), self._intent())
        self._account.lap("plan")
        return proposal, payload

    def act(self, proposal: Proposal, rank0: Payload, rank1: Payload) -> Agreement:
        """Second half of a tick: run what both agree on, commit and publish it."""
        agreement = combine(
            rank0, rank1, prefill_streak=self._prefill_streak, max_prefill_streak=self._bounds.max_prefill_streak
        )
        self._prefill_streak = agreement.prefill_streak
        exchange = self._lines.exchange
        sequence, timing = exchange.sequence(Channel.PLAN), exchange.timing(Channel.PLAN)
        plan = None
        self._begun_ns = self._clock() if agreement.kind is StepKind.DECODE else 0
        if self._parts.speculation is not None:
            self._parts.speculation.learn(agreement.step_ns)
        if agreement.kind is not StepKind.IDLE and not agreement.stop:
            speculation = self._speculated = self._speculate(agreement)
            replays = agreement.kind is StepKind.DECODE and agreement.decode_graph and agreement.draft_graph
            plan = self._parts.planner.settle(proposal, agreement.kind, speculation, replays=replays)
        self._record(agreement, rank0, rank1, plan)
        spent_ns = self._account.lap("agree")
        if plan is not None:
            self._step(plan, agreement)
        else:
            self._land()
        # Counted behind the step, whose launch a client waits for.
        self._account.agreed(agreement, plan)
        self._account.exchanged(Channel.PLAN, sequence, timing, spent_ns)
        self._deliver()
        self._account.lap("commit")
        self._publish(parked=agreement.park)
        self._account.lap("publish")
        self._account.end_tick()
        return agreement

    def _speculate(self, agreement: Agreement) -> Speculation | None:
        """How a decode step drafts: a function of what both ranks know, so both do the same."""
        planner = self._parts.speculation
        if planner is None or agreement.kind is not StepKind.DECODE:
            return None
        if not exchanges_tier(agreement, compact_verify=planner.is_compact):
            return planner.settle(agreement.num_tokens, agreement.drafting)
        exchange = self._lines.exchange
        words = (planner.wanted,) + (0,) * (NUM_WORDS - 1)
        begun_ns = self._clock()
        peer = exchange.exchange(Channel.TIER, words)
        spent_ns = self._clock() - begun_ns
        sequence, timing = exchange.sequence(Channel.TIER), exchange.timing(Channel.TIER)
        self._account.exchanged(Channel.TIER, sequence, timing, spent_ns)
        return planner.compact(agreement.num_tokens, self._in_rank_order(planner.wanted, peer[0]))

    def _time_step(self) -> int:
        """How long the last step took since it was agreed, in nanoseconds; 0 unless it was a decode step."""
        begun_ns, self._begun_ns = self._begun_ns, 0
        if not begun_ns:
            return 0
        spent_ns = self._clock() - begun_ns
        self._account.paced(self._speculated, spent_ns)
        return spent_ns

    def _drafting(self, proposal: Proposal) -> Drafting:
        """What this rank would have a decode step verify."""
        planner = self._parts.speculation
        if planner is None or not planner.is_compact:
            return Drafting.NONE
        requests = [self._parts.queue.find(row.request_id) for row in proposal.decode_rows]
        return planner.vote([request for request in requests if request is not None])

    # Receive

    def _receive(self) -> None:
        for message in self._lines.parent.receive_nowait(self._bounds.max_frames_per_tick):
            match message:
                case RoutedBatch():
                    self._take_batch(message)
                case Abort():
                    request = self._parts.queue.find(message.request_id)
                    if request is not None:
                        self._abort(request)
                case Shutdown():
                    self._stopping = True
                    self._abort_all()
                case _:
                    assert_never(message)

    def _take_batch(self, batch: RoutedBatch) -> None:
        """Queue all of a batch or nothing of it, and answer each item. Raises PeerError for a frame gone astray."""
        if batch.dp_rank != self._bounds.dp_rank:
            raise PeerError(f"frame {batch.frame} is for rank {batch.dp_rank}, this is rank {self._bounds.dp_rank}")
        if batch.frame <= self._frame:
            raise PeerError(f"frame {batch.frame} follows frame {self._frame}")
        self._frame = batch.frame
        now_ns = self._clock()
        refusal = self._refusal(batch)
        if refusal is not None:
            for item in batch.requests:
                answer = msgspec.structs.replace(refusal, request_id=item.request_id)
                self._lines.parent.send_nowait(answer)
            return
        requests = []
        for item in batch.requests:
            self._arrivals += 1
            requests.append(
                Request(
                    item,
                    arrival=self._arrivals,
                    delivered_ns=now_ns,
                    max_context_tokens=self._bounds.max_context_tokens,
                    awaits_grammar=batch.grammar is not None,
                )
            )
        self._parts.queue.add(requests)
        for request in requests:
            if batch.grammar is None:
                self._admit(request)
                continue
            ticket = self._desk().ask(request, batch.grammar)
            if not ticket.waits:
                self._settle(request, ticket)

    def _admit(self, request: Request) -> None:
        self._account.admitted(request)
        self._lines.parent.send_nowait(Admitted(request.request_id, request.delivered_ns))

    # Grammars

    def _desk(self) -> GrammarDesk:
        if self._parts.grammars is None:
            raise InvariantError("a request with a grammar, where grammars are off")
        return self._parts.grammars

    def _take_grammars(self) -> None:
        """Let requests go on whose grammar has come; the cost is that of what has come, not of what waits (G-21)."""
        if self._parts.grammars is not None:
            for request, ticket in self._parts.grammars.settled():
                self._settle(request, ticket)

    def _settle(self, request: Request, ticket: Ticket) -> None:
        """Admit or refuse a request: only now is it known whether there is a grammar for it."""
        self._settled.append(request.request_id)
        try:
            request.matcher = ticket.matcher()
        except RequestError as error:
            self._account.grammar_failed(error)
            self._refuse(request, error)
            return
        self._account.grammar_resolved(ticket)
        self._parts.queue.has_grammar(request)
        self._admit(request)

    def _refuse(self, request: Request, error: RequestError) -> None:
        self._parts.queue.remove(request)
        self._lines.parent.send_nowait(
            Refused(request.request_id, error.status, error.code, error.param, error.message, error.retry_after_s)
        )

    def _refusal(self, batch: RoutedBatch) -> Refused | None:
        """Why a batch is not taken, without a request id; None when it is taken.

        The parent checks lengths and room too, but its view of the room is a snapshot behind.
        """
        limit = self._bounds.max_context_tokens
        for index, item in enumerate(batch.requests):
            length = len(item.prompt_ids)
            if not 0 < length < limit:
                wanted = f"use 1..{limit - 1} (engine.max_context_tokens {limit})"
                text = f"item {index} has {length} prompt tokens; {wanted}"
                return Refused("", 400, "context_length_exceeded", None, text)
        if self._stopping:
            return Refused("", 503, "shutting_down", None, "the server is stopping")
        room = self._bounds.queue_items - len(self._parts.queue)
        if len(batch.requests) > room:
            text = f"the queue has room for {room} of {len(batch.requests)} items"
            return Refused("", 429, "queue_full", None, text, RETRY_AFTER_S)
        return None

    def _abort(self, request: Request) -> None:
        if request.state is State.GRAMMAR_WAIT:
            # It has not been admitted, so this is its answer; a client that has left does not read it.
            self._desk().cancel(request)
            text = "the request was aborted before its grammar was ready"
            error = RequestError(text, status=503, code="request_aborted", retry_after_s=RETRY_AFTER_S)
            self._account.grammar_failed(error)
            self._refuse(request, error)
            return
        delta, ended = self._parts.committer.abort(request)
        self._deltas.append(delta)
        self._ended.append(ended)

    def _abort_all(self) -> None:
        for request in self._parts.queue.all():
            self._abort(request)

    # Agree

    def _extra(self, own: PlanVote, proposal: Proposal, step_ns: int) -> PlanExtra:
        return PlanExtra(
            longest_prefix=max((row.start for row in proposal.chunk_rows), default=0),
            draft_graph_ok=int(self._bounds.decode_graphs or own.step_kind == StepKind.IDLE),
            tick=self._tick,
            num_decode_rows=len(proposal.decode_rows),
            step_ns=step_ns,
            drafting=self._drafting(proposal),
        )

    def _intent(self) -> Intent:
        intent = Intent.STOP if self._stopping else Intent.NONE
        # Frames in memory do not wake a poll, so a rank that has some must not sleep.
        # A grammar on its way needs no tick: its event ends the park, and idle ticks would take its compile's time.
        is_idle = not self._parts.queue.has_work and self._flight is None
        if is_idle and not self._lines.parent.has_frames:
            intent |= Intent.MAY_PARK
        return intent

    def _exchange(self, payload: Payload) -> tuple[Payload, Payload]:
        words = (*payload.vote, *payload.extra, int(payload.intent))
        peer = self._lines.exchange.exchange(Channel.PLAN, words)
        return self._in_rank_order(payload, _payload(peer))

    def _in_rank_order(self, own: T, peer: T) -> tuple[T, T]:
        return (own, peer) if self._bounds.dp_rank == 0 else (peer, own)

    def _record(self, agreement: Agreement, rank0: Payload, rank1: Payload, plan: Plan | None) -> None:
        rows = plan.rows if plan is not None else ()
        summary = tuple(
            RowRecord(row.request_id, row.slot, row.start, len(row.input_ids), row.num_logits) for row in rows
        )
        self.records.append(TickRecord(self._tick, rank0, rank1, agreement, summary, tuple(self._settled)))
        self._settled.clear()

    # Step

    def _step(self, plan: Plan, agreement: Agreement) -> None:
        """Launch a step, then commit the one before, whose results have come meanwhile; this one, too, unless it flies.

        A rank without rows takes part: the expert layers need both. When a rank reads its results is its own matter:
        what both launch, and in which order, has been agreed on.
        """
        own = agreement.num_tokens[self._bounds.dp_rank]
        if plan.num_tokens != own:
            raise InvariantError(f"tick {self._tick}: agreed on {own} tokens, planned {plan.num_tokens}")
        self._account.launching(plan, self._parts.queue)
        launched = self._parts.committer.launched(plan)
        if self._flight is not None and any(self._flight.launched.is_chunk) and not plan.replays:
            # A step that is no replay takes the host long to launch, and first ids would wait for that.
            self._land()
            self._deliver()
        flight = Flight(plan, launched, self._parts.stepper.launch(plan, agreement.num_tokens))
        self._account.launched(plan)
        self._land()
        self._flight = flight
        if not self._may_fly(plan):
            self._land()

    def _may_fly(self, plan: Plan) -> bool:
        """Whether to plan the next step before the outputs of this one are here.

        That takes rows of which all but the id itself is known ahead: a grammar's mask depends on the id, and where a
        chunk ends whose log-probabilities are read on those that are there.
        """
        if not self._bounds.overlap or plan.speculation is not None or not plan.rows:
            return False
        return all(row.matcher is None and row.prompt_top_logprobs is None for row in plan.rows)

    def _land(self) -> None:
        """Wait for the step that flies, if one does, and commit it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        output = flight.land()
        self._account.lap("launch")
        self._account.masked(flight.plan, output)
        self._account.drafted(flight.plan, output)
        self._account.decoded(flight.plan, output)
        self._apply(self._parts.committer.commit(flight.plan, output, flight.launched))
        self._account.lap("commit")

    def _apply(self, committed: Committed) -> None:
        self._account.advanced(committed.advanced)
        self._account.truncated(committed.num_truncated)
        self._account.dropped(committed.num_dropped)
        self._deltas += committed.deltas
        self._ended += committed.ended
        for ended in committed.ended:
            matcher = ended.request.matcher
            if matcher is not None and matcher.is_stuck and matcher.grammar is not None:
                self._desk().condemn(matcher.grammar)

    def _deliver(self) -> None:
        """Send all of a tick's deltas as one message, and account for its ends."""
        if self._deltas:
            self._lines.detokenizer.send_nowait(TokenDeltas(self._bounds.dp_rank, tuple(self._deltas)))
            self._deltas.clear()
        self._account.ended(self._ended)
        self._ended.clear()
        retractions = self._parts.planner.num_retractions
        self._account.retracted(retractions - self._retractions)
        self._retractions = retractions

    # Publish

    def _publish(self, *, parked: bool) -> None:
        """Tell the parent how this rank stands. Only the tick thread does, so a hung tick goes stale."""
        queue = self._parts.queue
        self._snapshots += 1
        self._lines.publish(
            LoadSnapshot(
                dp_rank=self._bounds.dp_rank,
                sequence=self._snapshots,
                published_ns=self._clock(),
                frame=self._frame,
                tick=self._tick,
                parked=parked,
                outstanding_requests=len(queue),
                outstanding_tokens=queue.num_outstanding_tokens,
                waiting_requests=queue.num_waiting,
            )
        )
        frame = self._account.due_frame(queue, self._parts.memory, self._parts.grammars)
        if frame is not None:
            self._lines.parent.send_nowait(frame)
        self._flush()

    # Park and leave

    def _park(self) -> None:
        """Sleep until there is a message, a grammar or the peer's kick, on no core; a heartbeat tells the parent of it.

        What wakes this rank lets it kick the peer: both then meet in the next exchange.
        """
        self._account.parked()
        self._lines.exchange.park()
        self._send_frame()
        heartbeat_ns = int(self._bounds.heartbeat_s * 1e9)
        next_ns = self._clock() + heartbeat_ns
        while not self._lines.exchange.take_kick():
            if self._wait(max(0.0, (self._next_look_ns(next_ns) - self._clock()) / 1e9)):
                self._lines.exchange.kick()
                self._account.woken(by_message=True)
                return
            self._flush()
            if self._clock() >= next_ns:
                self._publish(parked=True)
                next_ns = self._clock() + heartbeat_ns
        self._account.woken(by_message=False)

    def _send_frame(self) -> None:
        parts = self._parts
        self._lines.parent.send_nowait(self._account.frame(parts.queue, parts.memory, parts.grammars))

    def _next_look_ns(self, at_ns: int) -> int:
        """When a parked rank must look around at the latest: then, or when somebody has waited enough for a grammar."""
        desk = self._parts.grammars
        deadline_ns = desk.service.next_deadline_ns() if desk is not None else None
        return at_ns if deadline_ns is None else min(at_ns, deadline_ns)

    def _wait(self, timeout_s: float) -> bool:
        """Block until something happens or the time is up.

        True when there is something to take in: a message of the parent, or its end, or news of a grammar.
        """
        lines, desk = self._lines, self._parts.grammars
        poll = select.poll()
        poll.register(lines.exchange.fileno(), select.POLLIN)
        poll.register(lines.parent.fileno(), select.POLLIN | (select.POLLOUT if lines.parent.wants_write else 0))
        # Without events only the detokenizer's end is reported.
        poll.register(lines.detokenizer.fileno(), select.POLLOUT if lines.detokenizer.wants_write else 0)
        if desk is not None:
            poll.register(desk.fileno(), select.POLLIN)
        # Rounded up: a poll that ends before the deadline would be called again at once.
        ready = dict(poll.poll(math.ceil(timeout_s * 1e3)))
        if ready.get(lines.detokenizer.fileno(), 0) & (select.POLLHUP | select.POLLERR):
            raise PeerError("the detokenizer closed its channel")
        if desk is not None and self._has_news(desk, desk.fileno() in ready):
            return True
        return bool(ready.get(lines.parent.fileno(), 0) & ~select.POLLOUT)

    def _has_news(self, desk: GrammarDesk, was_woken: bool) -> bool:
        """Whether a ticket is done, or its time over."""
        if was_woken:
            desk.clear()
            return True
        deadline_ns = desk.service.next_deadline_ns()
        return deadline_ns is not None and deadline_ns <= self._clock()

    def _flush(self) -> None:
        self._lines.parent.flush_nowait()
        self._lines.detokenizer.flush_nowait()

    def _leave(self) -> None:
        """End what is left, say farewell to both readers, and see that they take it all."""
        self._land()
        self._abort_all()
        self._deliver()
        source = Farewell(f"rank{self._bounds.dp_rank}")
        self._lines.detokenizer.send_nowait(source)
        self._publish(parked=False)
        self._send_frame()
        self._lines.parent.send_nowait(source)
        deadline_ns = self._clock() + int(self._bounds.farewell_s * 1e9)
        for line in (self._lines.detokenizer, self._lines.parent):
            while not line.flush_nowait():
                left_s = (deadline_ns - self._clock()) / 1e9
                if left_s <= 0:
                    raise PeerError(f"{line.name} did not take this rank's farewell")
                poll = select.poll()
                poll.register(line.fileno(), select.POLLOUT)
                poll.poll(math.ceil(left_s * 1e3))


def _payload(words: Words) -> Payload:
    return Payload(PlanVote(*words[:NUM_FIELDS]), PlanExtra(*words[NUM_FIELDS:-1]), Intent(words[-1]))
