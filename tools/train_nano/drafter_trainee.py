"""Trains the draft stages beside a frozen target, on the target's own outputs, and calibrates their confidence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsparkd.model.config import ModelConfig
from tools.train_nano.drafter import Drafter, drafter_loss, own_outputs, sample_anchors
from tools.train_nano.graph import Mode
from tools.train_nano.packing import pack
from tools.train_nano.stream import DEFAULT_MIX
from tools.train_nano.target import SHORT, TargetTrainee
from tools.train_nano.tasks.example import Task
from tools.train_nano.training import Batch, Group, Phase, read_state

MUON_RATE, ADAM_RATE, DECAY = 0.02, 2e-3, 0.02
DECAY_SHARE = 0.5
ANCHORS = 4096  # a GPU and step
# Lists of made-up names are what it foresees worst, so most rounds of the mix are theirs.
MIX: dict[Task, float] = DEFAULT_MIX | {"copy": 0.3}


def phases(num_rows: int) -> list[Phase]:
    """The plan: short rows only, for a draft block never sees farther back than one window."""
    return [Phase(2500, num_rows, SHORT, Mode(sparse=True), MIX)]


class DrafterTrainee:
    """See training.Trainee. target: directory of the finished target's state or masters."""

    def __init__(self, config: ModelConfig, group: Group, seed: int, target: Path) -> None:
        self._config = config
        frozen = TargetTrainee(config, group, seed)
        saved = read_state(target)
        with torch.no_grad():
            for name, tensor in (frozen.parameters() | frozen.buffers()).items():
                tensor.copy_(saved[name])
        self._target = frozen.target
        self._target.freeze()
        self.drafter = Drafter(config, group.device, self._target.dtype, seed, quantise=True)
        self.drafter.start_from(self._target.values[""]["norm.weight"][0])
        self._generator = torch.Generator(device=group.device).manual_seed(seed * 1000 + group.rank)

    def parameters(self) -> dict[str, Tensor]:
        """Every master that has a gradient."""
        return {name: tensor for name, tensor in self._tensors().items() if not name.endswith("gate.bias")}

    def buffers(self) -> dict[str, Tensor]:
        """Router biases."""
        return {name: tensor for name, tensor in self._tensors().items() if name.endswith("gate.bias")}

    def _tensors(self) -> dict[str, Tensor]:
        return {f"mtp/{name}": tensor for name, tensor in self.drafter.values["mtp"].items()}

    def loss(self, batch: Batch, mode: Mode) -> tuple[Tensor, dict[str, Tensor]]:
        """The recipe's loss over anchors of this batch."""
        with torch.no_grad():
            packing = pack(batch.document, batch.wanted, self._config)
            features = self._target.features(batch.ids, packing, mode)
            answers = torch.zeros_like(batch.wanted)
            answers[:, 1:] = batch.wanted[:, :-1]
            own = own_outputs(batch.ids, answers, features.hidden, features.head)
            anchors = sample_anchors(batch.ids, batch.document, own, ANCHORS, self._config, self._generator)
            embed = self._target.weights("")["embed.weight"][0]
        return drafter_loss(self.drafter, embed, features.head, features.taps, features.hidden, batch.document, anchors)

    def balance(self, figures: Mapping[str, Tensor]) -> None:
        """Move the routers' biases towards equal loads."""
        self.drafter.balance(figures["loads"])

    def evaluate(self, phase: Phase) -> dict[str, float]:
        """Nothing beyond the training figures: data never repeats, so they are held-out figures themselves."""
        return {}
