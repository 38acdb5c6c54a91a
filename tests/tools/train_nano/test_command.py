"""What the training tool's command does with saved states."""

from __future__ import annotations

import torch

from tools.train_nano.command import average, both_parts


def test_each_part_of_an_export_comes_from_its_own_directory() -> None:
    """A whole checkpoint given for its drafter alone once replaced the target that had just been trained."""
    trained = {"layers/w": torch.ones(2), "mtp/w": torch.ones(2)}
    shipped = {"layers/w": torch.zeros(2), "mtp/w": torch.zeros(2)}

    merged = both_parts(trained, shipped)

    assert {name: tensor.tolist() for name, tensor in merged.items()} == {"layers/w": [1, 1], "mtp/w": [0, 0]}


def test_an_average_is_taken_in_float32_and_leaves_integers_alone() -> None:
    """Hash tables are choices, not quantities; bfloat16 sums of near values would lose what tells them apart."""
    one = {"w": torch.tensor([1.0, 256.0], dtype=torch.bfloat16), "table": torch.tensor([7, 3])}
    other = {"w": torch.tensor([3.0, 258.0], dtype=torch.bfloat16), "table": torch.tensor([5, 5])}

    mean = average([one, other, one, other])

    assert mean["w"].dtype == torch.bfloat16
    assert mean["w"].float().tolist() == [2.0, torch.tensor(257.0).bfloat16().item()]
    assert mean["table"].tolist() == [7, 3]
