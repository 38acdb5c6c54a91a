"""Families, tallies and the parent's registry."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsparkd import metrics
from dsparkd.errors import InvariantError
from dsparkd.messages import MetricsFrame
from dsparkd.metrics import FAMILIES, Registry, Tally

UNITS = ("_seconds", "_bytes", "_tokens", "_requests", "_objects", "_pages", "_info", "_streams", "_entries", "_rows")
# Names of the contract's table whose last word is neither a unit nor _total.
PLAIN_NAMES = {
    "dsparkd_accepted_per_step",
    "dsparkd_exchange_sequence",
    "dsparkd_grammar_in_flight",
    "dsparkd_graph_shapes",
    "dsparkd_path_active",
    "dsparkd_ready",
}


def frame(source: str, tally: Tally) -> MetricsFrame:
    values, histograms = tally.frame()
    return MetricsFrame(source, values, histograms)


def series(registry: Registry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(registry.render().decode())
        for sample in family.samples
    }


def value(registry: Registry, name: str, **labels: str) -> float:
    return series(registry)[name, frozenset(labels.items())]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_types_units_and_help_follow_the_rules(family: metrics.Family) -> None:
    """M-01: prefix, unit, _total; M-05: each per-rank help text says how to aggregate."""
    assert re.fullmatch(r"dsparkd_[a-z0-9_]+", family.name)
    assert family.name.endswith("_total") == (family.kind == "counter")
    if family.kind != "counter":
        assert family.name.endswith(UNITS) or family.name in PLAIN_NAMES
    if "dp_rank" in family.labels:
        expected = "sum over dp_rank" if family.kind == "counter" else "compare by dp_rank"
        assert expected in family.help
        assert family.values["dp_rank"] == ("0", "1")
    assert (family.kind == "histogram") == bool(family.buckets)
    assert list(family.buckets) == sorted(set(family.buckets))
    for label in family.labels:
        assert (label in family.open_labels) != bool(family.values.get(label))


def test_each_family_is_declared_once_and_listed() -> None:
    """M-01: the registry walks this list; a family beside it would never be served."""
    declared = [one for one in vars(metrics).values() if isinstance(one, metrics.Family)]

    assert sorted(family.name for family in declared) == sorted(family.name for family in FAMILIES)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_an_empty_registry_serves_every_family_and_no_other() -> None:
    """M-01: registry and list are equal sets, before anything was counted."""
    text = Registry().render().decode()

    assert re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE) == [
        (family.name, family.kind) for family in FAMILIES
    ]
    assert all(f"# HELP {family.name} {family.help}" in text for family in FAMILIES)


def test_values_of_all_sources_are_exact() -> None:
    """M-02: name, labels and value of a scripted run, from two ranks and the parent."""
    registry = Registry()
    ranks = [Tally(), Tally()]
    for dp_rank, tally in enumerate(ranks):
        for _ in range(3 + dp_rank):
            tally.inc(metrics.REQUESTS, str(dp_rank), "stop")
        tally.inc(metrics.OUTPUT_TOKENS, str(dp_rank), by=10)
        tally.set(metrics.KV_PAGES, str(dp_rank), "full", "free", to=7)
        tally.set(metrics.KV_PAGES, str(dp_rank), "full", "free", to=5)
        registry.apply(frame(f"rank{dp_rank}", tally))
    registry.tally.inc(metrics.HTTP_OPEN_STREAMS, by=2)
    registry.tally.inc(metrics.HTTP_OPEN_STREAMS, by=-1)

    assert series(registry) == {
        ("dsparkd_requests_total", frozenset({("dp_rank", "0"), ("outcome", "stop")})): 3,
        ("dsparkd_requests_total", frozenset({("dp_rank", "1"), ("outcome", "stop")})): 4,
        ("dsparkd_output_tokens_total", frozenset({("dp_rank", "0")})): 10,
        ("dsparkd_output_tokens_total", frozenset({("dp_rank", "1")})): 10,
        ("dsparkd_kv_pages", frozenset({("dp_rank", "0"), ("pool", "full"), ("state", "free")})): 5,
        ("dsparkd_kv_pages", frozenset({("dp_rank", "1"), ("pool", "full"), ("state", "free")})): 5,
        ("dsparkd_http_open_streams", frozenset()): 1,
    }


def test_a_histogram_counts_each_value_once_in_cumulative_buckets() -> None:
    """M-02: a value on an edge belongs to it; one beyond the last edge to +Inf; sum and count are exact."""
    registry, tally = Registry(), Tally()
    edges = metrics.INTER_TOKEN.buckets
    for number in (0.0, edges[0], edges[0] * 1.0001, edges[-1], edges[-1] + 1):
        tally.observe(metrics.INTER_TOKEN, "0", value=number)
    registry.apply(frame("rank0", tally))

    def bucket(edge: str) -> float:
        return value(registry, "dsparkd_inter_token_seconds_bucket", dp_rank="0", le=edge)

    assert [bucket(f"{edges[0]:g}"), bucket(f"{edges[1]:g}"), bucket(f"{edges[-1]:g}"), bucket("+Inf")] == [2, 3, 4, 5]
    assert value(registry, "dsparkd_inter_token_seconds_count", dp_rank="0") == 5
    expected = edges[0] * 2.0001 + edges[-1] * 2 + 1
    assert value(registry, "dsparkd_inter_token_seconds_sum", dp_rank="0") == pytest.approx(expected)


def test_the_latest_frame_of_a_source_wins_and_a_restart_resets() -> None:
    """decisions 18: frames are cumulative; a process that starts again starts from zero."""
    registry, tally = Registry(), Tally()
    for _ in range(2):
        tally.inc(metrics.PARKS, "0")
        registry.apply(frame("rank0", tally))
    assert value(registry, "dsparkd_parks_total", dp_rank="0") == 2

    restarted = Tally()
    restarted.inc(metrics.PARKS, "0")
    registry.apply(frame("rank0", restarted))
    assert value(registry, "dsparkd_parks_total", dp_rank="0") == 1


def test_a_series_that_two_processes_count_is_their_sum() -> None:
    """A family without dp_rank has one series, whoever counts it."""
    registry, other = Registry(), Tally()
    for tally in (registry.tally, other):
        tally.inc(metrics.CHILD_EXITS, "rank", "clean")
        tally.observe(metrics.QUEUE_SECONDS, "0", value=0.5)
    registry.apply(frame("other", other))

    assert value(registry, "dsparkd_child_exits_total", role="rank", result="clean") == 2
    assert value(registry, "dsparkd_queue_seconds_count", dp_rank="0") == 2


def test_a_frame_does_not_change_after_it_was_taken() -> None:
    """A frame waits in a channel while its process goes on counting."""
    tally = Tally()
    tally.inc(metrics.PARKS, "0")
    tally.observe(metrics.QUEUE_SECONDS, "0", value=1.0)
    taken = frame("rank0", tally)
    before = (dict(taken.values), dict(taken.histograms))

    tally.inc(metrics.PARKS, "0")
    tally.observe(metrics.QUEUE_SECONDS, "0", value=1.0)

    assert (taken.values, taken.histograms) == before


def test_gauges_of_the_moment_are_set_at_each_scrape() -> None:
    """An age counts while nobody looks."""
    registry = Registry()
    ages = iter([1.0, 2.0])
    registry.before_scrape(lambda tally: tally.set(metrics.SNAPSHOT_AGE, "0", to=next(ages)))

    assert value(registry, "dsparkd_snapshot_age_seconds", dp_rank="0") == 1.0
    assert value(registry, "dsparkd_snapshot_age_seconds", dp_rank="0") == 2.0


def test_values_outside_the_closed_sets_are_bugs() -> None:
    """M-01: nothing that a client sends can become a series; whoever tries is told at once."""
    tally = Tally()
    wrong = [
        lambda: tally.inc(metrics.REQUESTS, "0", "client text"),
        lambda: tally.inc(metrics.REQUESTS, "2", "stop"),
        lambda: tally.inc(metrics.REQUESTS, "0"),
        lambda: tally.inc(metrics.REQUESTS, "0", "stop", "extra"),
        lambda: tally.inc(metrics.HTTP_REQUESTS, "/v1/models/../../etc", "2xx"),
        lambda: tally.set(metrics.REQUESTS, "0", "stop", to=1),
        lambda: tally.observe(metrics.REQUESTS, "0", "stop", value=1),
        lambda: tally.inc(metrics.QUEUE_SECONDS, "0"),
    ]

    for call in wrong:
        with pytest.raises(InvariantError):
            call()

    assert tally.frame() == ({}, {})


def test_a_value_that_holds_the_separator_is_refused() -> None:
    """The key joins label values with NUL; no closed value contains one, so keys are unique."""
    for family in FAMILIES:
        for values in family.values.values():
            assert not any("\0" in one for one in values)
    with pytest.raises(InvariantError):
        Tally().inc(metrics.REQUESTS, "0", "stop\0")


def test_every_code_of_the_exchange_can_be_counted() -> None:
    """M-01, X-31: the closed set of labels is the native library's own, without success and the parent's stop."""
    from dsparkd.native.exchange import Code

    assert set(metrics.EXCHANGE_CODES) == {code.name for code in Code} - {"OK", "STOPPED"}
