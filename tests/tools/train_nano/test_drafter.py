"""The drafter's training graph: held against the server's drafter, and its data rule and loss against plain loops."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsparkd.model.config import ModelConfig, load_model_config, parse_model_config
from dsparkd.model.dspark import DraftInputs
from dsparkd.model.weights import load_both_draft_shards, load_both_shards
from tests.model.values import small_values
from tools.random_checkpoint import write_checkpoint
from tools.train_nano.drafter import (
    Anchors,
    Drafter,
    draft_logits,
    drafter_loss,
    lay_out,
    losses,
    own_outputs,
    sample_anchors,
)
from tools.train_nano.export import read_state

CPU = torch.device("cpu")
V, D, F, G, W = 192, 64, 192, 5, 128
B, L = 2, 320
STARTS = (0, 180)  # of two documents in each row


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_model_config(small_values())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Batch:
    """Random rows of two documents, with taps, hidden states, and a vocabulary."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, V, (B, L), generator=torch.Generator().manual_seed(1))
        self.document = torch.zeros((B, L), dtype=torch.int64)
        self.document[:, STARTS[1] :] = 1
        self.taps, self.hidden = normal(B, L, F, seed=2), normal(B, L, D, seed=3)
        self.embed, self.head = normal(V, D, seed=4), normal(V, D, seed=5) * 0.2

    def anchors(self, at: list[int], config: ModelConfig, own: Tensor | None = None) -> Anchors:
        own = torch.ones_like(self.ids, dtype=torch.bool) if own is None else own
        index = torch.tensor(at)
        return lay_out(index, torch.ones_like(index, dtype=torch.bool), self.ids, self.document, own, config)


def from_state(config: ModelConfig, state: dict[str, Tensor]) -> Drafter:
    """A drafter with an exported checkpoint's values."""
    drafter = Drafter(config, CPU, torch.float32, seed=0, quantise=True)
    for key, stack in drafter.tables["mtp"].stacks.items():
        parts = [state[f"mtp.{stage}.{key}"] for stage in stack.layers]
        drafter.values["mtp"][key].data.copy_(torch.stack(parts))
    return drafter


