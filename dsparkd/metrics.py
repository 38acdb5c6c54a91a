"""Every metric of every process.

A process counts in its own `Tally`, plain dictionaries without locks. The ranks send theirs as one cumulative frame a
second to the parent, whose `Registry` serves the latest frames and its own tally; a process that starts again starts
from zero, which is what a counter reset means.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from dsparkd.errors import InvariantError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

RANKS = ("0", "1")
_SUM = " Counts work: sum over dp_rank."
_COMPARE = " State of one rank: compare by dp_rank."

# Seconds: from a tick of a small checkpoint to a request at its limits.
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# Seconds: waking a parked rank is well under a millisecond.
_STEP_BUCKETS = (0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.128, 0.5)
_WAKE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


@dataclass(frozen=True)
class Family:
    """One metric family. `values`: the closed set of each label except those of `open_labels`.

    buckets: upper edges of a histogram without the last, infinite one.
    open_labels: values that are constants of this build, of the configuration or the declared routes, never a client's
    words.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    open_labels: tuple[str, ...] = ()

    def check(self, label_values: tuple[str, ...]) -> None:
        """Raise InvariantError unless each label has a value of its closed set."""
        if len(label_values) != len(self.labels):
            raise InvariantError(f"{self.name} has labels {self.labels}, got {label_values}")
        for label, value in zip(self.labels, label_values, strict=True):
            if label not in self.open_labels and value not in self.values[label]:
                raise InvariantError(f"{self.name}: {label}={value!r} is not one of {self.values[label]}")


def _family(
    name: str,
    kind: Literal["counter", "gauge", "histogram"],
    help: str,
    /,
    *,
    by_rank: bool = True,
    buckets: tuple[float, ...] = (),
    open_labels: tuple[str, ...] = (),
    **values: tuple[str, ...],
) -> Family:
    """Declare a family; by_rank adds the label dp_rank in front and the sentence on how to aggregate."""
    if by_rank:
        help += _SUM if kind == "counter" else _COMPARE
        values = {"dp_rank": RANKS, **values}
    labels = (*values, *open_labels)
    return Family(f"dsparkd_{name}", kind, labels, help, values, buckets, open_labels)


BUILD_INFO = _family(
    "build_info",
    "gauge",
    "Always 1; the labels say what runs.",
    by_rank=False,
    open_labels=("version", "xgrammar", "abi"),
)
PATH_ACTIVE = _family(
    "path_active",
    "gauge",
    "1 if the path was proven at start and is in use, else 0.",
    path=(
        "native_exchange",
        "gloo_exchange",
        "prefix_cache",
        "mixed_step",
        "overlap",
        "decode_graph",
        "random_weights",
        "packed_cache",
        "peer_memory",
        "grammar_traversal",
        "grammar_store",
        "dspark",
        "dspark_compact",
    ),
)
READY = _family("ready", "gauge", "1 while new work is accepted.", by_rank=False)

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/health_scheduler",
    "/metrics",
    "/server_info",
    "/openapi.json",
    "other",
)
HTTP_REQUESTS = _family(
    "http_requests_total",
    "counter",
    "Finished HTTP responses, by declared route and status class.",
    by_rank=False,
    route=ROUTES,
    status=("2xx", "4xx", "5xx"),
)
HTTP_HANDLER_SECONDS = _family(
    "http_handler_seconds",
    "histogram",
    "From a request's headers to its response; for a stream, to its first event.",
    by_rank=False,
    buckets=_LATENCY_BUCKETS,
    route=ROUTES,
)
HTTP_OPEN_STREAMS = _family("http_open_streams", "gauge", "Open SSE connections.", by_rank=False)
REFUSALS = _family(
    "refusals_total",
    "counter",
    "Requests refused before queueing.",
    by_rank=False,
    reason=(
        "invalid",
        "too_large",
        "queue_full",
        "bad_rank",
        "dead_rank",
        "duplicate",
        "draining",
        "unauthorized",
    ),
)

