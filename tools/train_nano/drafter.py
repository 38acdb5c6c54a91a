"""Training graph and loss of the DSpark drafter (model.md 5.12): the target is frozen, its own outputs are the data.

Draft blocks are trained where the target would have written the text itself. A reference answer is its own output as
far as the target's first choice agrees with it at every token: `own_outputs` cuts the loss mask at each answer's first
disagreement, and anchors and labels come from what remains.

Letters: B rows, L their tokens, N anchors, G block rows (gamma), W window, D width, S streams, H heads, d head width,
V vocabulary, E experts, K stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsparkd.model.config import DSparkConfig, ModelConfig
from dsparkd.model.layers import rotary_frequencies
from tools.train_nano.graph import Compiled, Weights, collapse, compiled, expand, rms_norm, rotate
from tools.train_nano.packing import Angles, positions_of
from tools.train_nano.parameters import ParameterTable, initial_values

DECAY = 4.0  # block rows after which a row counts 1/e of the first
CE_WEIGHT, TV_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
BIAS_STEP = 0.001
TOKENS_AT_ONCE = 8192  # whose vocabulary-wide logits are looked at together


class Anchors(NamedTuple):
    """N draft blocks of a packed batch; an index counts the batch's tokens row by row.

    ids [N, G + 1] int64: the anchor and the tokens behind it. at [N, G] int64: index of the block rows' tokens.
    positions [N, G] int64: of the block rows in their document. valid [N, G] bool: the label is the target's own
    output, like all before it. context [N, W] int64: index of the tokens before the anchor, oldest first; visible
    [N, W] bool: the token is of the same document.
    """

    ids: Tensor
    at: Tensor
    positions: Tensor
    valid: Tensor
    context: Tensor
    visible: Tensor

    def weights(self) -> Tensor:
        """w_i of the recipe, [N, G] float32."""
        rows = torch.arange(self.valid.shape[1], device=self.valid.device)
        return self.valid * torch.exp(-rows / DECAY)


class Block(NamedTuple):
    """Rows of draft blocks: hidden before the last norm and normed behind it [N, G, D]; loads [K, E] as in Features."""

    hidden: Tensor
    normed: Tensor
    loads: Tensor


class Drafter:
    """Masters of the draft stages and heads, and the block forward. values["mtp"] are float32 leaves."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int, quantise: bool
    ) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        self.config = config
        self.dtype = dtype
        self.quantise = quantise
        self.tables = {"mtp": ParameterTable(config, "mtp")}
        self.values = {"mtp": initial_values(self.tables["mtp"], config, generator)}
        for name, tensor in self.values["mtp"].items():
            tensor.requires_grad_(name != "ffn.gate.bias")
        self._dspark = _require_dspark(config)
        self._compiled = Compiled(config, compile_graphs=device.type == "cuda")
        compile_graphs = device.type == "cuda"
        self._fuse = compiled(fuse_taps, compile_graphs)
        self._keys = compiled(context_keys, compile_graphs)
        self._attention = compiled(attention_sublayer, compile_graphs)
        self._hidden = compiled(hidden_rows, compile_graphs)
        self.losses = compiled(losses, compile_graphs)

    def start_from(self, target_norm: Tensor) -> None:
        """Take the target's last norm [D] over, for both end in the same head."""
        with torch.no_grad():
            self.values["mtp"]["norm.weight"].copy_(target_norm.view(1, -1))

    def weights(self) -> list[dict[str, Tensor]]:
        """Each stage's tensors as the forward pass uses them: what the checkpoint would hold, straight-through."""
        prepared = self._compiled.prepare(self.values["mtp"], self.dtype, self.quantise)
        stages = self.tables["mtp"].unbind(prepared)
        return [stages[stage] for stage in sorted(stages)]

    def official(self) -> dict[str, Tensor]:
        """Official names; see ParameterTable.unstack."""
        return self.tables["mtp"].unstack(self.values["mtp"])

    def balance(self, loads: Tensor) -> None:
        """Move each router's bias one step towards equal loads [K, E] (of all processes), after an optimiser step."""
        with torch.no_grad():
            self.values["mtp"]["ffn.gate.bias"] += BIAS_STEP * torch.sign(loads.mean(1, keepdim=True) - loads)

    def blocks(
        self, stages: Sequence[Weights], embed: Tensor, taps: Tensor, document: Tensor, anchors: Anchors
    ) -> Block:
        """stages from `weights`; embed [V, D] of the target; taps [B, L, K * D], document [B, L]."""
        config, eps = self.config, self.config.rms_norm_eps
        first, last = stages[0], stages[-1]
        fused = self._fuse(taps, first["main_proj.weight"], first["main_norm.weight"], eps)
        token_angles = main_angles(positions_of(document), config)
        block_angles = main_angles(anchors.positions, config)
        ids = torch.full_like(anchors.at, self._dspark.noise_token_id)
        ids[:, 0] = anchors.ids[:, 0]
        embedded = F.embedding(ids, embed).to(self.dtype)
        streams = embedded[:, :, None].expand(-1, -1, config.hc_mult, -1).contiguous()  # [N, G, S, D]
        loads = []
        for stage in stages:
            keys = self._keys(fused, stage["attn.wkv.weight"], stage["attn.kv_norm.weight"], token_angles, eps)
            streams = self._attention(
                config,
                {name: tensor for name, tensor in stage.items() if name.startswith("attn.")},
                streams,
                self._compiled.mix("attn", stage, streams),
                stage["attn_norm.weight"],
                keys,
                anchors.context,
                anchors.visible,
                block_angles,
            )
            streams, load = self._compiled.experts(stage, streams, ids)
            loads.append(load)
        fn, base, scale = (last[f"hc_head_{name}"] for name in ("fn", "base", "scale"))
        hidden = self._hidden(streams, fn, base, scale, config.hc_eps, eps)
        return Block(hidden, rms_norm(hidden, last["norm.weight"], eps), torch.stack(loads))


