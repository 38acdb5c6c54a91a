"""Which experts a token goes to: Triton form, for cuda. One program a token, one launch where torch has twenty; others
copy the token beside its routes.

Letters: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.crossing import Crossing
from dsparkd.kernels.cuda.launch import EARLY, constant, follow
from dsparkd.kernels.cuda.peer import post, take
from dsparkd.kernels.router import RouterRule, Routes
from dsparkd.kernels.tiles import count_tiles, power_of_two

COPIED = 1024  # words of a token that one program copies
CROSSED = 256  # words that one copies to the peer and waits for
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
        self._launch(None, logits, input_ids, num_live, Routes(shares, expert_ids), None)
        return Routes(shares, expert_ids)

    def pack(
        self,
        x: Tensor,
        logits: Tensor,
        input_ids: Tensor,
        num_live: Tensor,
        rows: Tensor,
        crossing: Crossing | None = None,
    ) -> None:
        """See RouterKernel."""
        words = x.view(torch.float32)
        (T, width), k = words.shape, self._rule.top_k
        assert x.is_contiguous()
        assert rows.is_contiguous()
        assert rows.shape == (T, width + 2 * k)
        assert not self._turns or (x.itemsize == 2 and x.shape[1] % 128 == 0)
        routes = Routes(rows[:, width : width + k], rows.view(torch.int32)[:, width + k :])
        self._launch(words, logits, input_ids, num_live, routes, crossing)

    def _launch(
        self,
        words: Tensor | None,
        logits: Tensor,
        input_ids: Tensor,
        num_live: Tensor,
        routes: Routes,
        crossing: Crossing | None,
    ) -> None:
        """Write routes, both of whose rows lie as far apart, and words [T, w] right before them."""
        rule = self._rule
        T, E = logits.shape
        width = 0 if words is None else words.shape[1]
        num_peers = 0 if crossing is None else crossing.received.shape[0]
        block = COPIED if crossing is None else CROSSED
        if T:
            _route[(max(T, num_peers), 1 + count_tiles(width, block))](
                logits,
                logits if rule.bias is None else rule.bias,
                input_ids if rule.table is None else rule.table,
                input_ids,
                routes.shares,
                routes.expert_ids,
                num_live,
                rule.scaling,
                logits if words is None else words,
                T,
                # Without a crossing nothing is loaded from here.
                *((num_live,) * 4 if crossing is None else _places(crossing)),
                num_peers,
                0 if crossing is None else crossing.index,
                0 if crossing is None else crossing.num_spins,
                CROSSES=crossing is not None,
                EXPERTS=E,
                TOP_K=rule.top_k,
                HASHED=rule.table is not None,
                STRIDE=routes.shares.stride(0),
                WORDS=width,
                TURNS=self._turns,
                BLOCK=power_of_two(E),
                BLOCK_W=block,
                BLOCK_R=power_of_two(2 * rule.top_k),
                num_warps=1,
                launch_pdl=EARLY,
                sanitize_overflow=False,
            )


def _places(crossing: Crossing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return crossing.received, crossing.theirs, crossing.ours, crossing.number


@triton.jit(  # type: ignore[untyped-decorator]
    debug=True, do_not_specialize=["scaling", "num_tokens", "num_peers", "index", "spins"]
)
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
    num_tokens,
    received,
    theirs,
    ours,
    step_number,
    num_peers,
    index,
    spins,
    CROSSES: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HASHED: tl.constexpr,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Scores, choice, shares of one token, stored in ascending order of the experts; or a copy of its words before
    the shares: bits, whatever they mean. TURNS: of bfloat16 columns, in the order of an FP4 weight's tile. CROSSES: to
    the peer, too, whose words at the same place are waited for."""
    expert = tl.arange(0, BLOCK)
    real = expert < EXPERTS
    if not HASHED:
        preference = constant(bias + expert, real)
    follow()
    token = tl.program_id(0).to(tl.int64)
    if CROSSES:
        number = tl.load(step_number) + index
        theirs += token * STRIDE
        ours += token * STRIDE
        received += token * STRIDE
    if WORDS:
        c = (tl.program_id(1) - 1) * BLOCK_W + tl.arange(0, BLOCK_W)
        if tl.program_id(1) > 0:
            goes = c < tl.where(token < num_tokens, WORDS, 0)
            # A word is two columns, which stay side by side: tile.input_columns in words.
            source = c // 64 * 64 + c % 4 * 16 + c % 64 // 8 * 2 + c % 8 // 4 if TURNS else c
            word = tl.load(words + token * WORDS + source, mask=goes)
            tl.store(shares + token * STRIDE - WORDS + c, word, mask=goes)
            if CROSSES:
                post(theirs + c, word, number, goes)
                comes = c < tl.where(token < num_peers, WORDS, 0)
                tl.store(received + c, take(ours + c, number, comes, spins), mask=comes)
            return
    is_token = token < num_tokens
    real = expert < tl.where(is_token, EXPERTS, 0)
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
        row = tl.load(input_ids + token, mask=is_token, other=0)
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
    weights *= scaling / (tl.sum(weights) + 1e-20)
    ids = tl.where(is_live, expert, EXPERTS)
    place, is_chosen = tl.cumsum(chosen, 0) - 1, chosen == tl.where(is_token, 1, 2)
    tl.store(shares + token * STRIDE + place, weights, mask=is_chosen)
    tl.store(expert_ids + token * STRIDE + place, ids, mask=is_chosen)
    if CROSSES:
        post(theirs + WORDS + place, weights, number, is_chosen)
        post(theirs + WORDS + TOP_K + place, ids, number, is_chosen)
        route = WORDS + tl.arange(0, BLOCK_R)
        comes = route < tl.where(token < num_peers, STRIDE, 0)
        tl.store(received + route, take(ours + route, number, comes, spins), mask=comes)
