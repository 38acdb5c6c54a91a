"""Tile sizes that fix how many rows a product has and how many terms a reduction has, whatever the batch; their counts.

The library's own functions for these take microseconds a call, because they serve kernels, too: a wrapper has several.
"""

ROW_TILE = 16  # tokens are padded to a multiple: below 4 rows a row's bits depend on how many there are
KEY_TILE = 64  # compressed keys are reduced in tiles of this many: then a longer neighbour changes no bits


def count_tiles(length: int, tile: int) -> int:
    """Tiles that cover so much."""
    return -(-length // tile)


def power_of_two(length: int) -> int:
    """The smallest power of two that is at least length, which is positive."""
    return 1 << (length - 1).bit_length()
