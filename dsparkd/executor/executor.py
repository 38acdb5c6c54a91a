"""Executor: one step of one rank, from a plan's rows to token ids; the one class that the scheduler calls."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsparkd.config import Config, KVConfig
from dsparkd.errors import CapabilityError, CheckpointError, InvariantError
from dsparkd.executor import rejection, verify
from dsparkd.executor.collectives import NUM_RANKS
from dsparkd.executor.draft import Blocks, DraftDesk
from dsparkd.executor.graphs import CudaRecorder, Graphs, Recorder
from dsparkd.executor.masks import Masker
from dsparkd.executor.plan import Plan, PlanRow, RowFailure, RowOutput, StepOutput
from dsparkd.executor.sampler import Sampler, most_values
from dsparkd.executor.shapes import Behind, ShapeLimits
from dsparkd.executor.staging import Drafted, Stager, pad_rows
from dsparkd.executor.upload import upload_ids
from dsparkd.grammar.pipeline import Pipeline
from dsparkd.kernels.linear import require_row_invariance
from dsparkd.kv.geometry import size_pool
from dsparkd.kv.pool import KVPool
from dsparkd.model.config import ModelConfig, load_model_config
from dsparkd.model.dspark import Drafts
from dsparkd.model.moe import ExpertExchange
from dsparkd.model.transformer import Transformer
from dsparkd.model.weights import load_drafter, load_transformer
from dsparkd.system import cpu_share_available
from dsparkd.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dsparkd.grammar.matcher import Matcher

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Progress = Callable[[str, int, int], None]  # stage, done, total
Landing = Callable[[], StepOutput]  # waits for a launched step


class Executor:
    """Owned by the tick thread. Both ranks call `launch` for the same ticks, or neither does.

    model_config: the checkpoint's. weight_bytes: what its parameters take on this rank.
    sizes: how many pages, slots and snapshots there are, the null ones included.
    masker: None where no request has a grammar. draft_desk: None where nothing is drafted.
    is_coupled: drafts are accepted by the coupled rule, else by rejection. chunk_tokens: most prompt tokens of a step.
    graphs: None until some are captured. Then the next blocks are drafted behind each step that drafts, while the host
    still reads and plans, and kept in _ahead. _before: ids of the last step, one a row that samples, on the device;
    None where rows gave more.
    """

    def __init__(
        self,
        dp_rank: int,
        model: Transformer,
        weight_bytes: int,
        pool: KVPool,
        exchange: ExpertExchange,
        tokenizer: Tokenizer,
        masker: Masker | None = None,
        draft_desk: DraftDesk | None = None,
        *,
        is_coupled: bool = True,
        chunk_tokens: int = 1024,
    ) -> None:
        self.model_config = model.config
        self.weight_bytes = weight_bytes
        self.sizes = pool.sizes
        self._dp_rank = dp_rank
        self._device = model.device
        self._model = model
        self._pool = pool
        self._exchange = exchange
        self._masker = masker
        self._draft_desk = draft_desk
        self._pipeline = _open_pipeline(pool, masker, chunk_tokens, model.device)
        self._is_coupled = is_coupled
        self.graphs: Graphs | None = None
        self._drafts_ahead = False
        self._ahead: _Ahead | None = None
        self._before: Tensor | None = None
        self._stager = Stager(pool.geometry, model.config.index_topk, model.device)
        self._sampler = Sampler(_has_token(tokenizer, model.config), (model.config.eos_token_id,), model.device)

    @classmethod
    def build(
        cls,
        config: Config,
        dp_rank: int,
        exchange: ExpertExchange,
        progress: Progress,
        masker: Masker | None = None,
    ) -> Executor:
        """Load this rank's weights and make its pools. Raises StartError that names what is wrong."""
        device = rank_device(config, dp_rank)
        # One thread a rank: two ranks share the machine, and a product's bits depend on how it is cut among threads.
        torch.set_num_threads(1)
        if device.type == "cpu":
            require_row_invariance()
        else:
            require_compiler()
        directory = Path(config.engine.checkpoint)
        model_config = load_model_config(directory)
        dtype = DTYPES[config.engine.dtype]
        drafter = None
        with _compiling(device):
            model, weight_bytes = load_transformer(
                directory,
                model_config,
                dtype,
                device,
                dp_rank,
                lambda done, total: progress("weights", done, total),
                config.engine.weights,
            )
            if config.dspark.enabled:
                drafter, draft_bytes = load_drafter(
                    directory,
                    model,
                    dp_rank,
                    lambda done, total: progress("drafter", done, total),
                    config.engine.weights,
                )
                weight_bytes += draft_bytes
        geometry = model_config.kv_geometry(
            config.kv.page_tokens, config.engine.dtype, drafter is not None, config.engine.kv_dtype
        )
        budget = _budget_bytes(config.kv, device)
        sizes = size_pool(geometry, config, budget)
        pool = KVPool(geometry, sizes, dtype, device)
        with _compiling(device):
            model.prepare(pool)
        progress("pools", pool.device_bytes, pool.device_bytes)
        is_coupled = config.dspark.acceptance == "coupled"
        desk = DraftDesk(drafter, pool, exchange, is_coupled=is_coupled) if drafter is not None else None
        tokenizer = Tokenizer.load(directory)
        chunk_tokens = config.scheduler.chunk_tokens
        if chunk_tokens is None:
            raise InvariantError("resolve() gives scheduler.chunk_tokens a value")
        return cls(
            dp_rank,
            model,
            weight_bytes,
            pool,
            exchange,
            tokenizer,
            masker,
            desk,
            is_coupled=is_coupled,
            chunk_tokens=chunk_tokens,
        )

    def capture(
        self,
        tiers: Sequence[int],
        limits: ShapeLimits,
        progress: Callable[[int, int], None],
        recorder: Recorder | None = None,
        *,
        drafts_ahead: bool = True,
    ) -> None:
        """Capture graphs of these numbers of tokens, together with the peer, before the first request.

        recorder: CUDA graphs unless given. drafts_ahead: draft behind a step, not in front of the next one. Raises
        CapabilityError where one cannot be captured or has no room.
        """
        recorder = recorder or CudaRecorder(self._device)
        model, pool, exchange, desk = self._model, self._pool, self._exchange, self._draft_desk
        self.graphs = Graphs(model, pool, exchange, desk, tiers, limits, recorder)
        self.graphs.capture(progress)
        self._drafts_ahead = drafts_ahead and self._is_coupled

    @property
    def kv_bytes(self) -> dict[str, int]:
        """Bytes that each pool holds."""
        geometry, sizes = self._pool.geometry, self.sizes
        return {
            "pages": sizes.num_pages * geometry.page_bytes,
            "slots": sizes.num_slots * geometry.slot_bytes + sizes.num_inner_slots * geometry.inner_slot_bytes,
            "snapshots": sizes.num_snapshots * geometry.snapshot_bytes,
        }

    def step(self, plan: Plan, counts: tuple[int, int]) -> StepOutput:
        """Run one step together with the peer, and wait for it: `launch` and what it gives. Arguments as there."""
        return self.launch(plan, counts)()

    @torch.inference_mode()
    def launch(self, plan: Plan, counts: tuple[int, int]) -> Landing:
        """Launch one step together with the peer; what is returned waits for its outputs, and is called once.

        counts: tokens of rank 0 and rank 1 in this step; a rank without rows takes part while the peer has some. The
        next step may be launched before this one has landed, the one behind it only afterwards. Raises PeerError when
        the peer does not come, InvariantError for a plan that cannot be right.
        """
        if counts[self._dp_rank] != plan.num_tokens:
            raise InvariantError(f"a plan of {plan.num_tokens} tokens in a step agreed on as {counts}")
        verify.require_sound(plan, has_masks=self._masker is not None)
        before = self._take_before(plan)
        for begin in plan.slot_starts:
            if begin.snapshot is None:
                self._pool.reset_slot(begin.slot)
            else:
                self._pool.load_snapshot(begin.slot, begin.snapshot, begin.position)
        num_rows = counts
        blocks, is_drafted = self._draft(plan, num_rows)
        lengths = self._cut(plan, blocks, is_drafted)
        step = verify.with_drafts(plan, lengths)
        if plan.speculation is not None:
            counts = plan.speculation.num_tokens
        if step.num_tokens > counts[self._dp_rank]:
            raise InvariantError(f"{step.num_tokens} tokens to verify in a step agreed on as {counts}")
        masker = self._masker
        grammars = masker.begin(step.rows, lengths) if masker is not None else None
        drafted = _drafted(plan, blocks, lengths)
        slot = self._pipeline.begin(drafted.windows if drafted is not None else None, grammars)
        tier = self.graphs.tier(step.kind, counts) if self.graphs is not None and step.replays else None
        if self.graphs is not None and tier is not None:
            logits = self.graphs.verify(tier, step, lengths, blocks, before)
        else:
            logits = self._forward(step, counts, drafted, before)
        # After the forward pass and before the next: the rings, and the inner slots', hold what the plan names.
        for save in step.snapshot_saves:
            rings = save.slot if save.inner_slot is None else save.inner_slot
            self._pool.save_snapshot(rings, save.snapshot, save.position)
        self._pipeline.launched(slot)
        # The device computes meanwhile; a step without a grammar walks and masks nothing (D-14).
        self._pipeline.finish(slot)
        masks = grammars.masks(slot) if grammars is not None else None
        drafts = verify.drafted(slot.host_ids, lengths)
        asked = verify.ask(step, drafts, masks, masker.think_end_id if masker is not None else None)
        pick = None
        if blocks is not None and not self._is_coupled:
            pick = rejection.picker(blocks, drafts, asked)
        words = slot.words if masks is not None and masks.rows else None
        drawn = self._sampler.draw(logits, asked.samples, asked.prompts, words, pick, before)
        # Of a step without windows each row that samples has one id, and the next step's rows may follow it.
        self._before = drawn.ids if max(asked.readable, default=0) <= 1 else None
        chances = [blocks.survival.double().view(-1)] if blocks is not None else []
        self._pipeline.emit(slot, torch.cat([drawn.values, *chances]))
        behind = self._draft_behind(plan, num_rows, blocks, lengths, asked, drawn.ids)

        def land() -> StepOutput:
            # The one wait for the step's end; nothing is left to do for it.
            host = self._pipeline.consume(slot)
            choices = drawn.read(host[: drawn.values.numel()])
            survival = _rows_of(host[drawn.values.numel() :], len(plan.rows))
            survival = tuple(chances if known else () for chances, known in zip(survival, is_drafted, strict=False))
            rows = verify.collect(step, drafts, asked, choices, masks, survival)
            if behind is not None:
                self._ahead = _Ahead.of(behind, plan.rows, rows)
            timings, num_dropped = self._pipeline.timings.take()
            return StepOutput(rows, len(masks.rows) if masks is not None else 0, timings, num_dropped, tier)

        return land

    def _take_before(self, plan: Plan) -> Tensor | None:
        """The ids of the step before that rows of this one follow; None where none does. Raises InvariantError."""
        before, self._before = self._before, None
        most = max((row.follows for row in plan.rows if row.follows is not None), default=-1)
        if most < 0:
            return None
        if before is None or most >= before.numel():
            held = 0 if before is None else before.numel()
            raise InvariantError(f"a row follows id {most} of a step that gave {held} to follow")
        return before

    def _forward(
        self, step: Plan, counts: tuple[int, int], drafted: Drafted | None, before: Tensor | None = None
    ) -> Tensor:
        """Launch the target over a plan with its drafts: logits [R, V] float32. No host sync."""
        padded = (pad_rows(counts[0]), pad_rows(counts[1]))
        self._exchange.begin_step(padded)
        desk = self._draft_desk
        inputs = self._stager.stage(step, padded[self._dp_rank], drafted, before)
        outputs = self._model.forward(inputs, self._pool, self._exchange, desk.taps if desk is not None else ())
        if desk is not None and outputs.taps is not None:
            desk.keep(outputs.taps, inputs)
        return outputs.logits

    def _cut(self, plan: Plan, blocks: Blocks | None, is_drafted: Sequence[bool]) -> tuple[int, ...]:
        """How many drafts of each row are verified; none of one that was not drafted for."""
        survival = None
        if blocks is not None and verify.needs_chances(plan, self._dp_rank):
            # The layout is made on the host, so the target waits here for the chances that it depends on.
            fetched = self._pipeline.fetch(blocks.survival)
            survival = [row if known else [0.0] * len(row) for row, known in zip(fetched, is_drafted, strict=True)]
        lengths = verify.cut(plan, survival, self._dp_rank)
        return tuple(length if known else 0 for length, known in zip(lengths, is_drafted, strict=True))

    def _draft(self, plan: Plan, counts: tuple[int, int]) -> tuple[Blocks | None, Sequence[bool]]:
        """A block for each row of a step that speculates, and whether the row has one.

        What was drafted ahead is used or dropped by what both ranks know: that the step before drafted ahead, and that
        this one speculates. A row that came between has no drafts this once.
        """
        ahead, self._ahead = self._ahead, None
        everyone = [True] * len(plan.rows)
        if plan.speculation is None:
            return None, everyone
        if self._draft_desk is None:
            raise InvariantError("a plan that drafts, where nothing is drafted")
        tier = self.graphs.draft_tier(counts) if self.graphs is not None and plan.replays else None
        if ahead is not None and plan.replays:
            return ahead.take(plan.rows, self._device)
        if self.graphs is not None and tier is not None:
            return self.graphs.propose(tier, plan.rows), everyone
        return self._draft_desk.propose(plan.rows, counts), everyone

    def _draft_behind(
        self,
        plan: Plan,
        counts: tuple[int, int],
        blocks: Blocks | None,
        lengths: Sequence[int],
        asked: verify.Asked,
        ids: Tensor,
    ) -> Blocks | None:
        """Draft the next blocks at once, from anchors that only the device knows; None where that is not done."""
        tier = self.graphs.draft_tier(counts) if self.graphs is not None and self._drafts_ahead else None
        if self.graphs is None or tier is None or not plan.replays or blocks is None:
            return None
        self.graphs.propose(tier, plan.rows, Behind(blocks.windows, ids, *verify.bounds(lengths, asked)))
        return self.graphs.blocks(self.sizes.num_slots - 1)

    def commit_grammars(self, matchers: Sequence[Matcher]) -> list[RowFailure | None]:
        """Tell grammars the last ids of rows that have ended; see Masker.commit."""
        if self._masker is None:
            raise InvariantError("a row with a grammar, where grammars are off")
        return self._masker.commit(matchers)

    def close(self) -> None:
        """Let go of graphs, weights and pools, so that their memory is free before the process groups end.

        Graphs go first: they hold collectives, and groups that are destroyed before them may never return.
        """
        self._pipeline.close()
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        if self._masker is not None:
            self._masker.close()
        del self._model, self._pool, self._draft_desk
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Blocks that were drafted behind a step, and memory up to the most rows of one.

    places: by request, its block, its next position and its last id.
    """

    blocks: Blocks
    places: Mapping[str, tuple[int, int, int]]

    @classmethod
    def of(cls, blocks: Blocks, rows: Sequence[PlanRow], outputs: Sequence[RowOutput]) -> _Ahead:
        """Note where the rows of the step stand that the blocks are for."""
        places = {
            row.request_id: (index, row.start + len(output.token_ids), output.token_ids[-1])
            for index, (row, output) in enumerate(zip(rows, outputs, strict=True))
            if output.token_ids
        }
        return cls(blocks, places)

    def take(self, rows: Sequence[PlanRow], device: torch.device) -> tuple[Blocks, Sequence[bool]]:
        """The blocks in the order of the next step's rows, and which of the rows have one: those that stand there."""
        found = [self.places.get(row.request_id) for row in rows]
        is_drafted = [
            place is not None and place[1:] == (row.start, row.input_ids[-1])
            for place, row in zip(found, rows, strict=True)
        ]
        index = [place[0] if place is not None else 0 for place in found]
        blocks, drafts = self.blocks, self.blocks.drafts
        if index == list(range(len(index))):
            count = len(index)
            drafts = Drafts(drafts.ids[:count], drafts.logits[:count], drafts.confidence[:count])
            return Blocks(blocks.windows[:count], blocks.survival[:count], drafts), is_drafted
        chosen = upload_ids(index, device)
        drafts = Drafts(drafts.ids.index_select(0, chosen), drafts.logits, drafts.confidence.index_select(0, chosen))
        windows, survival = blocks.windows.index_select(0, chosen), blocks.survival.index_select(0, chosen)
        return Blocks(windows, survival, drafts), is_drafted


