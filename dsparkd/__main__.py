"""The command line: serve, check-config, grammar-store.

Imports no torch, and nothing that starts threads before the fork.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import dsparkd
from dsparkd import config as config_module
from dsparkd import crash, store_cli, supervisor, system
from dsparkd import log as log_module
from dsparkd.config import Config, Hardware, Section
from dsparkd.errors import EXIT_OK, CapabilityError, ConfigError, StartError
from dsparkd.grammar import store
from dsparkd.grammar.vocabulary import make_vocabularies
from dsparkd.http.keys import ApiKeys
from dsparkd.ipc.wiring import make_wiring
from dsparkd.kv.geometry import KVGeometry, PoolSizes, size_pool
from dsparkd.model.checkpoint import Use, expected_tensors, placed_bytes
from dsparkd.model.config import ModelConfig, load_model_config, verified_drafts
from dsparkd.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from dsparkd.metrics import Registry
    from dsparkd.routing.router import Router


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 70 or 78; 2 for a command line that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="dsparkd", description="Serves DeepSeek-V4 checkpoints on two co-located data-parallel ranks."
    )
    commands = ("serve", "check-config", "grammar-store")
    parser.add_argument("command", nargs="?", choices=commands, default="serve", help="default: serve")
    parser.add_argument("verb", nargs="?", choices=store_cli.VERBS, help="of grammar-store")
    parser.add_argument("--bodies", type=Path, metavar="FILE", help="of grammar-store warm: a request body a line")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; conf/dsparkd.toml explains every key")
    parser.add_argument("--version", action="version", version=f"dsparkd {dsparkd.__version__}")
    options = parser.parse_args(arguments)
    if options.config is None:
        parser.error("name the configuration: --config FILE")
    if (options.command == "grammar-store") != (options.verb is not None):
        parser.error(f"grammar-store, and it alone, takes one of {', '.join(store_cli.VERBS)}")
    try:
        config = config_module.resolve(config_module.load(options.config), find_hardware())
        model = load_model_config(Path(config.engine.checkpoint))
        if options.command == "grammar-store":
            return store_cli.run(config, model, options.verb, options.bodies)
        verified_drafts(config.dspark, model)
        sizes = check_memory(config, model)
        ApiKeys.load(config.server)  # the front end reads them itself; here only to refuse before anything is forked
        if options.command == "check-config":
            sys.stdout.write(render_config(config) + "\n" + render_memory(config, model, sizes))
            return EXIT_OK
        return serve(config)
    except StartError as error:
        sys.stderr.write(f"dsparkd: {error}\n")
        return error.exit_code


def find_hardware() -> Hardware:
    """Count the CUDA devices and CPUs that this process may use, without loading the driver into the parent."""
    devices = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    count = len(devices)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # the driver's own switch, which the ranks' CUDA obeys
    if visible is not None:
        count = min(count, len([part for part in visible.split(",") if part.strip()]))
    return Hardware(num_cuda_devices=count, num_cpus=system.cpu_count_available())


def serve(config: Config) -> int:
    """Bind, fork, then run the parent. Raises ConfigError when the address is taken."""
    # A stop signal that comes before the loop can handle it waits; the children get their own handling in the fork.
    signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.STOP_SIGNALS)
    log_module.configure("parent", None, config.log.format, config.log.level)
    crash.prepare_directory(config.engine.crash_dir)
    listener = supervisor.bind_listener(config.server)
    prepare_grammars(config)
    shared, board = supervisor.open_exchange(config), supervisor.create_board()
    try:
        wiring = make_wiring(shared, board=board, has_probe=config.grammar.enabled)
    except OSError as error:
        raise CapabilityError(
            "wiring", f"sockets between the processes ({error.strerror})", system.DESCRIPTOR_REMEDY
        ) from error
    if config.engine.device == "cpu":
        # The ranks compute on the cores that every text event wakes somebody on, and when one is preempted both wait.
        system.schedule_as_batch()
    children = supervisor.fork_children(config, wiring)
    return supervisor.serve(config, wiring.parent, children, listener, _build_app)


def prepare_grammars(config: Config) -> None:
    """Make the store ready, once a launch and before its users are forked. Raises CapabilityError, CheckpointError."""
    if not config.grammar.enabled or not config.grammar.store.enabled:
        return
    checkpoint = Path(config.engine.checkpoint)
    model = load_model_config(checkpoint)
    vocabularies = make_vocabularies(Tokenizer.load(checkpoint), model.vocab_size, (model.eos_token_id,))
    store.prepare(config.grammar.store, vocabularies.scope())


def _build_app(config: Config, router: Router, registry: Registry) -> Starlette:
    # Imported after the fork: the children need none of it.
    from dsparkd.http.app import build_app

    return build_app(config, router, registry)


def render_config(config: Config) -> str:
    """Return the resolved tree as TOML; a key without a value is a comment."""
    return "\n".join(
        line for table in config.__struct_fields__ for line in _render_table(table, getattr(config, table))
    )


def _render_table(name: str, section: Section) -> list[str]:
    """The lines of a table, then of the tables inside of it; an empty one ends each."""
    lines, inner = [f"[{name}]"], []
    for key in section.__struct_fields__:
        value = getattr(section, key)
        if isinstance(value, Section):
            inner += _render_table(f"{name}.{key}", value)
            continue
        text = msgspec.json.encode(value).decode()  # TOML's spelling for strings, numbers and booleans alike
        lines.append(f"# {key} is not set" if value is None else f"{key} = {text}")
    return [*lines, "", *inner]


def check_memory(config: Config, model: ModelConfig) -> PoolSizes | None:
    """Return how a rank's pools divide the configured bytes; None when the budget is a fraction of the device.

    Raises ConfigError when not even one sequence of engine.max_context_tokens fits into them or into the model.
    """
    if config.engine.max_context_tokens > model.max_position_embeddings:
        raise ConfigError(
            "engine.max_context_tokens",
            config.engine.max_context_tokens,
            f"the checkpoint was made for {model.max_position_embeddings} (max_position_embeddings); use at most that",
        )
    if config.kv.device_bytes is None:
        return None
    geometry = model.kv_geometry(
        config.kv.page_tokens, config.engine.dtype, config.dspark.enabled, config.engine.kv_dtype
    )
    return size_pool(geometry, config, config.kv.device_bytes)


def weight_bytes(model: ModelConfig, dtype: str, device: str) -> tuple[int, int, int]:
    """Return bytes of one rank's shared weights, its half of the experts and its drafter, as its device holds them."""
    shared = expert = draft = 0
    specs = expected_tensors(model)
    for name, spec in specs.items():
        size = placed_bytes(specs, name, dtype, is_packed=device == "cuda" and dtype == "bfloat16")
        if spec.use is Use.TARGET:
            shared += size
        elif spec.use is Use.EXPERT:
            expert += size
        else:
            draft += size if spec.expert is None else size // 2
    return shared, expert // 2, draft


