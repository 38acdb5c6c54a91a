"""Regular expressions against Python's, and what is written of them against XGrammar's reading."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
import xgrammar

from dsparkd.grammar import matching, pattern, spelling
from dsparkd.messages import Grammar
from tests.grammar.bytes_vocabulary import Language, make_compiler

TEXTS = ["".join(letters) for count in range(5) for letters in itertools.product('ab"', repeat=count)] + [
    *(
        "1",
        "12",
        "a1",
        "\\",
        "\\a",
        "\n",
        "a\nb",
        "\t",
        "é",
        "日本",
        "😀",
        " ",
        "a b",
        "_",
        "-",
        "]",
        "^",
        "ab" * 9,
        "\x01",
    ),
]


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    """A pattern that ECMA-262 and Python read alike."""
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(
            [
                "a",
                "b",
                '"',
                "\\\\",
                "[ab]",
                "[^a]",
                '[^"\\n]',
                "\\d",
                "\\.",
                "[a-c1-3]",
                "\\n",
                "é",
                "[]-^]".replace("[]", "[\\]"),
            ]
        )
    match rng.randrange(5):
        case 0 | 1:
            return random_pattern(rng, depth - 1) + random_pattern(rng, depth - 1)
        case 2:
            return f"(?:{random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
        case 3:
            return f"({random_pattern(rng, depth - 1)})" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "{0,}", "*?"])
        case _:
            return f"(?<n{rng.randrange(10**9)}>{random_pattern(rng, depth - 1)})".replace("?<", "?P<")


@pytest.mark.parametrize("seed", range(60))
def test_matching_agrees_with_python(seed: int) -> None:
    """The pattern is parsed by us before XGrammar sees it, so a misreading would change what is enforced."""
    rng = random.Random(seed)
    text = random_pattern(rng)
    anchored = rng.choice(["", "^"]) + text + rng.choice(["", "$"])

    node = pattern.searched(pattern.parse(anchored.replace("(?P<", "(?<")))

    wanted = re.compile(anchored[:-1] + r"\Z" if anchored.endswith("$") else anchored)
    for candidate in TEXTS:
        assert matching.matches(node, candidate) == bool(wanted.search(candidate)), (anchored, candidate)


@pytest.mark.parametrize("seed", range(25))
def test_written_pattern_is_read_by_xgrammar_as_the_parsed_one(seed: int) -> None:
    """Escapes, quotation marks and control characters must come out as JSON spells them."""
    rng = random.Random(seed)
    node = pattern.whole(pattern.parse(random_pattern(rng).replace("(?P<", "(?<")))
    schema = json.dumps({"type": "string", "pattern": spelling.json_text(node)})

    language = Language(make_compiler(), Grammar(kind="json_schema", text=schema))

    for candidate in TEXTS:
        assert language.admits_json(candidate) == matching.matches(node, candidate), (schema, candidate)


@pytest.mark.parametrize(
    ("text", "found", "missed"),
    [
        ("^[\\u4e00-\\u9fff]+$", ["在线"], ["a"]),
        ("^[\\u{1F600}-\\u{1F64F}]$", ["😀"], ["a"]),
        ("^\\ud83d\\ude00$", ["😀"], ["a"]),
        ("^\\x41\\cJ\\t$", ["A\n\t"], ["A"]),
        ("^[^]$", ["a", "\n"], [""]),
        ("^[\\d\\-x]+$", ["1-x"], ["y"]),
        ("^(?:a|)$", ["a", ""], ["b"]),
        ("^.$", ["a"], ["\n", "\u2028"]),
        ("^\\S$", ["a"], [" ", "\u3000"]),
        ("^[\\w.]+$", ["a_1."], ["é"]),
        ("", ["", "a"], []),
        ("^a{2,}$", ["aaa"], ["a"]),
        ("^a|b$", ["ax", "xb"], ["xax"]),
        ("^(^a|b$)$", [], []),
    ],
)
def test_ecma_syntax(text: str, found: list[str], missed: list[str]) -> None:
    """Forms in which ECMA-262 and Python differ, or that XGrammar misreads."""
    if text == "^(^a|b$)$":
        with pytest.raises(pattern.PatternError):
            pattern.searched(pattern.parse(text))
        return

    node = pattern.searched(pattern.parse(text))

    assert [one for one in found if not matching.matches(node, one)] == []
    assert [one for one in missed if matching.matches(node, one)] == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            "(?=a)",
            "(?!a)",
            "(?<=a)",
            "(?<!a)",
            "(?i)a",
            "(a)\\1",
            "\\k<a>",
            "\\p{L}",
            "\\bx",
            "\\B",
            "[",
            "(",
            ")",
            "a**",
        ),
        *("*a", "a{3,1}", "a{,3}", "{", "\\", "[b-a]", "[\\d-z]", "\\u12", "\\xg1", "\\u{110000}", "^*", "a" * 4097),
        *("(" * 33 + ")" * 33, "(a{0,50}){0,50}", "(?<", "\\01"),
    ],
)
def test_what_cannot_be_enforced_is_refused(text: str) -> None:
    """XGrammar drops look-ahead and takes minutes for products of counts, so these never reach it."""
    with pytest.raises(pattern.PatternError):
        pattern.searched(pattern.parse(text))


def test_matching_has_a_bound() -> None:
    """An enum beside a pattern is matched here, and both come from the client."""
    with pytest.raises(pattern.PatternError, match="work"):
        matching.matches(pattern.whole(pattern.parse("(a|b|ab)*c")), "ab" * 20_000)


@pytest.mark.parametrize(("least", "most"), [(0, 4), (2, 6), (3, None), (1, None), (5, 5)])
@pytest.mark.parametrize("text", ["^[a-b]+(?:1[a-b]+)*$", "b", "^a*$", "^(?:ab)?$", "^a{2,3}[a-b]*$"])
def test_cut_to_a_length_is_never_more_than_the_pattern(text: str, least: int, most: int | None) -> None:
    """A slug of at most 63 characters is everyday; XGrammar ignores the length beside a pattern."""
    node = pattern.searched(pattern.parse(text))
    cut = matching.within(node, least, most)
    candidates = [*TEXTS, "ab1a", "aab1b", "b" * 6, "a1b1a"]
    fitting = {
        one
        for one in candidates
        if matching.matches(node, one) and least <= len(one) <= (len(one) if most is None else most)
    }
    if cut is None:
        assert text != "b"
        return
    found, is_all = cut

    kept = {one for one in candidates if matching.matches(found, one)}

    assert kept <= fitting
    assert kept == fitting or not is_all


def test_names_are_excluded_by_themselves_or_by_how_they_begin() -> None:
    """Every state of the pattern costs XGrammar time, so long lists are cut by their beginnings."""
    names = ["a", "ab", "alpha", "beta", 'q"']
    others = ["", "b", "bet", "betas", "alphas", "al", "abc", "zz", "q", "é"]

    exact, is_all = matching.excluding(names, 100)
    short, is_short_all = matching.excluding(names, 5)

    assert is_all
    assert not is_short_all
    assert [name for name in names if matching.matches(exact, name) or matching.matches(short, name)] == []
    assert [name for name in others if not matching.matches(exact, name)] == []
    assert matching.matches(short, "zz")


def test_disjoint_patterns_are_seen_by_their_beginnings_and_lengths() -> None:
    """Only what is plain counts as disjoint: a key that two patterns match would have to satisfy both."""

    def disjoint(first: str, second: str) -> bool:
        return matching.are_disjoint(*(pattern.searched(pattern.parse(text)) for text in (first, second)))

    assert disjoint("^a", "^b")
    assert disjoint("^x_1", "^x_2")
    assert disjoint("^[a-c]{2}$", "^.{3}$")
    assert not disjoint("^a", "b")
    assert not disjoint("^a?b", "^ab")


def test_long_counts_become_rules() -> None:
    """As a Regex, 300 repetitions cost 8 to 50 ms a mask; as a rule, 0.04 ms. The language is the same."""
    schema = json.dumps({"type": "string", "pattern": "(?:[\\u0061-\\u007a]{2,300}|\\\\[\\u0022]){1,2}"})

    language = Language(make_compiler(), Grammar(kind="json_schema", text=schema))

    assert language.admits('"' + "a" * 600 + '"')
    assert language.admits('"\\"ab"')
    assert not language.admits('"a"')
    assert not language.admits('"' + "a" * 601 + '"')


def test_xgrammar_still_drops_backslashes_from_patterns_of_strings() -> None:
    """The reason why a grammar's text is read back with the flag removed: without it, this fails."""
    schema = json.dumps({"type": "string", "pattern": '(?:a|\\\\")*'})
    compiled = make_compiler().compile_grammar(xgrammar.Grammar.from_json_schema(schema))

    assert not xgrammar.GrammarMatcher(compiled).accept_string('"\\""')
    assert Language(make_compiler(), Grammar(kind="json_schema", text=schema)).admits('"\\""')
