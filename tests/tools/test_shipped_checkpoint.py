"""The checkpoint that ships in conf/nano: complete, small enough, and able to answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dsparkd.model.checkpoint import expected_tensors
from dsparkd.model.config import load_model_config
from dsparkd.model.weights import Checkpoint
from dsparkd.text.tokenizer import Tokenizer
from tools import exam
from tools.exam import Reply
from tools.gates.quality import LoopedModel
from tools.harness import ROOT, ensure_checkpoint
from tools.nano_tokenizer import FIRST_SPECIAL, MARKERS, NOISE_TOKEN
from tools.oracle import read_official
from tools.train_nano.tasks.example import Task

NANO = ROOT / "conf" / "nano"
MAX_BYTES = 24 << 20


def test_it_is_what_a_checkout_serves() -> None:
    """conf/dev.toml names it relative to itself, and gates take it."""
    assert ensure_checkpoint() == NANO
    assert 'checkpoint = "nano"' in (ROOT / "conf" / "dev.toml").read_text(encoding="utf-8")


def test_all_of_it_is_at_most_24_mib_and_nothing_strange() -> None:
    """Git keeps every version for ever, and a clone stays small."""
    files = {path.name: path.stat() for path in NANO.iterdir()}
    assert files.keys() == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert sum(found.st_size for found in files.values()) <= MAX_BYTES
    # An image is built by root from these files and runs as somebody else.
    assert all(found.st_mode & 0o044 == 0o044 for found in files.values())


def test_its_config_is_the_nano_geometry_with_a_drafter() -> None:
    """Every mechanism of the real model, and the context that the recall task needs."""
    config = load_model_config(NANO)
    assert config.compress_ratios == (0, 0, 4, 128, 4, 128, 4, 128)
    assert config.quantized
    assert config.expert_dtype == "fp4"
    assert config.num_hash_layers == 2
    assert config.dspark is not None
    assert config.dspark.block_size == 5
    assert len(config.dspark.target_layer_ids) == 3
    assert config.max_position_embeddings == 16384


def test_its_tokenizer_fills_the_vocabulary_and_has_every_marker() -> None:
    """A row of the embedding for each id, and the released roles."""
    config, tokenizer = load_model_config(NANO), Tokenizer.load(NANO)
    assert tokenizer.vocab_size == config.vocab_size
    assert [tokenizer.marker_id(text) for text in FIRST_SPECIAL] == [0, 1, 2]
    assert len({tokenizer.marker_id(text) for text in MARKERS}) == len(MARKERS)
    assert config.dspark is not None
    assert tokenizer.marker_id(NOISE_TOKEN) == config.dspark.noise_token_id
    assert len(tokenizer.encode("1234")) == 4


def test_every_tensor_is_there_as_the_layout_has_it_and_finite() -> None:
    """The drafter's too. Opening checks names, dtypes and shapes of all files."""
    config = load_model_config(NANO)
    with Checkpoint(NANO, config, torch.float32, torch.device("cpu"), (0, 1)):
        pass
    read = read_official(NANO)
    assert read.keys() == {name for name in expected_tensors(config) if not name.endswith(".scale")}
    for name, array in read.items():
        assert np.isfinite(array).all(), name


def test_hash_layers_name_different_experts() -> None:
    """A token that meets one expert twice meets fewer than it should."""
    read = read_official(NANO)
    tables = [array for name, array in read.items() if name.endswith("tid2eid")]
    assert len(tables) == 2
    for table in tables:
        ordered = np.sort(table, axis=1)
        assert (ordered[:, 1:] != ordered[:, :-1]).all()


@pytest.fixture(scope="module")
def model() -> LoopedModel:
    return LoopedModel(NANO, exam.load_encoding(NANO), "cpu", "float32")


@pytest.mark.parametrize("task", ["arithmetic", "extraction", "copy", "tools", "chat"])
def test_it_answers(model: LoopedModel, task: Task) -> None:
    """A look at a few questions, so that broken weights fail here; `tools.gates quality` asks them all."""
    asked = exam.questions(task, 6, exam.load_encoding(NANO))
    replies: list[Reply] = model.answer(asked)
    assert sum(exam.is_right(question, reply) for question, reply in zip(asked, replies, strict=True)) >= 5


def test_the_model_card_has_no_place_left_to_fill() -> None:
    """A figure that is missing is worse than none, and so is one without its command."""
    card = Path(NANO / "README.md").read_text(encoding="utf-8")
    assert "⟨" not in card
    for command in ("tools.gates quality", "tools.gates drafter", "tools.gates logits", "tools.train_nano target"):
        assert command in card
