"""Rows for training: whole documents, the asked mix, the same order every time."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tools.train_nano.encode import Encoder
from tools.train_nano.stream import ALIGNMENT, NO_DOCUMENT, PAD_ID, Recipe, Row, RowStream, aligned, worker
from tools.train_nano.tasks import draw
from tools.train_nano.tokenizer import DEFAULT_PATH

ROOT = Path(__file__).resolve().parents[3]
BOS, EOS = 0, 1
RECIPE = Recipe(1024)


def rows(count: int, *, recipe: Recipe = RECIPE, seed: int = 0, index: int = 0, num_workers: int = 1) -> list[Row]:
    return list(islice(worker(recipe, seed, index, num_workers), count))


def same(one: list[Row], other: list[Row]) -> bool:
    return all(np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def documents(row: Row) -> list[tuple[int, ...]]:
    numbers = range(int(row.document.max()) + 1)
    return [tuple(row.ids[row.document == number].tolist()) for number in numbers]


def test_rows_hold_whole_documents_and_little_padding() -> None:
    """Each document runs from BOS to EOS in one stretch, from a multiple of 4 on; the rest is padding."""
    used = 0
    for row in rows(60):
        assert (row.ids.dtype, row.loss.dtype, row.document.dtype) == (np.uint16, np.bool_, np.int16)
        assert row.ids.shape == row.loss.shape == row.document.shape == (1024,)
        for document in documents(row):
            assert document[0] == BOS
            assert document[-1] == EOS
            assert document.count(BOS) == 1
        filled = row.document != NO_DOCUMENT
        starts = [int(np.argmax(row.document == number)) for number in range(len(documents(row)))]
        lengths = [len(document) for document in documents(row)]
        assert starts == [sum(map(aligned, lengths[:number])) for number in range(len(lengths))]
        assert all(start % ALIGNMENT == 0 for start in starts)
        assert (row.ids[~filled] == PAD_ID).all()
        assert not row.loss[~filled].any()
        used += int(filled.sum())
    assert used / (60 * 1024) > 0.97


def test_rows_are_made_of_the_encoded_examples() -> None:
    """Packing changes neither ids nor what is to be predicted."""
    recipe = Recipe(1024, {"chat": 1.0})
    encoder = Encoder(DEFAULT_PATH)
    packed = {}
    for row in rows(4, recipe=recipe):
        for number, document in enumerate(documents(row)):
            packed[document] = tuple(row.loss[row.document == number].tolist())
    known = [encoder.encode(draw("chat", "train", index)) for index in range(len(packed))]
    found = [tuple(encoded.ids) for encoded in known if tuple(encoded.ids) in packed]
    assert len(found) > len(packed) / 2
    for encoded in known:
        if tuple(encoded.ids) in packed:
            assert packed[tuple(encoded.ids)] == tuple(encoded.loss)


def test_tasks_share_the_tokens_as_asked() -> None:
    """The mix is one of tokens: a long text counts for what it is."""
    recipe = Recipe(2048, {"recall": 0.5, "chat": 0.2, "arithmetic": 0.3})
    spent = {"recall": 0, "chat": 0, "arithmetic": 0}
    encoder = Encoder(DEFAULT_PATH)
    sums, filler = encoder.tokenizer.encode("Answer:"), encoder.tokenizer.encode(" is")
    assert len(sums) == 2
    for row in rows(60, recipe=recipe):
        for document in documents(row):
            if sums[0] in document:
                spent["arithmetic"] += len(document)
            elif len(document) > 250 and filler[0] in document:
                spent["recall"] += len(document)
            else:
                spent["chat"] += len(document)
    total = sum(spent.values())
    for task, share in recipe.mix.items():
        assert spent[task] / total == pytest.approx(share, abs=0.06)


def test_the_order_depends_on_recipe_seed_and_worker_alone() -> None:
    """A run can be repeated; another seed or worker never brings the same examples again."""
    first = rows(6, num_workers=2)
    assert same(first, rows(6, num_workers=2))
    seen = {document for row in first for document in documents(row) if len(document) > 100}
    for other in (rows(6, seed=1, num_workers=2), rows(6, index=1, num_workers=2)):
        assert not seen & {document for row in other for document in documents(row) if len(document) > 100}


def test_batches_of_processes_are_the_workers_rows_in_turn() -> None:
    """Which process was faster decides nothing."""
    with RowStream(RECIPE, 5, 2) as stream:
        batches = [stream.batch(6) for _ in range(4)]
    got = [Row(*parts) for batch in batches for parts in zip(*batch, strict=True)]
    first, second = (rows(16, seed=5, index=index, num_workers=2) for index in range(2))
    assert same(got, first[:8] + second[:8] + first[8:])


def test_a_dead_worker_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Training must not wait for ever."""
    missing = Recipe(1024, tokenizer_path=tmp_path / "tokenizer.json")
    with RowStream(missing, 0, 1) as stream, pytest.raises(RuntimeError, match="data worker 0 has ended"):
        stream.batch(1)
    assert "CheckpointError" in capfd.readouterr().err


def test_workers_do_without_torch() -> None:
    """Sixteen processes that import torch would take gigabytes and half a minute."""
    code = "import sys, tools.train_nano.stream; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
