"""Windowed maxima: what a gauge may say of the second before; and the way of a message to a step."""

from __future__ import annotations

import pytest

from dsparkd import metrics
from dsparkd.executor.plan import Plan, PlanRow, StepKind, StepOutput
from dsparkd.messages import SamplingParams, TokenizedRequest
from dsparkd.metrics import Tally
from dsparkd.scheduler.account import Account, Peaks
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Request

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


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def queued(request_id: str, sent_ns: int, delivered_ns: int) -> Request:
    times = dict.fromkeys(("received_ns", "encoded_ns", "tokenized_ns"), 0)
    message = TokenizedRequest(
        request_id=request_id,
        prompt_ids=(3,),
        sampling=SamplingParams(max_tokens=1, seed=1),
        dispatched_ns=sent_ns,
        **times,
    )
    return Request(message, arrival=1, delivered_ns=delivered_ns, max_context_tokens=8, awaits_grammar=False)


@pytest.mark.parametrize(
    ("requests", "by_message", "seconds"),
    [
        ([(100, 205), (150, 206)], True, [0.2]),  # from the first request's sending: its way and the wake included
        ([(10, 20), (150, 205)], True, [0.15]),  # one that waited for its grammar came long before the park
        ([(10, 20)], True, [0.1]),  # a grammar that has come woke the rank
        ([(100, 205)], False, []),  # the peer's work woke this rank
    ],
)
def test_a_wake_is_timed_from_the_sending_of_its_message_to_the_first_step(
    requests: list[tuple[int, int]], by_message: bool, seconds: list[float]
) -> None:
    """X-28: what a client waits for begins in the parent, before the rank is awake; told once a park."""
    clock, tally, queue = Clock(), Tally(), RequestQueue()
    account = Account(0, tally, clock)
    queue.add([queued(f"r{sent}", sent * 1_000_000, delivered * 1_000_000) for sent, delivered in requests])
    rows = tuple(
        PlanRow(f"r{sent}", 1, (3,), 0, (1,), 1, SamplingParams(max_tokens=1, seed=1), (3,), ()) for sent, _ in requests
    )
    account.parked()
    clock.now_ns = 200_000_000
    account.woken(by_message)
    account.begin_tick()
    for phase in ("receive", "plan", "agree"):
        account.lap(phase)
    clock.now_ns = 300_000_000
    for _ in range(2):
        account.launching(Plan(StepKind.PREFILL, rows, ()), queue)

    told = tally.frame()[1].get("dsparkd_unpark_seconds\0" + "0", (0.0,))
    assert (told[-1], sum(told[:-1])) == pytest.approx((sum(seconds), len(seconds)))


def test_d23_times_of_masks_and_those_that_were_dropped_are_counted_by_phase() -> None:
    """D-23: also in a step without masks, which may close an earlier step's times of the device."""
    tally = Tally()
    account = Account(0, tally, Clock())
    plan = Plan(StepKind.DECODE, ())
    account.masked(plan, StepOutput((), 3, (("traverse", 0.5), ("finish", 0.25), ("traverse", 1.0)), 0))
    account.masked(plan, StepOutput((), 0, (("gpu_gap", 0.125),), 2))
    counts, histograms = tally.frame()[:2]
    sums = {key.split("\0")[-1]: told[-1] for key, told in histograms.items() if "mask_seconds" in key}
    assert sums == {"traverse": 1.5, "finish": 0.25, "gpu_gap": 0.125}
    assert counts["dsparkd_mask_steps_total\0" + "0\0masked"] == 1
    assert counts["dsparkd_mask_samples_dropped_total\0" + "0"] == 2
