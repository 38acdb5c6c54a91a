"""The directory of crash reports: made at the start, written to by the parent, and kept from filling the disk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import aiofiles
import aiofiles.os
import msgspec

from dsparkd import log as log_module
from dsparkd.errors import ConfigError

log = log_module.get()

NUM_REPORTS = 16  # a server that fails again and again must not fill the disk
_HALF = ".part"


def prepare_directory(path: str) -> None:
    """Make engine.crash_dir where it is missing. Raises ConfigError when reports could not be written there."""
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("engine.crash_dir", path, f"cannot be made ({error.strerror}); name another one") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError("engine.crash_dir", path, "cannot be written to; give this user the right, or name another")


async def write(directory: Path, report: Mapping[str, object]) -> str | None:
    """Write a report and return its path; None, with a line in the log, when that is impossible.

    A name without `.part` holds a whole report, whatever ends this process. Only the latest reports are kept.
    """
    path = directory / f"crash-{time.time_ns()}.json"
    half = path.with_suffix(_HALF)
    try:
        async with aiofiles.open(half, "wb") as file:
            await file.write(msgspec.json.encode(report))
        await aiofiles.os.replace(half, path)
        reports = [name for name in await aiofiles.os.listdir(directory) if name.startswith("crash-")]
        for old in sorted(reports)[:-NUM_REPORTS]:
            await aiofiles.os.remove(directory / old)
    except OSError as error:
        with contextlib.suppress(OSError):  # also where the directory has become something else
            half.unlink()
        log.warning("crash_report_failed", directory=str(directory), error=str(error))
        return None
    log.info("crash_report_written", path=str(path))
    return str(path)
