"""Compiled grammars in memory, bounded in bytes and entries, and the one compile that all who ask at once share.

One lock guards everything; no native call and no callback happens under it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import xgrammar

from dsparkd.config import GrammarCacheConfig
from dsparkd.errors import InvariantError, RequestError
from dsparkd.grammar.matcher import Matcher
from dsparkd.messages import Grammar

ENTRY_OVERHEAD_BYTES = 512
MAX_JOBS = 256  # grammars on their way in one rank; what they hold is in no cache's account

Source = Literal["memory", "in_flight", "disk", "local_compile", "compile"]
EvictionCause = Literal["bytes", "entries", "oversized", "flush"]


@dataclass(frozen=True)
class Compiled:
    """A grammar that can be matched; never advanced itself."""

    native: xgrammar.CompiledGrammar
    num_bytes: int


@dataclass(eq=False)
class Ticket:
    """One request's wait for its grammar. Owned by the tick thread; `outcome` and `source` are set once, before that
    thread hears of it.

    waits: it is heard of later. Set by the look-up alone: the outcome of a ticket that waits may be there at any
    moment, the look-up's own end included, so whether there is one decides nothing.
    """

    grammar: Grammar
    begun_ns: int
    deadline_ns: int
    waits: bool = False
    source: Source = "memory"
    outcome: Compiled | RequestError | None = None
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the grammar, or the reason why there is none, has come."""
        return self.outcome is not None

    @property
    def is_over(self) -> bool:
        """Whether nobody waits with it any more."""
        return self.is_cancelled or self.outcome is not None

    def matcher(self) -> Matcher:
        """Return a new matcher at the grammar's start. Raises the RequestError that stands in its place."""
        if isinstance(self.outcome, RequestError):
            raise self.outcome
        if self.outcome is None:
            raise InvariantError("a matcher of a grammar that is not there yet")
        return Matcher(self.outcome.native, self.grammar)


@dataclass(eq=False)
class Job:
    """One grammar on its way. `waiters` belongs to the cache's lock."""

    grammar: Grammar
    generation: int
    waiters: list[Ticket] = field(default_factory=list)


@dataclass(frozen=True)
class _Refused:
    error: RequestError
    num_bytes: int
    expires_ns: int


