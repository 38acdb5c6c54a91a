"""Routers, shards and the exchange of experts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dsparkd.errors import CheckpointError
from dsparkd.kernels.router import Routes, pack
from dsparkd.model.config import ModelConfig, load_model_config
from dsparkd.model.moe import LocalExpertExchange, MoE, hash_table, unpack
from dsparkd.model.weights import Checkpoint

CPU = torch.device("cpu")


class PairedExchange:
    """Two ranks in two threads, meeting at a barrier: what two processes do, with nothing between."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[Tensor]) -> None:
        self._rank, self._barrier, self._board = rank, barrier, board
        self._counts = (0, 0)

    def begin_step(self, counts: tuple[int, int]) -> None:
        self._counts = counts

    def _swap(self, mine: Tensor) -> list[Tensor]:
        self._board[self._rank] = mine
        self._barrier.wait(20)
        both = list(self._board)
        self._barrier.wait(20)
        return both

    def room(self, width: int, device: torch.device) -> Tensor:
        return torch.full((self._counts[self._rank], width), torch.nan)

    def crossing(self) -> None:
        return None

    def parting(self, width: int, device: torch.device) -> None:
        return None

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat(self._swap(rows))

    def combine(self, partial: Tensor) -> list[Tensor]:
        first = self._rank * self._counts[0]
        return [each[first : first + self._counts[self._rank]] for each in self._swap(partial)]


@pytest.fixture(scope="module")
def config(small_checkpoint: Path) -> ModelConfig:
    return load_model_config(small_checkpoint)


def load(directory: Path, config: ModelConfig, rank: int, layer: int, dtype: torch.dtype = torch.float32) -> MoE:
    with Checkpoint(directory, config, dtype, CPU, (rank,)) as checkpoint:
        return MoE(config, checkpoint, f"layers.{layer}.ffn", layer < config.num_hash_layers, rank)


