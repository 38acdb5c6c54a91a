"""Runs one gate: `python -m tools.gates NAME [--json] ...`; without a name it lists them."""

from __future__ import annotations

import sys

from tools.dispatch import run

if __name__ == "__main__":
    sys.exit(run("tools.gates", sys.argv[1:]))
