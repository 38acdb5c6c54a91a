"""The loop: schedule, slices, saved state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.train_nano.graph import Mode
from tools.train_nano.optimiser import Optimiser, orthogonalised, uses_muon
from tools.train_nano.stream import DEFAULT_MIX
from tools.train_nano.training import (
    FINAL_RATE,
    MASTERS_BYTES,
    WARMUP_STEPS,
    Batch,
    Group,
    Log,
    Phase,
    Slice,
    phase_at,
    rate_at,
    read_masters,
    restore,
    save,
    train,
)

ALONE = Group(0, 1, torch.device("cpu"))


class Toy:
    """Learns the mean of what it is shown; counts its batches in a buffer."""

    def __init__(self, size: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.randn(1, size, size, generator=generator, requires_grad=True)
        self.head = torch.zeros(1, 3, requires_grad=True)
        self.count = torch.zeros(1, dtype=torch.int64)
        self.seen: list[int] = []

    def parameters(self) -> dict[str, Tensor]:
        return {"layers/attn.wq_a.weight": self.matrix, "/head.weight": self.head}

    def buffers(self) -> dict[str, Tensor]:
        return {"layers/ffn.gate.tid2eid": self.count}

    def loss(self, batch: Batch, mode: Mode) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.ids.shape == batch.document.shape == batch.wanted.shape
        self.seen.append(int(batch.ids.sum()))
        loss = self.matrix.square().sum() + (self.head - 1).square().sum()
        return loss, {"loss": loss.detach()}

    def balance(self, figures: Mapping[str, Tensor]) -> None:
        assert set(figures) == {"loss"}
        self.count += 1

    def evaluate(self, phase: Phase) -> dict[str, float]:
        return {"count": float(self.count.item())}


def optimiser_of(toy: Toy) -> Optimiser:
    return Optimiser(toy.parameters(), 0.02, 0.01, 0.02)


def run(toy: Toy, out: Path, steps: int, resume: Path | None) -> bool:
    """A slice of a plan of `steps` steps of one row."""
    out.mkdir(exist_ok=True)
    plan = [Phase(steps, 1, 512, Mode(), DEFAULT_MIX)]
    return train(toy, optimiser_of(toy), plan, ALONE, Slice(5.0, resume, out, 1), 0.4, Log(out, ALONE))


def test_a_slice_goes_on_where_the_last_one_ended_and_sees_other_data(tmp_path: Path) -> None:
    """Steps count on, and a seed that did not move with them would show the same rows twice."""
    first, second = Toy(), Toy()

    assert run(first, tmp_path / "a", 2, None)
    assert run(second, tmp_path / "b", 4, tmp_path / "a")

    assert second.count.item() == 4
    assert len(second.seen) == 2
    assert not set(first.seen) & set(second.seen)
    assert first.matrix.detach().norm() > second.matrix.detach().norm()


def test_a_state_that_is_restored_is_the_one_that_was_saved(tmp_path: Path) -> None:
    """Momentum and counters too: a resumed step equals the step that was not interrupted, to the bit."""
    toy, again = Toy(), Toy()
    kept, fresh = optimiser_of(toy), optimiser_of(again)
    step(toy, kept)
    save(toy, kept, tmp_path, 7)

    assert restore(again, fresh, tmp_path) == 7

    step(toy, kept)
    step(again, fresh)
    assert torch.equal(toy.matrix, again.matrix)
    assert torch.equal(toy.head, again.head)


def step(toy: Toy, optimiser: Optimiser) -> None:
    loss, _ = toy.loss(Batch(*(torch.zeros(1, 4) for _ in range(4))), Mode())
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step(1.0)
    for tensor in toy.parameters().values():
        tensor.grad = None


def test_masters_fit_into_files_that_can_be_carried(tmp_path: Path) -> None:
    """Each below the bound, all of them together the whole state; bfloat16 where the checkpoint holds fewer bits."""
    toy = Toy(size=2048)
    save(toy, optimiser_of(toy), tmp_path, 3)

    files = sorted(tmp_path.glob("masters-*.safetensors"))
    found = read_masters(tmp_path)
    assert all(path.stat().st_size < MASTERS_BYTES + 4096 for path in files)
    assert set(found) == set(toy.parameters() | toy.buffers())
    assert torch.equal(found["layers/attn.wq_a.weight"], toy.matrix.detach().bfloat16())
    assert sum(len(load_file(path)) for path in files) == len(found)


def test_another_models_state_is_refused(tmp_path: Path) -> None:
    """Taking what fits would train a mixture of two models."""
    toy = Toy()
    save(toy, optimiser_of(toy), tmp_path, 1)
    other = Toy()
    renamed = {"layers/attn.wkv.weight": other.matrix, "/head.weight": other.head}
    other.parameters = lambda: renamed  # type: ignore[method-assign]

    with pytest.raises(ValueError, match="another model's"):
        restore(other, optimiser_of(other), tmp_path)


def test_the_rate_rises_holds_and_falls() -> None:
    """Warm-up, plateau, then linearly to the floor over the last share of the steps."""
    assert rate_at(0, 1000, 0.4) == 1 / WARMUP_STEPS
    assert rate_at(WARMUP_STEPS, 1000, 0.4) == 1
    assert rate_at(600, 1000, 0.4) == 1
    assert rate_at(800, 1000, 0.4) == pytest.approx(0.5)
    assert rate_at(999, 1000, 0.4) == FINAL_RATE


def test_a_step_belongs_to_one_phase() -> None:
    """The end of a phase is the first step of the next."""
    plan = [Phase(3, 1, 512, Mode(), {}), Phase(2, 1, 1024, Mode(sparse=True), {})]

    assert [phase_at(plan, number)[1].length for number in range(5)] == [512, 512, 512, 1024, 1024]
    assert [phase_at(plan, number)[0] for number in range(5)] == [3, 3, 3, 5, 5]


@pytest.mark.parametrize("shape", [(2, 32, 48), (3, 48, 32), (2, 2, 16, 16)])
def test_muon_steps_along_matrices_with_singular_values_near_one(shape: tuple[int, ...]) -> None:
    """Five iterations bring them into a band about one, whatever the gradient's scale."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-4

    values = torch.linalg.svdvals(orthogonalised(gradient))

    assert values.min() > 0.3
    assert values.max() < 1.4


def test_matrices_between_activations_step_by_muon_and_nothing_else() -> None:
    """Embeddings, routers, norms and hyper-connections are no such matrices."""
    matrices = {"layers/attn.wq_a.weight": (8, 4, 4), "layers/ffn.experts.w1": (8, 2, 4, 4)}
    others = {
        "/embed.weight": (1, 9, 4),
        "layers/ffn.gate.weight": (8, 2, 4),
        "layers/attn.q_norm.weight": (8, 4),
        "layers/hc_attn_fn": (8, 24, 16),
        "layers/attn.compressor.ape@4": (3, 4, 8),
        "mtp/markov_head.markov_w1.weight": (1, 9, 4),
    }

    assert all(uses_muon(name, torch.zeros(shape)) for name, shape in matrices.items())
    assert not any(uses_muon(name, torch.zeros(shape)) for name, shape in others.items())
    assert uses_muon("layers/attn.compressor.wgate.weight@256", torch.zeros(3, 4, 4))
