"""The bench of the policy: its clock, its table of times, and that it runs the planners that serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import policy
from tools.bench.policy import Load, Run, StepTimes

TIMES = StepTimes(((1.0, 64.0), (10.0, 30.0)), ((1024.0, 2048.0), (100.0, 200.0)), launch_ms=80.0, host_ms=0.0)


def run(concurrency: int, requests: int, prompt: int, outputs: int, arrival_ms: float = 0.0) -> dict[str, object]:
    """One load with the table above."""
    return Run(Load(concurrency, requests, prompt, outputs, 2048, 4, arrival_ms), TIMES).go()


def test_one_stream_takes_its_steps_one_after_the_other() -> None:
    """2 ms to the rank, one chunk, and a decode step for each further token: 107 ms a request."""
    row = run(1, 3, 1024, 6)
    assert (row["ttft_p50_s"], row["token_ms"]) == (0.102, 10.0)
    assert row["steps"] == {"prefill": 3, "decode": 15}
    assert row["output_tokens_per_s"] == round(18 / (3 * 152) * 1e3, 1)


def test_prompts_of_both_ranks_are_computed_two_a_step_in_order() -> None:
    """Eight of 1,024 tokens: four a rank, two a step of 2,048, all first tokens behind the second."""
    row = run(8, 8, 1024, 1)
    assert row["steps"] == {"prefill": 2}
    assert (row["ttft_p50_s"], row["ttft_p99_s"]) == (0.302, 0.402)


def test_a_small_chunk_takes_its_launch_and_streams_get_their_turns() -> None:
    """Below what the host needs the device's time does not count; behind four steps with chunks comes one without."""
    assert run(1, 1, 300, 1)["ttft_p99_s"] == 0.082
    steps = run(32, 32, 2048, 9)["steps"]
    assert isinstance(steps, dict)
    assert steps["prefill"] + steps["mixed"] == 16
    assert steps["decode"] >= 3


def test_times_are_read_from_the_file_of_the_geometry_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain decode steps at the shortest context, and prefills."""
    steps = [(1, 1024, False, 10.0), (64, 1024, False, 30.0), (64, 8192, False, 99.0), (64, 1024, True, 99.0)]
    rows: list[dict[str, object]] = [
        {"kind": "decode", "rows": number, "context": context, "drafts": drafts, "ms": ms}
        for number, context, drafts, ms in steps
    ]
    rows += [{"kind": "prefill", "tokens": tokens, "ms": ms} for tokens, ms in ((2048, 200.0), (1024, 100.0))]
    path = tmp_path / "geometry.json"
    path.write_text(json.dumps({"rows": rows}))
    assert StepTimes.read(path, 80.0, 0.0) == TIMES
    arguments = ["--results", str(path), "--concurrency", "1", "--output-tokens", "2", "--host-ms", "0"]
    assert policy.main([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["ttft_p50_s"] == 0.102
    path.write_text(json.dumps({"rows": rows[:1]}))
    with pytest.raises(ValueError, match="1 decode steps and 0 prefills"):
        StepTimes.read(path, 80.0, 0.0)
