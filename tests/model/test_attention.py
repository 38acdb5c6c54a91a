"""Tiled attention with a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from dsparkd.model.attention import attend_tiles


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


QUERY, WINDOW, ENTRIES, SINK = (
    noise(9, 8, 64, seed=0),
    noise(9, 16, 64, seed=1),
    noise(9, 128, 64, seed=2),
    noise(1, 8, 1, seed=3),
)
COUNTS = torch.tensor([0, 1, 63, 64, 65, 70, 100, 127, 128])
HIDDEN = torch.arange(128) >= COUNTS[:, None]
WINDOW_HIDDEN = torch.arange(16) < torch.tensor([15, 3, 0, 0, 0, 0, 0, 0, 0])[:, None]


def test_the_sink_is_in_the_denominator_alone() -> None:
    """o = sum e^l k / (sum e^l + e^sink) over visible keys, in double."""
    keys = torch.cat((WINDOW, ENTRIES), 1).double()
    logits = torch.einsum("thd,tkd->thk", QUERY.double(), keys)
    logits = logits.masked_fill(torch.cat((WINDOW_HIDDEN, HIDDEN), 1)[:, None], -torch.inf)
    shares = logits.exp()
    exact = torch.einsum("thk,tkd->thd", shares, keys) / (shares.sum(2, keepdim=True) + SINK.double().exp())
    got = attend_tiles(QUERY, WINDOW, WINDOW_HIDDEN, ENTRIES, HIDDEN, SINK)
    assert torch.allclose(got.double(), exact, atol=1e-5)


def test_tiles_that_are_hidden_as_a_whole_change_no_bit() -> None:
    """A token's bits must not depend on how many entries its neighbours see, none included."""
    whole = attend_tiles(QUERY, WINDOW, WINDOW_HIDDEN, ENTRIES, HIDDEN, SINK)
    for token, count in enumerate(COUNTS.tolist()):
        width = -(-count // 64) * 64
        one = slice(token, token + 1)
        entries, hidden = (ENTRIES[one, :width], HIDDEN[one, :width]) if width else (None, None)
        alone = attend_tiles(QUERY[one], WINDOW[one], WINDOW_HIDDEN[one], entries, hidden, SINK)
        assert torch.equal(alone, whole[one]), count


def test_a_huge_logit_does_not_overflow() -> None:
    """The running maximum takes window, entries and sink."""
    for query, sink in ((QUERY * 1e3, SINK), (QUERY, SINK + 1e3)):
        assert attend_tiles(query, WINDOW, None, ENTRIES, HIDDEN, sink).isfinite().all()
