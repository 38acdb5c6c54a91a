"""Speculative rounds over the target's own greedy answers: what a drafter proposes, and how much of it is right.

An answer is decoded once and its taps are read in one pass over it; then every round that a server would make of it
(model.md 5.1, all drafts verified) is played without the target, whose part is known. Rounds of all texts run together.

Letters: N rounds, G drafts of a round (gamma), B blocks of one step, K stages, R ring rows, W window, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.kernels.tiles import ROW_TILE
from dsparkd.kv.geometry import PoolSizes
from dsparkd.model.config import load_model_config
from dsparkd.model.dspark import Drafter, DraftInputs
from dsparkd.model.weights import load_both_draft_shards
from dsparkd.text.encoding import ChatEncoding
from tools.decode_loop import PAGE_TOKENS, DecodeLoop
from tools.oracle import Engine, plan_row
from tools.train_nano.tasks import TASKS, draw
from tools.train_nano.tasks.example import Split, Task

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PROMPT_TOKENS = 2048  # of a recall prompt with its answer: the drafter sees its last window alone, however long it is
MAX_TOKENS = 512  # of an answer: more than the longest right one has
CHUNK_TOKENS = 1024
SEQUENCES_AT_ONCE = 32
BLOCKS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with the target's greedy answer: its EOS is the last id, unless the answer was cut at its limit."""

    task: Task
    ids: tuple[int, ...]
    num_prompt_ids: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """What N rounds came to.

    text [N]: of which text. judged [N]: drafts that the answer had a token for, at most G. accepted [N]: those that
    were right, from the first on. emitted [N]: tokens that the round yields, the target's own included. confidence
    [N, G]: the confidence head's logits.
    """

    text: Ints
    judged: Ints
    accepted: Ints
    emitted: Ints
    confidence: Floats

    def of(self, texts: Sequence[int]) -> Rounds:
        """Return the rounds of some of the texts."""
        kept = np.isin(self.text, texts)
        return Rounds(
            self.text[kept], self.judged[kept], self.accepted[kept], self.emitted[kept], self.confidence[kept]
        )

    @property
    def mean_length(self) -> float:
        """Tokens a round; 0 without rounds."""
        return float(self.emitted.sum() / max(1, len(self.emitted)))


def write_texts(
    checkpoint: Path, encoding: ChatEncoding, split: Split, count: int, max_tokens: int, device: torch.device
) -> list[Text]:
    """Let the target answer the first `count` examples of each task of a split, in float32."""
    asked = [(task, draw(task, split, index, PROMPT_TOKENS)) for task in TASKS for index in range(count)]
    prompts = [encoding.tokenize(encoding.render(example.chat)).ids for _, example in asked]
    longest = max(map(len, prompts)) + max_tokens
    loop = DecodeLoop(checkpoint, device, torch.float32, SEQUENCES_AT_ONCE, longest, CHUNK_TOKENS)
    outputs = loop.run(prompts, max_tokens)
    eos = load_model_config(checkpoint).eos_token_id
    texts = []
    for (task, _), prompt, output in zip(asked, prompts, outputs, strict=True):
        end = [] if len(output) == max_tokens else [eos]
        texts.append(Text(task, (*prompt, *output, *end), len(prompt)))
    return texts


def play(checkpoint: Path, texts: Sequence[Text], device: torch.device) -> Rounds:
    """Play every round of every text, greedily, in float32."""
    rings = _Rings(checkpoint, texts, device)
    anchors = {index: text.num_prompt_ids for index, text in enumerate(texts)}
    played: list[tuple[int, int, int, int]] = []
    confidence: list[list[float]] = []
    # The last token is no anchor: nothing follows it.
    while live := [index for index, text in enumerate(texts) if anchors[index] < len(text.ids) - 1]:
        for start in range(0, len(live), BLOCKS_AT_ONCE):
            part = live[start : start + BLOCKS_AT_ONCE]
            ids, said = rings.draft([(index, anchors[index]) for index in part])
            confidence += said
            for index, drafted in zip(part, ids, strict=True):
                accepted, judged = _judge(texts[index].ids[anchors[index] + 1 :], drafted)
                left = len(texts[index].ids) - 1 - anchors[index]
                emitted = min(accepted + 1, left)
                played.append((index, judged, accepted, emitted))
                anchors[index] += emitted
    counts = np.array(played, np.int64).reshape(-1, 4)
    logits = np.array(confidence, np.float64).reshape(-1, rings.num_drafts)
    return Rounds(counts[:, 0], counts[:, 1], counts[:, 2], counts[:, 3], logits)