def _open_pipeline(pool: KVPool, masker: Masker | None, chunk_tokens: int, device: torch.device) -> Pipeline:
    """Memory for as many rows as have slots; their windows are a block at most, and what grammars hold of them."""
    gamma = pool.geometry.gamma
    rows, width, mask_width, vocab_size = pool.sizes.num_slots - 1, 1 + gamma, 0, 0
    if masker is not None:
        rows, width, mask_width = masker.num_rows, max(width, masker.width), masker.width
        vocab_size = masker.vocab_size
    # Of the largest step: what was chosen for each place of each window, a chunk of prompts, and the drafts' chances.
    num_samples = max(rows, pool.sizes.num_slots - 1) * width
    num_results = most_values(num_samples, chunk_tokens) + num_samples
    return Pipeline(rows, width, mask_width, vocab_size, num_results, device)


def _drafted(plan: Plan, blocks: Blocks | None, lengths: Sequence[int]) -> Drafted | None:
    """The drafts of a step that may be verified; None where there are none."""
    if blocks is None or plan.speculation is None or not plan.rows:
        return None
    return Drafted(blocks.windows[:, : 1 + plan.speculation.max_drafts].contiguous(), lengths)


def _rows_of(values: Sequence[float], num_rows: int) -> tuple[tuple[float, ...], ...]:
    """Cut values into as many rows of one length; none where there are no values."""
    if not values:
        return ()
    width = len(values) // num_rows
    return tuple(tuple(values[at : at + width]) for at in range(0, len(values), width))


