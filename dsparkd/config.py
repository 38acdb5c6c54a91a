"""The whole configuration tree: one TOML file decoded into frozen structs.

A key exists only while its mechanism exists. A rule on one section lives in that section's `__post_init__`,
a rule across sections in `resolve`, which needs what the machine has and returns a new struct.
Reference with every default, unit and meaning: conf/dsparkd.toml.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Literal

import msgspec

from dsparkd.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One TOML table; `name` is set by each subclass and used in messages."""

    def _require(self, ok: bool, key: str, remedy: str) -> None:
        """Raise ConfigError naming `table.key` unless ok."""
        if not ok:
            table = TABLE_NAMES[type(self)]
            raise ConfigError(f"{table}.{key}", getattr(self, key), remedy)

    def _require_seconds(self, key: str) -> None:
        """Raise ConfigError unless the key is a positive, finite number: every wait has a deadline."""
        self._require(0 < getattr(self, key) < math.inf, key, "use a positive number of seconds")


class ServerConfig(Section, frozen=True, kw_only=True):
    """[server] where the HTTP front end listens and who may use it."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys_file: str = ""

    def __post_init__(self) -> None:
        self._require(1 <= self.port <= 65535, "port", "use 1..65535")
        self._require(bool(self.host), "host", "name an address, for instance 127.0.0.1")


class EngineConfig(Section, frozen=True, kw_only=True):
    """[engine] what is computed, and on what."""

    checkpoint: str
    device: Literal["cuda", "cpu"] = "cuda"
    shared_device: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kv_dtype: Literal["model", "fp8"] = "model"
    weights: Literal["checkpoint", "random"] = "checkpoint"
    dp: int = 2
    attention_tp: int = 1
    cp: int = 1
    max_context_tokens: int = 16384
    crash_dir: str = "/var/lib/dsparkd/crash"

    def __post_init__(self) -> None:
        self._require(bool(self.checkpoint), "checkpoint", "name the directory of the checkpoint")
        self._require(self.max_context_tokens >= 2, "max_context_tokens", "use at least 2")
        self._require(self.dp == 2, "dp", "only two co-located data-parallel ranks are supported; use 2")
        self._require(self.attention_tp == 1, "attention_tp", "attention is data-parallel; use 1")
        self._require(self.cp == 1, "cp", "context parallelism is not supported; use 1")


class LimitsConfig(Section, frozen=True, kw_only=True):
    """[limits] what one client may ask for."""

    max_body_bytes: int = 8 * MIB
    max_batch_items: int = 256
    queue_items: int = 4096
    body_timeout_s: float = 30.0
    stream_buffer_bytes: int = 1 * MIB

    def __post_init__(self) -> None:
        self._require(self.max_body_bytes > 0, "max_body_bytes", "use a positive number of bytes")
        self._require(self.queue_items > 0, "queue_items", "use a positive number of requests")
        self._require(
            0 < self.max_batch_items <= self.queue_items,
            "max_batch_items",
            f"use 1..limits.queue_items ({self.queue_items})",
        )
        self._require_seconds("body_timeout_s")
        self._require(self.stream_buffer_bytes >= 4 * KIB, "stream_buffer_bytes", "use at least 4096 bytes")


class RoutingConfig(Section, frozen=True, kw_only=True):
    """[routing] which rank a request without an explicit rank goes to."""

    policy: Literal["tokens", "requests"] = "tokens"
    load_refresh_s: float = 0.020
    send_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        self._require(0.001 <= self.load_refresh_s <= 1, "load_refresh_s", "use 0.001..1 seconds")
        self._require_seconds("send_timeout_s")


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """[scheduler] what one tick of a rank may hold."""

    max_rows: int = 64
    chunk_tokens: int | None = None  # resolve(): 2,048 on cuda, 1,024 on cpu
    max_frames_per_tick: int = 256
    max_prefill_streak: int = 4
    overlap: bool | None = None  # resolve(): on cuda, where nothing is drafted

    def __post_init__(self) -> None:
        self._require(self.max_rows > 0, "max_rows", "use a positive number of rows")
        self._require(self.max_frames_per_tick > 0, "max_frames_per_tick", "use a positive number of frames")
        self._require(self.max_prefill_streak > 0, "max_prefill_streak", "use a positive number of ticks")


class ExchangeConfig(Section, frozen=True, kw_only=True):
    """[exchange] how the two ranks agree on a step."""

    kind: Literal["native", "gloo"] = "native"
    spin_s: float = 20e-6
    timeout_s: float = 30.0
    startup_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        self._require(0 <= self.spin_s <= 0.001, "spin_s", "use 0..0.001 seconds")
        self._require(0.1 <= self.timeout_s <= 600, "timeout_s", "use 0.1..600 seconds")
        self._require(
            self.timeout_s <= self.startup_timeout_s < math.inf,
            "startup_timeout_s",
            f"use at least exchange.timeout_s ({self.timeout_s})",
        )


class KVConfig(Section, frozen=True, kw_only=True):
    """[kv] device memory of one rank for cached tokens. Exactly one of device_bytes and device_fraction is set."""

    page_tokens: int = 256
    device_bytes: int | None = None
    device_fraction: float | None = None
    snapshot_pages: int = 16
    snapshot_share: float = 0.25

    def __post_init__(self) -> None:
        self._require(self.page_tokens > 0 and self.page_tokens % 128 == 0, "page_tokens", "use a multiple of 128")
        self._require(
            (self.device_bytes is None) != (self.device_fraction is None),
            "device_bytes",
            "set exactly one of kv.device_bytes and kv.device_fraction",
        )
        self._require(self.device_bytes is None or self.device_bytes > 0, "device_bytes", "use a positive number")
        self._require(
            self.device_fraction is None or 0 < self.device_fraction < 1, "device_fraction", "use a number inside 0..1"
        )
        self._require(self.snapshot_pages > 0, "snapshot_pages", "use a positive number of pages")
        self._require(0 < self.snapshot_share < 1, "snapshot_share", "use a number inside 0..1")


class SpeculationConfig(Section, frozen=True, kw_only=True):
    """[dspark] drafts of the checkpoint's drafter, verified by its target."""

    enabled: bool = False
    gamma: int | None = None  # the checkpoint's, and checked against it
    max_verify: int | None = None  # resolve() leaves it; all of a block
    verify: Literal["all", "compact"] = "all"
    acceptance: Literal["coupled", "rejection"] = "coupled"
    cost_table: str = ""

    def __post_init__(self) -> None:
        self._require(self.gamma is None or self.gamma > 0, "gamma", "use the checkpoint's dspark_block_size")
        self._require(self.max_verify is None or self.max_verify >= 0, "max_verify", "use 0 or a number of drafts")
        most = self.gamma
        if self.max_verify is not None and most is not None:
            self._require(self.max_verify <= most, "max_verify", f"use 0..dspark.gamma ({most})")


