"""The contracts gate: what counts as proof."""

from pathlib import Path

import pytest

from tools.gates import contracts
from tools.gates.contracts import LEFT_OUT, SCOPE, Row, cited, judge, outcomes

REPORT = """<testsuites><testsuite>
<testcase classname="tests.kv.test_radix" name="test_a[1-x]"/>
<testcase classname="tests.kv.test_radix" name="test_a[2]"><failure>boom</failure></testcase>
<testcase classname="tests.test_log" name="test_b"/>
<testcase classname="tests.test_log" name="test_c"><skipped/></testcase>
<testcase classname="tests.test_log" name="test_d"/>
<testcase classname="tests.test_log" name="test_d"><error>teardown</error></testcase>
</testsuite></testsuites>"""


def row(contract: str, rows: list[Row]) -> Row:
    return next(one for one in rows if one.contract == contract)


def test_outcomes_are_collected_over_parameters(tmp_path: Path) -> None:
    """One failing case of a test is a failure of the test."""
    report = tmp_path / "junit.xml"
    report.write_text(REPORT, encoding="utf-8")

    assert outcomes(report) == {
        "tests/kv/test_radix.py::test_a": ["passed", "failed"],
        "tests/test_log.py::test_b": ["passed"],
        "tests/test_log.py::test_c": ["skipped"],
        "tests/test_log.py::test_d": ["passed", "failed"],
    }


@pytest.mark.parametrize(
    ("results", "ok"),
    [({"t": ["passed"]}, True), ({"t": ["skipped"]}, False), ({"t": ["passed", "failed"]}, False), ({}, False)],
)
def test_only_tests_that_passed_prove_a_contract(results: dict[str, list[str]], ok: bool) -> None:
    """A citation that was skipped, failed or never run is none."""
    assert row("R-04", judge({"t": {"R-04"}}, results)).ok == ok


def test_a_contract_that_no_test_cites_fails_the_gate() -> None:
    """decisions 26: fails on none."""
    assert not row("R-05", judge({"t": {"R-04"}}, {"t": ["passed"]})).ok


def test_a_left_out_contract_needs_its_reason_and_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason that outlives its cause would hide a regression."""
    monkeypatch.setitem(LEFT_OUT, "R-05", "later")

    assert row("R-05", judge({}, {})).ok
    assert not row("R-05", judge({"t": {"R-05"}}, {"t": ["passed"]})).ok


def test_every_contract_in_scope_is_cited_by_a_test_function() -> None:
    """The gate itself needs a run of the suite; this much is known without one."""
    ids = set().union(*cited().values())

    assert [contract for contract in SCOPE if contract not in ids | set(LEFT_OUT)] == []
    assert set(contracts.IN_PART) <= set(SCOPE)
