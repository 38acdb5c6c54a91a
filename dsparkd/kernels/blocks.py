"""The drafter's blocks: where they begin behind a step that runs, and their rows, each an anchor and noise behind it.

Letters: B blocks, G rows of a block, W window, T rows with padding, S ids that a step has chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockRows:
    """input_ids, positions [T] int64, padding at position 0; sources [B * G, W + G] int64, the block's own rows last;
    first [B * G] int64."""

    input_ids: Tensor
    positions: Tensor
    sources: Tensor
    first: Tensor


@dataclass(frozen=True, slots=True)
class Anchors:
    """ids, positions [B] int64: where blocks begin."""

    ids: Tensor
    positions: Tensor


def go_on(known: Anchors, windows: Tensor, ids: Tensor, firsts: Tensor, limits: Tensor) -> Anchors:
    """Anchors behind a step that verified blocks, before the host knows what it kept (executor.verify.collect).

    windows [B or more, 1 + G] int64: an anchor and its drafts. ids [S] int64: what the step chose, block b's from
    firsts[b] on. A draft stands while it is the id that was chosen in its place, at most limits[b] of them; the id
    behind those is the next anchor. firsts, limits [B] int64; limits -1: the block begins where it is known to.
    """
    if ids.is_cuda:
        from dsparkd.kernels.cuda import blocks as triton_blocks  # a cpu start imports no triton

        return triton_blocks.go_on(known, windows, ids, firsts, limits)
    B, width = known.ids.shape[0], windows.shape[1]
    place = torch.arange(width)
    chosen = ids[(firsts[:, None] + place).clamp_(max=len(ids) - 1)]  # [B, 1 + G]
    stands = (windows[:B, 1:] == chosen[:, :-1]) & (place[1:] <= limits[:, None])
    count = stands.long().cumprod(1).sum(1)
    moves = limits >= 0
    behind = chosen.gather(1, count[:, None])[:, 0]
    return Anchors(torch.where(moves, behind, known.ids), known.positions + torch.where(moves, count + 1, 0))


def lay_out(
    anchor_ids: Tensor, positions: Tensor, sources: Tensor, first: Tensor, gamma: int, noise_id: int, num_rows: int
) -> BlockRows:
    """Blocks one behind the other, and noise up to num_rows (T); on cuda there is no padding.

    anchor_ids, positions, first [B], sources [B, W]: model.dspark.DraftInputs'. gamma: G.
    """
    B, device = anchor_ids.shape[0], anchor_ids.device
    if anchor_ids.is_cuda:
        from dsparkd.kernels.cuda import blocks as triton_blocks  # a cpu start imports no triton

        assert num_rows == B * gamma
        return triton_blocks.lay_out(anchor_ids, positions, sources, first, gamma, noise_id)
    offsets = torch.arange(gamma, device=device)
    input_ids = torch.full((num_rows,), noise_id, device=device)
    input_ids[: B * gamma : gamma] = anchor_ids
    own_positions = torch.zeros_like(input_ids)
    own_positions[: B * gamma] = (positions[:, None] + offsets).view(-1)
    block = -1 - (torch.arange(0, B * gamma, gamma, device=device)[:, None] + offsets)  # [B, G]: sources of its keys
    return BlockRows(
        input_ids,
        own_positions,
        torch.cat((sources, block), 1).repeat_interleave(gamma, 0),
        first.repeat_interleave(gamma),
    )
