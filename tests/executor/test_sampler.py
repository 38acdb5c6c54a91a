"""The sampler's rules one by one, its order of rules, its log-probabilities, and rows that ignore their neighbours."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from dsparkd.errors import InvariantError
from dsparkd.executor.sampler import Choices, PromptRow, Sampler, SampleRow, most_values
from dsparkd.kernels import noise
from dsparkd.messages import MAX_TOP_LOGPROBS, SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=16, seed=1, temperature=0.0)
VOCAB = 203


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """Random logits of a peaked model."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def plain_sampler(vocab: int = VOCAB) -> Sampler:
    """A sampler whose every id is a token and whose EOS is id 1."""
    return Sampler([True] * vocab, (1,), CPU)


def sample(row: int, params: SamplingParams, output: tuple[int, ...] = (), position: int = 40) -> SampleRow:
    """A row with a fixed prompt."""
    return SampleRow(row, params, (5, 6, 7), output, position)


def choose_one(logits: list[float], params: SamplingParams, output: tuple[int, ...] = ()) -> int:
    """The id that one row of given logits yields."""
    sampler = plain_sampler(len(logits))
    return sampler.choose(torch.tensor([logits]), [sample(0, params, output)]).token_ids[0]


def changed(params: SamplingParams, **values: object) -> SamplingParams:
    """The parameters with some fields replaced."""
    return msgspec.structs.replace(params, **values)


MIXED = [
    GREEDY,
    SamplingParams(max_tokens=4, seed=7),
    SamplingParams(max_tokens=4, seed=2**62 + 3, choice=2, temperature=0.7, top_p=0.8),
    SamplingParams(max_tokens=4, seed=9, temperature=1.5, top_k=5, top_logprobs=3),
    SamplingParams(max_tokens=4, seed=9, temperature=1.2, min_p=0.05, repetition_penalty=1.3),
    SamplingParams(max_tokens=4, seed=3, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2, top_logprobs=0),
    SamplingParams(max_tokens=4, seed=3, top_k=50, top_p=0.9, min_p=0.01, logit_bias=((4, 5.0), (9, -7.0))),
    SamplingParams(max_tokens=4, seed=11, min_tokens=10, stop_ids=(3, 8), top_logprobs=20),
]


def test_a_row_gives_the_same_token_and_logprobs_alone_and_among_any_neighbours() -> None:
    """D-14 without masks: rules of one row, and the sub-batches that they form, move no bit of another row."""
    logits = logits_of(32)
    rows = [sample(i, MIXED[i % len(MIXED)], output=(5, 9, 9), position=40 + i) for i in range(32)]
    sampler = plain_sampler()

    together = sampler.choose(logits.clone(), rows)

    for i, row in enumerate(rows):
        alone = sampler.choose(logits[i : i + 1].clone(), [row._replace(logits_row=0)])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]
    reversed_rows = sampler.choose(logits.clone(), rows[::-1])
    assert reversed_rows.token_ids == together.token_ids[::-1]


def test_greedy_takes_the_lowest_id_among_equal_scores() -> None:
    """Ties are common in low precision; the rule must not depend on the vector width."""
    assert choose_one([1.0, 3.0, 3.0, 3.0], GREEDY) == 1


def test_a_drawn_token_is_the_argmax_of_scaled_scores_plus_noise() -> None:
    """The sampling contract itself, computed here in other words."""
    logits = logits_of(6)
    params = [SamplingParams(max_tokens=4, seed=100 + i, choice=i % 2, temperature=0.5 + i / 4) for i in range(6)]

    got = plain_sampler().choose(logits.clone(), [sample(i, p, position=9 + i) for i, p in enumerate(params)])

    for i, p in enumerate(params):
        own = noise.gumbel(torch.tensor([p.seed]), torch.tensor([p.choice]), torch.tensor([9 + i]), VOCAB)[0]
        scores = torch.log_softmax(logits[i].double() / p.temperature, dim=-1) + own
        assert got.token_ids[i] == int(scores.argmax())


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_each_part_of_the_noise_key_changes_the_draw(field: str) -> None:
    """n choices of one prompt differ by the choice index alone, and neighbouring positions must not repeat a draw."""
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(max_tokens=4, seed=1)
    draws = set()
    for value in range(8):
        row = sample(0, params if field == "position" else changed(params, **{field: value}))
        row = row._replace(position=value) if field == "position" else row
        draws |= set(plain_sampler().choose(logits.clone(), [row]).token_ids)

    assert len(draws) > 4


