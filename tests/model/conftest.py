"""Small checkpoints, written once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.model.values import small_values
from tools.random_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small geometry in the official quantised layout, in two shards."""
    directory = tmp_path_factory.mktemp("small")
    write_checkpoint(directory, small_values(), seed=3, num_shards=2)
    return directory


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One torch thread, as a rank has: bits are claimed for that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
