"""Manifold-constrained hyper-connections: Triton form, for cuda.

One kernel takes a sublayer's output back into the streams and multiplies these by the mixing matrix of the next
connection while it has them: by columns, in parts of PART_COLUMNS of every stream, whatever the number of tokens, so
that a token's bits are its own. Each stream's products are summed apart and then added in order: by one program, or,
where tokens are few, by the collapse, and each stream has programs of its own. With the products goes the sum of the
streams' squares. A collapse adds the parts, and does the rest of its token in one pass over the streams; the matrices
that lead back are other programs', beside it.

What few tokens take is ways to the memory and back. So programs load all that they will need at once. What is
multiplied and added is written as an fma: the compiler would choose, and not alike in the forms for few and for many.

Letters: T tokens, S streams, D width, O = (2 + S) * S products a token (the head: S), P parts, K = S * D, Q pieces of a
part: S, or 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.errors import CapabilityError
from dsparkd.kernels.cuda.compiling import ahead
from dsparkd.kernels.cuda.launch import EARLY, IS_COMPILED, constant, follow
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.feed_forward import Summands
from dsparkd.kernels.hyper_connection import Collapsed, Mixing
from dsparkd.kernels.tiles import count_tiles, power_of_two

PART_COLUMNS = 128
FEW_TOKENS = 64  # up to so many each stream has programs of its own
BLOCK_T = 16  # tokens of a program that advances
FEW_BACK, MANY_BACK = 1, 8  # tokens of a program that makes matrices
GROUP = tl.constexpr(8)  # parts that are added side by side


class TritonProduct:
    """Product of streams with a float32 matrix [O, K], in parts [Q, P, T, O + 1] float32; the last column is that of
    the streams' squares. A part is the sum of its pieces in ascending order, the product the sum of the parts.

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
        T, S, D = streams.shape
        shape = (S if T <= FEW_TOKENS else 1, count_tiles(D, PART_COLUMNS), T, self.terms.shape[1] + 1)
        return torch.empty(shape, dtype=torch.float32, device=streams.device)


class TritonHyperConnection:
    """Form for cuda. Implements HyperConnectionKernel, of products that TritonProduct makes.

    Raises CapabilityError for a number of streams that is no power of two, or 1.
    """

    def __init__(self, num_streams: int) -> None:
        if num_streams & (num_streams - 1) or num_streams == 1:
            raise CapabilityError(
                "engine.device = 'cuda'", f"kernels for {num_streams} residual streams (2, 4, 8)", "use cpu"
            )

    def collapse(self, streams: Tensor, raw: Tensor, mixing: Mixing) -> Collapsed:
        """See HyperConnectionKernel; raw [Q, P, T, O + 1] is a TritonProduct's."""
        T, S, D = streams.shape
        post, comb = raw.new_empty((T, S)), raw.new_empty((T, S, S))
        collapsed = Collapsed(streams.new_empty((T, D)), post, comb)
        together = FEW_BACK if T <= FEW_TOKENS else MANY_BACK
        _collapse[(count_tiles(T, together) + T,)](
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
            Q=raw.shape[0],
            P=raw.shape[1],
            ITERATIONS=mixing.iterations,
            BLOCK_T=together,
            BLOCK_D=power_of_two(D),
            BLOCK_P=power_of_two(raw.shape[1]),
            BLOCK_O=power_of_two(raw.shape[3]),
            num_warps=4,
            launch_pdl=EARLY,
        )
        return collapsed

    def expand(self, output: Tensor, streams: Tensor, collapsed: Collapsed) -> Tensor:
        """See HyperConnectionKernel."""
        return advance(output, streams, collapsed, None)[0]

    @ahead()
    def compile(self, product: TritonProduct, mixing: Mixing, dtype: torch.dtype) -> None:
        """Compile for few and for many tokens, at start: no step shall wait for a compiler."""
        for streams in _streams_to_compile(product, mixing.num_streams, dtype):
            output = streams[:, 0].contiguous()
            collapsed = self.collapse(streams, product(streams), mixing)
            summands = Summands((output.float(), output.float()), output)
            for each, following in ((output, product), (summands, product), (summands, None)):
                advance(each, streams, collapsed, following)


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
    is_few = T <= FEW_TOKENS
    _advance[(count_tiles(T, BLOCK_T), count_tiles(D, PART_COLUMNS), S if is_few else 1)](
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
        SPREAD=is_few,
        BLOCK_T=BLOCK_T,
        BLOCK_C=PART_COLUMNS,
        BLOCK_O=16 if product is None else max(16, power_of_two(terms.shape[1])),
        OPERAND=operand(streams),
        PRECISION=precision(streams),
        num_warps=4,
        launch_pdl=EARLY,
    )


