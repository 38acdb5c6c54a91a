"""Settings of the whole test run."""

from __future__ import annotations

import os
from pathlib import Path

# Triton reads it when a kernel is declared, so it must stand before the first import of triton. A machine with a GPU
# compiles its kernels; any other interprets them.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
