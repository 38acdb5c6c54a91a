"""Generators of the six tasks: each example is a pure function of task, split and index."""

from __future__ import annotations

from random import Random
from typing import assert_never

from tools.train_nano.tasks import arithmetic, calling, copying, extraction, manners, recall
from tools.train_nano.tasks.example import Answer, Candidate, Example, Split, Task, number_of

TASKS: tuple[Task, ...] = ("arithmetic", "extraction", "recall", "copy", "tools", "chat")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_BUCKETS = 32
_TEST_BUCKETS = 2  # the first ones; then comes one for validation

__all__ = ["SPLITS", "TASKS", "Answer", "Example", "draw", "split_of"]


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


def split_of(task: Task, combination: str) -> Split:
    """Return the one split that may hold a combination of template and values."""
    bucket = number_of(task, combination) % _BUCKETS
    if bucket < _TEST_BUCKETS:
        return "test"
    return "validation" if bucket == _TEST_BUCKETS else "train"


def _candidate(rng: Random, task: Task, split: Split, max_tokens: int | None) -> Candidate:
    match task:
        case "arithmetic":
            return arithmetic.candidate(rng)
        case "extraction":
            return extraction.candidate(rng)
        case "recall":
            return recall.candidate(rng, max_tokens)
        case "copy":
            return copying.candidate(rng, split)
        case "tools":
            return calling.candidate(rng)
        case "chat":
            return manners.candidate(rng)
        case _:
            assert_never(task)
