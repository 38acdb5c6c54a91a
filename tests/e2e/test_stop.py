"""The real server's end under load, with what it must not leave behind; `tools.gates stop` does more of the same."""

import signal

import pytest

from tools.gates import stop
from tools.gates.stop import Line, Scenario
from tools.harness import Tables, ensure_checkpoint, free_port

STREAMS = 8


@pytest.fixture(scope="module", autouse=True)
def checkpoint() -> None:
    ensure_checkpoint()


def play(line: Line, scenario: Scenario, overrides: Tables | None = None) -> None:
    stop.run_line(line, scenario, overrides or {})

    assert (line.exit_code, line.left, line.faults) == (line.expected_exit, [], [])


@pytest.mark.parametrize("kind", ["native", "gloo"])
def test_streams_drain_before_the_stop(kind: str) -> None:
    """L-33, L-35: every stream ends with its last token; exit 0, no error line, nothing left."""
    play(Line("drain", 0, 60), stop.under_streams(STREAMS, 32, {"length"}), {"exchange": {"kind": kind}})


def test_streams_that_do_not_drain_are_aborted() -> None:
    """L-33, R34: after the drain's time the rest ends with finish reason abort."""
    play(
        Line("cut", 0, 60),
        stop.under_streams(STREAMS, stop.ENDLESS_TOKENS, {"abort"}),
        {"shutdown": {"drain_timeout_s": 0.5}},
    )


def test_a_second_signal_ends_the_drain() -> None:
    """L-34: far before drain_timeout_s."""
    play(Line("twice", 0, 60), stop.twice(STREAMS))


@pytest.mark.parametrize("stage", ["groups", "weights", "warm_up"])
def test_a_stop_while_starting_is_an_orderly_end(stage: str) -> None:
    """L-40, R34: whatever the ranks are doing."""
    play(Line(stage, 0, 60), stop.while_starting("start_progress", stage))


@pytest.mark.parametrize("victim", stop.CHILDREN)
def test_a_killed_child_ends_the_server_with_an_error_for_each_client(victim: str) -> None:
    """L-38, X-21: no stream breaks off without a word, exit 70, and the rest is gone."""
    play(Line(victim, 70, 60), stop.kill_child(victim, STREAMS))


def test_a_rank_that_waits_for_a_stopped_one_does_not_hold_up_the_end() -> None:
    """X-24: SIGTERM to the parent ends the wait by the region's stop word, far before the exchange's time-out."""
    play(Line("stopped", 70, 60), stop.stopped_rank(4), stop.STUCK)


def test_a_rank_that_stands_still_fails_the_pair_with_an_error_for_each_client() -> None:
    """R38, X-20: the other rank's time-out ends it, not a service manager's; the stopped process goes with it."""
    play(Line("held", 70, 60), stop.held_rank(4), stop.IMPATIENT)


@pytest.mark.parametrize(("victim", "stage"), [("rank 0", "groups"), ("rank 1", "weights"), ("detokenizer", "pools")])
def test_a_child_killed_while_starting_ends_the_start(victim: str, stage: str) -> None:
    """L-40: at whatever step; one error line, exit 70, and the others do not go on loading."""
    play(Line(victim, 70, 60, "start_failed"), stop.kill_child_while_starting(victim, stage))


@pytest.mark.parametrize(("what", "limit", "named"), stop.WITHHELD)
def test_a_start_without_descriptors_says_what_to_raise(what: str, limit: str, named: str) -> None:
    """L-40, L-15: wherever they run out, exit 78 with one line, and no child that was forked before is left."""
    line = Line(what, 78, 60, "start_failed")
    stop.run_line(line, stop.refused(named), {}, limit=limit)
    assert (line.exit_code, line.left, line.faults) == (78, [], [])


def test_new_requests_do_not_prolong_the_drain_nor_does_a_client_that_reads_nothing() -> None:
    """L-34, R34: what comes meanwhile is refused; what cannot be delivered is not waited for."""
    quick: Tables = {"shutdown": {"drain_timeout_s": 0.5}}
    play(Line("flood", 0, 60), stop.flood(4), quick)
    play(Line("deaf", 0, 60), stop.deaf_client(), quick)


def test_a_killed_parent_takes_its_children_along() -> None:
    """L-39: under load, nothing is left."""
    play(Line("parent", -signal.SIGKILL, 60), stop.kill_parent(STREAMS))


def test_kill_and_restart_on_one_port() -> None:
    """L-40: a restart right after a kill works on the same configuration."""
    port = free_port()
    for victim in ("parent", "rank 1", "detokenizer"):
        expected = -signal.SIGKILL if victim == "parent" else 70
        line = stop.run_line(Line(victim, expected, 60), stop.kill_any(victim), {}, port)
        assert (line.exit_code, line.left, line.faults) == (expected, [], [])


AHEAD: Tables = {"scheduler": {"overlap": True}, "dspark": {"enabled": False}}


def test_a_stop_while_steps_are_launched_ahead_is_as_orderly() -> None:
    """L-33, L-35, R34: the step that flies lands; streams drain, or end with finish reason abort, and exit 0."""
    play(Line("drain", 0, 60), stop.under_streams(STREAMS, 32, {"length"}), AHEAD)
    cut = {**AHEAD, "shutdown": {"drain_timeout_s": 0.5}}
    play(Line("cut", 0, 60), stop.under_streams(STREAMS, stop.ENDLESS_TOKENS, {"abort"}), cut)


def test_a_rank_that_is_killed_while_a_step_flies_ends_the_server() -> None:
    """L-38, X-21: the other rank does not wait for what never comes; each client reads an error, exit 70."""
    play(Line("rank 1", 70, 60), stop.kill_child("rank 1", STREAMS), AHEAD)
