"""Manifold-constrained hyper-connections: Triton form, for cuda.

One kernel takes a sublayer's output back into the streams and multiplies these by the mixing matrix of the next
connection while it has them: by columns, in parts of PART_COLUMNS of every stream, whatever the number of tokens, so
that few tokens fill the device and a token's bits are its own. With the products goes the sum of the streams' squares.
A collapse adds the parts, and does the rest of its token in one pass over the streams; the matrix that leads back is
another program's, beside it.

Letters: T tokens, S streams, D width, O = (2 + S) * S products a token (the head: S), P parts, K = S * D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.errors import CapabilityError
from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.feed_forward import Summands
from dsparkd.kernels.hyper_connection import Collapsed, Mixing

PART_COLUMNS = 128
STAGES = 2  # of the matrix' rows: those of the next stream are loaded while one is multiplied
BLOCK_T = 16  # tokens of one program; the same for any number of them, and so is the order of all sums


class TritonProduct:
    """Product of streams with a float32 matrix [O, K], in parts [P, T, O + 1] float32 whose sum it is; the last column
    is that of the streams' squares.

    For bfloat16 streams the matrix is kept as a sum of three bfloat16 terms, whose products with them are exact: the
    tensor cores then give what float32 arithmetic would, up to the order of its sums.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        terms = [weight]
        if dtype == torch.bfloat16:
            terms, rest = [], weight
            for _ in range(3):
                terms.append(rest.bfloat16())
                rest = rest - terms[-1].float()
        self.terms = torch.stack(terms)  # [terms, O, K]

    def __call__(self, streams: Tensor) -> Tensor:
        """streams [T, S, D], contiguous -> parts."""
        parts = self.parts_of(streams)
        _launch(None, streams, None, self, streams, parts)
        return parts

    def parts_of(self, streams: Tensor) -> Tensor:
        """Memory for the parts of a product with these streams."""
        T, _, D = streams.shape
        shape = (triton.cdiv(D, PART_COLUMNS), T, self.terms.shape[1] + 1)
        return torch.empty(shape, dtype=torch.float32, device=streams.device)


class TritonHyperConnection:
    """Form for cuda. Implements HyperConnectionKernel, of products that TritonProduct makes.

    Raises CapabilityError for a number of streams that is no power of two.
    """

    def __init__(self, num_streams: int) -> None:
        if num_streams & (num_streams - 1):
            raise CapabilityError(
                "engine.device = 'cuda'", f"kernels for {num_streams} residual streams (powers of two)", "use cpu"
            )

    def collapse(self, streams: Tensor, raw: Tensor, mixing: Mixing) -> Collapsed:
        """See HyperConnectionKernel; raw [P, T, O + 1] is a TritonProduct's."""
        T, S, D = streams.shape
        post, comb = raw.new_empty((T, S)), raw.new_empty((T, S, S))
        collapsed = Collapsed(streams.new_empty((T, D)), post, comb)
        _collapse[(T, 2)](
            streams,
            raw,
            mixing.scale,
            mixing.base,
            mixing.norm,
            collapsed.input,
            post,
            comb,
            T,
            mixing.eps,
            mixing.norm_eps,
            S=S,
            D=D,
            P=raw.shape[0],
            ITERATIONS=mixing.iterations,
            BLOCK_D=triton.next_power_of_2(D),
            BLOCK_P=triton.next_power_of_2(raw.shape[0]),
            num_warps=8 if D > 1024 else 4,
            launch_pdl=EARLY,
        )
        return collapsed

    def expand(self, output: Tensor, streams: Tensor, collapsed: Collapsed) -> Tensor:
        """See HyperConnectionKernel."""
        return advance(output, streams, collapsed, None)[0]


def advance(
    output: Tensor | Summands, streams: Tensor, collapsed: Collapsed, product: TritonProduct | None
) -> tuple[Tensor, Tensor | None]:
    """Expand an output, or what adds up to it, and multiply the streams at once: them, and their product's parts."""
    expanded = torch.empty_like(streams)
    parts = None if product is None else product.parts_of(streams)
    _launch(output, streams, collapsed, product, expanded, collapsed.post if parts is None else parts)
    return expanded, parts


