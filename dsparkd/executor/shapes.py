"""Captured shapes: the memory that a graph reads, and the inputs that are made of it inside the graph.

Each shape has one block of words at fixed addresses. The host lays a plan out in pinned memory, padding behind it, and
one copy brings all of it; what follows from these words by arithmetic is computed by the graph itself. A plan is
checked against the shape before anything is sent.

Letters: T tokens, R rows, P pages of a row, N closing entries, E entries a row may see, W window, B blocks, G drafts of
a block (gamma).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.executor.draft import anchor_positions, drawn_temperatures, sampling_params
from dsparkd.executor.plan import Plan, PlanRow
from dsparkd.executor.staging import Tokens, check, followed, lay_out, ranges
from dsparkd.kernels.blocks import Anchors, go_on
from dsparkd.kernels.sources import Origin, sources
from dsparkd.kernels.tiles import KEY_TILE
from dsparkd.kv.geometry import CSA_RATIO, HCA_RATIO
from dsparkd.kv.pool import KVPool
from dsparkd.model.dspark import DraftInputs, DraftSampling
from dsparkd.model.inputs import (
    AttentionMetadata,
    CompressedMetadata,
    ForwardInputs,
    RingStore,
    WindowBlock,
    nowhere,
)

Ints = NDArray[np.int64]

FIELD_WORDS = 16  # fields begin at multiples: kernels are compiled for pointers of one alignment
FAR = 1 << 40  # behind every position: an entry that does not close takes nothing from the step's own rows


class Feed:
    """The words of one shape. tensors: its fields on the device, int64, at addresses that never change.

    The host writes into one of two buffers in turn, so that a copy under way is not overwritten. Owned by the tick
    thread.
    """

    def __init__(self, fields: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        pin = device.type == "cuda"
        sizes = [-(-math.prod(shape) // FIELD_WORDS) * FIELD_WORDS for shape in fields.values()]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._hosts = tuple(torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pin) for _ in range(2))
        self._words = torch.zeros(sum(sizes), dtype=torch.int64, device=device)

        def cut(words: Tensor) -> dict[str, Tensor]:
            return {
                name: words[start : start + math.prod(shape)].view(shape)
                for start, (name, shape) in zip(starts, fields.items(), strict=True)
            }

        self.tensors: Mapping[str, Tensor] = cut(self._words)
        self._arrays = tuple({name: part.numpy() for name, part in cut(host).items()} for host in self._hosts)
        # The copy out of a buffer is waited for before the buffer is written again: two refreshes later, so never long.
        self._sent = tuple(torch.cuda.Event() for _ in range(2)) if pin else ()  # type: ignore[no-untyped-call]
        self._turn = 0

    def arrays(self) -> Mapping[str, Ints]:
        """The buffer to write next; what it holds is of two refreshes ago."""
        if self._sent and not self._sent[self._turn].query():  # type: ignore[no-untyped-call]
            self._sent[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self) -> None:
        """Bring what was written to the device, behind what the current stream holds."""
        self._words.copy_(self._hosts[self._turn], non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
        self._turn = 1 - self._turn


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """What a rank's steps can hold. num_pages: of one row. width: tokens of a row at most, its anchor included."""

    max_rows: int
    num_pages: int
    width: int


@dataclass(frozen=True, slots=True)
class _Ratio:
    """One compression ratio of a shape. span: positions before an entry's first token that it mixes in. capacity: N."""

    name: str
    ratio: int
    before: int
    ring: int
    page_entries: int
    capacity: int


