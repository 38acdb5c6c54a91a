"""docs/invariants.md against the tests that it names."""

import ast
import re

from tools.harness import ROOT

DOCUMENT = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")


def rows() -> list[tuple[str, str]]:
    """Sentence and test of each invariant."""
    return re.findall(r"^\| ([A-Z\"].*?) \| `([^`]*)` \|$", DOCUMENT, re.MULTILINE)


def test_each_invariant_has_a_test_that_exists() -> None:
    """Q-12: a renamed test takes its invariant's proof away unless the document follows."""
    assert len(rows()) > 30
    for sentence, reference in rows():
        assert sentence.endswith("."), sentence
        file, name = reference.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, reference


def test_no_line_of_the_tables_is_left_out() -> None:
    """A row that the pattern misses would go unchecked."""
    lines = [line for line in DOCUMENT.splitlines() if line.startswith("| ") and not line.startswith("| invariant")]

    assert len(lines) == len(rows())
