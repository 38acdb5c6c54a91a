"""Which experts a token goes to: Triton form, for cuda. One program a token, one launch where torch has twenty; others
copy the token beside its routes.

Letters: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, constant, follow
from dsparkd.kernels.cuda.tile import turned_place
from dsparkd.kernels.router import RouterRule, Routes
from dsparkd.kernels.tiles import count_tiles, power_of_two

COPIED = 1024  # words of a token that one program copies
TAKEN = tl.constexpr(-(2**31))  # what an expert that is chosen already counts as: less than any score


class TritonRouter:
    """Form for cuda. Implements RouterKernel.

    turns: rows are packed with every 128 columns of x in the order of an FP4 weight's tile (cuda/tile.py).
    """

    def __init__(self, rule: RouterRule, turns: bool = False) -> None:
        self._rule, self._turns = rule, turns

    def __call__(self, logits: Tensor, input_ids: Tensor, num_live: Tensor) -> Routes:
        """See RouterKernel."""
        T = logits.shape[0]
        shares = logits.new_empty((T, self._rule.top_k))
        expert_ids = torch.empty((T, self._rule.top_k), dtype=torch.int32, device=logits.device)
        self._launch(None, logits, input_ids, num_live, Routes(shares, expert_ids))
        return Routes(shares, expert_ids)

    def pack(self, x: Tensor, logits: Tensor, input_ids: Tensor, num_live: Tensor, rows: Tensor) -> None:
        """See RouterKernel."""
        words = x.view(torch.float32)
        (T, width), k = words.shape, self._rule.top_k
        assert x.is_contiguous()
        assert rows.is_contiguous()
        assert rows.shape == (T, width + 2 * k)
        assert not self._turns or (x.itemsize == 2 and x.shape[1] % 128 == 0)
        routes = Routes(rows[:, width : width + k], rows.view(torch.int32)[:, width + k :])
        self._launch(words, logits, input_ids, num_live, routes)

    def _launch(
        self, words: Tensor | None, logits: Tensor, input_ids: Tensor, num_live: Tensor, routes: Routes
    ) -> None:
        """Write routes, both of whose rows lie as far apart, and words [T, w] right before them."""
        rule = self._rule
        T, E = logits.shape
        width = 0 if words is None else words.shape[1]
        if T:
            _route[(T, 1 + count_tiles(width, COPIED))](
                logits,
                logits if rule.bias is None else rule.bias,
                input_ids if rule.table is None else rule.table,
                input_ids,
                routes.shares,
                routes.expert_ids,
                num_live,
                rule.scaling,
                logits if words is None else words,
                EXPERTS=E,
                TOP_K=rule.top_k,
                HASHED=rule.table is not None,
                STRIDE=routes.shares.stride(0),
                WORDS=width,
                TURNS=self._turns,
                BLOCK=power_of_two(E),
                BLOCK_W=COPIED,
                num_warps=1,
                launch_pdl=EARLY,
            )


@triton.jit(do_not_specialize=["scaling"])  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits,
    bias,
    table,
    input_ids,
    shares,
    expert_ids,
    num_live,
    scaling,
    words,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HASHED: tl.constexpr,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Scores, choice, shares of one token, stored in ascending order of the experts; or a copy of its words before
    the shares: bits, whatever they mean. TURNS: of bfloat16 columns, in the order of an FP4 weight's tile."""
    expert = tl.arange(0, BLOCK)
    real = expert < EXPERTS
    if not HASHED:
        preference = constant(bias + expert, real)
    follow()
    token = tl.program_id(0).to(tl.int64)
    if WORDS:
        c = (tl.program_id(1) - 1) * BLOCK_W + tl.arange(0, BLOCK_W)
        if tl.program_id(1) > 0:
            word = tl.load(words + token * WORDS + c, mask=c < WORDS)
            place = turned_place(2 * c) // 2 if TURNS else c  # a word is two columns, that stay side by side
            tl.store(shares + token * STRIDE - WORDS + place, word, mask=c < WORDS)
            return
    x = tl.load(logits + token * EXPERTS + expert, mask=real, other=0.0)
    # Padding may hold anything, and counts as zeros; the number is used here because only so it is loaded here.
    is_live = token < tl.load(num_live)
    x = tl.where(is_live, x, 0.0)
    # The minimum of NaN is 20: every row has k experts, and all its places are written.
    power = tl.exp(tl.minimum(x, 20.0))
    # ln(1 + power) without losing a small power's digits: what the sum rounds away is made up for by the ratio.
    whole = 1.0 + power
    rounded = tl.where(whole == 1.0, 1.0, whole - 1.0)
    log = tl.where(whole == 1.0, power, tl.log(whole) * (power / rounded))
    scores = tl.sqrt(tl.where(x > 20.0, x, log))
    chosen = tl.zeros((BLOCK,), tl.int32)
    if HASHED:
        row = tl.load(input_ids + token)
        for choice in range(TOP_K):
            chosen = tl.where(expert == tl.load(table + row * TOP_K + choice), 1, chosen)
    else:
        # Bits of a float32, all but the sign turned over where it is negative, are in order as an integer: a warp
        # finds the largest integer in one instruction, the largest float32 in five steps.
        bits = (scores + preference).to(tl.int32, bitcast=True)
        left = tl.where(real, bits ^ ((bits >> 31) & 0x7FFFFFFF), TAKEN)
        for _ in range(TOP_K):
            best = tl.min(tl.where(left == tl.max(left), expert, EXPERTS - 1))  # of equal ones the lowest
            chosen = tl.where(expert == best, 1, chosen)
            left = tl.where(expert == best, TAKEN, left)
    weights = tl.where(chosen == 1, scores, 0.0)
    place = token * STRIDE + tl.cumsum(chosen, 0) - 1
    tl.store(shares + place, weights * (scaling / (tl.sum(weights) + 1e-20)), mask=chosen == 1)
    tl.store(expert_ids + place, tl.where(is_live, expert, EXPERTS), mask=chosen == 1)
