"""The gate store_kill: it passes on a sound store and notices an unsound one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsparkd.grammar.store import LocalDisk
from tools.gates import store_kill


def test_kills_at_every_step_leave_the_store_whole(tmp_path: Path) -> None:
    """G-34, G-40, G-41: ten kills, at each of the steps and at random instants; the gate itself does 200."""
    report = store_kill.run(10, 1, tmp_path / "store")

    assert report.kills == 10
    assert set(report.steps) == {*store_kill.STEPS, "random"}
    assert report.ok, report


def test_a_store_that_writes_in_place_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate can fail: without the temporary file a kill leaves half an entry."""

    def write_in_place(self: LocalDisk, path: Path, raw: bytes) -> None:
        target = path.with_name(path.name.split(".")[1] + ".entry")
        target.touch(mode=0o600)
        target.write_bytes(raw[: len(raw) // 2])
        path.touch(mode=0o600)
        path.write_bytes(raw)

    monkeypatch.setattr(LocalDisk, "write", write_in_place)
    report = store_kill.run(6, 1, tmp_path / "store")

    assert report.torn_entries + report.unserved > 0
    assert not report.ok
