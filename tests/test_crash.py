"""Crash reports: whole files in a directory that the start has proven, and no failure on top of a failure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsparkd import crash
from dsparkd.errors import ConfigError


def test_the_directory_is_made_or_the_start_fails(tmp_path: Path) -> None:
    """L-40: nested directories are made; what cannot be a directory is named with its key."""
    crash.prepare_directory(str(tmp_path / "a" / "b"))
    crash.prepare_directory(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"engine\.crash_dir"):
            crash.prepare_directory(str(path))


def test_a_directory_without_the_right_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found at the start; root, which tests may run as, may write everywhere, so access is asked by a stand-in."""
    monkeypatch.setattr(crash.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written"):
        crash.prepare_directory(str(tmp_path))


async def test_only_the_latest_reports_are_kept(tmp_path: Path) -> None:
    """A server that fails at every start must not fill the disk; files of others stay."""
    others = [tmp_path / f"{place}-note-{number}.txt" for place in ("aa", "zz") for number in range(crash.NUM_REPORTS)]
    for other in others:
        other.write_text("mine")
    paths = [await crash.write(tmp_path, {"number": number}) for number in range(crash.NUM_REPORTS + 4)]
    kept = [tmp_path / name for name in sorted(os.listdir(tmp_path)) if name.startswith("crash-")]
    assert [str(path) for path in kept] == paths[-crash.NUM_REPORTS :]
    assert json.loads(kept[-1].read_text()) == {"number": crash.NUM_REPORTS + 3}
    assert all(other.exists() for other in others)


async def test_half_a_report_is_never_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: None, one line in the log, and no file that looks like a report."""

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crash.aiofiles.os, "replace", full)
    assert await crash.write(tmp_path, {"a": 1}) is None
    assert os.listdir(tmp_path) == []


async def test_a_directory_that_has_gone_is_no_second_failure(tmp_path: Path) -> None:
    """The failure that is being reported matters, not this one."""
    assert await crash.write(tmp_path / "gone", {"a": 1}) is None