REQUESTS = _family("requests_total", "counter", "Finished generations.", outcome=("stop", "length", "abort", "error"))
TIME_TO_FIRST_TOKEN = _family(
    "time_to_first_token_seconds", "histogram", "From receiving a request to its first id.", buckets=_LATENCY_BUCKETS
)
INTER_TOKEN = _family("inter_token_seconds", "histogram", "Between two ids of one request.", buckets=_LATENCY_BUCKETS)
REQUEST_SECONDS = _family(
    "request_seconds", "histogram", "From receiving a request to its last id.", buckets=_LATENCY_BUCKETS
)
QUEUE_SECONDS = _family(
    "queue_seconds", "histogram", "From delivery at the rank to the first plan with it.", buckets=_LATENCY_BUCKETS
)
PROMPT_TOKENS = _family("prompt_tokens_total", "counter", "Prompt tokens of admitted requests.")
OUTPUT_TOKENS = _family("output_tokens_total", "counter", "Generated tokens.")
CACHED_PROMPT_TOKENS = _family(
    "cached_prompt_tokens_total", "counter", "Prompt tokens that were not computed.", tier=("device",)
)

ROUTED_BATCHES = _family(
    "routed_batches_total", "counter", "Frames sent to a rank.", delivery=("whole", "per_rank", "single")
)
ROUTED_REQUESTS = _family("routed_requests_total", "counter", "Items sent to a rank.", route=("explicit", "balanced"))
LOAD_REQUESTS = _family(
    "load_requests", "gauge", "The router's view of outstanding requests.", source=("snapshot", "speculative")
)
LOAD_TOKENS = _family(
    "load_tokens", "gauge", "The router's view of outstanding tokens.", source=("snapshot", "speculative")
)
LOAD_REFRESHES = _family(
    "load_refreshes_total",
    "counter",
    "Reads of the load board.",
    by_rank=False,
    result=("fresh", "throttled", "unchanged"),
)
SNAPSHOT_AGE = _family("snapshot_age_seconds", "gauge", "Age of the rank's load snapshot at the scrape.")

_PHASES = ("receive", "plan", "agree", "launch", "commit", "publish", "park", "tick")
SCHEDULER_PHASE_SECONDS = _family(
    "scheduler_phase_seconds_total",
    "counter",
    "Time in each phase of the loop; receive to publish add up to tick, park is outside it.",
    phase=_PHASES,
)
SCHEDULER_PHASE_CALLS = _family(
    "scheduler_phase_calls_total",
    "counter",
    "Laps of each phase of the loop; launch has two in a tick with a step: launching, and waiting for results.",
    phase=_PHASES,
)
SCHEDULER_PHASE_MAX = _family(
    "scheduler_phase_max_seconds",
    "gauge",
    "Longest time in each phase of the loop in the latest finished second, 0 for a second without one.",
    phase=_PHASES,
)
TICKS = _family(
    "ticks_total",
    "counter",
    "Agreed ticks by kind; idle_peer took part without work of its own.",
    kind=("prefill", "mixed", "decode", "idle_peer", "idle"),
)
SCHEDULER_REQUESTS = _family(
    "scheduler_requests", "gauge", "Requests by state.", state=("grammar_wait", "waiting", "prefill", "decode")
)
RETRACTIONS = _family("retractions_total", "counter", "Decode rows put back to the queue for want of memory.")
PARKS = _family("parks_total", "counter", "Times that the idle rank went to sleep.")
UNPARK_SECONDS = _family(
    "unpark_seconds",
    "histogram",
    "From a message that wakes a parked rank, as the parent sends it, to its first step.",
    buckets=_WAKE_BUCKETS,
)
GC_FROZEN_OBJECTS = _family("gc_frozen_objects", "gauge", "Objects in the collector's permanent generation.")
GRAPH_BYTES = _family(
    "graph_bytes",
    "gauge",
    "Device memory of captured graphs and of what they write.",
    kind=("decode", "draft"),
)
GRAPH_SHAPES = _family("graph_shapes", "gauge", "Captured tiers.", kind=("decode", "draft"))
KV_PAGES = _family(
    "kv_pages",
    "gauge",
    "Units of each pool: pages of tokens (full) and boundary snapshots (snapshot).",
    pool=("full", "snapshot"),
    state=("free", "used", "cached"),
)

