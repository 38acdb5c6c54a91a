"""How kernels follow each other on cuda: the next one may come while the last one still runs.

Every kernel is launched with `launch_pdl=EARLY` and calls `follow` or `follow_alone` before it reads or writes anything
that another kernel writes or reads. So its programs may be there already when what runs before ends. All programs of a
kernel wait, those that have nothing to do as well: only then has everything that was launched before a kernel ended
when its own wait ends, and not its predecessor alone. Kernels of others, such as the library's, are launched without
the attribute, and wait for the whole of what runs before them.

Parameters, which no kernel of a step writes, may be loaded ahead of the wait, by `constant`: what few rows take is
mostly ways to the memory, and so one of them begins earlier. A kernel's programs come when those of the one before have
waited; so what a step's first launches wrote is there by then, too, and may be loaded by `settled`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY = True  # False: every launch waits for the whole of the last one, and the waits below for nothing
IS_COMPILED = tl.constexpr(not knobs.runtime.interpret)  # the interpreter runs one kernel after the other


@triton.jit
def follow():  # type: ignore[no-untyped-def]
    """Wait for all earlier kernels; the next one's programs come as soon as all of this one have."""
    if IS_COMPILED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def constant(places, mask):  # type: ignore[no-untyped-def]
    """Load parameters, 0 where the mask is false, ahead of the wait."""
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def settled(places, mask):  # type: ignore[no-untyped-def]
    """Load numbers that neither the kernel before writes nor one beside it, 0 where the mask is false, ahead of the
    wait."""
    return tl.load(places, mask=mask, other=0)


@triton.jit
def follow_alone():  # type: ignore[no-untyped-def]
    """Wait for all earlier kernels; the next one's programs come when this one's have ended.

    For kernels that fill the device: programs that come while it runs go where one has just ended, and so lie
    unevenly over the processors. On an H200 a chain of kernels with 128 programs each took twice as long.
    """
    if IS_COMPILED:
        gdc_wait()