def _launch(
    output: Tensor | Summands | None,
    streams: Tensor,
    collapsed: Collapsed | None,
    product: TritonProduct | None,
    expanded: Tensor,
    parts: Tensor,
) -> None:
    """Expand, with an output, and multiply, with a product; the rest is not touched."""
    T, S, D = streams.shape
    summands = output if isinstance(output, Summands) else None
    whole = streams if output is None else output.shared if isinstance(output, Summands) else output
    first, second = (whole, whole) if summands is None else summands.partials
    terms = streams if product is None else product.terms
    _advance[(triton.cdiv(T, BLOCK_T), triton.cdiv(D, PART_COLUMNS))](
        whole,
        first,
        second,
        streams,
        streams if collapsed is None else collapsed.post,
        streams if collapsed is None else collapsed.comb,
        terms,
        expanded,
        parts,
        T,
        EXPAND=output is not None,
        ADD=summands is not None,
        TERMS=0 if product is None else terms.shape[0],
        O=1 if product is None else terms.shape[1],
        S=S,
        D=D,
        BLOCK_T=BLOCK_T,
        BLOCK_C=PART_COLUMNS,
        BLOCK_O=16 if product is None else max(16, triton.next_power_of_2(terms.shape[1])),
        STAGES=STAGES,
        OPERAND=operand(streams),
        PRECISION=precision(streams),
        num_warps=4,
        launch_pdl=EARLY,
    )


def collapse_last(streams: Tensor, raw: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Collapse streams [T, S, D] into [T, D] by sigmoid weights: raw [P, T, S + 1] a TritonProduct's, scale one number,
    base [S], float32."""
    T, S, D = streams.shape
    collapsed = streams.new_empty((T, D))
    if T:
        _collapse_last[(T,)](
            streams,
            raw,
            scale,
            base,
            collapsed,
            T,
            eps,
            norm_eps,
            S=S,
            D=D,
            P=raw.shape[0],
            BLOCK_D=triton.next_power_of_2(D),
            BLOCK_P=triton.next_power_of_2(raw.shape[0]),
            num_warps=8 if D > 1024 else 4,
            launch_pdl=EARLY,
        )
    return collapsed


@triton.jit  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    output,  # [T, D]
    first,  # [T, D] float32
    second,  # [T, D] float32
    streams,  # [T, S, D]
    post,  # [T, S]
    comb,  # [T, S, S]
    terms,  # [TERMS, O, S, D]
    expanded,  # [T, S, D]
    parts,  # [P, T, O + 1]
    T,
    EXPAND: tl.constexpr,
    ADD: tl.constexpr,
    TERMS: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    STAGES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """EXPAND: take the output into the streams; ADD: it is the sum of first, second and output, rounded. TERMS:
    multiply what they are then."""
    follow()
    part = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = part * BLOCK_C + tl.arange(0, BLOCK_C)
    o = tl.arange(0, BLOCK_O)
    row = t.to(tl.int64)
    row_ok = t < T
    live = row_ok[:, None] & (c < D)[None, :]
    own_streams = streams + row[:, None] * (S * D) + c[None, :]
    if EXPAND:
        own = tl.load(output + row[:, None] * D + c[None, :], mask=live, other=0.0).to(tl.float32)
        if ADD:
            total = tl.load(first + row[:, None] * D + c[None, :], mask=live, other=0.0)
            total += tl.load(second + row[:, None] * D + c[None, :], mask=live, other=0.0)
            own = (total + own).to(streams.dtype.element_ty).to(tl.float32)  # it is a tensor of the model's dtype
    product = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for target in tl.range(0, S, num_stages=STAGES):
        if EXPAND:
            total = tl.load(post + row * S + target, mask=row_ok, other=0.0)[:, None] * own
            for source in tl.static_range(S):  # all but the first read of each stream hit the nearest cache
                x = tl.load(own_streams + source * D, mask=live, other=0.0).to(tl.float32)
                total += tl.load(comb + (row * S + source) * S + target, mask=row_ok, other=0.0)[:, None] * x
            new = total.to(streams.dtype.element_ty)
            tl.store(expanded + row[:, None] * (S * D) + target * D + c[None, :], new, mask=live)
        else:
            new = tl.load(own_streams + target * D, mask=live, other=0.0)
        if TERMS:
            squares += new.to(tl.float32) * new.to(tl.float32)
            for term in tl.static_range(TERMS):
                places = terms + ((term * O + o[None, :]) * S + target) * D + c[:, None]
                weight = tl.load(places, mask=(o < O)[None, :] & (c < D)[:, None], other=0.0)
                product = tl.dot(new.to(OPERAND), weight.to(OPERAND), product, input_precision=PRECISION)
    if TERMS:
        own_parts = parts + (part * T + row) * (O + 1)
        tl.store(own_parts[:, None] + o[None, :], product, mask=row_ok[:, None] & (o < O)[None, :])
        tl.store(own_parts + O, tl.sum(squares, 1), mask=row_ok)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """Logistic function, by a power of e that cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1 + small)


