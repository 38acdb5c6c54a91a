"""Trains the drafter beside its frozen target: taps and wanted distributions are computed with every batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dsparkd.model.config import ModelConfig
from tools.train_nano import stream
from tools.train_nano.drafter import Anchors, Drafter, drafter_loss, own_outputs, sample_anchors
from tools.train_nano.encode import Encoder
from tools.train_nano.graph import Features, Mode, Target
from tools.train_nano.packing import pack
from tools.train_nano.stream import DEFAULT_MIX
from tools.train_nano.target import SHORT, validation_rows
from tools.train_nano.tasks import TASKS, draw
from tools.train_nano.tokenizer import DEFAULT_PATH
from tools.train_nano.training import Batch, Group, Phase, to_device

MUON_RATE, ADAM_RATE, DECAY = 0.02, 2e-3, 0.02
DECAY_SHARE = 0.5
TOKENS_AN_ANCHOR = 16  # of a batch, prompts included
VALIDATION_EXAMPLES = 24  # of a task, for each process


def phases(scale: float, num_rows: int) -> list[Phase]:
    """The plan: one phase of short rows; queries of the target see the indexer's choice, as they do when served."""
    return [Phase(round(4000 * scale), num_rows, SHORT, Mode(sparse=True), DEFAULT_MIX)]


class DrafterTrainee:
    """See training.Trainee. target: finished; its masters are not trained."""

    def __init__(self, config: ModelConfig, group: Group, seed: int, target: Target) -> None:
        dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
        self.drafter = Drafter(config, group.device, dtype, seed, quantise=True)
        self.drafter.start_from(target.values[""]["norm.weight"].detach())
        self._config, self._group, self._target = config, group, target
        self._generator = torch.Generator(device=group.device).manual_seed(seed * 1000 + group.rank)
        with torch.no_grad():
            self._embed = target.weights("")["embed.weight"][0]

    def parameters(self) -> dict[str, Tensor]:
        """Every master that has a gradient."""
        return {name: tensor for name, tensor in self._tensors().items() if tensor.requires_grad}

    def buffers(self) -> dict[str, Tensor]:
        """Router biases."""
        return {name: tensor for name, tensor in self._tensors().items() if not tensor.requires_grad}

    def _tensors(self) -> dict[str, Tensor]:
        return {f"mtp/{name}": tensor for name, tensor in self.drafter.values["mtp"].items()}

    def loss(self, batch: Batch, mode: Mode) -> tuple[Tensor, dict[str, Tensor]]:
        """The recipe's loss over anchors drawn from what is the target's own output."""
        features = self._features(batch, mode)
        answers = F.pad(batch.wanted[:, :-1], (1, 0))
        own = own_outputs(batch.ids, answers, features.hidden, features.head)
        count = batch.ids.numel() // TOKENS_AN_ANCHOR
        anchors = sample_anchors(batch.ids, batch.document, own, count, self._config, self._generator)
        (normaliser,) = self._group.mean([anchors.weights().sum()])
        loss, metrics = self._loss(batch, features, anchors, normaliser)
        figures = {name: metrics[name] for name in ("ce", "tv", "confidence", "accepted", "accepted_greedy", "loads")}
        figures |= {f"c_star_{i + 1}": chance for i, chance in enumerate(metrics["c_star"].unbind())}
        figures["own"] = own.sum() / answers.sum().clamp(min=1)
        return loss, {"loss": loss.detach()} | figures

    def _features(self, batch: Batch, mode: Mode) -> Features:
        with torch.no_grad():
            return self._target.features(batch.ids, pack(batch.document, batch.wanted, self._config), mode)

    def _loss(
        self, batch: Batch, features: Features, anchors: Anchors, normaliser: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return drafter_loss(
            self.drafter,
            self._embed,
            features.head,
            features.taps,
            features.hidden,
            batch.document,
            anchors,
            normaliser,
        )

    def balance(self, figures: Mapping[str, Tensor]) -> None:
        """Raise the bias of experts with less than their share, lower the others'."""
        self.drafter.balance(figures["loads"])

    def evaluate(self, phase: Phase) -> dict[str, float]:
        """Mean accepted length of greedy decoding from any token of a validation answer, by task."""
        encoder = Encoder(DEFAULT_PATH)
        results: dict[str, float] = {}
        for task in TASKS:
            first = self._group.rank * VALIDATION_EXAMPLES
            examples = [
                encoder.encode(draw(task, "validation", first + index, phase.length - 256))
                for index in range(VALIDATION_EXAMPLES)
            ]
            sums = torch.tensor(
                [self._accepted(rows, phase) for rows in validation_rows(examples, phase.num_rows, phase.length)],
                device=self._group.device,
            ).sum(0)
            length, blocks = self._group.mean([sums])[0].tolist()
            results[task] = length / max(blocks, 1e-6)
        return results

    @torch.no_grad()
    def _accepted(self, rows: stream.Batch, phase: Phase) -> list[float]:
        """The lengths' sum over the blocks of the rows, and how many blocks there are."""
        batch = to_device(rows, self._group.device)
        features = self._features(batch, phase.mode)
        answers = F.pad(batch.wanted[:, :-1], (1, 0))
        own = own_outputs(batch.ids, answers, features.hidden, features.head)
        count = batch.ids.numel() // TOKENS_AN_ANCHOR
        anchors = sample_anchors(batch.ids, batch.document, own, count, self._config, self._generator)
        _, metrics = self._loss(batch, features, anchors)
        blocks = float(anchors.valid[:, 0].sum())
        return [metrics["accepted_greedy"].item() * blocks, blocks]
