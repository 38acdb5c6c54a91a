"""What a rank counts and logs of its ticks and requests. Owned by the tick thread; changes nothing that is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dsparkd import log as log_module
from dsparkd import metrics
from dsparkd.errors import RequestError
from dsparkd.executor.plan import Plan, RowFailure, Speculation, StepKind, StepOutput
from dsparkd.messages import MetricsFrame
from dsparkd.native.exchange import Timing
from dsparkd.scheduler.agreement import Agreement, Channel
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory, Request
from dsparkd.scheduler.results import Ended

if TYPE_CHECKING:
    from dsparkd.grammar.cache import Ticket
    from dsparkd.scheduler.grammars import GrammarDesk

log = log_module.get()

FRAME_PERIOD_NS = 1_000_000_000

# Why a request with a grammar failed, by the code that its client gets; the others say that the grammar is invalid.
_GRAMMAR_FAILURES = {
    "grammar_too_large": "too_large",
    "grammar_too_costly": "too_large",
    "grammar_timeout": "timeout",
    "grammar_unavailable": "unavailable",
    "grammar_store_corrupt": "store_corrupt",
    "grammar_store_io": "store_io",
    "request_aborted": "aborted",
    "grammar_violation": "violation",
    "grammar_traversal_timeout": "traversal",
    "grammar_traversal_failed": "traversal",
}
_COMPILE_KINDS = {"json_schema": "json", "tool_calls": "structural_tag", "choice": "ebnf"}


class Peaks:
    """The largest value of each series in the latest finished second, 0 where that second had none."""

    def __init__(self) -> None:
        self._second = 0
        self._current: dict[str, int] = {}
        self._finished: dict[str, int] = {}
        self._known: dict[str, tuple[metrics.Family, tuple[str, ...]]] = {}

    def note(self, family: metrics.Family, *labels: str, value_ns: int, at_ns: int) -> None:
        """Take one value. at_ns never goes back."""
        self._roll(at_ns)
        key = "\0".join((family.name, *labels))
        if key not in self._known:
            self._known[key] = (family, labels)
        if value_ns > self._current.get(key, -1):
            self._current[key] = value_ns

    def show(self, tally: metrics.Tally, at_ns: int) -> None:
        """Set the gauges, in seconds, of everything that was ever noted."""
        self._roll(at_ns)
        for key, (family, labels) in self._known.items():
            tally.set(family, *labels, to=self._finished.get(key, 0) / 1e9)

    def _roll(self, at_ns: int) -> None:
        second = at_ns // 1_000_000_000
        if second == self._second:
            return
        self._finished = self._current if second == self._second + 1 else {}
        self._current = {}
        self._second = second


class Account:
    """One rank's counters. clock: CLOCK_MONOTONIC nanoseconds."""

    def __init__(self, dp_rank: int, tally: metrics.Tally, clock: Callable[[], int]) -> None:
        self._rank = str(dp_rank)
        self._tally = tally
        self._clock = clock
        self._tick_start_ns = self._lap_ns = clock()
        self._next_frame_ns = clock()
        self._woken_ns = 0
        self._laps: dict[str, int] = {}  # by phase: when it last ended
        self._peaks = Peaks()
        self._evictions: dict[str, int] = {}

    # Phases of a tick

    def begin_tick(self) -> None:
        """Start timing a tick."""
        self._tick_start_ns = self._lap_ns = self._clock()

    def lap(self, phase: str) -> int:
        """Give the time since the last lap to a phase, and return it in nanoseconds."""
        now_ns = self._clock()
        spent_ns, self._lap_ns = now_ns - self._lap_ns, now_ns
        self._laps[phase] = now_ns
        self._phase(phase, spent_ns)
        return spent_ns

    def end_tick(self) -> None:
        """Count the whole tick: the laps of its phases add up to it."""
        self._phase("tick", self._lap_ns - self._tick_start_ns)

    def _phase(self, phase: str, spent_ns: int) -> None:
        self._tally.inc(metrics.SCHEDULER_PHASE_SECONDS, self._rank, phase, by=spent_ns / 1e9)
        self._tally.inc(metrics.SCHEDULER_PHASE_CALLS, self._rank, phase)
        self._peaks.note(metrics.SCHEDULER_PHASE_MAX, self._rank, phase, value_ns=spent_ns, at_ns=self._lap_ns)

    def agreed(self, agreement: Agreement, plan: Plan | None) -> None:
        """Count one agreement by the kind of the step that follows it."""
        took_part_idle = plan is not None and not plan.rows
        kind = "idle_peer" if took_part_idle else agreement.kind.name.lower()
        self._tally.inc(metrics.TICKS, self._rank, kind)

    def exchanged(self, channel: Channel, sequence: int, timing: Timing | None, spent_ns: int) -> None:
        """Count one exchange; without timing, spent_ns is all that is known of it."""
        name = channel.name.lower()
        if timing is None:
            self._tally.inc(metrics.EXCHANGE_SECONDS, self._rank, name, "total", by=spent_ns / 1e9)
            labels = (self._rank, name, "total")
            self._peaks.note(metrics.EXCHANGE_MAX_SECONDS, *labels, value_ns=spent_ns, at_ns=self._lap_ns)
        else:
            self._exchanged(name, timing)
        self._tally.inc(metrics.EXCHANGE_CALLS, self._rank, name)
        self._tally.set(metrics.EXCHANGE_SEQUENCE, self._rank, name, to=sequence)

    def _exchanged(self, channel: str, timing: Timing) -> None:
        phases = {
            "total": timing.total_ns,
            "peer_wait": timing.peer_wait_ns,
            "arrival_skew": timing.arrival_skew_ns,
            "after_last": timing.after_last_ns,
        }
        for phase, spent_ns in phases.items():
            self._tally.inc(metrics.EXCHANGE_SECONDS, self._rank, channel, phase, by=spent_ns / 1e9)
            labels = (self._rank, channel, phase)
            self._peaks.note(metrics.EXCHANGE_MAX_SECONDS, *labels, value_ns=spent_ns, at_ns=self._lap_ns)
        self._tally.inc(metrics.EXCHANGE_SLEEPS, self._rank, channel, by=timing.sleeps)
        self._tally.inc(metrics.EXCHANGE_WAKES, self._rank, channel, by=timing.wakes)

    def parked(self) -> None:
        """Count the beginning of a park."""
        self._tally.inc(metrics.PARKS, self._rank)
        self._lap_ns = self._clock()

    def woken(self, by_message: bool) -> None:
        """Count a park's end; what a message began is timed to its first step."""
        self.lap("park")
        self._woken_ns = self._lap_ns if by_message else 0

    # Requests

    def admitted(self, request: Request) -> None:
        """Count a request that has entered the queue."""
        self._tally.inc(metrics.PROMPT_TOKENS, self._rank, by=len(request.message.prompt_ids))

    def launching(self, plan: Plan, queue: RequestQueue) -> None:
        """Stamp the requests that a step holds for the first time."""
        now_ns = self._clock()
        if self._woken_ns:
            self._launched_after_park(plan, queue, now_ns)
        for row in plan.rows:
            request = queue.find(row.request_id)
            if request is not None and not request.first_planned_ns:
                request.first_planned_ns = now_ns
                waited_s = (now_ns - request.delivered_ns) / 1e9
                self._tally.observe(metrics.QUEUE_SECONDS, self._rank, value=waited_s)
                cached = request.cached_tokens or 0
                self._tally.inc(metrics.CACHED_PROMPT_TOKENS, self._rank, "device", by=cached)

    def _launched_after_park(self, plan: Plan, queue: RequestQueue, now_ns: int) -> None:
        """Count how long the message that woke this rank took to its first step; a grammar's wait is none of it."""
        woken_ns, self._woken_ns = self._woken_ns, 0
        requests = (queue.find(row.request_id) for row in plan.rows)
        # Its request came with the message; one that had waited for its grammar was delivered before the park.
        sent_ns = [one.message.dispatched_ns for one in requests if one is not None and one.delivered_ns >= woken_ns]
        begun_ns = min(sent_ns, default=woken_ns)
        self._tally.observe(metrics.UNPARK_SECONDS, self._rank, value=(now_ns - begun_ns) / 1e9)
        log.debug(
            "launched_after_park",
            sent_ns=begun_ns,
            woken_ns=woken_ns,
            received_ns=self._laps["receive"],
            planned_ns=self._laps["plan"],
            agreed_ns=self._laps["agree"],
            launched_ns=now_ns,
        )

    def advanced(self, steps: Iterable[tuple[Request, int]]) -> None:
        """Count new ids and the time that they took."""
        now_ns = self._clock()
        for request, num_ids in steps:
            self._tally.inc(metrics.OUTPUT_TOKENS, self._rank, by=num_ids)
            if not request.first_output_ns:
                request.first_output_ns = now_ns
                first_s = (now_ns - request.message.received_ns) / 1e9
                self._tally.observe(metrics.TIME_TO_FIRST_TOKEN, self._rank, value=first_s)
            else:
                each_s = (now_ns - request.last_output_ns) / 1e9 / num_ids
                for _ in range(num_ids):
                    self._tally.observe(metrics.INTER_TOKEN, self._rank, value=each_s)
            request.last_output_ns = now_ns

    def ended(self, ends: Iterable[Ended]) -> None:
        """Count ends and write each request's one log line, with all its times."""
        now_ns = self._clock()
        for end in ends:
            request, message = end.request, end.request.message
            self._tally.inc(metrics.REQUESTS, self._rank, end.ending.reason)
            if end.ending.failure is not None:
                self.grammar_failed(end.ending.failure)
            duration_s = (now_ns - message.received_ns) / 1e9
            self._tally.observe(metrics.REQUEST_SECONDS, self._rank, value=duration_s)
            log.info(
                "request_finished",
                request_id=request.request_id,
                reason=end.ending.reason,
                prompt_tokens=len(message.prompt_ids),
                cached_tokens=request.cached_tokens or 0,
                output_tokens=len(request.output_ids),
                retractions=request.num_retractions,
                received_ns=message.received_ns,
                encoded_ns=message.encoded_ns,
                tokenized_ns=message.tokenized_ns,
                dispatched_ns=message.dispatched_ns,
                delivered_ns=request.delivered_ns,
                first_planned_ns=request.first_planned_ns,
                duration_s=round(duration_s, 6),
            )

    # Grammars

    def grammar_resolved(self, ticket: Ticket) -> None:
        """Count a request that has its grammar, and how long it waited for it."""
        self._tally.inc(metrics.GRAMMAR_RESOLUTIONS, self._rank, ticket.source)
        waited_s = (self._clock() - ticket.begun_ns) / 1e9
        self._tally.observe(metrics.GRAMMAR_RESOLUTION_SECONDS, self._rank, ticket.source, value=waited_s)

    def grammar_failed(self, failure: RequestError | RowFailure) -> None:
        """Count a request that its grammar ends."""
        self._tally.inc(metrics.GRAMMAR_FAILURES, self._rank, _GRAMMAR_FAILURES.get(failure.code, "invalid"))

    def masked(self, plan: Plan, output: StepOutput) -> None:
        """Count a step that a grammar has a part in."""
        if output.num_masked:
            self._tally.inc(metrics.MASK_STEPS, self._rank, "masked")
            self._tally.observe(metrics.MASK_ROWS, self._rank, value=output.num_masked)
        elif any(row.is_thinking for row in plan.rows):
            self._tally.inc(metrics.MASK_STEPS, self._rank, "thinking_only")
        for phase, seconds in output.mask_times:
            self._tally.observe(metrics.MASK_SECONDS, self._rank, phase, value=seconds)
        if output.num_dropped_times:
            self._tally.inc(metrics.MASK_SAMPLES_DROPPED, self._rank, by=output.num_dropped_times)

    def launched(self, plan: Plan) -> None:
        """Count a step with rows that were planned before the ids that they follow were on the host."""
        self.lap("launch")
        if any(row.follows is not None for row in plan.rows):
            self._tally.inc(metrics.STEPS_AHEAD, self._rank)

    def dropped(self, count: int) -> None:
        """Count rows that were computed for requests that had ended."""
        if count:
            self._tally.inc(metrics.DROPPED_ROWS, self._rank, by=count)

    def decoded(self, plan: Plan, output: StepOutput) -> None:
        """Count what ran a decode step, on a rank without rows, too."""
        if plan.kind is StepKind.DECODE:
            tier = "none" if output.tier is None else str(output.tier)
            self._tally.inc(metrics.DECODE_STEPS, self._rank, "eager" if output.tier is None else "graph", tier)

    def paced(self, speculation: Speculation | None, spent_ns: int) -> None:
        """Time a decode step, from its agreement to the next tick's vote."""
        layout = "plain" if speculation is None else "compact" if speculation.is_compact else "all"
        self._tally.observe(metrics.DECODE_STEP_SECONDS, self._rank, layout, value=spent_ns / 1e9)

    # Drafts

    def drafted(self, plan: Plan, output: StepOutput) -> None:
        """Count what became of a step's drafts."""
        if plan.speculation is None or not plan.rows:
            return
        layout = "compact" if plan.speculation.is_compact else "all"
        self._tally.inc(metrics.VERIFY_STEPS, self._rank, layout)
        accepted = verified = drafted = 0
        for row in output.rows:
            self._tally.observe(metrics.ACCEPTED_PER_STEP, self._rank, value=len(row.token_ids))
            accepted += len(row.token_ids) - 1
            verified += row.num_verified
            drafted += row.num_drafts
        self._tally.inc(metrics.DRAFT_TOKENS, self._rank, "accepted", by=accepted)
        self._tally.inc(metrics.DRAFT_TOKENS, self._rank, "refused", by=verified - accepted)
        self._tally.inc(metrics.DRAFT_TOKENS, self._rank, "not_verified", by=drafted - verified)

    def truncated(self, count: int) -> None:
        """Count accepted ids of rows with a grammar that fell behind the end of their text."""
        if count:
            self._tally.inc(metrics.GRAMMAR_TRUNCATED, self._rank, by=count)

    def _note_grammars(self, desk: GrammarDesk) -> None:
        """Take over what the grammar thread counted, and how the cache stands."""
        for event, label, value in desk.service.take_events():
            if event == "compile_seconds":
                kind = _COMPILE_KINDS.get(label, label)
                self._tally.observe(metrics.GRAMMAR_COMPILE_SECONDS, self._rank, kind, value=value)
            elif event == "store_decision":
                self._tally.inc(metrics.GRAMMAR_STORE_DECISIONS, self._rank, label)
            else:
                self._tally.inc(metrics.GRAMMAR_STORE_ERRORS, self._rank, label)
        state = desk.service.cache.state()
        self._tally.set(metrics.GRAMMAR_CACHE_BYTES, self._rank, to=state.num_bytes)
        self._tally.set(metrics.GRAMMAR_CACHE_ENTRIES, self._rank, to=state.num_entries)
        self._tally.set(metrics.GRAMMAR_IN_FLIGHT, self._rank, to=state.num_in_flight)
        for cause, count in state.evictions.items():
            new = count - self._evictions.get(cause, 0)
            self._evictions[cause] = count
            self._tally.inc(metrics.GRAMMAR_CACHE_EVICTIONS, self._rank, cause, by=new)

    def retracted(self, count: int) -> None:
        """Count decode rows that were put back."""
        if count:
            self._tally.inc(metrics.RETRACTIONS, self._rank, by=count)

    # Frames

    def due_frame(self, queue: RequestQueue, memory: Memory, desk: GrammarDesk | None = None) -> MetricsFrame | None:
        """A frame once a second, else None."""
        return self.frame(queue, memory, desk) if self._clock() >= self._next_frame_ns else None

    def frame(self, queue: RequestQueue, memory: Memory, desk: GrammarDesk | None = None) -> MetricsFrame:
        """Everything counted so far, with the gauges as they are now."""
        now_ns = self._clock()
        self._next_frame_ns = now_ns + FRAME_PERIOD_NS
        self._peaks.show(self._tally, now_ns)
        if desk is not None:
            self._note_grammars(desk)
        for state, count in queue.counts().items():
            self._tally.set(metrics.SCHEDULER_REQUESTS, self._rank, state, to=count)
        pages, snapshots = memory.pages, memory.snapshots
        units = {
            ("full", "free"): pages.num_free,
            ("full", "used"): pages.num_used,
            ("full", "cached"): pages.num_cached,
            ("snapshot", "free"): snapshots.num_free,
            # A snapshot is a tree's from the step on that fills it; outside a step none is merely used.
            ("snapshot", "used"): 0,
            ("snapshot", "cached"): snapshots.num_used,
        }
        for labels, count in units.items():
            self._tally.set(metrics.KV_PAGES, self._rank, *labels, to=count)
        return MetricsFrame(f"rank{self._rank}", *self._tally.frame())
