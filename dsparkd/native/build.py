"""Builds the rank exchange: dsparkd.native._exchange, from exchange.h and exchange.c. setup.py names it to setuptools.

After a change of the C sources in a checkout: `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra"]
STRICT_FLAGS = [*FLAGS, "-Wpedantic", "-Wconversion", "-Werror"]  # for our source alone: cffi's is not ours to mend


def declarations() -> str:
    """Return the header without its preprocessor lines, which cffi does not read."""
    lines = (HERE / "exchange.h").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "dsparkd.native._exchange",
    '#include "exchange.h"',
    sources=["dsparkd/native/exchange.c"],
    include_dirs=[str(HERE)],
    extra_compile_args=FLAGS,
)
