"""Sizes of cached state: what one page, one slot and one snapshot hold, in rows and bytes. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsparkd.config import Config
from dsparkd.errors import ConfigError, InvariantError
from dsparkd.kernels import row_layout

CSA_RATIO = 4  # tokens per compressed entry of a CSA layer; its entries overlap by one window
HCA_RATIO = 128  # tokens per compressed entry of an HCA layer
ROW_BYTES = 4  # compressor rows are float32 whatever the model's dtype: rounding them would break resumption


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Dimensions of the per-sequence state of one model.

    Widths are in elements, `kv_bytes` is the size of one window or compressed element. `gamma` is the drafter's
    block size, 0 without a drafter: rings keep that many more rows, so that rejected rows overwrite nothing needed, and
    a step of up to 1 + gamma tokens a row may store its rows before it reads the ring.
    num_draft_stages: stages whose context keys are kept, 0 where nothing is drafted.
    is_packed: window, entries and indexer keys are rows of the official encoding (kernels/row_layout.py), whose last
    rotary_dim columns are kept as they are; a drafter's keys are not. Raises ConfigError where it has no such rows.
    """

    num_layers: int
    num_csa_layers: int
    num_hca_layers: int
    head_dim: int
    index_head_dim: int
    window: int
    gamma: int
    page_tokens: int
    kv_bytes: int
    num_draft_stages: int = 0
    rotary_dim: int = 0
    is_packed: bool = False

    def __post_init__(self) -> None:
        if self.page_tokens <= 0 or self.page_tokens % HCA_RATIO:
            raise ConfigError("kv.page_tokens", self.page_tokens, f"use a multiple of {HCA_RATIO}")
        if self.page_tokens < self.window:  # a snapshot inside a chunk is of the chunk's own rows
            raise ConfigError("kv.page_tokens", self.page_tokens, f"use at least the model's window of {self.window}")
        index, step = self.index_head_dim, row_layout.INDEX_GROUP
        if self.is_packed and self.num_csa_layers and (index < step or index & (index - 1)):
            reason = f"index_head_dim {index} of the checkpoint is no power of two from {step} on"
            raise ConfigError("engine.kv_dtype", "fp8", f'{reason}; use "model"')
        if self.is_packed and (self.head_dim - self.rotary_dim) % 2:
            reason = f"head_dim {self.head_dim} less qk_rope_head_dim {self.rotary_dim} of the checkpoint is odd"
            raise ConfigError("engine.kv_dtype", "fp8", f'{reason}; use "model"')

    @property
    def window_ring_rows(self) -> int:
        """Window rows kept a sequence: a token's window, and the step's rows behind it."""
        return self.window + self.gamma

    @property
    def csa_ring_rows(self) -> int:
        """Compressor rows kept a sequence in a CSA layer: two windows of 4."""
        return 2 * CSA_RATIO + self.gamma

    @property
    def hca_ring_rows(self) -> int:
        """Compressor rows kept a sequence in an HCA layer."""
        return HCA_RATIO + self.gamma

    @property
    def draft_ring_rows(self) -> int:
        """Context keys kept a sequence in a draft stage: a block's rows are all stored, and a window before it is read.

        One more than that: the same state also serves a snapshot at any page end inside the block.
        """
        return self.window + self.gamma + 1

    @property
    def csa_row_width(self) -> int:
        """Elements of one CSA compressor row: value and gate, each with an A and a B half, main and indexer."""
        return 4 * (self.head_dim + self.index_head_dim)

    @property
    def hca_row_width(self) -> int:
        """Elements of one HCA compressor row: value and gate."""
        return 2 * self.head_dim

    @property
    def csa_entries_per_page(self) -> int:
        """Compressed entries, and indexer keys, of one CSA layer in one page."""
        return self.page_tokens // CSA_RATIO

    @property
    def hca_entries_per_page(self) -> int:
        """Compressed entries of one HCA layer in one page."""
        return self.page_tokens // HCA_RATIO

    @property
    def key_bytes(self) -> int:
        """Bytes of one window row or compressed entry."""
        return row_layout.key_bytes(self.head_dim, self.rotary_dim) if self.is_packed else self.head_dim * self.kv_bytes

    @property
    def index_key_bytes(self) -> int:
        """Bytes of one indexer key."""
        width = self.index_head_dim
        return row_layout.index_key_bytes(width) if self.is_packed else width * self.kv_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        csa = self.num_csa_layers * self.csa_entries_per_page * (self.key_bytes + self.index_key_bytes)
        return csa + self.num_hca_layers * self.hca_entries_per_page * self.key_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's rings over all layers."""
        window = self.num_layers * self.window_ring_rows * self.key_bytes
        csa = self.num_csa_layers * self.csa_ring_rows * self.csa_row_width * ROW_BYTES
        hca = self.num_hca_layers * self.hca_ring_rows * self.hca_row_width * ROW_BYTES
        draft = self.num_draft_stages * self.draft_ring_rows * self.head_dim * self.kv_bytes
        return window + csa + hca + draft

    @property
    def inner_slot_bytes(self) -> int:
        """Bytes of the rings in which a step gathers one snapshot: an HCA ring holds nothing of a page end."""
        return self.slot_bytes - self.num_hca_layers * self.hca_ring_rows * self.hca_row_width * ROW_BYTES

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one boundary snapshot at a page end: window rows, draft keys, A halves of the last CSA window."""
        window = self.num_layers * self.window * self.key_bytes
        window += self.num_draft_stages * self.window * self.head_dim * self.kv_bytes
        overlap = self.num_csa_layers * CSA_RATIO * (self.csa_row_width // 2) * ROW_BYTES
        return window + overlap

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold num_tokens tokens."""
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How many of each a pool has. Index 0 of pages and slots is the null one and counts here.

    num_inner_slots: rings behind those of the slots, which no sequence has. A step gathers in each of them what a
    snapshot at a page end inside a chunk keeps.
    """

    num_pages: int
    num_slots: int
    num_snapshots: int
    num_inner_slots: int = 0

    def device_bytes(self, geometry: KVGeometry) -> int:
        """Bytes of device memory that a pool of these sizes takes."""
        return (
            self.num_pages * geometry.page_bytes
            + self.num_slots * geometry.slot_bytes
            + self.num_inner_slots * geometry.inner_slot_bytes
            + self.num_snapshots * geometry.snapshot_bytes
        )


def fit_pool(
    geometry: KVGeometry, device_bytes: int, max_rows: int, snapshot_share: float, num_inner_slots: int = 0
) -> PoolSizes:
    """Divide a budget in bytes: slots for max_rows first, then snapshot_share of the rest, then pages.

    Raises ConfigError naming kv.device_bytes when the slots and one page besides the null one do not fit.
    """
    num_slots = max_rows + 1
    rings = num_slots * geometry.slot_bytes + num_inner_slots * geometry.inner_slot_bytes
    rest = device_bytes - rings
    num_snapshots = max(0, int(rest * snapshot_share)) // geometry.snapshot_bytes
    num_pages = max(0, rest - num_snapshots * geometry.snapshot_bytes) // _page_cost(geometry)
    if num_pages < 2:
        needed = rings + _bytes_for(2, geometry, snapshot_share)
        raise ConfigError("kv.device_bytes", device_bytes, f"use at least {needed} bytes for {max_rows} rows")
    return PoolSizes(num_pages, num_slots, num_snapshots, num_inner_slots)


def size_pool(geometry: KVGeometry, config: Config, budget_bytes: int) -> PoolSizes:
    """Divide a rank's budget as the configuration says; see fit_pool.

    Raises ConfigError, naming the bytes that would do, unless a sequence of engine.max_context_tokens and one draft
    block beyond it fits.
    """
    share, chunk_tokens = config.kv.snapshot_share, config.scheduler.chunk_tokens
    if chunk_tokens is None:
        raise InvariantError("resolve() gives scheduler.chunk_tokens a value")
    # Page ends inside the chunks of one step: each has a page of its chunk's tokens before it.
    num_inner_slots = chunk_tokens // geometry.page_tokens
    sizes = fit_pool(geometry, budget_bytes, config.scheduler.max_rows, share, num_inner_slots)
    needed = geometry.num_pages_for(config.engine.max_context_tokens + geometry.gamma + 1)
    usable = sizes.num_pages - 1  # page 0 belongs to padding
    if needed > usable:
        rings = sizes.num_slots * geometry.slot_bytes + num_inner_slots * geometry.inner_slot_bytes
        enough = rings + _bytes_for(needed + 1, geometry, share)
        raise ConfigError(
            "kv.device_bytes",
            budget_bytes,
            f"gives {usable} pages, engine.max_context_tokens ({config.engine.max_context_tokens}) takes {needed}; "
            f"use at least {enough} bytes or a shorter context",
        )
    return sizes


def _page_cost(geometry: KVGeometry) -> int:
    """What a page takes of the budget: its bytes, and of a model that keeps nothing in pages something all the same."""
    return geometry.page_bytes or geometry.page_tokens


def _bytes_for(num_pages: int, geometry: KVGeometry, snapshot_share: float) -> int:
    """Bytes beside the rings of which so many pages are left, whatever share snapshots take."""
    return math.ceil(num_pages * _page_cost(geometry) / (1 - snapshot_share))