@triton.jit  # type: ignore[untyped-decorator]
def _summed(raw, t, T, O: tl.constexpr, at, P: tl.constexpr, BLOCK_P: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
    """Products at these places of token t: the sum over the parts, in an order that P alone decides."""
    p = tl.arange(0, BLOCK_P)
    places = raw + (p * T + t)[:, None] * (O + 1) + at[None, :]
    return tl.sum(tl.load(places, mask=(p < P)[:, None], other=0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse_length(raw, t, T, norm_eps, O: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
    """(mean of squares + eps) ** -1/2 over all streams of token t."""
    p = tl.arange(0, BLOCK_P)
    squares = tl.load(raw + (p * T + t) * (O + 1) + O, mask=p < P, other=0.0)
    return tl.rsqrt(tl.sum(squares, 0) / K + norm_eps)


@triton.jit  # type: ignore[untyped-decorator]
def _collapse(  # type: ignore[no-untyped-def]
    streams,  # [T, S, D]
    raw,  # [P, T, (2 + S) * S + 1]
    scale,  # [(2 + S) * S]
    base,
    norm,  # [D]
    collapsed,  # [T, D]
    post,  # [T, S]
    comb,  # [T, S, S]
    T,
    eps,
    norm_eps,
    S: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The first program of a token collapses it; the second makes what leads back."""
    follow()
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    O: tl.constexpr = (2 + S) * S  # noqa: E741
    length = _inverse_length(raw, t, T, norm_eps, O, S * D, P, BLOCK_P)
    if tl.program_id(1) == 0:
        c = tl.arange(0, BLOCK_D)
        gates = _summed(raw, t, T, O, s, P, BLOCK_P) * length * tl.load(scale + s) + tl.load(base + s)
        gates = _sigmoid(gates) + eps
        # The collapsed row is a tensor of the model's dtype before it is normed: it is rounded in between.
        y = _weighted_sum(streams + t * S * D, gates, S, D, BLOCK_D)
        y = y.to(collapsed.dtype.element_ty).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / D + norm_eps) * tl.load(norm + c, mask=c < D, other=0.0)
        tl.store(collapsed + t * D + c, y.to(collapsed.dtype.element_ty), mask=c < D)
    else:
        posts = _summed(raw, t, T, O, S + s, P, BLOCK_P) * length * tl.load(scale + S + s) + tl.load(base + S + s)
        tl.store(post + t * S + s, 2 * _sigmoid(posts))
        cell = tl.arange(0, S * S)
        mix = _summed(raw, t, T, O, 2 * S + cell, P, BLOCK_P) * length * tl.load(scale + 2 * S + cell)
        mix = tl.reshape(mix + tl.load(base + 2 * S + cell), [S, S])
        mix = tl.exp(mix - tl.max(mix, 1)[:, None])
        mix = mix / tl.sum(mix, 1)[:, None] + eps
        mix = mix / (tl.sum(mix, 0) + eps)[None, :]
        for _ in range(ITERATIONS - 1):
            mix = mix / (tl.sum(mix, 1) + eps)[:, None]
            mix = mix / (tl.sum(mix, 0) + eps)[None, :]
        tl.store(comb + t * S * S + s[:, None] * S + s[None, :], mix)


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sum(own, gates, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of a token's streams by gates [S], in ascending order; one stream at a time: held together they would leave a
    processor room for one token."""
    s, c = tl.arange(0, S), tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for source in tl.static_range(S):
        x = tl.load(own + source * D + c, mask=c < D, other=0.0).to(tl.float32)
        total += x * tl.sum(tl.where(s == source, gates, 0.0), 0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _collapse_last(  # type: ignore[no-untyped-def]
    streams,  # [T, S, D]
    raw,  # [P, T, S + 1]
    scale,  # [1]
    base,  # [S]
    collapsed,  # [T, D]
    T,
    eps,
    norm_eps,
    S: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    c = tl.arange(0, BLOCK_D)
    length = _inverse_length(raw, t, T, norm_eps, S, S * D, P, BLOCK_P)
    gates = _summed(raw, t, T, S, s, P, BLOCK_P)
    gates = _sigmoid(gates * length * tl.load(scale) + tl.load(base + s)) + eps
    y = _weighted_sum(streams + t * S * D, gates, S, D, BLOCK_D)
    tl.store(collapsed + t * D + c, y.to(collapsed.dtype.element_ty), mask=c < D)
