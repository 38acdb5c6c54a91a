"""safetensors -> parameters: the official layout; none missing, none left over.

Files are memory-mapped and go to the device tensor by tensor, so a rank holds none of them in memory of its own; it
reads the common tensors and its own half of the routed experts. On cuda in bfloat16 quantised weights stay packed;
elsewhere they are dequantised. Instead of files, a model may have weights that mean nothing: random_weights.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsparkd.errors import CheckpointError, InvariantError
from dsparkd.kernels.weight import MAX_SCALES, Format, Weight, decode_e8m0, decode_fp4, decode_fp8, dense
from dsparkd.model.checkpoint import (
    FP8_BLOCK,
    Use,
    expected_tensors,
    nextn_tensors,
    stored_bytes,
    wanted_names,
)
from dsparkd.model.config import ModelConfig
from dsparkd.model.dspark import Drafter
from dsparkd.model.moe import NUM_SHARDS, Experts, LocalExpertExchange
from dsparkd.model.random_weights import RandomWeights
from dsparkd.model.transformer import Transformer

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read
Kind = Literal["checkpoint", "random"]  # engine.weights


def load_transformer(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    progress: Progress | None = None,
    kind: Kind = "checkpoint",
) -> tuple[Transformer, int]:
    """Load the target with one rank's experts; returns it and the bytes that its parameters take.

    Raises CheckpointError naming the file or tensor that is wrong.
    """
    with open_weights(kind, directory, config, dtype, device, (rank,), progress) as checkpoint:
        model = Transformer(config, checkpoint, rank, device)
        checkpoint.finish()
    return model, checkpoint.placed_bytes


def load_both_shards(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, kind: Kind = "checkpoint"
) -> tuple[Transformer, LocalExpertExchange]:
    """Load the whole model into one process: rank 0's, and the exchange that stands for rank 1."""
    with open_weights(kind, directory, config, dtype, device, tuple(range(NUM_SHARDS))) as checkpoint:
        model = Transformer(config, checkpoint, 0, device)
        peer = [Experts(config, checkpoint, f"layers.{layer}.ffn.experts", 1) for layer in range(len(model.blocks))]
        checkpoint.finish()
    return model, LocalExpertExchange(peer)


def load_drafter(
    directory: Path, target: Transformer, rank: int, progress: Progress | None = None, kind: Kind = "checkpoint"
) -> tuple[Drafter, int]:
    """Load the drafter of the target's checkpoint with one rank's experts, and the bytes that its parameters take.

    Raises CheckpointError when the checkpoint has none, or names the file or tensor that is wrong.
    """
    config = target.config
    with open_weights(
        kind, directory, config, target.dtype, target.device, (rank,), progress, part=Use.DRAFT
    ) as checkpoint:
        drafter = Drafter(config, checkpoint, rank, target)
        checkpoint.finish()
    return drafter, checkpoint.placed_bytes


def load_both_draft_shards(
    directory: Path, target: Transformer, kind: Kind = "checkpoint"
) -> tuple[Drafter, LocalExpertExchange]:
    """Load the whole drafter into the target's process, and the exchange that stands for rank 1."""
    config = target.config
    ranks = tuple(range(NUM_SHARDS))
    with open_weights(kind, directory, config, target.dtype, target.device, ranks, part=Use.DRAFT) as checkpoint:
        drafter = Drafter(config, checkpoint, 0, target)
        peer = [Experts(config, checkpoint, f"mtp.{stage}.ffn.experts", 1) for stage in range(len(drafter.stages))]
        checkpoint.finish()
    return drafter, LocalExpertExchange(peer)


def open_weights(
    kind: Kind,
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: tuple[int, ...],
    progress: Progress | None = None,
    part: Use = Use.TARGET,
) -> Checkpoint | RandomWeights:
    """Open what engine.weights says; see Checkpoint. Raises CheckpointError."""
    if kind == "random":
        return RandomWeights(config, dtype, device, ranks, progress, part)
    return Checkpoint(directory, config, dtype, device, ranks, progress, part)


class _Header(Protocol):
    """What the safetensors header says of one tensor."""

    def get_dtype(self) -> str: ...

    def get_shape(self) -> list[int]: ...


