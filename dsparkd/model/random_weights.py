"""Weights that mean nothing: seeded, made on the device in the form that the loader would give them.

For figures at a geometry whose files are not at hand. A tensor follows from the seed and its name alone, so what both
ranks hold is equal on both, and an expert is the same whoever owns it. Magnitudes keep activations finite, and tokens
apart: a router that sent all of them to the same experts would be measured too fast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.kernels.weight import FP4_GROUP, FP8_GROUP, Format, Weight, decode, dense
from dsparkd.model.checkpoint import StoredDtype, TensorSpec, Use, expected_tensors, stored_bytes, wanted_names
from dsparkd.model.config import ModelConfig
from dsparkd.model.moe import NUM_SHARDS

SEED = 20_260_727
SCALE_CODE = 120  # 2 ** -7, of every block; random FP4 codes then have a standard deviation of 0.023
DEVIATION = 0.02  # of FP8 weights, router rows and everything else that is multiplied
EMBEDDING_DEVIATION = 1.0  # as large as what a layer adds, or a token would be drowned by its window


class RandomWeights:
    """A WeightSource that reads no file. part: the target (Use.TARGET) or the drafter (Use.DRAFT)."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: tuple[int, ...],
        progress: Callable[[int, int], None] | None = None,
        part: Use = Use.TARGET,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.keeps_packed = device.type == "cuda" and dtype == torch.bfloat16
        self.placed_bytes = 0
        self._num_experts = config.n_routed_experts
        self._progress = progress
        self._specs = expected_tensors(config)
        self._left = wanted_names(self._specs, part, ranks, config.n_routed_experts // NUM_SHARDS)
        self._total_bytes = sum(stored_bytes(self._specs[name]) for name in self._left)
        self._made_bytes = 0

    def __enter__(self) -> RandomWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def weight(self, name: str) -> Weight:
        """See model.layers.WeightSource."""
        if not self.keeps_packed or f"{name}.scale" not in self._specs:
            return dense(self.linear(name))
        packed = self._packed(name)
        assert packed.scales is not None
        self._place(packed.scales)
        return Weight(packed.format, self._place(packed.values), packed.scales)

    def exact(self, name: str) -> Tensor:
        """See model.layers.WeightSource."""
        spec = self._take(name)
        keeps = self.keeps_packed and spec.dtype is StoredDtype.BF16
        return self._place(self._normal(name, spec.shape).to(torch.bfloat16 if keeps else torch.float32))

    def linear(self, name: str) -> Tensor:
        """See model.layers.WeightSource."""
        if f"{name}.scale" in self._specs:
            return self._place(decode(self._packed(name), self.dtype))
        spec = self._take(f"{name}.weight")
        return self._place(self._normal(name, spec.shape).to(self.dtype))

    def float32(self, name: str) -> Tensor:
        """See model.layers.WeightSource."""
        spec = self._take(name)
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf.endswith(("norm", "_scale")):
            return self._place(torch.ones(spec.shape, device=self.device))
        if leaf in ("bias", "ape", "attn_sink") or leaf.endswith("_base"):
            return self._place(torch.zeros(spec.shape, device=self.device))
        return self._place(self._normal(name, spec.shape))

    def integer(self, name: str) -> Tensor:
        """See model.layers.WeightSource: a table of different experts for each token."""
        num_tokens, top_k = self._take(name).shape
        keys = torch.rand((num_tokens, self._num_experts), generator=self._generator(name), device=self.device)
        return self._place(keys.argsort(1)[:, :top_k].contiguous())

    def finish(self) -> None:
        """Raise InvariantError if a tensor that this rank needs was never taken."""
        if self._left:
            raise InvariantError(f"{len(self._left)} tensors were not made, {min(self._left)} first")

    def _packed(self, name: str) -> Weight:
        """The quantised linear NAME: every scale is 2 ** -7."""
        spec = self._take(f"{name}.weight")
        self._take(f"{name}.scale")
        outputs, width = spec.shape
        if spec.dtype is StoredDtype.I8:
            codes = torch.empty(spec.shape, dtype=torch.uint8, device=self.device)
            codes.random_(0, 256, generator=self._generator(name))
            return Weight(Format.FP4, codes, self._scales(outputs, -(-2 * width // FP4_GROUP)))
        values = self._normal(name, spec.shape).mul_(2.0 ** (127 - SCALE_CODE)).to(torch.float8_e4m3fn)
        return Weight(Format.FP8, values.view(torch.uint8), self._scales(outputs, -(-width // FP8_GROUP)))

    def _scales(self, outputs: int, groups: int) -> Tensor:
        return torch.full((outputs, groups), SCALE_CODE, dtype=torch.uint8, device=self.device)

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        deviation = EMBEDDING_DEVIATION if name == "embed" else DEVIATION
        return torch.randn(shape, generator=self._generator(name), device=self.device).mul_(deviation)

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{SEED} {name}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def _take(self, name: str) -> TensorSpec:
        if name not in self._left:
            raise InvariantError(f"tensor {name} is made twice or is not this rank's")
        self._left.remove(name)
        spec = self._specs[name]
        self._made_bytes += stored_bytes(spec)
        if self._progress is not None:
            self._progress(self._made_bytes, self._total_bytes)
        return spec

    def _place(self, tensor: Tensor) -> Tensor:
        self.placed_bytes += tensor.numel() * tensor.itemsize
        return tensor
