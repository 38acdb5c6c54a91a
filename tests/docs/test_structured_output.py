"""docs/structured_output.md against the checker, and its requests against the parser."""

from __future__ import annotations

import json
import re

import pytest

from dsparkd.errors import GrammarError
from dsparkd.grammar.spec import ConstraintOptions, parse_constraint
from tools.harness import ROOT
from tools.keyword_table import DOCUMENT, filled

TEXT = DOCUMENT.read_text(encoding="utf-8")
REQUESTS = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)


def test_tables_are_those_of_the_checker() -> None:
    """Made by `python -m tools.keyword_table`; a table kept by hand would soon promise what is not enforced."""
    assert filled(TEXT) == TEXT


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_each_request_of_the_document_is_accepted(number: int) -> None:
    """An example that is refused teaches the wrong thing."""
    constraint = parse_constraint(json.loads(REQUESTS[number]), ConstraintOptions(marker_id=1))

    assert constraint is not None
    assert not [warning for warning in constraint.warnings if warning.kind == "unsupported"]


def test_the_examples_cover_every_kind() -> None:
    """Of which none is left out."""
    kinds = set()
    for request in REQUESTS:
        constraint = parse_constraint(json.loads(request), ConstraintOptions(marker_id=1))
        assert constraint is not None
        kinds.add(constraint.grammar.kind)

    assert kinds == {"json_schema", "regex", "ebnf", "choice", "structural_tag", "tool_calls"}


def test_every_code_of_a_refusal_is_explained() -> None:
    """Clients branch on codes; one that the document lacks is found only in production."""
    codes: set[str] = set()
    for name in ("inspection", "key", "merge", "objects", "scalars", "schema", "spec", "tag", "tools"):
        source = (ROOT / "dsparkd" / "grammar" / f"{name}.py").read_text(encoding="utf-8")
        codes |= set(re.findall(r'code(?:: str)?\s*=\s*"([a-z_]+)"', source))
        codes |= {code for code in re.findall(r'_error\([^()]*?"([a-z_]+)",', source) if code.count("_")}
    refusals = TEXT[TEXT.index("## Refusals") :]

    assert codes >= {"grammar_too_large", "schema_cycle", "conflicting_grammars", "unknown_tool"}
    assert {code for code in codes if f"`{code}`" not in TEXT and f"`{code}`" not in refusals} == set()


def test_a_refused_keyword_is_refused() -> None:
    """The document's word for it is the checker's."""
    for name in re.findall(r"\| `([^`]+)` \| refused \|", TEXT):
        value = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}, "$recursiveAnchor": True}.get(name, {"a": {}})
        schema = {
            name: 1 if name.endswith("Contains") else "#" if name.startswith("$") and name[1].islower() else value
        }
        schema |= {"$recursiveAnchor": True} if name == "$recursiveAnchor" else {}
        schema |= (
            {"contains": {}}
            if name.endswith("Contains")
            else {"then": {}, "if": {}}
            if name in ("if", "then", "else")
            else {}
        )
        with pytest.raises(GrammarError) as caught:
            parse_constraint({"json_schema": schema}, ConstraintOptions())
        assert caught.value.code == "unsupported_schema", name
