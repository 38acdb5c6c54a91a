"""Which rows the next step holds: queues, budgets and caches -> Plan. No I/O and no clock, so a log replays to it.

Three rules order everything. Decode rows come first: all of them, every step. Prefill shares one budget of tokens in
order of arrival, and who cannot finish in this step leaves half of what is left to those behind. Memory is given to
the oldest: a waiting request starts only with all its pages, and a running one that cannot grow puts the youngest back.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import Plan, PlanRow, SnapshotSave, Speculation, StepKind
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory, Request, State

# Of the step that has not landed, by request, which of its ids is the request's: each is getting one, which is not here
# yet. Chunks that end no prompt get none, and their requests stand behind them already.
Flying = Mapping[str, int]
NOTHING_FLIES: Flying = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one step and the grid of boundaries.

    chunk_tokens: prompt tokens in one step. page_tokens: tokens of a page. snapshot_tokens: distance of the boundary
    snapshots inside long prefills. prompt_logit_tokens: prompt tokens in one step whose log-probabilities are wanted,
    because each takes a row of logits as wide as the vocabulary. All are multiples of page_tokens. max_drafts: most
    drafts of a decode row in one step, 0 where nothing is drafted.
    """

    chunk_tokens: int
    page_tokens: int
    snapshot_tokens: int
    prompt_logit_tokens: int
    max_drafts: int = 0

    def __post_init__(self) -> None:
        if self.max_drafts >= self.page_tokens:
            raise InvariantError(f"windows of {1 + self.max_drafts} tokens reach over pages of {self.page_tokens}")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank would run: decode rows whatever is agreed, chunks only if a prefill is."""

    decode_rows: tuple[PlanRow, ...]
    chunk_rows: tuple[PlanRow, ...]

    @property
    def num_chunk_tokens(self) -> int:
        """Prompt tokens proposed."""
        return sum(len(row.input_ids) for row in self.chunk_rows)

    @property
    def num_chunk_logit_rows(self) -> int:
        """Logit rows that the chunks need."""
        return sum(row.num_logits for row in self.chunk_rows)


class Planner:
    """Owned by the tick thread. `propose` moves requests between states; `settle` turns the agreed kind into a Plan."""

    def __init__(self, queue: RequestQueue, memory: Memory, limits: Limits) -> None:
        self._queue = queue
        self._memory = memory
        self._limits = limits
        self.num_retractions = 0

    def has_room(self, flying: Flying) -> bool:
        """Whether every decode row can grow as it is. Where not, somebody has to be put back, and nobody who flies."""
        needed = sum(
            self._memory.num_missing(request, self._num_growing(request, flying)) for request in self._decoding(flying)
        )
        return needed <= self._memory.pages.num_free + self._memory.pages.num_cached

    def propose(self, flying: Flying = NOTHING_FLIES) -> Proposal:
        """Choose this rank's rows: make room for each decode row, then start and continue prefills.

        flying: there must be room for these (`has_room`). Each has a row behind the one that flies, unless its text is
        as long then as it may be; whether it has ended otherwise shows too late.
        """
        requests = [request for request in self._growing_rows(flying) if not _ends_by_length(request, flying)]
        decode_rows = tuple(_decode_row(request, flying.get(request.request_id)) for request in requests)
        return Proposal(decode_rows, self._chunk_rows())

    def settle(
        self, proposal: Proposal, kind: StepKind, speculation: Speculation | None = None, *, replays: bool = False
    ) -> Plan:
        """Keep what the agreed kind lets run, and add the moves of ring state around the step.

        speculation: of a decode step that drafts; chunks run without. replays: as Plan has it.
        """
        runs_chunks = kind in (StepKind.PREFILL, StepKind.MIXED)
        rows = proposal.decode_rows + (proposal.chunk_rows if runs_chunks else ())
        requests = [self._request(row) for row in rows]
        starts = tuple(request.pending_start for request in requests if request.pending_start is not None)
        most = 0 if speculation is None else speculation.max_drafts
        saves: list[SnapshotSave] = []
        for row, request in zip(rows, requests, strict=True):
            saves += self._saves(row, request, most)
        return Plan(kind, rows, starts, _gathered(rows, saves, self._memory.first_inner_slot), speculation, replays)

    def _saves(self, row: PlanRow, request: Request, most: int) -> list[SnapshotSave]:
        """Snapshots of one row, by position; where there are not enough, the last are worth most."""
        # A window reaches over one page end at most (Limits); whether that one is accepted shows behind the step.
        positions = self._boundaries(request, row.start, row.start + len(row.input_ids) + most)
        saves = []
        for position in reversed(positions):
            if (snapshot := self._memory.tree.allocate_snapshot()) is not None:
                saves.append(SnapshotSave(row.slot, snapshot, position))
        return saves[::-1]

    def _request(self, row: PlanRow) -> Request:
        request = self._queue.find(row.request_id)
        if request is None:
            raise InvariantError(f"row of request {row.request_id}, which is not in the queue")
        return request

    # Decode

    def _decoding(self, flying: Flying) -> list[Request]:
        """Requests with a decode row, oldest first: also those of which the chunk that ends the prompt flies."""
        return [
            request
            for request in self._queue.running()
            if request.state is State.DECODE or request.request_id in flying
        ]

    def _num_growing(self, request: Request, flying: Flying) -> int:
        """Tokens that a decode row may be computed for until its next plan."""
        if request.request_id not in flying:
            return 1 + self._limits.max_drafts
        flown = request.num_tokens - request.num_computed
        return flown if _ends_by_length(request, flying) else flown + 1 + self._limits.max_drafts

    def _growing_rows(self, flying: Flying) -> list[Request]:
        """Decode rows that have room for a window, oldest first; the youngest pay for the pages of the older."""
        rows = []
        for request in self._decoding(flying):
            # Somebody older may have put this one back a moment ago.
            count = self._num_growing(request, flying)
            while request.state is not State.WAITING and not self._memory.grow(request, count):
                if flying:
                    raise InvariantError(f"no page for request {request.request_id}, and what is put back flies")
                self._retract_youngest()
            if request.state is not State.WAITING:
                rows.append(request)
        return rows

    def _retract_youngest(self) -> None:
        """Put the youngest running request back. It is never an older one than the request that wants the page."""
        running = self._queue.running()
        if len(running) == 1:
            raise InvariantError("one sequence alone does not fit into the pages of this rank")
        self._memory.release(running[-1])
        self._queue.put_back(running[-1])
        self.num_retractions += 1

    # Prefill

    def _chunk_rows(self) -> tuple[PlanRow, ...]:
        """Fill the prefill budget from running prefills, then from waiting requests, in order."""
        # One more than can start: thousands may wait, and all that matters of them here is that somebody does.
        first_waiting = itertools.islice(self._queue.waiting(), self._memory.slots.num_free + 1)
        candidates = [*self._queue.running(State.PREFILL), *first_waiting]
        sizes: list[tuple[Request, int]] = []
        left = self._limits.chunk_tokens
        reads_logits = False
        for position, request in enumerate(candidates):
            if request.wants_prompt_logits:
                if reads_logits:
                    continue  # one of them a step: prompt_logit_tokens bounds its chunk
                reads_logits = True
            if request.state is State.WAITING and self._awaits_a_prefix(request):
                continue
            if request.state is State.WAITING and not self._start(request, left):
                break  # whoever comes behind may not take the memory that this one waits for
            size = self._chunk_size(request, left, others_wait=position + 1 < len(candidates))
            sizes.append((request, size))
            left -= size
        # Nothing is left of a prompt whose last chunk flies.
        return tuple(_chunk_row(request, size) for request, size in self._spread(sizes, left) if size)

    def _spread(self, sizes: list[tuple[Request, int]], left: int) -> list[tuple[Request, int]]:
        """Give what the budget still has to the first that can use it: those behind did not need their half."""
        spread = []
        for request, size in sizes:
            wanted = self._next_stop(request) - request.num_computed
            more = min(wanted - size, left)
            if size + more < wanted:
                more = more // self._limits.page_tokens * self._limits.page_tokens
            spread.append((request, size + more))
            left -= more
        return spread

    def _start(self, request: Request, left: int) -> bool:
        """Give a waiting request its memory: if the budget has a chunk for it, and each running row a page to grow."""
        if left < min(request.num_tokens, self._limits.page_tokens):
            return False
        if not self._memory.admit(request, num_spare_pages=len(self._queue.running())):
            return False
        self._queue.start(request)
        return True

    def _awaits_a_prefix(self, request: Request) -> bool:
        """Whether a running prefill is about to leave a boundary in the tree that this request can start from.

        The choices of one prompt arrive together: the first computes it, the others wait for its boundaries, which
        takes them no longer than computing the same tokens side by side.
        """
        if not request.uses_prefix_cache:
            return False
        ids, page_tokens = request.ids, self._limits.page_tokens
        for running in self._queue.running(State.PREFILL):
            stop = next(iter(self._boundaries(running, running.num_computed, len(ids) - 1)), None)
            # The first page tells most strangers apart without a copy of both sequences.
            if stop is not None and ids[:page_tokens] == running.ids[:page_tokens] and ids[:stop] == running.ids[:stop]:
                return True
        return False

    def _chunk_size(self, request: Request, left: int, others_wait: bool) -> int:
        """Tokens of one request's next chunk: up to the next stop, the budget, and its fair share.

        A chunk that does not end its prompt ends at a page end, so every later chunk starts at one.
        """
        wanted = self._next_stop(request) - request.num_computed
        ends_prompt = request.num_computed + wanted == request.num_tokens
        if wanted <= left and (ends_prompt or not others_wait):
            return wanted
        page_tokens = self._limits.page_tokens
        share = max(left // 2, page_tokens) if others_wait else left
        return min(wanted, share, left) // page_tokens * page_tokens

    def _next_stop(self, request: Request) -> int:
        """The first position after num_computed where a chunk has to end."""
        limits, start = self._limits, request.num_computed
        if not request.wants_prompt_logits:
            return request.num_tokens
        return min(request.num_tokens, (start // limits.prompt_logit_tokens + 1) * limits.prompt_logit_tokens)

    def _boundaries(self, request: Request, start: int, end: int) -> list[int]:
        """Page ends in (start, end] at which the rings are worth a snapshot, in order.

        In a prefill: every snapshot_tokens, where other sequences part from this one, at the last page end that an
        equal prompt can resume from, and at the prompt's own end if that is one. While decoding: every page end.
        """
        page_tokens = self._limits.page_tokens
        if not request.uses_prefix_cache:
            return []
        if request.state is State.DECODE or start == request.num_tokens:  # or the chunk that ends the prompt flies
            return list(range((start // page_tokens + 1) * page_tokens, end + 1, page_tokens))
        step = self._limits.snapshot_tokens
        found = {request.branch_tokens, _last_page_end(request, page_tokens), request.num_tokens}
        found |= set(range((start // step + 1) * step, end + 1, step))
        return sorted(position for position in found if start < position <= end and position % page_tokens == 0)


def _gathered(rows: Sequence[PlanRow], saves: Sequence[SnapshotSave], first_slot: int) -> tuple[SnapshotSave, ...]:
    """Give each save inside a chunk a slot to be gathered in, from first_slot on: each has a page of tokens of its own
    before it, so as many as pages fit into a step's chunks are enough."""
    ends = {row.slot: row.start + len(row.input_ids) for row in rows}
    slots = itertools.count(first_slot)
    return tuple(replace(save, inner_slot=next(slots)) if save.position < ends[save.slot] else save for save in saves)


