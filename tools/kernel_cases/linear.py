"""Products with one weight: the linears of a layer, dense and FP8, the grouped ones, and the wide ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels.cuda.linear import TritonLinear
from dsparkd.kernels.weight import FP8_GROUP, Format, Weight, decode
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.weights import random_weight

FEW_ROWS, DECODE_ROWS, PREFILL_ROWS = 16, 64 * 6, 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """Inputs of each group, outputs of all, groups; wide: the product is float32."""

    inputs: int
    outputs: int
    groups: int = 1
    wide: bool = False


# Flash. Of attention: queries' and keys' first, queries' second, the grouped and the last output, the indexer's
# queries; of the shared expert: both. Wide: both compressors, the indexer's weights, the router, the head.
FP8_SHAPES = (
    Shape(4096, 1536),
    Shape(1024, 32768),
    Shape(4096, 8192, groups=8),
    Shape(8192, 4096),
    Shape(1024, 8192),
    Shape(4096, 4096),
    Shape(2048, 4096),
)
WIDE_SHAPES = tuple(Shape(4096, outputs, wide=True) for outputs in (2560, 1024, 64, 256))
HEAD = Shape(4096, 129280, wide=True)


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Every format and shape at every number of rows."""
    if scale is Scale.SMALL:
        for form in (Format.FP8, Format.DENSE, Format.FP4):
            yield from _cases(form, Shape(192, 70), (80,), device)
        yield from _cases(Format.FP8, Shape(128, 96, groups=3), (40,), device)
        yield from _cases(Format.DENSE, Shape(96, 40, wide=True), (48,), device)
        return
    sizes = (FEW_ROWS, DECODE_ROWS, PREFILL_ROWS)
    for shape in FP8_SHAPES:
        yield from _cases(Format.FP8, shape, sizes, device)
    yield from _cases(Format.DENSE, Shape(4096, 4096), sizes, device)
    for shape in WIDE_SHAPES:
        yield from _cases(Format.DENSE, shape, sizes, device)
    yield from _cases(Format.DENSE, HEAD, (FEW_ROWS, DECODE_ROWS), device)


def _cases(form: Format, shape: Shape, sizes: tuple[int, ...], device: torch.device) -> Iterator[Case]:
    inputs, outputs, groups = shape.inputs, shape.outputs, shape.groups
    weight = random_weight(form, outputs, inputs, seed=inputs + outputs, device=device)
    kernel = TritonLinear(weight, wide=shape.wide, groups=groups)
    for rows in sizes:
        generator = torch.Generator(device).manual_seed(rows)
        x = torch.randn((rows, groups * inputs), generator=generator, device=device).bfloat16()

        def reference(part: slice, x: Tensor = x) -> Tensor:
            dense = decode(weight, torch.bfloat16).float().view(groups, -1, inputs)
            own = x[part].float().view(-1, groups, inputs)
            return torch.cat([own[:, g] @ dense[g].t() for g in range(groups)], 1)

        rival = _rival(weight, x, groups)
        yield Case(
            name=f"linear.{form}{'.grouped' if groups > 1 else ''}{'.wide' if shape.wide else ''}",
            shape=f"{rows} x {f'{groups} x ' if groups > 1 else ''}{inputs} x {outputs // groups}",
            num_rows=rows,
            run=lambda part, x=x: kernel(x[part]),  # type: ignore[misc]
            reference=reference,
            tolerance=1e-4 if shape.wide else 1e-2,
            floor_bytes=weight.num_bytes + rows * (2 * groups * inputs + (4 if shape.wide else 2) * outputs),
            floor_flops=2 * rows * inputs * outputs,
            rival=rival[0],
            rival_name=rival[1],
        )


def _rival(weight: Weight, x: Tensor, groups: int) -> tuple[Callable[[], object] | None, str]:
    """FP8 times FP8 with scales of 1 x 128 and 128 x 128, whose activations are rounded; bfloat16 for dense weights."""
    if not x.is_cuda or groups > 1:
        return None, ""
    if weight.format is Format.DENSE:
        return lambda: x @ weight.values.t(), "mm"
    values = weight.values.view(torch.float8_e4m3fn)
    rounded = x.to(torch.float8_e4m3fn)
    outputs, inputs = weight.shape
    own_scales = torch.ones((inputs // FP8_GROUP, x.shape[0]), device=x.device).t()
    scales = torch.ones((outputs // FP8_GROUP, inputs // FP8_GROUP), device=x.device).t()
    return (
        lambda: torch._scaled_mm(
            rounded, values.t(), scale_a=own_scales, scale_b=scales, out_dtype=torch.bfloat16, use_fast_accum=False
        ),
        "_scaled_mm",
    )
