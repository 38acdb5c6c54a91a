"""Products with one weight: the linears of a layer, dense and FP8, and the wide ones of router and head."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsparkd.kernels.cuda.linear import TritonLinear
from dsparkd.kernels.weight import Format, decode
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.weights import random_weight

Shape = tuple[int, int]  # inputs, outputs

# Flash: the largest of attention, the narrowest, and the shared expert's first.
FLASH_SHAPES: tuple[Shape, ...] = ((1024, 32768), (4096, 1536), (4096, 4096))
ROUTER: Shape = (4096, 256)
HEAD: Shape = (4096, 129280)
DECODE_ROWS, PREFILL_ROWS = 64 * 6, 8192


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Every format and shape at every number of rows."""
    if scale is Scale.SMALL:
        for form in (Format.FP8, Format.DENSE, Format.FP4):
            yield from _cases(form, (192, 70), (80,), device)
        yield from _cases(Format.DENSE, (96, 40), (48,), device, wide=True)
        return
    for shape in FLASH_SHAPES:
        yield from _cases(Format.FP8, shape, (16, DECODE_ROWS, PREFILL_ROWS), device)
    yield from _cases(Format.DENSE, FLASH_SHAPES[-1], (16, DECODE_ROWS, PREFILL_ROWS), device)
    yield from _cases(Format.DENSE, ROUTER, (DECODE_ROWS, PREFILL_ROWS), device, wide=True)
    yield from _cases(Format.DENSE, HEAD, (16, DECODE_ROWS), device, wide=True)


def _cases(
    form: Format, shape: Shape, sizes: tuple[int, ...], device: torch.device, wide: bool = False
) -> Iterator[Case]:
    inputs, outputs = shape
    weight = random_weight(form, outputs, inputs, seed=inputs + outputs, device=device)
    kernel = TritonLinear(weight, wide=wide)
    for rows in sizes:
        generator = torch.Generator(device).manual_seed(rows)
        x = torch.randn((rows, inputs), generator=generator, device=device).bfloat16()

        def reference(part: slice, x: torch.Tensor = x) -> torch.Tensor:
            return x[part].float() @ decode(weight, torch.bfloat16).t().float()

        yield Case(
            name=f"linear.{form}{'.wide' if wide else ''}",
            shape=f"{rows} x {inputs} x {outputs}",
            num_rows=rows,
            run=lambda part, x=x: kernel(x[part]),  # type: ignore[misc]
            reference=reference,
            tolerance=1e-4 if wide else 1e-2,
            floor_bytes=weight.num_bytes + rows * (2 * inputs + (4 if wide else 2) * outputs),
            floor_flops=2 * rows * inputs * outputs,
        )
