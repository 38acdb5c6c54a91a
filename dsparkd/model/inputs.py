"""ForwardInputs and AttentionMetadata: what a forward pass reads, laid out by executor/staging.py.

Letters: T padded tokens, B rows, W window, N closing entries, E entries a row may see.
All index tensors are int64 on the model's device. Padding tokens are the last ones; they are routed to no expert,
store nothing, and attend to nothing, or in a captured shape to themselves alone. Such a shape's padding has stores too:
to no row on cuda, whose kernels leave it out, and on the cpu to the null one, which nobody owns.

A *source* is a row by position, out of a ring as it was before this step or out of this step's own rows: the flat ring
row, 0 (the null slot's) for a position that does not exist, or -1 - token for a row of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def nowhere(device: torch.device) -> int:
    """Where a captured shape's padding stores its rows."""
    return -1 if device.type == "cuda" else 0


@dataclass(frozen=True, slots=True)
class RingStore:
    """Tokens whose rows stay in a ring: src [K] token, dst [K] flat ring row. in_order: src is 0..T-1, padding too.

    early: they may be stored before any token of the step reads the ring: no row of the plan has more than 1 + gamma
    tokens. src is 0..K-1 then.
    """

    src: Tensor
    dst: Tensor
    in_order: bool = False
    early: bool = False


@dataclass(frozen=True, slots=True)
class WindowBlock:
    """Window keys of tokens start..stop-1: sources [stop - start, W] a token, oldest first, the token's own last.

    first [stop - start]: how many of a token's W lie before position 0. all_visible: none of any token's.
    """

    start: int
    stop: int
    sources: Tensor
    first: Tensor
    all_visible: bool


@dataclass(frozen=True, slots=True)
class CompressedMetadata:
    """One compression ratio: which entries close in this step, and which each token sees.

    store: rows that stay in the ring.
    closing [N * span]: sources of each entry's rows (span 8 CSA, 128 HCA), oldest first.
    num_closing: N. closing_positions [N]: first token of the entry's own window, for RoPE.
    closing_dst [N]: flat entry slot in the pages.
    first [N] bool: which of the N have no window before their own (CSA); None where none is, and on cuda, whose kernel
    sees it by the sources.
    counts [T]: entries a token sees, 0 for padding. row_ids [T]: row of entry_slots.
    entry_slots [B, E]: flat entry slot of each entry of each row, 0 past its end; E is a multiple of KEY_TILE.
    block_counts: most entries that a token of each attention block sees.
    """

    store: RingStore
    closing: Tensor
    num_closing: int
    closing_positions: Tensor
    closing_dst: Tensor
    first: Tensor | None
    counts: Tensor
    row_ids: Tensor
    entry_slots: Tensor
    block_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions of keys for one step. csa and hca are None when the model has no such layers.

    blocks cut the real tokens so that gathered keys stay small; where the cuts lie changes no bits.
    """

    blocks: tuple[WindowBlock, ...]
    window_store: RingStore
    csa: CompressedMetadata | None
    hca: CompressedMetadata | None


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One rank's tokens of one step.

    input_ids [T] int64, positions [T] int64; tokens num_tokens..T-1 are padding. num_live [1] int64: the same number on
    the device; in a captured shape the host's is T, and tokens from num_live on are padding, too.
    logit_rows [L] int64: tokens that need logits, padded to a multiple of ROW_TILE with token 0;
    the first num_logits are real, in plan order. None: every token does.
    draft_store: tokens whose context keys the drafter keeps; None where nothing is drafted.
    """

    num_tokens: int
    num_live: Tensor
    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor | None
    num_logits: int
    attention: AttentionMetadata
    draft_store: RingStore | None = None

    @property
    def num_padded_tokens(self) -> int:
        """T: what this rank announces in ExpertExchange.begin_step."""
        return self.input_ids.shape[0]
