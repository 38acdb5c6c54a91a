"""Both acceptance rules: their distributions, one by one what bounds them, and rows that ignore their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsparkd.executor import accept
from dsparkd.executor.accept import NO_TOKEN, Block, NoiseKeys, accept_coupled, accept_rejection, one_hot
from dsparkd.kernels import noise
from tools.acceptance_draws import CASES, DRAWS, RULES, Case, Rule, play

CASE = {case.name: case for case in CASES}
LEAST_P = 1e-3  # of 26 tests with fixed seeds; a wrong rule gives 1e-10 and less
MUTANT_P = 1e-6


def block_of(drafts: list[list[int]], verify_lens: list[int], usable_rows: list[int]) -> Block:
    """A block from plain lists."""
    return Block(torch.tensor(drafts), torch.tensor(verify_lens), torch.tensor(usable_rows))


def keys_of(count: int) -> NoiseKeys:
    """Keys that differ in every part."""
    numbers = torch.arange(count)
    return NoiseKeys(100 + numbers, numbers % 3, 17 * numbers)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_emitted_has_the_targets_distribution(
    case: Case, rule: Rule, record_property: Callable[[str, object], None]
) -> None:
    """Lossless: over many rounds every place, given what stands before it, is distributed as in plain decoding."""
    # The sampler's own rows are made one by one, so the coupled rule plays fewer here and all of them in the gate.
    result = play(case, rule, DRAWS if rule == "rejection" else DRAWS // 5)

    record_property("p_value", result.p_value)
    assert result.impossible == 0
    assert result.p_value > LEAST_P


def is_exposed(case: str, rule: Rule, draws: int = 10_000) -> bool:
    """Whether the test above would fail now."""
    result = play(CASE[case], rule, draws)
    return result.impossible > 0 or result.p_value < MUTANT_P


def test_a_replacement_from_the_whole_distribution_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest wrong form of rejection: the refused draft's share is given out twice."""
    monkeypatch.setattr(
        accept, "_weights", lambda ids, draft, target, lens, judged: target[torch.arange(len(lens)), lens]
    )

    assert is_exposed("plain", "rejection")


def test_a_residual_behind_a_cut_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that the target never saw was not refused."""
    weights = accept._weights

    def always_rest(ids: Tensor, draft_probs: Tensor, target_probs: Tensor, lens: Tensor, is_judged: Tensor) -> Tensor:
        return weights(ids, draft_probs, target_probs, lens, is_judged | (lens < draft_probs.shape[1]))

    monkeypatch.setattr(accept, "_weights", always_rest)

    assert is_exposed("plain", "rejection")


def test_a_fresh_draw_where_the_grammar_ends_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is readable behind a draft that ends the grammar: drawn anew instead of judged, it would count twice."""
    judge = accept.accept_rejection

    def cut(block: Block, draft_probs: Tensor, target_probs: Tensor, keys: NoiseKeys) -> accept.Accepted:
        return judge(Block(block.draft_ids, block.limits, block.usable_rows), draft_probs, target_probs, keys)

    monkeypatch.setattr(accept, "accept_rejection", cut)

    assert is_exposed("mask", "rejection")


def test_a_replacement_drawn_with_the_drafts_noise_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given that a draft was drawn and refused, its noise is no longer random; the bias is small, so draws are many."""
    monkeypatch.setattr(noise, "REPLACEMENT", noise.DRAFTS)

    assert is_exposed("plain", "rejection", 4 * DRAWS)


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_are_always_taken_are_exposed(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a drafter believes is not what the target does."""
    monkeypatch.setattr(accept, "_leading", lambda good, limits: limits)

    assert is_exposed("plain", rule)


