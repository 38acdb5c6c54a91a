"""Boundary snapshots that a step takes inside a chunk, on one CUDA device: the bits of chunks that end there."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from dsparkd.executor.draft import DraftDesk
from dsparkd.executor.executor import Executor
from dsparkd.executor.plan import Plan, PlanRow, SlotStart, SnapshotSave, StepKind
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.config import load_model_config
from dsparkd.model.weights import load_both_draft_shards, load_both_shards
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import ensure_checkpoint

PAGE = 256
PROMPT = tuple(3 + (7 * i * i + 3 * i) % 250 for i in range(2 * PAGE + 90))
GREEDY = SamplingParams(max_tokens=8, seed=1, temperature=0.0)


class Lab:
    """The shipped checkpoint with its drafter in one process, and a pool with inner slots 5 and 6."""

    def __init__(self, device: torch.device, kv_dtype: Literal["model", "fp8"]) -> None:
        checkpoint = ensure_checkpoint()
        config = load_model_config(checkpoint)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model, exchange = load_both_shards(checkpoint, config, dtype, device)
        drafter, draft_exchange = load_both_draft_shards(checkpoint, model)
        name: Literal["bfloat16", "float32"] = "bfloat16" if device.type == "cuda" else "float32"
        geometry = config.kv_geometry(PAGE, name, drafts=True, kv_dtype=kv_dtype)
        self.pool = KVPool(geometry, PoolSizes(20, 5, 4, 2), dtype, device)
        model.prepare(self.pool)
        desk = DraftDesk(drafter, self.pool, draft_exchange)
        self.executor = Executor(0, model, 0, self.pool, exchange, Tokenizer.load(checkpoint), None, desk)

    def chunk(self, slot: int, start: int, end: int, *saves: SnapshotSave) -> tuple[int, ...]:
        """Compute a part of the prompt; the id that follows where it is the last one."""
        is_last = end == len(PROMPT)
        row = PlanRow(
            request_id=str(slot),
            slot=slot,
            input_ids=PROMPT[start:end],
            start=start,
            page_table=tuple(range(4 * slot - 3, 4 * slot)),
            num_logits=int(is_last),
            sampling=GREEDY if is_last else None,
            prompt_ids=PROMPT,
            output_ids=(),
        )
        starts = () if start else (SlotStart(slot, None, 0),)
        plan = Plan(StepKind.PREFILL, (row,), starts, saves)
        return self.executor.step(plan, (plan.num_tokens, 0)).rows[0].token_ids

    def snapshot(self, number: int) -> list[Tensor]:
        """What one snapshot keeps of each kind."""
        kept = (self.pool.window_snapshots, self.pool.draft_snapshots, self.pool.overlap_snapshots)
        return [each.view(each.shape[0], self.pool.sizes.num_snapshots, -1)[:, number] for each in kept]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["model", "fp8"])
def test_a_chunk_leaves_the_snapshots_of_chunks_that_end_there(kv_dtype: Literal["model", "fp8"]) -> None:
    """Decision 10, T-37: window rows, the drafter's keys and compressor rows, and the same id behind the prompt."""
    lab = Lab(torch.device("cuda", 0), kv_dtype)
    check(lab)


def check(lab: Lab) -> None:
    """Compute the prompt in three chunks, then in one; compare what both leave."""
    lab.chunk(1, 0, PAGE, SnapshotSave(1, 0, PAGE))
    lab.chunk(1, PAGE, 2 * PAGE, SnapshotSave(1, 1, 2 * PAGE))
    expected = lab.chunk(1, 2 * PAGE, len(PROMPT))
    saves = (SnapshotSave(2, 2, PAGE, inner_slot=6), SnapshotSave(2, 3, 2 * PAGE, inner_slot=5))
    assert lab.chunk(2, 0, len(PROMPT), *saves) == expected
    for cut, whole in ((0, 2), (1, 3)):
        for one, other in zip(lab.snapshot(cut), lab.snapshot(whole), strict=True):
            assert one.float().abs().sum() > 0
            assert torch.equal(one, other)
