"""Builds the cpu kernels: dsparkd.kernels._cpu, from cpu.h and cpu.c. setup.py names it to setuptools.

After a change of the C sources in a checkout: `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
# Contraction to fused multiply-add is wanted, and in every copy of a loop alike: gcc 13 leaves it out of short chains
# of its own accord, which the second flag forbids. linear.require_row_invariance proves the outcome at start.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=fast", "--param=avoid-fma-max-bits=0"]


def declarations() -> str:
    """Return the header without its preprocessor lines, which cffi does not read."""
    lines = (HERE / "cpu.h").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "dsparkd.kernels._cpu",
    '#include "cpu.h"',
    sources=["dsparkd/kernels/cpu.c"],
    include_dirs=[str(HERE)],
    extra_compile_args=FLAGS,
    libraries=["m"],
)
