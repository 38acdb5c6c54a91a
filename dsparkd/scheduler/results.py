"""Commit of a step: which ids a request keeps, when it ends and why, and what its prefix leaves in the tree.

The only place that decides where an output ends. The earliest event wins: a stop id or stop string before the length
that the same run of ids would also reach. Ids behind the event exist nowhere afterwards: not in the output, its
log-probabilities, its usage, its pages or the prefix tree. And the only place from which a grammar hears of ids: of
those that are kept, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from dsparkd.errors import InvariantError
from dsparkd.executor.lengths import blend
from dsparkd.executor.plan import Plan, PlanRow, RowFailure, RowOutput, SnapshotSave, StepOutput
from dsparkd.messages import DetokenizeOptions, Finish, FinishReason, TokenDelta
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory, Request, State
from dsparkd.text.stops import StopMatcher

if TYPE_CHECKING:
    from dsparkd.grammar.matcher import Matcher


class TokenTexts(Protocol):
    """What stop strings need of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that an id stands for."""

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens hides the id."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an output ends at its last kept id; see messages.Finish. failure: with reason "error"."""

    reason: FinishReason
    matched: int | str | None = None
    cut_bytes: int = 0
    failure: RowFailure | None = None


# Tells grammars their queued ids, in one call that returns in bounded time; a failure for each that cannot be right.
CommitGrammars = Callable[[Sequence["Matcher"]], list[RowFailure | None]]


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has just left the queue."""

    request: Request
    ending: Ending


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step leaves: deltas for the detokenizer, the requests that ended, ids kept of each request.

    num_truncated: ids of rows with a grammar that were accepted behind the end of their text. num_dropped: rows whose
    request had ended before the step did.
    """

    deltas: tuple[TokenDelta, ...]
    ended: tuple[Ended, ...]
    advanced: tuple[tuple[Request, int], ...]
    num_truncated: int = 0
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Launched:
    """Requests of a plan's rows, and which of these rows take theirs further into its prompt, as it was launched."""

    requests: tuple[Request, ...]
    is_chunk: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row of a step: what was produced, how many of its ids are kept, and whether the output ends there."""

    request: Request
    produced: RowOutput
    kept: int
    ending: Ending | None


class Committer:
    """Owned by the tick thread. eos_ids: ids that end a text unless the request ignores them.

    think_end_id: the id behind which a grammar begins; None where no request can have one. commit_grammars likewise.
    """

    def __init__(
        self,
        queue: RequestQueue,
        memory: Memory,
        texts: TokenTexts,
        eos_ids: frozenset[int],
        think_end_id: int | None = None,
        commit_grammars: CommitGrammars | None = None,
    ) -> None:
        self._queue = queue
        self._memory = memory
        self._texts = texts
        self._eos_ids = eos_ids
        self._think_end_id = think_end_id
        self._commit_grammars = commit_grammars

    def launched(self, plan: Plan) -> Launched:
        """Take requests on over the chunks of a plan that is being launched: what they leave is known ahead.

        Whoever reads their pages and snapshots does so in a later step, which the device runs behind this one. Raises
        InvariantError for a request that is not in the queue.
        """
        requests, is_chunk = [], []
        saves = _saves_by_slot(plan)
        for row in plan.rows:
            request = self._queue.find(row.request_id)
            if request is None:
                raise InvariantError(f"a row of request {row.request_id}, which is not in the queue")
            requests.append(request)
            # One whose last chunk flies is no decode row before that has landed, and has a row that follows it.
            is_chunk.append(request.state is State.PREFILL and row.follows is None)
            if is_chunk[-1]:
                self._require_place(request, row)
                self._advance(request, len(row.input_ids), saves.get(row.slot, []))
        return Launched(tuple(requests), tuple(is_chunk))

    def commit(self, plan: Plan, output: StepOutput, launched: Launched | None = None) -> Committed:
        """Apply one step's outputs to its requests, row by row.

        launched: what `launched` gave when the step was; some of its requests may have ended since, and what the step
        gave for them exists nowhere. None: it is launched only now.
        """
        if len(output.rows) != len(plan.rows):
            raise InvariantError(f"{len(output.rows)} outputs for {len(plan.rows)} rows")
        if launched is None:
            launched = self.launched(plan)
        saves = _saves_by_slot(plan)
        sampled: list[Sampled] = []
        num_dropped = 0
        for row, produced, request, is_chunk in zip(
            plan.rows, output.rows, launched.requests, launched.is_chunk, strict=True
        ):
            own_saves = [] if is_chunk else saves.get(row.slot, [])
            if request.state is State.FINISHED:
                num_dropped += 1
                for save in own_saves:
                    self._memory.tree.free_snapshot(save.snapshot)
                continue
            if not is_chunk:
                self._require_place(request, row)
            _add_prompt_logprobs(request, row, produced)
            if row.sampling is None:
                continue
            num_before = len(request.output_ids)
            if produced.failure is not None:
                ending: Ending | None = Ending("error", failure=produced.failure)
            else:
                ending = self._append(request, produced.token_ids)
            kept = len(request.output_ids) - num_before
            _note_chances(request, produced)
            if not is_chunk:
                # The anchor and all kept ids but the last have been through the model.
                self._advance(request, kept, own_saves)
            sampled.append(Sampled(request, produced, kept, ending))
        return replace(self._settle(self._checked(sampled)), num_dropped=num_dropped)

    def _settle(self, sampled: list[Sampled]) -> Committed:
        """Say what is new of each request, and let go of those that have ended."""
        deltas = [self._delta(row.request, row.produced, row.kept, row.ending) for row in sampled]
        advanced = [(row.request, row.kept) for row in sampled if row.kept]
        num_truncated = sum(
            len(row.produced.token_ids) - row.kept
            for row in sampled
            if row.request.matcher is not None and row.produced.failure is None
        )
        ended = [self._end(row.request, row.ending) for row in sampled if row.ending is not None]
        return Committed(tuple(deltas), tuple(ended), tuple(advanced), num_truncated)

    def abort(self, request: Request) -> tuple[TokenDelta, Ended]:
        """End a request in whatever state it is; its last delta says so."""
        ending = Ending("abort")
        delta = self._delta(request, RowOutput(token_ids=()), 0, ending)
        return delta, self._end(request, ending)

    @staticmethod
    def _require_place(request: Request, row: PlanRow) -> None:
        if request.num_computed != row.start:
            raise InvariantError(f"request {request.request_id} stands at {request.num_computed}, ran at {row.start}")

    def _advance(self, request: Request, count: int, saves: Sequence[SnapshotSave]) -> None:
        """Count kept ids that have been through the model; a snapshot behind the last of them is worth nothing."""
        request.num_computed += count
        if request.pending_start is not None:
            self._memory.start(request)
        for save in saves:
            if save.position <= request.num_computed:
                self._memory.keep_prefix(request, save.position, save.snapshot)
            else:
                self._memory.tree.free_snapshot(save.snapshot)

    def _append(self, request: Request, token_ids: tuple[int, ...]) -> Ending | None:
        """Keep ids up to and including the one that ends the output."""
        if not token_ids:
            raise InvariantError(f"request {request.request_id} was sampled and got no id")
        if request.state is State.PREFILL:
            request.move_to(State.DECODE)
        for token_id in token_ids:
            is_late_enough = len(request.output_ids) >= request.message.sampling.min_tokens
            request.output_ids += (token_id,)
            if self._advance_grammar(request, token_id):
                # Nothing may follow, whatever min_tokens says (D-26).
                is_late_enough = True
            shown = self._shown(request, token_id)
            # Both are looked at: the matcher has to see every token, and its cut reaches at least as far back.
            ending = self._stop_string(request, shown, is_late_enough)
            if ending is None and is_late_enough:
                ending = self._stop_id(request, token_id, shown)
            if ending is None and len(request.output_ids) >= request.max_outputs:
                ending = Ending("length")
            if ending is not None:
                return ending
        return None

    def _advance_grammar(self, request: Request, token_id: int) -> bool:
        """Note a kept id for the request's grammar, which begins behind the reasoning; True where its text ends."""
        if request.matcher is None:
            return False
        if request.is_thinking:
            request.is_thinking = token_id != self._think_end_id
            return False
        request.matcher.queue((token_id,))
        return token_id in self._eos_ids

    def _checked(self, sampled: list[Sampled]) -> list[Sampled]:
        """A row that ends takes part in no walk any more, so its grammar hears of its last ids here (D-11)."""
        held = {
            place: row.request.matcher
            for place, row in enumerate(sampled)
            if row.ending is not None and row.ending.failure is None and row.request.matcher is not None
        }
        if not held:
            return sampled
        if self._commit_grammars is None:
            raise InvariantError("a row with a grammar, where grammars are off")
        failures = dict(zip(held, self._commit_grammars(list(held.values())), strict=True))
        return [_failed(row, failures.get(place)) for place, row in enumerate(sampled)]

    def _shown(self, request: Request, token_id: int) -> bytes:
        """What the id adds to the text that the client sees."""
        hidden = request.message.skip_special_tokens and self._texts.is_special(token_id)
        return b"" if hidden else self._texts.token_bytes(token_id)

    def _stop_id(self, request: Request, token_id: int, shown: bytes) -> Ending | None:
        sampling = request.message.sampling
        is_eos = token_id in self._eos_ids and not sampling.ignore_eos
        if not is_eos and token_id not in sampling.stop_ids:
            return None
        return Ending("stop", matched=token_id, cut_bytes=0 if sampling.include_stop else len(shown))

    def _stop_string(self, request: Request, shown: bytes, is_late_enough: bool) -> Ending | None:
        """Look for a stop string in the text so far; one that ends before min_tokens does not count."""
        sampling = request.message.sampling
        hit = request.stops.feed(shown)
        if hit is not None and is_late_enough:
            return Ending(
                "stop", matched=hit.stop, cut_bytes=hit.after_bytes if sampling.include_stop else hit.cut_bytes
            )
        while hit is not None:
            request.stops = StopMatcher(sampling.stop_strings)
            hit = request.stops.feed(shown[len(shown) - hit.after_bytes :])
        return None

    def _delta(self, request: Request, produced: RowOutput, kept: int, ending: Ending | None) -> TokenDelta:
        """Say what is new of a request; the first delta carries the detokenizer's options, the last one the end."""
        options = prompt_logprobs = None
        message = request.message
        if not request.announced:
            request.announced = True
            options = DetokenizeOptions(message.sampling.stop_strings, message.skip_special_tokens)
            if request.prompt_logprobs is not None:
                prompt_logprobs = tuple(request.prompt_logprobs)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=request.output_ids[len(request.output_ids) - kept :],
            options=options,
            logprobs=produced.logprobs[:kept] if produced.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish=_finish(request, ending) if ending is not None else None,
        )

    def _end(self, request: Request, ending: Ending) -> Ended:
        if request.slot:
            self._memory.release(request)
        self._queue.remove(request)
        return Ended(request, ending)