# Of native/exchange.h, without success and without the parent's stop, which is no error.
EXCHANGE_CODES = (
    "ARG",
    "ABI",
    "DIGEST",
    "OWNED",
    "FORKED",
    "BUSY",
    "SEQ_LOCAL",
    "SEQ_PEER",
    "TIMEOUT",
    "PEER_DEAD",
    "PEER_REPLACED",
    "PEER_LEFT",
    "PEER_ERROR",
    "CHANNEL",
    "TICK",
    "FUTEX",
    "CLOCK",
    "LIVENESS",
)
EXCHANGE_SECONDS = _family(
    "exchange_seconds_total",
    "counter",
    "Time in the agreement of the two ranks; total - after_last is the wait for a rank that came later.",
    channel=("plan", "tier"),
    phase=("total", "peer_wait", "arrival_skew", "after_last"),
)
EXCHANGE_CALLS = _family("exchange_calls_total", "counter", "Agreements of the two ranks.", channel=("plan", "tier"))
EXCHANGE_SLEEPS = _family(
    "exchange_sleeps_total", "counter", "Times that a rank slept in an agreement.", channel=("plan", "tier")
)
EXCHANGE_WAKES = _family(
    "exchange_wakes_total", "counter", "Times that a rank woke the other one in an agreement.", channel=("plan", "tier")
)
EXCHANGE_MAX_SECONDS = _family(
    "exchange_max_seconds",
    "gauge",
    "Longest agreement of the latest finished second, 0 for a second without one.",
    channel=("plan", "tier"),
    phase=("total", "peer_wait", "arrival_skew", "after_last"),
)
EXCHANGE_ERRORS = _family(
    "exchange_errors_total",
    "counter",
    "Agreements that failed; the first one ends the server, and its code is also in the crash report.",
    code=EXCHANGE_CODES,
)
EXCHANGE_SEQUENCE = _family("exchange_sequence", "gauge", "Number of the last agreement.", channel=("plan", "tier"))

