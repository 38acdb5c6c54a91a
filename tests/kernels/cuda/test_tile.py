"""Packed weights in pieces: what lies where, and what fills up."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda.linear import TritonLinear
from dsparkd.kernels.cuda.tile import in_pieces, in_rows, turn, turned_place
from dsparkd.kernels.weight import Format, Weight, decode, stacked
from tools.kernel_cases.weights import random_weight

PACKED = (Format.FP4, Format.FP8)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize(("height", "width"), [(64, 128), (70, 160), (200, 384)])
def test_sections_lie_one_behind_the_other_as_each_would_alone(
    device: torch.device, form: Format, height: int, width: int
) -> None:
    """An expert's tile reads its own section, whatever its height; an odd number of pieces is a pair with nothing."""
    parts = [random_weight(form, height, width, seed, device) for seed in range(3)]
    together, alone = in_pieces(stacked(parts), 3), [in_pieces(part) for part in parts]
    for whole, pieces in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize("form", PACKED)
def test_a_weight_of_whole_pieces_takes_no_more_memory(device: torch.device, form: Format) -> None:
    """The release's experts are most of a device's memory."""
    weight = random_weight(form, 256, 512, 1, device)
    assert weight.scales is not None
    values, scales = in_pieces(weight)
    assert (values.nbytes, scales.nbytes) == (weight.values.nbytes, weight.scales.nbytes)


@pytest.mark.parametrize("form", PACKED)
def test_a_piece_is_one_stretch_of_its_rows_and_columns(device: torch.device, form: Format) -> None:
    """Zeros everywhere but in 64 rows of 128 columns are zeros in all other pieces."""
    weight = random_weight(form, 256, 512, 1, device)
    values = weight.values.clone().view(4, 64, 4, -1)
    values[torch.arange(4) != 2] = 0
    values[:, :, torch.arange(4) != 1] = 0
    pieces, _ = in_pieces(Weight(form, values.view(256, -1), weight.scales))
    used = pieces.view(4, 4, -1).any(-1)
    assert used.nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("width", [384, 640])
def test_every_row_and_column_is_multiplied_by_its_own_scale(device: torch.device, form: Format, width: int) -> None:
    """Scales are stored by pairs of pieces, here an odd number; each of ours is another power of two."""
    weight = random_weight(form, 128, width, 3, device)
    assert weight.scales is not None
    count = weight.scales.numel()
    scales = (100 + torch.arange(count, device=device) * 7 % 23).to(torch.uint8).view_as(weight.scales)
    weight = Weight(form, weight.values, scales)
    x = torch.eye(width, dtype=torch.bfloat16, device=device)
    assert torch.equal(TritonLinear(weight, wide=True)(x), decode(weight, torch.float32).t())


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize(("height", "width", "sections"), [(64, 128, 1), (70, 768, 3)])
def test_pieces_laid_out_as_rows_are_the_weight_again(
    device: torch.device, form: Format, height: int, width: int, sections: int
) -> None:
    """For products of many rows; FP4 with its columns turned, each section on whole tiles of 128 rows."""
    weight = random_weight(form, sections * height, width, 3, device)
    rows = in_rows(*in_pieces(weight, sections), form, weight.shape, sections).view(sections, 128, width)
    expected = decode(weight, torch.bfloat16)
    expected = turn(expected) if form is Format.FP4 else expected
    assert torch.equal(rows[:, :height].flatten(0, 1), expected)
    assert not rows[:, height:].any()


def test_inputs_are_turned_to_where_their_columns_lie(device: torch.device) -> None:
    """As the experts' first product stores its outputs for the second."""
    x = torch.arange(256, device=device)[None].float()
    turned = turn(x)[0]
    for column in range(256):
        assert turned[turned_place.fn(column)] == column


def test_a_dense_weight_stays_as_it_is(device: torch.device) -> None:
    """No copy."""
    weight = random_weight(Format.DENSE, 64, 128, 1, device)
    assert in_pieces(weight)[0] is weight.values
