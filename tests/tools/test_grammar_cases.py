"""What hostile clients send: repeatable by number, and of every kind."""

from __future__ import annotations

import json

from tools.grammar_cases import hostile, make_case

SOURCES = {"json_schema", "response_format", "regex", "ebnf", "structural_tag", "choice"}


def test_a_case_is_the_same_whenever_its_number_comes() -> None:
    """A fault names its case; whoever looks into it must get the same one again."""
    known = hostile()

    for number in (0, len(known) - 1, len(known), len(known) + 37):
        assert json.dumps(make_case(number, known)) == json.dumps(make_case(number, hostile()))
    assert make_case(3, known) == known[3]


def test_every_kind_of_grammar_comes_by_chance_and_as_a_known_hostile_one() -> None:
    """A kind that never came would pass."""
    known = hostile()

    assert {field for case in known for field in case} >= SOURCES - {"response_format"}
    assert {field for number in range(300) for field in make_case(len(known) + number, known)} >= SOURCES - {"choice"}
    texts = [json.dumps(make_case(len(known) + number, known)) for number in range(300)]
    assert len(set(texts)) > 280, "few are alike"
