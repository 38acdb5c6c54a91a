"""Builds the C parts; everything else is in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=[
        "dsparkd/kernels/build.py:ffibuilder",
        "dsparkd/native/build.py:ffibuilder",
        "dsparkd/native/traversal_build.py:ffibuilder",
    ]
)
