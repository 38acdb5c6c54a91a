"""docs/metrics.md against the families in the code."""

import re

from dsparkd.metrics import FAMILIES, Family
from tools.harness import ROOT

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
KINDS = {"counter": "C", "gauge": "G", "histogram": "H"}


def row_of(family: Family) -> str:
    """The row that the document must have, without its last cell."""
    kind = KINDS[family.kind] + (" r" if "dp_rank" in family.labels else "")
    labels = []
    for label in family.labels:
        if label in family.open_labels:
            labels.append(f"`{label}`")
        elif label != "dp_rank":
            labels.append(f"`{label}`: {', '.join(family.values[label])}")
    return f"| `{family.name}` | {kind} | {'; '.join(labels)} |"


def test_families_types_labels_and_values_are_equal_sets() -> None:
    """M-01, Q-12: in both directions, label values included."""
    written = {
        re.match(r"(.*\|) [^|]*\|$", line)[1] for line in DOCUMENT.splitlines() if line.startswith("| `dsparkd_")
    }  # type: ignore[index]

    assert {re.sub(" +", " ", row) for row in written} == {re.sub(" +", " ", row_of(family)) for family in FAMILIES}


def test_queries_name_families_and_values_that_exist() -> None:
    """A query that matches nothing looks like a quiet server."""
    names = {family.name: family for family in FAMILIES}
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    for block in re.findall(r"```promql\n(.*?)```", DOCUMENT, re.DOTALL):
        for name, selector in re.findall(r"(dsparkd_\w+)(\{[^}]*\})?", block):
            base = name
            for suffix in suffixes["histogram"]:
                base = base.removesuffix(suffix) if base not in names else base
            family = names[base]
            assert (base != name) == (family.kind == "histogram"), name
            for label, operator, value in re.findall(r'(\w+)(=|!~)"([^"]*)"', selector):
                assert label in family.labels
                assert set(value.split("|") if operator == "!~" else [value]) <= set(family.values[label])


def test_each_path_is_explained_with_its_counter() -> None:
    """M-06: a gate "path X was used" is a query, so the document says which."""
    (paths,) = [family.values["path"] for family in FAMILIES if family.name == "dsparkd_path_active"]

    rows = dict(re.findall(r"^\| (\w+) \| `(dsparkd_\w+)", DOCUMENT, re.MULTILINE))

    assert set(rows) == set(paths)
    assert set(rows.values()) <= {family.name for family in FAMILIES if family.kind == "counter"}
