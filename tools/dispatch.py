"""Chooses a module of a package by the first command-line word and runs its `main(argv) -> int`."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from pathlib import Path


def names(package: str) -> list[str]:
    """List the commands of a package: its modules that are not private."""
    found = importlib.import_module(package)
    return sorted(name for _, name, _ in pkgutil.iter_modules(found.__path__) if not name.startswith("_"))


def run(package: str, arguments: list[str]) -> int:
    """Run `package.NAME`'s main with the rest of the arguments; 2 when there is no such command."""
    known = names(package)
    if not arguments or arguments[0] not in known:
        sys.stderr.write(f"usage: python -m {package} NAME [options]\n")
        for name in known:
            sys.stderr.write(f"  {name:<12} {_headline(package, name)}\n")
        return 2
    code: int = importlib.import_module(f"{package}.{arguments[0]}").main(arguments[1:])
    return code


def _headline(package: str, name: str) -> str:
    """Return the first line of a command's docstring without importing what the command needs."""
    directory = Path(str(importlib.import_module(package).__file__)).parent
    text = ast.get_docstring(ast.parse((directory / f"{name}.py").read_text(encoding="utf-8")))
    return (text or "").splitlines()[0]
