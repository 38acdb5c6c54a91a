"""The decode loop: what it gives is what each prompt alone gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsparkd.kv.geometry import PoolSizes
from tests.model.values import small_values
from tools.decode_loop import DecodeLoop
from tools.oracle import Engine, plan_row
from tools.random_checkpoint import write_checkpoint

CPU = torch.device("cpu")
MAX_TOKENS = 12
PROMPTS = [[(5 * i * i + k) % 190 + 2 for i in range(length)] for k, length in enumerate((3, 40, 129, 300, 7, 64, 257))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    write_checkpoint(directory, small_values(), seed=3)
    return directory


def alone(checkpoint: Path, prompt: list[int], eos_id: int) -> list[int]:
    """Greedy decoding of one prompt, whole, then token by token."""
    engine = Engine(checkpoint, sizes=PoolSizes(4, 2, 1))
    output: list[int] = []
    ids, start = prompt, 0
    while len(output) < MAX_TOKENS:
        token = int(engine.step([plan_row(ids, start, 1, (1, 2, 3), 1)]).logits[0].argmax())
        if token == eos_id:
            break
        start += len(ids)
        ids = [token]
        output.append(token)
    return output


@pytest.mark.parametrize(("max_rows", "chunk_tokens"), [(2, 100), (16, 4096)])
def test_each_prompt_gets_what_it_gets_alone(checkpoint: Path, max_rows: int, chunk_tokens: int) -> None:
    """With fewer rows than prompts slots and pages are used again; chunks cut prompts beside rows that decode."""
    loop = DecodeLoop(checkpoint, CPU, torch.float32, max_rows, 400, chunk_tokens)
    seen: list[int] = []

    outputs = loop.run(PROMPTS, MAX_TOKENS, seen.append)

    assert outputs == [alone(checkpoint, prompt, eos_id=1) for prompt in PROMPTS]
    assert seen == list(range(1, 1 + len(PROMPTS)))
    assert loop.run(PROMPTS[:2], MAX_TOKENS) == outputs[:2]


def test_the_end_token_ends_an_output_and_is_left_out(checkpoint: Path, tmp_path: Path) -> None:
    """A token that the model gives in the middle is made the end token: the output stops there."""
    whole = alone(checkpoint, PROMPTS[1], eos_id=-1)
    eos = whole[5]
    write_checkpoint(tmp_path, small_values() | {"eos_token_id": eos}, seed=3)

    outputs = DecodeLoop(tmp_path, CPU, torch.float32, 2, 400, 512).run([PROMPTS[1]], MAX_TOKENS)

    assert outputs == [whole[: whole.index(eos)]]


def test_a_prompt_that_does_not_fit_is_refused(checkpoint: Path) -> None:
    """Its pages would be another sequence's."""
    with pytest.raises(ValueError, match="312 tokens are more than the loop's 300"):
        DecodeLoop(checkpoint, CPU, torch.float32, 2, 300, 512).run(PROMPTS, MAX_TOKENS)
