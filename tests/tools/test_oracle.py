"""The two ways from the official layout into transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsparkd.model.config import load_model_config
from tests.model.values import small_values
from tools.oracle import load_by_transformers, load_oracle, read_official, rename, rename_back
from tools.random_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 linears, FP4 experts and a drafter, in one file."""
    directory = tmp_path_factory.mktemp("small")
    write_checkpoint(directory, small_values(), seed=5)
    return directory


def test_names_survive_the_way_there_and_back(checkpoint: Path) -> None:
    """A tensor under a wrong name of the same shape would be a different model."""
    official = {name: torch.from_numpy(array) for name, array in read_official(checkpoint).items()}
    config = load_oracle(checkpoint).config

    back = rename_back(rename(official, config))

    assert back.keys() == {name for name in official if not name.startswith("mtp.")}
    for name, tensor in back.items():
        assert torch.equal(tensor, official[name]), name


def test_what_was_loaded_is_renamed_back_to_the_file(checkpoint: Path) -> None:
    """The state that transformers computes with, not the one that was handed to it."""
    official = read_official(checkpoint)
    state = {name: tensor for name, tensor in load_oracle(checkpoint).state_dict().items() if "inv_freq" not in name}

    back = rename_back(state)

    assert len(back) == sum(not name.startswith("mtp.") for name in official)
    for name, tensor in back.items():
        assert torch.equal(tensor, torch.from_numpy(official[name])), name


def test_transformers_own_conversion_gives_the_same_tensors(checkpoint: Path) -> None:
    """Its reader of FP8, FP4 and names shares no code with ours: every parameter and buffer, bit for bit."""
    models = load_oracle(checkpoint), load_by_transformers(checkpoint)
    # Buffers apart: the rotary frequencies are in no file, and in no state either.
    ours, theirs = ({**dict(model.named_buffers()), **model.state_dict()} for model in models)

    assert theirs.keys() == ours.keys()
    assert any("inv_freq" in name for name in ours)
    assert len(ours) > load_model_config(checkpoint).num_hidden_layers * 20
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
