"""The loop that target and drafter share: one process a GPU, batches, schedule, slices of minutes, saved state.

A slice ends when its minutes are over or the plan is done, and leaves two things in its directory: `state.pt`, with
which the next slice on the same machine goes on exactly, and the masters in files small enough to be carried away.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsparkd.model.config import load_model_config
from tools.train_nano import export, stream
from tools.train_nano.graph import Mode
from tools.train_nano.optimiser import Optimiser
from tools.train_nano.parameters import ParameterTable
from tools.train_nano.stream import Recipe, RowStream
from tools.train_nano.tasks.example import Task

STATE_FILE = "state.pt"
MASTERS_BYTES = 15 << 20  # of one file at most
WARMUP_STEPS = 100
FINAL_RATE = 0.02
REPORT_EVERY = 100


class Phase(NamedTuple):
    """A stretch of the plan: steps of num_rows rows a GPU, each of `length` tokens, out of a mix of tasks."""

    steps: int
    num_rows: int
    length: int
    mode: Mode
    mix: Mapping[Task, float]


class Batch(NamedTuple):
    """On the GPU: ids, document [B, L] int64; wanted [B, L] bool: the next token is to be predicted; rows: where."""

    ids: Tensor
    document: Tensor
    wanted: Tensor
    rows: Tensor


class Trainee(Protocol):
    """What the loop trains."""

    def parameters(self) -> dict[str, Tensor]:
        """Leaves, by name; those without a gradient after `loss` are left alone."""

    def buffers(self) -> dict[str, Tensor]:
        """What else belongs to the state."""

    def loss(self, batch: Batch, mode: Mode) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to minimise, and figures to report (means over the group)."""

    def balance(self, figures: Mapping[str, Tensor]) -> None:
        """Update what no gradient updates, from the group's mean figures."""

    def evaluate(self, phase: Phase) -> dict[str, float]:
        """Figures on the validation split; every process of the group calls it."""


class Group(NamedTuple):
    """The processes of one training."""

    rank: int
    size: int
    device: torch.device

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Average float32 tensors over the group, in one exchange."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self.size > 1:
            dist.all_reduce(flat)
            flat /= self.size
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def agree(self, value: bool) -> bool:
        """Whether any process says so."""
        if self.size == 1:
            return value
        flag = torch.tensor(float(value), device=self.device)
        dist.all_reduce(flag)
        return bool(flag.item() > 0)


class Slice(NamedTuple):
    """One call of the tool: how long it may run, from which state, to which directory, and the seed of its data."""

    minutes: float
    resume: Path | None
    out: Path
    seed: int