def collapse_last(streams: Tensor, raw: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Collapse streams [T, S, D] into [T, D] by sigmoid weights: raw [Q, P, T, S + 1] a TritonProduct's, scale one
    number, base [S], float32."""
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
            Q=raw.shape[0],
            P=raw.shape[1],
            BLOCK_D=power_of_two(D),
            BLOCK_P=power_of_two(raw.shape[1]),
            BLOCK_O=power_of_two(raw.shape[3]),
            num_warps=4,
            launch_pdl=EARLY,
        )
    return collapsed


@ahead()
def compile_last(product: TritonProduct, scale: Tensor, base: Tensor, dtype: torch.dtype) -> None:
    """Compile the last collapse for few and for many tokens, at start."""
    for streams in _streams_to_compile(product, base.shape[0], dtype):
        collapse_last(streams, product(streams), scale, base, 1.0, 1.0)


def _streams_to_compile(product: TritonProduct, num_streams: int, dtype: torch.dtype) -> list[Tensor]:
    """Streams [T, S, D] of few and of many tokens."""
    width = product.terms.shape[2] // num_streams
    sizes = (BLOCK_T, FEW_TOKENS + BLOCK_T)
    return [torch.zeros((T, num_streams, width), dtype=dtype, device=product.terms.device) for T in sizes]


@triton.jit
def _with(items, item):  # type: ignore[no-untyped-def]
    """The tuple and one item more."""
    return items + (item,)  # noqa: RUF005


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of(terms, target, c, o, TERMS: tl.constexpr, O: tl.constexpr, S: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
    """Terms of the matrix for columns c of one stream: a tuple of [columns, outputs]."""
    rows = ()
    for term in tl.static_range(TERMS):
        places = terms + ((term * O + o[None, :]) * S + target) * D + c[:, None]
        rows = _with(rows, constant(places, (o < O)[None, :] & (c < D)[:, None]))
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x float32 in another type.

    Two at once for bfloat16, as the compiler does not do it where both are used one by one. And it takes an assembler's
    instruction for one that must not be repeated: what leads to a product's operand it else computes again in every
    warp.
    """
    if IS_COMPILED and TYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, False, 2)
    else:
        return x.to(TYPE)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    output,  # [T, D]
    first,  # [T, D] float32
    second,  # [T, D] float32
    streams,  # [T, S, D]
    post,  # [T, S]
    comb,  # [T, S, S]
    terms,  # [TERMS, O, S, D]
    expanded,  # [T, S, D]
    parts,  # [S, P, T, O + 1] with SPREAD, else [1, P, T, O + 1]
    T,
    EXPAND: tl.constexpr,
    ADD: tl.constexpr,
    TERMS: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    S: tl.constexpr,
    D: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """EXPAND: take the output into the streams; ADD: it is the sum of first, second and output, rounded. TERMS:
    multiply what they are then. SPREAD: a program makes one stream."""
    part = tl.program_id(1)
    lowest = tl.program_id(2)
    c = part * BLOCK_C + tl.arange(0, BLOCK_C)
    o = tl.arange(0, BLOCK_O)
    if SPREAD:
        rows = _rows_of(terms, lowest, c, o, TERMS, O, S, D)
    follow()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = t.to(tl.int64)
    row_ok = t < T
    live = row_ok[:, None] & (c < D)[None, :]
    own_streams = streams + row[:, None] * (S * D) + c[None, :]
    sources = ()
    if EXPAND:
        own = tl.load(output + row[:, None] * D + c[None, :], mask=live, other=0.0).to(tl.float32)
        if SPREAD:
            for source in tl.static_range(S):
                sources = _with(sources, tl.load(own_streams + source * D, mask=live, other=0.0))
        if ADD:
            total = tl.load(first + row[:, None] * D + c[None, :], mask=live, other=0.0)
            total += tl.load(second + row[:, None] * D + c[None, :], mask=live, other=0.0)
            own = _rounded(total + own, streams.dtype.element_ty).to(tl.float32)  # a tensor of the model's dtype
    product = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    # Not pipelined: what is loaded here waits for nothing that the loop computes.
    for target in tl.range(lowest, lowest + (1 if SPREAD else S), num_stages=1):
        if TERMS and not SPREAD:
            rows = _rows_of(terms, target, c, o, TERMS, O, S, D)
        if EXPAND:
            new = tl.load(post + row * S + target, mask=row_ok, other=0.0)[:, None] * own
            for source in tl.static_range(S):
                share = tl.load(comb + (row * S + source) * S + target, mask=row_ok, other=0.0)
                # All but the first read of each stream hit the nearest cache; held, they would leave less room.
                x = sources[source] if SPREAD else tl.load(own_streams + source * D, mask=live, other=0.0)
                new = tl.fma(share[:, None], x.to(tl.float32), new)
            new = _rounded(new, streams.dtype.element_ty)
            tl.store(expanded + row[:, None] * (S * D) + target * D + c[None, :], new, mask=live)
        else:
            new = tl.load(own_streams + target * D, mask=live, other=0.0)
        if TERMS:
            # By an fma: an addition the compiler would take for the start of the next chain, whose order it changes.
            product = tl.fma(_product_of(new, rows, TERMS, OPERAND, PRECISION), 1.0, product)
            squares += tl.sum(new.to(tl.float32) * new.to(tl.float32), 1)
    if TERMS:
        own_parts = parts + ((lowest * tl.num_programs(1) + part) * T + row) * (O + 1)
        tl.store(own_parts[:, None] + o[None, :], product, mask=row_ok[:, None] & (o < O)[None, :])
        tl.store(own_parts + O, squares, mask=row_ok)


