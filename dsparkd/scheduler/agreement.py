"""What two ranks make of each other's votes: seven integers from each -> one step kind for both. Pure functions.

Both ranks compute the same result from the same two payloads in rank order, whichever rank they are, so nothing has to
be sent back. Expert layers are collective: either both ranks enter a step, or neither does.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple

from dsparkd.errors import PeerError
from dsparkd.executor.plan import StepKind


class Channel(IntEnum):
    """Independent sequences of exchanges."""

    PLAN = 0
    TIER = 1


class Intent(IntFlag):
    """What a rank wants beside the step."""

    NONE = 0
    STOP = 1
    MAY_PARK = 2


class Drafting(IntEnum):
    """How much a decode step is to verify."""

    NONE = 0
    ALL = 1
    SOME = 2  # or each rank something else: how much, the tier channel says


class PlanVote(NamedTuple):
    """The seven fields. A vote of an idle rank is permissive: it never vetoes a path."""

    num_tokens: int  # to process in the step that this rank proposes, decode rows included
    num_logit_rows: int
    decode_graph_ok: int
    has_extend: int
    tbo_ok: int
    step_kind: int
    prefill_graph_ok: int


class PlanExtra(NamedTuple):
    """The extra words of the plan channel."""

    longest_prefix: int = 0
    draft_graph_ok: int = 0  # 1 wherever graphs are on, whatever the rank proposes
    tick: int = 0
    num_decode_rows: int = 0  # rows that take part whichever kind is agreed
    step_ns: int = 0  # how long the tick before took from its agreement on, where it was a decode step; else 0
    drafting: int = Drafting.NONE  # what this rank would have a decode step verify, where windows are compact


class Payload(NamedTuple):
    """What one rank says in one exchange of the plan channel."""

    vote: PlanVote
    extra: PlanExtra
    intent: Intent


class Agreement(NamedTuple):
    """What both ranks do next. Pairs are in rank order; tokens count what really runs, before any padding.

    prefill_streak: consecutive prefill ticks up to this one during which some rank had decode rows. step_ns: of the
    rank whose last step took longer.
    """

    kind: StepKind
    num_tokens: tuple[int, int]
    num_logit_rows: tuple[int, int]
    decode_graph: bool
    tbo: bool
    prefill_graph: bool
    longest_prefix: int
    draft_graph: bool
    stop: bool
    park: bool
    prefill_streak: int
    step_ns: int = 0
    drafting: Drafting = Drafting.NONE


UNKNOWN_TIER = -1

IDLE_VOTE = PlanVote(
    num_tokens=0,
    num_logit_rows=0,
    decode_graph_ok=1,
    has_extend=0,
    tbo_ok=1,
    step_kind=StepKind.IDLE,
    prefill_graph_ok=1,
)


def vote(
    *, num_chunk_tokens: int, num_chunk_logit_rows: int, num_decode_rows: int, decode_graphs: bool = False
) -> PlanVote:
    """State one rank's own work. Idle is zero work and nothing else: no third state beside a batch and none."""
    if num_chunk_tokens:
        return PlanVote(
            num_tokens=num_chunk_tokens + num_decode_rows,
            num_logit_rows=num_chunk_logit_rows + num_decode_rows,
            # Where a decode tick is agreed in spite of them, the chunks sit it out.
            decode_graph_ok=int(decode_graphs),
            has_extend=1,
            tbo_ok=0,
            step_kind=StepKind.MIXED if num_decode_rows else StepKind.PREFILL,
            prefill_graph_ok=0,
        )
    if num_decode_rows:
        return PlanVote(
            num_tokens=num_decode_rows,
            num_logit_rows=num_decode_rows,
            decode_graph_ok=int(decode_graphs),
            has_extend=0,
            tbo_ok=0,
            step_kind=StepKind.DECODE,
            prefill_graph_ok=0,
        )
    return IDLE_VOTE


