"""The tables of docs/structured_output.md, made from the checker. `python -m tools.keyword_table` writes them in."""

from __future__ import annotations

from dsparkd.grammar import inspection, key, merge, objects, pattern, scalars
from dsparkd.grammar.keywords import FORMATS, KEYWORDS
from dsparkd.grammar.spec import SOURCES
from tools.harness import ROOT

DOCUMENT = ROOT / "docs" / "structured_output.md"


def keyword_table() -> str:
    """One row a keyword."""
    rows = [
        f"| `{keyword.name}` | {keyword.treatment} | {keyword.effect.replace('|', chr(92) + '|')} |"
        for keyword in KEYWORDS.values()
    ]
    return "\n".join(["| keyword | treatment | remarks |", "|---|---|---|", *rows])


def source_table() -> str:
    """Fields of a request by kind."""
    kinds: dict[str, list[str]] = {}
    for field, kind in SOURCES.items():
        kinds.setdefault(kind, []).append(f"`{field}`")
    rows = [f"| `{kind}` | {', '.join(fields)} |" for kind, fields in kinds.items()]
    return "\n".join(["| kind | fields |", "|---|---|", *rows])


def limit_table() -> str:
    """What is refused for its size, before XGrammar sees it."""
    limits = {
        "bytes of a schema, of an EBNF text, of JSON in a string": key.MAX_BYTES,
        "levels of nesting": key.MAX_DEPTH,
        "properties": inspection.MAX_PROPERTIES,
        "enum values, choices": inspection.MAX_ENUM_VALUES,
        "bytes of a pattern or a regular expression": pattern.MAX_PATTERN_BYTES,
        "open groups in a pattern, open parentheses in EBNF": pattern.MAX_OPEN_GROUPS,
        "characters of a pattern with its repetitions written out": pattern.MAX_POSITIONS,
        "bytes of one literal, name or value": inspection.MAX_LITERAL_BYTES,
        "optional properties beside minProperties or maxProperties": objects.MAX_COUNTED_OPTIONAL,
        "patterns in one patternProperties": objects.MAX_KEY_PATTERNS,
        "subschemas after merging": merge.MAX_SHAPES,
        "references that follow each other": merge.MAX_CHAIN,
        "values of a bounded multipleOf": scalars.MAX_LISTED_MULTIPLES,
        "steps of comparing values and names with what stands beside them": inspection.MAX_STEPS,
    }
    rows = [f"| {name} | {limit:,} |" for name, limit in limits.items()]
    return "\n".join(["| of | at most |", "|---|---|", *rows])


def format_list() -> str:
    """Formats that are enforced."""
    return ", ".join(f"`{name}`" for name in FORMATS)


TABLES = {"keywords": keyword_table, "fields": source_table, "limits": limit_table, "formats": format_list}


def filled(text: str) -> str:
    """The document with its generated parts renewed; each stands between two comments that name it."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{DOCUMENT.name} has no place for {name}")
        text = f"{before}{begin}{table()}{end}{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
