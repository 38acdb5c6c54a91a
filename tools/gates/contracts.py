"""Gate `contracts`: every contract in scope has a test that cites it and passed, or a stated reason why not.

    python -m tools.gates contracts [--json] [--report FILE]

Runs the whole suite (or reads the JUnit report of a run of it) and looks for contract IDs in the source of each test
function: its docstring, body, parameters. A comment elsewhere in the file proves nothing. The scope grows with the
project; what is in it and not yet proven is listed with its reason, and a reason for a proven one is an error.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.harness import ROOT


def _range(letter: str, first: int, last: int) -> list[str]:
    return [f"{letter}-{number:02d}" for number in range(first, last + 1)]


SCOPE = (
    *_range("R", 1, 17),
    *_range("G", 1, 7),
    *_range("G", 10, 25),
    *_range("G", 30, 44),
    *_range("D", 1, 28),
    *_range("D", 30, 32),
    *_range("X", 1, 5),
    *_range("X", 10, 28),
    *_range("X", 30, 34),
    *("P-03", "P-05", "P-07", "P-08", "P-10", "P-11", "P-12", "P-13", "P-21", "P-22"),
    *_range("T", 1, 5),
    *("T-36", "T-37"),
    *_range("L", 10, 16),
    *_range("L", 30, 41),
    *("M-01", "M-02", "M-03", "M-05", "M-06"),
    "C-01",
    *("Q-11", "Q-12"),
    *("U-04", "U-07", "U-08", "U-09"),
    "B-1",
)

# What a contract in scope asks for beyond what is built; its other half is proven by the tests that cite it.
IN_PART = {
    "D-17": "as settled since: a late walk shortens a chain, and fails a request that has not even its first row",
    "D-04": "the allocators' counters are looked at by a test marked gpu",
    "D-06": "that begin returns while the device is busy is shown by a test marked gpu",
    "D-07": "the profile of a step is `tools.gates pipeline_trace`, on a GPU; here its verdict on profiles",
    "D-08": "as settled since: grammars hear of results in the call that walks, first thing",
    "D-14": "a step without grammars walks and masks nothing; its ids and results go the same way to the host",
    "D-18": "delay kernels are run by tests marked gpu and `tools.gates pipeline_trace`",
    "D-19": "late copies are made by tests marked gpu and `tools.gates pipeline_trace`",
    "D-21": "sources and synchronizing calls are looked at by tests marked gpu and `tools.gates pipeline_trace`;"
    " all ids of a window are sent, and accepted on the host",
    "D-28": "its latency is a figure of `tools.bench traversal`, not a test",
    "G-22": "as settled since: a compile that its probe finished and that hangs is the pair's failure",
    "G-35": "as settled since: a rank is served before anything is serialized, and may compile for itself meanwhile",
    "D-27": "as settled since: log-probabilities of drafted tokens are exact, so nothing is left to refuse",
    "X-15": "10^7 exchanges are run by `tools.gates lockstep`, half a million here",
    "X-17": "10^6 sleeps are run by `tools.gates lockstep`; its 5 ms are a figure, not a test",
    "X-18": "its 0.5 % is a figure of `tools.bench exchange`",
    "X-27": "500 stops and more are run by `tools.gates lockstep`",
    "X-28": "its CPU share and its 1 ms are figures, not a test",
    "X-34": "figures of `tools.bench exchange`, not a test",
    "P-03": "for decode and verify steps; there is no graph of prefills",
    "P-05": "for decode and verify steps",
    "P-07": "for decode and verify steps; that one rank's failure ends both is proven with X-31 and L-38",
    "P-08": "for decode and verify steps; with two GPUs by `tools.gates cuda_ids --graphs`",
    "P-10": "of bodies that are run again; of CUDA graphs by the same tests marked gpu",
    "P-11": "of bodies that are run again; of CUDA graphs by tests marked gpu",
    "P-12": "of bodies that are run again; of CUDA graphs by the same tests marked gpu",
    "P-13": "padding stores nowhere on cuda, which the kernels' tests show; on the cpu to the null row",
    "P-21": "the check of what is free; there is no device here that lacks it",
    "P-22": "of bodies that are run again; of CUDA graphs by the same tests marked gpu, and by"
    " `tools.gates cuda_ids --graphs` with two GPUs",
    "T-03": "under Triton's interpreter; that the device stops, and says which kernel it was, by tests marked gpu",
    "T-05": "there is no path for uniform lengths",
    "U-04": "on a busy device by a test marked gpu",
    "T-36": "under Triton's interpreter; compiled by the same tests marked gpu",
    "T-37": "a scale lies in the row that it belongs to; there is no host tier yet to bring it back from",
    "U-08": "waits by name and values read back, counted on the cpu; on a device by tests marked gpu and"
    " `tools.gates pipeline_trace`",
    "L-30": "its 10 ms are a figure, not a test",
    "L-33": "the stages of VMM and host pools do not exist yet",
    "L-41": "its 2 ms pause is a figure, not a test",
    "C-01": "the keys that exist",
    "B-1": "two batches of a prefill do not overlap yet: proven is that an idle rank vetoes nothing",
}
LEFT_OUT: dict[str, str] = {}

_ID = re.compile(r"\b([A-Z]-\d\d?)\b")
_PASSED, _SKIPPED, _FAILED = "passed", "skipped", "failed"


@dataclass
class Row:
    """One contract: its tests by outcome, and why it or a part of it is left out."""

    contract: str
    passed: int
    skipped: int
    failed: int
    reason: str
    tests: list[str]

    @property
    def ok(self) -> bool:
        """Whether a test shows it, or a reason stands instead."""
        if self.failed:
            return False
        return bool(self.passed) != (self.contract in LEFT_OUT)


def cited() -> dict[str, set[str]]:
    """Return the contract IDs in each test function's source, by `tests/file.py::name`."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                ids = set(_ID.findall(ast.get_source_segment(source, node) or ""))
                if ids:
                    found[f"{path.relative_to(ROOT)}::{node.name}"] = ids
    return found


