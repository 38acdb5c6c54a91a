"""The release gate: whose result counts."""

import json
import subprocess
from pathlib import Path

import pytest

from tools.gates import release
from tools.gates.release import State, git_state, judge

COMMIT = "a" * 40
GOOD: dict[str, object] = {"gate": "oracle", "commit": COMMIT, "clean": True, "exit_code": 0, "result": {"ok": True}}


def write(directory: Path, record: dict[str, object]) -> None:
    (directory / "oracle.json").write_text(json.dumps(record), encoding="utf-8")


def test_a_passing_result_of_this_commit_counts(tmp_path: Path) -> None:
    """Q-11: the only thing that does."""
    write(tmp_path, GOOD)

    assert judge("oracle", tmp_path, COMMIT).ok


@pytest.mark.parametrize(
    "change",
    [{"commit": "b" * 40}, {"clean": False}, {"exit_code": 1}, {"gate": "stop"}, {"commit": None}, {"clean": None}],
    ids=str,
)
def test_a_result_of_another_commit_tree_or_gate_does_not_count(tmp_path: Path, change: dict[str, object]) -> None:
    """Q-11: the gates are rerun on the exact commit that is released; anything else counts as absent."""
    write(tmp_path, {**GOOD, **change})

    assert not judge("oracle", tmp_path, COMMIT).ok


def test_a_missing_or_broken_file_is_absent(tmp_path: Path) -> None:
    """Q-11: no result is not a passed one."""
    assert judge("oracle", tmp_path, COMMIT).why == "absent"
    (tmp_path / "oracle.json").write_text("{", encoding="utf-8")
    assert not judge("oracle", tmp_path, COMMIT).ok


def test_the_state_of_a_tree_sees_changed_and_new_files(tmp_path: Path) -> None:
    """Q-11: a result made with an uncommitted fix proves nothing about the commit."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    assert git_state(tmp_path).clean
    (tmp_path / "new").write_text("1")
    assert not git_state(tmp_path).clean
    (tmp_path / "new").unlink()
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert (len(state.commit), state.clean) == (40, False)


def test_a_gate_without_results_fails_the_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q-11: the script compares every gate that exists, so a new gate cannot be forgotten."""
    monkeypatch.setattr(release, "git_state", lambda: State("abc", clean=True))
    assert release.main(["--results", str(tmp_path), "--json"]) == 1

    shown = json.loads(capsys.readouterr().out)
    assert not shown["ok"]
    assert {"contracts", "oracle", "stop"} <= {verdict["gate"] for verdict in shown["gates"]}
    assert {verdict["why"] for verdict in shown["gates"]} == {"absent"}