class _File(Protocol):
    """The part of safetensors' mapped file that is used; the package ships no types for it."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Header: ...

    def __enter__(self) -> _File: ...

    def __exit__(self, kind: None, error: None, trace: None) -> None: ...


class Checkpoint:
    """An opened checkpoint as a WeightSource. Every tensor of its files is checked when it opens.

    part: what has to be taken of it, the target (Use.TARGET) or the drafter (Use.DRAFT).
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: tuple[int, ...],
        progress: Progress | None = None,
        part: Use = Use.TARGET,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.keeps_packed = device.type == "cuda" and dtype == torch.bfloat16  # kernels there unpack as they multiply
        self._progress = progress
        self._files = {path.name: _open(path) for path in _list_files(directory)}
        try:
            self._file_of = self._locate(directory)
            self._specs = expected_tensors(config)
            if "mtp.0.e_proj.weight" in self._file_of and config.dspark is None:
                self._specs |= nextn_tensors(config)
            self._check(directory)
            # Names that the model has still to take.
            self._unread = wanted_names(self._specs, part, ranks, config.n_routed_experts // NUM_SHARDS)
            self._total_bytes = sum(stored_bytes(self._specs[name]) for name in self._unread)
            self._read_bytes = 0
            self.placed_bytes = 0
        except CheckpointError:
            self._close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def weight(self, name: str) -> Weight:
        """Weight [O, I] of the linear NAME as its products read it: packed where kernels unpack, else dense.

        Raises CheckpointError for a packed one whose scales are past what kernels multiply by.
        """
        if not self.keeps_packed or f"{name}.scale" not in self._specs:
            return dense(self.linear(name))
        stored = self._read(f"{name}.weight")
        scales = self._read(f"{name}.scale").view(torch.uint8)
        form = Format.FP4 if stored.dtype == torch.int8 else Format.FP8
        if (largest := int(scales.max())) > MAX_SCALES[form]:
            raise CheckpointError(
                f"tensor {name}.scale has 2 ** {largest - 127}, kernels take 2 ** {MAX_SCALES[form] - 127} at most"
            )
        if form is Format.FP8:
            scales = scales.repeat_interleave(FP8_BLOCK, 0)[: stored.shape[0]]
        return Weight(form, self._place(stored.view(torch.uint8)), self._place(scales))

    def exact(self, name: str) -> Tensor:
        """The tensor NAME for products in float32: in bfloat16 where it is stored so and kernels multiply that."""
        stored = self._read(name)
        keeps = self.keeps_packed and stored.dtype == torch.bfloat16
        return self._place(stored, torch.bfloat16 if keeps else torch.float32)

    def linear(self, name: str) -> Tensor:
        """Weight [O, I] of the linear NAME in the model's dtype, dequantised."""
        stored = self._read(f"{name}.weight")
        if stored.dtype in (torch.float32, torch.bfloat16):
            return self._place(stored, self.dtype)
        scale = decode_e8m0(self._read(f"{name}.scale").view(torch.uint8))
        decode = decode_fp4 if stored.dtype == torch.int8 else decode_fp8
        return self._place(decode(stored, scale), self.dtype)

    def float32(self, name: str) -> Tensor:
        """The tensor NAME in float32."""
        return self._place(self._read(name), torch.float32)

    def integer(self, name: str) -> Tensor:
        """The int64 tensor NAME."""
        return self._place(self._read(name), torch.int64)

    def finish(self) -> None:
        """Raise InvariantError if a tensor that this rank needs was never taken."""
        if self._unread:
            raise InvariantError(f"{len(self._unread)} tensors were not loaded, {min(self._unread)} first")

    def _read(self, name: str) -> Tensor:
        if name not in self._unread:
            raise InvariantError(f"tensor {name} is read twice or is not this rank's")
        self._unread.remove(name)
        tensor = self._files[self._file_of[name]].get_tensor(name)
        self._read_bytes += tensor.numel() * tensor.itemsize
        if self._progress is not None:
            self._progress(self._read_bytes, self._total_bytes)
        return tensor

    def _place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Copy to the device, always: the file's mapping ends with this object."""
        placed = tensor.to(device=self.device, dtype=dtype, copy=True)
        self.placed_bytes += placed.numel() * placed.itemsize
        return placed

    def _locate(self, directory: Path) -> dict[str, str]:
        """Map tensor names to file names; the index and the files must say the same."""
        located: dict[str, str] = {}
        for file_name, file in self._files.items():
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in located:
                    raise CheckpointError(f"{directory}: tensor {name} is in {located[name]} and in {file_name}")
                located[name] = file_name
        weight_map = _read_index(directory)
        if weight_map is not None and weight_map != located:
            wrong = min(
                name for name in weight_map.keys() | located.keys() if weight_map.get(name) != located.get(name)
            )
            place = located.get(wrong, "no file")
            raise CheckpointError(
                f"{directory}: the index puts tensor {wrong} in {weight_map.get(wrong)}, it is in {place}"
            )
        return located

    def _check(self, directory: Path) -> None:
        """Compare the files' tensors with the expected ones."""
        _raise_for(directory, "missing tensor", self._specs.keys() - self._file_of.keys())
        _raise_for(directory, "unknown tensor", self._file_of.keys() - self._specs.keys())
        for name, spec in self._specs.items():
            header = self._files[self._file_of[name]].get_slice(name)
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            if dtype != spec.dtype:
                raise CheckpointError(f"{directory}: tensor {name} is {dtype}, expected {spec.dtype}")
            if shape != spec.shape:
                raise CheckpointError(
                    f"{directory}: tensor {name} has shape {list(shape)}, expected {list(spec.shape)}"
                )

    def _close(self) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)


def _raise_for(directory: Path, what: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise CheckpointError(f"{directory}: {what} {found[0]}{more}")


def _read_index(directory: Path) -> dict[str, str] | None:
    """Read the shard index; None when the checkpoint is one file."""
    path = directory / "model.safetensors.index.json"
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_bytes())
        weight_map = index["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items()):
            raise ValueError("weight_map must map names to file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from error
    return dict(weight_map)


def _list_files(directory: Path) -> list[Path]:
    weight_map = _read_index(directory)
    if weight_map is None:
        return [directory / "model.safetensors"]
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{directory}: the index names {name!r}, which is not a plain file name")
    return [directory / name for name in names]


def _open(path: Path) -> _File:
    try:
        return cast(_File, safe_open(path, framework="pt", device="cpu"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {error}") from error
