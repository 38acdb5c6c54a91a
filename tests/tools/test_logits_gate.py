"""When the logits gate agrees, and what it notices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsparkd.kernels import router
from dsparkd.kernels.indexer import CpuIndexer, Visible
from dsparkd.kernels.router import Routes
from tests.model.values import small_values
from tools.gates import logits
from tools.gates.logits import Pair, num_differing
from tools.nano_tokenizer import train_tokenizer
from tools.oracle import load_oracle
from tools.random_checkpoint import write_checkpoint

IDS = [(7 * i * i + 3 * i) % 192 for i in range(300)]  # 75 entries, of which 16 are kept


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    write_checkpoint(directory, small_values(), seed=3)
    return directory


def test_the_same_checkpoint_agrees(checkpoint: Path) -> None:
    """To far below the tolerance, and text after text."""
    pair = Pair(checkpoint)
    for length in (300, 40, 290):
        case = pair.compare("recall", 0, IDS[:length])
        assert case.ok
        assert case.error < 1e-5
        assert case.same_token == case.tokens == length


def test_other_weights_are_noticed(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two sides must not be one."""
    write_checkpoint(tmp_path, small_values(), seed=4)
    monkeypatch.setattr(logits, "load_oracle", lambda _directory: load_oracle(tmp_path))
    case = Pair(checkpoint).compare("recall", 0, IDS)
    assert case.error > logits.TOLERANCE
    assert not case.ok


def test_a_wrong_choice_of_entries_is_noticed_though_transformers_takes_it_over(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits agree then; it is the scores that tell."""

    def first_entries(
        _self: CpuIndexer, query: Tensor, weights: Tensor, keys: Tensor, visible: Visible, top_k: int
    ) -> Tensor:
        slots, hidden = visible.expand()
        return slots.masked_fill(hidden, 0)[:, : -(-top_k // 16) * 16].contiguous()

    monkeypatch.setattr(CpuIndexer, "choose", first_entries)
    case = Pair(checkpoint).compare("recall", 0, IDS)
    assert case.error < logits.TOLERANCE
    assert case.shortfall > 0.01
    assert case.other_entries > 100
    assert not case.ok


def test_a_wrong_choice_of_experts_is_noticed_though_transformers_takes_it_over(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that forgot its bias, or took the first experts, must not pass as rounding."""
    routed = router.TorchRouter.__call__

    def first_experts(self: router.TorchRouter, logits: Tensor, input_ids: Tensor, num_tokens: int) -> Routes:
        low = logits.clone()
        low[:, logits.shape[1] // 2 :] -= 30
        return routed(self, low, input_ids, num_tokens)

    monkeypatch.setattr(router.TorchRouter, "__call__", first_experts)
    case = Pair(checkpoint).compare("recall", 0, IDS)
    assert case.shortfall > 0.01
    assert case.other_experts > 100
    assert not case.ok


def test_conversions_are_compared_tensor_by_tensor(checkpoint: Path) -> None:
    """One changed weight is one differing tensor."""
    one, other = load_oracle(checkpoint), load_oracle(checkpoint)
    assert num_differing(one, other) == 0
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-3
    assert num_differing(one, other) == 1


def test_the_gate_reads_every_task_and_a_long_recall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With texts of the tasks; the long one's length is cut for the test."""
    tokenizer = train_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_checkpoint(tmp_path, small_values(vocab_size=tokenizer.get_vocab_size()), seed=3)
    monkeypatch.setattr(logits, "LONG_TOKENS", (600, 900))

    code = logits.main(["--checkpoint", str(tmp_path), "--per-task", "1", "--json"])

    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert shown["ok"]
    assert [case["task"] for case in shown["cases"]] == [
        *("arithmetic", "extraction", "recall", "copy", "tools", "chat"),
        "recall",
    ]
    assert 600 < shown["cases"][-1]["tokens"] <= 900
