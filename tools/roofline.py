"""What a step has to move and to compute at the least: bytes and operations of one rank, and the time of an H200.

Counted are weights, each once a step, and of routed experts those that even routing reaches; keys and entries that
tokens attend to; products and attention. Not counted is what stays on the chip: activations, norms, hyper-connections.

Letters: T tokens of one rank, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsparkd.kv.geometry import CSA_RATIO, HCA_RATIO
from dsparkd.model.checkpoint import StoredDtype, TensorSpec, Use, expected_tensors, placed_bytes
from dsparkd.model.config import ModelConfig

BYTES_S = 4.8e12  # an H200's memory, nominal
BF16_FLOPS = 989e12  # dense
FP8_FLOPS = 1979e12


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one rank's step: bytes by what they are, and operations."""

    weight_bytes: float
    expert_bytes: float
    cache_bytes: float
    flops: float

    @property
    def num_bytes(self) -> float:
        """All bytes."""
        return self.weight_bytes + self.expert_bytes + self.cache_bytes

    @property
    def seconds(self) -> float:
        """The larger of memory's and bfloat16 arithmetic's time."""
        return max(self.num_bytes / BYTES_S, self.flops / BF16_FLOPS)

    @property
    def fp8_seconds(self) -> float:
        """The same with arithmetic in fp8."""
        return max(self.num_bytes / BYTES_S, self.flops / FP8_FLOPS)

    def plus(self, other: Floor) -> Floor:
        """Both, one behind the other."""
        return Floor(
            self.weight_bytes + other.weight_bytes,
            self.expert_bytes + other.expert_bytes,
            self.cache_bytes + other.cache_bytes,
            self.flops + other.flops,
        )


class Roofline:
    """Floors of one model's steps on two ranks that share its experts; weights are packed, as on cuda in bfloat16."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        specs = expected_tensors(config)
        self._dense = {Use.TARGET: _Sum(), Use.DRAFT: _Sum()}
        self._expert = _Sum()  # one of one layer; all are alike
        self._head = _Sum()
        for name, spec in specs.items():
            size = placed_bytes(specs, name, "bfloat16", is_packed=True)
            if spec.expert is not None:
                if ".0.ffn.experts.0." in name and spec.use is Use.EXPERT:
                    self._expert.add(spec, size)
            elif name == "head.weight":
                self._head.add(spec, size)
            elif not name.endswith(("embed.weight", "tid2eid", "markov_w1.weight", "markov_w2.weight")):
                self._dense[spec.use].add(spec, size)
            elif name.endswith("markov_w2.weight"):
                for _ in range(config.gamma):  # each draft waits for the one before it
                    self._dense[Use.DRAFT].add(spec, size)

    @property
    def gamma(self) -> int:
        """Drafts of a block."""
        return self._config.gamma

    def decode(self, num_rows: tuple[int, int], width: int, context: int, *, drafts: bool) -> Floor:
        """A step of both ranks' rows, width tokens each behind a context; the floor is rank 0's.

        drafts: a block is drafted for each row before.
        """
        tokens = (num_rows[0] * width, num_rows[1] * width)
        floor = self._forward(tokens, tokens[0], self._cache(num_rows[0], context), self._attention(context))
        return floor.plus(self.draft(num_rows)) if drafts else floor

    def prefill(self, num_tokens: tuple[int, int]) -> Floor:
        """A chunk from position 0 of one sequence a rank; logits of its last token."""
        return self._forward(num_tokens, 1, 0.0, self._attention(num_tokens[0] // 2))

    def draft(self, num_rows: tuple[int, int]) -> Floor:
        """One block of gamma tokens a row."""
        config, dspark = self._config, self._config.dspark
        if dspark is None:
            raise ValueError("the model has no drafter")
        gamma = config.gamma
        tokens = (num_rows[0] * gamma, num_rows[1] * gamma)
        dense = self._dense[Use.DRAFT]
        experts, expert_flops = self._experts(tokens, dspark.num_stages)
        window = num_rows[0] * dspark.num_stages * config.sliding_window * config.head_dim * 2
        keys = config.sliding_window + gamma
        attention = 4 * config.num_attention_heads * config.head_dim * keys * dspark.num_stages
        flops = tokens[0] * (2 * (dense.weights + self._head.weights) + attention) + expert_flops
        return Floor(dense.size + self._head.size, experts, window, flops)

    def _forward(self, tokens: tuple[int, int], num_logits: int, cache: float, attention: float) -> Floor:
        dense = self._dense[Use.TARGET]
        experts, expert_flops = self._experts(tokens, self._config.num_hidden_layers)
        flops = tokens[0] * (2 * dense.weights + attention) + 2 * num_logits * self._head.weights + expert_flops
        return Floor(dense.size + self._head.size, experts, cache, flops)

    def _experts(self, tokens: tuple[int, int], num_layers: int) -> tuple[float, float]:
        """Bytes of the experts that one rank's shard expects to be reached, and its operations."""
        config = self._config
        total, count = sum(tokens), config.n_routed_experts
        missed = (1 - config.num_experts_per_tok / count) ** total
        reached = count / 2 * (1 - missed)
        choices = total * config.num_experts_per_tok / 2
        return num_layers * reached * self._expert.size, num_layers * choices * 2 * self._expert.weights

    def _cache(self, num_rows: int, context: int) -> float:
        """Bytes of keys that rows read: windows, entries, and indexer keys where entries are chosen."""
        config = self._config
        d = 2 * config.head_dim
        csa, hca = context // CSA_RATIO, context // HCA_RATIO
        chosen = min(csa, config.index_topk)
        keys = csa * 2 * config.index_head_dim if csa > config.index_topk else 0
        row = config.num_hidden_layers * config.sliding_window * d
        row += config.compress_ratios.count(CSA_RATIO) * (chosen * d + keys)
        row += config.compress_ratios.count(HCA_RATIO) * hca * d
        return float(num_rows * row)

    def _attention(self, context: int) -> float:
        """Operations of one token's attention and of the scores of its indexers."""
        config = self._config
        heads = 4 * config.num_attention_heads * config.head_dim
        csa, hca = context // CSA_RATIO, context // HCA_RATIO
        num_csa, num_hca = (config.compress_ratios.count(ratio) for ratio in (CSA_RATIO, HCA_RATIO))
        flops = config.num_hidden_layers * heads * min(context, config.sliding_window)
        flops += num_csa * heads * min(csa, config.index_topk) + num_hca * heads * hca
        if csa > config.index_topk:
            flops += num_csa * 2 * config.index_n_heads * config.index_head_dim * csa
        return float(flops)


@dataclass(slots=True)
class _Sum:
    """Bytes of tensors, and the weights among them that inputs are multiplied with."""

    size: int = 0
    weights: int = 0

    def add(self, spec: TensorSpec, size: int) -> None:
        self.size += size
        if len(spec.shape) == 2 and spec.dtype is not StoredDtype.F8_E8M0:
            columns = spec.shape[1] * (2 if spec.dtype is StoredDtype.I8 else 1)
            self.weights += spec.shape[0] * columns