class DecodeGraphConfig(Section, frozen=True, kw_only=True):
    """[decode_graph] decode steps that are captured at start and replayed."""

    enabled: bool | None = None  # resolve(): on cuda, where the ranks do not share a device
    tiers: tuple[int, ...] | None = None  # tokens; left out: up to what max_rows windows hold

    def __post_init__(self) -> None:
        tiers = self.tiers
        if tiers is None:
            return
        rises = all(one < other for one, other in itertools.pairwise(tiers))
        fits = all(0 < tier <= 65536 for tier in tiers)
        self._require(bool(tiers) and rises and fits, "tiers", "use rising numbers from 1 to 65536")


class HealthConfig(Section, frozen=True, kw_only=True):
    """[health] when a rank counts as alive."""

    max_age_s: float = 30.0
    max_skew_s: float = 5.0
    heartbeat_s: float = 1.0

    def __post_init__(self) -> None:
        self._require(0.1 <= self.heartbeat_s <= 10, "heartbeat_s", "use 0.1..10 seconds")
        self._require(
            3 * self.heartbeat_s < self.max_age_s < math.inf,
            "max_age_s",
            f"use more than three times health.heartbeat_s ({self.heartbeat_s})",
        )
        self._require_seconds("max_skew_s")


class WatchdogConfig(Section, frozen=True, kw_only=True):
    """[watchdog] when a tick counts as hung."""

    tick_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._require_seconds("tick_timeout_s")


