"""docs/logs.md against the log calls in the source."""

import ast
import json
import re
import tomllib
from collections import defaultdict
from pathlib import Path

from tools.harness import ROOT

LEVELS = ("debug", "info", "warning", "error", "exception")
PACKAGE = ROOT / "dsparkd"
DOCUMENT = ROOT / "docs" / "logs.md"

# Every line may carry these; the document explains them once.
COMMON = {"dp_rank", "request_id"}


class Calls(ast.NodeVisitor):
    """Collects level and fields of each log call; `open` events pass fields that the tree does not show."""

    def __init__(self) -> None:
        self.levels: dict[str, set[str]] = defaultdict(set)
        self.fields: dict[str, set[str]] = defaultdict(set)
        self.open: set[str] = set()
        self.not_literal: list[str] = []

    def visit_Call(self, call: ast.Call) -> None:
        self.generic_visit(call)
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in LEVELS:
            return
        if not re.search(r"\blog(ger)?\b|\b_log\b|\bget\(\)", ast.unparse(call.func.value)):
            return
        event = call.args[0] if call.args else None
        if not isinstance(event, ast.Constant) or not isinstance(event.value, str):
            self.not_literal.append(ast.unparse(call))
            return
        self.levels[event.value].add("error" if call.func.attr == "exception" else call.func.attr)
        if call.func.attr == "exception":
            self.fields[event.value].add("exception")
        for keyword in call.keywords:
            if keyword.arg is None:
                self.open.add(event.value)
            else:
                self.fields[event.value].add("exception" if keyword.arg == "exc_info" else keyword.arg)


def calls() -> Calls:
    found = Calls()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def rows() -> dict[str, tuple[set[str], set[str]]]:
    """Levels and fields by event."""
    table = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (name := re.fullmatch(r"`(\w+)`", cells[0])):
            levels = set(re.findall(r"\w+", cells[1]))
            table[name[1]] = (levels, set(re.findall(r"\w+", cells[3])))
    return table


def test_every_event_is_a_literal() -> None:
    """An event with a computed name could not be documented, nor searched for."""
    assert calls().not_literal == []


def test_events_in_code_and_document_are_equal_sets() -> None:
    """Q-12: an operator finds every event, and no event that is gone."""
    assert set(rows()) == set(calls().levels)


def test_levels_and_fields_of_each_event_are_documented() -> None:
    """Q-12: the fields are what ingestion relies on."""
    found = calls()
    for event, (levels, fields) in rows().items():
        assert levels == found.levels[event], event
        shown = found.fields[event] - COMMON
        if event in found.open:
            assert shown <= fields, event
        else:
            assert fields - COMMON == shown, event


def test_the_ingestion_examples_are_well_formed() -> None:
    """A reader pastes them."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (vector,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert set(tomllib.loads(vector)) == {"sources", "transforms", "sinks"}
    assert json.dumps(text)


def test_the_package_prints_nothing_beside_the_log() -> None:
    """One line that is no event breaks a consumer of JSON lines; the command line's own output goes to stdout."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", path
    assert Path(PACKAGE).is_dir()