def run_suite(report: Path) -> None:
    """Run every test that this machine can run and write the JUnit report."""
    command = [sys.executable, "-m", "pytest", "-m", "not gpu and not gpu2", "-q", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)


def outcomes(report: Path) -> dict[str, list[str]]:
    """Return the outcomes of each test function's cases, by `tests/file.py::name`."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        file = case.get("classname", "").replace(".", "/") + ".py"
        kinds = {child.tag for child in case}
        bad = kinds & {"failure", "error"}
        found[f"{file}::{name}"].append(_FAILED if bad else _SKIPPED if "skipped" in kinds else _PASSED)
    return found


def judge(citations: dict[str, set[str]], results: dict[str, list[str]]) -> list[Row]:
    """Put scope, citations and results together."""
    rows = []
    for contract in SCOPE:
        tests = sorted(test for test, ids in citations.items() if contract in ids)
        cases = [outcome for test in tests for outcome in results.get(test, [])]
        rows.append(
            Row(
                contract,
                cases.count(_PASSED),
                cases.count(_SKIPPED),
                cases.count(_FAILED),
                LEFT_OUT.get(contract) or IN_PART.get(contract, ""),
                tests,
            )
        )
    return rows


def main(argv: list[str]) -> int:
    """Print each contract with its tests; 0 when none is without."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates contracts", description="contracts and their tests")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--report", type=Path, help="JUnit report of a run of the whole suite; without it, one is made")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        report = arguments.report or Path(name) / "junit.xml"
        if arguments.report is None:
            run_suite(report)
        rows = judge(cited(), outcomes(report))
    elapsed_s = time.monotonic() - begun
    ok = all(row.ok for row in rows) and set(IN_PART) | set(LEFT_OUT) <= set(SCOPE)
    if arguments.json:
        table = [{**asdict(row), "ok": row.ok} for row in rows]
        print(json.dumps({"ok": ok, "elapsed_s": elapsed_s, "contracts": table}))
    else:
        for row in rows:
            state = "ok" if row.ok else "FAIL"
            found = (
                f"{row.passed} cases of {len(row.tests)} tests passed"
                if row.passed
                else "left out"
                if row.reason
                else "none"
            )
            counts = "".join(f", {n} {what}" for n, what in ((row.skipped, _SKIPPED), (row.failed, _FAILED)) if n)
            print(f"{state:4} {row.contract}  {found}{counts}{'; ' + row.reason if row.reason else ''}")
        print(f"{'ok' if ok else 'FAIL'}: {len(rows)} contracts in scope, {elapsed_s:.0f} s")
    return 0 if ok else 1
