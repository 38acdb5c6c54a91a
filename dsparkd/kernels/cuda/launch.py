"""How kernels follow each other on cuda: the next begins to be launched while the last one still runs.

Every kernel is launched with `launch_pdl=EARLY` and calls `follow` before it reads or writes anything that another
kernel writes or reads. Launches then overlap with the end of what runs before: a program is there already, and waits.
All programs of a kernel call it, those that have nothing to do as well: only then has everything that was launched
before a kernel ended when its own wait ends, and not its predecessor alone. Kernels of others, such as the library's,
are launched without the attribute, and wait for the whole of what runs before them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY = True  # False: every launch waits for the whole of the last one, and the waits below for nothing
IS_COMPILED = tl.constexpr(not knobs.runtime.interpret)  # the interpreter runs one kernel after the other


@triton.jit  # type: ignore[untyped-decorator]
def follow():  # type: ignore[no-untyped-def]
    """Let the next kernel's programs come as soon as all of this one are there, then wait for all earlier kernels."""
    if IS_COMPILED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def fetch_ahead(places, num_bytes):  # type: ignore[no-untyped-def]
    """Bring so many bytes from each place (pointers, a tensor) on into the cache that all processors share, without
    waiting for them: before `follow`, of what no kernel writes. Multiples of 16, places and numbers."""
    if IS_COMPILED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [places.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