def combine(rank0: Payload, rank1: Payload, *, prefill_streak: int, max_prefill_streak: int) -> Agreement:
    """Agree on one step. Raises PeerError when the ticks differ or a vote contradicts itself.

    prefill_streak is the last agreement's. Decode rows join whatever is agreed; a rank whose only work is prefill sits
    out a decode tick, which is agreed after max_prefill_streak prefill ticks if there are decode rows.
    """
    both = (rank0, rank1)
    _require_same_tick(rank0, rank1)
    for rank, payload in enumerate(both):
        _require_consistent(rank, payload)
    votes = (rank0.vote, rank1.vote)
    decode_rows = (rank0.extra.num_decode_rows, rank1.extra.num_decode_rows)
    has_extend = any(each.has_extend for each in votes)
    decode_turn = any(decode_rows) and prefill_streak >= max_prefill_streak
    extends = has_extend and not decode_turn
    if extends:
        kind = StepKind.MIXED if any(decode_rows) else StepKind.PREFILL
    else:
        kind = StepKind.DECODE if any(decode_rows) else StepKind.IDLE
    return Agreement(
        kind=kind,
        num_tokens=(votes[0].num_tokens, votes[1].num_tokens) if extends else decode_rows,
        num_logit_rows=(votes[0].num_logit_rows, votes[1].num_logit_rows) if extends else decode_rows,
        decode_graph=bool(min(each.decode_graph_ok for each in votes)),
        tbo=bool(min(each.tbo_ok for each in votes)),
        prefill_graph=bool(min(each.prefill_graph_ok for each in votes)),
        longest_prefix=max(each.extra.longest_prefix for each in both),
        draft_graph=bool(min(each.extra.draft_graph_ok for each in both)),
        stop=any(Intent.STOP in each.intent for each in both),
        park=kind is StepKind.IDLE and all(Intent.MAY_PARK in each.intent for each in both),
        prefill_streak=prefill_streak + 1 if extends and any(decode_rows) else 0,
        step_ns=max(each.extra.step_ns for each in both),
        drafting=_agree_drafting(both),
    )


def exchanges_tier(agreement: Agreement, *, compact_verify: bool) -> bool:
    """Whether the tier channel is exchanged in this tick: a function of agreed values, so both ranks do or neither.

    Not where all that have rows would verify nothing, or everything: there is nothing left to say.
    """
    is_decode = agreement.kind is StepKind.DECODE and any(agreement.num_tokens)
    return compact_verify and is_decode and agreement.drafting is Drafting.SOME


def agree_tier(wanted: tuple[int, int], tiers: Sequence[int]) -> int:
    """The verify tier that both ranks run: a captured number of tokens, or 0 for no verify.

    wanted: each rank's tokens to verify, UNKNOWN_TIER where it cannot say yet. tiers: captured ones, ascending, the
    same on both ranks, the last one enough for anything. Raises PeerError for a number that no tier holds.
    """
    if UNKNOWN_TIER in wanted:
        return tiers[-1]
    most = max(wanted)
    if min(wanted) < 0 or most > tiers[-1]:
        raise PeerError(f"the ranks want tiers {wanted[0]} and {wanted[1]}: use {UNKNOWN_TIER}..{tiers[-1]}")
    return 0 if most == 0 else next(tier for tier in tiers if tier >= most)


def _agree_drafting(both: tuple[Payload, Payload]) -> Drafting:
    """What the ranks that have decode rows want, where they want the same."""
    wants = {each.extra.drafting for each in both if each.extra.num_decode_rows}
    return Drafting.SOME if len(wants) > 1 else Drafting(wants.pop() if wants else Drafting.NONE)


def _require_same_tick(rank0: Payload, rank1: Payload) -> None:
    if rank0.extra.tick != rank1.extra.tick:
        raise PeerError(f"ticks differ: {rank0.extra.tick}, {rank1.extra.tick}")


def _require_consistent(rank: int, payload: Payload) -> None:
    """Raise PeerError when the kind that a rank proposes is not the one that its counts make."""
    counts, decode_rows = payload.vote, payload.extra.num_decode_rows
    expected = {
        StepKind.IDLE: counts.num_tokens == decode_rows == counts.has_extend == 0,
        StepKind.PREFILL: counts.num_tokens > 0 and decode_rows == 0 and counts.has_extend == 1,
        StepKind.MIXED: counts.num_tokens > decode_rows > 0 and counts.has_extend == 1,
        StepKind.DECODE: counts.num_tokens == decode_rows > 0 and counts.has_extend == 0,
    }
    says_known = payload.extra.step_ns >= 0 and payload.extra.drafting in Drafting.__members__.values()
    if not says_known or counts.step_kind not in expected or not expected[StepKind(counts.step_kind)]:
        raise PeerError(f"rank {rank} disagrees with itself: {payload}")
