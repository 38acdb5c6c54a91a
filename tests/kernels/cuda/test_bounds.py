"""T-03: what a kernel is told to write outside of its tensor stops the device, and writes nothing.

On a GPU that ends the process's context, so it is done in a process of its own, whose tensors lie in pinned host
memory: they can be looked at behind the end.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from dsparkd.kernels.attention import KeptKeys
from dsparkd.kernels.cuda.attention import norm_and_rotate
from dsparkd.kernels.cuda.compressor import Closing, Part, Rows, close_entries
from dsparkd.kernels.cuda.experts import _lay_out_kernel
from dsparkd.kernels.cuda.indexer import keep_best
from dsparkd.kernels.cuda.packed import store as store_packed
from dsparkd.kernels.cuda.rows import store as store_rows
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.row_layout import key_bytes

CANARY = 7


class Stage:
    """Tensors that both the host and the kernels reach; `around` is one with canaries before and behind it."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self.wholes: list[tuple[Tensor, Tensor]] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pinned else tensor

    def around(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        whole = self(torch.full((rows + 2 * 16, width), CANARY, dtype=dtype))
        self.wholes.append((whole, whole.clone()))
        return whole[16 : 16 + rows]

    def intact(self, *, around: bool = False) -> bool:
        """Nothing was written at all, or nothing around the tensors."""
        edges = torch.tensor([*range(16), *range(-16, 0)]) if around else slice(None)
        return all(torch.equal(whole[edges], before[edges]) for whole, before in self.wholes)


def rows_store(on: Stage, place: int, source: int = 1) -> None:
    ring = on.around(5, 40, torch.float32)
    store_rows(ring, on(torch.tensor([place])), on(torch.zeros(3, 40)), on(torch.tensor([source])))


def packed_store(on: Stage, place: int, source: int = 1) -> None:
    ring = on.around(5, key_bytes(96, 32), torch.uint8)
    store_packed(ring, on(torch.tensor([place])), on(torch.zeros(3, 96)), on(torch.tensor([source])), 32)


def close(on: Stage, place: int, row: int = -1) -> None:
    pages, keys = on.around(5, 32, torch.float32), on.around(5, 16, torch.float32)
    step, ring, angles = on(torch.zeros(4, 4 * 48)), on.around(5, 4 * 48, torch.float32), on(torch.zeros(1, 1, 8))
    rows = Rows(step, ring, on(torch.zeros(4, 2 * 48)), on(torch.tensor([row])))
    closing = Closing(on(torch.ones(8, dtype=torch.int64)), on(torch.tensor([place])), Rotation(angles, angles))
    close_entries(rows, closing, 1e-6, Part(on(torch.ones(32)), pages), Part(on(torch.ones(16)), keys))


def keep_key(on: Stage, place: int) -> None:
    ring, angles = on.around(5, 32, torch.float32), on(torch.zeros(2, 1, 8))
    query, latent, norms = on(torch.zeros(2, 96)), on(torch.zeros(2, 32)), on(torch.ones(4, 32))
    kept, keys = KeptKeys(ring, on(torch.tensor([-1, place]))), on(torch.zeros(2, 32))
    norm_and_rotate(query, latent, norms, Rotation(angles, angles), 1e-6, query.view(2, 3, 32), keys, kept)


def lay_out(on: Stage, num_tiles: int) -> None:
    """Six choices of three experts take three tiles of four."""
    choices, tiles = on.around(4 * num_tiles, 1, torch.int32), on.around(num_tiles, 1, torch.int32)
    ids = on(torch.tensor([0, 1, 2, 2, 1, 2], dtype=torch.int32))
    places = on(torch.zeros(6, dtype=torch.int32))
    _lay_out_kernel[(3,)](
        ids, choices, tiles, places, 6, 1, 1, 0, 3, num_tiles, EXPERTS=16, BLOCK_M=4, BLOCK=64, sanitize_overflow=False
    )


def choose(on: Stage, top_k: int) -> None:
    """The choice's rows have room for 64; a larger top_k is what a wrong plan would ask for."""
    chosen = on.around(1, 64, torch.int64)
    slots = on(torch.arange(1, 129)[None])
    zero = on(torch.zeros(1, dtype=torch.int64))
    keep_best(on(torch.zeros(1, 128)), Visible(slots, zero, on(torch.tensor([128])), 128), top_k, chosen)


FAULTS: dict[str, Callable[[Stage], None]] = {
    "rows.store": lambda on: rows_store(on, 5),
    "rows.store of no row": lambda on: rows_store(on, 2, 3),
    "packed.store": lambda on: packed_store(on, 6),
    "packed.store of no row": lambda on: packed_store(on, 2, -1),
    "compressor.close_entries": lambda on: close(on, 5),
    "compressor.close_entries of a row": lambda on: close(on, 2, 5),
    "attention.norm_and_rotate": lambda on: keep_key(on, 5),
    "experts.lay_out": lambda on: lay_out(on, 2),
}


INTERPRETED = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="the GPU runs the kernels")


@INTERPRETED
@pytest.mark.parametrize("name", FAULTS)
def test_a_place_outside_of_its_tensor_stops_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T-03: the interpreter asserts when it is told to, and the assertion names the kernel."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True, sanitize_overflow=False))
    on = Stage(pinned=False)
    with pytest.raises(Exception, match=name.partition(" ")[0]):
        FAULTS[name](on)
    assert on.intact(around=True)


@INTERPRETED
@pytest.mark.parametrize("name", FAULTS)
def test_a_place_outside_of_its_tensor_is_never_written(name: str) -> None:
    """T-03: the write itself is bounded, whether or not anything asserts."""
    on = Stage(pinned=False)
    FAULTS[name](on)
    assert on.intact(around=True)


@INTERPRETED
def test_a_choice_is_bounded_by_its_room() -> None:
    """T-03: its places are counted on the device; the choice of more than there is room for writes nothing behind."""
    on = Stage(pinned=False)
    choose(on, 100)
    whole, before = on.wholes[0]
    assert torch.equal(whole[17:], before[17:])
    assert (whole[16] > 0).all()


@INTERPRETED
def test_places_inside_are_written() -> None:
    """The control: the last row is inside, and -1 is padding, which is nobody's."""
    for work in (rows_store, packed_store, close, keep_key):
        on = Stage(pinned=False)
        work(on, 4)
        assert not on.intact()
        on = Stage(pinned=False)
        work(on, -1)
        assert on.intact()


@pytest.fixture(scope="module")
def culprits() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """One process a fault, all at once: each takes seconds to begin."""
    command = [sys.executable, "-m", "tests.kernels.cuda.test_bounds"]
    runs = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in FAULTS
    }
    yield runs
    for run in runs.values():
        run.kill()
        run.communicate()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAULTS)
def test_a_place_outside_of_its_tensor_stops_the_device(name: str, culprits: dict[str, subprocess.Popen[str]]) -> None:
    """T-03: in a process of its own; the error says that a device-side assertion failed, and the device which."""
    output, _ = culprits[name].communicate(timeout=100)
    assert culprits[name].returncode == 3, output[-2000:]
    assert name.partition(" ")[0] in output
    assert "device-side assert" in output


def main(name: str) -> int:
    """Commit one fault on the GPU: 3 when it was stopped and nothing around has changed."""
    on = Stage(pinned=True)
    torch.zeros(1, device="cuda")
    try:
        FAULTS[name](on)
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.stdout.write(str(error))
        return 3 if on.intact(around=True) else 4
    return 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