def test_ids_without_a_token_are_never_sampled_nor_listed() -> None:
    """D-20: with the maximum in the padding, and in a hole of the vocabulary, the best real token is taken."""
    logits = torch.zeros(3, 8)
    logits[:, 5], logits[:, 6], logits[:, 2] = 50.0, 60.0, 1.0
    logits[:, 3] = 40.0  # a hole
    sampler = Sampler([True, True, True, False, True, False, False, False], (1,), CPU)
    greedy = changed(GREEDY, top_logprobs=20)
    drawn = SamplingParams(max_tokens=4, seed=5, temperature=0.01, logit_bias=((6, 100.0),))

    got = sampler.choose(logits.clone(), [sample(0, greedy), sample(1, drawn), sample(2, changed(greedy, seed=2))])

    assert got.token_ids == (2, 2, 2)
    assert got.logprobs[0] is not None
    assert [i for i, _ in got.logprobs[0].top] == [2, 0, 1, 4]
    # The distribution is the model's own, padding included.
    assert got.logprobs[0].logprob == pytest.approx(1.0 - 60.0, abs=1e-3)


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores_of_prompt_and_output() -> None:
    """A penalty that divided a negative score would make a repetition likelier."""
    params = changed(GREEDY, repetition_penalty=2.0)

    assert choose_one([1.5, 0, 0, 0, 0, 2.0, 0, 0], params) == 0  # id 5 is in the prompt: 2.0 / 2
    assert choose_one([-1.5, -9, -9, -9, -9, -1.0, -9, -9], params) == 0  # -1.0 * 2
    assert choose_one([1.5, 2.0, 0, 0, 0, 0, 0, 0], params, output=(1,)) == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-5, 2.0])
def test_no_legal_parameter_makes_scores_leave_float32(temperature: float) -> None:
    """What a client may send must never look like a broken model, which would stop the pair."""
    for factor in (1e-300, 1e-45, 10.0):
        params = changed(GREEDY, temperature=temperature, repetition_penalty=factor, top_p=5e-324, min_p=5e-324)

        got = plain_sampler().choose(logits_of(1), [sample(0, params, output=(9,))])

        assert 0 <= got.token_ids[0] < VOCAB


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    """OpenAI's definition: presence once an emitted id, frequency once an occurrence, the prompt not at all."""
    assert choose_one([1.0, 0, 0, 0, 0, 1.5, 0, 0], changed(GREEDY, presence_penalty=2.0)) == 5
    assert choose_one([1.0, 1.5, 0], changed(GREEDY, presence_penalty=0.6), output=(1, 1, 1)) == 0
    assert choose_one([1.0, 1.5, 0], changed(GREEDY, presence_penalty=0.4), output=(1, 1, 1)) == 1
    assert choose_one([1.0, 1.5, 0], changed(GREEDY, frequency_penalty=0.2), output=(1, 1, 1)) == 0
    assert choose_one([1.0, 1.5, 0], changed(GREEDY, frequency_penalty=0.2), output=(1, 1)) == 1


def test_logit_bias_adds_to_its_ids() -> None:
    """A bias of 100 forces and of -100 forbids, at temperature 0 too."""
    assert choose_one([1.0, 2.0, 0.0], changed(GREEDY, logit_bias=((2, 100.0),))) == 2
    assert choose_one([1.0, 2.0, 0.0], changed(GREEDY, logit_bias=((1, -100.0),))) == 0


