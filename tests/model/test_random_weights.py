"""Weights that mean nothing: of the loader's form, equal where they must be, and with numbers that behave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import Plan, PlanRow, SlotStart, StepKind
from dsparkd.executor.staging import Stager
from dsparkd.kernels.weight import Format, Weight, decode
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.checkpoint import Use, expected_tensors, placed_bytes
from dsparkd.model.config import ModelConfig, parse_model_config
from dsparkd.model.random_weights import RandomWeights
from dsparkd.model.weights import load_both_draft_shards, load_both_shards, load_drafter, load_transformer
from tests.model.values import flash_values, small_values

CPU = torch.device("cpu")
NOWHERE = Path("/nonexistent")
GIB = 1 << 30


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_model_config(small_values())


def source_of(config: ModelConfig, *ranks: int, part: Use = Use.TARGET, packed: bool = False) -> RandomWeights:
    source = RandomWeights(config, torch.bfloat16, CPU, ranks, part=part)
    source.keeps_packed = packed  # as on cuda
    return source


def read_all(source: RandomWeights, config: ModelConfig, part: Use, rank: int) -> dict[str, Tensor | Weight]:
    """Take every tensor of a rank as the layers do."""
    per_rank = config.n_routed_experts // 2
    exact = ("compressor.wkv", "wgate", "weights_proj", "gate", "head", "markov_w2")
    wide = ("norm", "markov_w1", "proj")
    taken: dict[str, Tensor | Weight] = {}
    for name, spec in expected_tensors(config).items():
        base = name.removesuffix(".weight")
        if (spec.use is Use.DRAFT) != (part is Use.DRAFT) or name.endswith(".scale"):
            continue
        if spec.expert is not None and spec.expert // per_rank != rank:
            continue
        if name.endswith("tid2eid"):
            taken[name] = source.integer(name)
        elif base == name or (base.endswith(wide) and not base.endswith(("weights_proj", "main_proj"))):
            taken[name] = source.float32(name)
        elif base.endswith(exact):
            taken[name] = source.exact(name)
        else:
            taken[name] = source.linear(base) if base == "embed" else source.weight(base)
    source.finish()
    return taken


def same(one: Tensor | Weight, other: Tensor | Weight) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    scales = (one.scales, other.scales)
    return torch.equal(one.values, other.values) and (
        scales == (None, None) or torch.equal(*(scale for scale in scales if scale is not None))
    )


@pytest.mark.parametrize("part", [Use.TARGET, Use.DRAFT])
@pytest.mark.parametrize("packed", [True, False])
def test_what_ranks_share_is_equal_and_their_experts_are_not(config: ModelConfig, part: Use, packed: bool) -> None:
    """Ranks with different norms, routers or embeddings would not be two ranks of one model."""
    both = [read_all(source_of(config, rank, part=part, packed=packed), config, part, rank) for rank in (0, 1)]
    shared = both[0].keys() & both[1].keys()
    assert shared
    assert all(same(both[0][name], both[1][name]) for name in shared)
    assert not any("experts" in name and "shared" not in name for name in shared)
    experts = [name for name in both[0].keys() - shared if name.endswith("experts.0.w1.weight")]
    assert experts
    for name in experts:
        other = name.replace("experts.0.", f"experts.{config.n_routed_experts // 2}.")
        assert not same(both[0][name], both[1][other])


@pytest.mark.parametrize("part", [Use.TARGET, Use.DRAFT])
@pytest.mark.parametrize("packed", [True, False])
def test_what_memory_was_foretold_is_what_is_taken(config: ModelConfig, part: Use, packed: bool) -> None:
    """A start is refused by these sums before anything is loaded: too low ones fail minutes later."""
    source = source_of(config, 0, part=part, packed=packed)
    read_all(source, config, part, 0)
    specs = expected_tensors(config)
    foretold = sum(
        placed_bytes(specs, name, "bfloat16", is_packed=packed)
        for name, spec in specs.items()
        if (spec.use is Use.DRAFT) == (part is Use.DRAFT) and (spec.expert is None or spec.expert < 4)
    )
    assert source.placed_bytes == foretold


def test_a_rank_of_the_released_geometry_takes_what_a_gpu_has() -> None:
    """78.6 GiB is what the same geometry takes a GPU elsewhere; a sum far from it would be one of something else."""
    specs = expected_tensors(parse_model_config(flash_values(dspark=True)))
    sizes = {Use.TARGET: 0, Use.EXPERT: 0, Use.DRAFT: 0}
    for name, spec in specs.items():
        size = placed_bytes(specs, name, "bfloat16", is_packed=True)
        sizes[spec.use] += size if spec.expert is None else size // 2
    assert (sizes[Use.TARGET] + sizes[Use.EXPERT]) / GIB == pytest.approx(77.0, abs=2)
    assert sizes[Use.DRAFT] / GIB == pytest.approx(5.5, abs=0.5)


def test_packed_weights_have_the_loaders_form(config: ModelConfig) -> None:
    """FP8 scales stand once a row, FP4 ones once a group; the values have the magnitudes that keep a layer's output."""
    source = source_of(config, 0, packed=True)
    fp8 = source.weight("layers.2.attn.wq_b")
    assert fp8.format is Format.FP8
    assert fp8.scales is not None
    assert fp8.scales.shape == (fp8.shape[0], -(-fp8.shape[1] // 128))
    assert float(decode(fp8, torch.float32).std()) == pytest.approx(0.02, rel=0.05)
    fp4 = source.weight("layers.2.ffn.experts.1.w1")
    assert fp4.format is Format.FP4
    assert fp4.shape == (64, 64)
    assert fp4.scales is not None
    assert fp4.scales.shape == (64, 2)
    assert set(fp4.values.unique().tolist()) == set(range(256))
    assert float(decode(fp4, torch.float32).std()) == pytest.approx(0.0229, rel=0.05)


def test_a_hash_table_names_no_expert_twice(config: ModelConfig) -> None:
    """The router's kernel and the model refuse such a row."""
    table = source_of(config, 0).integer("layers.0.ffn.gate.tid2eid").sort(1).values
    assert (table.diff(dim=1) > 0).all()
    assert table.unique().tolist() == list(range(config.n_routed_experts))


def test_a_tensor_is_made_once_and_none_is_forgotten(config: ModelConfig) -> None:
    """As for a checkpoint: a name that the model forgets would be another model."""
    source = source_of(config, 0)
    source.linear("embed")
    with pytest.raises(InvariantError, match=r"embed\.weight is made twice"):
        source.linear("embed")
    with pytest.raises(InvariantError, match="not made"):
        source.finish()
    with pytest.raises(InvariantError, match="not this rank's"):
        source.weight("layers.2.ffn.experts.5.w1")


def test_progress_ends_at_the_total(config: ModelConfig) -> None:
    """A start of minutes has to be seen moving."""
    seen: list[tuple[int, int]] = []
    model, _ = load_transformer(
        NOWHERE, config, torch.float32, CPU, 0, lambda done, total: seen.append((done, total)), "random"
    )
    load_drafter(NOWHERE, model, 0, lambda done, total: seen.append((done, total)), "random")
    ends = [done for done, total in seen if done == total]
    assert len(ends) == 2
    assert seen[-1][0] == seen[-1][1]


def wide_config() -> ModelConfig:
    """More experts and width than the small geometry, so that chances of a spread mean something."""
    values = small_values(vocab_size=512) | {
        "hidden_size": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
    }
    return parse_model_config(json.loads(json.dumps(values)))


def test_activations_stay_finite_and_tokens_go_to_different_experts() -> None:
    """Routers that send every token to the same few experts would make a step look cheaper than it is."""
    config = wide_config()
    model, exchange = load_both_shards(NOWHERE, config, torch.float32, CPU, "random")
    drafter, _ = load_both_draft_shards(NOWHERE, model, "random")
    assert len(drafter.stages) == 3
    geometry = config.kv_geometry(256, "float32", drafts=True)
    pool = KVPool(geometry, PoolSizes(3, 2, 1), torch.float32, CPU)
    ids = torch.randint(3, 512, (192,), generator=torch.Generator().manual_seed(1)).tolist()
    row = PlanRow("one", 1, tuple(ids), 0, (1,), 8, SamplingParams(max_tokens=1, seed=1), tuple(ids), ())
    inputs = Stager(geometry, config.index_topk, CPU).stage(Plan(StepKind.PREFILL, (row,), (SlotStart(1, None, 0),)))
    loads: list[Tensor] = []

    class Watch:
        """The exchange, and what passes it."""

        def begin_step(self, counts: tuple[int, int]) -> None:
            exchange.begin_step(counts)

        def room(self, width: int, device: torch.device) -> Tensor:
            return exchange.room(width, device)

        def crossing(self) -> None:
            return None

        def parting(self, width: int, device: torch.device) -> None:
            return None

        def gather(self, rows: Tensor) -> Tensor:
            chosen = rows[:, -config.num_experts_per_tok :].contiguous().view(torch.int32)
            loads.append(torch.bincount(chosen.flatten(), minlength=config.n_routed_experts))
            return exchange.gather(rows)

        def combine(self, partial: Tensor) -> Sequence[Tensor]:
            assert partial.isfinite().all()
            assert partial.abs().max() < 1000
            return exchange.combine(partial)

    watch = Watch()
    watch.begin_step((192, 0))
    outputs = model.forward(inputs, pool, watch)
    assert outputs.logits.isfinite().all()
    assert 0.1 < float(outputs.logits.std()) < 10
    assert len(outputs.logits.argmax(1).unique()) > 2
    # 192 tokens, six of 64 experts each: even chances leave none empty, and give a load of 18.
    assert len(loads) == config.num_hidden_layers
    for load in loads:
        assert int((load > 0).sum()) > 0.9 * config.n_routed_experts
        assert int(load.max()) < 192 / 2
