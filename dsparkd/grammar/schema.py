"""Schema checker: a JSON schema to a text that XGrammar enforces as the standard means it, or a refusal.

`Inspection` looks at every keyword of every subschema; `Merger` merges what holds for one instance into one shape;
`schema_document` writes shapes in the few forms in which the installed XGrammar was seen to be exact. What XGrammar
ignores, loosens or misreads never reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsparkd.errors import GrammarError
from dsparkd.grammar.inspection import Effort, Inspection, Policy, SchemaWarning
from dsparkd.grammar.key import MAX_BYTES, canonical_schema
from dsparkd.grammar.merge import Merger
from dsparkd.grammar.shape import Shape
from dsparkd.grammar.written import schema_document


@dataclass(frozen=True, slots=True)
class Checked:
    """What XGrammar gets for a schema: its canonical text, and the same as a value."""

    text: str
    document: dict[str, object]
    warnings: tuple[SchemaWarning, ...]


def check_schema(
    schema: object, pointer: str, *, policy: Policy = "refuse", strict: bool = False, effort: Effort | None = None
) -> Checked:
    """Check a schema and write the text that XGrammar compiles.

    pointer: JSON pointer of the schema in the request. strict: the client asked for closed objects, so closing one that
    says nothing of other properties is no warning. effort: of the request's schemas so far. Raises GrammarError.
    """
    shape, warnings = check_shape(schema, pointer, policy=policy, strict=strict, effort=effort)
    document = schema_document(shape)
    text = canonical_schema(document)
    if len(text.encode()) > 4 * MAX_BYTES:
        message = f"{pointer}: the schema is too large once its references are merged"
        raise GrammarError(message, code="grammar_too_large", param=pointer)
    return Checked(text, document, warnings)


def check_shape(
    schema: object, pointer: str, *, policy: Policy, strict: bool, effort: Effort | None = None
) -> tuple[Shape, tuple[SchemaWarning, ...]]:
    """Check a schema; return what it admits. effort: as check_schema has it. Raises GrammarError."""
    inspection = Inspection(schema, pointer, policy=policy, strict=strict, effort=effort)
    inspection.run()
    shape = Merger(inspection).root()
    return shape, inspection.warnings()