def render_memory(config: Config, model: ModelConfig, sizes: PoolSizes | None) -> str:
    """Return the table of what one rank will hold, pool by pool."""
    geometry = model.kv_geometry(
        config.kv.page_tokens, config.engine.dtype, config.dspark.enabled, config.engine.kv_dtype
    )
    shared, experts, drafter = weight_bytes(model, config.engine.dtype, config.engine.device)
    rows = [("weights, shared", "", "", shared), ("weights, experts of this rank", "", "", experts)]
    if config.dspark.enabled:
        rows.append(("weights, drafter", "", "", drafter))
    if sizes is not None:
        rows += _pool_rows(geometry, sizes)
    lines = [f"memory of each rank ({config.engine.device}, {config.engine.dtype})"]
    lines += [f"  {name:<30} {count:>8} {each:>14} {_mib(total):>14}" for name, count, each, total in rows]
    if sizes is None:
        lines.append(f"  kv pools: {config.kv.device_fraction} of the device's free memory, divided at start:")
        pools = (("page", geometry.page_bytes), ("rings", geometry.slot_bytes), ("snapshot", geometry.snapshot_bytes))
        lines += [f"  {name:<30} {'':>8} {f'{each} B':>14}" for name, each in pools]
    else:
        lines.append(f"  {'total':<30} {'':>8} {'':>14} {_mib(sum(row[3] for row in rows)):>14}")
        tokens = (sizes.num_pages - 1) * geometry.page_tokens
        lines.append(f"  room for {tokens} tokens in cache, {sizes.num_slots - 1} running sequences")
    return "\n".join(lines) + "\n"


def _pool_rows(geometry: KVGeometry, sizes: PoolSizes) -> list[tuple[str, str, str, int]]:
    pools = (
        (f"kv pages of {geometry.page_tokens} tokens", sizes.num_pages, geometry.page_bytes),
        ("rings of running sequences", sizes.num_slots, geometry.slot_bytes),
        ("rings of page ends in a chunk", sizes.num_inner_slots, geometry.inner_slot_bytes),
        ("boundary snapshots", sizes.num_snapshots, geometry.snapshot_bytes),
    )
    return [(name, str(count), f"{each} B", count * each) for name, count, each in pools]


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
