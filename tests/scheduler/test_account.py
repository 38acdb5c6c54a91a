"""Windowed maxima: what a gauge may say of the second before."""

from __future__ import annotations

from dsparkd import metrics
from dsparkd.metrics import Tally
from dsparkd.scheduler.account import Peaks

SECOND = 1_000_000_000


def shown(peaks: Peaks, at_ns: int) -> dict[str, float]:
    tally = Tally()
    peaks.show(tally, at_ns)
    return {key.split("\0")[-1]: value for key, value in tally.frame()[0].items()}


def note(peaks: Peaks, phase: str, value_ns: int, at_ns: int) -> None:
    peaks.note(metrics.SCHEDULER_PHASE_MAX, "0", phase, value_ns=value_ns, at_ns=at_ns)


def test_m03_a_maximum_covers_the_latest_finished_second() -> None:
    """M-03: the second that still runs is not shown, the one before is, whole."""
    peaks = Peaks()
    for value, at in ((3, 5.0), (9, 5.4), (4, 5.9)):
        note(peaks, "plan", value * SECOND, int(at * SECOND))
    assert shown(peaks, int(5.95 * SECOND)) == {"plan": 0}
    note(peaks, "plan", 20 * SECOND, int(6.1 * SECOND))
    assert shown(peaks, int(6.2 * SECOND)) == {"plan": 9}
    assert shown(peaks, int(7.0 * SECOND)) == {"plan": 20}


def test_m03_a_second_without_events_reads_0() -> None:
    """M-03: also when seconds passed without anybody looking, and for one series while another goes on."""
    peaks = Peaks()
    note(peaks, "plan", SECOND, 5 * SECOND)
    note(peaks, "agree", SECOND, 5 * SECOND)
    note(peaks, "agree", 2 * SECOND, 6 * SECOND)
    assert shown(peaks, 7 * SECOND) == {"plan": 0, "agree": 2}
    assert shown(peaks, 8 * SECOND) == {"plan": 0, "agree": 0}
    note(peaks, "plan", SECOND, 9 * SECOND)
    assert shown(peaks, 12 * SECOND) == {"plan": 0, "agree": 0}
