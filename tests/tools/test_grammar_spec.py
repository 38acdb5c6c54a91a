"""The gate grammar_spec: random grammars that hold, and faults that it must find."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.gates import grammar_spec
from tools.gates.grammar_spec import Walker, random_grammar, walk_grammars
from tools.harness import ensure_checkpoint

GRAMMARS = 200


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The shipped checkpoint, for its tokenizer."""
    return ensure_checkpoint()


def test_answers_are_sentences_of_random_grammars_whatever_is_drafted_and_accepted(checkpoint: Path) -> None:
    """D-24: random and hostile drafts, both rules, cuts at random; the gate plays 2,000 of these."""
    walked = walk_grammars(checkpoint, GRAMMARS, seed=1)

    assert walked.faults == []
    assert walked.grammars == GRAMMARS
    assert walked.ended > GRAMMARS // 2
    assert min(walked.accepted_drafts, walked.refused_drafts, walked.shortened) > 100


def test_rows_behind_a_refused_draft_that_count_as_usable_are_found(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decision 1: such rows allow everything."""
    monkeypatch.setattr(Walker, "_usable", lambda walker, tree, walked: walker._width)

    assert walk_grammars(checkpoint, GRAMMARS, seed=1).faults


def test_a_matcher_that_misses_an_accepted_id_is_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D-09: each kept id advances it once."""
    monkeypatch.setattr(
        grammar_spec.Matcher, "queue", lambda matcher, ids: matcher._queue.extend(ids if random.random() < 0.9 else ())
    )

    assert walk_grammars(checkpoint, GRAMMARS, seed=1).faults


def test_grammars_are_of_all_kinds_and_repeatable() -> None:
    """A seed names the same two thousand."""
    one, other = ([random_grammar(random.Random(seed)) for seed in range(50)] for _ in range(2))

    assert one == other
    assert {grammar.kind for grammar in one} == {"regex", "ebnf", "json_schema"}