@pytest.mark.parametrize(("case", "rule"), [("plain", "coupled"), ("plain", "rejection")])
def test_drafts_taken_unseen_are_exposed(case: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind verify_lens both sides hold padding, which may agree."""
    monkeypatch.setattr(Block, "limits", property(lambda block: block.usable_rows - 1))

    assert is_exposed(case, rule)


@pytest.mark.parametrize("rule", RULES)
def test_rows_without_a_mask_are_exposed_when_used(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 1: a row whose mask came late allows everything, so it may not choose anything."""
    monkeypatch.setattr(Block, "limits", property(lambda block: block.verify_lens))

    if rule == "coupled":
        assert is_exposed("mask", rule)
    else:
        block = block_of([[4, 5]], [2], [1])
        got = accept_rejection(block, one_hot(block.draft_ids, 8), one_hot(torch.tensor([[4, 5, 6]]), 8), keys_of(1))
        assert int(got.lens) > 0  # it reads the late row


@pytest.mark.parametrize(
    ("verify_len", "usable", "accepted"),
    [(0, 4, 0), (1, 4, 1), (2, 4, 2), (3, 4, 2), (2, 1, 0), (3, 2, 1), (3, 3, 2), (0, 1, 0), (3, 0, 0)],
)
def test_coupled_stops_at_the_first_of_mismatch_cut_and_unusable_row(
    verify_len: int, usable: int, accepted: int
) -> None:
    """Each of the three bounds alone, and what lies behind stays unread."""
    got = accept_coupled(block_of([[5, 6, 7]], [verify_len], [usable]), torch.tensor([[5, 6, 9, 1]]))

    assert int(got.lens) == accepted
    expected = [[5], [5, 6], [5, 6, 9]][accepted]
    assert got.ids.tolist() == [expected + [NO_TOKEN] * (4 - len(expected))]


def test_rejection_of_greedy_requests_is_the_coupled_rule() -> None:
    """With both distributions on one id each, chance has no say."""
    generator = torch.Generator().manual_seed(1)
    drafts, targets = (torch.randint(0, 3, (64, width), generator=generator) for width in (3, 4))
    block = Block(drafts, torch.arange(64) % 4, torch.full((64,), 4))

    got = accept_rejection(block, one_hot(drafts, 3), one_hot(targets, 3), keys_of(64))

    wanted = accept_coupled(block, targets)
    assert torch.equal(got.lens, wanted.lens)
    assert torch.equal(got.ids, wanted.ids)


def test_a_draft_on_the_last_usable_row_is_kept_when_it_passes_and_replaced_when_not() -> None:
    """Behind an end there is no row for another token: the draft itself is the last one."""
    block = block_of([[4, 1, 6], [4, 2, 6]], [3, 3], [2, 2])
    target = one_hot(torch.tensor([[4, 1, 0, 0], [4, 3, 0, 0]]), 8)

    got = accept_rejection(block, one_hot(block.draft_ids, 8), target, keys_of(2))

    assert got.lens.tolist() == [1, 1]
    assert got.ids.tolist() == [[4, 1, NO_TOKEN, NO_TOKEN], [4, 3, NO_TOKEN, NO_TOKEN]]


def test_equal_distributions_accept_every_draft_and_zero_residuals_fall_back() -> None:
    """min(1, p / q) is 1 then; where rounding leaves no residual, p without the refused draft is drawn from."""
    probs = torch.rand(50, 4, 16, generator=torch.Generator().manual_seed(2)).softmax(-1)
    drafts = torch.randint(0, 16, (50, 3), generator=torch.Generator().manual_seed(3))
    block = Block(drafts, torch.full((50,), 3), torch.full((50,), 4))

    assert accept_rejection(block, probs[:, :3], probs, keys_of(50)).lens.tolist() == [3] * 50
    rows, judged = torch.zeros(50, dtype=torch.int64), torch.ones(50, dtype=torch.bool)
    weights = accept._weights(drafts, probs[:, :3], probs, rows, judged)
    assert torch.equal(weights, probs[:, 0].scatter(1, drafts[:, :1], 0.0))


def test_a_block_without_drafts_yields_one_token() -> None:
    """Width 1 is plain decoding."""
    none = Block(torch.empty((3, 0), dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.ones(3).long())
    ids = torch.tensor([[4], [5], [6]])

    assert accept_coupled(none, ids).ids.tolist() == ids.tolist()
    assert accept_rejection(none, torch.empty(3, 0, 8), one_hot(ids, 8), keys_of(3)).ids.tolist() == ids.tolist()


def test_a_block_gives_the_same_bits_alone_and_among_any_neighbours() -> None:
    """Path invariance of the seeded rule: what others draft, and how many they are, moves nothing."""
    generator = torch.Generator().manual_seed(4)
    count, width, vocab = 40, 3, 131
    drafts = torch.randint(0, vocab, (count, width), generator=generator)
    draft_probs = torch.randn(count, width, vocab, generator=generator).mul(3).softmax(-1)
    target_probs = (draft_probs.log().repeat(1, 2, 1)[:, : width + 1] + torch.randn(count, width + 1, vocab)).softmax(
        -1
    )
    block = Block(drafts, torch.arange(count) % 4, 1 + torch.arange(count) % 5 % 4)
    keys = keys_of(count)

    together = accept_rejection(block, draft_probs, target_probs, keys)

    for part in [[i] for i in range(count)] + [list(range(5, 12)), list(range(count))[::-1]]:
        some = Block(drafts[part], block.verify_lens[part], block.usable_rows[part])
        some_keys = NoiseKeys(keys.seeds[part], keys.choices[part], keys.positions[part])
        got = accept_rejection(some, draft_probs[part], target_probs[part], some_keys)
        assert torch.equal(got.lens, together.lens[part])
        assert torch.equal(got.ids, together.ids[part])


def test_an_accepted_run_never_leaves_its_bounds() -> None:
    """Lengths, padding and ids of random blocks: what a scheduler may rely on."""
    generator = torch.Generator().manual_seed(5)
    drafts, targets = (torch.randint(0, 2, (500, width), generator=generator) for width in (5, 6))
    block = Block(
        drafts, torch.randint(0, 6, (500,), generator=generator), torch.randint(0, 7, (500,), generator=generator)
    )
    probs = torch.full((500, 6, 2), 0.5)

    for got in (accept_coupled(block, targets), accept_rejection(block, probs[:, :5], probs, keys_of(500))):
        assert bool((got.lens >= 0).all())
        assert bool((got.lens <= block.verify_lens).all())
        assert bool((got.lens <= (block.usable_rows - 1).clamp(min=0)).all())
        filled = torch.arange(6) <= got.lens[:, None]
        assert torch.equal(got.ids != NO_TOKEN, filled)
        before = torch.arange(5) < got.lens[:, None]
        assert torch.equal(got.ids[:, :5][before], drafts[before])