def test_min_tokens_holds_stop_ids_and_eos_back_until_enough_are_out() -> None:
    """D-26: the stop ids leave the row while output is short, and are back at the very token that completes it."""
    params = changed(GREEDY, min_tokens=2, stop_ids=(2,))
    scores = [0.5, 3.0, 2.0, 1.0]  # id 1 is EOS, id 2 a stop id

    assert choose_one(scores, params) == 3
    assert choose_one(scores, params, output=(0,)) == 3
    assert choose_one(scores, params, output=(0, 0)) == 1
    assert choose_one(scores, changed(params, ignore_eos=True)) == 1


def test_filters_act_after_temperature_and_in_order() -> None:
    """top_p before temperature, or on what top_k removed, keeps other ids."""
    logits = torch.tensor([[2.0, 1.9, 1.8, -1.0]])
    seen: dict[str, set[int]] = {"cold": set(), "k_then_p": set(), "p_only": set()}
    for seed in range(200):
        cold = SamplingParams(max_tokens=4, seed=seed, temperature=0.01, top_p=0.9)
        k_then_p = SamplingParams(max_tokens=4, seed=seed, temperature=1.0, top_k=2, top_p=0.5)
        p_only = SamplingParams(max_tokens=4, seed=seed, temperature=1.0, top_p=0.5)
        for name, params in {"cold": cold, "k_then_p": k_then_p, "p_only": p_only}.items():
            seen[name] |= set(plain_sampler(4).choose(logits.clone(), [sample(0, params)]).token_ids)

    # At temperature 0.01 id 0 alone holds nine tenths; of two ids left by top_k the first holds half; of all four no.
    assert seen == {"cold": {0}, "k_then_p": {0}, "p_only": {0, 1}}


def test_logprobs_are_the_models_own_whatever_the_rules_do() -> None:
    """Decision 7: before temperature, filters, bias and penalties, for the chosen id and its alternatives."""
    logits = logits_of(2)
    params = SamplingParams(
        max_tokens=4, seed=5, temperature=0.3, top_k=2, logit_bias=((17, 100.0),), top_logprobs=4, presence_penalty=1.0
    )

    got = plain_sampler().choose(logits.clone(), [sample(0, params, output=(3,)), sample(1, changed(params, seed=6))])

    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, entry in enumerate(got.logprobs):
        assert entry is not None
        assert entry.token_id == 17 == got.token_ids[row]
        assert entry.logprob == pytest.approx(float(expected[row, 17]), abs=1e-5)
        values, ids = expected[row].topk(4)
        assert [i for i, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_alternatives_of_equal_probability_are_listed_by_id() -> None:
    """Top-k everywhere is stable: a list that changed between runs would break a client's diff."""
    got = plain_sampler(50).choose(torch.zeros(1, 50), [sample(0, changed(GREEDY, top_logprobs=20))])

    assert got.logprobs[0] is not None
    assert [i for i, _ in got.logprobs[0].top] == list(range(20))


def test_rows_without_logprobs_get_none_and_zero_gets_no_alternatives() -> None:
    """top_logprobs None and 0 are different wishes."""
    rows = [sample(0, GREEDY), sample(1, changed(GREEDY, top_logprobs=0)), sample(2, changed(GREEDY, top_logprobs=2))]

    got = plain_sampler().choose(logits_of(3), rows)

    assert got.logprobs[0] is None
    assert [None if entry is None else len(entry.top) for entry in got.logprobs] == [None, 0, 2]


def test_prompt_logprobs_cover_each_next_id_beside_sampled_rows_of_the_same_step() -> None:
    """D-27: prompt tokens of one row and choices of others come out of the same step, each from its own logits."""
    logits = logits_of(300 + 4)
    next_ids = tuple(i % VOCAB for i in range(300))  # more than one block of rows
    rows = [sample(303, changed(GREEDY, top_logprobs=1)), sample(0, GREEDY)]

    got = plain_sampler().choose(logits.clone(), rows, [PromptRow(1, next_ids, 2), PromptRow(301, (9,), 0)])

    expected = torch.log_softmax(logits.double(), dim=-1)
    assert got.token_ids == (int(logits[303].argmax()), int(logits[0].argmax()))
    assert got.logprobs[0] is not None
    assert got.logprobs[0].logprob == pytest.approx(float(expected[303].max()), abs=1e-5)
    first, second = got.prompt_logprobs
    assert [entry.token_id for entry in first] == list(next_ids)
    assert [entry.logprob for entry in first] == pytest.approx(
        [float(expected[1 + i, token_id]) for i, token_id in enumerate(next_ids)], abs=1e-5
    )
    assert [i for i, _ in first[299].top] == expected[300].topk(2).indices.tolist()
    assert [entry.logprob for entry in second] == pytest.approx([float(expected[301, 9])], abs=1e-5)
    assert second[0].top == ()


def test_a_chunk_that_samples_nothing_still_reads_its_prompt() -> None:
    """A prompt of several chunks has log-probabilities in each, a choice only in the last."""
    got = plain_sampler().choose(logits_of(2), [], [PromptRow(0, (3, 4), 1)])

    assert got.token_ids == ()
    assert [entry.token_id for entry in got.prompt_logprobs[0]] == [3, 4]


def test_d04_no_step_gives_more_values_than_memory_is_held_for() -> None:
    """D-04: every sample and prompt token with as many alternatives as a client may ask for, neither more nor fewer."""
    rows = [sample(place, changed(GREEDY, top_logprobs=MAX_TOP_LOGPROBS)) for place in range(3)]
    drawn = plain_sampler().draw(logits_of(5), rows, [PromptRow(3, (4, 5), MAX_TOP_LOGPROBS)])
    assert drawn.values.numel() == most_values(3, 2)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=4, seed=1), MIXED[6]])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_invariant_error(params: SamplingParams, poison: float) -> None:
    """A token chosen from NaN would be a silent wrong token; a wrong model must stop, visibly."""
    logits = logits_of(2)
    logits[1, 77] = poison

    with pytest.raises(InvariantError, match="1 rows"):
        plain_sampler().choose(logits, [sample(0, params), sample(1, params)])