class GrammarCache:
    """Any thread may call. `clock`: CLOCK_MONOTONIC nanoseconds."""

    def __init__(
        self,
        config: GrammarCacheConfig,
        clock: Callable[[], int] = time.monotonic_ns,
        lock: threading.Lock | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock() if lock is None else lock
        self._entries: OrderedDict[Grammar, tuple[Compiled, int]] = OrderedDict()  # least recently used first
        self._refused: OrderedDict[Grammar, _Refused] = OrderedDict()  # oldest first
        self._jobs: dict[Grammar, Job] = {}
        self._num_bytes = 0
        self._generation = 0
        self._evictions: dict[EvictionCause, int] = {"bytes": 0, "entries": 0, "oversized": 0, "flush": 0}

    def look_up(self, ticket: Ticket) -> Job | None:
        """Answer the ticket from memory, or let it wait for a job; returns a new job that the caller must see to.

        Exactly one of three: the ticket is done (source memory), it waits with others (in_flight), or the returned job
        is the caller's.
        """
        grammar = ticket.grammar
        with self._lock:
            held = self._entries.get(grammar)
            if held is not None:
                self._entries.move_to_end(grammar)
                ticket.outcome = held[0]
                return None
            refused = self._refused.get(grammar)
            if refused is not None:
                if self._clock() < refused.expires_ns:
                    ticket.outcome = refused.error
                    return None
                self._forget_refusal(grammar)
            job = self._jobs.get(grammar)
            if job is not None:
                ticket.source = "in_flight"
                ticket.waits = True
                job.waiters.append(ticket)
                return None
            if len(self._jobs) >= MAX_JOBS:
                ticket.outcome = RequestError(
                    f"{MAX_JOBS} new grammars are being prepared; try again later",
                    status=503,
                    code="grammar_unavailable",
                    retry_after_s=1,
                )
                return None
            ticket.waits = True
            job = self._jobs[grammar] = Job(grammar, self._generation, [ticket])
            return job

    def keep(self, job: Job) -> bool:
        """Whether somebody still waits for the job; if nobody does it is dropped, and the next look-up is a new one."""
        with self._lock:
            if not job.waiters:
                del self._jobs[job.grammar]
                return False
            return True

    def cancel(self, ticket: Ticket) -> bool:
        """Take a ticket out of its job; False when it is done, and told of elsewhere."""
        with self._lock:
            job = self._jobs.get(ticket.grammar)
            if job is None or ticket not in job.waiters:
                return False
            job.waiters.remove(ticket)
            return True

    def finish(self, job: Job, outcome: Compiled | RequestError, source: Source, *, remember: bool) -> list[Ticket]:
        """End a job: its grammar is no longer in flight and, if it may be remembered, in memory; nothing in between.

        Returns the tickets that waited, each with its outcome.
        """
        key_bytes = len(job.grammar.text.encode())
        now_ns = self._clock()
        with self._lock:
            del self._jobs[job.grammar]
            waiters, job.waiters = job.waiters, []
            if remember and job.generation == self._generation:
                if isinstance(outcome, Compiled):
                    self._insert(job.grammar, outcome, outcome.num_bytes + key_bytes + ENTRY_OVERHEAD_BYTES)
                else:
                    self._insert_refusal(job.grammar, outcome, key_bytes + ENTRY_OVERHEAD_BYTES, now_ns)
            for ticket in waiters:
                if ticket.source != "in_flight":
                    ticket.source = source
                ticket.outcome = outcome
        return waiters

    def condemn(self, grammar: Grammar, error: RequestError) -> None:
        """Refuse a grammar from now on, for as long as a refusal is remembered: it has shown itself in a request."""
        key_bytes = len(grammar.text.encode())
        now_ns = self._clock()
        with self._lock:
            held = self._entries.pop(grammar, None)
            if held is not None:
                self._num_bytes -= held[1]
            if grammar in self._refused:
                self._forget_refusal(grammar)
            self._insert_refusal(grammar, error, key_bytes + ENTRY_OVERHEAD_BYTES, now_ns)

    def flush(self) -> None:
        """Forget everything in memory; what is on its way serves those who wait and is not kept."""
        with self._lock:
            self._generation += 1
            self._evictions["flush"] += len(self._entries)
            self._entries.clear()
            self._refused.clear()
            self._num_bytes = 0

    def _insert(self, grammar: Grammar, compiled: Compiled, num_bytes: int) -> None:
        if num_bytes > self._config.bytes:
            # It would push everything out and then itself.
            self._evictions["oversized"] += 1
            return
        self._entries[grammar] = (compiled, num_bytes)
        self._num_bytes += num_bytes
        self._evict()

    def _insert_refusal(self, grammar: Grammar, error: RequestError, num_bytes: int, now_ns: int) -> None:
        if num_bytes > self._config.bytes:
            return
        expires_ns = now_ns + int(self._config.negative_ttl_s * 1e9)
        self._refused[grammar] = _Refused(error, num_bytes, expires_ns)
        self._num_bytes += num_bytes
        while len(self._refused) > self._config.negative_entries:
            self._forget_refusal(next(iter(self._refused)))
        self._evict()

    def _forget_refusal(self, grammar: Grammar) -> None:
        self._num_bytes -= self._refused.pop(grammar).num_bytes

    def _evict(self) -> None:
        while self._num_bytes > self._config.bytes and self._refused:
            # Whoever sends one bad grammar after the other pushes no good one out.
            self._forget_refusal(next(iter(self._refused)))
        while self._num_bytes > self._config.bytes or len(self._entries) > self._config.entries:
            cause: EvictionCause = "bytes" if self._num_bytes > self._config.bytes else "entries"
            _, (_, num_bytes) = self._entries.popitem(last=False)
            self._num_bytes -= num_bytes
            self._evictions[cause] += 1

    def state(self) -> CacheState:
        """What is held now, and what was evicted since the start."""
        with self._lock:
            return CacheState(
                self._num_bytes, len(self._entries), len(self._refused), len(self._jobs), {**self._evictions}
            )


@dataclass(frozen=True)
class CacheState:
    """num_bytes covers entries and refusals."""

    num_bytes: int
    num_entries: int
    num_refused: int
    num_in_flight: int
    evictions: dict[EvictionCause, int]
