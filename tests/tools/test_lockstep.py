"""The lock-step gate and the exchange bench in small, and that the gate finds ranks that are out of step."""

import json
import subprocess
import sys

import pytest

from tools.bench.exchange import BOUNDS, SERIES, Figures, judge
from tools.harness import ROOT

RUN = """
import json, random, sys
from dataclasses import asdict
from tools import lockstep_rank
from tools.gates import lockstep
{change}
lines = [lockstep.Line("random"), lockstep.Line("wakes")]
lockstep.HANG_S = 10.0
lockstep.random_work(lines[0], random.Random(7), {ticks})
if not lines[0].faults:
    lockstep.wakes(lines[1], random.Random(7), 60)
print(json.dumps([asdict(line) for line in lines]))
"""
ALONE = """
act = lockstep_rank.RecordingLoop.act
def leave_alone(self, *offer):
    agreement = act(self, *offer)
    return agreement._replace(stop=self._stopping)
lockstep_rank.RecordingLoop.act = leave_alone
"""
WRONG = """
launch = lockstep_rank.Device.launch
def forget(self, plan, counts):
    output = launch(self, plan, counts)()
    rows = tuple(type(row)(tuple(28 - token for token in row.token_ids)) for row in output.rows)
    return lambda: type(output)(rows)
lockstep_rank.Device.launch = forget
"""


def play(change: str, ticks: int) -> list[dict[str, object]]:
    code = RUN.format(change=change, ticks=ticks)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_random_work_and_wakes_keep_two_processes_in_step() -> None:
    """X-13, X-27, X-28: real loops over shared memory, ended by stops that come apart: the same exchanges on both."""
    work, wakes = play("", 1_500)
    assert (work["faults"], wakes["faults"]) == ([], [])
    assert work["counts"]["ticks"] >= 1_500
    assert work["counts"]["stops"] >= 2
    assert wakes["counts"]["wakes"] == 60
    assert wakes["counts"]["parks"] > 10


@pytest.mark.parametrize(("change", "fault"), [(ALONE, "exit codes"), (WRONG, "a wrong token")])
def test_the_gate_finds_a_rank_that_leaves_alone_and_a_wrong_token(change: str, fault: str) -> None:
    """X-27: a gate that cannot fail proves nothing."""
    work, _ = play(change, 3_000)
    assert any(fault in text for text in work["faults"])


def test_the_bench_measures_every_series() -> None:
    """X-34: the figures are there, with counts; whether they hold is the bench's own exit code, never a test's."""
    command = [sys.executable, "-m", "tools.bench", "exchange", "--count", "1000", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    for kind in ("native", "native, spin 0"):
        for series in (*SERIES, "C: native", "C: skew", "C: after last"):
            figures = told["figures_us"][kind][series]
            assert 0 <= figures["p50"] <= figures["p99"] <= figures["max"]
        assert told["figures_us"][kind]["counts"]["exchanges"] == 1_000
    assert told["figures_us"]["gloo"]["python"]["p50"] > 0
    assert told["ok"] == all(verdict["verdict"] != "over" for verdict in told["bounds"]) == (done.returncode == 0)


def at_the_bounds(floor_us: float) -> Figures:
    """Figures that meet each bound exactly, on a machine with this floor."""
    figures: Figures = {kind: {} for kind, *_ in BOUNDS}
    for kind, series, percentile, bound, own in BOUNDS:
        figures[kind].setdefault(series, {})[percentile] = bound
        if own:
            figures[kind][own] = {percentile: floor_us}
    return figures


def test_a_figure_over_its_bound_fails_the_bench() -> None:
    """X-34: at the bound, not near it."""
    figures = at_the_bounds(1.0)
    assert {verdict["verdict"] for verdict in judge(figures)} == {"ok"}
    figures["native"]["C: native"]["p99"] += 0.01
    assert [verdict["verdict"] for verdict in judge(figures)] == ["ok", "over", "ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("us", "floor_us", "verdict"),
    [(6.0, 20.0, "ok"), (6.1, 20.0, "floor"), (25.6, 20.0, "floor"), (25.7, 20.0, "over"), (6.1, 1.0, "over")],
)
def test_a_bound_below_the_machines_floor_is_told_as_that_and_only_what_exceeds_the_floor_fails(
    us: float, floor_us: float, verdict: str
) -> None:
    """X-34: the floor is measured in the same run; it excuses a sleeper's exchange alone, and no more than itself."""
    figures = at_the_bounds(floor_us)
    figures["native, spin 0"]["C: native"]["p50"] = us
    assert [each["verdict"] for each in judge(figures)] == ["ok", "ok", "ok", "ok", verdict]