class ShutdownConfig(Section, frozen=True, kw_only=True):
    """[shutdown] how long each stage of an orderly stop may take."""

    drain_timeout_s: float = 60.0
    barrier_timeout_s: float = 10.0
    exit_timeout_s: float = 180.0

    def __post_init__(self) -> None:
        for key in ("drain_timeout_s", "barrier_timeout_s", "exit_timeout_s"):
            self._require_seconds(key)


class MetricsConfig(Section, frozen=True, kw_only=True):
    """[metrics] the Prometheus endpoint."""

    enabled: bool = True


class GCConfig(Section, frozen=True, kw_only=True):
    """[gc] Python's garbage collector in the ranks."""

    freeze: bool = True


class LogConfig(Section, frozen=True, kw_only=True):
    """[log] structured log lines on standard error."""

    format: Literal["json", "console"] = "json"
    level: Literal["debug", "info", "warning", "error"] = "info"


class TextConfig(Section, frozen=True, kw_only=True):
    """[text] defaults of the chat encoding."""

    default_effort: Literal["low", "high", "max"] = "low"


class GrammarCacheConfig(Section, frozen=True, kw_only=True):
    """[grammar.cache] compiled grammars in a rank's memory."""

    bytes: int = 1 * GIB
    entries: int = 10_000
    negative_entries: int = 1024
    negative_ttl_s: float = 60.0

    def __post_init__(self) -> None:
        self._require(self.bytes > 0, "bytes", "use a positive number of bytes")
        self._require(self.entries > 0, "entries", "use a positive number of entries")
        self._require(self.negative_entries >= 0, "negative_entries", "use 0 or a positive number of entries")
        self._require(0 <= self.negative_ttl_s < math.inf, "negative_ttl_s", "use 0 or a positive number of seconds")


class GrammarStoreConfig(Section, frozen=True, kw_only=True):
    """[grammar.store] what is known of grammars across restarts."""

    enabled: bool = True
    directory: str = "/var/cache/dsparkd/grammar"
    bytes: int = 4 * GIB
    max_entry_bytes: int = 16 * MIB
    max_compiled_bytes: int = 262_144
    margin: float = 2.0
    initial_bytes_per_s: int | None = None  # measured at start
    scope_retention_s: int = 1_209_600

    def __post_init__(self) -> None:
        self._require(bool(self.directory) or not self.enabled, "directory", "name a directory, or set enabled = false")
        self._require(self.bytes >= MIB, "bytes", f"use at least {MIB} bytes")
        self._require(
            0 < self.max_entry_bytes <= self.bytes, "max_entry_bytes", f"use 1..grammar.store.bytes ({self.bytes})"
        )
        self._require(self.max_compiled_bytes > 0, "max_compiled_bytes", "use a positive number of bytes")
        self._require(1 <= self.margin < math.inf, "margin", "use at least 1")
        self._require(
            self.initial_bytes_per_s is None or self.initial_bytes_per_s > 0,
            "initial_bytes_per_s",
            "use a positive number of bytes a second",
        )
        self._require(self.scope_retention_s >= 86_400, "scope_retention_s", "use at least 86400 seconds")