def _last_page_end(request: Request, page_tokens: int) -> int:
    """The last page end before the last token: one token has to be computed, because logits are not cached."""
    return (request.num_tokens - 1) // page_tokens * page_tokens


def _ends_by_length(request: Request, flying: Flying) -> bool:
    """Whether the id that a request is getting is the last one that it may get."""
    return request.request_id in flying and len(request.output_ids) + 1 >= request.max_outputs


def _decode_row(request: Request, follows: int | None) -> PlanRow:
    """The anchor alone: the last id, at the position that it takes; follows: which of the ids that fly it is."""
    start, last = request.num_computed, request.num_tokens - 1
    # The chunk that ends a prompt has been counted when it flies, a decode row has not.
    if start != last and (follows is None or start != last + 1):
        raise InvariantError(f"request {request.request_id} decodes at {start} of {request.num_tokens}")
    return PlanRow(
        request_id=request.request_id,
        slot=request.slot,
        input_ids=request.output_ids[-1:] if follows is None else (0,),
        start=last if follows is None else last + 1,
        page_table=tuple(request.pages),
        num_logits=1,
        sampling=request.message.sampling,
        prompt_ids=request.message.prompt_ids,
        output_ids=request.output_ids,
        matcher=request.matcher,
        is_thinking=request.is_thinking,
        follows=follows,
    )


def _chunk_row(request: Request, size: int) -> PlanRow:
    """The next `size` ids of a prefill; only the last chunk samples."""
    start, end = request.num_computed, request.num_computed + size
    is_last = end == request.num_tokens
    top = request.message.sampling.top_logprobs or 0
    return PlanRow(
        request_id=request.request_id,
        slot=request.slot,
        input_ids=request.ids[start:end],
        start=start,
        page_table=tuple(request.pages),
        num_logits=size if request.wants_prompt_logits else int(is_last),
        sampling=request.message.sampling if is_last else None,
        prompt_ids=request.message.prompt_ids,
        output_ids=request.output_ids,
        prompt_top_logprobs=top if request.wants_prompt_logits else None,
        matcher=request.matcher if is_last else None,
        is_thinking=request.is_thinking and is_last,
    )
