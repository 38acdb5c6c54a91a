"""What the traversal bench says of walks that a forward pass hides; its figures themselves are no test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsparkd.native.traversal import Walk
from tools.bench.grammar import NODES
from tools.bench.traversal import hidden_share, measure_hiding

ROWS, VOCAB = 3, 70


class Marking:
    """A walk that notes what it was given and fills its masks."""

    def __init__(self) -> None:
        self.drafts: list[list[list[int]]] = []

    def run(self, walk: Walk, deadline_ns: int) -> None:
        self.drafts.append(walk.drafts.tolist())
        walk.mask[:] = 1


@pytest.mark.parametrize(
    ("walk", "waited", "share"), [(4.0, 0.0, 1.0), (4.0, 1.0, 0.75), (4.0, 4.0, 0.0), (4.0, 9.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_hidden_is_what_nobody_waited_for(walk: float, waited: float, share: float) -> None:
    """A step that waits for more than its walk, for the drafted ids' copy say, hides nothing; and no walk, no share."""
    assert hidden_share(walk, waited) == share


def test_each_step_of_the_pipeline_walks_the_drafts_that_it_was_given() -> None:
    """The same walk in every step, through the pipeline's own memory; one time a step and phase."""
    step = Walk(np.arange(ROWS * NODES).reshape(ROWS, NODES), np.zeros((ROWS * NODES, 3), np.int32), VOCAB, 1)
    step.begin(ROWS)
    native = Marking()

    figures = measure_hiding(step, native, torch.device("cpu"), 0.1, rounds=4)

    assert len(native.drafts) >= 4
    assert all(drafts == step.drafts.tolist() for drafts in native.drafts)
    assert set(figures) == {"forward_ms", "step_ms", "traverse_ms", "finish_ms", "hidden_share"}
    assert 0 <= figures["hidden_share"] <= 1
