"""How the benches of speculation measure: prompts, pairs, cost tables, and a forward pass that hides a walk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from dsparkd.executor.costs import Origin, load_cost_table
from tools.bench import dspark, grammar, steps, traversal
from tools.bench.dspark import Run
from tools.harness import ensure_checkpoint

ORIGIN = Origin(machine="test", device="cpu", dtype="float32", checkpoint="nano", measured="now")


def test_a_measured_table_is_what_the_server_reads(tmp_path: Path) -> None:
    """The strict reader and the tool must agree on every field and on times that never shrink."""
    torch.set_num_threads(1)
    bench = steps.Bench(ensure_checkpoint(), torch.device("cpu"), "float32", 2, has_graphs=False)
    path = tmp_path / "costs.json"

    table = steps.measure(bench, [1, 2], range(1, bench.gamma + 2), 1, ORIGIN)
    path.write_bytes(msgspec.json.encode(table))

    assert load_cost_table(path, bench.gamma, 2, "cpu", "float32") == table


def test_a_figure_below_one_for_less_work_takes_its_place() -> None:
    """Noise must not make the planner believe that more is cheaper."""
    assert steps.growing_both_ways([[1.0, 3.0, 2.0], [2.0, 1.0, 4.0]]) == [[1.0, 3.0, 3.0], [2.0, 3.0, 4.0]]
    assert steps.powers_to(1) == [1]
    assert steps.powers_to(24) == [1, 2, 4, 8, 16, 24]
    assert steps.powers_to(32) == [1, 2, 4, 8, 16, 32]


def run(mode: str, number: int, tokens_per_s: float) -> Run:
    """A run of which only speed matters."""
    return Run(mode, 8, number, 100, tokens_per_s, 2 * tokens_per_s, 1.0, 0.01, 0.02)


def test_ratios_pair_runs_of_one_round() -> None:
    """A slow minute of the machine meets both halves of a pair."""
    runs = [
        run("off", 0, 10),
        run("all", 0, 20),
        run("all", 1, 5),
        run("off", 1, 1),
        run("off", 2, 4),
        run("all", 2, 4),
    ]

    assert dspark.ratios(runs, "all", 8) == (2.0, 2.0)


def test_prompts_are_of_every_task_and_never_twice() -> None:
    """A prompt that a cache knows would be answered faster by whoever comes second."""
    checkpoint = ensure_checkpoint()
    first, second = (dspark.prompts_of(checkpoint, start, 12) for start in (0, 12))

    assert len({tuple(prompt) for prompt in first + second}) == 24
    assert dspark.num_prompts(32) >= 64


def test_the_lock_of_stock_calls_can_be_kept_and_given_back() -> None:
    """Both columns of the table would be one otherwise."""
    released = [
        method
        for method in vars(traversal.GrammarMatcher)["__tvm_ffi_type_info__"].methods
        if method.name == "traverse_draft_tree"
    ]
    assert released

    for yes in (False, True):
        traversal.give_up_lock_in_walks(yes)
        assert [bool(method.func.release_gil) for method in released] == [yes] * len(released)


@pytest.mark.parametrize("count", [1, 3])
def test_a_repeating_thread_works_until_its_block_ends(count: int) -> None:
    """A thread that ended early would not be beside anything."""
    seen: list[int] = []

    with grammar.repeating(seen.append):
        while len(seen) < count:
            pass

    assert seen[:count] == list(range(count))
