"""Plan -> ForwardInputs: every index a forward pass reads, made from host-side lengths with numpy.

Nothing here reads a device value, so building inputs never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import Plan
from dsparkd.executor.upload import upload
from dsparkd.kernels.sources import Origin, sources
from dsparkd.kernels.tiles import KEY_TILE, ROW_TILE
from dsparkd.kv.geometry import CSA_RATIO, HCA_RATIO, KVGeometry
from dsparkd.model.inputs import (
    AttentionMetadata,
    CompressedMetadata,
    ForwardInputs,
    RingStore,
    WindowBlock,
)

Ints = NDArray[np.int64]

BLOCK_TOKENS = 256  # tokens whose keys a kernel may gather at once
BLOCK_BYTES = 64 << 20  # and the bytes that those keys may take, in float32


def pad_rows(count: int) -> int:
    """Round up to whole row tiles; 0 stays 0."""
    return -(-count // ROW_TILE) * ROW_TILE


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts whose ids only the device knows. windows [B, W] int64 on it: of each row its anchor, then its drafts.

    lengths [B]: how many of them are the last tokens of the row; the plan has room for these, and the host does not
    read what stands there.
    """

    windows: Tensor
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Host-side facts of a step: per row [B] and per padded token [T]; padding is at position 0 of the null slot."""

    slots: Ints
    starts: Ints
    ends: Ints
    offsets: Ints  # first token of each row
    row: Ints  # row of each token, 0 for padding
    slot: Ints
    start: Ints
    offset: Ints  # token that holds position `start` of the same row
    position: Ints
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Inner:
    """Page ends inside chunks [S], whose snapshots need rows over which the rings go on: of each its position, the row
    of the plan that it lies in, and the slot whose rings take those rows."""

    positions: Ints
    rows: Ints
    slots: Ints


class Stager:
    """Builds the inputs of one rank's steps for one cache geometry and device."""

    def __init__(self, geometry: KVGeometry, index_topk: int, device: torch.device) -> None:
        self._geometry = geometry
        self._index_topk = index_topk
        self._device = device

    def stage(
        self,
        plan: Plan,
        num_padded: int | None = None,
        drafted: Drafted | None = None,
        before: Tensor | None = None,
    ) -> ForwardInputs:
        """Lay one plan out. An empty plan gives zero tokens. Raises InvariantError for a row that cannot be right.

        num_padded: tokens with padding, whole row tiles; None for as many as the rows need. before [S] int64 on the
        device: the ids that rows follow. No host sync.
        """
        check(plan, self._geometry)
        tokens = lay_out(plan, pad_rows(plan.num_tokens) if num_padded is None else num_padded)
        input_ids = np.zeros(len(tokens.position), np.int64)
        input_ids[: tokens.num_tokens] = np.fromiter((i for row in plan.rows for i in row.input_ids), np.int64)
        inner = self._inner(plan, tokens)
        logit_rows = _logit_rows(plan, tokens)
        padded_logits = np.zeros(pad_rows(len(logit_rows)), np.int64)
        padded_logits[: len(logit_rows)] = logit_rows
        g = self._geometry
        draft_ring = g.draft_ring_rows if g.num_draft_stages else 0
        return ForwardInputs(
            num_tokens=tokens.num_tokens,
            num_live=self._tensor(np.array([tokens.num_tokens], np.int64)),
            input_ids=self._follow(self._input_ids(input_ids, tokens, drafted), plan, tokens, before),
            positions=self._tensor(tokens.position),
            logit_rows=self._tensor(padded_logits),
            num_logits=len(logit_rows),
            attention=self._attention(plan, tokens, inner),
            draft_store=self._store(tokens, draft_ring, inner, g.window) if draft_ring else None,
        )

    def _inner(self, plan: Plan, tokens: Tokens) -> Inner:
        """Raises InvariantError for a page end that has not a window of its chunk's tokens before it."""
        row_of = {row.slot: index for index, row in enumerate(plan.rows)}
        found = [
            (save.position, row_of[save.slot], save.inner_slot)
            for save in plan.snapshot_saves
            if save.inner_slot is not None
        ]
        positions, rows, slots = np.array(found, np.int64).reshape(-1, 3).T
        if ((positions - self._geometry.window < tokens.starts[rows]) | (positions >= tokens.ends[rows])).any():
            raise InvariantError(f"snapshots at {positions}, in chunks from {tokens.starts[rows]} on")
        return Inner(positions, rows, slots)

    def _input_ids(self, known: Ints, tokens: Tokens, drafted: Drafted | None) -> Tensor:
        """Bring the ids that the host knows, and put the drafts in their places."""
        input_ids = self._tensor(known)
        if drafted is None:
            return input_ids
        lengths = np.array(drafted.lengths, np.int64)
        row, column = ranges(np.ones_like(lengths), 1 + lengths)  # of windows
        ends = tokens.offsets + tokens.ends - tokens.starts
        place = (ends - lengths)[row] + column - 1
        ids = drafted.windows.view(-1).index_select(0, self._tensor(row * drafted.windows.shape[1] + column))
        return input_ids.index_copy_(0, self._tensor(place), ids)

    def _follow(self, input_ids: Tensor, plan: Plan, tokens: Tokens, before: Tensor | None) -> Tensor:
        """Put the ids that only the device knows in their places."""
        rows, picks = followed(plan)
        if not len(rows):
            return input_ids
        if before is None:
            raise InvariantError(f"{len(rows)} rows follow the ids of a step, and there are none")
        ids = before.index_select(0, self._tensor(picks))
        return input_ids.index_copy_(0, self._tensor(tokens.offsets[rows]), ids)

    def _attention(self, plan: Plan, tokens: Tokens, inner: Inner) -> AttentionMetadata:
        g = self._geometry
        csa_counts = (tokens.position + 1) // CSA_RATIO
        hca_counts = (tokens.position + 1) // HCA_RATIO
        for counts in (csa_counts, hca_counts):
            counts[tokens.num_tokens :] = 0
        cuts = self._cut_blocks(csa_counts[: tokens.num_tokens], hca_counts[: tokens.num_tokens])
        csa = hca = None
        if g.num_csa_layers:
            csa = self._compressed(plan, tokens, CSA_RATIO, csa_counts, cuts, inner)
        if g.num_hca_layers:
            hca = self._compressed(plan, tokens, HCA_RATIO, hca_counts, cuts, None)
        return AttentionMetadata(
            blocks=tuple(self._window_block(tokens, start, stop) for start, stop in cuts),
            window_store=self._store(tokens, g.window_ring_rows, inner, g.window),
            csa=csa,
            hca=hca,
        )

    def _cut_blocks(self, csa_counts: Ints, hca_counts: Ints) -> list[tuple[int, int]]:
        """Cut the tokens so that the keys and scores of one block stay within BLOCK_BYTES.

        Only the cpu's forms gather keys; the kernels of a device read them where they lie, in one block.
        """
        g = self._geometry
        num_tokens = len(csa_counts)
        if not num_tokens:
            return []
        if self._device.type != "cpu":
            return [(0, num_tokens)]
        longest_csa = int(csa_counts.max()) if g.num_csa_layers else 0
        longest_hca = int(hca_counts.max()) if g.num_hca_layers else 0
        kept = g.window + max(min(longest_csa, self._index_topk), longest_hca)
        scored = longest_csa if longest_csa > self._index_topk else 0
        token_bytes = 4 * (kept * g.head_dim + scored * g.index_head_dim)
        step = max(1, min(BLOCK_TOKENS, BLOCK_BYTES // token_bytes))
        return [(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]

    def _window_block(self, tokens: Tokens, start: int, stop: int) -> WindowBlock:
        window = self._geometry.window
        part = slice(start, stop)
        position = tokens.position[part]
        origin = Origin(
            self._geometry.window_ring_rows,
            self._tensor(tokens.slot[part]),
            self._tensor(tokens.start[part]),
            self._tensor(tokens.offset[part]),
        )
        first = np.maximum(window - 1 - position, 0)
        # 128 numbers a token: the host would take as long for them as for all the rest, and the device waits for it.
        wanted = sources(self._tensor(position), 1 - window, window, origin)  # [n, W]
        return WindowBlock(start, stop, wanted, self._tensor(first), all_visible=not first.any())

    def _compressed(
        self,
        plan: Plan,
        tokens: Tokens,
        ratio: int,
        counts: Ints,
        cuts: list[tuple[int, int]],
        inner: Inner | None,
    ) -> CompressedMetadata:
        """inner: None where no row of the ring outlives a page end."""
        g = self._geometry
        csa = ratio == CSA_RATIO
        ring = g.csa_ring_rows if csa else g.hca_ring_rows
        page_entries = g.csa_entries_per_page if csa else g.hca_entries_per_page
        entry_slots = _entry_slots(plan, tokens.ends // ratio, page_entries)
        closing_row, closing = ranges(tokens.starts // ratio, tokens.ends // ratio)
        span = np.arange(-ratio if csa else 0, ratio)  # CSA entries mix the window before their own in
        wanted = (closing * ratio)[:, None] + span  # [N, span]
        pick = closing_row[:, None]
        first = closing == 0
        return CompressedMetadata(
            store=self._store(tokens, ring, inner, ratio),
            closing=self._sources(wanted, ring, tokens.slots[pick], tokens.starts[pick], tokens.offsets[pick]).view(-1),
            num_closing=len(closing),
            closing_positions=self._tensor(closing * ratio),
            closing_dst=self._tensor(entry_slots[closing_row, closing]),
            first=torch.from_numpy(first) if csa and first.any() and self._device.type == "cpu" else None,
            counts=self._tensor(counts),
            row_ids=self._tensor(tokens.row),
            entry_slots=self._tensor(entry_slots),
            block_counts=tuple(int(counts[start:stop].max()) for start, stop in cuts),
        )

    def _sources(self, wanted: Ints, ring: int, slot: Ints, start: Ints, offset: Ints) -> Tensor:
        """Say where each wanted position lies: in the chunk from `start` on, in the ring before it, nowhere below 0."""
        in_ring = np.where(wanted < 0, 0, slot * ring + wanted % ring)
        return self._tensor(np.where(wanted >= start, start - offset - wanted - 1, in_ring))

    def _store(self, tokens: Tokens, ring: int, inner: Inner | None, num_before: int) -> RingStore:
        """Keep the last `ring` tokens of each row, and so many before each page end inside a chunk."""
        n = tokens.num_tokens
        position = tokens.position[:n]
        src = np.flatnonzero(position >= tokens.ends[tokens.row[:n]] - ring)
        dst = tokens.slot[src] * ring + position[src] % ring
        in_order = len(src) == len(tokens.position)
        early = int((tokens.ends - tokens.starts).max(initial=0)) <= 1 + self._geometry.gamma
        if inner is not None and len(inner.positions):
            which, before = ranges(inner.positions - num_before, inner.positions)
            row = inner.rows[which]
            src = np.concatenate((src, tokens.offsets[row] + before - tokens.starts[row]))
            dst = np.concatenate((dst, inner.slots[which] * ring + before % ring))
            in_order = early = False
        return RingStore(self._tensor(src), self._tensor(dst), in_order, early)

    def _tensor(self, array: Ints) -> Tensor:
        return upload(array, self._device)


def check(plan: Plan, geometry: KVGeometry) -> None:
    """Raise InvariantError for a row that cannot be right."""
    for row in plan.rows:
        end = row.start + len(row.input_ids)
        if row.slot < 1 or row.start < 0 or not row.input_ids or not 0 <= row.num_logits <= len(row.input_ids):
            raise InvariantError(f"request {row.request_id}: a row at slot {row.slot}, start {row.start}")
        if len(row.page_table) * geometry.page_tokens < end:
            raise InvariantError(f"request {row.request_id}: {len(row.page_table)} pages do not cover {end} tokens")


def followed(plan: Plan) -> tuple[Ints, Ints]:
    """Rows whose anchor only the device knows, and which of the ids of the step before it is."""
    found = [(index, row.follows) for index, row in enumerate(plan.rows) if row.follows is not None]
    pairs = np.array(found, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def lay_out(plan: Plan, num_padded: int) -> Tokens:
    """Flatten the rows, one behind the other, and pad."""
    rows = plan.rows
    lens = np.array([len(row.input_ids) for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    slots = np.array([row.slot for row in rows], np.int64)
    offsets = np.cumsum(lens) - lens
    num_tokens = int(lens.sum())
    num_padding = num_padded - num_tokens
    row, position = ranges(starts, starts + lens)

    def padded(values: Ints, padding: Ints) -> Ints:
        return np.concatenate((values, padding))

    zeros = np.zeros(num_padding, np.int64)
    return Tokens(
        slots=slots,
        starts=starts,
        ends=starts + lens,
        offsets=offsets,
        row=padded(row, zeros),
        slot=padded(slots[row], zeros),
        start=padded(starts[row], zeros),
        offset=padded(offsets[row], np.arange(num_tokens, num_tokens + num_padding)),
        position=padded(position, zeros),
        num_tokens=num_tokens,
    )


def ranges(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Concatenate range(low[b], high[b]) over b; returns b and the value of each element."""
    lens = high - low
    owner = np.repeat(np.arange(len(lens)), lens)
    within = np.arange(int(lens.sum())) - np.repeat(np.cumsum(lens) - lens, lens)
    return owner, low[owner] + within


def _entry_slots(plan: Plan, num_entries: Ints, page_entries: int) -> Ints:
    """[B, E]: flat slot of each entry of each row, the null page's past its last."""
    longest = int(num_entries.max(initial=0))
    width = -(-longest // KEY_TILE) * KEY_TILE
    num_pages = -(-width // page_entries)
    pages = np.zeros((len(plan.rows), num_pages), np.int64)
    for b, row in enumerate(plan.rows):
        table = row.page_table[:num_pages]
        pages[b, : len(table)] = table
    slots = pages[:, :, None] * page_entries + np.arange(page_entries)
    slots = slots.reshape(len(plan.rows), num_pages * page_entries)[:, :width]
    return np.where(np.arange(width) < num_entries[:, None], slots, 0)


def _logit_rows(plan: Plan, tokens: Tokens) -> Ints:
    """Tokens that need logits: the last num_logits of each row."""
    lasts = tokens.offsets + tokens.ends - tokens.starts
    counts = np.array([row.num_logits for row in plan.rows], np.int64)
    return ranges(lasts - counts, lasts)[1]
