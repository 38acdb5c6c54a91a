"""Manifold-constrained hyper-connections: Triton form, for cuda.

The product with the mixing matrix is cut along its length into SPLITS parts, whatever the number of tokens, so that
few tokens fill the device and a token's bits are its own; a collapse adds the parts in order, and does the rest of its
token in one pass over the streams.

Letters: T tokens, S streams, D width, O = (2 + S) * S products a token, P splits, K = S * D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.errors import CapabilityError
from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.hyper_connection import Collapsed, Mixing

SPLITS = 32
BLOCK_T = 64  # tokens of one program of the product: each of its weights serves so many
BLOCK_K = 128
EXPAND_COLUMNS = 1024


class TritonProduct:
    """Product of streams with a float32 matrix [O, K], in parts [P, T, O] float32 whose sum it is.

    For bfloat16 streams the matrix is kept as a sum of three bfloat16 terms, whose products with them are exact: the
    tensor cores then give what float32 arithmetic would, up to the order of its sums.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._num_outputs, self._length = weight.shape
        terms = [weight]
        if dtype == torch.bfloat16:
            terms, rest = [], weight
            for _ in range(3):
                terms.append(rest.bfloat16())
                rest = rest - terms[-1].float()
        self._terms = torch.stack(terms)  # [terms, O, K]

    def __call__(self, streams: Tensor) -> Tensor:
        """streams [T, S, D], contiguous -> parts."""
        T = streams.shape[0]
        parts = torch.empty((SPLITS, T, self._num_outputs), dtype=torch.float32, device=streams.device)
        _product[(triton.cdiv(T, BLOCK_T), SPLITS)](
            streams,
            self._terms,
            parts,
            T,
            O=self._num_outputs,
            K=self._length,
            SPLIT_K=split_length(self._length),
            TERMS=self._terms.shape[0],
            BLOCK_T=BLOCK_T,
            BLOCK_O=max(16, triton.next_power_of_2(self._num_outputs)),
            BLOCK_K=BLOCK_K,
            OPERAND=operand(streams),
            PRECISION=precision(streams),
            num_warps=4,
            num_stages=3,
            launch_pdl=EARLY,
        )
        return parts


def split_length(length: int) -> int:
    """How much of a product's length each of its parts has; the last ones may be shorter, or have none."""
    return triton.cdiv(length, SPLITS * BLOCK_K) * BLOCK_K  # type: ignore[no-any-return]


class TritonHyperConnection:
    """Form for cuda. Implements HyperConnectionKernel.

    Raises CapabilityError for a number of streams that is no power of two.
    """

    def __init__(self, num_streams: int) -> None:
        if num_streams & (num_streams - 1):
            raise CapabilityError(
                "engine.device = 'cuda'", f"kernels for {num_streams} residual streams (powers of two)", "use cpu"
            )

    def collapse(self, streams: Tensor, raw: Tensor, mixing: Mixing) -> Collapsed:
        """See HyperConnectionKernel."""
        T, S, D = streams.shape
        post, comb = raw.new_empty((T, S)), raw.new_empty((T, S, S))
        collapsed = Collapsed(streams.new_empty((T, D)), post, comb)
        _collapse[(T,)](
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
            SPLITS=raw.shape[0],
            ITERATIONS=mixing.iterations,
            BLOCK_D=triton.next_power_of_2(D),
            num_warps=8 if D > 1024 else 4,
            launch_pdl=EARLY,
        )
        return collapsed

    def expand(self, output: Tensor, streams: Tensor, collapsed: Collapsed) -> Tensor:
        """See HyperConnectionKernel."""
        T, S, D = streams.shape
        expanded = torch.empty_like(streams)
        block = min(triton.next_power_of_2(D), EXPAND_COLUMNS)
        _expand[(T, triton.cdiv(D, block))](
            output,
            streams,
            collapsed.post,
            collapsed.comb,
            expanded,
            S=S,
            D=D,
            BLOCK_D=block,
            num_warps=4,
            launch_pdl=EARLY,
        )
        return expanded


def collapse_last(streams: Tensor, raw: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Collapse streams [T, S, D] into [T, D] by sigmoid weights: raw [P, T, S], scale one number, base [S], float32."""
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
            SPLITS=raw.shape[0],
            BLOCK_D=triton.next_power_of_2(D),
            num_warps=8 if D > 1024 else 4,
            launch_pdl=EARLY,
        )
    return collapsed


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    streams,  # [T, K]
    terms,  # [TERMS, O, K]
    parts,  # [SPLITS, T, O]
    T,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    follow()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    o = tl.arange(0, BLOCK_O)
    total = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    rows = streams + t.to(tl.int64)[:, None] * K
    for start in range(split * SPLIT_K, (split + 1) * SPLIT_K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(rows + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0).to(OPERAND)
        for term in tl.static_range(TERMS):
            weight = tl.load(
                terms + term * O * K + o[None, :] * K + k[:, None], mask=(o < O)[None, :] & (k < K)[:, None], other=0.0
            )
            total = tl.dot(x, weight.to(OPERAND), total, input_precision=PRECISION)
    at = (split * T + t).to(tl.int64)[:, None] * O + o[None, :]
    tl.store(parts + at, total, mask=(t < T)[:, None] & (o < O)[None, :])


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """Logistic function, by a power of e that cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1 + small)


