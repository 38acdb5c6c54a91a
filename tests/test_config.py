"""The configuration tree: defaults, boundaries, rules across sections, the commented reference."""

import math
import operator
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from dsparkd.config import Config, EngineConfig, Hardware, KVConfig, Section, load, resolve
from dsparkd.errors import EXIT_CONFIG, ConfigError
from tools.harness import ROOT, Tables, merge, to_toml

BASE: Tables = {"engine": {"checkpoint": "/c", "device": "cpu"}, "kv": {"device_bytes": 1 << 28}}
TWO_GPUS = Hardware(num_cuda_devices=2)
NO_GPU = Hardware(num_cuda_devices=0)

BIG = (1 << 63) - 1

# Each key: values at its boundary that are accepted, and values just beyond it or of a wrong type that are not.
BOUNDARIES: dict[str, tuple[list[object], list[object]]] = {
    "server.host": (["127.0.0.1", "::1", "localhost"], ["", 1]),
    "server.port": ([1, 65535], [0, 65536, -1, True, "8000", 8000.5]),
    "server.api_keys_file": (["", "/etc/keys"], [1, False]),
    "engine.checkpoint": (["/c"], ["", 1]),
    "engine.device": (["cpu", "cuda"], ["", "CPU", "gpu", 1]),
    "engine.shared_device": ([False], [1, "yes"]),  # true needs a GPU: see below
    "engine.dtype": (["bfloat16", "float32"], ["float16", "", 32]),
    "engine.kv_dtype": (["model", "fp8"], ["bfloat16", "", 8, True]),
    "engine.weights": (["checkpoint", "random"], ["Random", "", "zeros", 0, True]),
    "engine.dp": ([2], [0, 1, 3, 4, True, "2"]),
    "engine.attention_tp": ([1], [0, 2, True]),
    "engine.cp": ([1], [0, 2, True]),
    "engine.max_context_tokens": ([2, 1 << 20], [1, 0, -1, True, 1.5]),
    "engine.crash_dir": (["/var/crash", ""], [1]),
    "limits.max_body_bytes": ([1, BIG], [0, -1, True, "1", 1.5]),
    "limits.max_batch_items": ([1, 4096], [0, 4097, -1, True]),
    "limits.queue_items": ([256, BIG], [255, 0, True]),
    "limits.body_timeout_s": ([0.001, 1e6, 1], [0, -1, True, "1"]),
    "limits.stream_buffer_bytes": ([4096, BIG], [4095, 0, True]),
    "routing.policy": (["tokens", "requests"], ["", "random", 1]),
    "routing.load_refresh_s": ([0.001, 1], [0.0009, 1.001, 0, True]),
    "routing.send_timeout_s": ([0.001, 60], [0, -1, True]),
    "scheduler.max_rows": ([1, 1024], [0, -1, True, "1"]),
    "scheduler.chunk_tokens": ([256, 8192], [0, 255, 257, 128, -256, True]),
    "scheduler.max_frames_per_tick": ([1, 4096], [0, -1, True]),
    "scheduler.max_prefill_streak": ([1, 100], [0, -1, True]),
    "scheduler.overlap": ([True, False], [1, "true"]),
    "exchange.kind": (["native", "gloo"], ["nccl", "", 1]),
    "exchange.spin_s": ([0, 0.001, 20e-6], [-1e-9, 0.0011, True, "1"]),
    "exchange.timeout_s": ([0.1, 299.9], [0.09, 600.1, 0, 300, True]),
    "exchange.startup_timeout_s": ([30, 1e5], [29.9, 0, True]),
    "kv.page_tokens": ([128, 256, 512], [0, 64, 192, -128, True]),
    "kv.device_bytes": ([1, BIG], [0, -1, True, "1"]),
    "kv.device_fraction": ([], [0.0, 1.0, -0.5, 1.5, True]),  # accepted on cuda alone: see below
    "kv.snapshot_pages": ([1, 100], [0, -1, True]),
    "kv.snapshot_share": ([0.001, 0.999], [0, 1, -1, True]),
    "dspark.enabled": ([True, False], [1, "yes"]),
    "dspark.gamma": ([1, 5, 64], [0, -1, True, "5"]),
    "dspark.max_verify": ([0, 1, 5], [-1, True, "1", 1.5]),
    "dspark.verify": (["all", "compact"], ["", "none", 1]),
    "dspark.acceptance": (["coupled", "rejection"], ["", "greedy", 1]),
    "dspark.cost_table": (["", "/etc/steps.json"], [1, False]),
    "decode_graph.enabled": ([False], [True, 1, "true"]),  # true on cuda alone: see below
    "decode_graph.tiers": ([(1,), (6, 16, 65536)], [[], [0], [-1], [32, 16], [16, 16], [65537], 16, [True], [1.5]]),
    "health.max_age_s": ([3.001, 1e6], [3.0, 0, True]),
    "health.max_skew_s": ([0.001, 60], [0, -1, True]),
    "health.heartbeat_s": ([0.1, 9.9], [0.09, 10.01, 10.0, True]),  # 10 collides with max_age_s = 30
    "watchdog.tick_timeout_s": ([30.001, 1e6], [30, 0, -1, True]),
    "shutdown.drain_timeout_s": ([0.001, 1e6], [0, -1, True]),
    "shutdown.barrier_timeout_s": ([0.001, 1e6], [0, -1, True]),
    "shutdown.exit_timeout_s": ([0.001, 1e6], [0, -1, True]),
    "metrics.enabled": ([True], [1, 0, "true"]),  # false with exchange.kind = "gloo" alone: see below
    "gc.freeze": ([True, False], [1, "true"]),
    "log.format": (["json", "console"], ["text", "", 1]),
    "log.level": (["debug", "info", "warning", "error"], ["trace", "", 10]),
    "text.default_effort": (["low", "high", "max"], ["", "medium", 1]),
    "grammar.enabled": ([True, False], [1, "true"]),
    "grammar.unsupported": (["refuse", "report"], ["", "ignore", 1]),
    "grammar.any_whitespace": ([True, False], [0, "false"]),
    "grammar.max_whitespace": ([0, 1024], [-1, 1025, True, "1"]),
    "grammar.traversal": (["native", "per_matcher", "batched"], ["", "scalar", 1]),
    "grammar.traversal_threads": ([1, 64], [0, -1, True, "2", 1.5]),
    "grammar.traversal_timeout_s": ([0.001, 10], [0, -1, True]),
    "grammar.workers": ([1, 64], [0, -1, True, "8", 1.5]),
    "grammar.compiler_threads": ([1, 64], [0, -1, True, "8", 1.5]),
    "grammar.wait_timeout_s": ([20, 600], [19.9, 0, True]),
    "grammar.compile_timeout_s": ([0.1, 30], [30.1, 0, -1, True]),
    "grammar.probe_cpu_s": ([1, 60], [0, -1, True, 1.5]),
    "grammar.probe_bytes": ([1 << 26, BIG], [(1 << 26) - 1, 0, True]),
    "grammar.probe_wall_s": ([0.1, 60], [0, -1, True]),
    "grammar.cache.bytes": ([1, BIG], [0, -1, True, "8", 1.5]),
    "grammar.cache.entries": ([1, BIG], [0, -1, True, "8", 1.5]),
    "grammar.cache.negative_entries": ([0, 1], [-1, True, 1.5]),
    "grammar.cache.negative_ttl_s": ([0, 1e6], [-1, True, "1"]),
    "grammar.store.enabled": ([True, False], [1, "true"]),
    "grammar.store.directory": (["/var/grammar"], ["", 1]),
    "grammar.store.bytes": ([1 << 24, BIG], [(1 << 24) - 1, 0, True]),
    "grammar.store.max_entry_bytes": ([1, 1 << 32], [0, (1 << 32) + 1, True]),
    "grammar.store.max_compiled_bytes": ([1, BIG], [0, -1, True]),
    "grammar.store.margin": ([1, 100.5], [0.99, 0, True]),
    "grammar.store.initial_bytes_per_s": ([1, BIG], [0, -1, True, 1.5]),
    "grammar.store.scope_retention_s": ([86_400, BIG], [86_399, 0, True]),
}


