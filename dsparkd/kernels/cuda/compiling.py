"""Kernels compiled at start, side by side: one after the other they would take most of a start.

Who knows which forms of its kernels steps may ask for launches each of them once, `ahead` of the first step. Inside of
`side_by_side` nothing of that is launched: kernels are compiled on threads while weights are loaded, and all of them
are there when it ends. Triton's compiler lets go of the interpreter, and its assembler is a process of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

from triton import AsyncCompileMode, JITFunction
from triton.errors import TritonError

from dsparkd.errors import CapabilityError

_IS_SIDE_BY_SIDE: ContextVar[bool] = ContextVar("kernels are compiled side by side", default=False)


@contextlib.contextmanager
def side_by_side(num_threads: int) -> Iterator[None]:
    """Compile on so many threads what is asked for ahead; at the end it lies on the device, ready to be launched.

    One thread starts at a time. Raises CapabilityError for a kernel that does not compile, or does not fit the device.
    """
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="compiler")
    token = _IS_SIDE_BY_SIDE.set(True)
    try:
        with AsyncCompileMode(pool) as mode:
            try:
                yield
            except BaseException:
                mode.raw_futures.clear()  # whatever else went wrong waits for no compiler
                raise
            kernels = tuple(mode.future_kernels.values())
        for kernel in kernels:
            kernel.result().run  # noqa: B018  a property that loads the kernel: no step shall wait for that
    except TritonError as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise CapabilityError(
            feature="engine.device = 'cuda'",
            missing=f"a kernel that Triton compiles ({type(error).__name__}: {first_line})",
            remedy="use the versions of torch and Triton that docs/operating.md names",
        ) from error
    finally:
        _IS_SIDE_BY_SIDE.reset(token)
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Launches in here are for the sake of their kernels: inside of `side_by_side` these are compiled, and none runs.

    So what a launch gives may be anything, and nothing of it may be read on the host.
    """
    if not _IS_SIDE_BY_SIDE.get():
        yield
        return
    launch = JITFunction.run

    def compile_alone(self: object, *args: object, **options: object) -> object:
        return launch(self, *args, **{**options, "warmup": True})

    # Triton offers this for one launch (JITFunction.warmup); here it is the wrappers that launch.
    JITFunction.run = compile_alone
    try:
        yield
    finally:
        JITFunction.run = launch
