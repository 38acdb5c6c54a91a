"""Generators of the six tasks: each example is a pure function of task, split and index."""

from __future__ import annotations

from random import Random
from typing import assert_never

from tools.train_nano.tasks.arithmetic import candidate as arithmetic_candidate
from tools.train_nano.tasks.calling import candidate as calling_candidate
from tools.train_nano.tasks.copying import candidate as copying_candidate
from tools.train_nano.tasks.example import Answer, Candidate, Example, Split, Task, number_of, split_of
from tools.train_nano.tasks.extraction import candidate as extraction_candidate
from tools.train_nano.tasks.manners import candidate as manners_candidate
from tools.train_nano.tasks.recall import candidate as recall_candidate

TASKS: tuple[Task, ...] = ("arithmetic", "extraction", "recall", "copy", "tools", "chat")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

__all__ = ["SPLITS", "TASKS", "Answer", "Example", "Split", "Task", "draw"]


def draw(task: Task, split: Split, index: int, max_tokens: int | None = None) -> Example:
    """Make example number index of a split.

    max_tokens bounds the rendered whole of a recall example, which otherwise has up to 12,288 tokens; the other
    tasks are short (below 2,048 tokens).
    """
    rng = Random(number_of(task, split, index))
    while True:
        candidate = _candidate(rng, task, split, max_tokens)
        if split_of(task, candidate.combination) == split:
            return candidate.build()


def _candidate(rng: Random, task: Task, split: Split, max_tokens: int | None) -> Candidate:
    match task:
        case "arithmetic":
            return arithmetic_candidate(rng)
        case "extraction":
            return extraction_candidate(rng)
        case "recall":
            return recall_candidate(rng, split, max_tokens)
        case "copy":
            return copying_candidate(rng, split)
        case "tools":
            return calling_candidate(rng)
        case "chat":
            return manners_candidate(rng, split)
        case _:
            assert_never(task)