def all_keys() -> dict[str, object]:
    """Every key of the tree with its default; msgspec.NODEFAULT for a required one."""
    keys: dict[str, object] = {}

    def collect(table: str, section: type) -> None:
        for field in msgspec.structs.fields(section):
            if isinstance(field.type, type) and issubclass(field.type, Section):
                collect(f"{table}.{field.name}", field.type)
            else:
                keys[f"{table}.{field.name}"] = field.default

    for table in msgspec.structs.fields(Config):
        collect(table.name, table.type)
    return keys


def decode(tables: Tables, directory: Path) -> Config:
    file = directory / "config.toml"
    file.write_text(to_toml(merge(BASE, tables)), encoding="utf-8")
    return load(file)


def with_key(key: str, value: object) -> Tables:
    table, name = key.rsplit(".", 1)
    return {table: {name: value}}


def test_every_key_has_boundaries_here() -> None:
    """C-01: a key without a boundary test is not validated."""
    assert set(BOUNDARIES) == set(all_keys())


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (good, _) in BOUNDARIES.items() for value in good])
def test_a_value_at_the_boundary_is_accepted(tmp_path: Path, key: str, value: object) -> None:
    """C-01: the rule says where, not one further."""
    config = resolve(decode(with_key(key, value), tmp_path), TWO_GPUS)

    if key not in ("engine.checkpoint", "engine.crash_dir"):  # those become absolute
        assert operator.attrgetter(key)(config) == value


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, bad) in BOUNDARIES.items() for value in bad])
def test_a_value_beyond_the_boundary_is_a_start_failure_that_names_the_key(
    tmp_path: Path, key: str, value: object
) -> None:
    """C-01, G-10: table and key stand in the message; exit 78. Booleans are no numbers."""
    overrides = merge(with_key(key, value), {"kv": {"device_bytes": None}} if key == "kv.device_fraction" else {})

    with pytest.raises(ConfigError) as caught:
        resolve(decode(overrides | with_key(key, value), tmp_path), TWO_GPUS)

    table, name = key.rsplit(".", 1)
    assert caught.value.exit_code == EXIT_CONFIG
    message = str(caught.value)
    related = {  # a rule between two keys may name the other one
        "limits.queue_items": "limits.max_batch_items",
        "exchange.timeout_s": "watchdog.tick_timeout_s",
        "health.heartbeat_s": "health.max_age_s",
        "grammar.wait_timeout_s": "grammar.compile_timeout_s",
        "grammar.store.bytes": "grammar.store.max_entry_bytes",
    }
    assert key in message or f"$.{table}.{name}" in message or related.get(key, "\0") in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(tmp_path: Path, value: float) -> None:
    """TOML can spell nan and inf; a time-out of inf is a wait without a deadline."""
    for key, default in all_keys().items():
        if isinstance(default, float) and not isinstance(default, bool):
            file = tmp_path / "config.toml"
            table, name = key.rsplit(".", 1)
            text = to_toml(merge(BASE, {table: {}})).replace(f"[{table}]\n", f"[{table}]\n{name} = {value}\n")
            file.write_text(text, encoding="utf-8")
            with pytest.raises(ConfigError):
                resolve(load(file), TWO_GPUS)


