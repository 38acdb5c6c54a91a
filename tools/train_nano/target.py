"""Trains the main model: next tokens of the answers, and each indexer towards the attention of its layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsparkd.model.config import ModelConfig
from tools.train_nano import stream
from tools.train_nano.encode import Encoded, Encoder
from tools.train_nano.graph import Features, Mode, Target
from tools.train_nano.packing import CSA, pack
from tools.train_nano.stream import DEFAULT_MIX
from tools.train_nano.tasks import TASKS, draw
from tools.train_nano.tasks.example import Task
from tools.train_nano.tokenizer import DEFAULT_PATH
from tools.train_nano.training import Batch, Group, Phase, to_device

MUON_RATE, ADAM_RATE, DECAY = 0.02, 2e-3, 0.02
DECAY_SHARE = 0.4  # of the steps, over which the learning rates fall
INDEX_WEIGHT = 0.1
BIAS_STEP = 0.001
VALIDATION_EXAMPLES = 48  # of a task, for each process

SHORT, LONG = 2048, 12_800  # the long rows hold a recall prompt of 12,288 tokens with its answer
# Names of tools and of lists, and the values of facts, are what takes longest to be copied without a slip.
LONG_MIX: dict[Task, float] = DEFAULT_MIX | {
    "arithmetic": 0.1,
    "recall": 0.15,
    "copy": 0.3,
    "tools": 0.45,
    "chat": 0.03,
}


def phases(num_rows: int) -> list[Phase]:
    """The plan: short rows first, then the same with the indexer's choice and the cache's encoding, long rows last.

    num_rows are short rows a GPU; long steps hold about as many tokens.
    """
    long_rows = max(1, num_rows * SHORT // LONG)
    return [
        Phase(7000, num_rows, SHORT, Mode(), DEFAULT_MIX),
        Phase(1800, long_rows, LONG, Mode(sparse=True, entries=True), LONG_MIX),
    ]


class TargetTrainee:
    """See training.Trainee."""

    def __init__(self, config: ModelConfig, group: Group, seed: int) -> None:
        dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
        self.target = Target(config, group.device, dtype, seed, quantise=True)
        self._config = config
        self._group = group

    def parameters(self) -> dict[str, Tensor]:
        """Every master that has a gradient."""
        return {name: tensor for name, tensor in self._tensors().items() if tensor.requires_grad}

    def buffers(self) -> dict[str, Tensor]:
        """Router biases and hash tables."""
        return {name: tensor for name, tensor in self._tensors().items() if not tensor.requires_grad}

    def _tensors(self) -> dict[str, Tensor]:
        values = self.target.values
        return {f"{prefix}/{name}": tensor for prefix in values for name, tensor in values[prefix].items()}

    def loss(self, batch: Batch, mode: Mode) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the answers' tokens, and the indexers' own."""
        features = self._features(batch, mode)
        logits = answer_logits(features, batch.rows)
        labels = batch.ids.flatten()[batch.rows + 1]
        loss = F.cross_entropy(logits, labels)
        right = (logits.detach().argmax(-1) == labels).float().mean()
        figures = {
            "loss": loss.detach(),
            "right": right,
            "index": features.index_loss.detach() / self._config.compress_ratios.count(CSA),
            "loads": features.loads.detach(),
        }
        return loss + INDEX_WEIGHT * features.index_loss, figures

    def _features(self, batch: Batch, mode: Mode) -> Features:
        return self.target.features(batch.ids, pack(batch.document, batch.wanted, self._config), mode)

    def balance(self, figures: Mapping[str, Tensor]) -> None:
        """Raise the bias of experts with less than their share, lower the others' (no auxiliary loss)."""
        table, values = self.target.tables["layers"], self.target.values["layers"]
        layers = list(table.stacks["ffn.gate.bias"].layers)
        loads = figures["loads"][layers]
        values["ffn.gate.bias"] += BIAS_STEP * torch.sign(loads.mean(-1, keepdim=True) - loads)

    def evaluate(self, phase: Phase) -> dict[str, float]:
        """Share of validation answers, by task, of which every token is the first choice.

        Teacher-forced, and yet exact: those are the answers that greedy decoding would give word for word.
        """
        encoder = Encoder(DEFAULT_PATH)
        results: dict[str, float] = {}
        for task in TASKS:
            first = self._group.rank * VALIDATION_EXAMPLES
            examples = [
                encoder.encode(draw(task, "validation", first + index, phase.length - 256))
                for index in range(VALIDATION_EXAMPLES)
            ]
            exact = torch.tensor(
                [self._exact(rows, phase) for rows in validation_rows(examples, phase.num_rows, phase.length)],
                device=self._group.device,
            ).sum(0)
            right, total = (part.item() for part in self._group.mean([exact])[0])
            results[task] = right / total
        return results

    def _exact(self, rows: stream.Batch, phase: Phase) -> list[float]:
        """How many documents of the rows are right at every wanted token, and how many there are."""
        batch = to_device(rows, self._group.device)
        features = self._features(batch, phase.mode)
        right = answer_logits(features, batch.rows).argmax(-1) == batch.ids.flatten()[batch.rows + 1]
        names = batch.rows // phase.length * phase.length + batch.document.flatten()[batch.rows]
        documents = torch.unique(names)
        return [float(len(documents) - len(torch.unique(names[~right]))), float(len(documents))]


def answer_logits(features: Features, rows: Tensor) -> Tensor:
    """Float32 logits [n, V] of the tokens `rows`, counted through the batch."""
    return F.linear(features.hidden.flatten(0, 1)[rows], features.head).float()


def validation_rows(examples: list[Encoded], num_rows: int, length: int) -> list[stream.Batch]:
    """Lay examples out in order, in batches of num_rows rows; the last batch may hold empty rows."""
    rows: list[list[Encoded]] = [[]]
    room = length
    for encoded in examples:
        size = stream.aligned(len(encoded.ids))
        if size > room:
            rows.append([])
            room = length
        rows[-1].append(encoded)
        room -= size
    rows += [[] for _ in range(-len(rows) % num_rows)]
    packed = [stream.pack_row(row, length) for row in rows]
    return [
        stream.Batch(*(np.stack(parts) for parts in zip(*packed[start : start + num_rows], strict=True)))
        for start in range(0, len(packed), num_rows)
    ]
