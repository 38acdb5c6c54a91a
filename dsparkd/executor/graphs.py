"""Graphs: the captured decode steps and drafts of one rank, and all memory that they read and write.

A graph is captured for each tier, a number of tokens, before the rank is ready. A step runs on the smallest tier that
holds what the larger rank brings; both ranks know both numbers, so they replay the same tier or both run eager, and a
rank without rows replays nothing but padding. Which of a tier's graphs runs, with or without scores of entries or noise
of drafts, is each rank's own matter: their collectives are the same. Results lie in memory that all tiers share, and
are good until the next replay.

Letters: T tokens of a tier, R rows, B blocks, G drafts of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsparkd.errors import CapabilityError, InvariantError
from dsparkd.executor.draft import Blocks, DraftDesk
from dsparkd.executor.plan import Plan, PlanRow, StepKind
from dsparkd.executor.shapes import Behind, DraftShape, ShapeLimits, VerifyShape
from dsparkd.kv.pool import KVPool
from dsparkd.model.dspark import Drafts
from dsparkd.model.moe import ExpertExchange
from dsparkd.model.transformer import Transformer

Replay = Callable[[], None]


class Recorder(Protocol):
    """Turns launches into something that can be launched again."""

    @property
    def num_bytes(self) -> int:
        """Device memory that all records hold."""

    def record(self, name: str, body: Callable[[], None]) -> Replay:
        """Run body once, record it, and return what runs the record. Raises CapabilityError where it cannot be."""

    def close(self) -> None:
        """Let go of all records."""


@dataclass(frozen=True, slots=True)
class _Tier:
    """What is captured for T tokens; the graph of long contexts is the short ones' where no context is long."""

    verify: VerifyShape
    short: Replay
    long: Replay


@dataclass(frozen=True, slots=True)
class _DraftTier:
    """What is captured for the blocks of the windows that T tokens hold."""

    shape: DraftShape
    greedy: Replay
    drawn: Replay


