"""Tile sizes that fix how many rows a product has and how many terms a reduction has, whatever the batch."""

ROW_TILE = 16  # tokens are padded to a multiple: below 4 rows a row's bits depend on how many there are
KEY_TILE = 64  # compressed keys are reduced in tiles of this many: then a longer neighbour changes no bits
