"""The training graph: the forward pass of model.md 3 on packed rows, as plain functions of a layer's tensors.

It shares no code with dsparkd.model, and is held against it: a checkpoint exported from here gives the same logits
there. Sublayers are compiled one by one; what differs between layers is data, so each kind compiles once. Experts are
dense (every expert computes every token, the router's weights select), which at this width is faster than sorting.

Letters: B rows, L tokens a row, N query blocks, S streams, D width, H heads, d head width, T entries, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dsparkd.model.config import ModelConfig
from tools.train_nano.export import fake_quantise, fake_quantise_entry
from tools.train_nano.packing import BLOCK, CSA, HCA, Angles, Packing
from tools.train_nano.parameters import ParameterTable, initial_values
from tools.train_nano.sinkhorn import sinkhorn

Weights = Mapping[str, Tensor]
P = ParamSpec("P")
R = TypeVar("R")

MAX_LOGIT = 70.0  # exp of it still sums in float32; trained logits stay far below


class Mode(NamedTuple):
    """What a phase of the training switches; a change compiles anew.

    sparse: queries see only the indexer's choice. entries: window keys and entries pass the cache's encoding.
    """

    sparse: bool = False
    entries: bool = False


class Features(NamedTuple):
    """What a forward pass leaves.

    hidden [B, L, D], the head's input; taps [B, L, 3 * D]; head [V, D], its weight; index_loss [] float32; loads
    [layers, E] float32, the share of slots that each expert got.
    """

    hidden: Tensor
    taps: Tensor
    head: Tensor
    index_loss: Tensor
    loads: Tensor


class Target:
    """Masters of the main model and its forward pass. values[""] and values["layers"] are float32 leaves."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int, quantise: bool
    ) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        self.config = config
        self.dtype = dtype
        self.quantise = quantise
        self.tables = {prefix: ParameterTable(config, prefix) for prefix in ("", "layers")}
        self.values = {prefix: initial_values(table, config, generator) for prefix, table in self.tables.items()}
        for values in self.values.values():
            for name, tensor in values.items():
                tensor.requires_grad_(tensor.is_floating_point() and name != "ffn.gate.bias")
        self._compiled = Compiled(config, compile_graphs=device.type == "cuda")

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The masters as the forward pass uses them: what the checkpoint would hold, straight-through."""
        return self._compiled.prepare(self.values[prefix], self.dtype, self.quantise)

    def features(self, ids: Tensor, packing: Packing, mode: Mode = Mode()) -> Features:  # noqa: B008
        """ids [B, L] int64."""
        config = self.config
        outside = self.tables[""].unbind(self.weights(""))[0]
        layers = self.tables["layers"].unbind(self.weights("layers"))
        embedded = F.embedding(ids, outside["embed.weight"])
        streams = embedded[:, :, None].expand(-1, -1, config.hc_mult, -1).contiguous()
        index_loss = torch.zeros((), device=ids.device)
        loads, taps = [], []
        assert config.dspark is not None
        for layer in range(config.num_hidden_layers):
            ratio = config.compress_ratios[layer]
            streams, loss = self._compiled.attention(ratio, layers[layer], streams, packing, mode)
            index_loss = index_loss + loss
            streams, load = self._compiled.experts(layers[layer], streams, ids)
            loads.append(load)
            if layer in config.dspark.target_layer_ids:
                taps.append(streams.float().mean(2).to(self.dtype))
        hidden = self._compiled.head(streams, outside)
        return Features(hidden, torch.cat(taps, -1), outside["head.weight"], index_loss, torch.stack(loads))

    def freeze(self) -> None:
        """Take the masters out of training."""
        for values in self.values.values():
            for tensor in values.values():
                tensor.requires_grad_(False)

    def official(self) -> dict[str, Tensor]:
        """Official names; see ParameterTable.unstack."""
        return {
            name: tensor
            for prefix, table in self.tables.items()
            for name, tensor in table.unstack(self.values[prefix]).items()
        }


class Compiled:
    """The graph's pieces, compiled or not. Sinkhorn's own kernels run between them."""

    def __init__(self, config: ModelConfig, *, compile_graphs: bool) -> None:
        self._config = config
        self._prepare = compiled(_prepare, compile_graphs)
        self._mixing = compiled(hyper_mixing, compile_graphs)
        self._attention = compiled(attention_sublayer, compile_graphs)
        self._experts = compiled(experts_sublayer, compile_graphs)
        self._head = compiled(hyper_head, compile_graphs)

    def prepare(self, values: Weights, dtype: torch.dtype, quantise: bool) -> dict[str, Tensor]:
        """See Target.weights."""
        return self._prepare(values, dtype, quantise)

    def mix(self, part: str, weights: Weights, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre [B, L, S], post [B, L, S] and comb [B, L, S, S] of one sublayer, float32."""
        config = self._config
        fn, base, scale = (weights[f"hc_{part}_{name}"] for name in ("fn", "base", "scale"))
        pre, post, logits = self._mixing(streams, fn, base, scale, config.hc_eps, config.rms_norm_eps)
        B, L, S, _ = streams.shape
        comb = sinkhorn(logits.view(B * L, S, S), config.hc_sinkhorn_iters, config.hc_eps)
        return pre, post, comb.view(B, L, S, S)

    def attention(
        self, ratio: int, weights: Weights, streams: Tensor, packing: Packing, mode: Mode
    ) -> tuple[Tensor, Tensor]:
        """Streams after the attention half, and the indexer's loss."""
        mixing = self.mix("attn", weights, streams)
        names = [name for name in weights if name.startswith("attn")]
        chosen = {name: weights[name] for name in names}
        return self._attention(self._config, ratio, chosen, streams, mixing, packing, mode)

    def experts(self, weights: Weights, streams: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Streams after the feed-forward half, and each expert's load [E]."""
        mixing = self.mix("ffn", weights, streams)
        chosen = {name: tensor for name, tensor in weights.items() if name.startswith("ffn")}
        return self._experts(self._config, chosen, streams, mixing, ids)

    def head(self, streams: Tensor, outside: Weights) -> Tensor:
        """The head's input."""
        return self._head(
            streams,
            outside["hc_head_fn"],
            outside["hc_head_base"],
            outside["hc_head_scale"],
            outside["norm.weight"],
            self._config.hc_eps,
            self._config.rms_norm_eps,
        )


def compiled(function: Callable[P, R], enabled: bool) -> Callable[P, R]:
    """One graph for each shape and mode: there are few, and each should be the fastest."""
    return torch.compile(function, fullgraph=True, dynamic=False) if enabled else function


def _prepare(values: Weights, dtype: torch.dtype, quantise: bool) -> dict[str, Tensor]:
    """Cast the linears; pass every tensor through its storage form, gradients straight through."""
    prepared = {}
    for key, tensor in values.items():
        name = key.split("@")[0]
        if quantise:
            tensor = tensor + (fake_quantise(name, tensor.detach()) - tensor.detach())
        prepared[key] = tensor.to(dtype) if _in_model_dtype(name) else tensor
    return prepared


def _in_model_dtype(name: str) -> bool:
    """Whether a product with this weight runs in the model's dtype; the rest of the arithmetic is float32."""
    return name.endswith((".weight", ".w1", ".w2", ".w3")) and not name.endswith(("norm.weight", ".gate.weight"))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Float32 inside, one cast."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rotate(x: Tensor, angles: Angles, *, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs of the last 2 * r' dims of x [B, n, (heads,) d] by angles [B, n, r']."""
    cos, sin = angles.cos, -angles.sin if inverse else angles.sin
    if x.dim() == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    width = 2 * cos.shape[-1]
    plain, rotary = x[..., :-width], x[..., -width:].float()
    even, odd = rotary.view(*rotary.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), -1)