class Log:
    """Lines on the terminal and in log.jsonl, from the first process only."""

    def __init__(self, directory: Path, group: Group) -> None:
        self._file = directory / "log.jsonl" if group.rank == 0 else None
        self._start = time.monotonic()

    def write(self, **fields: float | str) -> None:
        """Print and keep one line."""
        if self._file is None:
            return
        fields = {"seconds": round(time.monotonic() - self._start, 1), **fields}
        print("  ".join(f"{name} {_short(value)}" for name, value in fields.items()), flush=True)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(fields) + "\n")


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def rate_at(step: int, total: int, decay_share: float) -> float:
    """Learning rate of a step, relative to the peak: warm-up, plateau, linear decay over the last share."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    left = (total - step) / (total * decay_share)
    return max(FINAL_RATE, min(1.0, left))


def phase_at(phases: Sequence[Phase], step: int) -> tuple[int, Phase]:
    """The phase that a step belongs to, and the step at which it ends."""
    end = 0
    for phase in phases:
        end += phase.steps
        if step < end:
            break
    return end, phase


def train(
    trainee: Trainee,
    optimiser: Optimiser,
    phases: Sequence[Phase],
    group: Group,
    part: Slice,
    decay_share: float,
    log: Log,
) -> bool:
    """Run until the plan or the minutes are over; True when the plan is done. State and masters lie in part.out."""
    deadline = time.monotonic() + part.minutes * 60
    total = sum(phase.steps for phase in phases)
    step = restore(trainee, optimiser, part.resume) if part.resume is not None else 0
    for tensor in (*trainee.parameters().values(), *trainee.buffers().values()):
        if group.size > 1:
            dist.broadcast(tensor.data, 0)
    while step < total and not group.agree(time.monotonic() > deadline):
        end, phase = phase_at(phases, step)
        workers = max(1, (os.cpu_count() or 1) // group.size - 1)
        recipe = Recipe(phase.length, dict(phase.mix))
        # The seed moves with the step, so no slice sees what an earlier one saw.
        seed = part.seed * 10_000_000 + step * 8 + group.rank
        with RowStream(recipe, seed, workers) as rows, Prefetch(rows, phase.num_rows, group.device) as batches:
            step = _run_phase(trainee, optimiser, batches, phase, group, log, (step, end, total), decay_share, deadline)
        log.write(step=step, event="evaluate", **trainee.evaluate(phase))
    if group.rank == 0:
        save(trainee, optimiser, part.out, step)
    return step >= total


def _run_phase(
    trainee: Trainee,
    optimiser: Optimiser,
    batches: Prefetch,
    phase: Phase,
    group: Group,
    log: Log,
    steps: tuple[int, int, int],
    decay_share: float,
    deadline: float,
) -> int:
    """Steps of one phase; returns the step reached."""
    step, end, total = steps
    parameters = trainee.parameters()
    began, since, tokens = step, time.monotonic(), 0
    while step < end:
        batch = batches.next()
        loss, figures = trainee.loss(batch, phase.mode)
        loss.backward()  # type: ignore[no-untyped-call]
        tokens += batch.ids.numel() * group.size
        trained = {name: tensor for name, tensor in parameters.items() if tensor.grad is not None}
        means = group.mean([*(t.grad for t in trained.values() if t.grad is not None), *figures.values()])
        for tensor, gradient in zip(trained.values(), means, strict=False):
            tensor.grad = gradient
        shared = dict(zip(figures, means[len(trained) :], strict=True))
        optimiser.step(rate_at(step, total, decay_share))
        trainee.balance(shared)
        for tensor in trained.values():
            tensor.grad = None
        step += 1
        if step % REPORT_EVERY == 0 or step == began + 10:
            scalars = {name: value.item() for name, value in shared.items() if value.dim() == 0}
            if not all(np.isfinite(value) for value in scalars.values()):
                raise RuntimeError(f"step {step}: {scalars} is not finite; lower the learning rates")
            now = time.monotonic()
            log.write(step=step, of=total, tokens_per_s=tokens / (now - since), **scalars)
            since, tokens = now, 0
            if group.agree(now > deadline):
                break
    return step


class Prefetch:
    """Batches of a stream on the device, prepared two ahead by a thread. Use it in a `with` block."""

    def __init__(self, stream: RowStream, num_rows: int, device: torch.device) -> None:
        self._stream, self._num_rows, self._device = stream, num_rows, device
        self._ahead: queue.Queue[Batch | Exception] = queue.Queue(2)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Prefetch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ahead.get(timeout=0.1)

    def next(self) -> Batch:
        """Wait for the next batch; raises what ended the stream."""
        batch = self._ahead.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    def _run(self) -> None:
        cuda = self._device.type == "cuda"
        copies = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(copies):
            while not self._closing.is_set():
                try:
                    batch = to_device(self._stream.batch(self._num_rows), self._device)
                except RuntimeError as error:
                    self._ahead.put(error)
                    return
                if copies is not None:
                    copies.synchronize()
                self._ahead.put(batch)


def to_device(rows: stream.Batch, device: torch.device) -> Batch:
    """Shift the loss mask to the tokens before, and copy."""
    wanted = np.zeros_like(rows.loss)
    wanted[:, :-1] = rows.loss[:, 1:]
    arrays = (rows.ids.astype(np.int64), rows.document.astype(np.int64), wanted, np.flatnonzero(wanted))
    return Batch(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))


def save(trainee: Trainee, optimiser: Optimiser, directory: Path, step: int) -> None:
    """Write state.pt, and the masters: bfloat16 where the checkpoint stores fewer bits, in files of MASTERS_BYTES."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach() for name, tensor in (trainee.parameters() | trainee.buffers()).items()}
    torch.save({"step": step, "tensors": tensors, "optimiser": optimiser.state()}, directory / STATE_FILE)
    save_masters(tensors, directory, step)


def save_masters(tensors: Mapping[str, Tensor], directory: Path, step: int) -> None:
    """Write the masters' files, without a state to go on from."""
    for number, group in enumerate(_grouped({name: _small(name, tensor).cpu() for name, tensor in tensors.items()})):
        save_file(group, directory / f"masters-{number}.safetensors", metadata={"step": str(step)})


def _small(name: str, tensor: Tensor) -> Tensor:
    linear = tensor.dim() > 1 and "hc_" not in name and "ape" not in name and "sink" not in name
    return tensor.bfloat16() if linear and tensor.is_floating_point() else tensor.contiguous()


def _grouped(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{}]
    room = MASTERS_BYTES
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize
        if size > room and groups[-1]:
            groups.append({})
            room = MASTERS_BYTES
        groups[-1][name] = tensor.contiguous()
        room -= size
    return groups


def restore(trainee: Trainee, optimiser: Optimiser, directory: Path) -> int:
    """Take over a saved state: everything from state.pt, or weights alone, which start at step 0."""
    tensors = trainee.parameters() | trainee.buffers()
    if (directory / STATE_FILE).exists():
        state = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)
        _take(tensors, state["tensors"])
        optimiser.restore(state["optimiser"])
        return int(state["step"])
    saved = read_state(directory)
    _take(tensors, {name: saved[name] for name in tensors if name in saved})
    return 0


def read_state(directory: Path) -> dict[str, Tensor]:
    """The tensors of a saved state, by name, on the cpu: state.pt's, an exported checkpoint's, or the masters'."""
    if (directory / STATE_FILE).exists():
        tensors = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)["tensors"]
        assert isinstance(tensors, dict)
        return tensors
    if (directory / "config.json").exists():
        return read_checkpoint(directory)
    return read_masters(directory)


def read_masters(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the masters' files. Raises FileNotFoundError when there are none."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("masters-*.safetensors")):
        found |= load_file(path)
    if not found:
        raise FileNotFoundError(f"{directory} has no {STATE_FILE}, no masters-*.safetensors and no checkpoint")
    return found


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """An exported checkpoint's tensors as masters: what quantisation took from them is lost."""
    config = load_model_config(directory)
    official = export.read_state(directory)
    tables = [ParameterTable(config, prefix) for prefix in ("", "layers", "mtp")]
    return {f"{table.prefix}/{key}": tensor for table in tables for key, tensor in table.stack(official).items()}


def _take(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    if set(tensors) != set(saved):
        raise ValueError(f"the saved state is another model's: {sorted(set(tensors) ^ set(saved))[:3]}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
