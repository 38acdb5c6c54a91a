"""Where the parts of a packed row of the cache lie, in bytes. Imports no torch.

The official encoding: a key has E4M3 codes under a power-of-two scale for every GROUP columns, but for its rotary ones,
which stay bfloat16; an indexer key has FP4 codes, two a byte. Scales lie in the row that they belong to, so that
whatever copies a row copies them, too.
"""

from __future__ import annotations

GROUP = 64  # columns of a key under one scale
INDEX_GROUP = 32  # and of an indexer key
ALIGNMENT = 16  # of each row, in bytes: what one thread loads at once


def num_scales(width: int, rotary: int) -> int:
    """Scales of a key of `width` columns, of which the last `rotary` have none."""
    return -(-(width - rotary) // GROUP)


def scales_at(width: int, rotary: int) -> int:
    """Where a key's scales begin: behind width - rotary codes, and the rotary columns of two bytes each."""
    return width + rotary


def key_bytes(width: int, rotary: int) -> int:
    """Bytes of one packed key: codes, rotary columns, scales."""
    return _aligned(scales_at(width, rotary) + num_scales(width, rotary))


def index_key_bytes(width: int) -> int:
    """Bytes of one packed indexer key: width / 2 of codes, then width / INDEX_GROUP scales."""
    return _aligned(width // 2 + width // INDEX_GROUP)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