def choose_tiers(most: int) -> tuple[int, ...]:
    """Tiers up to `most` tokens: powers of two, from 6 on with steps of three quarters, and `most` itself.

    The kernels of a device take any number of rows, and a step of few takes about as long as its launches.
    """
    powers = [1 << exponent for exponent in range(most.bit_length())]
    tiers = {*powers, *(3 * power // 2 for power in powers if power >= 4)}
    return (*(tier for tier in sorted(tiers) if tier < most), most)


class VerifyShape:
    """A decode step of at most num_tokens tokens, padded to them; each token has a row of logits.

    windows [R + 1, 1 + G] int64: where drafted ids lie, of each row its anchor's first; or those that rows follow, in
    the first column. The last row is zeros, which are added to the ids that the host knows. After `refresh`, is_long
    says whether a token sees more entries than the indexer keeps: then the graph that scores them is to be replayed.
    """

    def __init__(self, num_tokens: int, limits: ShapeLimits, pool: KVPool, index_topk: int, windows: Tensor) -> None:
        self.num_tokens = num_tokens
        self.is_long = False
        self._pool, self._topk, self._windows = pool, index_topk, windows
        g, device = pool.geometry, windows.device
        T, R = num_tokens, min(limits.max_rows, num_tokens)
        self._device, self._max_rows, self._num_pages = device, R, limits.num_pages
        # T tokens in R rows of at most `width` close no more entries than either bound.
        csa = min((T + (CSA_RATIO - 1) * R) // CSA_RATIO, R * -(-limits.width // CSA_RATIO))
        self._ratios = tuple(
            ratio
            for count, ratio in (
                (g.num_csa_layers, _Ratio("csa", CSA_RATIO, CSA_RATIO, g.csa_ring_rows, g.csa_entries_per_page, csa)),
                (g.num_hca_layers, _Ratio("hca", HCA_RATIO, 0, g.hca_ring_rows, g.hca_entries_per_page, R)),
            )
            if count
        )
        names = ("input_ids", "picks", "positions", "first", "slots", "starts", "offsets", "rows", "window.dst")
        fields: dict[str, tuple[int, ...]] = {"num_live": (1,), **dict.fromkeys(names, (T,))}
        if g.num_draft_stages:
            fields["draft.dst"] = (T,)
        for ratio in self._ratios:
            fields |= {f"{ratio.name}.{part}": (T,) for part in ("dst", "counts")}
            fields |= {
                f"{ratio.name}.{part}": (ratio.capacity,)
                for part in ("closing", "slots", "starts", "offsets", "places")
            }
        # Entry slots come in whole key tiles; pages behind a row's own are the null one.
        columns = max((_whole_tiles(limits.num_pages, each.page_entries) for each in self._ratios), default=1)
        fields["pages"] = (R, columns)
        self.feed = Feed(fields, device)
        self._tokens = torch.arange(T, device=device)
        self._entries = torch.arange(max((each.page_entries for each in self._ratios), default=0), device=device)

    @property
    def has_long(self) -> bool:
        """Whether contexts of this server can be longer than what the indexer keeps."""
        csa = [each for each in self._ratios if each.ratio == CSA_RATIO]
        return any(self._num_pages * each.page_entries > self._topk for each in csa)

    def refresh(self, plan: Plan, lengths: Sequence[int]) -> None:
        """Lay a decode step out: live rows, then padding behind them, every word of it. No host sync.

        lengths: how many of each row's last tokens are drafts, whose ids stand in windows. Raises InvariantError for a
        plan that the shape does not hold.
        """
        self._check(plan)
        tokens = lay_out(plan, self.num_tokens)
        n = tokens.num_tokens
        words = self.feed.arrays()
        words["num_live"][0] = n
        ids = words["input_ids"]
        ids[:n], ids[n:] = np.fromiter((i for row in plan.rows for i in row.input_ids), np.int64, n), 0
        words["picks"][:] = self._windows.numel() - 1
        row, column = ranges(np.ones(len(lengths), np.int64), 1 + np.array(lengths, np.int64))
        ends = tokens.offsets + tokens.ends - tokens.starts
        places = (ends - np.array(lengths, np.int64))[row] + column - 1
        words["picks"][places] = row * self._windows.shape[1] + column
        ids[places] = 0
        rows, picks = followed(plan)
        words["picks"][tokens.offsets[rows]] = picks * self._windows.shape[1]
        ids[tokens.offsets[rows]] = 0
        for name, values in (
            ("positions", tokens.position),
            ("slots", tokens.slot),
            ("starts", tokens.start),
            ("offsets", tokens.offset),
            ("rows", tokens.row),
        ):
            words[name][:] = values
        np.maximum(self._pool.geometry.window - 1 - tokens.position, 0, out=words["first"])
        self._place(words["window.dst"], tokens, self._pool.geometry.window_ring_rows)
        if "draft.dst" in words:
            self._place(words["draft.dst"], tokens, self._pool.geometry.draft_ring_rows)
        pages = words["pages"]
        pages[:] = 0
        for b, plan_row in enumerate(plan.rows):
            table = plan_row.page_table[: self._num_pages]
            pages[b, : len(table)] = table
        self.is_long = False
        for ratio in self._ratios:
            self._close(words, ratio, tokens, pages)
            self.is_long |= ratio.ratio == CSA_RATIO and int(words["csa.counts"].max()) > self._topk
        self._require_inside(words, n)
        self.feed.send()

    def _check(self, plan: Plan) -> None:
        check(plan, self._pool.geometry)
        if len(plan.rows) > self._max_rows or plan.num_tokens > self.num_tokens:
            room = f"{self._max_rows} of {self.num_tokens}"
            raise InvariantError(f"{len(plan.rows)} rows of {plan.num_tokens} tokens in a graph for {room}")
        for row in plan.rows:
            if row.num_logits != len(row.input_ids):
                raise InvariantError(f"request {row.request_id}: {row.num_logits} logit rows in a graph's decode step")
            # More would overwrite, in rings, what the first of them reads.
            if len(row.input_ids) > 1 + self._pool.geometry.gamma:
                raise InvariantError(f"request {row.request_id}: {len(row.input_ids)} tokens in a graph's decode step")

    def _place(self, target: Ints, tokens: Tokens, ring: int) -> None:
        """Each token's ring row; windows are shorter than rings, so all are kept."""
        n = tokens.num_tokens
        target[:n] = tokens.slot[:n] * ring + tokens.position[:n] % ring
        target[n:] = nowhere(self._device)

    def _close(self, words: Mapping[str, Ints], ratio: _Ratio, tokens: Tokens, pages: Ints) -> None:
        """Which entries close, with sentinels behind them, and how many each token sees."""
        part = {name: words[f"{ratio.name}.{name}"] for name in ("closing", "slots", "starts", "offsets", "places")}
        self._place(words[f"{ratio.name}.dst"], tokens, ratio.ring)
        words[f"{ratio.name}.counts"][:] = (tokens.position + 1) // ratio.ratio  # padding, at position 0, sees none
        row, entry = ranges(tokens.starts // ratio.ratio, tokens.ends // ratio.ratio)
        m = len(entry)
        if m > ratio.capacity:
            raise InvariantError(f"{m} entries of {ratio.ratio} tokens close, in a graph for {ratio.capacity}")
        part["closing"][:m], part["closing"][m:] = entry * ratio.ratio, 0
        part["slots"][:m], part["slots"][m:] = tokens.slots[row], 0
        part["starts"][:m], part["starts"][m:] = tokens.starts[row], FAR
        part["offsets"][:m], part["offsets"][m:] = tokens.offsets[row], 0
        page = pages[row, entry // ratio.page_entries]
        part["places"][:m] = page * ratio.page_entries + entry % ratio.page_entries
        part["places"][m:] = nowhere(self._device)

    def _require_inside(self, words: Mapping[str, Ints], n: int) -> None:
        """Raise InvariantError for a place outside the pool; a kernel would write there."""
        sizes = self._pool.sizes
        if n and int(words["slots"].max()) >= sizes.num_slots:
            raise InvariantError(f"slot {int(words['slots'].max())} of {sizes.num_slots}")
        if not 0 <= int(words["pages"].min()) <= int(words["pages"].max()) < sizes.num_pages:
            raise InvariantError(f"page {int(words['pages'].max())} of {sizes.num_pages}")

    def inputs(self, *, is_long: bool) -> ForwardInputs:
        """What a forward pass reads, made of the words on the device; part of what a graph captures."""
        words, T = self.feed.tensors, self.num_tokens
        positions = words["positions"]
        window = self._pool.geometry.window
        ring = self._pool.geometry.window_ring_rows
        origin = Origin(ring, words["slots"], words["starts"], words["offsets"])
        window_sources = sources(positions, 1 - window, window, origin)  # [T, W]
        picked = self._windows.view(-1).index_select(0, words["picks"])
        compressed = {each.ratio: self._compressed(each, is_long=is_long) for each in self._ratios}
        return ForwardInputs(
            num_tokens=T,
            num_live=words["num_live"],
            input_ids=words["input_ids"] + picked,
            positions=positions,
            logit_rows=None,
            num_logits=T,
            attention=AttentionMetadata(
                blocks=(WindowBlock(0, T, window_sources, words["first"], all_visible=False),),
                window_store=RingStore(self._tokens, words["window.dst"], early=True),
                csa=compressed.get(CSA_RATIO),
                hca=compressed.get(HCA_RATIO),
            ),
            draft_store=RingStore(self._tokens, words["draft.dst"], in_order=True) if "draft.dst" in words else None,
        )

    def _compressed(self, ratio: _Ratio, *, is_long: bool) -> CompressedMetadata:
        def part(name: str) -> Tensor:
            return self.feed.tensors[f"{ratio.name}.{name}"]

        closing = part("closing")
        origin = Origin(ratio.ring, part("slots"), part("starts"), part("offsets"))
        rows = sources(closing, -ratio.before, ratio.before + ratio.ratio, origin)  # [N, span]
        pages = self.feed.tensors["pages"][:, : _whole_tiles(self._num_pages, ratio.page_entries)]
        entries = self._entries[: ratio.page_entries]
        entry_slots = torch.add(entries, pages[:, :, None], alpha=ratio.page_entries).flatten(1)  # [R, E]
        most = entry_slots.shape[1]
        if ratio.ratio == CSA_RATIO and not is_long:
            most = min(most, self._topk)
        return CompressedMetadata(
            store=RingStore(self._tokens, part("dst"), early=True),
            closing=rows.view(-1),
            num_closing=ratio.capacity,
            closing_positions=closing,
            closing_dst=part("places"),
            first=rows[:, 0] == 0 if ratio.before and self._device.type == "cpu" else None,
            counts=part("counts"),
            row_ids=self.feed.tensors["rows"],
            entry_slots=entry_slots,
            block_counts=(most,),
        )


@dataclass(frozen=True, slots=True)
class Behind:
    """A step that verified blocks, and whose outcome only the device knows: windows [B, 1 + G], ids [S] int64 on it.

    firsts, limits [B]: as verify.bounds has them.
    """

    windows: Tensor
    ids: Tensor
    firsts: Ints
    limits: Ints


class DraftShape:
    """The drafting of at most num_blocks blocks, padded to them. After `refresh`, is_drawn says whether a block is
    drawn: then the graph with noise is to be replayed, in which a temperature of 0 still means greedy."""

    def __init__(self, num_blocks: int, pool: KVPool, *, is_coupled: bool) -> None:
        self.num_blocks = num_blocks
        self.is_drawn = False
        self._pool, self._is_coupled = pool, is_coupled
        names = ("anchor_ids", "positions", "slots", "seeds", "choices", "temperatures", "firsts", "limits")
        self.feed = Feed({"num_live": (1,), **dict.fromkeys(names, (num_blocks,))}, pool.draft_keys.device)

    def refresh(self, rows: Sequence[PlanRow], behind: Behind | None = None) -> None:
        """Lay the anchors out, padding behind them; behind: the step that moves them. No host sync.

        Raises InvariantError for more than there is room.
        """
        n = len(rows)
        if n > self.num_blocks:
            raise InvariantError(f"{n} blocks in a graph for {self.num_blocks}")
        words = self.feed.arrays()
        params = [sampling_params(row) for row in rows]
        temperatures = drawn_temperatures(params)
        words["num_live"][0] = n
        words["anchor_ids"][:n] = [row.input_ids[-1] for row in rows]
        words["positions"][:n] = anchor_positions(rows)
        words["slots"][:n] = [row.slot for row in rows]
        words["seeds"][:n] = [each.seed for each in params]
        words["choices"][:n] = [each.choice for each in params]
        words["temperatures"].view(np.float64)[:n] = temperatures
        for name, values in words.items():
            if name != "num_live":
                values[n:] = 0
        words["limits"][:] = -1
        if behind is not None:
            words["firsts"][:n], words["limits"][:n] = behind.firsts, behind.limits
        if n and int(words["slots"].max()) >= self._pool.sizes.num_slots:
            raise InvariantError(f"slot {int(words['slots'].max())} of {self._pool.sizes.num_slots}")
        self.is_drawn = bool(temperatures.any())
        self.feed.send()

    def inputs(self, windows: Tensor, ids: Tensor) -> DraftInputs:
        """What the drafter reads, made of the words on the device; part of what a graph captures.

        windows [B or more, 1 + G] int64: the blocks that the step before verified, ids [S] int64: what it chose.
        """
        words, geometry = self.feed.tensors, self._pool.geometry
        known = Anchors(words["anchor_ids"], words["positions"])
        anchors = go_on(known, windows, ids, words["firsts"], words["limits"])
        origin = Origin(geometry.draft_ring_rows, words["slots"])
        return DraftInputs(
            anchor_ids=anchors.ids,
            positions=anchors.positions,
            rings=self._pool.draft_keys,
            sources=sources(anchors.positions, -geometry.window, geometry.window, origin),
            first=(geometry.window - anchors.positions).clamp(min=0),
            all_visible=False,
            num_live_blocks=words["num_live"],
        )

    def sampling(self, *, is_drawn: bool) -> DraftSampling | None:
        """How blocks draw; None in the graph where all are greedy."""
        words = self.feed.tensors
        if not is_drawn:
            return None
        return DraftSampling(
            temperatures=words["temperatures"].view(torch.float64).float(),
            seeds=words["seeds"],
            choices=words["choices"],
            is_coupled=self._is_coupled,
        )


def _whole_tiles(num_pages: int, page_entries: int) -> int:
    """Pages, at least num_pages, whose entries are whole key tiles."""
    step = KEY_TILE // math.gcd(page_entries, KEY_TILE)
    return -(-num_pages // step) * step
