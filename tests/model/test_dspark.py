"""The drafter against a plain double precision form of its formulas, and bits between ways of computing a block."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsparkd.errors import CheckpointError
from dsparkd.kernels import noise
from dsparkd.model.config import ModelConfig, load_model_config
from dsparkd.model.dspark import Drafter, DraftInputs, Drafts, DraftSampling
from dsparkd.model.moe import LocalExpertExchange
from dsparkd.model.transformer import Transformer
from dsparkd.model.weights import load_both_draft_shards, load_both_shards, load_drafter, load_transformer
from tests.model.test_moe import PairedExchange
from tests.model.values import small_values
from tools.oracle import read_official
from tools.random_checkpoint import write_checkpoint

CPU = torch.device("cpu")
LENGTH = 304  # of each sequence, a multiple of the row tile
ANCHORS = ((0, 0, 17), (1, 1, 40), (0, 5, 3), (1, 127, 99), (0, 128, 101), (1, 129, 55), (0, 300, 191))
GAMMA, WINDOW, FEATURES = 5, 128, 3 * 64


@dataclass(frozen=True, slots=True)
class Loaded:
    """The small checkpoint's drafter in one process, and random taps of two sequences [2, LENGTH, F]."""

    config: ModelConfig
    target: Transformer
    drafter: Drafter
    exchange: LocalExpertExchange
    taps: Tensor

    def rings(self) -> Tensor:
        """One row a position, sequence behind sequence, behind a row of zeros."""
        positions = torch.arange(LENGTH)
        keys = [self.drafter.context_keys(taps, positions) for taps in self.taps]
        return torch.cat((torch.zeros_like(keys[0][:, :1]), *keys), 1)

    def inputs(self, anchors: tuple[tuple[int, int, int], ...], rings: Tensor) -> DraftInputs:
        """Blocks of (sequence, position, id) over `rings`."""
        sequences, positions, ids = torch.tensor(anchors).unbind(1)
        wanted = positions[:, None] + torch.arange(-WINDOW, 0)
        sources = torch.where(wanted < 0, 0, 1 + sequences[:, None] * LENGTH + wanted)
        first = (WINDOW - positions).clamp(min=0)
        return DraftInputs(ids, positions, rings, sources, first, all_visible=not first.any())

    def draft(
        self, anchors: tuple[tuple[int, int, int], ...], rings: Tensor, sampling: DraftSampling | None = None
    ) -> Drafts:
        """Draft these blocks in one step."""
        self.exchange.begin_step((self.drafter.num_padded_rows(len(anchors)), 0))
        return self.drafter.draft(self.inputs(anchors, rings), self.exchange, sampling)


@pytest.fixture(scope="module")
def loaded(small_checkpoint: Path) -> Loaded:
    config = load_model_config(small_checkpoint)
    target, _ = load_both_shards(small_checkpoint, config, torch.float32, CPU)
    drafter, exchange = load_both_draft_shards(small_checkpoint, target)
    taps = torch.randn((2, LENGTH, FEATURES), generator=torch.Generator().manual_seed(0))
    return Loaded(config, target, drafter, exchange, taps)


@pytest.fixture(scope="module")
def rings(loaded: Loaded) -> Tensor:
    return loaded.rings()


@pytest.fixture(scope="module")
def drafts(loaded: Loaded, rings: Tensor) -> Drafts:
    """All blocks in one greedy step."""
    return loaded.draft(ANCHORS, rings)


