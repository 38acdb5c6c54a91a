"""Graphs that hold NCCL's collectives, served by two ranks on two GPUs."""

from __future__ import annotations

import pytest

from dsparkd.text.tokenizer import Tokenizer
from tools.gates.cuda_ids import compare_graphs
from tools.harness import ensure_checkpoint
from tools.workload import mixed_items


@pytest.mark.gpu2
def test_two_ranks_replay_with_the_ids_and_log_probabilities_of_eager_steps() -> None:
    """P-08, P-22, D-32: prompts of many lengths, so that ranks have different numbers of rows, and none at the end."""
    checkpoint = ensure_checkpoint()
    items = mixed_items(12, Tokenizer.load(checkpoint).vocab_size, 16, seed=3)

    replay, _ = compare_graphs(checkpoint, items, drafts=True)

    assert replay.ok, replay
