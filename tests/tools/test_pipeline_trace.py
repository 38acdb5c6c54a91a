"""What the gate sees in a profile, and that a delay changes nothing where it can do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.gates import pipeline_trace
from tools.gates.pipeline_trace import PARTS, Lab, compare, judge, named_parts, synchronizing_lines
from tools.harness import ensure_checkpoint

TICK, WORKER = 11, 12
# When each part of the step runs, in microseconds from its start.
TIMES = {
    "draft": (0, 90),
    "begin": (100, 20),
    "launch": (200, 300),
    "finish": (600, 200),
    "barrier": (650, 20),
    "walk": (700, 80),
    "choose": (850, 50),
    "emit": (910, 20),
    "consume": (940, 50),
}
Make = Callable[..., dict[str, Any]]


def span(name: str, at: float, length: float, tid: int = TICK, cat: str = "user_annotation") -> dict[str, Any]:
    return {"name": name, "cat": cat, "ts": at, "dur": length, "tid": tid}


def call(name: str, at: float, tid: int = TICK, correlation: int = 1) -> dict[str, Any]:
    return span(name, at, 1, tid, "cuda_runtime") | {"args": {"correlation": correlation}}


def profile(*more: dict[str, Any], times: dict[str, tuple[int, int]] = TIMES) -> list[dict[str, Any]]:
    """A step as it must be, and more."""
    events = [span("step", 0, 1000), call("cudaLaunchKernel", 250), call("cudaEventSynchronize", 610)]
    events += [span(part, *times[part]) for part in PARTS]
    return [*events, *more]


def test_d07_d21_a_step_that_waits_for_two_events_alone_is_right() -> None:
    """D-07, D-21: the worker may wait as it likes; kernels that run during the walk are what hides it."""
    verdict = judge(
        profile(call("cudaEventSynchronize", 945, WORKER), span("k", 690, 50, 7, "kernel"), call("cudaMemcpyAsync", 5)),
        1,
    )
    assert verdict.faults == []
    assert verdict.figures["event_waits_a_step"] == 1
    assert verdict.figures["device_busy_beside_walk_us"] == 40
    assert verdict.figures["walk_us"] == 80


@pytest.mark.parametrize("name", pipeline_trace.SYNCHRONIZING)
@pytest.mark.parametrize(
    ("at", "part"), [(50, "draft"), (300, "launch"), (555, "step"), (720, "walk"), (880, "choose")]
)
def test_d07_d21_any_wait_for_a_stream_is_a_fault(name: str, at: int, part: str) -> None:
    """D-07, D-21: wherever in the step the tick thread makes it; another thread's is none."""
    assert judge(profile(call(name, at)), 1).faults == [f"{name} in {part}"]
    assert judge(profile(call(name, at, WORKER)), 1).faults == []
    assert judge(profile(call(f"{name}_v3020", at)), 1).faults == [f"{name} in {part}"]


def test_d21_an_event_is_waited_for_in_finish_alone() -> None:
    """D-21: the results are waited for on the results thread."""
    assert judge(profile(call("cudaEventSynchronize", 950)), 1).faults == ["cudaEventSynchronize in consume"]
    assert judge(profile(call("cudaEventSynchronize", 660)), 1).faults == []


def test_d07_a_copy_of_pageable_memory_is_a_fault() -> None:
    """D-07: the host waits inside of it, whatever the call is named."""
    copy = span("Memcpy HtoD (Pageable -> Device)", 400, 2, 7, "gpu_memcpy") | {"args": {"correlation": 5}}
    pinned = span("Memcpy HtoD (Pinned -> Device)", 400, 2, 7, "gpu_memcpy") | {"args": {"correlation": 6}}
    made = (call("cudaMemcpyAsync", 240, correlation=5), call("cudaMemcpyAsync", 241, correlation=6))
    assert judge(profile(copy, pinned, *made), 1).faults == ["Memcpy HtoD (Pageable -> Device) in launch"]


@pytest.mark.parametrize(
    ("part", "at", "fault"),
    [("walk", 300, "out of order"), ("launch", 640, "out of order"), ("barrier", 550, "not in finish")],
)
def test_d07_parts_out_of_place_are_a_fault(part: str, at: int, fault: str) -> None:
    """D-07: the order that lets the device verify while the host walks."""
    faults = judge(profile(times=TIMES | {part: (at, TIMES[part][1])}), 1).faults
    assert any(fault in each for each in faults), faults


def test_a_profile_without_steps_or_without_cuda_shows_nothing() -> None:
    """A gate that saw nothing must not be green."""
    assert judge(profile(), 2).faults
    assert judge([event for event in profile() if event["cat"] != "cuda_runtime"], 1).faults
    others = [event | {"tid": WORKER} if event["cat"] == "cuda_runtime" else event for event in profile()]
    assert judge(others, 1).faults
    assert judge(profile(times={part: (at, 10_000) for part, (at, _) in TIMES.items()}), 1).faults


def test_without_a_gpu_the_gate_is_not_green(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It proves something about devices, so it ends with 2 where there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pipeline_trace.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().out


def test_the_lab_steps_through_every_part_and_every_delay() -> None:
    """What it does on a device, on the cpu: each part is called once a step, and each delay in each step."""
    torch.set_num_threads(1)
    lab = Lab(ensure_checkpoint(), torch.device("cpu"), "float32", 4)
    texts = lab.texts()
    with named_parts(lab):
        for _ in range(pipeline_trace.WARM_UP + pipeline_trace.TRACED):
            lab.step(texts, drafts=True)
    assert not any(text.has_ended for text in texts if text.matcher is not None)
    slept: list[int] = []
    runs = compare(lab, 2, lambda: slept.append(1))
    assert [run.ok for run in runs] == [True] * len(runs), runs
    assert [run.delay for run in runs] == ["none", "none again", "ids", "masks", "filter", "results"]
    assert len(slept) == 4 * 3  # the prefill and two steps
    lab.executor.close()


def test_the_lab_knows_every_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the detector is to see is run, each kind twice; on the cpu nothing is found."""
    torch.set_num_threads(1)
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    lab = Lab(ensure_checkpoint(), torch.device("cpu"), "float32", 2)
    assert not synchronizing_lines(lab)
    assert modes == ["warn", "default"] * 5
    lab.executor.close()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_d07_d21_no_line_of_any_step_synchronizes_on_a_device() -> None:
    """D-07, D-21, U-08: prefill, plain, drafted, compact and rejected steps, by torch's own detector."""
    lab = Lab(ensure_checkpoint(), torch.device("cuda", 0), "bfloat16", 8)
    assert synchronizing_lines(lab) == {}
    lab.executor.close()