@triton.jit  # type: ignore[untyped-decorator]
def _collapse(  # type: ignore[no-untyped-def]
    streams,  # [T, S, D]
    raw,  # [SPLITS, T, (2 + S) * S]
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
    SPLITS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    c = tl.arange(0, BLOCK_D)
    length = _inverse_length(streams + t * S * D, norm_eps, S, D, BLOCK_D)

    cell = 2 * S + s[:, None] * S + s[None, :]
    gates = tl.zeros([S], tl.float32)
    posts = tl.zeros([S], tl.float32)
    mix = tl.zeros([S, S], tl.float32)
    for split in tl.static_range(SPLITS):
        own = raw + (split * T + t) * ((2 + S) * S)
        gates += tl.load(own + s)
        posts += tl.load(own + S + s)
        mix += tl.load(own + cell)
    gates = gates * length * tl.load(scale + s) + tl.load(base + s)
    posts = posts * length * tl.load(scale + S + s) + tl.load(base + S + s)
    mix = mix * length * tl.load(scale + cell) + tl.load(base + cell)
    gates = _sigmoid(gates) + eps
    tl.store(post + t * S + s, 2 * _sigmoid(posts))

    mix = tl.exp(mix - tl.max(mix, 1)[:, None])
    mix = mix / tl.sum(mix, 1)[:, None] + eps
    mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    for _ in range(ITERATIONS - 1):
        mix = mix / (tl.sum(mix, 1) + eps)[:, None]
        mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    tl.store(comb + t * S * S + s[:, None] * S + s[None, :], mix)

    # The collapsed row is a tensor of the model's dtype before it is normed: it is rounded in between.
    y = _weighted_sum(streams + t * S * D, gates, S, D, BLOCK_D)
    y = y.to(collapsed.dtype.element_ty).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + norm_eps) * tl.load(norm + c, mask=c < D, other=0.0)
    tl.store(collapsed + t * D + c, y.to(collapsed.dtype.element_ty), mask=c < D)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse_length(own, norm_eps, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """(mean of squares + eps) ** -1/2 over all streams of a token.

    One stream at a time, here and in the sum, where they come out of the nearest cache: held together they would leave
    a processor room for one token.
    """
    c = tl.arange(0, BLOCK_D)
    squares = tl.zeros([BLOCK_D], tl.float32)
    for source in tl.static_range(S):
        x = tl.load(own + source * D + c, mask=c < D, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 0) / (S * D) + norm_eps)


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sum(own, gates, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of a token's streams by gates [S], in ascending order."""
    s, c = tl.arange(0, S), tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for source in tl.static_range(S):
        x = tl.load(own + source * D + c, mask=c < D, other=0.0).to(tl.float32)
        total += x * tl.sum(tl.where(s == source, gates, 0.0), 0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _collapse_last(  # type: ignore[no-untyped-def]
    streams,  # [T, S, D]
    raw,  # [SPLITS, T, S]
    scale,  # [1]
    base,  # [S]
    collapsed,  # [T, D]
    T,
    eps,
    norm_eps,
    S: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    c = tl.arange(0, BLOCK_D)
    length = _inverse_length(streams + t * S * D, norm_eps, S, D, BLOCK_D)
    gates = tl.zeros([S], tl.float32)
    for split in tl.static_range(SPLITS):
        gates += tl.load(raw + (split * T + t) * S + s)
    gates = _sigmoid(gates * length * tl.load(scale) + tl.load(base + s)) + eps
    y = _weighted_sum(streams + t * S * D, gates, S, D, BLOCK_D)
    tl.store(collapsed + t * D + c, y.to(collapsed.dtype.element_ty), mask=c < D)


@triton.jit  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    output,  # [T, D]
    streams,  # [T, S, D]
    post,  # [T, S]
    comb,  # [T, S, S]
    expanded,  # [T, S, D]
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = c < D
    own = tl.load(output + t * D + c, mask=live, other=0.0).to(tl.float32)
    for target in tl.static_range(S):
        total = tl.load(post + t * S + target) * own
        for source in tl.static_range(S):  # all but the first read of each stream hit the nearest cache
            x = tl.load(streams + (t * S + source) * D + c, mask=live, other=0.0).to(tl.float32)
            total += tl.load(comb + (t * S + source) * S + target) * x
        tl.store(expanded + (t * S + target) * D + c, total.to(expanded.dtype.element_ty), mask=live)
