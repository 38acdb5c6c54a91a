"""U-08: where the tick thread may wait for a device, by name, and that it waits nowhere else."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dsparkd
from tools.gates.pipeline_trace import SYNC_WARNING, Lab
from tools.harness import ensure_checkpoint

SOURCE = Path(dsparkd.__file__).parent
STEPS = 100
# Operations of torch that read a value back to the host, on a device: a number, or how many there are.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
# Every wait of the packages that a step runs through. Of those inside of a step there is one for its results (D-08),
# and, where something has to be known before, one for drafted ids to walk a grammar with, one for the chances that a
# compact step is cut by, one for masks; buffers that a copy still reads are waited for two steps later, if at all.
WAITS = {
    ("grammar/pipeline.py", "slot.ids_here.synchronize"),
    ("grammar/pipeline.py", "self._chances_here.synchronize"),
    ("grammar/pipeline.py", "slot.mask_sent.synchronize"),
    ("grammar/pipeline.py", "slot.results_here.synchronize"),
    ("executor/shapes.py", "self._sent[self._turn].synchronize"),
    # Where graphs are captured and where they are closed: at start and at the end.
    ("executor/graphs.py", "torch.cuda.synchronize"),
    # At start, before the peer knows memory that it may store into.
    ("executor/collectives.py", "torch.cuda.synchronize"),
}
PACKAGES = ("executor", "model", "kernels", "kv", "scheduler", "grammar")


def waits(root: Path) -> Iterator[tuple[str, str]]:
    """Calls in these packages that wait for an event, a stream or the device."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                call = node.func if isinstance(node, ast.Call) else None
                if isinstance(call, ast.Attribute) and call.attr == "synchronize":
                    yield str(path.relative_to(root)), ast.unparse(call)


class Watch(TorchDispatchMode):
    """Counts the operations that would read a value back."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += 1
        name = func.overloadpacket.__name__
        if name in READS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def test_every_wait_has_its_name_here() -> None:
    """U-08: a call that waits and is not in the table is a fault; one that is and has gone, too."""
    assert set(waits(SOURCE)) == WAITS


def test_a_wait_that_nobody_named_is_found(tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "executor").mkdir()
    (tmp_path / "executor" / "new.py").write_text("def f(event):\n    event.synchronize()\n")
    assert list(waits(tmp_path)) == [("executor/new.py", "event.synchronize")]


def test_no_operation_of_a_hundred_verify_steps_reads_a_value_back() -> None:
    """U-08: drafted steps with grammars and without, greedy and seeded, some of them compact. What is read is read from
    the host's buffers, behind the event of D-08; on a device the same operations run."""
    torch.set_num_threads(1)
    lab = Lab(ensure_checkpoint(), torch.device("cpu"), "float32", 2)
    watch = Watch()
    for turn in range(STEPS // 10):
        texts = lab.texts()
        with watch:
            for step in range(10):
                lab.step(texts, drafts=True, is_compact=(turn + step) % 3 == 0)
    lab.executor.close()
    assert watch.seen > 1000 * STEPS
    assert watch.found == Counter()


def test_a_value_that_is_read_back_is_counted() -> None:
    """The control: a number of a tensor, and a mask whose ones are counted."""
    watch = Watch()
    with watch:
        torch.arange(3).sum().item()
        torch.arange(3).nonzero()
    assert watch.found == Counter({"_local_scalar_dense": 1, "nonzero": 1})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_detector_sees_no_wait_in_a_hundred_steps(has_graphs: bool) -> None:
    """U-08: by torch's own detector, eager and replayed; waits for events are no part of it, and are named above."""
    lab = Lab(ensure_checkpoint(), torch.device("cuda", 0), "bfloat16", 8, has_graphs=has_graphs)
    lab.step(lab.texts(), drafts=True)
    found: list[str] = []
    for _ in range(STEPS // 10):
        texts = lab.texts()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(10):
                    lab.step(texts, drafts=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found += [f"{one.filename}:{one.lineno}" for one in caught if SYNC_WARNING in str(one.message)]
    lab.executor.close()
    assert found == []
