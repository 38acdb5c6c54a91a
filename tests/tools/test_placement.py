"""Where gates compute: what an engine is told, copies of weights, and what counts as a difference."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.model.values import small_values
from tools.acceptance_draws import CASES, RULES, World, play
from tools.dense_copy import write_dense_copy
from tools.gates import invariance, lossless, oracle
from tools.gates.invariance import Way
from tools.oracle import read_official
from tools.placed_logits import Placed, chunks_of, differences
from tools.placement import Placement, add_arguments, placement
from tools.random_checkpoint import write_checkpoint

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def parsed(*words: str) -> Placement:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return placement(parser.parse_args(words))


def test_a_device_is_never_chosen_by_what_there_is() -> None:
    """A gate that fell back to the cpu would pass without having seen a GPU."""
    assert parsed() == Placement("cpu", "float32")
    assert parsed("--device", "cuda") == Placement("cuda", "bfloat16")
    assert parsed("--device", "cuda", "--shared-device", "--dtype", "float32").engine() == {
        "device": "cuda",
        "dtype": "float32",
        "kv_dtype": "model",
        "shared_device": True,
    }


@WITHOUT_GPU
@pytest.mark.parametrize("gate", [oracle, invariance, lossless])
def test_a_gate_that_reaches_no_gpu_fails(gate, capsys) -> None:
    """Whatever raises in there ends the process with an error; nothing is printed that reads like a pass."""
    with pytest.raises(RuntimeError):
        gate.main(["--device", "cuda"])

    assert "ok" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "dtype", "ok"),
    [("cpu", "float32", False), ("cpu", "bfloat16", True), ("cuda", "bfloat16", False), ("cuda", "float32", False)],
)
def test_only_the_cpus_bfloat16_may_differ_by_the_way(device: str, dtype: str, ok: bool) -> None:
    """Kernels on cuda give a row its bits whatever stands beside it."""
    assert Way("name", dtype, device, 0, 0, 1, 9, "proof", True, 1.0).ok == ok
    assert Way("name", dtype, device, 0, 0, 0, 9, "proof", True, 1.0).ok


def test_a_dense_copy_has_the_values_of_the_quantised_weights(tmp_path: Path) -> None:
    """Then all that differs is how they are multiplied."""
    source, copy = tmp_path / "packed", tmp_path / "dense"
    write_checkpoint(source, small_values(), seed=5)
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")

    write_dense_copy(source, copy)

    values = json.loads((copy / "config.json").read_bytes())
    assert values["quantization_config"] is None
    assert values["expert_dtype"] is None
    assert (copy / "tokenizer.json").exists()
    ours, theirs = read_official(copy), read_official(source)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    with Placement(is_dense=False).checkpoint(source) as same:
        assert same == source


def test_a_dense_copy_is_gone_when_its_gate_ends(tmp_path: Path) -> None:
    """It is twice as large as what it was made of."""
    write_checkpoint(tmp_path / "packed", small_values(), seed=5)

    with Placement(is_dense=True).checkpoint(tmp_path / "packed") as copy:
        assert (copy / "model.safetensors").exists()
    assert not copy.exists()


GOOD = Placed("cuda", 3, 90, 1e-2, 1e-4, 2, 1e-2, 0, 0, 1e-2, 1e-4, 1.0)


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"unexplained": 1}, False),
        ({"other_bits": 1}, False),
        ({"mean": 1.6e-4}, False),
        ({"mean": float("nan")}, False),
        ({"worst": float("inf"), "mean": float("inf")}, False),
        ({"control_worst": None, "control_mean": None}, False),  # float32 is held to a tolerance
        ({"control_worst": None, "control_mean": None, "worst": 1e-4}, True),
    ],
)
def test_a_place_passes_only_with_errors_of_its_number_format(changes: dict[str, object], ok: bool) -> None:
    """Counted and explained: another token where two are as good as equal, and never another result by another way."""
    assert dataclasses.replace(GOOD, **changes).ok == ok  # type: ignore[arg-type]


def test_a_difference_is_explained_by_what_logits_may_be_off_by() -> None:
    """Two candidates whose lead is past twice that cannot have changed places by rounding."""
    reference = torch.tensor([[0.0, 10.0, 9.9], [0.0, 10.0, 5.0], [10.0, 0.0, 0.0]])
    logits = torch.tensor([[0.0, 9.9, 10.0], [0.0, 6.0, 9.0], [10.0, 0.0, 0.0]])

    found = differences(logits, reference, 0.02)

    assert (found.count, found.unexplained) == (2, 1)
    assert found.lead == pytest.approx(0.5)
    assert differences(logits, reference, 0.25).unexplained == 0


@pytest.mark.parametrize("length", [1, 2, 13, 300])
def test_every_way_covers_the_text(length: int) -> None:
    """A chunk of nothing, or a token left out, would compare other texts."""
    for chunks in chunks_of(length, seed=length):
        assert sum(chunks) == length
        assert length == 1 or all(chunk > 0 for chunk in chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("rule", RULES)
def test_draws_on_the_device_have_the_exact_distributions(case, rule) -> None:
    """The kernels that serve there: noise, masks, filters and both acceptance rules."""
    assert lossless.fits(play(case, rule, 2_000, world=World(torch.device("cuda"))))
