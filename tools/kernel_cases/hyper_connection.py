"""Hyper-connections: the product with the mixing matrix, the collapse and the expansion."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsparkd.kernels.cuda.hyper_connection import (
    PART_COLUMNS,
    TritonHyperConnection,
    TritonProduct,
    advance,
    collapse_last,
)
from dsparkd.kernels.feed_forward import Summands
from dsparkd.kernels.hyper_connection import Collapsed, Mixing, TorchHyperConnection, weighted_sum
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.rows import random_floats, random_values

STREAMS = 4
OUTPUTS = (2 + STREAMS) * STREAMS


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Each part at every number of tokens."""
    small = scale is Scale.SMALL
    width = 72 if small else 4096
    for tokens in (7,) if small else (16, 384, 8192):
        yield from _cases(width, tokens, device)


def _cases(width: int, tokens: int, device: torch.device) -> Iterator[Case]:
    streams = random_values(device, tokens, STREAMS, width, seed=1)
    output = random_values(device, tokens, width, seed=2)
    matrix = random_floats(device, OUTPUTS, STREAMS * width, seed=3) * (STREAMS * width) ** -0.5
    num_parts = -(-width // PART_COLUMNS)
    raw = random_floats(device, num_parts, tokens, OUTPUTS, seed=4)
    squares = squares_of(streams)
    parts = torch.cat((raw, squares), 2)
    mixing = Mixing(
        scale=1 + 0.3 * random_floats(device, OUTPUTS, seed=5),
        base=random_floats(device, OUTPUTS, seed=6),
        norm=1 + 0.2 * random_floats(device, width, seed=7),
        num_streams=STREAMS,
        iterations=20,
        eps=1e-6,
        norm_eps=1e-6,
    )
    kernel, torch_form, product = (
        TritonHyperConnection(STREAMS),
        TorchHyperConnection(),
        TritonProduct(matrix, torch.bfloat16),
    )
    back = Collapsed(
        output,
        2 * random_floats(device, tokens, STREAMS, seed=8).sigmoid(),
        random_floats(device, tokens, STREAMS, STREAMS, seed=9).softmax(2),
    )
    stream_bytes, row_bytes = 2 * STREAMS * width * tokens, 2 * width * tokens

    def expand_rows(part: slice) -> Collapsed:
        return Collapsed(output[part], back.post[part], back.comb[part])

    def collapse(part: slice) -> Collapsed:
        return kernel.collapse(streams[part], parts[None, :, part].contiguous(), mixing)

    def reference_collapse(part: slice) -> Collapsed:
        return torch_form.collapse(streams[part].float(), raw[:, part], mixing)

    def reference_product(streams: Tensor) -> Tensor:
        """Sums of the parts, and of the squares."""
        flat = streams.flatten(1).double()
        return torch.cat((flat @ matrix.t().double(), flat.square().sum(1, keepdim=True)), 1)

    summands = Summands(
        (random_floats(device, tokens, width, seed=12), random_floats(device, tokens, width, seed=13)), output
    )

    def advance_rows(part: slice) -> tuple[Tensor, Tensor]:
        first, second = (each[part] for each in summands.partials)
        expanded, products = advance(Summands((first, second), output[part]), streams[part], expand_rows(part), product)
        assert products is not None
        return expanded, products

    def reference_advance(part: slice) -> Tensor:
        first, second = (each[part] for each in summands.partials)
        total = Summands((first, second), output[part]).total()
        return torch_form.expand(total.float(), streams[part].float(), expand_rows(part))

    yield Case(
        name="mhc.product",
        shape=f"{tokens} tokens",
        num_rows=tokens,
        run=lambda part: sum_of(product(streams[part])),
        reference=lambda part: reference_product(streams[part]),
        tolerance=1e-5,
        floor_bytes=stream_bytes + 4 * matrix.numel(),
        floor_flops=2 * tokens * matrix.numel(),
        timed=lambda: product(streams),
    )
    yield Case(
        name="mhc.collapse",
        shape=f"{tokens} tokens",
        num_rows=tokens,
        run=lambda part: collapse(part).input,
        reference=lambda part: reference_collapse(part).input,
        tolerance=2e-2,
        floor_bytes=stream_bytes + row_bytes + 4 * parts.numel(),
        timed=lambda: kernel.collapse(streams, parts[None], mixing),
    )
    for kind, pick in (("post", lambda back: back.post), ("comb", lambda back: back.comb)):
        yield Case(
            name=f"mhc.collapse.{kind}",
            shape=f"{tokens} tokens",
            num_rows=tokens,
            run=lambda part, pick=pick: pick(collapse(part)),  # type: ignore[misc]
            reference=lambda part, pick=pick: pick(reference_collapse(part)),  # type: ignore[misc]
            tolerance=1e-5,
            floor_bytes=0,
            untimed=True,
        )
    own_raw, base = random_floats(device, num_parts, tokens, STREAMS, seed=10), random_floats(device, STREAMS, seed=11)
    head = torch.cat((own_raw, squares), 2)
    scale = mixing.scale[:1]

    def reference_last(part: slice) -> Tensor:
        own = streams[part].double()
        length = (own.flatten(1).square().mean(1, keepdim=True) + mixing.norm_eps).rsqrt()
        return weighted_sum(own, (own_raw[:, part].double().sum(0) * length * scale + base).sigmoid() + mixing.eps)

    yield Case(
        name="mhc.last",
        shape=f"{tokens} tokens",
        num_rows=tokens,
        run=lambda part: collapse_last(
            streams[part], head[None, :, part].contiguous(), scale, base, mixing.eps, mixing.norm_eps
        ),
        reference=reference_last,
        tolerance=1e-2,
        floor_bytes=stream_bytes + row_bytes,
        timed=lambda: collapse_last(streams, head[None], scale, base, mixing.eps, mixing.norm_eps),
    )
    yield Case(
        name="mhc.expand",
        shape=f"{tokens} tokens",
        num_rows=tokens,
        run=lambda part: kernel.expand(output[part], streams[part], expand_rows(part)),
        reference=lambda part: torch_form.expand(output[part].float(), streams[part].float(), expand_rows(part)),
        tolerance=1e-2,
        floor_bytes=2 * stream_bytes + row_bytes,
    )
    yield Case(
        name="mhc.advance",
        shape=f"{tokens} tokens",
        num_rows=tokens,
        run=lambda part: advance_rows(part)[0],
        reference=reference_advance,
        tolerance=1e-2,
        floor_bytes=2 * stream_bytes + 5 * row_bytes + 4 * matrix.numel(),
        floor_flops=2 * tokens * matrix.numel(),
    )
    yield Case(
        name="mhc.advance.product",
        shape=f"{tokens} tokens",
        num_rows=tokens,
        run=lambda part: sum_of(advance_rows(part)[1]),
        reference=lambda part: reference_product(advance_rows(part)[0]),
        tolerance=1e-5,
        floor_bytes=0,
        untimed=True,
    )


def sum_of(parts: Tensor) -> Tensor:
    """Products of parts [Q, P, T, O]: pieces are added in order, so that it does not matter how many there are."""
    total = parts[0]
    for piece in parts[1:]:
        total = total + piece
    return total.sum(0)


def squares_of(streams: Tensor) -> Tensor:
    """Sums of the squares of streams [T, S, D] by parts [P, T, 1]."""
    columns = [part.float().square().sum((1, 2)) for part in torch.split(streams, PART_COLUMNS, 2)]
    return torch.stack(columns)[:, :, None]