def _saves_by_slot(plan: Plan) -> dict[int, list[SnapshotSave]]:
    """Snapshots of each row, by position."""
    saves: dict[int, list[SnapshotSave]] = {}
    for save in plan.snapshot_saves:
        saves.setdefault(save.slot, []).append(save)
    return saves


def _failed(row: Sampled, failure: RowFailure | None) -> Sampled:
    return row if failure is None else replace(row, ending=Ending("error", failure=failure))


def _note_chances(request: Request, produced: RowOutput) -> None:
    """Add what the row's block was given to what is known of the request, for the budget of a later step."""
    if produced.num_drafts:
        request.survival = blend(request.survival, produced.survival)
        request.steps_since_drafts = 0
    else:
        request.steps_since_drafts += 1


def _add_prompt_logprobs(request: Request, row: PlanRow, produced: RowOutput) -> None:
    """Collect what a chunk says of the prompt tokens behind its first; after a retract it is said again."""
    if request.prompt_logprobs is None or produced.prompt_logprobs is None:
        return
    known = len(request.prompt_logprobs) - (row.start + 1)
    if known < 0:
        raise InvariantError(f"request {request.request_id} lacks log-probabilities before position {row.start + 1}")
    request.prompt_logprobs.extend(produced.prompt_logprobs[known:])


def _finish(request: Request, ending: Ending) -> Finish:
    finish = Finish(
        reason=ending.reason,
        matched=ending.matched,
        cut_bytes=ending.cut_bytes,
        prompt_tokens=len(request.message.prompt_ids),
        cached_tokens=request.cached_tokens or 0,
        output_tokens=len(request.output_ids),
    )
    failure = ending.failure
    if failure is None:
        return finish
    return msgspec.structs.replace(finish, error=failure.message, status=failure.status, code=failure.code)