def own_outputs(ids: Tensor, loss: Tensor, hidden: Tensor, head: Tensor) -> Tensor:
    """Cut each answer at the first token that is not the target's own first choice.

    ids [B, L]; loss [B, L] bool: the token is an answer's; hidden [B, L, D]: the target's, the head's input; head
    [V, D]. Returns [B, L] bool: the token, like all answer tokens before it, is what greedy decoding gives.
    """
    with torch.no_grad():
        parts = torch.split(hidden.flatten(0, 1), TOKENS_AT_ONCE)
        # In float32, as the server chooses: in bfloat16 the two best logits often tie.
        best = torch.cat([F.linear(part.float(), head.float()).argmax(1) for part in parts]).view(ids.shape)
    agrees = F.pad(best[:, :-1] == ids[:, 1:], (1, 0))
    wrong = loss & ~agrees
    count = wrong.int().cumsum(1)
    starts = loss & ~F.pad(loss[:, :-1], (1, 0))
    # The count never falls, so the largest of the counts at the answers' starts so far is the latest start's.
    before = torch.where(starts, count - wrong.int(), 0).cummax(1).values
    return loss & (count == before)


def sample_anchors(
    ids: Tensor, document: Tensor, own: Tensor, count: int, config: ModelConfig, generator: torch.Generator
) -> Anchors:
    """Draw `count` anchors without repetition among the tokens that, like the next one, are the target's own output.

    ids, document [B, L]; own [B, L] of `own_outputs`; generator on their device. Rows near an answer's end have fewer
    than G labels. Where there are fewer such tokens than `count`, the blocks left over are valid nowhere.
    """
    may = own & F.pad(own[:, 1:], (0, 1))
    draw = torch.rand(ids.numel(), generator=generator, device=ids.device)
    drawn, at = torch.where(may.flatten(), draw, -1.0).topk(count)
    return lay_out(at, drawn >= 0, ids, document, own, config)


