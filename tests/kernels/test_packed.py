"""The cache's official encoding, against arithmetic in the open."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsparkd.kernels import packed
from dsparkd.kernels.row_layout import index_key_bytes, key_bytes, num_scales, scales_at

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal values of magnitudes that differ by row."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw) * torch.logspace(-6, 4, shape[0])[:, None]


def test_a_row_of_the_released_geometry_has_its_parts() -> None:
    """448 codes, 64 rotary columns of two bytes, 7 scales, in whole sixteens; an indexer key has 64 and 4."""
    assert scales_at(512, 64) == 448 + 128
    assert num_scales(512, 64) == 7
    assert key_bytes(512, 64) == 592
    assert index_key_bytes(128) == 80


@pytest.mark.parametrize(("width", "rotary"), [(512, 64), (64, 32), (96, 16)])
def test_each_group_has_the_least_power_of_two_that_holds_it(width: int, rotary: int) -> None:
    """T-37: its scale lies in its own row; values are the nearest E4M3 ones, and the rotary columns are bfloat16's."""
    keys, plain = noise(40, width), width - rotary
    rows = packed.pack(keys, rotary)
    got = packed.unpack(rows, width, rotary, torch.float32)
    for group in range(num_scales(width, rotary)):
        part = slice(64 * group, min(64 * group + 64, plain))
        for row in range(40):
            largest = max(float(keys[row, part].abs().max()), 1e-4)
            scale = 2.0 ** math.ceil(math.log2(largest / 448))
            assert int(rows[row, scales_at(width, rotary) + group]) == round(math.log2(scale)) + 127
            expected = (keys[row, part] / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(got[row, part], expected)
    assert torch.equal(got[:, plain:], keys[:, plain:].bfloat16().float())


@pytest.mark.parametrize(
    ("largest", "exponent"), [(448.0, 0), (448.0 + 2**-15, 1), (224.0, -1), (1.75, -8), (0.0, -22)]
)
def test_scales_at_their_bounds(largest: float, exponent: int) -> None:
    """448 is held by 1 and the next number is not; nothing goes below what 1e-4 takes."""
    keys = torch.zeros(1, 96)
    keys[0, 5] = -largest
    rows = packed.pack(keys, 32)
    assert int(rows[0, scales_at(96, 32)]) == 127 + exponent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_twice_changes_nothing(dtype: torch.dtype) -> None:
    """A step reads its own keys rounded and packs them later; both must be what a later step unpacks."""
    keys = noise(200, 192).to(dtype)
    once = keys.clone()
    packed.round_(once, 64)
    assert not torch.equal(once, keys)
    assert torch.equal(once, packed.unpack(packed.pack(keys, 64), 192, 64, dtype))
    assert torch.equal(once, packed.unpack(packed.pack(once, 64), 192, 64, dtype))


def test_a_row_is_rounded_without_its_neighbours() -> None:
    """Bits of a row are those that it has alone."""
    keys = noise(33, 192)
    whole, index = packed.pack(keys, 64), packed.pack_index(keys[:, :128].contiguous())
    for row in range(33):
        one = keys[row : row + 1]
        assert torch.equal(packed.pack(one, 64), whole[row : row + 1])
        assert torch.equal(packed.pack_index(one[:, :128].contiguous()), index[row : row + 1])


def test_stored_rows_lie_where_they_belong() -> None:
    """And the rest stays."""
    keys = noise(5, 64)
    ring = torch.full((9, key_bytes(64, 32)), 7, dtype=torch.uint8)
    packed.store(ring, torch.tensor([7, 2]), keys, torch.tensor([4, 1]), 32)
    assert torch.equal(
        packed.unpack(ring[[7, 2]], 64, 32, torch.float32),
        packed.unpack(packed.pack(keys[[4, 1]], 32), 64, 32, torch.float32),
    )
    assert bool((ring[[0, 1, 3, 4, 5, 6, 8]] == 7).all())


def test_the_turn_is_the_sylvester_matrix() -> None:
    """Orthonormal: turned twice is as before; products of turned vectors are theirs."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < 128:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    rows = torch.randn((6, 128), generator=torch.Generator().manual_seed(1))
    turned = packed.hadamard(rows)
    torch.testing.assert_close(turned, rows @ matrix * 128**-0.5)
    torch.testing.assert_close(packed.hadamard(turned), rows)


def test_indexer_keys_are_the_nearest_fp4() -> None:
    """Groups of 32, each by the least power of two that holds it; half way goes to the even code."""
    keys = noise(20, 128)
    got, turned = packed.unpack_index(packed.pack_index(keys), 128, torch.float32), packed.hadamard(keys)
    for row in range(20):
        for group in range(4):
            values = turned[row, 32 * group : 32 * group + 32].double()
            scale = 2.0 ** math.ceil(math.log2(float(values.abs().max()) / 6))
            for value, kept in zip((values / scale).tolist(), (got[row, 32 * group :] / scale).tolist(), strict=False):
                near = min(FP4, key=lambda one: (abs(one - abs(value)), FP4.index(one) % 2))
                assert abs(kept) == near
                assert kept == 0 or (kept < 0) == (value < 0)


@pytest.mark.parametrize(
    ("half_way", "kept"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)]
)
def test_half_way_between_two_codes_goes_to_the_even_one(half_way: float, kept: float) -> None:
    """By the thresholds of the reference; a row of one value in front keeps its sum in the first column."""
    rows = torch.full((1, 64), 0.0)
    wanted = torch.zeros(1, 64)
    wanted[0, 0], wanted[0, 3], wanted[0, 40] = 6.0, -half_way, half_way
    wanted[0, 41] = 6.0
    rows = packed.hadamard(wanted)  # exact: halves and quarters, times an eighth
    got = packed.unpack_index(packed.pack_index(rows), 64, torch.float32)
    assert got[0, 3] == -kept
    assert got[0, 40] == kept


def test_queries_are_turned_and_rounded_as_keys_are() -> None:
    """So that their products are of the same space."""
    queries = torch.randn((3, 4, 64), generator=torch.Generator().manual_seed(2))
    got = packed.round_queries(queries)
    keys = packed.unpack_index(packed.pack_index(queries.view(12, 64)), 64, torch.float32)
    assert torch.equal(got.view(12, 64), keys)