def test_no_rows_choose_nothing() -> None:
    """An idle rank takes part in a step without a row."""
    assert plain_sampler().choose(torch.empty(0, VOCAB), []) == Choices((), (), ())


def test_a_row_that_is_not_a_number_is_seen_whoever_chooses() -> None:
    """A broken model must stop the pair under acceptance by rejection, too."""
    for params in (GREEDY, SamplingParams(max_tokens=4, seed=1)):
        logits = logits_of(2)
        logits[1, 7] = math.nan

        with pytest.raises(InvariantError, match="finite"):
            plain_sampler().choose(
                logits, [sample(0, params), sample(1, params)], pick=lambda probs: probs.argmax(dim=-1)
            )


def test_distributions_are_what_is_drawn_from() -> None:
    """One-hot at the winner of a greedy row, the filtered softmax of the others."""
    logits = logits_of(2)
    params = SamplingParams(max_tokens=4, seed=1, temperature=0.5, top_k=3)

    probs = plain_sampler().distributions(logits.clone(), [sample(0, GREEDY), sample(1, params)])

    assert probs[0].nonzero().flatten().tolist() == [int(logits[0].argmax())]
    best = logits[1].topk(3).indices
    assert torch.allclose(probs[1][best], (logits[1][best] / 0.5).softmax(-1))
    assert float(probs[1].sum()) == pytest.approx(1.0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_d21_no_rule_of_sampling_waits_for_the_device() -> None:
    """D-21, U-08: every rule, masks and log-probabilities under torch's detector; greedy ids are the cpu's."""
    device = torch.device("cuda", 0)
    rows = [sample(i, MIXED[i % len(MIXED)], output=(9, 9, 30), position=40 + i) for i in range(16)]
    rows[3] = rows[3]._replace(mask_row=1)
    rows[4] = rows[4]._replace(mask_row=0, keeps_on=True)
    prompts = [PromptRow(0, (4, 5, 6), 2)]
    words = torch.full((2, -(-VOCAB // 32)), -2, dtype=torch.int32)
    on_host = plain_sampler().choose(logits_of(18), rows, prompts, words)
    own = Sampler([True] * VOCAB, (1,), device)
    logits, words = logits_of(18).to(device), words.to(device)
    own.choose(logits.clone(), rows, prompts, words)
    copies = logits.clone(), logits.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = own.draw(copies[0], rows, prompts, words)
        own.distributions(copies[1][:16], rows, words)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    choices = drawn.read(drawn.values.tolist())
    greedy = [i for i, one in enumerate(rows) if one.sampling.temperature == 0]
    assert [choices.token_ids[i] for i in greedy] == [on_host.token_ids[i] for i in greedy]
    assert len(choices.prompt_logprobs[0]) == 3


@pytest.mark.parametrize("last", [5, 9, 44, 1, 8])
def test_an_id_that_only_the_device_knows_counts_like_any_other(last: int) -> None:
    """Path invariance: seen in the prompt (5), in the output (9), nowhere (44), an end (1, 8): the same bits.

    Rows that follow an id stand beside rows that do not, and rows without an output yet.
    """
    extra = [
        SamplingParams(max_tokens=4, seed=5, frequency_penalty=0.37),
        SamplingParams(max_tokens=4, seed=5, presence_penalty=-0.9, repetition_penalty=0.7, top_logprobs=1),
        SamplingParams(max_tokens=4, seed=5, min_tokens=3, presence_penalty=0.3, frequency_penalty=-1.1),
        SamplingParams(max_tokens=4, seed=5, min_tokens=4, stop_ids=(8,), logit_bias=((8, 90.0),)),
    ]
    params = (MIXED + extra) * 3
    logits = logits_of(len(params))
    outputs = [(5, 9, 9), (44, 9), ()]
    known, unknown = [], []
    for i, each in enumerate(params):
        output = outputs[i % 3]
        known.append(sample(i, each, (*output, last), position=40 + i))
        unknown.append(sample(i, each, output, position=40 + i)._replace(follows=len(params) - 1 - i))
        if i % 5 == 4:
            unknown[-1] = known[-1]
    before = torch.full((len(params),), last)
    sampler = plain_sampler()
    edited, followed = logits.clone(), logits.clone()

    expected = sampler.draw(edited, known)
    got = sampler.draw(followed, unknown, before=before)

    assert torch.equal(followed, edited)
    assert torch.equal(got.values, expected.values)
    assert torch.equal(got.ids, expected.ids)


def test_each_row_follows_its_own_id() -> None:
    """Rows leave and change places between two steps: the id is found by its row in the step before."""
    penalty = SamplingParams(max_tokens=4, seed=1, temperature=0.0, repetition_penalty=5.0, frequency_penalty=0.5)
    logits = logits_of(3).abs()
    rows = [sample(i, penalty, (3,))._replace(follows=follows) for i, follows in enumerate((2, 0, 4))]
    edited = logits.clone()
    plain_sampler().draw(edited, [sample(i, penalty, (3, last)) for i, last in enumerate((30, 10, 50))])

    plain_sampler().draw(logits, rows, before=torch.tensor([10, 20, 30, 40, 50]))

    assert torch.equal(logits, edited)


def test_rows_that_follow_nothing_are_a_mistake() -> None:
    """The ids that rows follow are those of the step before; without them nothing is drawn."""
    row = sample(0, changed(GREEDY, frequency_penalty=0.5))._replace(follows=0)
    with pytest.raises(InvariantError, match="no ids"):
        plain_sampler().draw(logits_of(1), [row])


def test_a_place_that_comes_twice_comes_with_one_number() -> None:
    """Which of two writes to one place wins is nobody's business on a device, so both must say the same."""
    penalty = SamplingParams(max_tokens=4, seed=1, frequency_penalty=0.5, presence_penalty=0.1)
    rows = [(i, sample(i, penalty, (3, 9, 9))._replace(follows=i)) for i in range(3)]

    index, penalties = plain_sampler()._count_behind(rows, torch.tensor([9, 3, 50]), VOCAB)

    pairs = set(zip(index.tolist(), penalties.tolist(), strict=True))
    assert len(pairs) == len(set(index.tolist())) == 7
    assert dict(pairs)[9] == torch.tensor(3 * 0.5 + 0.1).item()
