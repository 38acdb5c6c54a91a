"""The Triton compressor against the definition in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.cuda.compressor import Closing, Part, Rows, close_entries, prepare
from dsparkd.kernels.rotary import Rotation
from tests.kernels.cuda.values import DTYPES, close, noise

D, I, R, N, T, RING = 24, 12, 8, 3, 40, 60  # noqa: E741
EPS = 1e-6


def rotation_of(entries: int) -> Rotation:
    angles = noise(entries, 1, R // 2, seed=7).repeat_interleave(2, 2)
    return Rotation(angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0] * (R // 2)))


class Case:
    """Entries that close from random rows of ring and step; the first of CSA has no window before its own."""

    def __init__(self, overlap: bool, dtype: torch.dtype) -> None:
        self.overlap, self.dtype = overlap, dtype
        self.span, self.channels = (8, D + I) if overlap else (128, D)
        width = (4 if overlap else 2) * self.channels
        self.ring, self.rows = noise(RING, width, seed=1), noise(T, width, seed=2)
        self.sources = torch.randint(1, RING + T, (N, self.span), generator=torch.Generator().manual_seed(3))
        self.sources = torch.where(self.sources >= RING, RING - 1 - self.sources, self.sources)
        if overlap:
            self.sources[0, :4] = 0
            self.ring[0] = torch.nan  # what does not exist must not matter
        self.bias = noise(4 if overlap else 128, width // 2, seed=5)
        self.places, self.rotation = torch.tensor([5, 9, 2]), rotation_of(N)
        self.norms = [1 + 0.2 * noise(w, seed=4) for w in (D, I)]

    def run(self, device: torch.device, part: slice = slice(0, N), dst: Tensor | None = None) -> list[Tensor]:
        """Pages of entries and keys, and the ring behind it."""

        def moved(x: Tensor) -> Tensor:
            return x.contiguous().to(device)

        rotation = Rotation(moved(self.rotation.cos[part]), moved(self.rotation.sin[part]))
        closing = Closing(moved(self.sources[part].reshape(-1)), moved(self.places[part]), rotation)
        pages = [torch.full((12, w), torch.nan, dtype=self.dtype, device=device) for w in (D, I)]
        entries, keys = (Part(moved(norm), page) for norm, page in zip(self.norms, pages, strict=True))
        ring = moved(self.ring).clone()
        made_of = Rows(moved(self.rows), ring, moved(self.bias), None if dst is None else moved(dst))
        close_entries(made_of, closing, EPS, entries, keys if self.overlap else None)
        return [*(page.cpu() for page in pages), ring.cpu()]

    def expected(self, n: int) -> list[Tensor]:
        """Entry n, and its indexer key."""
        values, gates = [], []
        for k, source in enumerate(self.sources[n].tolist()):
            if self.overlap and k < 4 and source == 0:
                continue
            row = (self.ring[source] if source >= 0 else self.rows[-1 - source]).double().view(2, -1, self.channels)
            half = 1 if self.overlap and k >= 4 else 0
            values.append(row[0, half])
            bias = self.bias[k % len(self.bias)].double().view(-1, self.channels)[half]
            gates.append(row[1, half] + bias)
        shares = torch.stack(gates).softmax(0)
        mixed = (shares * torch.stack(values)).sum(0).to(self.dtype).double()
        made = []
        for x, norm in zip(mixed.split([D, I] if self.overlap else [D]), self.norms, strict=False):
            x = x * (x.square().mean() + EPS).rsqrt() * norm.double()
            tail = torch.view_as_complex(x[-R:].view(-1, 2).contiguous())
            angle = torch.complex(self.rotation.cos[n, 0, ::2].double(), self.rotation.sin[n, 0, 1::2].double())
            made.append(torch.cat((x[:-R], torch.view_as_real(tail * angle).flatten())))
        return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overlap", [True, False])
def test_an_entry_is_the_mean_of_its_window_by_the_softmax_of_its_gates(
    device: torch.device, dtype: torch.dtype, overlap: bool
) -> None:
    """Channel by channel; CSA takes the A halves of the window before, where there is one; cast, norm, rotation."""
    case = Case(overlap, dtype)
    pages = case.run(device)
    for n, place in enumerate(case.places.tolist()):
        for page, exact in zip(pages[:2], case.expected(n), strict=False):
            assert close(page[place], exact)
    untouched = [p for p in range(12) if p not in case.places]
    assert pages[0][untouched].isnan().all()
    assert pages[1].isnan().all() == (not overlap)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_entrys_bits_do_not_depend_on_the_others(device: torch.device, overlap: bool) -> None:
    """An entry that closes alone has the bits that it gets in company."""
    case = Case(overlap, torch.float32)
    whole = case.run(device)
    for n, place in enumerate(case.places.tolist()):
        alone = case.run(device, slice(n, n + 1))
        assert torch.equal(alone[0][place], whole[0][place])
        assert not overlap or torch.equal(alone[1][place], whole[1][place])


@pytest.mark.parametrize("overlap", [True, False])
def test_padding_of_a_captured_shape_makes_no_entry(device: torch.device, overlap: bool) -> None:
    """T-04: a place of -1 is nobody's, whatever its sources say; the entries beside it are what they were."""
    case = Case(overlap, torch.float32)
    whole = case.run(device)
    left_out, case.places[1] = int(case.places[1]), -1
    for page, expected in zip(case.run(device)[:2], whole[:2], strict=True):
        expected[left_out] = torch.nan
        assert torch.equal(page.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_steps_rows_are_kept_beside_its_entries(device: torch.device, overlap: bool) -> None:
    """P-13: the first of them, where they are told to and nowhere else; padding goes to -1. No entry of a step reads
    what its rows overwrite, and so the entries are those that are made when nothing is kept."""
    case = Case(overlap, torch.float32)
    case.ring = torch.cat((case.ring, noise(8, case.ring.shape[1], seed=6)))
    count = 5
    dst = RING + torch.arange(count).flip(0)
    dst[1] = -1
    *pages, ring = case.run(device, dst=dst)
    *expected, untouched = case.run(device)
    for page, other in zip(pages, expected, strict=True):
        assert torch.equal(page.nan_to_num(7), other.nan_to_num(7))
    for k in (k for k in range(count) if k != 1):
        untouched[dst[k]] = case.rows[k]
    assert torch.equal(ring.nan_to_num(7), untouched.nan_to_num(7))


def test_rows_are_kept_where_every_entry_is_padding(device: torch.device) -> None:
    """Most decode steps close nothing."""
    case = Case(True, torch.float32)
    case.places[:] = -1
    *pages, ring = case.run(device, dst=torch.tensor([3, 1]))
    assert all(page.isnan().all() for page in pages)
    assert torch.equal(ring[[3, 1]], case.rows[:2])


@pytest.mark.parametrize("overlap", [True, False])
def test_preparing_runs_a_whole_close(device: torch.device, overlap: bool) -> None:
    """Of the widths given, in memory of its own."""
    case = Case(overlap, torch.float32)
    prepare(case.norms[0].to(device), case.norms[1].to(device) if overlap else None, case.span, R, torch.float32)