@pytest.mark.parametrize(
    "text",
    ["[engine]\nchekpoint = '/c'\n", "[nonsense]\n", "[engine]\n", "engine = 1\n", "[engine\n", "\x00"],
)
def test_unknown_missing_and_malformed_keys_are_start_failures(tmp_path: Path, text: str) -> None:
    """C-01: unknown keys are refused, so a typo never runs with a default."""
    file = tmp_path / "config.toml"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError):
        load(file)


def test_a_file_that_cannot_be_read_is_a_start_failure(tmp_path: Path) -> None:
    """C-01: no stack trace for a wrong path, a directory or bytes that are no text."""
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name in ("missing.toml", ".", "binary.toml"):
        with pytest.raises(ConfigError, match="--config"):
            load(tmp_path / name)


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    """A configuration works from any working directory."""
    config = decode({"engine": {"checkpoint": "models/x", "crash_dir": "../crash"}}, tmp_path)

    assert config.engine.checkpoint == str(tmp_path / "models" / "x")
    assert config.engine.crash_dir == str(tmp_path.parent / "crash")


@pytest.mark.parametrize(
    ("geometry", "accepted"),
    [
        ({"dp": 2, "attention_tp": 1, "cp": 1}, True),
        ({"dp": 1}, False),
        ({"dp": 4}, False),
        ({"attention_tp": 2}, False),
        ({"cp": 2}, False),
        ({"dp": 1, "attention_tp": 2}, False),
    ],
)
def test_only_two_co_located_ranks_are_served(tmp_path: Path, geometry: dict[str, object], accepted: bool) -> None:
    """X-05: any other geometry is a start failure that names what was found; exchange.kind has no third value."""
    if accepted:
        assert resolve(decode({"engine": geometry}, tmp_path), NO_GPU).engine.dp == 2
        return
    with pytest.raises(ConfigError, match=r"engine\.(dp|attention_tp|cp) = ") as caught:
        decode({"engine": geometry}, tmp_path)
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(("device", "expected"), [("cuda", 2048), ("cpu", 1024)])
def test_resolve_fills_the_chunk_by_device_and_leaves_its_input_alone(
    tmp_path: Path, device: str, expected: int
) -> None:
    """decisions 9: nothing is written back; resolve returns a new tree."""
    config = decode({"engine": {"device": device}}, tmp_path)

    resolved = resolve(config, TWO_GPUS)

    assert (config.scheduler.chunk_tokens, resolved.scheduler.chunk_tokens) == (None, expected)