@pytest.mark.filterwarnings("ignore:.*storage")
def test_blocks_are_those_that_the_server_drafts(tmp_path: Path) -> None:
    """What is trained is what is served: same weights and context, in float32, quantised storage included."""
    write_checkpoint(tmp_path, small_values(), seed=9)
    config = load_model_config(tmp_path)
    target, _ = load_both_shards(tmp_path, config, torch.float32, CPU)
    server, exchange = load_both_draft_shards(tmp_path, target)
    state = read_state(tmp_path)
    drafter, batch = from_state(config, state), Batch()
    at = [3, 177, 179, STARTS[1], STARTS[1] + 7, 318, L + 150, L + 319]
    places = [(i // L, i % L, i % L - (STARTS[1] if i % L >= STARTS[1] else 0)) for i in at]
    keys = torch.cat([server.context_keys(t, torch.arange(L) - STARTS[k]) for t in batch.taps for k in (0, 1)], 1)
    sources, first = [], []
    for row, column, position in places:
        known = min(position, W)
        begin = (2 * row + (column >= STARTS[1])) * L
        sources.append([0] * (W - known) + list(range(begin + column - known, begin + column)))
        first.append(W - known)
    ids = torch.tensor([int(batch.ids[row, column]) for row, column, _ in places])
    positions = torch.tensor([position for _, _, position in places])
    exchange.begin_step((server.num_padded_rows(len(at)), 0))
    inputs = DraftInputs(ids, positions, keys, torch.tensor(sources), torch.tensor(first), False)
    served = server.draft(inputs, exchange)

    anchors = batch.anchors(at, config)
    stages = drafter.weights()
    with torch.no_grad():
        block = drafter.blocks(stages, state["embed.weight"], batch.taps, batch.document, anchors)
        previous = torch.cat((ids[:, None], served.ids[:, :-1]), 1)
        logits, confidence = draft_logits(block, state["head.weight"], stages[-1], previous)

    assert torch.allclose(logits, served.logits, atol=1e-4)
    assert torch.allclose(confidence, served.confidence, atol=1e-4)
    assert served.logits.std() > 0.5
    assert block.loads.sum(1).tolist() == pytest.approx([1.0] * 3)


def test_answers_are_cut_where_the_target_would_have_gone_on_differently() -> None:
    """Own-output rule: the first token that is not the target's first choice ends the answer, and no other answer."""
    draw = random.Random(0)
    ids = torch.tensor([[draw.randrange(V) for _ in range(60)] for _ in range(6)])
    loss = torch.zeros((6, 60), dtype=torch.bool)
    head = torch.eye(V)
    hidden = head[ids.roll(-1, 1)]  # the target's first choice behind each token is the next one
    for row in range(6):
        for start in range(draw.randrange(1, 9), 60, 13):
            loss[row, start : start + draw.randrange(1, 11)] = True
        for _ in range(row):
            p = draw.randrange(60)
            hidden[row, p] = head[(int(ids[row, (p + 1) % 60]) + 1) % V]
    expected = torch.zeros_like(loss)
    for row in range(6):
        going = False
        for p in range(60):
            begins = bool(loss[row, p]) and not (p and loss[row, p - 1])
            agrees = p > 0 and int(hidden[row, p - 1].argmax()) == int(ids[row, p])
            going = bool(loss[row, p]) and agrees and (going or begins)
            expected[row, p] = going
    own = own_outputs(ids, loss, hidden, head)
    assert torch.equal(own, expected)
    assert own[0].equal(loss[0])
    assert 0 < own.sum() < loss.sum()


def test_anchors_are_drawn_where_a_draft_can_be_judged(config: ModelConfig) -> None:
    """Each once, own output itself and before own output; labels reach to the answer's end and no further."""
    batch = Batch()
    own = torch.zeros((B, L), dtype=torch.bool)
    for row, start, stop in ((0, 20, 24), (0, 60, 61), (0, 250, 320), (1, 140, 180)):
        own[row, start:stop] = True
    eligible = {20, 21, 22, *range(250, 319), *range(L + 140, L + 179)}
    generator = torch.Generator().manual_seed(0)
    anchors = sample_anchors(batch.ids, batch.document, own, B * L, config, generator)
    real = anchors.valid[:, 0]
    assert sorted(anchors.at[real, 0].tolist()) == sorted(eligible)
    exactly = sample_anchors(batch.ids, batch.document, own, len(eligible), config, generator)
    assert set(exactly.at[:, 0].tolist()) == eligible
    few = sample_anchors(batch.ids, batch.document, own, 30, config, generator)
    again = sample_anchors(batch.ids, batch.document, own, 30, config, generator)
    assert few.valid[:, 0].all()
    assert set(few.at[:, 0].tolist()) <= eligible
    assert few.at[:, 0].tolist() != again.at[:, 0].tolist()
    for at, ids, valid in zip(anchors.at[:, 0][real].tolist(), anchors.ids[real], anchors.valid[real], strict=True):
        row, column = at // L, at % L
        labels = []
        while column + 1 + len(labels) < L and len(labels) < G and own[row, column + 1 + len(labels)]:
            labels.append(int(batch.ids[row, column + 1 + len(labels)]))
        assert ids[: 1 + len(labels)].tolist() == [int(batch.ids[row, column]), *labels]
        assert valid.tolist() == [True] * len(labels) + [False] * (G - len(labels))


def test_a_block_sees_its_own_documents_window_and_nothing_else(config: ModelConfig) -> None:
    """Not its anchor's taps, not what follows, not the document before, not another block."""
    batch = Batch()
    drafter = Drafter(config, CPU, torch.float32, seed=0, quantise=False)
    at = [STARTS[1] + 20, 170, L + 300]

    def hidden(at: list[int]) -> Tensor:
        with torch.no_grad():
            stages = drafter.weights()
            return drafter.blocks(stages, batch.embed, batch.taps, batch.document, batch.anchors(at, config)).hidden

    whole = hidden(at)
    assert torch.allclose(hidden(at[::-1]), whole.flip(0), atol=1e-6)
    assert torch.allclose(hidden(at[:1]), whole[:1], atol=1e-6)
    for column, seen in ((20, False), (19, True), (0, True), (-1, False)):
        batch.taps[0, STARTS[1] + column] += 5
        changed = not torch.allclose(hidden(at[:1]), whole[:1], atol=1e-6)
        assert changed == seen
        batch.taps[0, STARTS[1] + column] -= 5
    batch.taps[0, STARTS[1] + 20 :] += 5
    batch.taps[0, 170 - W - 1] += 5
    assert torch.allclose(hidden(at[:2]), whole[:2], atol=1e-6)
    batch.taps[0, 170 - W] += 5
    assert not torch.allclose(hidden(at[1:2]), whole[1:2], atol=1e-6)


def test_the_loss_is_the_recipes(config: ModelConfig) -> None:
    """0.1 CE + 0.9 L1 + 1.0 BCE against 1 - L1 / 2, rows weighted exp(-i / 4), invalid ones nothing; double loops."""
    batch = Batch()
    drafter = Drafter(config, CPU, torch.float32, seed=0, quantise=False)
    own = torch.rand((B, L), generator=torch.Generator().manual_seed(3)) < 0.8
    anchors = batch.anchors([10, 50, 51, 120, L + 200, L + 316], config, own)
    loss, metrics = drafter_loss(drafter, batch.embed, batch.head, batch.taps, batch.hidden, batch.document, anchors)

    stages = drafter.weights()
    block = drafter.blocks(stages, batch.embed, batch.taps, batch.document, anchors)
    logits, confidence = (x.detach().double() for x in draft_logits(block, batch.head, stages[-1], anchors.ids[:, :-1]))
    ce = tv = bce = total = 0.0
    accepted, agreed, blocks = 0.0, 0.0, 0
    for n in range(len(anchors.ids)):
        blocks += bool(anchors.valid[n, 0])
        chance = same = 1.0
        for i in range(G):
            if not anchors.valid[n, i]:
                break
            row, column = divmod(int(anchors.at[n, i]), L)
            q = torch.softmax(logits[n, i], 0)
            p = torch.softmax(batch.hidden[row, column].double() @ batch.head.double().t(), 0)
            distance = float((q - p).abs().sum())
            label = int(batch.ids[row, column + 1])
            weight, c = math.exp(-i / 4), 1 - distance / 2
            judged = float(torch.sigmoid(confidence[n, i]))
            ce -= weight * math.log(float(q[label]))
            tv += weight * distance
            bce -= weight * (c * math.log(judged) + (1 - c) * math.log(1 - judged))
            total += weight
            chance *= c
            same *= int(logits[n, i].argmax()) == label
            accepted += chance
            agreed += same
    assert 0 < anchors.valid.sum() < anchors.valid.numel()
    assert loss.item() == pytest.approx((0.1 * ce + 0.9 * tv + bce) / total, rel=1e-4)
    assert [metrics[name].item() for name in ("ce", "tv", "confidence")] == pytest.approx(
        [ce / total, tv / total, bce / total], rel=1e-4
    )
    assert metrics["accepted"].item() == pytest.approx(1 + accepted / blocks, rel=1e-4)
    assert metrics["accepted_greedy"].item() == pytest.approx(1 + agreed / blocks, rel=1e-4)


def test_the_confidence_heads_goal_gets_no_gradient(config: ModelConfig) -> None:
    """c* is what the head shall say; else the drafts would be drawn to what is easy to judge. The target is frozen."""
    batch = Batch()
    drafter = Drafter(config, CPU, torch.float32, seed=0, quantise=False)
    anchors = batch.anchors([10, 60, L + 90], config)
    stages = drafter.weights()
    block = drafter.blocks(stages, batch.embed, batch.taps, batch.document, anchors)
    hidden = batch.hidden.flatten(0, 1)[anchors.at.flatten()].view(3, G, D).requires_grad_()
    normed = block.normed.detach().requires_grad_()
    cut = type(block)(block.hidden.detach(), normed, block.loads)
    weights = anchors.weights()
    loss, metrics = losses(cut, hidden, batch.head, stages[-1], anchors.ids, anchors.valid, weights, weights.sum())
    (with_judge,) = torch.autograd.grad(loss, normed, retain_graph=True)
    assert torch.autograd.grad(loss, hidden, allow_unused=True) == (None,)
    logits, _ = draft_logits(cut, batch.head, stages[-1], anchors.ids[:, :-1])
    log_q = torch.log_softmax(logits, -1)
    p = torch.softmax(hidden.detach() @ batch.head.t(), -1)
    ce = -log_q.gather(-1, anchors.ids[:, 1:, None]).squeeze(-1)
    plain = (weights * (0.1 * ce + 0.9 * (log_q.exp() - p).abs().sum(-1))).sum() / weights.sum()
    (without_judge,) = torch.autograd.grad(plain, normed)
    assert torch.allclose(with_judge, without_judge, atol=1e-7)
    assert not any(value.requires_grad for value in metrics.values())


def test_a_normaliser_makes_processes_losses_add_up(config: ModelConfig) -> None:
    """The mean over processes of losses divided by the mean weight is the loss of all their blocks."""
    batch = Batch()
    drafter = Drafter(config, CPU, torch.float32, seed=0, quantise=False)
    own = torch.rand((B, L), generator=torch.Generator().manual_seed(3)) < 0.8
    at = [10, 50, 51, 120, L + 200, L + 310]
    parts = [batch.anchors(at[:2], config, own), batch.anchors(at[2:], config, own)]

    def loss(anchors: Anchors, normaliser: Tensor | None) -> float:
        arguments = (batch.embed, batch.head, batch.taps, batch.hidden, batch.document, anchors, normaliser)
        return drafter_loss(drafter, *arguments)[0].item()

    mean = torch.stack([part.weights().sum() for part in parts]).mean()
    together = loss(batch.anchors(at, config, own), None)
    assert sum(loss(part, mean) for part in parts) / 2 == pytest.approx(together, rel=1e-5)


def test_training_learns_what_can_be_known(config: ModelConfig) -> None:
    """A text whose next token follows from the last: acceptance and confidence rise, and masters alone move."""
    batch = Batch()
    for i in range(1, L):
        batch.ids[:, i] = (batch.ids[:, i - 1] * 5 + 3) % 184 + 8
    hidden = batch.head[batch.ids.roll(-1, 1)] * 40
    taps = torch.cat((hidden, batch.embed[batch.ids], hidden), -1)
    loss = (torch.arange(L) >= 20).expand(B, L)
    own = own_outputs(batch.ids, loss, hidden, batch.head)
    drafter = Drafter(config, CPU, torch.float32, seed=0, quantise=True)
    drafter.start_from(torch.full((D,), 1.5))
    learning = [value for value in drafter.values["mtp"].values() if value.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(40):
        anchors = sample_anchors(batch.ids, batch.document, own, 48, config, generator)
        loss, metrics = drafter_loss(drafter, batch.embed, batch.head, taps, hidden, batch.document, anchors)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        lengths.append(metrics["accepted"].item())
    assert lengths[0] < 1.2
    assert lengths[-1] > 2.2
    assert (metrics["judged"] - metrics["c_star"]).abs().max() < 0.2
    assert all(value.grad is not None for value in learning)


def test_balancing_moves_rarely_chosen_experts_up(config: ModelConfig) -> None:
    """No gradient reaches the bias; a step of fixed size a time lets loads meet."""
    drafter = Drafter(config, CPU, torch.float32, seed=0, quantise=False)
    loads = torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0, 0], [0.125] * 8, [0, 0.25, 0.25, 0.25, 0.25, 0, 0, 0]])
    drafter.balance(loads)
    bias = drafter.values["mtp"]["ffn.gate.bias"]
    assert bias[0].tolist() == pytest.approx([-0.001] * 2 + [0.001] * 6)
    assert bias[1].tolist() == [0.0] * 8
    assert bias[2].tolist() == pytest.approx([0.001, *[-0.001] * 4, *[0.001] * 3])


def test_official_names_are_those_of_the_checkpoint(config: ModelConfig) -> None:
    """What export takes: each stage's tensors, experts stacked, the heads with the last stage."""
    drafter = Drafter(config, CPU, torch.float32, seed=0, quantise=False)
    names = drafter.official()
    assert names["mtp.0.main_proj.weight"].shape == (D, F)
    assert names["mtp.1.ffn.experts.w2"].shape == (8, 64, 64)
    assert names["mtp.2.markov_head.markov_w1.weight"].shape == (V, 16)
    assert "mtp.1.norm.weight" not in names
    assert len(names) == 3 * 24 + 2 + 7