def _judge(following: Sequence[int], drafted: Sequence[int]) -> tuple[int, int]:
    """Count the drafts that are right from the first on, and those that can be right or wrong."""
    judged = min(len(following), len(drafted))
    accepted = 0
    while accepted < judged and drafted[accepted] == following[accepted]:
        accepted += 1
    return accepted, judged


class _Rings:
    """Context keys of all texts, from the window before each answer on, behind one row of zeros."""

    def __init__(self, checkpoint: Path, texts: Sequence[Text], device: torch.device) -> None:
        num_pages = -(-max(len(text.ids) for text in texts) // PAGE_TOKENS)
        engine = Engine(checkpoint, torch.float32, PAGE_TOKENS, PoolSizes(1 + num_pages, 2, 1), device)
        self._drafter, self._exchange = load_both_draft_shards(checkpoint, engine.model)
        self._texts, self._device = texts, device
        self._window = engine.config.sliding_window
        self.num_drafts = engine.config.gamma
        self._first: list[int] = []  # position of each text's first key
        self._row: list[int] = []  # and its ring row
        parts: list[Tensor] = []
        row = 1
        for text in texts:
            first = max(0, text.num_prompt_ids - self._window)
            keys = _context_keys(engine, self._drafter, text, first)
            parts.append(keys)
            self._first.append(first)
            self._row.append(row)
            row += keys.shape[1]
        self._rings = torch.cat((torch.zeros_like(parts[0][:, :1]), *parts), 1)  # [K, R, d]

    def draft(self, anchors: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Draft behind (text, position) [B]; returns ids and confidence logits, [B, G] each."""
        positions = np.array([position for _, position in anchors], np.int64)
        first = np.array([self._first[index] for index, _ in anchors], np.int64)[:, None]
        row = np.array([self._row[index] for index, _ in anchors], np.int64)[:, None]
        wanted = positions[:, None] + np.arange(-self._window, 0)
        hidden = np.maximum(self._window - positions, 0)
        inputs = DraftInputs(
            anchor_ids=torch.tensor([self._texts[index].ids[position] for index, position in anchors]).to(self._device),
            positions=torch.from_numpy(positions).to(self._device),
            rings=self._rings,
            sources=torch.from_numpy(np.where(wanted < first, 0, row + wanted - first)).to(self._device),
            first=torch.from_numpy(hidden).to(self._device),
            all_visible=not hidden.any(),
        )
        self._exchange.begin_step((self._drafter.num_padded_rows(len(anchors)), 0))
        drafts = self._drafter.draft(inputs, self._exchange)
        return drafts.ids.tolist(), drafts.confidence.tolist()


def _context_keys(engine: Engine, drafter: Drafter, text: Text, first: int) -> Tensor:
    """Run the target over a text and return the keys of its positions from `first` on, [K, n, d]."""
    pages = tuple(range(1, 1 + engine.geometry.num_pages_for(len(text.ids))))
    parts = []
    for start in range(0, len(text.ids), CHUNK_TOKENS):
        part = list(text.ids[start : start + CHUNK_TOKENS])
        taps = engine.step([plan_row(part, start, 1, pages, 0)], drafter.dspark.target_layer_ids).taps
        assert taps is not None
        if start + len(part) <= first:
            continue
        begin = max(0, first - start) // ROW_TILE * ROW_TILE  # whole tiles before it are not needed
        positions = torch.arange(start + begin, start + taps.shape[0], device=taps.device)
        keys = drafter.context_keys(taps[begin:], positions)
        parts.append(keys[:, max(0, first - start) - begin : len(part) - begin])
    return torch.cat(parts, 1)
