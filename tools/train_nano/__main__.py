"""Train the nano checkpoint: see tools.train_nano.command."""

from __future__ import annotations

from tools.train_nano.command import main

if __name__ == "__main__":
    main()
