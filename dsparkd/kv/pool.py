"""Device storage of cached state, by layer kind: pages of compressed entries, slots of rings, boundary snapshots.

Page 0 and slot 0 are null: zero, and never written by a forward pass. A masked position gathers from them, so that
what a masked product multiplies by zero is finite whatever the live parts hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.kv.geometry import CSA_RATIO, KVGeometry, PoolSizes


class KVPool:
    """Zero-filled storage of one rank, owned by its forward thread.

    Letters: R ring rows, P pages, N entries a page, d head width, i indexer width, w row width. Where the geometry is
    packed, window, entries and keys are uint8 rows of kernels/row_layout.py, each with its own scales: what copies,
    evicts or retracts a row or a page moves its scales, too. Inner slots are slots here, except in hca_rows.
      window       [layers, slots * R, d]      model dtype; row of position p of a slot: slot * R + p mod R
      csa_rows     [csa layers, slots * R, w]  float32; value halves (A main, A index, B main, B index), then gates
      hca_rows     [hca layers, slots * R, w]  float32; value, then gate
      draft_keys   [draft stages, slots * R, d] model dtype; addressed as the window, by its own R
      csa_entries  [csa layers, P * N, d]      model dtype; entry w of a sequence: page_table[w // N] * N + w mod N
      csa_keys     [csa layers, P * N, i]      model dtype; indexer keys, addressed as the entries
      hca_entries  [hca layers, P * N, d]      model dtype
    """

    def __init__(self, geometry: KVGeometry, sizes: PoolSizes, dtype: torch.dtype, device: torch.device) -> None:
        if dtype.itemsize != geometry.kv_bytes:
            raise InvariantError(f"pool dtype {dtype} does not have the geometry's {geometry.kv_bytes} bytes")
        self.geometry = geometry
        self.sizes = sizes

        def zeros(layers: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((layers, rows, width), dtype=dtype, device=device)

        g, f32 = geometry, torch.float32
        keys, key, index_key = dtype, g.head_dim, g.index_head_dim
        if g.is_packed:
            keys, key, index_key = torch.uint8, g.key_bytes, g.index_key_bytes
        slots, pages, snapshots = sizes.num_slots, sizes.num_pages, sizes.num_snapshots
        all_slots = slots + sizes.num_inner_slots
        self.window = zeros(g.num_layers, all_slots * g.window_ring_rows, key, keys)
        self.csa_rows = zeros(g.num_csa_layers, all_slots * g.csa_ring_rows, g.csa_row_width, f32)
        self.hca_rows = zeros(g.num_hca_layers, slots * g.hca_ring_rows, g.hca_row_width, f32)
        self.draft_keys = zeros(g.num_draft_stages, all_slots * g.draft_ring_rows, g.head_dim, dtype)
        self.csa_entries = zeros(g.num_csa_layers, pages * g.csa_entries_per_page, key, keys)
        self.csa_keys = zeros(g.num_csa_layers, pages * g.csa_entries_per_page, index_key, keys)
        self.hca_entries = zeros(g.num_hca_layers, pages * g.hca_entries_per_page, key, keys)
        self.window_snapshots = zeros(g.num_layers, snapshots * g.window, key, keys)
        self.draft_snapshots = zeros(g.num_draft_stages, snapshots * g.window, g.head_dim, dtype)
        self.overlap_snapshots = zeros(g.num_csa_layers, snapshots * CSA_RATIO, g.csa_row_width // 2, f32)

    @property
    def device_bytes(self) -> int:
        """Bytes that the storage takes."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor of the pool."""
        return (
            self.window,
            self.csa_rows,
            self.hca_rows,
            self.draft_keys,
            self.csa_entries,
            self.csa_keys,
            self.hca_entries,
            self.window_snapshots,
            self.draft_snapshots,
            self.overlap_snapshots,
        )

    def reset_slot(self, slot: int) -> None:
        """Zero a slot's rings before a sequence starts in it at position 0."""
        self._check(slot, self.sizes.num_slots, first=1, what="slot")
        for rings, rows in self._rings():
            rings[:, slot * rows : (slot + 1) * rows] = 0

    def save_snapshot(self, slot: int, snapshot: int, position: int) -> None:
        """Copy what resuming at `position`, a page end, needs besides the pages before it; slot: or an inner one.

        The rings still hold it until a row at position + gamma or later has been stored.
        """
        window_rows, draft_rows, overlap_rows = self._boundary_rows(slot, snapshot, position)
        g = self.geometry
        window = slice(snapshot * g.window, (snapshot + 1) * g.window)
        overlap = slice(snapshot * CSA_RATIO, (snapshot + 1) * CSA_RATIO)
        self.window_snapshots[:, window] = self.window[:, window_rows]
        self.draft_snapshots[:, window] = self.draft_keys[:, draft_rows]
        rows = self.csa_rows[:, overlap_rows]  # [layers, 4, w]
        rows = rows.view(*rows.shape[:2], 2, 2, -1)  # [layers, 4, value | gate, A | B, d + i]
        self.overlap_snapshots[:, overlap] = rows[:, :, :, 0].flatten(2)

    def load_snapshot(self, slot: int, snapshot: int, position: int) -> None:
        """Set a slot's rings up to continue at `position`; its pages come from the page table."""
        window_rows, draft_rows, overlap_rows = self._boundary_rows(slot, snapshot, position)
        g = self.geometry
        # Rows that are not restored are stored anew before anything reads them; zeros keep no other sequence's data.
        self.reset_slot(slot)
        window = slice(snapshot * g.window, (snapshot + 1) * g.window)
        overlap = slice(snapshot * CSA_RATIO, (snapshot + 1) * CSA_RATIO)
        self.window[:, window_rows] = self.window_snapshots[:, window]
        self.draft_keys[:, draft_rows] = self.draft_snapshots[:, window]
        half = self.overlap_snapshots[:, overlap]  # [layers, 4, w / 2]
        half = half.reshape(*half.shape[:2], 2, 1, -1)  # [layers, 4, value | gate, A, d + i]
        rows = torch.cat((half, torch.zeros_like(half)), dim=3)
        self.csa_rows[:, overlap_rows] = rows.flatten(2)

    def _boundary_rows(self, slot: int, snapshot: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Flat ring rows of the window before `position`, in layers and in draft stages, and of its last CSA window."""
        g = self.geometry
        self._check(slot, self.sizes.num_slots + self.sizes.num_inner_slots, first=1, what="slot")
        self._check(snapshot, self.sizes.num_snapshots, first=0, what="snapshot")
        if position <= 0 or position % g.page_tokens:
            raise InvariantError(f"a snapshot at position {position} is not at the end of a {g.page_tokens}-token page")
        device = self.window.device
        # Once a verify step has stored rows behind the boundary, the oldest of these rows may be a newer one; no query
        # at the boundary or behind it needs that one. Rows before position 0 are the null slot's.
        rows = torch.arange(position - g.window, position, device=device)
        window_rows, draft_rows = (
            torch.where(rows < 0, 0, slot * ring + rows % ring) for ring in (g.window_ring_rows, g.draft_ring_rows)
        )
        ring, rows = g.csa_ring_rows, torch.arange(position - CSA_RATIO, position, device=device)
        return window_rows, draft_rows, slot * ring + rows % ring

    def _rings(self) -> tuple[tuple[Tensor, int], ...]:
        g = self.geometry
        return (
            (self.window, g.window_ring_rows),
            (self.csa_rows, g.csa_ring_rows),
            (self.hca_rows, g.hca_ring_rows),
            (self.draft_keys, g.draft_ring_rows),
        )

    @staticmethod
    def _check(index: int, count: int, first: int, what: str) -> None:
        if not first <= index < count:
            raise InvariantError(f"{what} {index} is outside {first}..{count - 1}")
