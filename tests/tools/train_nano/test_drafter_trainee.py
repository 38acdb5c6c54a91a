"""The drafter inside the training loop's protocol, on rows of the real stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsparkd.model.config import ModelConfig, parse_model_config
from tests.model.values import small_values
from tools.train_nano import drafter_trainee, stream
from tools.train_nano.command import nano_values
from tools.train_nano.drafter_trainee import DrafterTrainee
from tools.train_nano.encode import Encoder
from tools.train_nano.graph import Mode
from tools.train_nano.target import TargetTrainee, validation_rows
from tools.train_nano.tasks import draw
from tools.train_nano.tokenizer import DEFAULT_PATH
from tools.train_nano.training import Group, Trainee, to_device

CPU = torch.device("cpu")
GROUP = Group(0, 1, CPU)
LENGTH, NORM = 1024, 2.5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_model_config(small_values(vocab_size=nano_values()["vocab_size"]))


@pytest.fixture(scope="module")
def finished(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Masters of a target, and where they lie."""
    target = TargetTrainee(config, GROUP, 1)
    tensors = {name: tensor.detach().clone() for name, tensor in (target.parameters() | target.buffers()).items()}
    tensors["/norm.weight"].fill_(NORM)
    directory = tmp_path_factory.mktemp("target")
    save_file(tensors, directory / "masters-0.safetensors")
    return directory, tensors


def answer_rows() -> stream.Batch:
    encoder = Encoder(DEFAULT_PATH)
    examples = [encoder.encode(draw("tools", "train", index)) for index in range(2)]
    (rows,) = validation_rows(examples, 2, LENGTH)
    return rows


def test_a_step_moves_the_drafter_and_leaves_the_target_alone(
    config: ModelConfig, finished: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors come from the answers' tokens; every parameter gets a gradient, and the target keeps its weights."""
    monkeypatch.setattr(drafter_trainee, "ANCHORS", 64)
    directory, tensors = finished
    trainee = DrafterTrainee(config, GROUP, 2, directory)
    as_trainee: Trainee = trainee
    assert (as_trainee.parameters()["mtp/norm.weight"] == NORM).all()
    seen: list[Tensor] = []

    # An untrained target agrees with no reference, so every answer is taken for its own.
    def own_outputs(ids: Tensor, loss: Tensor, hidden: Tensor, head: Tensor) -> Tensor:
        seen.append(loss)
        return loss

    monkeypatch.setattr(drafter_trainee, "own_outputs", own_outputs)
    rows = answer_rows()
    loss, figures = as_trainee.loss(to_device(rows, CPU), Mode(sparse=True))
    loss.backward()
    assert torch.equal(seen[0], torch.from_numpy(rows.loss))
    assert all(tensor.grad is not None for tensor in as_trainee.parameters().values())
    values = trainee._target.values
    assert all(torch.equal(values[name.split("/")[0]][name.split("/")[1]], saved) for name, saved in tensors.items())
    assert all(tensor.grad is None for part in values.values() for tensor in part.values())
    assert figures["loads"].shape == (3, 8)
    assert figures["accepted_greedy"] < 1.5
    before = as_trainee.buffers()["mtp/ffn.gate.bias"].clone()
    as_trainee.balance(figures)
    assert not torch.equal(as_trainee.buffers()["mtp/ffn.gate.bias"], before)


def test_a_batch_without_own_outputs_trains_nothing(
    config: ModelConfig, finished: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that would have written none of it: a loss of 0, gradients of 0, no division by zero."""
    monkeypatch.setattr(drafter_trainee, "ANCHORS", 16)
    trainee = DrafterTrainee(config, GROUP, 2, finished[0])
    batch = to_device(answer_rows(), CPU)
    loss, figures = trainee.loss(batch._replace(wanted=torch.zeros_like(batch.wanted)), Mode())
    loss.backward()
    assert loss.item() == 0
    assert all(torch.isfinite(value).all() for value in figures.values())
    assert not any(tensor.grad.any() for tensor in trainee.parameters().values() if tensor.grad is not None)
