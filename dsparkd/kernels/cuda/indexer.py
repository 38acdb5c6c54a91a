"""The lightning indexer's choice of compressed entries: Triton form, for cuda.

Scores are written once, and each token's best are found by their bits: one by one where a program can hold all scores
of a token, else by digits of eight. So the choice is exact: the same scores give the torch form's entries. Scores of a
token are sums over its heads in one fixed order.

Letters: n tokens, h heads, i width, B rows, E entries a row has at most, K entries kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.compiling import ahead
from dsparkd.kernels.cuda.launch import EARLY, follow_alone
from dsparkd.kernels.cuda.packed import load_index_keys
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.packed import is_packed
from dsparkd.kernels.tiles import KEY_TILE, count_tiles, power_of_two

SCORE_BYTES = 256 << 20  # of scores that may lie in memory at once
SPAN, LONG_SPAN = 512, 2048  # entries that one program scores, and where many tokens fill the device anyway
MANY_TOKENS = 1024
HELD_SCORES = 2048  # of a token, that a program holds
MANY_SCORES = 16384


class TritonIndexer:
    """Form for cuda. Implements IndexerKernel. dtype: of queries and keys."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    @ahead()
    def prepare(self, heads: int, width: int, top_k: int, kept: Tensor | None = None) -> None:
        """See IndexerKernel. The first context above top_k entries comes long after the first step."""
        float32 = torch.zeros((1, heads), dtype=torch.float32, device=self._device)
        values = torch.zeros((1, heads, width), dtype=self._dtype, device=self._device)
        most = top_k + 1
        slots = torch.zeros((1, -(-most // KEY_TILE) * KEY_TILE), dtype=torch.int64, device=self._device)
        seen = Visible(slots, slots[0, :1], slots[0, :1] + most, most)
        self.choose(values, float32, values[0] if kept is None else torch.zeros_like(kept[:1]), seen, top_k)
        chosen = torch.empty((1, -(-top_k // KEY_TILE) * KEY_TILE), dtype=torch.int64, device=self._device)
        for way in (_HELD, _FEW, _MANY):
            _keep_best_of(float32.new_zeros((1, most)), seen, top_k, chosen, way)

    def choose(self, query: Tensor, weights: Tensor, keys: Tensor, visible: Visible, top_k: int) -> Tensor:
        """See IndexerKernel."""
        n = query.shape[0]
        chosen = torch.empty((n, -(-top_k // KEY_TILE) * KEY_TILE), dtype=torch.int64, device=query.device)
        # Whole sixteens: Triton compiles anew for pointers that are aligned to less than that, wherever a part begins.
        step = max(16, SCORE_BYTES // (4 * visible.most) // 16 * 16)
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            seen = Visible(visible.slots, visible.rows[part], visible.counts[part], visible.most)
            keep_best(score(query[part], weights[part], keys, seen), seen, top_k, chosen[part])
        return chosen


def score(query: Tensor, weights: Tensor, keys: Tensor, visible: Visible) -> Tensor:
    """Scores [n, most] float32: sum_h weights_h * max(0, query_h . key) for each entry that a token sees; the rest of
    a row is not written."""
    n, h, i = query.shape
    scores = torch.empty((n, visible.most), dtype=torch.float32, device=query.device)
    span = LONG_SPAN if n >= MANY_TOKENS else SPAN  # an entry's score is its own: no bits change
    _score[(n, count_tiles(visible.most, span))](
        query,
        weights,
        keys,
        visible.slots,
        visible.rows,
        visible.counts,
        scores,
        visible.slots.shape[1],
        visible.most,
        span,
        H=h,
        D=i,
        B=keys.shape[1] if is_packed(keys) else 0,
        BLOCK_H=max(16, power_of_two(h)),
        BLOCK_D=max(16, power_of_two(i)),
        BLOCK_E=128,
        OPERAND=operand(query),
        PRECISION=precision(query),
        num_warps=4,
        num_stages=3,
        launch_pdl=EARLY,
    )
    return scores


@dataclass(frozen=True, slots=True)
class _Way:
    """Scores that one program of `keep_best` reads at a time, its warps, and whether these are all of a token."""

    block: int
    warps: int
    held: bool


_HELD, _FEW, _MANY = _Way(HELD_SCORES, 4, held=True), _Way(1024, 8, held=False), _Way(4096, 8, held=False)


def keep_best(scores: Tensor, visible: Visible, top_k: int, chosen: Tensor) -> None:
    """Write each token's best entries' slots into chosen [n, K], ascending by entry, zeros behind them."""
    few = _HELD if visible.most <= HELD_SCORES else _FEW
    _keep_best_of(scores, visible, top_k, chosen, _MANY if visible.most > MANY_SCORES else few)


def _keep_best_of(scores: Tensor, visible: Visible, top_k: int, chosen: Tensor, way: _Way) -> None:
    """The choice is exact, so it does not depend on how many scores are read at a time."""
    _keep_best[(scores.shape[0],)](
        scores,
        visible.slots,
        visible.rows,
        visible.counts,
        chosen,
        visible.slots.shape[1],
        visible.most,
        TOP_K=top_k,
        WIDTH=chosen.shape[1],
        BLOCK_W=power_of_two(chosen.shape[1]),
        BLOCK=way.block,
        HELD=way.held,
        num_warps=way.warps,
        launch_pdl=EARLY,
        sanitize_overflow=False,
    )


@triton.jit(do_not_specialize=["E", "most", "span"])  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    query,  # [n, h, i]
    weights,  # [n, h]
    keys,  # [*, i], or packed [*, B]
    slots,  # [B, E]
    rows,  # [n]
    counts,  # [n]
    scores,  # [n, most]
    E,
    most,
    span,  # entries of a program
    H: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    follow_alone()
    t = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * span
    count = tl.load(counts + t).to(tl.int32)
    h = tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_D)
    q = tl.load(query + (t * H + h)[:, None] * D + c[None, :], mask=(h < H)[:, None] & (c < D)[None, :], other=0.0)
    q = q.to(OPERAND)
    weight = tl.load(weights + t * H + h, mask=h < H, other=0.0)
    own_slots = slots + tl.load(rows + t) * E
    for start in range(begin, min(begin + span, count), BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        live = e < count
        slot = tl.load(own_slots + e, mask=live, other=0)
        if B > 0:
            key = load_index_keys(keys, slot, live, D, B, OPERAND)
        else:
            row = keys + slot * D
            key = tl.load(row[:, None] + c[None, :], mask=live[:, None] & (c < D)[None, :], other=0.0).to(OPERAND)
        # Entries by heads: a thread has many heads of an entry, and adds them without the others.
        products = tl.dot(key, tl.trans(q), input_precision=PRECISION)
        total = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
        tl.store(scores + t * most + e, total, mask=live)


@triton.jit
def _ordered(scores, e, live):  # type: ignore[no-untyped-def]
    """Scores of entries e as uint32 in the same order; both zeros are one number."""
    score = tl.load(scores + e, mask=live, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit(debug=True, do_not_specialize=["E", "most"])  # type: ignore[untyped-decorator]
def _keep_best(  # type: ignore[no-untyped-def]
    scores,  # [n, most]
    slots,  # [B, E]
    rows,  # [n]
    counts,  # [n]
    chosen,  # [n, WIDTH]
    E,
    most,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    follow_alone()
    t = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + t).to(tl.int32)
    own = scores + t * most
    own_slots = slots + tl.load(rows + t) * E
    target = chosen + t * WIDTH

    # From above, the K-th best score's bits; `room` is how many of the scores that equal it are kept. A token that sees
    # at most K keeps all: nothing is above none.
    least = tl.full([], 0, tl.uint32)
    room = tl.full([], TOP_K, tl.int32)
    if count > TOP_K:
        if HELD:
            e = tl.arange(0, BLOCK)
            keys = tl.where(e < count, _ordered(own, e, e < count), 0)  # below every score
            bit = tl.full([], 0x80000000, tl.uint32)
            num_from_here = count
            while (bit > 0) & (num_from_here > TOP_K):
                num_more = tl.sum((keys >= (least | bit)).to(tl.int32), 0)
                if num_more >= TOP_K:
                    least = least | bit
                    num_from_here = num_more
                bit = bit >> 1
            room -= tl.sum((keys > least).to(tl.int32), 0)
        else:
            digits = tl.arange(0, 256)
            for shift in tl.static_range(24, -1, -8):
                numbers = tl.zeros([256], tl.int32)
                for start in range(0, count, BLOCK):
                    e = start + tl.arange(0, BLOCK)
                    key = _ordered(own, e, e < count)
                    # Shifted in two steps: by 32 at once is undefined.
                    alike = (e < count) & (((key >> shift) >> 8) == least)
                    digit = ((key >> shift) & 255).to(tl.int32)
                    numbers += tl.histogram(digit, 256, mask=alike)
                from_here = tl.sum(numbers, 0) - tl.cumsum(numbers, 0) + numbers  # with this digit or a higher one
                digit_kept = tl.max(tl.where(from_here >= room, digits, 0), 0)
                room -= tl.sum(tl.where(digits > digit_kept, numbers, 0), 0)
                least = (least << 8) | digit_kept.to(tl.uint32)

    num_above = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        e = start + tl.arange(0, BLOCK)
        live = e < count
        key = _ordered(own, e, live)
        above, equal = live & (key > least), live & (key == least)
        # How many stand before is counted in halves of a number. Of equal ones the first are kept, if there is room.
        ones = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = tl.cumsum(ones, 0) - ones
        above_before, equal_before = num_above + (before & 0xFFFF), num_equal + (before >> 16)
        kept = above | (equal & (equal_before < room))
        place = above_before + tl.minimum(equal_before, room)
        tl.store(target + place, tl.load(own_slots + e, mask=kept, other=0), mask=kept & (place < WIDTH))
        both = tl.sum(ones, 0)
        num_above += both & 0xFFFF
        num_equal += both >> 16
    num_kept = num_above + tl.minimum(num_equal, room)
    tl.device_assert(num_kept <= TOP_K, "indexer.keep_best: more entries are kept than there is room for")
    w = tl.arange(0, BLOCK_W)
    tl.store(target + w, tl.zeros([BLOCK_W], tl.int64), mask=(w >= num_kept) & (w < WIDTH))
