"""Two votes make one decision, the same for both ranks, whoever computes it."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dsparkd.errors import PeerError
from dsparkd.executor.plan import StepKind
from dsparkd.scheduler.agreement import (
    IDLE_VOTE,
    Agreement,
    Drafting,
    Intent,
    Payload,
    PlanExtra,
    PlanVote,
    agree_tier,
    combine,
    exchanges_tier,
    vote,
)

COUNTS = (0, 1, 5)
WORKLOADS = [(chunk, rows) for chunk in (0, 7, 300) for rows in COUNTS]


def payload(chunk: int = 0, rows: int = 0, *, tick: int = 1, intent: Intent = Intent.NONE, **changes: int) -> Payload:
    own = vote(num_chunk_tokens=chunk, num_chunk_logit_rows=min(chunk, 1), num_decode_rows=rows)
    return Payload(own._replace(**changes), PlanExtra(tick=tick, num_decode_rows=rows), intent)


def agree(rank0: Payload, rank1: Payload, streak: int = 0) -> Agreement:
    return combine(rank0, rank1, prefill_streak=streak, max_prefill_streak=4)


def test_both_ranks_compute_the_same_from_the_same_fourteen_numbers() -> None:
    """X-10: over all votes, kinds, counts, intents and streaks f(a, b) mirrors f(b, a): one result for both."""
    votes = list(itertools.product((0, 1), repeat=3))
    intents = [Intent.NONE, Intent.STOP, Intent.MAY_PARK, Intent.STOP | Intent.MAY_PARK]
    cases = [
        payload(chunk, rows, intent=intent, decode_graph_ok=graph, tbo_ok=tbo, prefill_graph_ok=prefill)
        for chunk, rows in WORKLOADS
        for graph, tbo, prefill in votes
        for intent in intents
    ]
    pairs = itertools.product(cases[::1], cases[::3])
    count = 0
    for number, (rank0, rank1) in enumerate(pairs):
        streak = number % 6
        seen, mirrored = agree(rank0, rank1, streak), agree(rank1, rank0, streak)
        assert seen.num_tokens == mirrored.num_tokens[::-1]
        assert seen.num_logit_rows == mirrored.num_logit_rows[::-1]
        assert seen._replace(num_tokens=(0, 0), num_logit_rows=(0, 0)) == mirrored._replace(
            num_tokens=(0, 0), num_logit_rows=(0, 0)
        )
        assert seen.decode_graph == (rank0.vote.decode_graph_ok and rank1.vote.decode_graph_ok)
        assert seen.tbo == (rank0.vote.tbo_ok and rank1.vote.tbo_ok)
        assert seen.prefill_graph == (rank0.vote.prefill_graph_ok and rank1.vote.prefill_graph_ok)
        count += 1
    assert count > 20_000


@pytest.mark.parametrize(("work0", "work1"), list(itertools.product(WORKLOADS, repeat=2)))
def test_decode_rows_join_whatever_is_agreed(work0: tuple[int, int], work1: tuple[int, int]) -> None:
    """X-11 as amended: prefill if anybody extends, mixed if there are decode rows too; only the workless idle."""
    got = agree(payload(*work0), payload(*work1))

    extends, decodes = work0[0] or work1[0], work0[1] or work1[1]
    expected = (
        (StepKind.MIXED if decodes else StepKind.PREFILL) if extends else StepKind.DECODE if decodes else StepKind.IDLE
    )
    assert got.kind is expected
    assert got.num_tokens == (sum(work0), sum(work1))
    for work, tokens, logits in zip((work0, work1), got.num_tokens, got.num_logit_rows, strict=True):
        assert (tokens == 0) == (work == (0, 0))
        assert logits == min(work[0], 1) + work[1]


def test_idle_is_zero_work_and_votes_permissively() -> None:
    """X-12, B-1: no batch, an empty one and one aborted to nothing give the same bytes, and veto nothing."""
    assert vote(num_chunk_tokens=0, num_chunk_logit_rows=0, num_decode_rows=0) == IDLE_VOTE
    assert tuple(IDLE_VOTE) == (0, 0, 1, 0, 1, 0, 1)

    busy = payload(64, 0, tbo_ok=1, prefill_graph_ok=1)
    for pair in ((busy, payload()), (payload(), busy)):
        assert agree(*pair).tbo
        assert agree(*pair).prefill_graph


@pytest.mark.parametrize(
    ("chunk", "rows", "expected"),
    [
        (300, 0, (300, 1, 0, 1, 0, StepKind.PREFILL, 0)),
        (300, 4, (304, 5, 0, 1, 0, StepKind.MIXED, 0)),
        (0, 4, (4, 4, 0, 0, 0, StepKind.DECODE, 0)),
    ],
)
def test_the_fields_are_those_of_the_table(chunk: int, rows: int, expected: tuple[int, ...]) -> None:
    """X-10: contracts 4.2, without captured graphs."""
    assert tuple(payload(chunk, rows).vote) == expected


@pytest.mark.parametrize("draft_graphs", [(0, 1), (1, 1)])
@pytest.mark.parametrize("prefixes", [(7, 0), (0, 7), (7, 7)])
def test_extra_words_are_combined_as_the_table_says(prefixes: tuple[int, int], draft_graphs: tuple[int, int]) -> None:
    """X-10: contracts 4.2: the longest prefix of both, and a draft graph only where both have one, on either rank."""
    both = [
        payload(300)._replace(extra=PlanExtra(longest_prefix=longest, draft_graph_ok=graph, tick=1))
        for longest, graph in zip(prefixes, draft_graphs, strict=True)
    ]
    for got in (agree(*both), agree(*both[::-1])):
        assert (got.longest_prefix, got.draft_graph) == (7, all(draft_graphs))


@pytest.mark.parametrize("chunk", [0, 300])
def test_decode_graphs_are_voted_for_where_they_are_on(chunk: int) -> None:
    """X-10: field 2, also of a rank that proposes chunks, for a decode step may be agreed in spite of them (X-14)."""
    own = vote(num_chunk_tokens=chunk, num_chunk_logit_rows=0, num_decode_rows=3, decode_graphs=True)
    assert own.decode_graph_ok == 1


def test_a_decode_tick_follows_a_full_streak_of_prefills() -> None:
    """X-14: the rank that only prefills sits that tick out; its tokens do not count."""
    prefill, stream = payload(300, 0), payload(0, 2)
    streak, kinds = 0, []
    for _ in range(10):
        got = agree(prefill, stream, streak)
        kinds.append(got.kind)
        streak = got.prefill_streak
        assert got.num_tokens == ((300, 2) if got.kind is StepKind.MIXED else (0, 2))
    assert kinds == ([StepKind.MIXED] * 4 + [StepKind.DECODE]) * 2


def test_a_streak_without_decode_rows_never_ends() -> None:
    """X-14: with no stream to protect, a decode tick would run nothing."""
    streak = 0
    for _ in range(10):
        got = agree(payload(300), payload(300), streak)
        streak = got.prefill_streak
        assert got.kind is StepKind.PREFILL
        assert streak == 0


def test_streams_that_end_during_a_streak_leave_prefill_alone() -> None:
    """X-14: the turn is given only to decode rows that exist now."""
    assert agree(payload(300), payload(), streak=4).kind is StepKind.PREFILL


def test_different_ticks_fail_the_pair() -> None:
    """X-26: one rank missed a tick, so nothing that they would do together fits."""
    with pytest.raises(PeerError, match="ticks differ: 4, 5"):
        agree(payload(tick=4), payload(tick=5))


@pytest.mark.parametrize("stop0", [False, True])
@pytest.mark.parametrize("stop1", [False, True])
def test_stop_is_agreed_if_either_wants_it(stop0: bool, stop1: bool) -> None:
    """X-27: both leave after the exchange in which either had it set."""
    intents = [Intent.STOP if stop else Intent.NONE for stop in (stop0, stop1)]
    got = agree(payload(5, intent=intents[0]), payload(intent=intents[1]))
    assert got.stop == (stop0 or stop1)


@pytest.mark.parametrize("park0", [False, True])
@pytest.mark.parametrize("park1", [False, True])
def test_park_is_agreed_only_by_both(park0: bool, park1: bool) -> None:
    """X-28: a rank that still has something to poll keeps the pair awake."""
    intents = [Intent.MAY_PARK if park else Intent.NONE for park in (park0, park1)]
    assert agree(payload(intent=intents[0]), payload(intent=intents[1])).park == (park0 and park1)


def test_work_is_never_parked() -> None:
    """X-28: even if both ranks said that they may."""
    got = agree(payload(0, 1, intent=Intent.MAY_PARK), payload(intent=Intent.MAY_PARK))
    assert not got.park


@given(
    st.tuples(*[st.integers(-1, 3) for _ in range(7)]),
    st.integers(0, 3),
)
def test_a_vote_that_contradicts_itself_is_refused(fields: tuple[int, ...], rows: int) -> None:
    """X-10: DISAGREE: a kind that its own counts do not make would send the ranks into different collectives."""
    odd = Payload(PlanVote(*fields), PlanExtra(tick=1, num_decode_rows=rows), Intent.NONE)
    tokens, _, _, extends, _, kind, _ = fields
    truth = (
        (StepKind.MIXED if rows else StepKind.PREFILL)
        if extends == 1 and tokens > rows
        else StepKind.DECODE
        if extends == 0 and tokens == rows > 0
        else StepKind.IDLE
        if extends == 0 and tokens == rows == 0
        else None
    )
    if kind == truth:
        agree(odd, payload())
    else:
        with pytest.raises(PeerError, match="rank 0"):
            agree(odd, payload())


@pytest.mark.parametrize("compact", [False, True])
def test_the_tier_channel_is_a_function_of_agreed_values(compact: bool) -> None:
    """X-13: both ranks exchange the tier in a tick or neither does; never without compact verify."""
    for work0, work1 in itertools.product(WORKLOADS, repeat=2):
        got = agree(payload(*work0), payload(*work1))
        mirrored = agree(payload(*work1), payload(*work0))
        used = exchanges_tier(got, compact_verify=compact)
        assert used == exchanges_tier(mirrored, compact_verify=compact)
        assert not used, "nobody leaves some drafts out"
        for wants in itertools.product(Drafting, repeat=2):
            both = [
                each._replace(extra=each.extra._replace(drafting=want))
                for each, want in zip((payload(*work0), payload(*work1)), wants, strict=True)
            ]
            got = agree(*both)
            assert exchanges_tier(got, compact_verify=compact) == exchanges_tier(
                agree(*both[::-1]), compact_verify=compact
            )
            heard = {want for want, (_, rows) in zip(wants, (work0, work1), strict=True) if rows}
            is_needed = len(heard) == 2 or heard == {Drafting.SOME}
            assert exchanges_tier(got, compact_verify=compact) == (
                compact and got.kind is StepKind.DECODE and is_needed
            )
            assert got.drafting == (Drafting.SOME if is_needed else max(heard, default=Drafting.NONE))


@pytest.mark.parametrize("wrong", [{"drafting": 3}, {"drafting": -1}, {"step_ns": -1}])
def test_a_vote_on_drafts_that_is_none_fails_the_pair(wrong: dict[str, int]) -> None:
    """Both ranks would make other layouts of it."""
    odd = payload(*WORKLOADS[0])
    odd = odd._replace(extra=odd.extra._replace(**wrong))
    with pytest.raises(PeerError, match="rank 1"):
        agree(payload(*WORKLOADS[0]), odd)


def test_a_step_took_what_it_took_for_the_slower_rank() -> None:
    """Ranks that learn of different times would plan differently."""
    both = [
        each._replace(extra=each.extra._replace(step_ns=taken))
        for each, taken in zip((payload(*WORKLOADS[0]), payload(*WORKLOADS[0])), (7, 9), strict=True)
    ]
    assert agree(*both).step_ns == agree(*both[::-1]).step_ns == 9


TIERS = (8, 32, 64)


@pytest.mark.parametrize(
    ("wanted", "tier"),
    [
        ((-1, -1), 64),
        ((-1, 0), 64),
        ((-1, 9), 64),
        ((0, 0), 0),
        ((0, 1), 8),
        ((0, 8), 8),
        ((5, 9), 32),
        ((32, 33), 64),
        ((64, 64), 64),
    ],
)
def test_the_tier_is_the_larger_wish_rounded_up(wanted: tuple[int, int], tier: int) -> None:
    """X-25: unknown means the largest; nobody's wish means none; both ranks round the same number the same way."""
    assert agree_tier(wanted, TIERS) == agree_tier(wanted[::-1], TIERS) == tier