@pytest.mark.parametrize("devices", [0, 1])
def test_cuda_without_two_devices_is_a_start_failure(tmp_path: Path, devices: int) -> None:
    """C-01: engine.device is checked against the machine before anything is forked."""
    with pytest.raises(ConfigError, match=rf"engine\.device.*found {devices}"):
        resolve(decode({"engine": {"device": "cuda"}}, tmp_path), Hardware(num_cuda_devices=devices))


def test_ranks_that_share_a_device_need_one_and_a_budget_in_bytes(tmp_path: Path) -> None:
    """A fraction of what is free would be taken twice, since both ranks look before either has taken its part."""
    one_gpu = Hardware(num_cuda_devices=1)
    shared: dict[str, object] = {"device": "cuda", "shared_device": True}

    resolve(decode({"engine": shared}, tmp_path), one_gpu)

    with pytest.raises(ConfigError, match=r"engine\.device.*needs 1 CUDA devices, found 0"):
        resolve(decode({"engine": shared}, tmp_path), NO_GPU)
    with pytest.raises(ConfigError, match=r"kv\.device_fraction.*set kv\.device_bytes"):
        resolve(decode({"engine": shared, "kv": {"device_bytes": None, "device_fraction": 0.5}}, tmp_path), one_gpu)
    with pytest.raises(ConfigError, match=r"engine\.shared_device"):
        resolve(decode({"engine": {"device": "cpu", "shared_device": True}}, tmp_path), NO_GPU)


