"""A grammar's canonical text to XGrammar's compiled form. Imports xgrammar, so ranks and probe children only."""

from __future__ import annotations

import json
import re

import xgrammar

from dsparkd.grammar import matching, pattern, spelling
from dsparkd.messages import Grammar

# Above it, XGrammar counts characters faster in rules than in a Regex: 0.04 ms a mask against 8 to 50 ms.
_MAX_REGEX_COUNT = 64
# XGrammar writes a pattern as a rule of its own. No literal looks like one: those are in brackets.
_PATTERN = re.compile(r'^(?P<rule>[A-Za-z0-9_]+) ::= Regex\((?P<text>".*")(?:, json_string=true)?\)$', re.MULTILINE)
# What XGrammar takes for a character of a string with length bounds: raw control characters, which no JSON text has.
_LOOSE_CHARACTER = re.compile(
    r'^([A-Za-z0-9_]*characters(?:_[0-9]+)? ::= \(\(\[\^\\"\\\\)\\r\\n(\]\)\))$', re.MULTILINE
)
# A name between the ends of two literals is a reference; inside a literal, a quotation mark has a backslash before it.
_QUOTED_RULE = re.compile(r'"\\"" ([A-Za-z0-9_]+) "\\""')
_EBNF_ESCAPES = re.compile(r"\\(.)")
_EBNF_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


def source_grammar(grammar: Grammar) -> xgrammar.Grammar:
    """Parse the canonical text. Raises RuntimeError, with XGrammar's message, for one that XGrammar refuses."""
    match grammar.kind:
        case "json_schema":
            parsed = xgrammar.Grammar.from_json_schema(
                grammar.text,
                any_whitespace=grammar.any_whitespace,
                max_whitespace_cnt=grammar.max_whitespace or None,
                strict_mode=False,
            )
            return _with_exact_patterns(parsed)
        case "structural_tag" | "tool_calls":
            return _with_exact_patterns(xgrammar.Grammar.from_structural_tag(grammar.text))
        case "regex":
            return _with_exact_patterns(xgrammar.Grammar.from_regex(grammar.text))
        case "ebnf":
            return xgrammar.Grammar.from_ebnf(grammar.text)
        case "choice":
            return xgrammar.Grammar.from_ebnf(_choice_ebnf(grammar.text))


def compile_grammar(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """Compile for the compiler's vocabulary. Raises RuntimeError as source_grammar does."""
    return compiler.compile_grammar(source_grammar(grammar))


def _with_exact_patterns(parsed: xgrammar.Grammar) -> xgrammar.Grammar:
    """Let patterns and length bounds mean the JSON text that they were written for.

    XGrammar takes every backslash and quotation mark out of a pattern for a JSON string, hence all escapes that the
    checker wrote into it, and it lets raw control characters into strings with length bounds. Reading a grammar's own
    text back gives the same grammar, so both are put right in the text.
    """
    text = str(parsed)
    exact = _LOOSE_CHARACTER.sub(r"\1\\x00-\\x1f\2", text)
    inlined: dict[str, str] = {}
    exact = _PATTERN.sub(lambda found: _exact_rule(found, inlined), exact)
    if inlined:
        # Between its quotation marks a count is much faster than in a rule of its own, which anything might follow.
        exact = _QUOTED_RULE.sub(lambda found: f'"\\"" {inlined.get(found[1], found[1])} "\\""', exact)
    return parsed if exact == text else xgrammar.Grammar.from_ebnf(exact)


def _exact_rule(found: re.Match[str], inlined: dict[str, str]) -> str:
    rule, quoted = found["rule"], found["text"]
    text = _EBNF_ESCAPES.sub(lambda escape: _EBNF_CONTROLS.get(escape[1], escape[1]), quoted[1:-1])
    try:
        node = pattern.whole(pattern.parse(text, is_own=True))
    except pattern.PatternError:  # out of a client's EBNF, in a structural tag
        return f"{rule} ::= Regex({quoted})"
    if matching.longest_count(node) > _MAX_REGEX_COUNT:
        expression, rules = spelling.ebnf(node, rule)
        inlined[rule] = expression
        return "\n".join([f"{rule} ::= {expression}", *rules])
    return f"{rule} ::= Regex({quoted})"


def _choice_ebnf(text: str) -> str:
    """The choices as an EBNF text; JSON's escapes, with non-ASCII characters as they are, are EBNF's too."""
    choices: list[str] = json.loads(text)
    return "root ::= " + " | ".join(_ebnf_literal(choice) for choice in choices) + "\n"


def _ebnf_literal(text: str) -> str:
    special = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    escaped = (special.get(character) or _control(character) or character for character in text)
    return f'"{"".join(escaped)}"'


def _control(character: str) -> str:
    return f"\\x{ord(character):02x}" if character < " " or character == "\x7f" else ""