class Reference:
    """One block at a time, by the formulas of the stages, in double precision; weights by another reader."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self.c = config
        self.w = {name: torch.from_numpy(array).double() for name, array in read_official(directory).items()}

    def norm(self, x: Tensor, name: str | None = None) -> Tensor:
        normed = x / (x.square().mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt()
        return normed if name is None else normed * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor, position: int, sign: int = 1) -> Tensor:
        """The last r dims of x [..., d] as complex pairs, turned."""
        r = self.c.qk_rope_head_dim
        angles = sign * position * self.c.rope_theta ** (-torch.arange(0, r, 2).double() / r)
        pairs = torch.view_as_complex(x[..., -r:].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        return torch.cat((x[..., :-r], turned), -1)

    def mix(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """One row's streams x [S, D] -> pre [S], post [S], comb [S, S]."""
        S = self.c.hc_mult
        m = self.norm(x.flatten()) @ self.w[f"{name}_fn"].t()
        a, b = self.w[f"{name}_scale"], self.w[f"{name}_base"]
        pre = torch.sigmoid(m[:S] * a[0] + b[:S]) + self.c.hc_eps
        if len(a) == 1:
            return pre, pre, pre
        post = 2 * torch.sigmoid(m[S : 2 * S] * a[1] + b[S : 2 * S])
        comb = torch.softmax((m[2 * S :] * a[2] + b[2 * S :]).view(S, S), 1) + self.c.hc_eps
        comb = comb / (comb.sum(0) + self.c.hc_eps)
        for _ in range(self.c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdim=True) + self.c.hc_eps)
            comb = comb / (comb.sum(0) + self.c.hc_eps)
        return pre, post, comb

    def key(self, x: Tensor, stage: int, position: int) -> Tensor:
        name = f"mtp.{stage}.attn"
        return self.rotate(self.norm(self.w[f"{name}.wkv.weight"] @ x, f"{name}.kv_norm"), position)

    def attention(self, xs: list[Tensor], stage: int, context: list[Tensor], start: int) -> list[Tensor]:
        c, name = self.c, f"mtp.{stage}.attn"
        keys = torch.stack(context + [self.key(x, stage, start + i) for i, x in enumerate(xs)])
        outputs = []
        for i, x in enumerate(xs):
            residual = self.norm(self.w[f"{name}.wq_a.weight"] @ x, f"{name}.q_norm")
            queries = (self.w[f"{name}.wq_b.weight"] @ residual).view(c.num_attention_heads, c.head_dim)
            queries = self.rotate(self.norm(queries), start + i)
            shares = (queries @ keys.t() / math.sqrt(c.head_dim)).exp()
            total = shares.sum(1, keepdim=True) + self.w[f"{name}.attn_sink"].exp()[:, None]
            mixed = self.rotate(shares @ keys / total, start + i, -1)
            groups = mixed.view(c.o_groups, -1)
            wo_a = self.w[f"{name}.wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
            low = torch.cat([wo_a[g] @ groups[g] for g in range(c.o_groups)])
            outputs.append(self.w[f"{name}.wo_b.weight"] @ low)
        return outputs

    def expert(self, x: Tensor, name: str) -> Tensor:
        limit = self.c.swiglu_limit
        gate = (self.w[f"{name}.w1.weight"] @ x).clamp(max=limit)
        up = (self.w[f"{name}.w3.weight"] @ x).clamp(-limit, limit)
        return self.w[f"{name}.w2.weight"] @ (gate * torch.sigmoid(gate) * up)

    def experts(self, x: Tensor, stage: int) -> Tensor:
        name = f"mtp.{stage}.ffn"
        scores = torch.log1p((self.w[f"{name}.gate.weight"] @ x).exp()).sqrt()
        best = (scores + self.w[f"{name}.gate.bias"]).topk(self.c.num_experts_per_tok).indices.tolist()
        total = sum(scores[e] for e in best)
        routed = [
            self.c.routed_scaling_factor * scores[e] / total * self.expert(x, f"{name}.experts.{e}") for e in best
        ]
        return torch.stack(routed).sum(0) + self.expert(x, f"{name}.shared_experts")

    def sublayers(
        self, streams: list[Tensor], stage: int, part: str, context: list[Tensor], start: int
    ) -> list[Tensor]:
        mixes = [self.mix(x, f"mtp.{stage}.hc_{part}") for x in streams]
        inputs = [self.norm(m[0] @ x, f"mtp.{stage}.{part}_norm") for m, x in zip(mixes, streams, strict=True)]
        if part == "attn":
            outputs = self.attention(inputs, stage, context, start)
        else:
            outputs = [self.experts(x, stage) for x in inputs]
        return [m[1][:, None] * o + m[2].t() @ x for m, o, x in zip(mixes, outputs, streams, strict=True)]

    def block(self, taps: Tensor, start: int, anchor: int) -> tuple[Tensor, Tensor]:
        """taps [>= start, F] of one sequence -> h [G, D] and base logits [G, V] of the block at `start`."""
        assert self.c.dspark is not None
        ids = [anchor] + [self.c.dspark.noise_token_id] * (self.c.gamma - 1)
        streams = [self.w["embed.weight"][i].expand(self.c.hc_mult, -1) for i in ids]
        seen = range(max(0, start - self.c.sliding_window), start)
        fused = {j: self.norm(self.w["mtp.0.main_proj.weight"] @ taps[j].double(), "mtp.0.main_norm") for j in seen}
        for stage in range(3):
            context = [self.key(fused[j], stage, j) for j in seen]
            for part in ("attn", "ffn"):
                streams = self.sublayers(streams, stage, part, context, start)
        h = torch.stack([self.mix(x, "mtp.2.hc_head")[0] @ x for x in streams])
        return h, self.norm(h, "mtp.2.norm") @ self.w["head.weight"].t()

    def draft(self, taps: Tensor, start: int, anchor: int) -> tuple[list[int], Tensor, Tensor]:
        """Greedy drafts, their logits [G, V] and confidence logits [G]."""
        h, base = self.block(taps, start, anchor)
        w1, w2 = (self.w[f"mtp.2.markov_head.markov_w{i}.weight"] for i in (1, 2))
        ids, logits, confidence = [anchor], [], []
        for i in range(self.c.gamma):
            logits.append(base[i] + w2 @ w1[ids[-1]])
            confidence.append(self.w["mtp.2.confidence_head.proj.weight"][0] @ torch.cat((h[i], w1[ids[-1]])))
            ids.append(int(logits[-1].argmax()))
        return ids[1:], torch.stack(logits), torch.stack(confidence)


def test_blocks_are_those_of_the_formulas(small_checkpoint: Path, loaded: Loaded, drafts: Drafts) -> None:
    """Equal drafts and close logits, without context, with less than a window, and with one that older keys left."""
    reference = Reference(small_checkpoint, loaded.config)
    for b, (sequence, position, anchor) in enumerate(ANCHORS):
        ids, logits, confidence = reference.draft(loaded.taps[sequence], position, anchor)
        assert drafts.ids[b].tolist() == ids
        assert torch.allclose(drafts.logits[b].double(), logits, atol=1e-4)
        assert torch.allclose(drafts.confidence[b].double(), confidence, atol=1e-4)
    assert drafts.ids.unique().numel() > 10
    assert drafts.confidence.std() > 0.1


def test_a_blocks_bits_do_not_depend_on_its_neighbours(loaded: Loaded, rings: Tensor, drafts: Drafts) -> None:
    """Alone, or among any number of blocks in any order."""
    for b, anchor in enumerate(ANCHORS):
        alone = loaded.draft((anchor,), rings)
        assert torch.equal(alone.ids[0], drafts.ids[b])
        assert torch.equal(alone.logits[0], drafts.logits[b])
        assert torch.equal(alone.confidence[0], drafts.confidence[b])
    assert [loaded.drafter.num_padded_rows(n) for n in (0, 1, 3, 4)] == [0, 16, 16, 32]  # whole tiles: decisions 8
    many = loaded.draft(ANCHORS[::-1] * 3, rings)
    assert torch.equal(many.logits, drafts.logits.flip(0).repeat(3, 1, 1))
    assert torch.equal(many.confidence, drafts.confidence.flip(0).repeat(3, 1))


def test_keys_injected_one_by_one_are_those_injected_in_bulk(loaded: Loaded, rings: Tensor) -> None:
    """After a prefill, after each verify, or token by token: the rings hold the same bits."""
    taps, positions = loaded.taps[0], torch.arange(LENGTH)
    filler = torch.full((15, FEATURES), 7.0)
    for p in (0, 1, 63, 128, 303):
        one = loaded.drafter.context_keys(torch.cat((taps[p : p + 1], filler)), positions[p].expand(16))
        assert torch.equal(one[:, 0], rings[:, 1 + p])
    chunk = loaded.drafter.context_keys(taps[100:164], positions[100:164])
    assert torch.equal(chunk, rings[:, 101:165])


def test_a_ring_that_wraps_gives_the_same_bits(loaded: Loaded, rings: Tensor, drafts: Drafts) -> None:
    """Slot p mod R, R at least W: where a key lies is the caller's business; what no block sees is not read."""
    rows = WINDOW + GAMMA + 1
    wrapped = torch.full((3, rows, rings.shape[2]), torch.nan)
    wanted = torch.arange(300 - WINDOW, 300)
    wrapped[:, wanted % rows] = rings[:, 1 + wanted]
    inputs = DraftInputs(
        torch.tensor([191]), torch.tensor([300]), wrapped, (wanted % rows)[None], torch.tensor([0]), True
    )
    loaded.exchange.begin_step((16, 0))
    assert torch.equal(loaded.drafter.draft(inputs, loaded.exchange).logits[0], drafts.logits[-1])


def test_each_visible_key_counts_and_no_other(loaded: Loaded, rings: Tensor, drafts: Drafts) -> None:
    """The whole window before the anchor, for every row of the block: the last row's is not cut at its own position."""
    for position, seen in ((299, True), (300 - WINDOW, True), (300 - WINDOW - 1, False), (300, False)):
        changed = rings.clone()
        changed[:, 1 + position] += 3.0
        differs = (loaded.draft(ANCHORS[-1:], changed).logits[0] != drafts.logits[-1]).any(1)
        assert differs.tolist() == [seen] * GAMMA


def sampling_of(temperatures: list[float], seed: int) -> DraftSampling:
    count = len(temperatures)
    return DraftSampling(torch.tensor(temperatures), torch.arange(count) + seed, torch.arange(count) % 3)


@pytest.mark.parametrize("is_coupled", [True, False])
def test_sampled_drafts_draw_with_the_noise_of_their_positions(
    is_coupled: bool, loaded: Loaded, rings: Tensor, drafts: Drafts
) -> None:
    """Architecture 1: the target draws the token at p with noise (seed, choice, p, id); so the draft of p does, too.

    For rejection it must not, and a draft at the same place of another block must not repeat its draw. Greedy blocks
    beside sampled ones stay as they are.
    """
    temperatures = [1.0, 0.0, 0.7, 2.0, 0.0, 1.0, 0.3]
    sampling = replace(sampling_of(temperatures, seed=100), is_coupled=is_coupled)
    got = loaded.draft(ANCHORS, rings, sampling)
    positions = torch.tensor([p for _, p, _ in ANCHORS])
    for i in range(GAMMA):
        stream = noise.SAMPLING if is_coupled else noise.DRAFTS + i
        gumbel = noise.gumbel(sampling.seeds, sampling.choices, positions + i + 1, 192, stream).double()
        for b, temperature in enumerate(temperatures):
            log_q = torch.log_softmax(got.logits[b, i].double() / (temperature or 1.0), 0)
            want = (log_q + gumbel[b] * (temperature > 0)).argmax()
            assert got.ids[b, i] == want
    for b in (1, 4):
        assert torch.equal(got.logits[b], drafts.logits[b])
    assert not torch.equal(got.ids, drafts.ids)


def test_changing_drafts_never_changes_the_hidden_states(
    small_checkpoint: Path, loaded: Loaded, rings: Tensor, drafts: Drafts
) -> None:
    """Rows behind the anchor carry noise, so a draft shows in the next row's bigram bias alone."""
    weights = read_official(small_checkpoint)
    w1, w2 = (torch.from_numpy(weights[f"mtp.2.markov_head.markov_w{i}.weight"]).double() for i in (1, 2))
    judge = torch.from_numpy(weights["mtp.2.confidence_head.proj.weight"])[0, 64:].double()
    anchors = torch.tensor([anchor for _, _, anchor in ANCHORS])

    def without_drafts(found: Drafts) -> tuple[Tensor, Tensor]:
        markov = w1[torch.cat((anchors[:, None], found.ids[:, :-1]), 1)]
        return found.logits.double() - markov @ w2.t(), found.confidence.double() - markov @ judge

    base, own = without_drafts(drafts)
    for seed in range(3):
        sampled = loaded.draft(ANCHORS, rings, sampling_of([1.5] * 7, seed))
        assert (sampled.ids != drafts.ids).any(1).all()
        assert (sampled.logits[:, 1:] - drafts.logits[:, 1:]).abs().max() > 0.05
        other_base, other_own = without_drafts(sampled)
        assert torch.allclose(other_base, base, atol=1e-5)
        assert torch.allclose(other_own, own, atol=1e-5)


def test_two_ranks_draft_what_one_process_drafts(
    small_checkpoint: Path, loaded: Loaded, rings: Tensor, drafts: Drafts
) -> None:
    """Each with its half of the experts, one of them with fewer blocks, then with none."""
    barrier = threading.Barrier(2)
    board: list[Tensor] = [torch.empty(0)] * 2
    results: dict[tuple[int, int], Drafts] = {}
    ranges = {0: (ANCHORS[:4], ANCHORS[4:]), 1: (ANCHORS, ())}

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        target, _ = load_transformer(small_checkpoint, loaded.config, torch.float32, CPU, rank)
        drafter, placed = load_drafter(small_checkpoint, target, rank)
        assert placed > 0
        exchange = PairedExchange(rank, barrier, board)
        for step, parts in ranges.items():
            exchange.begin_step((drafter.num_padded_rows(len(parts[0])), drafter.num_padded_rows(len(parts[1]))))
            inputs = loaded.inputs(parts[rank], rings) if parts[rank] else empty_inputs(rings)
            results[step, rank] = drafter.draft(inputs, exchange)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(torch.cat((results[0, 0].logits, results[0, 1].logits)), drafts.logits)
    assert torch.equal(results[1, 0].ids, drafts.ids)
    assert results[1, 1].ids.shape == (0, GAMMA)
    assert results[1, 1].logits.shape == (0, GAMMA, 192)


def empty_inputs(rings: Tensor) -> DraftInputs:
    none = torch.empty(0, dtype=torch.int64)
    return DraftInputs(none, none, rings, none.view(0, WINDOW), none, all_visible=True)


def test_survival_is_the_product_of_tempered_chances(tmp_path: Path, loaded: Loaded, drafts: Drafts) -> None:
    """a_j is the product of sigmoid(conf / tau) up to j; the checkpoint's temperatures count, and no draft does."""
    temperatures = [0.5, 1.0, 2.0, 4.0, 0.25]
    write_checkpoint(tmp_path, small_values() | {"dspark_confidence_temperatures": temperatures}, seed=3)
    target, _ = load_both_shards(tmp_path, load_model_config(tmp_path), torch.float32, CPU)
    drafter, _ = load_both_draft_shards(tmp_path, target)
    tempered = torch.sigmoid(drafts.confidence.double() / torch.tensor(temperatures)).cumprod(1)
    plain = torch.sigmoid(drafts.confidence.double()).cumprod(1)
    assert torch.allclose(drafter.survival(drafts.confidence).double(), tempered, atol=1e-6)
    assert torch.allclose(loaded.drafter.survival(drafts.confidence).double(), plain, atol=1e-6)


def test_a_checkpoint_without_a_drafter_is_refused(tmp_path: Path) -> None:
    """D-03: drafting with a target's checkpoint alone is a start failure that says what is missing."""
    values = {key: value for key, value in small_values().items() if not key.startswith("dspark")}
    write_checkpoint(tmp_path, values, seed=1)
    target, _ = load_both_shards(tmp_path, load_model_config(tmp_path), torch.float32, CPU)
    with pytest.raises(CheckpointError, match="dspark_block_size"):
        load_drafter(tmp_path, target, 0)


def test_bfloat16_is_near_float32(small_checkpoint: Path, loaded: Loaded, drafts: Drafts) -> None:
    """No bits are promised in bfloat16; the library's attention form serves it."""
    target, _ = load_both_shards(small_checkpoint, loaded.config, torch.bfloat16, CPU)
    drafter, exchange = load_both_draft_shards(small_checkpoint, target)
    half = Loaded(loaded.config, target, drafter, exchange, loaded.taps.bfloat16())
    got = half.draft(ANCHORS, half.rings())
    assert got.logits.dtype == torch.float32
    assert (got.logits[:, 0] - drafts.logits[:, 0]).abs().mean() < 0.15 * drafts.logits.std()
    assert (got.ids[:, 0] == drafts.ids[:, 0]).float().mean() > 0.6