def test_steps_overlap_on_cuda_where_nothing_is_drafted(tmp_path: Path) -> None:
    """C-01: left out is a choice by device; drafts are made behind a step, from ids that the next one needs."""
    cuda: Tables = {"engine": {"device": "cuda"}}
    wanted: Tables = {"scheduler": {"overlap": True}}
    unwanted: Tables = {"scheduler": {"overlap": False}}
    drafts: Tables = {"dspark": {"enabled": True}}
    no_drafts: Tables = {"dspark": {"enabled": True, "max_verify": 0}}

    def overlap(*tables: Tables) -> bool | None:
        merged: dict[str, dict[str, object]] = {}
        for each in tables:
            merged |= {name: dict(keys) for name, keys in each.items()}
        return resolve(decode(merged, tmp_path), TWO_GPUS).scheduler.overlap

    assert overlap(cuda) is True
    assert overlap(cuda, unwanted) is False
    assert overlap(cuda, drafts) is False
    assert overlap(cuda, no_drafts) is True
    assert overlap() is False
    assert overlap(wanted) is True
    with pytest.raises(ConfigError, match=r"scheduler\.overlap.*leave it out, or set dspark\.enabled = false"):
        overlap(wanted, drafts)


def test_graphs_are_on_where_they_can_be_captured(tmp_path: Path) -> None:
    """P-22, C-01: left out is a choice by device; true where nothing can be captured is a start failure."""
    one_gpu = Hardware(num_cuda_devices=1)
    cuda: Tables = {"engine": {"device": "cuda"}}
    cpu: Tables = {"engine": {"device": "cpu"}}
    shared: Tables = {"engine": {"device": "cuda", "shared_device": True}}
    wanted: Tables = {"decode_graph": {"enabled": True}}
    unwanted: Tables = {"decode_graph": {"enabled": False}}

    assert resolve(decode(cuda, tmp_path), TWO_GPUS).decode_graph.enabled is True
    assert resolve(decode({**cuda, **wanted}, tmp_path), TWO_GPUS).decode_graph.enabled is True
    assert resolve(decode({**cuda, **unwanted}, tmp_path), TWO_GPUS).decode_graph.enabled is False
    assert resolve(decode(cpu, tmp_path), NO_GPU).decode_graph.enabled is False
    assert resolve(decode(shared, tmp_path), one_gpu).decode_graph.enabled is False
    with pytest.raises(ConfigError, match=r"decode_graph\.enabled.*needs CUDA devices"):
        resolve(decode({**cpu, **wanted}, tmp_path), NO_GPU)
    with pytest.raises(ConfigError, match=r"decode_graph\.enabled.*through host memory"):
        resolve(decode({**shared, **wanted}, tmp_path), one_gpu)


def test_exactly_one_cache_budget_is_set(tmp_path: Path) -> None:
    """decisions 11: bytes or a fraction of the device, never both, never neither; on the cpu only bytes."""
    for tables, found in (
        ({"kv": {"device_fraction": 0.5}}, " = [0-9]"),
        ({"kv": {"device_bytes": None}}, " is not set"),
    ):
        with pytest.raises(ConfigError, match=rf"kv\.device_bytes{found}"):
            decode(tables, tmp_path)
    fraction: Tables = {"kv": {"device_bytes": None, "device_fraction": 0.5}}
    with pytest.raises(ConfigError, match=r"kv\.device_fraction"):
        resolve(decode(fraction, tmp_path), NO_GPU)
    on_cuda = resolve(decode({**fraction, "engine": {"device": "cuda"}}, tmp_path), TWO_GPUS)
    assert on_cuda.kv.device_fraction == 0.5


@pytest.mark.parametrize("name", ["dsparkd.toml", "dev.toml", "prod.toml"])
def test_every_shipped_configuration_agrees_through_shared_memory(name: str) -> None:
    """X-05: native on cpu and cuda; gloo is a choice that somebody makes, never what the server falls back to."""
    assert load(ROOT / "conf" / name).exchange.kind == "native"


def test_the_native_exchange_needs_metrics(tmp_path: Path) -> None:
    """X-05: off is a start failure that names both keys; with gloo it is allowed."""
    off: Tables = {"metrics": {"enabled": False}}
    with pytest.raises(ConfigError, match=r"metrics\.enabled = False: exchange\.kind = \"native\" needs them"):
        resolve(decode(off, tmp_path), NO_GPU)
    assert not resolve(decode({**off, "exchange": {"kind": "gloo"}}, tmp_path), NO_GPU).metrics.enabled


