"""Builds dsparkd.native._traversal from traversal.h and traversal.c; setup.py names it to setuptools.

It needs the headers of the installed apache-tvm-ffi and links nothing: importing tvm_ffi loads the library that its
names resolve to. After a change of the C sources in a checkout: `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
# Of traversal.c alone, in the tests: what cffi generates around it is not free of warnings.
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]


def declarations() -> str:
    """Return the header without its preprocessor lines, which cffi does not read; its one constant stays a number."""
    lines = (HERE / "traversal.h").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#") or line.startswith("#define DSPARKD_M"))


def tvm_ffi_headers() -> Path:
    """Directory of the installed headers; found without an import, which would load torch."""
    found = importlib.util.find_spec("tvm_ffi")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("apache-tvm-ffi is not installed: pyproject.toml names the version to build against")
    return Path(found.submodule_search_locations[0]) / "include"


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "dsparkd.native._traversal",
    '#include "traversal.h"',
    sources=["dsparkd/native/traversal.c"],
    include_dirs=[str(HERE), str(tvm_ffi_headers())],
    extra_compile_args=["-std=c11", "-O2", "-pthread"],
    extra_link_args=["-pthread"],
)