class GrammarConfig(Section, frozen=True, kw_only=True):
    """[grammar] answers whose form is enforced."""

    enabled: bool = True
    unsupported: Literal["refuse", "report"] = "refuse"
    any_whitespace: bool = True
    max_whitespace: int = 32
    traversal: Literal["native", "per_matcher", "batched"] = "native"
    traversal_threads: int | None = None  # resolve(): half of the CPUs, at most 12
    traversal_timeout_s: float = 0.05
    workers: int | None = None  # resolve(): one less than the CPUs, at most 8
    compiler_threads: int | None = None  # resolve(): half of the CPUs, at most 12
    wait_timeout_s: float = 30.0
    compile_timeout_s: float = 20.0
    probe_cpu_s: int = 2
    probe_bytes: int = 1 * GIB
    probe_wall_s: float = 25.0
    cache: GrammarCacheConfig = GrammarCacheConfig()
    store: GrammarStoreConfig = GrammarStoreConfig()

    def __post_init__(self) -> None:
        self._require(0 <= self.max_whitespace <= 1024, "max_whitespace", "use 0..1024")
        for key in ("traversal_threads", "workers", "compiler_threads"):
            value = getattr(self, key)
            self._require(value is None or value > 0, key, "use a positive number of threads")
        self._require(
            self.traversal_threads is None or self.traversal != "per_matcher",
            "traversal_threads",
            'leave it out with grammar.traversal = "per_matcher"',
        )
        for key in ("traversal_timeout_s", "wait_timeout_s", "compile_timeout_s", "probe_wall_s"):
            self._require_seconds(key)
        self._require(
            self.compile_timeout_s <= self.wait_timeout_s,
            "compile_timeout_s",
            f"use at most grammar.wait_timeout_s ({self.wait_timeout_s})",
        )
        self._require(self.probe_cpu_s > 0, "probe_cpu_s", "use a positive number of whole seconds")
        self._require(self.probe_bytes >= 64 * MIB, "probe_bytes", f"use at least {64 * MIB} bytes")


class Config(Section, frozen=True, kw_only=True):
    """The root; classes take their own section, never this."""

    engine: EngineConfig
    kv: KVConfig
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    routing: RoutingConfig = RoutingConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    health: HealthConfig = HealthConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    metrics: MetricsConfig = MetricsConfig()
    gc: GCConfig = GCConfig()
    log: LogConfig = LogConfig()
    text: TextConfig = TextConfig()
    grammar: GrammarConfig = GrammarConfig()
    dspark: SpeculationConfig = SpeculationConfig()
    decode_graph: DecodeGraphConfig = DecodeGraphConfig()


