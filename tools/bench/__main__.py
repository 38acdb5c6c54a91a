"""Runs one bench: `python -m tools.bench NAME [--json] ...`; without a name it lists them."""

from __future__ import annotations

import sys

from tools.dispatch import run

if __name__ == "__main__":
    sys.exit(run("tools.bench", sys.argv[1:]))