class Graphs:
    """Owned by the tick thread; both ranks capture and replay in the same order.

    tiers: tokens, ascending; on the cpu whole row tiles. desk: None where nothing is drafted. num_bytes: device memory
    by kind, known once captured.
    """

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        exchange: ExpertExchange,
        desk: DraftDesk | None,
        tiers: Sequence[int],
        limits: ShapeLimits,
        recorder: Recorder,
    ) -> None:
        self.tiers = tuple(tiers)
        self.num_bytes: dict[str, int] = {}
        self.num_shapes: dict[str, int] = {}
        self._model, self._pool, self._exchange, self._desk = model, pool, exchange, desk
        self._limits, self._recorder = limits, recorder
        gamma, device = pool.geometry.gamma if desk is not None else 0, model.device
        self._num_blocks = _blocks_of(self.tiers, limits) if gamma else {}
        rows = max(limits.max_rows, *self._num_blocks.values(), 1)
        vocab_size = model.config.vocab_size
        self._logits = torch.zeros((self.tiers[-1], vocab_size), device=device)
        self._windows = torch.zeros((rows + 1, 1 + gamma), dtype=torch.int64, device=device)  # the last stays zeros
        self._ids = torch.zeros(self.tiers[-1], dtype=torch.int64, device=device)  # that a step has chosen
        self._survival = torch.zeros((rows, gamma), device=device)
        self._confidence = torch.zeros((rows, gamma), device=device)
        # Acceptance by rejection alone reads what drafts were chosen by.
        keeps = rows if desk is not None and not desk.is_coupled else 0
        self._draft_logits = torch.zeros((keeps, gamma, vocab_size), device=device)
        self._verify: dict[int, _Tier] = {}
        self._draft: dict[int, _DraftTier] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture every tier, the largest first, so that the others find their memory. Raises CapabilityError."""
        total = len(self.tiers) * (1 + bool(self._num_blocks))
        before = self._recorder.num_bytes
        for done, tier in enumerate(reversed(self.tiers)):
            progress(done, total)
            self._verify[tier] = self._capture_verify(tier)
        self.num_bytes["decode"] = self._recorder.num_bytes - before + self._logits.nbytes
        self.num_shapes["decode"] = len(self._verify)
        before = self._recorder.num_bytes
        for done, tier in enumerate(reversed(self._num_blocks), len(self._verify)):
            progress(done, total)
            self._draft[tier] = self._capture_draft(tier)
        shared = (self._windows, self._ids, self._survival, self._confidence, self._draft_logits)
        self.num_bytes["draft"] = self._recorder.num_bytes - before + sum(each.nbytes for each in shared)
        self.num_shapes["draft"] = len(self._draft)
        progress(total, total)

    def tier(self, kind: StepKind, num_tokens: tuple[int, int]) -> int | None:
        """The tier that both ranks' tokens of a decode step run on; None: the step runs eager."""
        if kind is not StepKind.DECODE:
            return None
        return next((tier for tier in self.tiers if tier >= max(num_tokens)), None)

    def draft_tier(self, num_blocks: tuple[int, int]) -> int | None:
        """The tier that both ranks' blocks are drafted on; None: they are drafted eager."""
        return next((tier for tier, blocks in self._num_blocks.items() if blocks >= max(num_blocks)), None)

    def propose(self, tier: int, rows: Sequence[PlanRow], behind: Behind | None = None) -> Blocks:
        """DraftDesk.propose on a tier. Both ranks call it; the blocks are good until the next call.

        behind: the step that verified the rows' last blocks, where the host does not know yet what it kept.
        """
        captured = self._draft[tier]
        if behind is not None:
            self._keep(behind.windows)
            self._ids[: len(behind.ids)] = behind.ids
        captured.shape.refresh(rows, behind)
        (captured.drawn if captured.shape.is_drawn else captured.greedy)()
        return self.blocks(len(rows))

    def blocks(self, count: int) -> Blocks:
        """The memory of the first `count` blocks, whatever lies there; at most as many as a rank has rows."""
        drafts = Drafts(self._windows[:count, 1:], self._draft_logits[:count], self._confidence[:count])
        return Blocks(self._windows[:count], self._survival[:count], drafts)

    def verify(
        self, tier: int, plan: Plan, lengths: Sequence[int], blocks: Blocks | None, before: Tensor | None = None
    ) -> Tensor:
        """Run the target over a decode step with its drafts: logits [tokens, V] float32, good until the next call.

        Context keys for drafts are kept as well. lengths: drafts of each row; their ids are those of blocks. before [S]
        int64 on the device: the ids that rows follow, of a step that does not draft.
        """
        if before is not None:
            self._windows[: len(before), 0] = before
        if blocks is not None:
            self._keep(blocks.windows)
        captured = self._verify[tier]
        captured.verify.refresh(plan, lengths)
        (captured.long if captured.verify.is_long else captured.short)()
        return self._logits[: plan.num_tokens]

    def _keep(self, windows: Tensor) -> None:
        """Bring ids to where graphs read them, unless they lie there."""
        if windows.data_ptr() != self._windows.data_ptr():
            self._windows[: len(windows)] = windows

    def close(self) -> None:
        """Destroy the graphs, then the memory that they use: before the communicators, whose work they hold."""
        self._recorder.close()
        self._verify.clear()
        self._draft.clear()
        del self._logits, self._windows, self._ids, self._survival, self._confidence, self._draft_logits
        del self._model, self._pool, self._desk

    def _capture_verify(self, tier: int) -> _Tier:
        shape = VerifyShape(tier, self._limits, self._pool, self._model.config.index_topk, self._windows)
        shape.refresh(Plan(StepKind.DECODE, ()), ())
        desk = self._desk

        def run(*, is_long: bool) -> None:
            inputs = shape.inputs(is_long=is_long)
            self._exchange.begin_step((tier, tier))
            outputs = self._model.forward(inputs, self._pool, self._exchange, desk.taps if desk is not None else ())
            if desk is not None:
                if outputs.taps is None:
                    raise InvariantError("a forward pass without the taps that were asked for")
                desk.keep(outputs.taps, inputs)
            self._logits[:tier].copy_(outputs.logits)

        name = f"a decode step of {tier} tokens"
        # Longer contexts score their entries, which takes more memory.
        long = self._recorder.record(name, lambda: run(is_long=True)) if shape.has_long else None
        short = self._recorder.record(name, lambda: run(is_long=False))
        return _Tier(shape, short, long or short)

    def _capture_draft(self, tier: int) -> _DraftTier:
        desk, count = self._desk, self._num_blocks[tier]
        if desk is None:
            raise InvariantError("drafts are captured where nothing drafts")
        shape = DraftShape(count, self._pool, is_coupled=desk.is_coupled)
        shape.refresh(())

        def run(*, is_drawn: bool) -> None:
            inputs = shape.inputs(self._windows, self._ids)
            blocks = desk.draft(inputs, shape.sampling(is_drawn=is_drawn), (count, count))
            self._windows[:count].copy_(blocks.windows)
            self._survival[:count].copy_(blocks.survival)
            self._confidence[:count].copy_(blocks.drafts.confidence)
            if self._draft_logits.numel():
                self._draft_logits[:count].copy_(blocks.drafts.logits)

        name = f"the drafting of {count} blocks"
        drawn = self._recorder.record(name, lambda: run(is_drawn=True))
        return _DraftTier(shape, self._recorder.record(name, lambda: run(is_drawn=False)), drawn)