@triton.jit  # type: ignore[untyped-decorator]
def _product_of(x, rows, TERMS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x times the sum of the terms, as one chain: [BLOCK_T, BLOCK_O]."""
    total = tl.dot(x.to(OPERAND), rows[0].to(OPERAND), input_precision=PRECISION)
    for term in tl.static_range(1, TERMS):
        total = tl.dot(x.to(OPERAND), rows[term].to(OPERAND), total, input_precision=PRECISION)
    return total


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """Logistic function, by a power of e that cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1 + small)


@triton.jit
def _reciprocal(x):  # type: ignore[no-untyped-def]
    """1 / x for a normal x, in one instruction: off by one unit in the last place at most."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 / x


@triton.jit  # type: ignore[untyped-decorator]
def _summed(  # type: ignore[no-untyped-def]
    raw, t, T, o, OUTPUTS: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Products of tokens t [B] and their squares' sum, [B, BLOCK_O]: pieces are added, then parts.

    In an order that P alone decides, however the compiler lays the parts over threads: GROUP of them are added side by
    side, in ascending order, and then halves by halves, two numbers at a time.
    """
    WIDTH: tl.constexpr = min(GROUP, BLOCK_P)
    total = tl.zeros([t.shape[0], WIDTH, o.shape[0]], tl.float32)
    for first in tl.static_range(0, BLOCK_P, WIDTH):
        p = first + tl.arange(0, WIDTH)
        mask = (t < T)[:, None, None] & (p < P)[None, :, None] & (o < OUTPUTS)[None, None, :]
        places = raw + (p[None, :, None] * T + t[:, None, None]) * OUTPUTS + o[None, None, :]
        part = tl.load(places, mask=mask, other=0.0)
        for piece in tl.static_range(1, Q):
            part += tl.load(places + piece * P * T * OUTPUTS, mask=mask, other=0.0)
        total += part
    return _halved(total, WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _halved(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum over the second dimension, N, of x [B, N, O]: halves are added until one is left."""
    if N == 1:
        return tl.reshape(x, [x.shape[0], x.shape[2]])
    else:
        return _halved(tl.sum(tl.reshape(x, [x.shape[0], 2, N // 2, x.shape[2]]), 1), N // 2)


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sum(  # type: ignore[no-untyped-def]
    streams, raw, t, T, scale, base, eps, norm_eps,
    GATES: tl.constexpr, S: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Sum of token t's streams, in ascending order, by sigmoids of its first S products: [BLOCK_D] float32.

    scale and base [BLOCK_O]; GATES: how many products lie before the squares' sum.
    """
    c, o = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_O)
    sources = ()
    for source in tl.static_range(S):
        sources = _with(sources, tl.load(streams + (t * S + source) * D + c, mask=c < D, other=0.0))
    tl.debug_barrier()  # or the compiler moves these loads behind those of the parts, and their wait
    sums = tl.reshape(_summed(raw, t + tl.arange(0, 1), T, o, GATES + 1, Q, P, BLOCK_P), [BLOCK_O])
    length = tl.rsqrt(tl.sum(tl.where(o == GATES, sums, 0.0), 0) / (S * D) + norm_eps)
    gates = _sigmoid(tl.fma(sums * length, scale, base)) + eps
    total = tl.zeros([BLOCK_D], tl.float32)
    for source in tl.static_range(S):
        total = tl.fma(sources[source].to(tl.float32), tl.sum(tl.where(o == source, gates, 0.0), 0), total)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _columns(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of x [B, N], a tuple of N vectors: each in registers of a thread that has a row."""
    if N == 1:
        return (tl.reshape(x, [x.shape[0]]),)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, N // 2]), (0, 2, 1)))
        return _columns(low, N // 2) + _columns(high, N // 2)


@triton.jit  # type: ignore[untyped-decorator]
def _balanced(values, eps, FIRST: tl.constexpr, S: tl.constexpr, ITERATIONS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sinkhorn's normalisation of S by S numbers a token, values from FIRST on, source by source: a tuple of them.

    The matrix is kept as it begins, with a factor for each row and column: a thread has all of a token's, and a
    normalisation is a short chain of operations. It divides a row's numbers by factor * sum + eps, so the factor's
    inverse becomes sum + eps * inverse.
    """
    matrix = ()
    ones = ()
    for i in tl.static_range(S):
        most = values[FIRST + i * S]
        for j in tl.static_range(1, S):
            most = tl.maximum(most, values[FIRST + i * S + j])
        powers = ()
        total = tl.zeros_like(most)
        for j in tl.static_range(S):
            power = tl.exp(values[FIRST + i * S + j] - most)
            total += power
            powers = _with(powers, power)
        share = _reciprocal(total)
        for j in tl.static_range(S):
            matrix = _with(matrix, tl.fma(powers[j], share, eps))
        ones = _with(ones, tl.full(total.shape, 1.0, tl.float32))
    left, left_inverse = ones, ones
    right, right_inverse = _factors(matrix, left, ones, eps, 1, S, S)
    for _ in range(ITERATIONS - 1):
        left, left_inverse = _factors(matrix, right, left_inverse, eps, S, 1, S)
        right, right_inverse = _factors(matrix, left, right_inverse, eps, 1, S, S)
    balanced = ()
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            balanced = _with(balanced, matrix[i * S + j] * left[i] * right[j])
    return balanced


@triton.jit  # type: ignore[untyped-decorator]
def _factors(matrix, others, inverse, eps, STEP: tl.constexpr, OTHER_STEP: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors with which rows (STEP S) or columns (STEP 1) add up to 1, and their inverses."""
    factors = ()
    inverses = ()
    for i in tl.static_range(S):
        total = tl.fma(matrix[i * STEP], others[0], inverse[i] * eps)
        rest = matrix[i * STEP + OTHER_STEP] * others[1]
        for j in tl.static_range(2, S, 2):  # two chains, each half as long
            total = tl.fma(matrix[i * STEP + j * OTHER_STEP], others[j], total)
            rest = tl.fma(matrix[i * STEP + (j + 1) * OTHER_STEP], others[j + 1], rest)
        inverses = _with(inverses, total + rest)
        factors = _with(factors, _reciprocal(total + rest))
    return factors, inverses


@triton.jit  # type: ignore[untyped-decorator]
def _lead_back(  # type: ignore[no-untyped-def]
    raw, t, T, scale, base, post, comb, eps, norm_eps,
    S: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """What leads tokens t [B] back into the streams."""
    O: tl.constexpr = (2 + S) * S  # noqa: E741
    o = tl.arange(0, BLOCK_O)
    sums = _summed(raw, t, T, o, O + 1, Q, P, BLOCK_P)
    length = tl.rsqrt(tl.sum(tl.where((o == O)[None, :], sums, 0.0), 1) / (S * D) + norm_eps)
    values = _columns(tl.fma(sums * length[:, None], scale[None, :], base[None, :]), BLOCK_O)
    for s in tl.static_range(S):
        tl.store(post + t * S + s, 2 * _sigmoid(values[S + s]), mask=t < T)
    mix = _balanced(values, eps, 2 * S, S, ITERATIONS)
    for cell in tl.static_range(S * S):
        tl.store(comb + t * (S * S) + cell, mix[cell], mask=t < T)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _collapse(  # type: ignore[no-untyped-def]
    streams,  # [T, S, D]
    raw,  # [Q, P, T, (2 + S) * S + 1]
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
    Q: tl.constexpr,
    P: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """The first programs make what leads BLOCK_T tokens back, which takes longest; then one for each token collapses
    it."""
    O: tl.constexpr = (2 + S) * S  # noqa: E741
    c, o = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_O)
    own_scale, own_base = constant(scale + o, o < O), constant(base + o, o < O)
    factor = constant(norm + c, c < D)
    follow()
    blocks = tl.cdiv(T, BLOCK_T)
    program = tl.program_id(0)
    if program < blocks:
        tokens = program.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        _lead_back(
            raw, tokens, T, own_scale, own_base, post, comb, eps, norm_eps,
            S, D, Q, P, ITERATIONS, BLOCK_P, BLOCK_O,
        )  # fmt: skip
    else:
        t = (program - blocks).to(tl.int64)
        y = _weighted_sum(
            streams, raw, t, T, own_scale, own_base, eps, norm_eps, O, S, D, Q, P, BLOCK_D, BLOCK_P, BLOCK_O
        )
        # The collapsed row is a tensor of the model's dtype before it is normed: it is rounded in between.
        y = _rounded(y, collapsed.dtype.element_ty).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / D + norm_eps) * factor
        tl.store(collapsed + t * D + c, y.to(collapsed.dtype.element_ty), mask=c < D)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _collapse_last(  # type: ignore[no-untyped-def]
    streams,  # [T, S, D]
    raw,  # [Q, P, T, S + 1]
    scale,  # [1]
    base,  # [S]
    collapsed,  # [T, D]
    T,
    eps,
    norm_eps,
    S: tl.constexpr,
    D: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    c, o = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_O)
    own_scale, own_base = constant(scale, True), constant(base + o, o < S)
    follow()
    t = tl.program_id(0).to(tl.int64)
    y = _weighted_sum(streams, raw, t, T, own_scale, own_base, eps, norm_eps, S, S, D, Q, P, BLOCK_D, BLOCK_P, BLOCK_O)
    tl.store(collapsed + t * D + c, y.to(collapsed.dtype.element_ty), mask=c < D)
