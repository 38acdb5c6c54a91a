"""The lightning indexer's choice of compressed entries: Triton form, for cuda.

Scores are written once, and each token's best are found by the digits of their bits, so the choice is exact: the same
scores give the torch form's entries. Scores of a token are sums over its heads in one fixed order.

Letters: n tokens, h heads, i width, B rows, E entries a row has at most, K entries kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow_alone
from dsparkd.kernels.cuda.packed import load_index_keys
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.packed import is_packed
from dsparkd.kernels.tiles import KEY_TILE, count_tiles, power_of_two

SCORE_BYTES = 256 << 20  # of scores that may lie in memory at once
SPAN = 512  # entries that one program scores
MANY_SCORES = 16384  # of a token
SELECT_BLOCKS = {True: (4096, 8), False: (1024, 8)}  # scores that one program reads at a time, and its warps: if many


class TritonIndexer:
    """Form for cuda. Implements IndexerKernel. dtype: of queries and keys."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def prepare(self, heads: int, width: int, top_k: int, kept: Tensor | None = None) -> None:
        """See IndexerKernel. The first context above top_k entries comes long after the first step."""
        float32 = torch.zeros((1, heads), dtype=torch.float32, device=self._device)
        values = torch.zeros((1, heads, width), dtype=self._dtype, device=self._device)
        most = top_k + 1
        slots = torch.zeros((1, -(-most // KEY_TILE) * KEY_TILE), dtype=torch.int64, device=self._device)
        seen = Visible(slots, slots[0, :1], slots[0, :1] + most, most)
        self.choose(values, float32, values[0] if kept is None else torch.zeros_like(kept[:1]), seen, top_k)
        chosen = torch.empty((1, -(-top_k // KEY_TILE) * KEY_TILE), dtype=torch.int64, device=self._device)
        for many in SELECT_BLOCKS:
            _keep_best_of(float32.new_zeros((1, most)), seen, top_k, chosen, many)

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
    _score[(n, count_tiles(visible.most, SPAN))](
        query,
        weights,
        keys,
        visible.slots,
        visible.rows,
        visible.counts,
        scores,
        visible.slots.shape[1],
        visible.most,
        H=h,
        D=i,
        B=keys.shape[1] if is_packed(keys) else 0,
        SPAN=SPAN,
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


def keep_best(scores: Tensor, visible: Visible, top_k: int, chosen: Tensor) -> None:
    """Write each token's best entries' slots into chosen [n, K], ascending by entry, zeros behind them."""
    _keep_best_of(scores, visible, top_k, chosen, visible.most > MANY_SCORES)


def _keep_best_of(scores: Tensor, visible: Visible, top_k: int, chosen: Tensor, many: bool) -> None:
    """The choice is exact, so it does not depend on how many scores are read at a time."""
    block, warps = SELECT_BLOCKS[many]
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
        BLOCK=block,
        num_warps=warps,
        launch_pdl=EARLY,
        sanitize_overflow=False,
    )


@triton.jit(do_not_specialize=["E", "most"])  # type: ignore[untyped-decorator]
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
    H: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    follow_alone()
    t = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * SPAN
    count = tl.load(counts + t).to(tl.int32)
    h = tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_D)
    q = tl.load(query + (t * H + h)[:, None] * D + c[None, :], mask=(h < H)[:, None] & (c < D)[None, :], other=0.0)
    q = q.to(OPERAND)
    weight = tl.load(weights + t * H + h, mask=h < H, other=0.0)
    own_slots = slots + tl.load(rows + t) * E
    for start in range(begin, min(begin + SPAN, count), BLOCK_E):
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
):
    follow_alone()
    t = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + t).to(tl.int32)
    own = scores + t * most
    own_slots = slots + tl.load(rows + t) * E
    target = chosen + t * WIDTH

    # Digit by digit, the K-th best score's bits; `room` is how many of the scores that share them so far are kept.
    # A token that sees at most K keeps all: nothing is above none.
    least = tl.full([], 0, tl.uint32)
    room = tl.full([], TOP_K, tl.int32)
    digits = tl.arange(0, 256)
    if count > TOP_K:
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

    num_kept = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        e = start + tl.arange(0, BLOCK)
        live = e < count
        key = _ordered(own, e, live)
        equal = (live & (key == least)).to(tl.int32)
        before = num_equal + tl.cumsum(equal, 0) - equal
        # Of equal scores the first ones, as long as there is room.
        kept = live & ((key > least) | ((equal > 0) & (before < room)))
        ones = kept.to(tl.int32)
        place = num_kept + tl.cumsum(ones, 0) - ones
        tl.store(target + place, tl.load(own_slots + e, mask=kept, other=0), mask=kept & (place < WIDTH))
        num_kept += tl.sum(ones, 0)
        num_equal += tl.sum(equal, 0)
    tl.device_assert(num_kept <= TOP_K, "indexer.keep_best: more entries are kept than there is room for")
    w = tl.arange(0, BLOCK_W)
    tl.store(target + w, tl.zeros([BLOCK_W], tl.int64), mask=(w >= num_kept) & (w < WIDTH))
