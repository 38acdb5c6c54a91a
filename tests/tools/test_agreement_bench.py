"""What the agreement bench makes of a server's log."""

from __future__ import annotations

import pytest

from tools.bench.agreement import PARTS, STAMPS, percentiles, wake_figures


def event(begun_ns: int, *parts_us: int) -> dict[str, object]:
    stamps = [begun_ns]
    for part in parts_us:
        stamps.append(stamps[-1] + 1000 * part)
    return dict(zip(STAMPS, stamps, strict=True))


def test_the_parts_of_a_wake_add_up_to_its_total() -> None:
    """X-28: the sum is what is bounded, and each part says where it went."""
    count, within, us = wake_figures([event(7, 10, 20, 30, 40, 50), event(9, 200, 200, 200, 200, 201)])
    assert (count, within) == (2, 1)
    assert list(us) == [*PARTS, "total"]
    assert us["agree"] == {"p50": 40, "p99": 200, "max": 200}
    assert us["total"] == {"p50": 150, "p99": 1001, "max": 1001}


@pytest.mark.parametrize(("count", "p99"), [(1, 1), (99, 99), (100, 99), (500, 495)])
def test_of_a_hundred_values_one_may_exceed_the_p99(count: int, p99: int) -> None:
    """A percentile that let more pass would flatter."""
    assert percentiles(range(1, count + 1))["p99"] == p99