def hyper_mixing(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post [B, L, S] and the comb logits [B, L, S * S], float32."""
    S = streams.shape[2]
    flat = streams.flatten(2)
    raw = F.linear(flat, fn.to(flat.dtype)).float()
    mixed = raw * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(mixed[..., :S] * scale[0] + base[:S]) + eps
    post = 2 * torch.sigmoid(mixed[..., S : 2 * S] * scale[1] + base[S : 2 * S])
    return pre, post, mixed[..., 2 * S :] * scale[2] + base[2 * S :]


def collapse(streams: Tensor, pre: Tensor, norm: Tensor, norm_eps: float) -> Tensor:
    """The sublayer's normed input [B, L, D]."""
    total = sum(streams[:, :, s].float() * pre[:, :, s, None] for s in range(streams.shape[2]))
    assert isinstance(total, Tensor)
    return rms_norm(total.to(streams.dtype), norm, norm_eps)


def expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_k * output + sum_j comb[j, k] * streams[j]. Written out, so that it fuses to one kernel."""
    S = streams.shape[2]
    out32 = output.float()
    parts = [streams[:, :, j].float() for j in range(S)]
    written = []
    for k in range(S):
        total = post[:, :, k, None] * out32
        for j in range(S):
            total = total + comb[:, :, j, k, None] * parts[j]
        written.append(total)
    return torch.stack(written, 2).to(streams.dtype)


def hyper_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, norm_eps: float
) -> Tensor:
    """streams [B, L, S, D] -> the head's input [B, L, D]."""
    flat = streams.flatten(2)
    raw = F.linear(flat, fn.to(flat.dtype)).float()
    mixed = raw * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + norm_eps)
    weights = torch.sigmoid(mixed * scale + base) + eps
    return collapse(streams, weights, norm, norm_eps)