def require_compiler() -> None:
    """Raise CapabilityError where Triton would find no C compiler to build its kernels' launchers with."""
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("gcc", "clang")):
        raise CapabilityError(
            feature='engine.device = "cuda"',
            missing="a C compiler, with which Triton builds the launchers of its kernels",
            remedy="install gcc or clang",
        )


def _compiling(device: torch.device) -> AbstractContextManager[None]:
    """Compile a device's kernels side by side, on this rank's part of the processors."""
    if device.type == "cpu":
        return nullcontext()
    from dsparkd.kernels.cuda.compiling import side_by_side  # a cpu start imports no triton

    return side_by_side(max(1, int(cpu_share_available()) // NUM_RANKS))


def rank_device(config: Config, dp_rank: int) -> torch.device:
    """The device of one rank: its own GPU or the shared one, made current, or cpu."""
    if config.engine.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0 if config.engine.shared_device else dp_rank)
    torch.cuda.set_device(device)
    return device


def _budget_bytes(config: KVConfig, device: torch.device) -> int:
    """Bytes for all pools of this rank."""
    if config.device_bytes is not None:
        return config.device_bytes
    if config.device_fraction is None or device.type != "cuda":
        raise InvariantError("resolve() lets kv.device_fraction through for cuda only")
    torch.cuda.empty_cache()  # what the loader no longer needs is free
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * config.device_fraction)


def _has_token(tokenizer: Tokenizer, config: ModelConfig) -> list[bool]:
    """For every id of the model's vocabulary, whether the tokenizer knows it."""
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, config.json vocab_size is {config.vocab_size}"
        )
    return [bool(tokenizer.token_bytes(token_id)) for token_id in range(config.vocab_size)]
