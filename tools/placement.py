"""Where a gate computes: the arguments that name a device, and what they mean for an engine's configuration.

A gate that is told "cuda" starts a server or an engine there and fails where there is none; nothing falls back to cpu.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from tools.harness import ROOT

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Placement:
    """device, dtype and kv_dtype as the configuration names them. shares_device: both ranks on one GPU.

    is_dense: the checkpoint's weights are read from a copy without quantisation, of the same values.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: DType = "float32"
    kv_dtype: Literal["model", "fp8"] = "model"
    shares_device: bool = False
    is_dense: bool = False

    @property
    def on_cuda(self) -> bool:
        """Whether a GPU computes."""
        return self.device == "cuda"

    def engine(self) -> dict[str, object]:
        """Keys of [engine]."""
        keys: dict[str, object] = {"device": self.device, "dtype": self.dtype, "kv_dtype": self.kv_dtype}
        return keys | ({"shared_device": True} if self.shares_device else {})

    def __str__(self) -> str:
        """One line for a gate's output."""
        weights = "a dense copy's weights" if self.is_dense else "weights as stored"
        place = f"{self.device}, both ranks on one" if self.shares_device else self.device
        cache = ", keys cached in 8 bits" if self.kv_dtype == "fp8" else ""
        return f"{place}, {self.dtype}, {weights}{cache}"

    @contextmanager
    def checkpoint(self, directory: Path) -> Iterator[Path]:
        """The checkpoint to compute with: the one given, or a dense copy for as long as the block runs."""
        if not self.is_dense:
            yield directory
            return
        with TemporaryDirectory(prefix="dsparkd-dense-") as name:
            copy = Path(name) / directory.name
            # A process of its own: the reader of files brings transformers along, which takes seconds and a gigabyte.
            command = [sys.executable, "-m", "tools.dense_copy", "--checkpoint", str(directory), "--out", str(copy)]
            subprocess.run(command, cwd=ROOT, check=True)
            yield copy


def add_arguments(parser: argparse.ArgumentParser, *, dtype: bool = True) -> None:
    """The arguments that `placement` reads. dtype: whether the gate computes in one."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shared-device", action="store_true", help="cuda: both ranks on one GPU")
    parser.add_argument("--dense", action="store_true", help="read a copy of the weights without quantisation")
    parser.add_argument("--kv-dtype", choices=("model", "fp8"), default="model", help="how keys are cached")
    if dtype:
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default float32, on cuda bfloat16")


def placement(arguments: argparse.Namespace, dtype: DType | None = None) -> Placement:
    """What the arguments say; dtype in place of theirs."""
    chosen = dtype or arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    return Placement(arguments.device, chosen, arguments.kv_dtype, arguments.shared_device, arguments.dense)
