"""Muon for matrices, AdamW for the rest, over stacked parameters.

Muon (K. Jordan, 2024) steps along the orthogonalised momentum: five Newton-Schulz iterations in bfloat16, for every
matrix of a stack at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ADAM_ONLY = ("embed.", "head.weight", ".gate.weight", "weights_proj", "markov", "confidence", "hc_", "ape")
_EMBEDDING_RATE = 3.0  # rows of the embedding are seen seldom


class Optimiser:
    """Steps leaves by their gradients; the caller clears these. rate scales both parts' peak learning rates."""

    def __init__(self, parameters: Mapping[str, Tensor], muon_rate: float, adam_rate: float, decay: float) -> None:
        self._matrices = {name: tensor for name, tensor in parameters.items() if uses_muon(name, tensor)}
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._matrices.items()}
        self._muon_rate, self._adam_rate, self._decay = muon_rate, adam_rate, decay
        others = {name: tensor for name, tensor in parameters.items() if name not in self._matrices}
        fast = [tensor for name, tensor in others.items() if "embed" in name]
        plain = [tensor for name, tensor in others.items() if "embed" not in name]
        groups = [
            {"params": tensors, "factor": factor}
            for tensors, factor in ((fast, _EMBEDDING_RATE), (plain, 1.0))
            if tensors
        ]
        self._adam = torch.optim.AdamW(groups, lr=adam_rate, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step of both; rate in 0..1."""
        for group in self._adam.param_groups:
            group["lr"] = self._adam_rate * rate * group["factor"]
        self._adam.step()
        for name, tensor in self._matrices.items():
            assert tensor.grad is not None
            momentum = self._momentum[name].lerp_(tensor.grad, 0.05)
            update = orthogonalised(torch.lerp(tensor.grad, momentum, 0.95))
            tall = max(1.0, tensor.shape[-2] / tensor.shape[-1]) ** 0.5
            tensor.mul_(1 - self._muon_rate * rate * self._decay)
            tensor.add_(update, alpha=-self._muon_rate * rate * tall)

    def state(self) -> dict[str, object]:
        """Everything that a resumed training needs."""
        return {"momentum": self._momentum, "adam": self._adam.state_dict()}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a state of `state`."""
        momentum = state["momentum"]
        assert isinstance(momentum, dict)
        for name, tensor in self._momentum.items():
            tensor.copy_(momentum[name])
        adam = state["adam"]
        assert isinstance(adam, dict)
        self._adam.load_state_dict(adam)


def uses_muon(name: str, tensor: Tensor) -> bool:
    """Whether a stacked parameter [n, ..., O, I] holds matrices that map activations to activations."""
    return tensor.dim() > 2 and not any(part in name for part in _ADAM_ONLY)


def orthogonalised(gradient: Tensor) -> Tensor:
    """[..., O, I] -> the nearest semi-orthogonal matrices, roughly, float32."""
    matrices = gradient.flatten(0, -3).bfloat16()
    turned = matrices.shape[-2] > matrices.shape[-1]
    if turned:
        matrices = matrices.mT
    matrices = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(5):
        gram = matrices @ matrices.mT
        matrices = torch.baddbmm(matrices, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), matrices, beta=a)
    return (matrices.mT if turned else matrices).view_as(gradient).float()