def local(directory: Path, config: ModelConfig, layer: int) -> Callable[[Tensor, Tensor, int], Tensor]:
    """The whole layer in one process."""
    mine, peer = load(directory, config, 0, layer), load(directory, config, 1, layer)

    def run(x: Tensor, ids: Tensor, num_tokens: int) -> Tensor:
        exchange = LocalExpertExchange([peer.experts])
        exchange.begin_step((x.shape[0], 0))
        return mine.forward(x, ids, torch.tensor([num_tokens]), exchange).total()

    return run


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layer", [0, 4])
def test_the_layer_follows_the_definition(small_checkpoint: Path, config: ModelConfig, layer: int) -> None:
    """Sections 3.7, plainly, a token and an expert at a time; layer 0 is hash-routed, 4 scored."""
    x, ids = noise(16, 64), torch.arange(16) * 11
    with Checkpoint(small_checkpoint, config, torch.float32, CPU, (0, 1)) as source:
        prefix = f"layers.{layer}.ffn"
        scores = torch.nn.functional.softplus(x @ source.float32(f"{prefix}.gate.weight").t()).sqrt()
        if layer == 0:
            chosen = source.integer(f"{prefix}.gate.tid2eid")[ids]
        else:
            chosen = (scores + source.float32(f"{prefix}.gate.bias")).topk(config.num_experts_per_tok).indices
        names = [f"{prefix}.experts.{e}" for e in range(config.n_routed_experts)] + [f"{prefix}.shared_experts"]
        experts = [tuple(source.linear(f"{name}.{w}") for w in ("w1", "w2", "w3")) for name in names]

    def apply(expert: int, row: Tensor) -> Tensor:
        w1, w2, w3 = experts[expert]
        gate, up = (
            (w1 @ row).clamp(max=config.swiglu_limit),
            (w3 @ row).clamp(-config.swiglu_limit, config.swiglu_limit),
        )
        return w2 @ (torch.nn.functional.silu(gate) * up)

    expected = []
    for t in range(16):
        total = apply(-1, x[t])
        picked = scores[t, chosen[t]]
        for e, share in zip(chosen[t].tolist(), picked / picked.sum() * config.routed_scaling_factor, strict=True):
            total = total + share * apply(e, x[t])
        expected.append(total)
    got = local(small_checkpoint, config, layer)(x, ids, 16)
    assert torch.allclose(got, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_the_shared_expert_runs_while_rows_travel(small_checkpoint: Path, config: ModelConfig) -> None:
    """It is launched before the router, and waited for behind the peers' sums alone."""
    events: list[str] = []

    def run(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        events.append("begin")
        result = work()

        def join() -> Tensor:
            events.append("join")
            return result

        return join

    class Watch(LocalExpertExchange):
        """The exchange, which says when it is used."""

        def gather(self, rows: Tensor) -> Tensor:
            events.append("gather")
            return super().gather(rows)

        def combine(self, partial: Tensor) -> Tensor:
            events.append("combine")
            return super().combine(partial)

    peer = load(small_checkpoint, config, 1, 4)
    with Checkpoint(small_checkpoint, config, torch.float32, CPU, (0,)) as checkpoint:
        moe = MoE(config, checkpoint, "layers.4.ffn", False, 0, run)
    exchange = Watch([peer.experts])
    exchange.begin_step((16, 0))
    x, ids = noise(16, 64), torch.arange(16)
    got = moe.forward(x, ids, torch.tensor([16]), exchange).total()
    assert events == ["begin", "gather", "combine", "join"]
    assert torch.equal(got, local(small_checkpoint, config, 4)(x, ids, 16))


@pytest.mark.parametrize("layer", [0, 4])
def test_a_tokens_bits_depend_neither_on_its_batch_nor_on_its_rank(
    small_checkpoint: Path, config: ModelConfig, layer: int
) -> None:
    """One process, two ranks with different loads, a rank without tokens: the same sums in the same order."""
    x, ids = noise(48, 64), (torch.arange(48) * 7) % config.vocab_size
    whole = local(small_checkpoint, config, layer)
    together = whole(x, ids, 48)
    for at in range(0, 48, 16):
        assert torch.equal(whole(x[at : at + 16], ids[at : at + 16], 16), together[at : at + 16])

    for split in (0, 16, 32, 48):
        board: list[Tensor] = [torch.empty(0)] * 2
        barrier = threading.Barrier(2)
        results: list[Tensor] = [torch.empty(0)] * 2

        def rank_main(
            rank: int,
            split: int = split,
            board: list[Tensor] = board,
            barrier: threading.Barrier = barrier,
            results: list[Tensor] = results,
        ) -> None:
            torch.set_num_threads(1)
            moe = load(small_checkpoint, config, rank, layer)
            exchange = PairedExchange(rank, barrier, board)
            exchange.begin_step((split, 48 - split))
            part = slice(0, split) if rank == 0 else slice(split, 48)
            if part.start == part.stop:
                moe.assist(exchange, CPU)
            else:
                num_live = torch.tensor([part.stop - part.start])
                results[rank] = moe.forward(x[part], ids[part], num_live, exchange).total()

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(torch.cat([part for part in results if part.numel()]), together), split


def test_padding_rows_reach_no_expert(small_checkpoint: Path, config: ModelConfig) -> None:
    """Whatever padding holds, NaN included, the others' bits stay."""
    x, ids = noise(16, 64), torch.arange(16)
    run = local(small_checkpoint, config, 4)
    clean = run(x, ids, 5)
    x[5:] = torch.nan
    assert torch.equal(run(x, ids, 5)[:5], clean[:5])


@pytest.mark.parametrize("turned", [False, True])
def test_rows_are_packed_in_the_order_that_the_experts_take(
    small_checkpoint: Path, config: ModelConfig, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that take inputs in another order would multiply other columns without a word."""
    told: list[bool] = []
    monkeypatch.setattr("dsparkd.kernels.experts.bind", lambda _: SimpleNamespace(takes_turned=turned))
    monkeypatch.setattr("dsparkd.kernels.router.bind", lambda *arguments: told.append(arguments[2]))
    load(small_checkpoint, config, 0, 3)
    assert told == [turned]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    """Rows travel as words that must only be copied; ids up to the sentinel fit."""
    x, weights = noise(6, 10).to(dtype), noise(6, 3, seed=1)
    ids = torch.tensor([[0, 1, 2], [253, 254, 256]] * 3)
    rows = pack(x, Routes(weights, ids.int()))
    got = unpack(rows, dtype, 10, 3)
    assert all(part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() for part in got)
    assert torch.equal(got[0].view(torch.uint8), x.view(torch.uint8))
    assert torch.equal(got[1].long(), ids)
    assert torch.equal(got[2], weights)


@pytest.mark.parametrize("row", [[3, 3], [0, 4], [-1, 2]])
def test_a_hash_table_with_other_than_distinct_experts_is_refused(row: list[int]) -> None:
    """A kernel that fills a place for each expert would leave one as it found it: memory of an earlier step."""
    good, bad = torch.tensor([[0, 1], [3, 2]]), torch.tensor([[0, 1], row])
    assert hash_table(SimpleNamespace(integer=lambda name: good), "t", 4) is good
    with pytest.raises(CheckpointError, match=r"^t: .*0\.\.3"):
        hash_table(SimpleNamespace(integer=lambda name: bad), "t", 4)
