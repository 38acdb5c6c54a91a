"""Greedy decoding of many prompts by one process over our model code: no server, no sampling, no prefix cache.

Every step holds a row of one token for each sequence that decodes, and chunks of the prompts that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dsparkd.executor.plan import PlanRow
from dsparkd.kv.geometry import PoolSizes
from dsparkd.model.config import load_model_config
from tools.oracle import Engine, plan_row

PAGE_TOKENS = 256


@dataclass(slots=True)
class _Sequence:
    """One prompt and what was decoded; computed: how many of its tokens are in the cache."""

    index: int
    prompt: list[int]
    slot: int = 0
    pages: tuple[int, ...] = ()
    computed: int = 0
    output: list[int] = field(default_factory=list)


class DecodeLoop:
    """Runs the whole model in one process.

    max_rows: sequences at once. context_tokens: of the longest prompt with its output. chunk_tokens: prompt tokens of
    one step.
    """

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        dtype: torch.dtype,
        max_rows: int,
        context_tokens: int,
        chunk_tokens: int,
    ) -> None:
        pages_each = -(-context_tokens // PAGE_TOKENS)
        sizes = PoolSizes(num_pages=1 + max_rows * pages_each, num_slots=1 + max_rows, num_snapshots=1)
        self._engine = Engine(checkpoint, dtype, PAGE_TOKENS, sizes, device)
        self._eos_id = load_model_config(checkpoint).eos_token_id
        self._context_tokens = context_tokens
        self._chunk_tokens = chunk_tokens
        self._slots = list(range(1, 1 + max_rows))
        self._pages = list(range(1, sizes.num_pages))

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[list[int]], max_tokens: int, progress: Callable[[int], None] = lambda done: None
    ) -> list[list[int]]:
        """Decode each prompt until its EOS, which is left out, or max_tokens; outputs in the prompts' order."""
        longest = max(map(len, prompts), default=0) + max_tokens
        if longest > self._context_tokens:
            raise ValueError(f"{longest} tokens are more than the loop's {self._context_tokens}")
        waiting = deque(_Sequence(index, list(prompt)) for index, prompt in enumerate(prompts))
        running: list[_Sequence] = []
        outputs: list[list[int]] = [[] for _ in prompts]
        num_done = 0
        while waiting or running:
            while waiting and self._slots:
                running.append(self._admit(waiting.popleft(), max_tokens))
            rows, sampled = self._rows(running)
            tokens = self._engine.step(rows).logits.argmax(-1).tolist()
            for sequence, token in zip(sampled, tokens, strict=True):
                if token != self._eos_id:
                    sequence.output.append(token)
                if token == self._eos_id or len(sequence.output) == max_tokens:
                    outputs[sequence.index] = sequence.output
                    running.remove(sequence)
                    self._release(sequence)
                    num_done += 1
                    progress(num_done)
        return outputs

    def _rows(self, running: list[_Sequence]) -> tuple[list[PlanRow], list[_Sequence]]:
        """Rows of one step, and the sequences whose next token its logits give, in their order."""
        rows: list[PlanRow] = []
        sampled: list[_Sequence] = []
        budget = self._chunk_tokens
        # Decode rows first, as a plan has them.
        for sequence in sorted(running, key=lambda one: one.computed < len(one.prompt)):
            total = len(sequence.prompt) + len(sequence.output)
            length = total - sequence.computed
            if sequence.computed < len(sequence.prompt):
                length = min(length, budget)
                budget -= length
            if length == 0:
                continue
            known = sequence.prompt if sequence.computed < len(sequence.prompt) else sequence.output[-1:]
            ids = known[sequence.computed : sequence.computed + length] if known is sequence.prompt else known
            last = sequence.computed + length == total
            rows.append(plan_row(ids, sequence.computed, sequence.slot, sequence.pages, int(last), str(sequence.index)))
            sequence.computed += length
            if last:
                sampled.append(sequence)
        return rows, sampled

    def _admit(self, sequence: _Sequence, max_tokens: int) -> _Sequence:
        sequence.slot = self._slots.pop()
        count = -(-(len(sequence.prompt) + max_tokens) // PAGE_TOKENS)
        sequence.pages = tuple(self._pages.pop() for _ in range(count))
        return sequence

    def _release(self, sequence: _Sequence) -> None:
        self._slots.append(sequence.slot)
        self._pages.extend(sequence.pages)
