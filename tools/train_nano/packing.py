"""What a packed batch's forward pass needs to know: positions, rotations, masks.

Documents start at multiples of 4 inside a row, so every ratio-4 window is four neighbouring tokens; ratio-128 windows
start anywhere, and the rows of each are gathered.

Letters: B rows, L tokens a row, N = L / 128 query blocks, T = L / 4 CSA entries, C = L / 128 HCA entries at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsparkd.model.config import ModelConfig
from dsparkd.model.layers import rotary_frequencies

BLOCK = 128  # queries a block; the sliding window may not be longer
CSA, HCA = 4, 128


class Angles(NamedTuple):
    """cos and sin [B, *, r / 2] float32 of one rotation base."""

    cos: Tensor
    sin: Tensor


class Packing(NamedTuple):
    """Made once a batch.

    window [B, N, 1, BLOCK, 2 * BLOCK] bool: whether a query sees a key of its block or the block before.
    csa [B, N, 1, BLOCK, T], hca [B, N, 1, BLOCK, C] bool: whether it sees an entry.
    csa_first [B, T] bool: entries without a window before theirs in their document.
    hca_rows [B, C, 128] int64: the tokens of each HCA entry. query_rows [B, N, Q] int64: queries, counted inside
    their block, on which the indexer is trained.
    """

    main: Angles
    compressed: Angles
    csa_angles: Angles
    hca_angles: Angles
    window: Tensor
    csa: Tensor
    csa_first: Tensor
    hca: Tensor
    hca_rows: Tensor
    query_rows: Tensor


def positions_of(document: Tensor) -> Tensor:
    """document [B, L] -> each token's position in its document [B, L] int64."""
    L = document.shape[1]
    index = torch.arange(L, device=document.device).expand_as(document)
    starts = torch.ones_like(document, dtype=torch.bool)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values


def pack(document: Tensor, wanted: Tensor, config: ModelConfig, num_queries: int = 16) -> Packing:
    """document [B, L] int64, -1 where padded; wanted [B, L] bool: tokens whose indexer queries come first."""
    B, L = document.shape
    device = document.device
    N, T, C = L // BLOCK, L // CSA, L // HCA
    position = positions_of(document)
    index = torch.arange(L, device=device)

    blocks = document.view(B, N, BLOCK)
    before = torch.cat((torch.full_like(blocks[:, :1], -2), blocks[:, :-1]), 1)
    keys = torch.cat((before, blocks), 2)  # [B, N, 2 * BLOCK]
    distance = torch.arange(BLOCK, device=device)[:, None] + BLOCK - torch.arange(2 * BLOCK, device=device)
    near = (distance >= 0) & (distance < config.sliding_window)
    window = near & (blocks[..., None] == keys[:, :, None])

    entry_document = document[:, ::CSA]
    closed = torch.arange(T, device=device) * CSA + CSA - 1
    csa = (blocks[..., None] == entry_document[:, None, None]) & (closed <= index.view(1, N, BLOCK, 1))

    closing = (position % HCA == HCA - 1) & (document >= 0)
    order = closing.cumsum(1) - 1
    last = torch.full((B, C + 1), L, device=device)  # the spare column takes what closes nothing
    last.scatter_(1, torch.where(closing, order, C), index.expand(B, L))
    last = last[:, :C]
    last = torch.where(torch.arange(C, device=device) < closing.sum(1, keepdim=True), last, L)
    hca_rows = (last[..., None] - HCA + 1 + torch.arange(HCA, device=device)).clamp(0, L - 1)
    hca_document = torch.where(last < L, document.gather(1, last.clamp(max=L - 1)), -3)
    hca = (blocks[..., None] == hca_document[:, None, None]) & (last[:, None, None] <= index.view(1, N, BLOCK, 1))

    priority = wanted.view(B, N, BLOCK).float() + torch.rand((B, N, BLOCK), device=device)
    return Packing(
        main=_angles(position, config, compressed=False),
        compressed=_angles(position, config, compressed=True),
        csa_angles=_angles(position[:, ::CSA], config, compressed=True),
        hca_angles=_angles(position.gather(1, hca_rows[..., 0]), config, compressed=True),
        window=window[:, :, None],
        csa=csa[:, :, None],
        csa_first=position[:, ::CSA] == 0,
        hca=hca[:, :, None],
        hca_rows=hca_rows,
        query_rows=priority.topk(num_queries, 2).indices,
    )


def _angles(position: Tensor, config: ModelConfig, *, compressed: bool) -> Angles:
    base, scaling = (config.compress_rope_theta, config.rope_scaling) if compressed else (config.rope_theta, None)
    frequencies = rotary_frequencies(config.qk_rope_head_dim, base, scaling).to(position.device)
    angles = position.float()[..., None] * frequencies
    return Angles(angles.cos(), angles.sin())
