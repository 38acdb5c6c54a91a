"""Parameters of the training graph: float32 masters, equal tensors of all layers stacked, named by the official suffix.

`attn.wq_a.weight` of eight layers is one tensor [8, 128, 256]; `ffn.experts.w1` one of [8, 16, 128, 256]. So an
optimiser step, a fake quantisation and a gradient exchange are a few dozen calls instead of thousands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsparkd.model.checkpoint import StoredDtype, expected_tensors
from dsparkd.model.config import ModelConfig

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class Stack:
    """Where one stacked tensor's members live: layer (or draft stage) numbers, ascending, and one member's shape."""

    layers: tuple[int, ...]
    shape: tuple[int, ...]
    integer: bool


class ParameterTable:
    """Names and shapes of everything under one prefix: `layers`, `mtp`, or "" for the tensors outside of both."""

    def __init__(self, config: ModelConfig, prefix: str) -> None:
        plain = replace(config, quantized=False, expert_dtype=None)
        members: dict[str, dict[int, tuple[int, ...]]] = {}
        experts: dict[str, int] = {}
        integers: set[str] = set()
        for name, spec in expected_tensors(plain).items():
            layer, suffix = split_name(name, prefix)
            if suffix is None:
                continue
            match = _EXPERT.fullmatch(suffix)
            if match:
                suffix = match[1] + match[3].removesuffix(".weight")
                experts[suffix] = max(experts.get(suffix, 0), int(match[2]) + 1)
            members.setdefault(suffix, {})[layer] = tuple(spec.shape)
            if spec.dtype is StoredDtype.I64:
                integers.add(suffix)
        self.prefix = prefix
        self.stacks: dict[str, Stack] = {}
        for suffix, shapes in members.items():
            by_shape: dict[tuple[int, ...], list[int]] = {}
            for layer, shape in shapes.items():
                by_shape.setdefault((experts[suffix], *shape) if suffix in experts else shape, []).append(layer)
            for shape, layers in by_shape.items():
                # CSA and HCA compressors share names and differ in shape: the row count tells them apart.
                key = suffix if len(by_shape) == 1 else f"{suffix}@{shape[0]}"
                self.stacks[key] = Stack(tuple(sorted(layers)), shape, suffix in integers)

    def unbind(self, values: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """Each layer's tensors by plain suffix, views of the stacks; one gradient is gathered for each stack."""
        layers: dict[int, dict[str, Tensor]] = {}
        for key, stack in self.stacks.items():
            for layer, tensor in zip(stack.layers, values[key].unbind(0), strict=True):
                layers.setdefault(layer, {})[key.split("@")[0]] = tensor
        return layers

    def stack(self, official: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The reverse of unstack; raises KeyError when a name is missing."""
        return {
            key: torch.stack([official[self._official(key, layer)] for layer in stack.layers])
            for key, stack in self.stacks.items()
        }

    def _official(self, key: str, layer: int) -> str:
        suffix = key.split("@")[0]
        return f"{self.prefix}.{layer}.{suffix}" if self.prefix else suffix

    def unstack(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Official names; experts stay stacked as PREFIX.N.ffn.experts.w1 [E, I, D]."""
        return {
            self._official(key, layer): values[key][index].detach()
            for key, stack in self.stacks.items()
            for index, layer in enumerate(stack.layers)
        }


def split_name(name: str, prefix: str) -> tuple[int, str | None]:
    """The layer number and the suffix of an official name under a prefix; suffix None when it lies elsewhere."""
    parts = name.split(".", 2)
    numbered = parts[0] in ("layers", "mtp")
    if not prefix:
        return 0, None if numbered else name
    return (int(parts[1]), parts[2]) if numbered and parts[0] == prefix else (0, None)


def initial_values(table: ParameterTable, config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw every stack on the generator's device."""
    return {
        key: _initial(key.split("@")[0], (len(stack.layers), *stack.shape), stack, config, generator)
        for key, stack in table.stacks.items()
    }


def _initial(
    suffix: str, shape: tuple[int, ...], stack: Stack, config: ModelConfig, generator: torch.Generator
) -> Tensor:
    device = generator.device

    def normal(std: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * std

    if stack.integer:
        return torch.rand((*shape[:-1], config.n_routed_experts), generator=generator, device=device).topk(
            config.num_experts_per_tok
        )[1]
    if suffix.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if suffix.endswith(("attn_sink", "ape", "gate.bias")):
        return torch.zeros(shape, device=device)
    if suffix.endswith(("_scale",)):
        return torch.full(shape, 0.1, device=device)
    if suffix.endswith("_base"):
        return _initial_base(suffix, shape, stack, config, device)
    if suffix == "embed.weight":
        return normal(0.5)
    if suffix == "head.weight":
        return normal(0.02)
    width = shape[-1] ** -0.5
    # Sublayers start almost silent, and compressors near the plain mean.
    quiet = suffix.endswith(("wo_b.weight", "w2.weight", "experts.w2", "wgate.weight"))
    return normal(width * (0.1 if quiet else 1.0))


def _initial_base(
    suffix: str, shape: tuple[int, ...], stack: Stack, config: ModelConfig, device: torch.device
) -> Tensor:
    """Hyper-connections start as a plain residual: read mostly one stream, write to all, keep each stream."""
    S = config.hc_mult
    base = torch.zeros(shape, device=device)
    if "head" in suffix:
        return base - 1.1  # the logistic of it is 1 / S for four streams
    for index, layer in enumerate(stack.layers):
        base[index, :S] = -2.0
        base[index, layer % S] = 1.0
        base[index, 2 * S :] = 4.0 * torch.eye(S, device=device).flatten()
    return base