def attention_sublayer(
    config: ModelConfig,
    ratio: int,
    weights: Weights,
    streams: Tensor,
    mixing: tuple[Tensor, Tensor, Tensor],
    packing: Packing,
    mode: Mode,
) -> tuple[Tensor, Tensor]:
    """Streams after the attention half, and the loss of this layer's indexer (zero without one)."""
    pre, post, comb = mixing
    eps = config.rms_norm_eps
    x = collapse(streams, pre, weights["attn_norm.weight"], eps)
    B, L, _ = x.shape
    H, d = config.num_attention_heads, config.head_dim
    N = L // BLOCK
    angles = packing.compressed if ratio else packing.main
    residual = rms_norm(F.linear(x, weights["attn.wq_a.weight"]), weights["attn.q_norm.weight"], eps)
    queries = F.linear(residual, weights["attn.wq_b.weight"]).view(B, L, H, d)
    queries = rotate(rms_norm(queries, None, eps), angles) * d**-0.5
    keys = rotate(rms_norm(F.linear(x, weights["attn.wkv.weight"]), weights["attn.kv_norm.weight"], eps), angles)
    if mode.entries:
        keys = _through_cache(keys)
    blocks = queries.view(B, N, BLOCK, H, d).transpose(2, 3).reshape(B, N, H * BLOCK, d)
    near = keys.view(B, N, BLOCK, d)
    near = torch.cat((F.pad(near[:, :-1], (0, 0, 0, 0, 1, 0)), near), 2)  # [B, N, 2 * BLOCK, d]
    shares = _shares(blocks @ near.transpose(-1, -2), packing.window, H)
    total = shares.float().sum(-1) + torch.exp(weights["attn.attn_sink"].float())[:, None]  # [B, N, H, BLOCK]
    output = shares.flatten(2, 3) @ near  # [B, N, H * BLOCK, d]
    loss = torch.zeros((), device=x.device)
    if ratio:
        entries = _entries(weights, "attn.compressor", x, packing, ratio, eps)
        if mode.entries:
            entries = _through_cache(entries)
        logits = (blocks.flatten(1, 2) @ entries.transpose(-1, -2)).view(B, N, H * BLOCK, -1)
        visible = packing.csa if ratio == CSA else packing.hca
        if ratio == CSA:
            index = _index_query(config, weights, x.detach(), residual.detach(), packing)
            loss = _index_loss(index, logits.detach(), visible, packing.query_rows, H)
            if mode.sparse:
                visible = visible & _index_choice(index, visible, config.index_topk)[:, :, None]
        shares = _shares(logits, visible, H)
        total = total + shares.float().sum(-1)
        output = output + (shares.flatten(1, 3) @ entries).view_as(output)
    output = output.view(B, N, H, BLOCK, d) / total[..., None]
    output = output.transpose(2, 3).reshape(B, L, H, d).to(x.dtype)
    output = rotate(output, angles, inverse=True).view(B, L, config.o_groups, -1)
    wo_a = weights["attn.wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
    low = torch.einsum("blgi,goi->blgo", output, wo_a).flatten(2)
    return expand(F.linear(low, weights["attn.wo_b.weight"]), streams, post, comb), loss


def _shares(logits: Tensor, visible: Tensor, heads: int) -> Tensor:
    """Unnormalised softmax shares [B, N, H, BLOCK, keys] in the logits' dtype; visible [B, N, 1, BLOCK, keys].

    No running maximum: queries are normed and key norms small, so logits stay below MAX_LOGIT.
    """
    B, N, rows, K = logits.shape
    logits = logits.view(B, N, heads, rows // heads, K)
    shares = torch.where(visible, torch.exp(logits.float().clamp(max=MAX_LOGIT)), 0.0)
    return shares.to(logits.dtype)


def _entries(weights: Weights, name: str, x: Tensor, packing: Packing, ratio: int, eps: float) -> Tensor:
    """Compressed entries [B, T or C, d] of one compressor, rotated at the first token of their window."""
    values = F.linear(x, weights[f"{name}.wkv.weight"]).float()
    gates = F.linear(x, weights[f"{name}.wgate.weight"]).float()
    ape = weights[f"{name}.ape"]
    B, L, width = values.shape
    if ratio == CSA:
        values = values.view(B, L // CSA, CSA, 2, width // 2)
        gates = gates.view(B, L // CSA, CSA, 2, width // 2) + ape.view(CSA, 2, -1)
        # The window before gives its A halves; the first window of a document has none.
        missing = packing.csa_first[..., None, None]
        before = F.pad(gates[:, :-1, :, 0], (0, 0, 0, 0, 1, 0))
        gates = torch.cat((torch.where(missing, -torch.inf, before), gates[:, :, :, 1]), 2)
        values = torch.cat((F.pad(values[:, :-1, :, 0], (0, 0, 0, 0, 1, 0)), values[:, :, :, 1]), 2)
        angles = packing.csa_angles
    else:
        rows = packing.hca_rows.flatten(1)[..., None].expand(-1, -1, width)
        values = values.gather(1, rows).view(B, -1, HCA, width)
        gates = gates.gather(1, rows).view(B, -1, HCA, width) + ape
        angles = packing.hca_angles
    mixed = (torch.softmax(gates, 2) * values).sum(2).to(x.dtype)
    return rotate(rms_norm(mixed, weights[f"{name}.norm.weight"], eps), angles)


class IndexQuery(NamedTuple):
    """An indexer's queries [B, L, h, i], keys [B, T, i] and gates [B, L, h] float32."""

    queries: Tensor
    keys: Tensor
    gates: Tensor


def _index_query(config: ModelConfig, weights: Weights, x: Tensor, residual: Tensor, packing: Packing) -> IndexQuery:
    """x and residual come detached: only the distillation loss trains the indexer."""
    B, L, _ = x.shape
    h, width = config.index_n_heads, config.index_head_dim
    queries = F.linear(residual, weights["attn.indexer.wq_b.weight"]).view(B, L, h, width)
    keys = _entries(weights, "attn.indexer.compressor", x, packing, CSA, config.rms_norm_eps)
    gates = F.linear(x, weights["attn.indexer.weights_proj.weight"]).float() * (width * h) ** -0.5
    return IndexQuery(rotate(queries, packing.compressed), keys, gates)


def _index_loss(index: IndexQuery, logits: Tensor, visible: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Cross-entropy against the attention that the queries would pay to all entries, mean over sampled queries.

    logits [B, N, H * BLOCK, T] of the attention; rows [B, N, Q]. Queries that see at most one entry count nothing.
    """
    B, N, Q = rows.shape
    T = logits.shape[-1]
    picked = rows[:, :, None, :, None].expand(-1, -1, heads, -1, T)
    attention = logits.view(B, N, heads, BLOCK, T).gather(3, picked).float()
    seen = visible[:, :, 0].gather(2, rows[..., None].expand(-1, -1, -1, T))  # [B, N, Q, T]
    paid = torch.where(seen[:, :, None], torch.exp(attention.clamp(max=MAX_LOGIT)), 0.0)
    paid = (paid / (paid.sum(-1, keepdim=True) + 1e-20)).mean(2)
    h, width = index.queries.shape[2:]
    flat = (rows + torch.arange(N, device=rows.device)[:, None] * BLOCK).view(B, N * Q)
    queries = index.queries.gather(1, flat[..., None, None].expand(-1, -1, h, width))
    scores = torch.relu((queries.flatten(1, 2) @ index.keys.transpose(-1, -2)).view(B, N * Q, h, T)).float()
    gates = index.gates.gather(1, flat[..., None].expand(-1, -1, h))
    scores = (scores * gates[..., None]).sum(2).view(B, N, Q, T)
    log_shares = torch.log_softmax(torch.where(seen, scores, -1e9), -1)
    counted = (seen.sum(-1) > 1).float()
    divergence = -(paid * torch.where(seen, log_shares, 0.0)).sum(-1)
    return (divergence * counted).sum() / (counted.sum() + 1)


def _index_choice(index: IndexQuery, visible: Tensor, topk: int) -> Tensor:
    """Which entries are among each query's best: [B, N, BLOCK, T] bool, without a gradient.

    The threshold is found by bisection on the count, so a few more than topk pass where scores nearly tie.
    """
    with torch.no_grad():
        B, L, h, _ = index.queries.shape
        keys = index.keys.transpose(-1, -2)
        scores = torch.zeros((B, L, keys.shape[-1]), device=keys.device)
        for head in range(h):
            scores = scores + torch.relu(index.queries[:, :, head] @ keys).float() * index.gates[:, :, head, None]
        seen = visible[:, :, 0].reshape(B, L, -1)
        low = torch.where(seen, scores, torch.inf).amin(-1, keepdim=True)
        high = torch.where(seen, scores, -torch.inf).amax(-1, keepdim=True)
        for _ in range(20):
            middle = (low + high) / 2
            enough = ((scores >= middle) & seen).sum(-1, keepdim=True) >= topk
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return (scores >= low).view(B, L // BLOCK, BLOCK, -1)


def _through_cache(x: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 + (fake_quantise_entry(x32) - x32.detach())).to(x.dtype)


def experts_sublayer(
    config: ModelConfig,
    weights: Weights,
    streams: Tensor,
    mixing: tuple[Tensor, Tensor, Tensor],
    ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Streams after the feed-forward half, and the share of slots that each expert got [E]."""
    pre, post, comb = mixing
    x = collapse(streams, pre, weights["ffn_norm.weight"], config.rms_norm_eps)
    E, k = config.n_routed_experts, config.num_experts_per_tok
    scores = torch.sqrt(F.softplus(F.linear(x.float(), weights["ffn.gate.weight"])))
    if "ffn.gate.tid2eid" in weights:
        chosen = F.embedding(ids, weights["ffn.gate.tid2eid"])
    else:
        chosen = (scores + weights["ffn.gate.bias"]).topk(k, -1).indices
    picked = (chosen[..., None] == torch.arange(E, device=ids.device)).any(-2)
    shares = torch.where(picked, scores, 0.0)
    shares = shares * (config.routed_scaling_factor / (shares.sum(-1, keepdim=True) + 1e-20))
    load = picked.float().mean((0, 1)) / k
    w1, w3 = (weights[f"ffn.experts.{name}"] for name in ("w1", "w3"))
    gate, up = (F.linear(x, w.flatten(0, 1)).view(*x.shape[:-1], E, -1).float() for w in (w1, w3))
    routed = (swiglu(gate, up, config.swiglu_limit) * shares[..., None]).to(x.dtype).flatten(-2)
    output = F.linear(routed, weights["ffn.experts.w2"].transpose(0, 1).flatten(1))
    shared = [F.linear(x, weights[f"ffn.shared_experts.{name}.weight"]).float() for name in ("w1", "w3")]
    activated = swiglu(shared[0], shared[1], config.swiglu_limit).to(x.dtype)
    output = output + F.linear(activated, weights["ffn.shared_experts.w2.weight"])
    return expand(output, streams, post, comb), load


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu of the gate, clamped above only, times the value, clamped on both sides."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