def lay_out(at: Tensor, real: Tensor, ids: Tensor, document: Tensor, own: Tensor, config: ModelConfig) -> Anchors:
    """Gather the blocks of the anchors at [N], an index over ids, document and own [B, L].

    real [N] bool: a block that is not is valid nowhere.
    """
    L, G, W = ids.shape[1], config.gamma, config.sliding_window
    first, column = (at - at % L)[:, None], (at % L)[:, None]
    behind = column + torch.arange(G + 1, device=at.device)  # [N, G + 1]
    index = first + behind.clamp(max=L - 1)
    own_labels = own.flatten()[index[:, 1:]] & (behind[:, 1:] < L) & real[:, None]
    before = column + torch.arange(-W, 0, device=at.device)  # [N, W]
    context = first + before.clamp(min=0)
    documents = document.flatten()
    position = positions_of(document).flatten()[at]
    return Anchors(
        ids=ids.flatten()[index],
        at=index[:, :-1],
        positions=position[:, None] + torch.arange(G, device=at.device),
        valid=own_labels.int().cumprod(1).bool(),
        context=context,
        visible=(before >= 0) & (documents[context] == documents[at][:, None]),
    )


def drafter_loss(
    drafter: Drafter,
    embed: Tensor,
    head: Tensor,
    taps: Tensor,
    hidden: Tensor,
    document: Tensor,
    anchors: Anchors,
    normaliser: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the recipe's loss over the anchors' blocks, and metrics that carry no gradient.

    embed, head [V, D], taps [B, L, K * D] and hidden [B, L, D] are the frozen target's. normaliser: what the weighted
    sums are divided by, anchors.weights().sum() unless given (of several processes: the mean of their sums).
    Metrics: ce, tv, confidence (the loss's parts); accepted: 1 + sum over j of the product of c*, the mean accepted
    length at temperature 1; accepted_greedy: the same of equal first choices, exact for greedy decoding; c_star,
    agree, judged [G]: means over valid rows of c*, of equal first choices and of the confidence head's word;
    loads [K, E]: each expert's share.
    """
    stages = drafter.weights()
    block = drafter.blocks(stages, embed, taps, document, anchors)
    wanted = hidden.flatten(0, 1).index_select(0, anchors.at.flatten()).view(*anchors.at.shape, -1)
    weights = anchors.weights()
    total = weights.sum() if normaliser is None else normaliser
    loss, metrics = drafter.losses(block, wanted, head, stages[-1], anchors.ids, anchors.valid, weights, total)
    return loss, metrics | {"loads": block.loads.detach()}


def draft_logits(block: Block, head: Tensor, last: Weights, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Base logits plus bigram bias [N, G, V] and confidence logits [N, G], float32, behind the ids previous [N, G].

    head [V, D]; last: the last stage's weights.
    """
    markov = F.embedding(previous, last["markov_head.markov_w1.weight"]).float()  # [N, G, markov rank]
    bias = F.linear(markov, last["markov_head.markov_w2.weight"].float())
    judged = torch.cat((block.hidden.float(), markov), -1)
    confidence = F.linear(judged, last["confidence_head.proj.weight"].float()).squeeze(-1)
    return F.linear(block.normed.float(), head.float()) + bias, confidence


def losses(
    block: Block,
    wanted: Tensor,
    head: Tensor,
    last: Weights,
    ids: Tensor,
    valid: Tensor,
    weights: Tensor,
    total: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of `drafter_loss` and its metrics; wanted [N, G, D] is the target's hidden state of the rows."""
    logits, confidence = draft_logits(block, head, last, ids[:, :-1])
    log_q = torch.log_softmax(logits, -1)
    p = torch.softmax(F.linear(wanted.float(), head.float()), -1).detach()
    distance = (log_q.exp() - p).abs().sum(-1)  # [N, G], twice the total variation
    labels = ids[:, 1:]
    ce = -log_q.gather(-1, labels[..., None]).squeeze(-1)
    c_star = (1 - distance / 2).detach()
    judged = F.binary_cross_entropy_with_logits(confidence, c_star, reduction="none")
    ce, tv, judged = ((weights * part).sum() / total.clamp(min=1e-6) for part in (ce, distance, judged))
    metrics = {"ce": ce.detach(), "tv": tv.detach(), "confidence": judged.detach()}
    valid32, agree = valid.float(), (logits.argmax(-1) == labels).float()
    rows = valid32.sum(0).clamp(min=1)
    for name, chance in (("accepted", c_star), ("accepted_greedy", agree)):
        metrics[name] = 1 + (chance * valid32).cumprod(1).sum() / rows[0]
    for name, part in (("c_star", c_star), ("agree", agree), ("judged", torch.sigmoid(confidence).detach())):
        metrics[name] = (part * valid32).sum(0) / rows
    return CE_WEIGHT * ce + TV_WEIGHT * tv + CONFIDENCE_WEIGHT * judged, metrics


def fuse_taps(taps: Tensor, weight: Tensor, norm: Tensor, eps: float) -> Tensor:
    """taps [B, L, K * D] -> [B, L, D]: what every stage makes its context keys of."""
    return rms_norm(F.linear(taps.to(weight.dtype), weight), norm, eps)


def context_keys(fused: Tensor, wkv: Tensor, norm: Tensor, angles: Angles, eps: float) -> Tensor:
    """fused [B, L, D] -> one stage's keys, which are its values too, [B * L, d] float32.

    Float32, because the gradient of a key sums over all the blocks that see it.
    """
    return rotate(rms_norm(F.linear(fused, wkv), norm, eps), angles).float().flatten(0, 1)


def attention_sublayer(
    config: ModelConfig,
    weights: Weights,
    streams: Tensor,
    mixing: tuple[Tensor, Tensor, Tensor],
    norm: Tensor,
    keys: Tensor,
    context: Tensor,
    visible: Tensor,
    angles: Angles,
) -> Tensor:
    """Streams [N, G, S, D] after the attention half: every row sees its block's context and the whole block.

    keys [B * L, d] of `context_keys`; context, visible [N, W] of the anchors; angles of the block rows.
    """
    pre, post, comb = mixing
    eps = config.rms_norm_eps
    x = collapse(streams, pre, norm, eps)  # [N, G, D]
    N, G, _ = x.shape
    H, d = config.num_attention_heads, config.head_dim
    residual = rms_norm(F.linear(x, weights["attn.wq_a.weight"]), weights["attn.q_norm.weight"], eps)
    queries = F.linear(residual, weights["attn.wq_b.weight"]).view(N, G, H, d)
    queries = (rotate(rms_norm(queries, None, eps), angles) * d**-0.5).view(N, G * H, d)
    own = rotate(rms_norm(F.linear(x, weights["attn.wkv.weight"]), weights["attn.kv_norm.weight"], eps), angles)
    before = keys.index_select(0, context.flatten()).view(N, -1, d).to(x.dtype)
    seen = torch.cat((before, own), 1)  # [N, W + G, d]
    logits = torch.bmm(queries, seen.transpose(1, 2)).float()
    logits = torch.where(F.pad(visible, (0, G), value=True)[:, None], logits, -torch.inf)
    sinks = weights["attn.attn_sink"].float().repeat(G).expand(N, -1)[..., None]
    shares = torch.softmax(torch.cat((logits, sinks), -1), -1)[..., :-1]  # the sink has no value
    output = torch.bmm(shares.to(x.dtype), seen).view(N, G, H, d)
    output = rotate(output, angles, inverse=True).view(N, G, config.o_groups, -1)
    wo_a = weights["attn.wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
    low = torch.einsum("ngki,koi->ngko", output, wo_a).flatten(2)
    return expand(F.linear(low, weights["attn.wo_b.weight"]), streams, post, comb)


def hidden_rows(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float) -> Tensor:
    """streams [N, G, S, D] -> the last collapse [N, G, D], not yet normed: the confidence head reads it so."""
    flat = streams.flatten(2).float()
    mixed = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    weights = torch.sigmoid(mixed * scale + base) + eps
    return (weights[..., None] * streams.float()).sum(2).to(streams.dtype)


def main_angles(positions: Tensor, config: ModelConfig) -> Angles:
    """Rotations of positions [B, n] by the plain base."""
    frequencies = rotary_frequencies(config.qk_rope_head_dim, config.rope_theta, None).to(positions.device)
    angles = positions.float()[..., None] * frequencies
    return Angles(angles.cos(), angles.sin())


def _require_dspark(config: ModelConfig) -> DSparkConfig:
    if config.dspark is None:
        raise ValueError("the config has no drafter")
    return config.dspark