@given(
    st.tuples(st.integers(-1, 200), st.integers(-1, 200)),
    st.lists(st.integers(1, 200), min_size=1, max_size=6, unique=True).map(sorted),
)
def test_a_tier_holds_both_wishes_and_is_captured(wanted: tuple[int, int], tiers: list[int]) -> None:
    """X-25: whatever is captured: the least tier that holds both, the same for both, or a failure of the pair."""
    if -1 not in wanted and max(wanted) > tiers[-1]:
        with pytest.raises(PeerError, match="want tiers"):
            agree_tier(wanted, tiers)
        return
    got = agree_tier(wanted, tiers)
    assert got == agree_tier(wanted[::-1], tiers)
    if -1 in wanted:
        assert got == tiers[-1]
    elif wanted == (0, 0):
        assert got == 0
    else:
        assert got in tiers
        assert got >= max(wanted)
        assert all(tier < max(wanted) for tier in tiers if tier < got)


@given(
    st.lists(
        st.tuples(
            st.tuples(st.sampled_from(WORKLOADS), st.sampled_from(WORKLOADS)),
            st.tuples(st.integers(0, 3), st.integers(0, 3)),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 5),
)
def test_any_history_of_votes_keeps_two_ranks_in_step(
    history: list[tuple[tuple[tuple[int, int], tuple[int, int]], tuple[int, int]]], longest: int
) -> None:
    """X-10, X-13, X-14, X-27, X-28: each rank combines for itself, from its own streak; they never differ.

    No stream waits through more than `longest` prefills, stop needs one of them, park both and no work.
    """
    streaks = [0, 0]
    waited = 0
    for tick, (works, intents) in enumerate(history, 1):
        both = [payload(*work, tick=tick, intent=Intent(intent)) for work, intent in zip(works, intents, strict=True)]
        made = [combine(*both, prefill_streak=streak, max_prefill_streak=longest) for streak in streaks]
        assert made[0] == made[1]
        got = made[0]
        streaks = [each.prefill_streak for each in made]
        decodes = any(rows for _, rows in works)
        waited = waited + 1 if decodes and got.kind is StepKind.MIXED else 0
        assert waited <= longest
        assert got.stop == any(Intent.STOP in Intent(intent) for intent in intents)
        if got.park:
            assert got.kind is StepKind.IDLE
            assert all(Intent.MAY_PARK in Intent(intent) for intent in intents)
        assert not exchanges_tier(got, compact_verify=True)
