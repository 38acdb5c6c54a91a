"""Routed experts of one shard: dense and packed weights, at the rows of a decode step and of a prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsparkd.kernels.cuda.experts import TritonExperts
from dsparkd.kernels.cuda.tile import turn
from dsparkd.kernels.experts import ExpertShard, TorchExperts
from dsparkd.kernels.weight import Format
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.weights import random_weight


@dataclass(frozen=True, slots=True)
class Geometry:
    """D, I, experts of the shard (half of all), k."""

    width: int
    expert_width: int
    num_experts: int
    top_k: int


SMALL = Geometry(width=160, expert_width=96, num_experts=3, top_k=2)
FLASH = Geometry(width=4096, expert_width=2048, num_experts=128, top_k=6)
LIMIT = 10.0
DECODE_ROWS, PREFILL_ROWS = 2 * 64 * 6, 8192  # 64 requests of 6 tokens on each of two ranks; one rank's chunk
SERVED_ROWS = 2 * 2048  # a chunk of the server on each of two ranks: they fill the largest tiles


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Every format."""
    geometry = SMALL if scale is Scale.SMALL else FLASH
    for form in (Format.FP4, Format.FP8, Format.DENSE):
        sizes: tuple[int, ...] = (24,)
        if scale is Scale.FLASH:  # the release's experts are FP4
            sizes = (16, DECODE_ROWS, SERVED_ROWS, PREFILL_ROWS) if form is Format.FP4 else (DECODE_ROWS,)
        shard = random_shard(geometry, form, device)
        kernel, reference = TritonExperts(shard), TorchExperts(shard)
        for rows in sizes:
            case = _case(geometry, form, kernel, reference, rows, device)
            rival = _rival(geometry, shard, rows, device) if form is Format.DENSE and device.type == "cuda" else None
            yield case if rival is None else replace(case, rival=rival, rival_name="_grouped_mm")
            del case, rival
        del shard, kernel, reference


def _case(
    geometry: Geometry, form: Format, kernel: TritonExperts, reference: TorchExperts, rows: int, device: torch.device
) -> Case:
    x, ids, shares = random_rows(geometry, rows, device)
    inputs = turn(x) if kernel.takes_turned else x
    first = geometry.num_experts  # the second rank's shard
    served = (ids >= first) & (ids < 2 * first)
    num_served, num_used = int(served.sum()), int((torch.bincount(ids[served]) > 0).sum())
    expert_values = 3 * geometry.width * geometry.expert_width
    value_bytes = {Format.FP4: 0.5 + 1 / 32, Format.FP8: 1 + 1 / 128, Format.DENSE: 2.0}[form]
    return Case(
        name=f"experts.{form}",
        shape=f"{rows} rows, {num_served} choices here",
        num_rows=rows,
        run=lambda part: kernel(inputs[part], ids[part], shares[part]),
        reference=lambda part: reference(x[part], ids[part], shares[part]),
        tolerance=2e-2,
        floor_bytes=int(num_used * expert_values * value_bytes) + rows * geometry.width * 6,
        floor_flops=2 * num_served * expert_values,
    )


def _rival(geometry: Geometry, shard: ExpertShard, rows: int, device: torch.device) -> Callable[[], object]:
    """Both products of rows that lie by expert already, without activation and sums."""
    x, ids, _ = random_rows(geometry, rows, device)
    own = ids.view(-1)[(ids.view(-1) >= shard.first) & (ids.view(-1) < shard.first + geometry.num_experts)]
    ends = torch.bincount(own - shard.first, minlength=geometry.num_experts).cumsum(0).int()
    laid_out = x[torch.arange(len(own), device=device) % rows].contiguous()
    hidden = torch.zeros((len(own), geometry.expert_width), dtype=x.dtype, device=device)
    first, second = (torch.stack([one.values for one in weights]) for weights in (shard.w13, shard.w2))

    def run() -> None:
        torch._grouped_mm(laid_out, first.transpose(1, 2), offs=ends)
        torch._grouped_mm(hidden, second.transpose(1, 2), offs=ends)

    return run


def random_shard(geometry: Geometry, form: Format, device: torch.device) -> ExpertShard:
    """Experts of the second rank, of magnitudes that keep activations near 1."""
    D, I, E = geometry.width, geometry.expert_width, geometry.num_experts  # noqa: E741
    w13 = tuple(random_weight(form, 2 * I, D, seed=2 * e, device=device) for e in range(E))
    w2 = tuple(random_weight(form, D, I, seed=2 * e + 1, device=device) for e in range(E))
    return ExpertShard(E, w13, w2, LIMIT)


def random_rows(geometry: Geometry, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x bfloat16, distinct expert ids ascending (the last rows are padding, as the router marks it), shares."""
    generator = torch.Generator(device).manual_seed(rows)
    num_experts = 2 * geometry.num_experts
    x = torch.randn((rows, geometry.width), generator=generator, device=device).bfloat16()
    draw = torch.rand((rows, num_experts), generator=generator, device=device)
    ids = draw.argsort(1)[:, : geometry.top_k].sort(1).values.int()
    ids[rows - rows // 16 :] = num_experts
    shares = torch.rand((rows, geometry.top_k), generator=generator, device=device)
    return x, ids.contiguous(), shares / shares.sum(1, keepdim=True) * 1.5
