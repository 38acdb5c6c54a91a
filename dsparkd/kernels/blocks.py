"""The drafter's blocks laid out as rows: each an anchor and noise behind it, all of which see the same keys.

Letters: B blocks, G rows of a block, W window, T rows with padding.
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