class CudaRecorder:
    """CUDA graphs in one memory pool of their own: what one needs while it runs, the next may use again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._largest = 0
        self._free_before = 0
        self.num_bytes = 0

    def record(self, name: str, body: Callable[[], None]) -> Replay:
        """See Recorder."""
        needed = self._warm_up(name, body)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        self._free_before = self._free_before or free
        # The pool holds what the largest so far took.
        require_room(name, needed - self._largest, free)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                # Other threads of the rank may talk to the device meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                body()
                graph.capture_end()
        except RuntimeError as error:  # what torch raises for every failure of a device
            raise CapabilityError(
                feature="decode_graph.enabled = true",
                missing=f"a device that captures {name} ({_first_line(error)})",
                remedy="set decode_graph.enabled = false",
            ) from error
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs.append(graph)
        self._largest = max(self._largest, needed)
        self.num_bytes = max(0, self._free_before - torch.cuda.mem_get_info(self._device)[0])
        return graph.replay

    def close(self) -> None:
        """See Recorder. Waits for what still runs."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def _warm_up(self, name: str, body: Callable[[], None]) -> int:
        """Run eagerly, which compiles and loads what the capture may not; returns the most bytes that it takes."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        try:
            body()
        except torch.OutOfMemoryError as error:
            raise CapabilityError(
                feature="decode_graph.tiers",
                missing=f"device memory for {name} ({_first_line(error)})",
                remedy="use smaller tiers, or a smaller kv.device_fraction",
            ) from error
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def _blocks_of(tiers: Sequence[int], limits: ShapeLimits) -> dict[int, int]:
    """How many blocks are drafted on each tier: one for each window that it holds.

    A tier that holds no more windows than the one before it has no drafts.
    """
    held: dict[int, int] = {}
    for tier in tiers:
        count = min(tier // limits.width, limits.max_rows)
        if count > max(held.values(), default=0):
            held[tier] = count
    return held


def require_room(name: str, needed: int, free: int) -> None:
    """Raise CapabilityError unless what a graph needs is free; both in bytes."""
    if needed > free:
        raise CapabilityError(
            feature="decode_graph.tiers",
            missing=f"{needed} bytes of device memory for {name} (found {free})",
            remedy="use smaller tiers, or a smaller kv.device_fraction",
        )


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
