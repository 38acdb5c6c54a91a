"""Which experts a token goes to, and with which shares: torch form, Triton form for cuda.

Letters: T tokens, E experts, k experts a token, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsparkd.kernels.crossing import Crossing


@dataclass(frozen=True, slots=True)
class Routes:
    """shares [T, k] float32, expert_ids [T, k] int32, ascending in a row; E, no expert's id, in padding rows."""

    shares: Tensor
    expert_ids: Tensor


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How experts are chosen: by bias [E] float32 on the scores, or by table [V, k] int64; one of them is None.

    scaling: what a token's shares add up to.
    """

    num_experts: int
    top_k: int
    scaling: float
    bias: Tensor | None
    table: Tensor | None


class RouterKernel(Protocol):
    """What `bind` returns."""

    def __call__(self, logits: Tensor, input_ids: Tensor, num_live: Tensor) -> Routes:
        """logits [T, E] float32, input_ids [T] int64, num_live [1] int64: tokens from there on are padding.

        The number is read on the device: a captured graph serves any number of live tokens. The bias selects and never
        weighs; of equal scores the lower id goes first.
        """

    def pack(
        self,
        x: Tensor,
        logits: Tensor,
        input_ids: Tensor,
        num_live: Tensor,
        rows: Tensor,
        crossing: Crossing | None = None,
    ) -> None:
        """Write `pack` of x [T, D] and its routes into rows [T, C] float32; both are contiguous.

        crossing: takes them to the peer, and brings its rows [P, C]; on cuda only.
        """


def bind(rule: RouterRule, device: torch.device, turns: bool = False) -> RouterKernel:
    """Pick the form for a device, once. turns: x is packed in the order of the experts' weights (takes_turned)."""
    if device.type == "cuda":
        from dsparkd.kernels.cuda.router import TritonRouter  # a start on the cpu loads no compiler

        return TritonRouter(rule, turns)
    assert not turns
    return TorchRouter(rule)


class TorchRouter:
    """The reference, and the form for the cpu."""

    def __init__(self, rule: RouterRule) -> None:
        self._rule = rule

    def __call__(self, logits: Tensor, input_ids: Tensor, num_live: Tensor) -> Routes:
        """See RouterKernel."""
        rule = self._rule
        scores = sqrt_softplus(logits)
        if rule.table is not None:
            chosen = rule.table.index_select(0, input_ids)
        else:
            assert rule.bias is not None
            chosen = (scores + rule.bias).sort(dim=1, descending=True, stable=True).indices[:, : rule.top_k]
        expert_ids = chosen.sort(dim=1).values
        weights = scores.gather(1, expert_ids)
        shares = weights.mul_(rule.scaling / weights.sum(1, keepdim=True).add_(1e-20))
        is_padding = torch.arange(len(expert_ids), device=num_live.device) >= num_live
        expert_ids.masked_fill_(is_padding[:, None], rule.num_experts)
        return Routes(shares, expert_ids.int())

    def pack(
        self,
        x: Tensor,
        logits: Tensor,
        input_ids: Tensor,
        num_live: Tensor,
        rows: Tensor,
        crossing: Crossing | None = None,
    ) -> None:
        """See RouterKernel."""
        assert crossing is None
        rows.copy_(pack(x, self(logits, input_ids, num_live)))


def pack(x: Tensor, routes: Routes) -> Tensor:
    """x [T, D] and its routes, as rows travel between the ranks: [T, C] float32 words, bit patterns."""
    return torch.cat((x.view(torch.float32), routes.shares, routes.expert_ids.view(torch.float32)), 1)


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(ln(1 + e^x)), elementwise, float32; linear under the root above 20, where e^x is all that counts."""
    return torch.where(x > 20, x, x.exp().log1p_()).sqrt_()