_GRAMMAR_SOURCES = ("memory", "in_flight", "disk", "local_compile", "compile")
GRAMMAR_RESOLUTIONS = _family(
    "grammar_resolutions_total",
    "counter",
    "Requests that got their grammar, by the place that had it; in_flight waited for another one's.",
    source=_GRAMMAR_SOURCES,
)
GRAMMAR_RESOLUTION_SECONDS = _family(
    "grammar_resolution_seconds",
    "histogram",
    "From a request's delivery at the rank to its grammar.",
    buckets=_LATENCY_BUCKETS,
    source=_GRAMMAR_SOURCES,
)
GRAMMAR_FAILURES = _family(
    "grammar_failures_total",
    "counter",
    "Requests that their grammar ended: before admission, or with an answer that could not go on.",
    reason=(
        "invalid",
        "too_large",
        "timeout",
        "unavailable",
        "store_corrupt",
        "store_io",
        "aborted",
        "violation",
        "traversal",
    ),
)
GRAMMAR_CACHE_BYTES = _family("grammar_cache_bytes", "gauge", "Memory of compiled grammars and refusals.")
GRAMMAR_CACHE_ENTRIES = _family("grammar_cache_entries", "gauge", "Compiled grammars in memory.")
GRAMMAR_IN_FLIGHT = _family("grammar_in_flight", "gauge", "Grammars that are being looked for or compiled.")
GRAMMAR_CACHE_EVICTIONS = _family(
    "grammar_cache_evictions_total",
    "counter",
    "Compiled grammars dropped from memory.",
    cause=("bytes", "entries", "oversized", "flush"),
)
GRAMMAR_COMPILE_SECONDS = _family(
    "grammar_compile_seconds",
    "histogram",
    "Processor time of one compile.",
    buckets=_LATENCY_BUCKETS,
    kind=("json", "regex", "ebnf", "structural_tag"),
)
GRAMMAR_STORE_DECISIONS = _family(
    "grammar_store_decisions_total",
    "counter",
    "What was stored of a new grammar.",
    decision=("serialized", "local_faster", "body_too_large", "not_serialized"),
)
GRAMMAR_STORE_ERRORS = _family(
    "grammar_store_errors_total",
    "counter",
    "Failures of the grammar store.",
    reason=("corrupt", "quota", "read", "write"),
)
MASK_STEPS = _family(
    "mask_steps_total",
    "counter",
    "Steps with a row that has a grammar: one of them masked, or all of them still reasoning.",
    outcome=("masked", "thinking_only"),
)
MASK_ROWS = _family(
    "mask_rows", "histogram", "Rows of a step that a grammar holds.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
MASK_SECONDS = _family(
    "mask_seconds",
    "histogram",
    "Time of a step's masks: the walk of all grammars; the part of it, and of the drafted ids' copy, that the tick "
    "thread waited for; that copy alone; what the device waited for the masks. The last two on cuda.",
    buckets=_WAKE_BUCKETS,
    phase=("traverse", "finish", "ids_wait", "gpu_gap"),
)
MASK_SAMPLES_DROPPED = _family(
    "mask_samples_dropped_total", "counter", "Times of masks that were lost: too many were open, or they were no times."
)

DRAFT_TOKENS = _family(
    "draft_tokens_total",
    "counter",
    "Drafted tokens: accepted, refused by the target, or never shown to it.",
    fate=("accepted", "refused", "not_verified"),
)
ACCEPTED_PER_STEP = _family(
    "accepted_per_step",
    "histogram",
    "Tokens that a step gave a row that was drafted for: its accepted drafts and the one behind them.",
    buckets=(1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 65),
)
VERIFY_STEPS = _family(
    "verify_steps_total",
    "counter",
    "Steps that verified drafts: all of them up to dspark.max_verify, or as many as paid.",
    layout=("all", "compact"),
)
DECODE_STEPS = _family(
    "decode_steps_total",
    "counter",
    "Decode steps of the target by what ran them: a graph of so many tokens (tier), or eager launches (none).",
    path=("graph", "eager"),
    open_labels=("tier",),
)
STEPS_AHEAD = _family(
    "steps_ahead_total",
    "counter",
    "Steps with rows that were planned before the ids that they follow were there (`scheduler.overlap`).",
)
DROPPED_ROWS = _family(
    "dropped_rows_total",
    "counter",
    "Rows of steps that were launched before it was known that their request had ended; what they gave fell away.",
)
DECODE_STEP_SECONDS = _family(
    "decode_step_seconds",
    "histogram",
    "From a decode step's agreement to the next tick's vote, by what it verified: nothing drafted, every draft, or as"
    " many as paid.",
    buckets=_STEP_BUCKETS,
    layout=("plain", "all", "compact"),
)
GRAMMAR_TRUNCATED = _family(
    "grammar_truncated_tokens_total",
    "counter",
    "Accepted tokens that fell away because the text had ended before them.",
)

CHILD_EXITS = _family(
    "child_exits_total",
    "counter",
    "Ends of child processes.",
    by_rank=False,
    role=("rank", "detokenizer", "probe"),
    result=("clean", "failed", "killed", "late"),
)

FAMILIES: tuple[Family, ...] = (
    BUILD_INFO,
    PATH_ACTIVE,
    READY,
    HTTP_REQUESTS,
    HTTP_HANDLER_SECONDS,
    HTTP_OPEN_STREAMS,
    REQUESTS,
    REFUSALS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN,
    REQUEST_SECONDS,
    QUEUE_SECONDS,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    CACHED_PROMPT_TOKENS,
    ROUTED_BATCHES,
    ROUTED_REQUESTS,
    LOAD_REQUESTS,
    LOAD_TOKENS,
    LOAD_REFRESHES,
    SNAPSHOT_AGE,
    SCHEDULER_PHASE_SECONDS,
    SCHEDULER_PHASE_CALLS,
    SCHEDULER_PHASE_MAX,
    TICKS,
    SCHEDULER_REQUESTS,
    RETRACTIONS,
    PARKS,
    UNPARK_SECONDS,
    GC_FROZEN_OBJECTS,
    GRAPH_BYTES,
    GRAPH_SHAPES,
    KV_PAGES,
    EXCHANGE_SECONDS,
    EXCHANGE_MAX_SECONDS,
    EXCHANGE_CALLS,
    EXCHANGE_SLEEPS,
    EXCHANGE_WAKES,
    EXCHANGE_ERRORS,
    EXCHANGE_SEQUENCE,
    GRAMMAR_RESOLUTIONS,
    GRAMMAR_RESOLUTION_SECONDS,
    GRAMMAR_FAILURES,
    GRAMMAR_CACHE_BYTES,
    GRAMMAR_CACHE_ENTRIES,
    GRAMMAR_IN_FLIGHT,
    GRAMMAR_CACHE_EVICTIONS,
    GRAMMAR_COMPILE_SECONDS,
    GRAMMAR_STORE_DECISIONS,
    GRAMMAR_STORE_ERRORS,
    MASK_STEPS,
    MASK_ROWS,
    MASK_SECONDS,
    MASK_SAMPLES_DROPPED,
    DRAFT_TOKENS,
    ACCEPTED_PER_STEP,
    VERIFY_STEPS,
    DECODE_STEPS,
    STEPS_AHEAD,
    DROPPED_ROWS,
    DECODE_STEP_SECONDS,
    GRAMMAR_TRUNCATED,
    CHILD_EXITS,
)

V = TypeVar("V")
Values = dict[str, float]
Histograms = dict[str, tuple[float, ...]]


class Tally:
    """Counts of one process, owned by one thread.

    A series' key is the family's name and its label values, joined by NUL. A histogram is the count of each bucket
    (not cumulative, the infinite one last) and then the sum.
    """

    def __init__(self) -> None:
        self._values: Values = {}
        self._histograms: dict[str, list[float]] = {}

    def inc(self, family: Family, *labels: str, by: float = 1.0) -> None:
        """Add to a counter or gauge. Raises InvariantError for a label outside its closed set."""
        key = "\0".join((family.name, *labels))
        if key not in self._values:
            self._admit(family, labels, "counter", "gauge")
            self._values[key] = 0.0
        self._values[key] += by

    def set(self, family: Family, *labels: str, to: float) -> None:
        """Set a gauge. Raises InvariantError for a label outside its closed set."""
        key = "\0".join((family.name, *labels))
        if key not in self._values:
            self._admit(family, labels, "gauge")
        self._values[key] = to

    def observe(self, family: Family, *labels: str, value: float) -> None:
        """Put a value into a histogram. Raises InvariantError for a label outside its closed set."""
        key = "\0".join((family.name, *labels))
        counts = self._histograms.get(key)
        if counts is None:
            self._admit(family, labels, "histogram")
            counts = self._histograms[key] = [0.0] * (len(family.buckets) + 2)
        for index, edge in enumerate(family.buckets):
            if value <= edge:
                counts[index] += 1
                break
        else:
            counts[-2] += 1
        counts[-1] += value

    def _admit(self, family: Family, labels: tuple[str, ...], *kinds: str) -> None:
        if family.kind not in kinds:
            raise InvariantError(f"{family.name} is a {family.kind}, not a {' or '.join(kinds)}")
        family.check(labels)

    def frame(self) -> tuple[Values, Histograms]:
        """Return a copy of all values and histograms, as a MetricsFrame carries them."""
        return dict(self._values), {key: tuple(counts) for key, counts in self._histograms.items()}


class Frame(Protocol):
    """What the registry reads of a messages.MetricsFrame."""

    @property
    def source(self) -> str: ...
    @property
    def values(self) -> Values: ...
    @property
    def histograms(self) -> Histograms: ...


class Registry:
    """The parent's one registry: its own tally and the latest frame of each rank. Owned by the event loop."""

    def __init__(self) -> None:
        # Imported here because only the parent serves metrics, and only after it has forked.
        from prometheus_client import CollectorRegistry

        self.tally = Tally()
        self._frames: dict[str, tuple[Values, Histograms]] = {}
        self._before_scrape: list[Callable[[Tally], None]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def apply(self, frame: Frame) -> None:
        """Replace what the frame's source said before."""
        self._frames[frame.source] = (frame.values, frame.histograms)

    def before_scrape(self, update: Callable[[Tally], None]) -> None:
        """Have `update` set gauges that are only true at the moment of a scrape."""
        self._before_scrape.append(update)

    def render(self) -> bytes:
        """Return all families in the text exposition format."""
        from prometheus_client import generate_latest

        for update in self._before_scrape:
            update(self.tally)
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every family, with and without series; prometheus_client calls this."""
        values, histograms = self._merged()
        for family in FAMILIES:
            yield _metric(family, values, histograms)

    def _merged(self) -> tuple[Values, Histograms]:
        """Add the sources up: a series without dp_rank may be counted in several processes."""
        values, histograms = self.tally.frame()
        for more_values, more_histograms in self._frames.values():
            for key, value in more_values.items():
                values[key] = values.get(key, 0.0) + value
            for key, counts in more_histograms.items():
                held = histograms.get(key, (0.0,) * len(counts))
                histograms[key] = tuple(a + b for a, b in zip(held, counts, strict=True))
        return values, histograms


def _metric(family: Family, values: Values, histograms: Histograms) -> Metric:
    """Turn the series of one family into the library's object."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, counts in _series(family, histograms):
            edges = [*(f"{edge:g}" for edge in family.buckets), "+Inf"]
            cumulative = itertools.accumulate(counts[:-1])
            histogram.add_metric(labels, list(zip(edges, cumulative, strict=True)), counts[-1])
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in _series(family, values):
        metric.add_metric(labels, value)
    return metric


def _series(family: Family, table: Mapping[str, V]) -> list[tuple[list[str], V]]:
    """Return (label values, value) of each series of the family, sorted."""
    found = []
    for key, value in table.items():
        name, *labels = key.split("\0")
        if name == family.name:
            found.append((labels, value))
    return sorted(found, key=lambda series: series[0])
