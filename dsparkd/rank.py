"""Process main of one rank: builds everything that a rank is, runs its loop, and takes it down in order.

Start: groups, weights and pools, warm-up with the peer, garbage frozen, ready. Stop: the loop's farewell, pools and
weights, a barrier with a deadline, groups. A failure ends with a crash report to the parent.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from dsparkd import log as log_module
from dsparkd import metrics, system
from dsparkd.config import (
    Config,
    EngineConfig,
    ExchangeConfig,
    GrammarConfig,
    HealthConfig,
    RoutingConfig,
    SpeculationConfig,
)
from dsparkd.errors import (
    EXIT_FATAL,
    EXIT_OK,
    ConfigError,
    ExchangeError,
    FatalError,
    InvariantError,
    PeerError,
    StartError,
)
from dsparkd.executor.collectives import PEER_WORDS, RankGroups
from dsparkd.executor.costs import CostTable, load_cost_table
from dsparkd.executor.device import TorchDriver, require_device, room_for
from dsparkd.executor.executor import Executor, rank_device
from dsparkd.executor.graphs import Graphs
from dsparkd.executor.masks import Masker
from dsparkd.executor.plan import Plan, PlanRow, SlotStart, Speculation, StepKind
from dsparkd.executor.shapes import ShapeLimits, choose_tiers
from dsparkd.grammar.compiler import Compiler
from dsparkd.grammar.matcher import keep_lock_in_short_calls
from dsparkd.grammar.service import GrammarService
from dsparkd.grammar.store import GrammarStore, scope_name
from dsparkd.grammar.traversal import open_traversal
from dsparkd.grammar.vocabulary import make_vocabularies
from dsparkd.ipc.board import BoardWriter, open_board
from dsparkd.ipc.channel import Channel
from dsparkd.ipc.wiring import RankWiring
from dsparkd.messages import (
    CrashReport,
    MetricsFrame,
    PathState,
    Progress,
    RankReady,
    SamplingParams,
    StartFailed,
    ToRank,
    decode_from_probe,
    decode_to_rank,
)
from dsparkd.model.config import load_model_config, verified_drafts
from dsparkd.native.exchange import Attachment, config_digest
from dsparkd.scheduler.account import Account
from dsparkd.scheduler.exchange import Exchange, GlooExchange, NativeExchange
from dsparkd.scheduler.grammars import GrammarDesk
from dsparkd.scheduler.loop import Bounds, Lines, Loop, Parts, TickRecord
from dsparkd.scheduler.policy import Limits, Planner
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory
from dsparkd.scheduler.results import Committer
from dsparkd.scheduler.speculation import SpeculationPlanner
from dsparkd.text.output import THINK_END
from dsparkd.text.tokenizer import Tokenizer

log = log_module.get()

# Deltas that the detokenizer, or answers that the parent, has not read: beyond this it is stuck.
MAX_PENDING_BYTES = 64 << 20
# Rows of float32 logits over a vocabulary of 129,280 ids: 265 MB that no budget counts.
PROMPT_LOGIT_TOKENS = 512
# The compile of a grammar may keep the grammar thread from reading what the probe process says.
PROBE_SEND_TIMEOUT_S = 60.0
MAX_CAUSE_CHARS = 300  # of a failure's text, in an error that every client gets
NUM_AWAKE = 4  # processes that run when a message comes: parent, detokenizer and both ranks
LAST_WORDS_S = 3.0  # for the parent to read a crash report; it ends this process soon after
# L-15: a single tick may take this much longer than the longest of the warm-up before its rank looks dead.
TICK_MARGIN = 3

# By device. The first pass on cuda compiles what its kernels' cache lacks: seconds that no later tick takes.
WARM_UP_PASSES = {"cpu": 1, "cuda": 2}
PATHS = (
    PathState("prefix_cache", "active", "always on"),
    PathState("mixed_step", "active", "always on"),
)


def main(config: Config, wiring: RankWiring) -> int:
    """Run the process until both ranks have agreed to stop; returns the exit code."""
    rank = Rank(config, wiring)
    try:
        rank.start()
        rank.serve()
        return rank.leave()
    except StartError as error:
        log.warning("rank_start_failed", error=str(error))
        rank.tell_start_failed(error)
        return error.exit_code
    except FatalError as error:
        log.error("rank_failed", error=str(error))
        rank.tell_crash(error)
        return EXIT_FATAL
    except Exception as error:  # a process main
        log.exception("rank_crashed")
        rank.tell_crash(error)
        return EXIT_FATAL


class Rank:
    """Everything of one rank, owned by the process's main thread, which is the tick thread."""

    def __init__(self, config: Config, wiring: RankWiring) -> None:
        self._config = config
        self._wiring = wiring
        self._tally = metrics.Tally()
        self._parent: Channel[ToRank] = Channel(
            wiring.parent,
            decode_to_rank,
            send_timeout_s=config.routing.send_timeout_s,
            max_pending_bytes=MAX_PENDING_BYTES,
            name="parent",
        )
        self._detokenizer: Channel[NoReturn] = Channel(
            wiring.detokenizer,
            _refuse_frame,
            send_timeout_s=config.routing.send_timeout_s,
            max_pending_bytes=MAX_PENDING_BYTES,
            name="detokenizer",
        )
        self._groups: RankGroups | None = None
        self._executor: Executor | None = None
        self._native: NativeExchange | None = None
        self._grammars: GrammarService | None = None
        self._paths: tuple[PathState, ...] = ()
        self._max_drafts = 0
        self._speculation: SpeculationPlanner | None = None
        self._queue = RequestQueue()
        self._loop: Loop | None = None

    def start(self) -> None:
        """Do everything up to RankReady. Raises StartError, or PeerError when the peer does not come along."""
        config, dp_rank = self._config, self._wiring.dp_rank
        timeouts = config.exchange
        spin_s = choose_spin_s(timeouts.spin_s, system.cpu_share_available())
        if timeouts.kind == "native":
            self._native = open_native_exchange(config, self._wiring, spin_s)
        model_config = load_model_config(Path(config.engine.checkpoint))
        require_device(config, model_config, dp_rank, TorchDriver())
        if config.engine.weights == "random":
            log.warning("weights_are_random", checkpoint=config.engine.checkpoint)
        self._max_drafts = verified_drafts(config.dspark, model_config)
        table = open_cost_table(config, model_config.gamma) if self._max_drafts else None
        if self._max_drafts:
            is_compact = config.dspark.verify == "compact"
            self._speculation = SpeculationPlanner(
                self._max_drafts,
                config.scheduler.max_rows,
                is_compact=is_compact,
                table=table,
                captured=graph_tiers(config, self._max_drafts),
            )
        self._paths = (
            *exchange_paths(timeouts, spin_s),
            *PATHS,
            overlap_path(config, self._max_drafts),
            weights_path(config.engine),
            cache_path(config.engine),
            peer_path(config.engine),
            *grammar_paths(config.grammar),
            *draft_paths(config.dspark, self._max_drafts, model_config.gamma, table),
        )
        masker, desk = self._open_grammars() if config.grammar.enabled else (None, None)
        self._progress("groups", 0, 1)
        self._groups = groups = RankGroups.open(
            dp_rank,
            self._wiring.peer,
            rank_device(config, dp_rank),
            startup_timeout_s=timeouts.startup_timeout_s,
            timeout_s=timeouts.timeout_s,
            shares_device=config.engine.shared_device,
        )
        self._progress("groups", 1, 1)
        exchange = groups.expert_exchange()
        with room_for("weights and kv pools"):
            self._executor = executor = Executor.build(config, dp_rank, exchange, self._progress, masker)
        self._loop = self._build_loop(executor, groups, desk)
        # One rank may have loaded for minutes longer; from here on both are in step.
        groups.barrier(timeouts.startup_timeout_s)
        if self._native is not None:
            self._native.prove(timeouts.timeout_s)
        self._progress("warm_up", 0, 1)
        plans = warm_up_plans(config, executor.sizes.num_pages, self._max_drafts)
        with room_for("the largest steps"):
            longest_tick_s = warm_up(executor, plans, WARM_UP_PASSES[config.engine.device], time.monotonic_ns)
        require_fresh_snapshots(config.health, longest_tick_s)
        require_patient_senders(config.routing, longest_tick_s)
        self._capture(executor, model_config.gamma)
        num_frozen = freeze_garbage() if config.gc.freeze else 0
        self._tally.set(metrics.GC_FROZEN_OBJECTS, str(dp_rank), to=num_frozen)
        for path in self._paths:
            self._tally.set(metrics.PATH_ACTIVE, str(dp_rank), path.path, to=float(path.state == "active"))
        if self._grammars is not None:
            # The probe process imports and measures meanwhile; a request before that would only wait for it.
            self._grammars.wait_for_probe(timeouts.startup_timeout_s)
        groups.barrier(timeouts.startup_timeout_s)
        self._announce(executor, longest_tick_s, num_frozen)

    def _capture(self, executor: Executor, gamma: int) -> None:
        """Capture decode steps where that is on, and note what they take. Raises CapabilityError."""
        config, name = self._config, str(self._wiring.dp_rank)
        capture_graphs(config, executor, self._max_drafts, gamma, self._progress)
        graphs = executor.graphs
        for kind in metrics.GRAPH_BYTES.values["kind"]:
            self._tally.set(metrics.GRAPH_BYTES, name, kind, to=graphs.num_bytes[kind] if graphs else 0)
            self._tally.set(metrics.GRAPH_SHAPES, name, kind, to=graphs.num_shapes[kind] if graphs else 0)
        self._paths = (*self._paths, graph_path(config.engine, graphs))

    def _announce(self, executor: Executor, longest_tick_s: float, num_frozen: int) -> None:
        ready = RankReady(
            dp_rank=self._wiring.dp_rank,
            device=str(rank_device(self._config, self._wiring.dp_rank)),
            weight_bytes=executor.weight_bytes,
            kv_bytes=executor.kv_bytes,
            num_pages=executor.sizes.num_pages,
            num_snapshots=executor.sizes.num_snapshots,
            longest_tick_s=longest_tick_s,
            gc_frozen_objects=num_frozen,
            graph_bytes=executor.graphs.num_bytes if executor.graphs else {},
            graph_tiers=executor.graphs.tiers if executor.graphs else (),
            paths=self._paths,
        )
        # Logged first: the parent says `listening` as soon as it has the message, and the log should read in order.
        log.info(
            "rank_ready",
            device=ready.device,
            weight_bytes=ready.weight_bytes,
            kv_bytes=ready.kv_bytes,
            num_pages=ready.num_pages,
            num_snapshots=ready.num_snapshots,
            longest_tick_s=round(longest_tick_s, 6),
            gc_frozen_objects=num_frozen,
            graph_bytes=ready.graph_bytes,
            graph_tiers=ready.graph_tiers,
            paths={path.path: path.state for path in self._paths},
        )
        self._parent.send_nowait(ready)

    def _open_grammars(self) -> tuple[Masker, GrammarDesk]:
        """Make what compiles grammars and what follows them; the traversal proves itself. Raises CapabilityError."""
        config, grammar = self._config, self._config.grammar
        probe = self._wiring.probe
        if probe is None or grammar.compiler_threads is None:
            raise InvariantError("grammar.enabled, and this process inherited no end of the probe process")
        checkpoint = Path(config.engine.checkpoint)
        model = load_model_config(checkpoint)
        tokenizer = Tokenizer.load(checkpoint)
        vocabularies = make_vocabularies(tokenizer, model.vocab_size, (model.eos_token_id,))
        compiler = Compiler(vocabularies, grammar.compiler_threads)
        keep_lock_in_short_calls()
        traversal = open_traversal(grammar.traversal, grammar.traversal_threads or 1, compiler.info)
        masker = Masker(
            traversal,
            config.scheduler.max_rows,
            1 + self._max_drafts,
            model.vocab_size,
            grammar.traversal_timeout_s,
            grammar.compile_timeout_s,
            think_end_id=tokenizer.marker_id(THINK_END),
        )
        channel = Channel(
            probe,
            decode_from_probe,
            send_timeout_s=PROBE_SEND_TIMEOUT_S,
            max_pending_bytes=MAX_PENDING_BYTES,
            name="probe process",
        )
        scope, limits = vocabularies.scope(), grammar.store
        store = GrammarStore(Path(limits.directory) / scope_name(scope), limits) if limits.enabled else None
        wake = system.eventfd()
        self._grammars = GrammarService(grammar, scope, store, channel, compiler, lambda: os.eventfd_write(wake, 1))
        self._grammars.start()
        return masker, GrammarDesk(self._grammars, wake)

    def _build_loop(self, executor: Executor, groups: RankGroups, desk: GrammarDesk | None) -> Loop:
        config, dp_rank = self._config, self._wiring.dp_rank
        chunk_tokens = config.scheduler.chunk_tokens
        if chunk_tokens is None:
            raise InvariantError("scheduler.chunk_tokens is filled by resolve()")
        page_tokens = config.kv.page_tokens
        memory = Memory(
            num_pages=executor.sizes.num_pages,
            num_slots=executor.sizes.num_slots,
            num_snapshots=executor.sizes.num_snapshots,
            page_tokens=page_tokens,
        )
        limits = Limits(
            chunk_tokens=chunk_tokens,
            page_tokens=page_tokens,
            snapshot_tokens=config.kv.snapshot_pages * page_tokens,
            prompt_logit_tokens=max(PROMPT_LOGIT_TOKENS // page_tokens, 1) * page_tokens,
            max_drafts=self._max_drafts,
        )
        planner = Planner(self._queue, memory, limits)
        texts = Tokenizer.load(Path(config.engine.checkpoint))
        eos_ids = frozenset({executor.model_config.eos_token_id})
        think_end_id = texts.marker_id(THINK_END) if desk is not None else None
        committer = Committer(self._queue, memory, texts, eos_ids, think_end_id, executor.commit_grammars)
        bounds = Bounds(
            dp_rank=dp_rank,
            queue_items=config.limits.queue_items,
            max_context_tokens=config.engine.max_context_tokens,
            max_frames_per_tick=config.scheduler.max_frames_per_tick,
            max_prefill_streak=config.scheduler.max_prefill_streak,
            heartbeat_s=config.health.heartbeat_s,
            farewell_s=config.routing.send_timeout_s,
            decode_graphs=bool(config.decode_graph.enabled),
            overlap=bool(config.scheduler.overlap),
        )
        board = BoardWriter(open_board(self._wiring.board), dp_rank)
        os.close(self._wiring.board)  # the mapping stays
        exchange: Exchange = self._native or GlooExchange(self._wiring.dp_rank, groups.gather, self._wiring.peer)
        return Loop(
            bounds,
            Lines(self._parent, self._detokenizer, exchange, board.publish),
            Parts(
                self._queue,
                memory,
                planner,
                committer,
                executor,
                desk,
                choose_seat(dp_rank, os.sched_getaffinity(0)),
                self._speculation,
            ),
            Account(dp_rank, self._tally, time.monotonic_ns),
            AlarmWatch(config.watchdog.tick_timeout_s),
            time.monotonic_ns,
        )

    def serve(self) -> None:
        """Run the loop until the agreed stop. Raises FatalError."""
        if self._loop is None:
            raise InvariantError("serve before start")
        self._loop.run()

    def leave(self) -> int:
        """Take everything down after the farewell; returns the exit code.

        Groups go last, after a barrier: a rank that destroyed them earlier would break the peer's last collective.
        """
        if self._executor is None or self._groups is None:
            raise InvariantError("leave before start")
        if self._grammars is not None:
            self._grammars.close()
        self._executor.close()
        log.info("rank_closed_pools")
        try:
            self._groups.barrier(self._config.shutdown.barrier_timeout_s)
        except PeerError as error:
            # Destroying groups whose other side has gone may never return, so the process leaves with them.
            log.error("teardown_barrier_missed", missing=f"rank{1 - self._wiring.dp_rank}", error=str(error))
            return EXIT_FATAL
        if self._native is not None:
            self._native.close()
        self._groups.close()
        log.info("rank_stopped")
        return EXIT_OK

    def tell_start_failed(self, error: StartError) -> None:
        """Tell the parent why nothing will listen."""
        try:
            role = f"rank{self._wiring.dp_rank}"
            self._parent.send_nowait(StartFailed(role=role, exit_code=error.exit_code, error=str(error)))
        except PeerError:
            log.warning("parent_lost")

    def tell_crash(self, error: Exception) -> None:
        """Send the parent everything that is known of the failure, and the last counts; it may have gone itself."""
        name = str(self._wiring.dp_rank)
        if isinstance(error, ExchangeError):
            self._tally.inc(metrics.EXCHANGE_ERRORS, name, error.code)
        report = {
            "error": "".join(traceback.format_exception(error)),
            "stacks": [traceback.format_stack(frame) for frame in _all_frames()],
            "requests": self._queue.counts(),
            "ticks": [describe(record) for record in self._loop.records] if self._loop is not None else [],
        }
        deadline_ns = time.monotonic_ns() + int(LAST_WORDS_S * 1e9)
        try:
            self._parent.send_nowait(MetricsFrame(f"rank{name}", *self._tally.frame()))
            words = (describe_cause(error), is_consequence(error), msgspec.json.encode(report))
            self._parent.send_nowait(CrashReport(self._wiring.dp_rank, *words))
            while not self._parent.flush_nowait() and time.monotonic_ns() < deadline_ns:
                time.sleep(0.001)
        except PeerError:
            log.warning("parent_lost")

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._parent.send_nowait(Progress(self._wiring.dp_rank, stage, done, total))


class AlarmWatch:
    """Ends the process, with the stacks of all its threads on standard error, when a tick takes too long.

    SIGALRM comes from the kernel and the stacks are written by C code in its handler, so it also works while the tick
    thread is stuck inside a library that holds the interpreter. The signal's default action then ends the process,
    which the parent takes like any other unexpected end.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=sys.stderr, all_threads=True, chain=True)

    def arm(self) -> None:
        """See scheduler.loop.TickWatch."""
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s)

    def disarm(self) -> None:
        """See scheduler.loop.TickWatch."""
        signal.setitimer(signal.ITIMER_REAL, 0)


def choose_spin_s(spin_s: float, cpu_share: float) -> float:
    """How long to look for the peer before sleeping: on a shared core, looking would only keep it from running."""
    return spin_s if cpu_share >= 2 else 0.0


def choose_seat(dp_rank: int, processors: Collection[int]) -> system.Seat | None:
    """A processor for this rank to wake on, where there are two but not one for each process that may be awake then."""
    return system.Seat(dp_rank, processors) if 2 <= len(processors) < NUM_AWAKE else None


def exchange_paths(config: ExchangeConfig, spin_s: float) -> tuple[PathState, ...]:
    """Which kind of exchange is in use, for /server_info and the log."""
    off = PathState("gloo_exchange", "off", f'exchange.kind = "{config.kind}"')
    if config.kind == "gloo":
        return PathState("native_exchange", "off", off.why), PathState("gloo_exchange", "active", off.why)
    spins = f"spins {spin_s * 1e6:g} us" if spin_s == config.spin_s else "does not spin: fewer than two CPUs"
    return PathState("native_exchange", "active", f"{off.why}, {spins}"), off


def overlap_path(config: Config, max_drafts: int) -> PathState:
    """Whether a decode step is launched while the one before it runs, for /server_info and the log."""
    if config.scheduler.overlap:
        return PathState("overlap", "active", "scheduler.overlap = true")
    why = "dspark.enabled = true" if max_drafts else "scheduler.overlap = false"
    return PathState("overlap", "off", why)


def weights_path(config: EngineConfig) -> PathState:
    """Whether answers mean anything, for /server_info and the log."""
    if config.weights == "random":
        return PathState("random_weights", "active", 'engine.weights = "random": answers mean nothing')
    return PathState("random_weights", "off", 'engine.weights = "checkpoint"')


def cache_path(config: EngineConfig) -> PathState:
    """How keys are cached, for /server_info and the log."""
    if config.kv_dtype == "fp8":
        return PathState("packed_cache", "active", 'engine.kv_dtype = "fp8"')
    return PathState("packed_cache", "off", f'engine.kv_dtype = "{config.kv_dtype}"')


def peer_path(engine: EngineConfig) -> PathState:
    """Whether rows of experts go straight into the peer's memory, for /server_info and the log."""
    if engine.device == "cpu" or engine.shared_device:
        return PathState("peer_memory", "off", _why_no_device_of_its_own(engine))
    return PathState("peer_memory", "active", f"up to {PEER_WORDS} words at once; more go over NCCL")


def graph_path(engine: EngineConfig, graphs: Graphs | None) -> PathState:
    """Whether decode steps are replayed, for /server_info and the log."""
    if graphs is not None:
        count = sum(graphs.num_shapes.values())
        why = f"{count} tiers, up to {graphs.tiers[-1]} tokens, {sum(graphs.num_bytes.values())} bytes"
        return PathState("decode_graph", "active", why)
    if engine.device == "cpu" or engine.shared_device:
        return PathState("decode_graph", "off", _why_no_device_of_its_own(engine))
    return PathState("decode_graph", "off", "decode_graph.enabled = false")


def _why_no_device_of_its_own(engine: EngineConfig) -> str:
    return 'engine.device = "cpu"' if engine.device == "cpu" else "engine.shared_device = true"


def grammar_paths(config: GrammarConfig) -> tuple[PathState, PathState]:
    """What holds answers to their grammars, for /server_info and the log."""
    if not config.enabled:
        why = "grammar.enabled = false"
        return PathState("grammar_traversal", "off", why), PathState("grammar_store", "off", why)
    store = PathState("grammar_store", "active", config.store.directory)
    if not config.store.enabled:
        store = PathState("grammar_store", "off", "grammar.store.enabled = false")
    return PathState("grammar_traversal", "active", f'grammar.traversal = "{config.traversal}"'), store


def draft_paths(
    config: SpeculationConfig, max_drafts: int, gamma: int, table: CostTable | None
) -> tuple[PathState, PathState]:
    """What drafts and verifies, for /server_info and the log."""
    why = "dspark.enabled = false" if not config.enabled else "dspark.max_verify = 0" if not max_drafts else ""
    if why:
        return PathState("dspark", "off", why), PathState("dspark_compact", "off", why)
    drafts = PathState("dspark", "active", f'up to {max_drafts} of {gamma} drafts, acceptance "{config.acceptance}"')
    if config.verify == "all":
        return drafts, PathState("dspark_compact", "off", 'dspark.verify = "all"')
    costs = "no cost table, so every draft pays"
    if table is not None:
        origin = table.origin
        costs = f"{config.cost_table}, measured on {origin.machine} at {origin.measured} with {origin.checkpoint}"
    return drafts, PathState("dspark_compact", "active", f'dspark.verify = "compact", {costs}')


def open_cost_table(config: Config, gamma: int) -> CostTable | None:
    """Read what steps cost where windows are compact and a file is named. Raises ConfigError."""
    dspark, engine = config.dspark, config.engine
    if dspark.verify == "all" or not dspark.cost_table:
        return None
    path = Path(dspark.cost_table)
    return load_cost_table(path, gamma, config.scheduler.max_rows, engine.device, engine.dtype)


def open_native_exchange(config: Config, wiring: RankWiring, spin_s: float) -> NativeExchange:
    """Attach to the region that the parent made. Raises CapabilityError."""
    shared = wiring.shared
    if shared is None:
        raise InvariantError('exchange.kind is "native", and this process inherited no region')
    attachment = Attachment.open(
        shared.memory,
        wiring.dp_rank,
        session=shared.session,
        digest=config_digest(config),
        timeout_s=config.exchange.startup_timeout_s,
        spin_s=spin_s,
    )
    os.close(shared.memory)  # the mapping stays
    kicks = (shared.kicks[wiring.dp_rank], shared.kicks[1 - wiring.dp_rank])
    return NativeExchange(wiring.dp_rank, attachment, kicks, wiring.peer)


def capture_graphs(
    config: Config, executor: Executor, max_drafts: int, gamma: int, progress: Callable[[str, int, int], None]
) -> None:
    """Capture decode steps together with the peer, where that is on. Raises CapabilityError."""
    tiers = graph_tiers(config, max_drafts)
    if not tiers:
        return
    num_pages = -(-(config.engine.max_context_tokens + gamma + 1) // config.kv.page_tokens)
    limits = ShapeLimits(config.scheduler.max_rows, num_pages, 1 + max_drafts)
    executor.capture(tiers, limits, lambda done, total: progress("graphs", done, total))


def graph_tiers(config: Config, max_drafts: int) -> tuple[int, ...]:
    """Numbers of tokens that decode steps are captured for, ascending; none where graphs are off."""
    if not config.decode_graph.enabled:
        return ()
    return config.decode_graph.tiers or choose_tiers(config.scheduler.max_rows * (1 + max_drafts))


def warm_up_plans(config: Config, num_pages: int, max_drafts: int) -> list[Plan]:
    """The largest prefill and the widest decode step, on memory that nobody uses yet; equal on both ranks."""
    chunk_tokens = config.scheduler.chunk_tokens
    if chunk_tokens is None:
        raise InvariantError("scheduler.chunk_tokens is filled by resolve()")
    length = min(chunk_tokens, config.engine.max_context_tokens - 1)
    pages = range(1, -(-length // config.kv.page_tokens) + 1)
    num_rows = min(config.scheduler.max_rows, num_pages - 1)
    chunk = _warm_up_row(1, (0,) * length, tuple(pages))
    rows = tuple(_warm_up_row(slot, (0,), (slot,)) for slot in range(1, num_rows + 1))
    num_tokens = num_rows * (1 + max_drafts)
    speculation = Speculation(max_drafts, (num_tokens, num_tokens)) if max_drafts else None
    return [
        Plan(StepKind.PREFILL, (chunk,), (SlotStart(1, None, 0),)),
        Plan(StepKind.DECODE, rows, tuple(SlotStart(row.slot, None, 0) for row in rows), speculation=speculation),
    ]


def _warm_up_row(slot: int, ids: tuple[int, ...], pages: tuple[int, ...]) -> PlanRow:
    return PlanRow(
        request_id=f"warm-up-{slot}",
        slot=slot,
        input_ids=ids,
        start=0,
        page_table=pages,
        num_logits=1,
        sampling=SamplingParams(max_tokens=1, seed=slot, top_p=0.9, top_logprobs=1),
        prompt_ids=ids,
        output_ids=(),
    )


def warm_up(executor: Executor, plans: list[Plan], num_passes: int, clock: Callable[[], int]) -> float:
    """Run the plans, as the peer does, and return the longest step of the last pass in seconds."""
    longest_ns = 0
    for _ in range(num_passes):
        longest_ns = 0
        for plan in plans:
            start_ns = clock()
            executor.step(plan, (plan.num_tokens, plan.num_tokens))
            longest_ns = max(longest_ns, clock() - start_ns)
    return longest_ns / 1e9


def require_fresh_snapshots(health: HealthConfig, longest_tick_s: float) -> None:
    """Raise ConfigError if a long tick would make a healthy rank look dead: snapshots come between ticks only."""
    if health.max_age_s < TICK_MARGIN * longest_tick_s:
        raise ConfigError(
            "health.max_age_s",
            health.max_age_s,
            f"the longest warm-up tick took {longest_tick_s:.3f} s; use at least {TICK_MARGIN} times that",
        )


def require_patient_senders(routing: RoutingConfig, longest_tick_s: float) -> None:
    """Raise ConfigError if a long tick would make a healthy rank look stuck: it reads what it is sent between ticks."""
    if routing.send_timeout_s < TICK_MARGIN * longest_tick_s:
        raise ConfigError(
            "routing.send_timeout_s",
            routing.send_timeout_s,
            f"the longest warm-up tick took {longest_tick_s:.3f} s; use at least {TICK_MARGIN} times that",
        )


def freeze_garbage() -> int:
    """Collect once, then take all objects out of later collections; returns their number."""
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


def describe(record: TickRecord) -> dict[str, object]:
    """A tick as a crash report shows it, with names."""
    return {
        "tick": record.tick,
        "votes": [
            {**payload.vote._asdict(), **payload.extra._asdict(), "intent": payload.intent}
            for payload in (record.rank0, record.rank1)
        ],
        "agreement": record.agreement._asdict(),
        "rows": record.rows,
        "settled": record.settled,
    }


def describe_cause(error: Exception) -> str:
    """A failure in one line that a client may read: its class, the code of an exchange, and what it says."""
    code = f" {error.code}" if isinstance(error, ExchangeError) else ""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}{code}: {text[:MAX_CAUSE_CHARS]}"


def is_consequence(error: Exception) -> bool:
    """Whether another process has more to say of this failure: it ended, left, fell silent or failed first."""
    if isinstance(error, ExchangeError):
        return error.code in ("PEER_DEAD", "PEER_LEFT", "PEER_ERROR")
    return isinstance(error, PeerError)


def _all_frames() -> list[FrameType]:
    return list(sys._current_frames().values())


def _refuse_frame(frame: bytes) -> NoReturn:
    raise InvariantError(f"the detokenizer sent {len(frame)} bytes to a rank, which takes none from it")
