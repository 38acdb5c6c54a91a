"""The drafter inside the training loop's protocol, on rows of the real stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dsparkd.model.config import ModelConfig, parse_model_config
from tests.model.values import small_values
from tools.train_nano.drafter_trainee import DrafterTrainee
from tools.train_nano.encode import Encoder
from tools.train_nano.graph import Mode, Target
from tools.train_nano.target import validation_rows
from tools.train_nano.tasks import draw
from tools.train_nano.tokenizer import DEFAULT_PATH
from tools.train_nano.training import Batch, Group, Phase, Trainee, to_device

CPU = torch.device("cpu")
GROUP = Group(0, 1, CPU)
LENGTH = 1024


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_model_config(small_values(vocab_size=4096))


def trainee_of(config: ModelConfig) -> tuple[Target, DrafterTrainee]:
    target = Target(config, CPU, torch.float32, seed=1, quantise=True)
    return target, DrafterTrainee(config, GROUP, 2, target)


def answers() -> Batch:
    encoder = Encoder(DEFAULT_PATH)
    examples = [encoder.encode(draw("tools", "train", index)) for index in range(2)]
    (rows,) = validation_rows(examples, 2, LENGTH)
    return to_device(rows, CPU)


def test_a_step_moves_the_drafter_and_leaves_the_target_alone(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are scalars or the loads; every parameter gets a gradient, the target none."""
    target, trainee = trainee_of(config)
    as_trainee: Trainee = trainee
    # An untrained target agrees with no reference, so it is taken at its word everywhere.
    monkeypatch.setattr("tools.train_nano.drafter_trainee.own_outputs", lambda ids, loss, hidden, head: loss)
    loss, figures = as_trainee.loss(answers(), Mode(sparse=True))
    loss.backward()
    assert all(tensor.grad is not None for tensor in as_trainee.parameters().values())
    assert all(tensor.grad is None for values in target.values.values() for tensor in values.values())
    assert figures["loads"].shape == (3, 8)
    assert all(value.numel() == 1 for name, value in figures.items() if name != "loads")
    assert figures["own"] == 1
    assert set(as_trainee.parameters()).isdisjoint(as_trainee.buffers())
    before = as_trainee.buffers()["mtp/ffn.gate.bias"].clone()
    as_trainee.balance(figures)
    assert not torch.equal(as_trainee.buffers()["mtp/ffn.gate.bias"], before)


def test_a_batch_without_own_outputs_trains_nothing(config: ModelConfig) -> None:
    """A target that would have written none of it: a loss of 0, gradients of 0, no division by zero."""
    _, trainee = trainee_of(config)
    batch = answers()
    loss, figures = trainee.loss(batch._replace(wanted=torch.zeros_like(batch.wanted)), Mode())
    loss.backward()
    assert loss.item() == 0
    assert all(torch.isfinite(value).all() for value in figures.values())
    assert not any(tensor.grad.any() for tensor in trainee.parameters().values() if tensor.grad is not None)


def test_both_start_with_the_norm_before_the_shared_head(config: ModelConfig) -> None:
    """Hidden states of another scale would have to unlearn it first."""
    target = Target(config, CPU, torch.float32, seed=1, quantise=True)
    target.values[""]["norm.weight"].data.fill_(2.5)
    trainee = DrafterTrainee(config, GROUP, 2, target)
    assert (trainee.parameters()["mtp/norm.weight"] == 2.5).all()


def test_evaluation_measures_each_task(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths lie between the target's own token and a whole block; an untrained drafter's near 1."""
    monkeypatch.setattr("tools.train_nano.drafter_trainee.own_outputs", lambda ids, loss, hidden, head: loss)
    monkeypatch.setattr("tools.train_nano.drafter_trainee.VALIDATION_EXAMPLES", 1)
    monkeypatch.setattr("tools.train_nano.drafter_trainee.TASKS", ("tools", "chat"))
    _, trainee = trainee_of(config)
    results = trainee.evaluate(Phase(1, 1, LENGTH, Mode(), {"tools": 1.0}))
    assert set(results) == {"tools", "chat"}
    assert all(1 <= length < 1.5 for length in results.values())