def test_the_tree_is_frozen() -> None:
    """No code changes a setting after start."""
    engine = EngineConfig(checkpoint="/c")
    with pytest.raises(AttributeError):
        engine.dp = 1  # type: ignore[misc]
    with pytest.raises(ConfigError):
        KVConfig()


def test_the_reference_names_every_key_with_its_default() -> None:
    """C-01, Q-12: conf/dsparkd.toml and the code have equal keys and equal defaults."""
    text = (ROOT / "conf" / "dsparkd.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    written: dict[str, object] = {}

    def collect(table: str, keys: dict[str, object]) -> None:
        for key, value in keys.items():
            if isinstance(value, dict):
                collect(f"{table}.{key}", value)
            else:
                written[f"{table}.{key}"] = value

    for name, keys in tables.items():
        collect(name, keys)
    commented = set()
    table = ""
    for line in text.splitlines():
        if match := re.fullmatch(r"\[([\w.]+)\]", line):
            table = match[1]
        elif match := re.fullmatch(r"# (\w+) = [\w., \[\]]+", line):
            commented.add(f"{table}.{match[1]}")
    # Required, or one of a pair that has no default: the file shows a value for them.
    shown = {"engine.checkpoint", "kv.device_fraction"}

    for key, default in all_keys().items():
        if key in shown:
            assert key in written
        elif default is None:
            assert key in commented
            assert key not in written
        else:
            assert written[key] == default, key
    assert set(written) | commented == set(all_keys())


def test_each_key_of_the_reference_is_explained() -> None:
    """C-01: meaning and unit stand above the key."""
    comment = ""
    for line in (ROOT / "conf" / "dsparkd.toml").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"(?:# )?(\w+) = ", line):
            assert len(comment) > 20, line
            for suffix, unit in (("_s", "seconds"), ("_bytes", "bytes"), ("_tokens", "okens")):
                assert unit in comment or not match[1].endswith(suffix), line
            comment = ""
        elif line.startswith("# "):
            comment += line
        else:
            comment = ""


@pytest.mark.parametrize("name", ["dev.toml", "prod.toml", "dsparkd.toml"])
def test_shipped_configurations_load(name: str) -> None:
    """conf/dev.toml ships working; conf/prod.toml is for two GPUs."""
    config = resolve(load(ROOT / "conf" / name), TWO_GPUS)

    assert config.engine.device == ("cpu" if name == "dev.toml" else "cuda")


@pytest.mark.parametrize(("num_cpus", "workers", "half"), [(1, 1, 1), (2, 1, 1), (3, 2, 1), (8, 7, 4), (32, 8, 12)])
def test_thread_counts_come_from_the_cpus_that_may_be_used(
    tmp_path: Path, num_cpus: int, workers: int, half: int
) -> None:
    """U-01: one CPU is left to the tick thread; what is set stays."""
    hardware = Hardware(num_cuda_devices=2, num_cpus=num_cpus)
    grammar = resolve(decode({}, tmp_path), hardware).grammar
    assert (grammar.workers, grammar.compiler_threads, grammar.traversal_threads) == (workers, half, half)
    own: Tables = {"grammar": {"workers": 5, "compiler_threads": 6, "traversal_threads": 7}}
    grammar = resolve(decode(own, tmp_path), hardware).grammar
    assert (grammar.workers, grammar.compiler_threads, grammar.traversal_threads) == (5, 6, 7)
    loop = resolve(decode({"grammar": {"traversal": "per_matcher"}}, tmp_path), hardware).grammar
    assert loop.traversal_threads is None


def test_threads_of_a_loop_are_a_start_failure(tmp_path: Path) -> None:
    """C-01: a number that nothing reads would be believed in."""
    with pytest.raises(ConfigError, match=r"grammar\.traversal_threads"):
        decode({"grammar": {"traversal": "per_matcher", "traversal_threads": 2}}, tmp_path)
