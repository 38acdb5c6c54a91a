"""Counts of tiles, which grids and padding are made of."""

from __future__ import annotations

from dsparkd.kernels.tiles import count_tiles, power_of_two


def test_tiles_cover_a_length_and_none_is_left_out_or_over() -> None:
    """One too few would leave outputs unwritten, one too many read behind the end."""
    for tile in (1, 3, 16, 64):
        for length in range(200):
            count = count_tiles(length, tile)
            assert count * tile >= length > (count - 1) * tile


def test_a_power_of_two_is_the_least_that_holds_a_length() -> None:
    """Blocks of kernels are powers of two; a larger one costs registers."""
    for length in range(1, 1030):
        power = power_of_two(length)
        assert power.bit_count() == 1
        assert power >= length > power // 2
