"""Device storage: sizes, slots, snapshots."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dsparkd.errors import InvariantError
from dsparkd.kernels import packed
from dsparkd.kv.geometry import KVGeometry, PoolSizes
from dsparkd.kv.pool import KVPool

GEOMETRY = KVGeometry(
    num_layers=4,
    num_csa_layers=2,
    num_hca_layers=1,
    head_dim=8,
    index_head_dim=4,
    window=16,
    gamma=3,
    page_tokens=128,
    kv_bytes=4,
)


SIZES = PoolSizes(num_pages=4, num_slots=3, num_snapshots=2)


def make_pool(sizes: PoolSizes = SIZES) -> KVPool:
    return KVPool(GEOMETRY, sizes, torch.float32, torch.device("cpu"))


def fill(pool: KVPool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in pool.tensors():
        tensor.normal_(generator=generator)


def test_storage_takes_the_bytes_that_the_geometry_announces() -> None:
    """C-01: check-config prints these numbers before anything is allocated, so they must be those of the pool."""
    sizes = PoolSizes(num_pages=7, num_slots=5, num_snapshots=3, num_inner_slots=2)
    assert make_pool(sizes).device_bytes == sizes.device_bytes(GEOMETRY)


def test_a_new_pool_is_zero() -> None:
    """A masked product multiplies what it gathers by zero: that must be finite from the start."""
    assert all(not tensor.any() for tensor in make_pool().tensors())


def test_resetting_a_slot_leaves_its_neighbours() -> None:
    """Only the slot's own rows turn zero."""
    pool = make_pool()
    fill(pool, 0)
    before = [tensor.clone() for tensor in (pool.window, pool.csa_rows, pool.hca_rows)]

    pool.reset_slot(1)

    for tensor, old in zip((pool.window, pool.csa_rows, pool.hca_rows), before, strict=True):
        rows = tensor.shape[1] // 3
        assert not tensor[:, rows : 2 * rows].any()
        assert torch.equal(tensor[:, :rows], old[:, :rows])
        assert torch.equal(tensor[:, 2 * rows :], old[:, 2 * rows :])


@pytest.mark.parametrize("position", [128, 256, 1280])
def test_a_snapshot_restores_the_rows_before_its_boundary_into_any_slot(position: int) -> None:
    """Window rows position-16..-1, and the A halves of the CSA rows position-4..-1, bit for bit."""
    pool = make_pool()
    fill(pool, 1)
    window_ring, csa_ring = GEOMETRY.window_ring_rows, GEOMETRY.csa_ring_rows
    window = [pool.window[:, 1 * window_ring + p % window_ring].clone() for p in range(position - 16, position)]
    rows = [pool.csa_rows[:, 1 * csa_ring + p % csa_ring].clone() for p in range(position - 4, position)]

    pool.save_snapshot(1, 1, position)
    fill_after = pool.window_snapshots.clone()
    pool.window[:, window_ring:] = torch.nan  # decoding goes on and overwrites the rings
    pool.csa_rows[:, csa_ring:] = torch.nan
    pool.load_snapshot(2, 1, position)

    assert torch.equal(pool.window_snapshots, fill_after)
    for p, old in zip(range(position - 16, position), window, strict=True):
        assert torch.equal(pool.window[:, 2 * window_ring + p % window_ring], old)
    for p, old in zip(range(position - 4, position), rows, strict=True):
        restored = pool.csa_rows[:, 2 * csa_ring + p % csa_ring].view(2, 2, 2, 12)
        assert torch.equal(restored[:, :, 0], old.view(2, 2, 2, 12)[:, :, 0])


def test_a_snapshot_is_taken_of_an_inner_slot_and_never_put_into_one() -> None:
    """Their rings are behind the slots'; a sequence in one would have no HCA rows."""
    pool = make_pool(dataclasses.replace(SIZES, num_inner_slots=2))
    fill(pool, 3)
    ring = GEOMETRY.window_ring_rows
    pool.save_snapshot(4, 0, 128)
    for index, p in enumerate(range(112, 128)):
        assert torch.equal(pool.window_snapshots[:, index], pool.window[:, 4 * ring + p % ring])
    for slot, refused in ((5, pool.save_snapshot), (3, pool.load_snapshot), (4, pool.load_snapshot)):
        with pytest.raises(InvariantError):
            refused(slot, 0, 128)


def test_a_snapshot_leaves_the_others_alone() -> None:
    """Snapshots are addressed by index; saving one writes one."""
    pool = make_pool()
    fill(pool, 2)
    other = pool.window_snapshots[:, :16].clone()
    pool.save_snapshot(1, 1, 128)
    assert torch.equal(pool.window_snapshots[:, :16], other)


@pytest.mark.parametrize(
    ("slot", "snapshot", "position"), [(0, 0, 128), (3, 0, 128), (1, 2, 128), (1, -1, 128), (1, 0, 0), (1, 0, 130)]
)
def test_a_snapshot_of_what_cannot_be_is_refused(slot: int, snapshot: int, position: int) -> None:
    """The null slot, indices out of range, and boundaries that leave a compressor window half filled."""
    pool = make_pool()
    with pytest.raises(InvariantError):
        pool.save_snapshot(slot, snapshot, position)
    with pytest.raises(InvariantError):
        pool.load_snapshot(slot, snapshot, position)


def test_a_dtype_of_another_size_is_refused() -> None:
    """The budget was computed for the geometry's element size."""
    with pytest.raises(InvariantError):
        KVPool(GEOMETRY, PoolSizes(4, 3, 2), torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_snapshot_keeps_each_row_with_its_scale(scale: float) -> None:
    """T-37: packed rows whose scales are 0.5 and 2 come back in another slot as they were, and pages lie untouched."""
    g = dataclasses.replace(GEOMETRY, head_dim=96, index_head_dim=32, rotary_dim=32, is_packed=True)
    pool = KVPool(g, SIZES, torch.float32, torch.device("cpu"))
    keys = torch.randn((g.window_ring_rows, 96), generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    keys[:, 5] = 448 * scale  # the largest of its group
    pool.window[:, g.window_ring_rows : 2 * g.window_ring_rows] = packed.pack(keys, 32)
    entries = packed.pack(keys[:16], 32)
    pool.csa_entries[:, g.csa_entries_per_page :][:, :16] = entries
    pool.save_snapshot(1, 1, 128)
    pool.reset_slot(1)
    pool.load_snapshot(2, 1, 128)
    last = torch.arange(128 - g.window, 128) % g.window_ring_rows
    got = packed.unpack(pool.window[0, 2 * g.window_ring_rows + last], 96, 32, torch.float32)
    assert torch.equal(got, packed.unpack(packed.pack(keys[last], 32), 96, 32, torch.float32))
    assert bool((got[:, 5] == 448 * scale).all())
    assert torch.equal(pool.csa_entries[1, g.csa_entries_per_page :][:16], entries)
    assert pool.device_bytes == SIZES.device_bytes(g)
