"""A part's result file and exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import gpu_session
from tools.gpu_session import Step


def steps(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    """Let part nano run these Python scripts."""
    parts = {"nano": tuple(Step(f"s{i}", (sys.executable, "-c", text), 20) for i, text in enumerate(scripts))}
    monkeypatch.setattr(gpu_session, "PARTS", parts)


def test_the_result_file_names_commit_hardware_date_and_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure without its commit and machine is worth nothing later."""
    steps(monkeypatch, "print('noise'); print('3 passed')")

    code = gpu_session.main(["--part", "nano", "--out", str(tmp_path / "out"), "--commit", "abc"])

    report = json.loads((tmp_path / "out" / "nano.json").read_text())
    assert code == 0
    assert (report["commit"], report["ok"]) == ("abc", True)
    assert report["date"].endswith("Z")
    assert report["hardware"]["cpus"] >= 1
    assert report["steps"][0]["last_line"] == "3 passed"
    assert (tmp_path / "out" / "s0.txt").read_text() == "noise\n3 passed\n"
    assert capsys.readouterr().out.splitlines()[-1] == "ok"


def test_a_step_that_fails_fails_the_part_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time on the host is short: one failure must not hide the rest."""
    steps(monkeypatch, "raise SystemExit(3)", "print('ran')")

    code = gpu_session.main(["--part", "nano", "--out", str(tmp_path), "--commit", "abc", "--json"])

    report = json.loads((tmp_path / "nano.json").read_text())
    assert code == 1
    assert [step["exit_code"] for step in report["steps"]] == [3, 0]


def test_a_step_past_its_limit_is_ended_and_has_no_exit_code(tmp_path: Path) -> None:
    """A hang must not take the session along."""
    step = Step("hang", (sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)"), 2)

    result = gpu_session.run_step(step, tmp_path)

    assert result.exit_code is None
    assert result.seconds < 50


def test_a_step_can_write_into_the_result_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps run from the project's root: a relative --out must still be the caller's."""
    monkeypatch.chdir(tmp_path)
    script = "import sys; open(sys.argv[1], 'w').write('kept')"
    parts = {"nano": (Step("s0", (sys.executable, "-c", script, "{out}/extra"), 20),)}
    monkeypatch.setattr(gpu_session, "PARTS", parts)

    assert gpu_session.main(["--part", "nano", "--out", "results", "--commit", "abc"]) == 0

    assert (tmp_path / "results" / "extra").read_text() == "kept"
