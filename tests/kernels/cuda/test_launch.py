"""Kernels that are launched while the last one still runs: each waits before it touches what others write."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsparkd.kernels.cuda as package

MEMORY = {"load", "store", "atomic_add"}
WAITS = {"follow", "follow_alone"}
AHEAD = {"constant", "settled"}  # load what no kernel of a step writes, or none since its first ones


def modules() -> list[ast.Module]:
    (folder,) = package.__path__
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.py"))]


def kernels() -> dict[str, ast.FunctionDef]:
    """Functions by name, of all modules: kernels' names are distinct."""
    return {node.name: node for tree in modules() for node in tree.body if isinstance(node, ast.FunctionDef)}


def launches() -> Iterator[tuple[str, bool]]:
    """Every `_kernel[grid](...)`: the kernel's name, and whether it may begin early."""
    for tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = node.func.value
                if isinstance(name, ast.Name) and name.id.startswith("_"):
                    yield name.id, any(keyword.arg == "launch_pdl" for keyword in node.keywords)


def attributes(node: ast.AST) -> set[str]:
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def calls(node: ast.AST) -> set[str]:
    return {each.func.id for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)}


def touches_memory(statement: ast.stmt) -> bool:
    """Whether it, or a function of these modules that it calls, loads or stores; but for those of AHEAD."""
    called = [kernels()[name] for name in calls(statement) - AHEAD if name in kernels()]
    return bool(attributes(statement) & MEMORY) or any(touches_memory(function) for function in called)


@pytest.mark.parametrize("name", sorted({name for name, is_early in launches() if is_early}))
def test_a_kernel_that_begins_early_waits_first(name: str) -> None:
    """An earlier kernel's stores are not there yet, and its loads not done; and one program that did not wait could
    end before them, which would let a later kernel begin: so no way through the kernel leads past the wait. Parameters
    and what has long been written alone are loaded ahead of it."""
    for statement in kernels()[name].body:
        if isinstance(statement, ast.Expr) and calls(statement) & WAITS:
            return
        assert not any(isinstance(each, ast.Return) for each in ast.walk(statement))
        assert not touches_memory(statement)
    pytest.fail("it does not wait")


def test_kernels_that_wait_are_launched_early() -> None:
    """One launch without the attribute waits for the whole of what runs before, and the chain breaks there."""
    found = set(launches())
    assert {name for name, _ in found} >= {"_linear_kernel", "_attend", "_collapse"}
    assert not {name for name, is_early in found if not is_early and calls(kernels()[name]) & WAITS}