TABLE_NAMES: dict[type, str] = {
    ServerConfig: "server",
    EngineConfig: "engine",
    LimitsConfig: "limits",
    RoutingConfig: "routing",
    SchedulerConfig: "scheduler",
    ExchangeConfig: "exchange",
    KVConfig: "kv",
    HealthConfig: "health",
    WatchdogConfig: "watchdog",
    ShutdownConfig: "shutdown",
    MetricsConfig: "metrics",
    GCConfig: "gc",
    LogConfig: "log",
    TextConfig: "text",
    GrammarConfig: "grammar",
    GrammarCacheConfig: "grammar.cache",
    GrammarStoreConfig: "grammar.store",
    SpeculationConfig: "dspark",
    DecodeGraphConfig: "decode_graph",
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What `resolve` may know of the machine, gathered without torch. num_cpus: those that this process may use."""

    num_cuda_devices: int
    num_cpus: int = 1


def load(path: Path) -> Config:
    """Decode one TOML file; relative paths inside it are relative to the file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("--config", str(path), f"cannot be read ({reason}); name a readable TOML file") from error
    try:
        config = msgspec.toml.decode(text, type=Config)
    except ConfigError:
        raise
    except msgspec.DecodeError as error:  # ValidationError is one: wrong types, unknown and missing keys
        raise ConfigError("--config", str(path), f"{error}; see conf/dsparkd.toml for every key") from error
    return _anchor_paths(config, path.resolve().parent)


def _anchor_paths(config: Config, directory: Path) -> Config:
    """Make the paths in the tree absolute."""

    def anchor(value: str) -> str:
        return str((directory / value).resolve()) if value else value

    engine = msgspec.structs.replace(
        config.engine, checkpoint=anchor(config.engine.checkpoint), crash_dir=anchor(config.engine.crash_dir)
    )
    server = msgspec.structs.replace(config.server, api_keys_file=anchor(config.server.api_keys_file))
    store = msgspec.structs.replace(config.grammar.store, directory=anchor(config.grammar.store.directory))
    grammar = msgspec.structs.replace(config.grammar, store=store)
    dspark = msgspec.structs.replace(config.dspark, cost_table=anchor(config.dspark.cost_table))
    return msgspec.structs.replace(config, engine=engine, server=server, grammar=grammar, dspark=dspark)


def resolve(config: Config, hardware: Hardware) -> Config:
    """Fill what depends on the device and check the rules across sections. Raises ConfigError."""
    chunk_tokens = config.scheduler.chunk_tokens
    if chunk_tokens is None:
        chunk_tokens = 2048 if config.engine.device == "cuda" else 1024
    if chunk_tokens < config.kv.page_tokens or chunk_tokens % config.kv.page_tokens:
        raise ConfigError(
            "scheduler.chunk_tokens", chunk_tokens, f"use a multiple of kv.page_tokens ({config.kv.page_tokens})"
        )
    needed = 1 if config.engine.shared_device else config.engine.dp
    if config.engine.device == "cuda" and hardware.num_cuda_devices < needed:
        remedy = 'use such a host, or engine.shared_device on one GPU, or "cpu"' if needed > 1 else 'use "cpu"'
        raise ConfigError(
            "engine.device", "cuda", f"needs {needed} CUDA devices, found {hardware.num_cuda_devices}; {remedy}"
        )
    if config.engine.shared_device and config.engine.device != "cuda":
        raise ConfigError("engine.shared_device", True, 'says where two ranks share a GPU; use engine.device = "cuda"')
    if config.engine.shared_device and config.kv.device_bytes is None:
        raise ConfigError(
            "kv.device_fraction",
            config.kv.device_fraction,
            "of a device that two ranks share would be counted twice; set kv.device_bytes",
        )
    if config.engine.device == "cpu" and config.kv.device_bytes is None:
        raise ConfigError("kv.device_fraction", config.kv.device_fraction, "on the cpu device set kv.device_bytes")
    if config.exchange.kind == "native" and not config.metrics.enabled:
        raise ConfigError(
            "metrics.enabled", False, 'exchange.kind = "native" needs them; use true, or exchange.kind = "gloo"'
        )
    if config.watchdog.tick_timeout_s <= config.exchange.timeout_s:
        raise ConfigError(
            "watchdog.tick_timeout_s",
            config.watchdog.tick_timeout_s,
            f"use more than exchange.timeout_s ({config.exchange.timeout_s})",
        )
    overlap = _choose_overlap(config)
    scheduler = msgspec.structs.replace(config.scheduler, chunk_tokens=chunk_tokens, overlap=overlap)
    grammar = _share_cpus(config.grammar, hardware.num_cpus)
    decode_graph = _choose_graphs(config.decode_graph, config.engine)
    return msgspec.structs.replace(config, scheduler=scheduler, grammar=grammar, decode_graph=decode_graph)


def _choose_overlap(config: Config) -> bool:
    """Overlap steps on cuda, unless the file says. Raises ConfigError where drafts are made behind steps instead."""
    wanted = config.scheduler.overlap
    drafts = config.dspark.enabled and config.dspark.max_verify != 0
    if wanted and drafts:
        reason = "a step's drafts are made behind the one before, and need its ids"
        raise ConfigError("scheduler.overlap", True, f"{reason}; leave it out, or set dspark.enabled = false")
    return config.engine.device == "cuda" and not drafts if wanted is None else wanted


def _choose_graphs(config: DecodeGraphConfig, engine: EngineConfig) -> DecodeGraphConfig:
    """Switch graphs on where they can be captured, unless the file says. Raises ConfigError where they cannot be."""
    can_capture = engine.device == "cuda" and not engine.shared_device
    if config.enabled and not can_capture:
        reason = "a CUDA graph holds no exchange through host memory" if engine.shared_device else "needs CUDA devices"
        raise ConfigError("decode_graph.enabled", True, f"{reason}; leave it out, or set false")
    return msgspec.structs.replace(config, enabled=can_capture if config.enabled is None else config.enabled)


def _share_cpus(grammar: GrammarConfig, num_cpus: int) -> GrammarConfig:
    """Fill the thread counts that are not set; one CPU is left to the tick thread (U-01)."""
    workers, half = max(1, min(8, num_cpus - 1)), max(1, min(12, num_cpus // 2))
    traversal_threads = None if grammar.traversal == "per_matcher" else grammar.traversal_threads or half
    return msgspec.structs.replace(
        grammar,
        workers=grammar.workers or workers,
        compiler_threads=grammar.compiler_threads or half,
        traversal_threads=traversal_threads,
    )
