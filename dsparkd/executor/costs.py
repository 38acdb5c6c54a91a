"""Cost table: what a decode step takes on the machine in use, by rows and verified tokens; read at start, then fixed.

`python -m tools.bench steps --out FILE` measures it, `dspark.cost_table` names the file. Torch-free.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dsparkd.errors import ConfigError

KEY = "dspark.cost_table"
REMEDY = "measure it on this machine: python -m tools.bench steps --out FILE"
VERSION = 1


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a table comes from. device: "cpu" or "cuda". measured: date and time in UTC."""

    machine: str
    device: str
    dtype: str
    checkpoint: str
    measured: str


class CostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step on one rank while its peer does the same.

    rows: sequences of a step, increasing from 1. widths: tokens that are verified of each, increasing from 1 to
    gamma + 1. verify_s[i][j]: the target's part with rows[i] windows of widths[j] tokens; draft_s[i]: drafting a block
    for each. No part shrinks as rows or widths grow.
    """

    version: int
    origin: Origin
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    verify_s: tuple[tuple[float, ...], ...]
    draft_s: tuple[float, ...]

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        """The target's part of a step that verifies num_tokens in all, num_rows or more; linear between points."""
        place, share = _locate(self.rows, num_rows)
        column, part = _locate(self.widths, num_tokens / num_rows)
        low, high = (_between(self.verify_s[i], column, part) for i in (place, place + 1))
        return low + (high - low) * share

    def draft_seconds(self, num_rows: int) -> float:
        """The drafter's part of a step, whatever of its drafts is verified."""
        return _between(self.draft_s, *_locate(self.rows, num_rows))

    def counts(self, num_rows: int, most: int) -> Sequence[int]:
        """Numbers of drafts that a step may verify."""
        return range(1, most + 1)

    def plain_seconds(self, num_rows: int) -> float:
        """A step that drafts nothing."""
        return self.seconds(num_rows, num_rows)

    def drafted_seconds(self, num_rows: int, num_drafts: int) -> float:
        """A step that drafts for each row, and verifies so many drafts in all."""
        return self.seconds(num_rows, num_rows + num_drafts) + self.draft_seconds(num_rows)


def load_cost_table(path: Path, gamma: int, max_rows: int, device: str, dtype: str) -> CostTable:
    """Read a table that fits the engine. Raises ConfigError that names what does not."""

    def refuse(reason: str) -> ConfigError:
        return ConfigError(KEY, str(path), f"{reason}; {REMEDY}")

    try:
        table = msgspec.json.decode(path.read_bytes(), type=CostTable)
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise refuse(f"is no cost table ({error})") from error
    reason = _flaw(table)
    if reason is not None:
        raise refuse(reason)
    if table.widths[-1] != gamma + 1:
        raise refuse(f"ends at {table.widths[-1]} tokens a row, and gamma + 1 is {gamma + 1}")
    if table.rows[-1] < max_rows:
        raise refuse(f"ends at {table.rows[-1]} rows, and scheduler.max_rows is {max_rows}")
    if (table.origin.device, table.origin.dtype) != (device, dtype):
        measured = f"{table.origin.device}, {table.origin.dtype}"
        raise refuse(f"was measured on {measured}, and the engine runs on {device}, {dtype}")
    return table


def _flaw(table: CostTable) -> str | None:
    """What makes a table useless by itself."""
    if table.version != VERSION:
        return f"has version {table.version}, and this program reads version {VERSION}"
    for name, axis in (("rows", table.rows), ("widths", table.widths)):
        if len(axis) < 2 or axis[0] != 1 or any(a >= b for a, b in itertools.pairwise(axis)):
            return f"has {name} {list(axis)}, not two or more numbers that increase from 1"
    shape = [len(line) for line in table.verify_s]
    if shape != [len(table.widths)] * len(table.rows) or len(table.draft_s) != len(table.rows):
        return f"has no figure for each of {len(table.rows)} rows and {len(table.widths)} widths"
    columns = list(zip(*table.verify_s, strict=True))
    for line in (*table.verify_s, *columns, table.draft_s):
        if not all(math.isfinite(value) and value > 0 for value in line):
            return f"has figures that are not positive seconds: {list(line)}"
        if any(a > b for a, b in itertools.pairwise(line)):
            return f"has times that shrink as the work grows: {list(line)}"
    return None


def _locate(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of an axis that holds a value, and how far into it, 0..1; outside: its nearest end."""
    place = min(max(bisect.bisect_right(axis, value) - 1, 0), len(axis) - 2)
    share = (value - axis[place]) / (axis[place + 1] - axis[place])
    return place, min(max(share, 0.0), 1.0)


def _between(values: Sequence[float], place: int, share: float) -> float:
    return values[place] + (values[place + 1] - values[place]) * share
