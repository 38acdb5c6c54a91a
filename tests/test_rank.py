"""Two real rank processes over a small checkpoint: start, serve, fail and leave as the supervisor will see it."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dsparkd import log, rank
from dsparkd.config import (
    Config,
    EngineConfig,
    ExchangeConfig,
    GrammarConfig,
    Hardware,
    HealthConfig,
    KVConfig,
    RoutingConfig,
    SchedulerConfig,
    ShutdownConfig,
    SpeculationConfig,
    WatchdogConfig,
    resolve,
)
from dsparkd.errors import ConfigError, ExchangeError, InvariantError, PeerError
from dsparkd.executor.costs import CostTable, Origin
from dsparkd.executor.plan import Speculation, StepKind
from dsparkd.ipc.board import BoardReader, open_board
from dsparkd.ipc.channel import Channel
from dsparkd.ipc.wiring import RankWiring, SharedRegion
from dsparkd.messages import (
    Abort,
    Admitted,
    CrashReport,
    Farewell,
    Message,
    MetricsFrame,
    Progress,
    RankReady,
    RoutedBatch,
    SamplingParams,
    Shutdown,
    StartFailed,
    TokenDelta,
    TokenDeltas,
    TokenizedRequest,
    decode_from_rank,
    decode_to_detokenizer,
)
from dsparkd.native.exchange import stop_region
from dsparkd.supervisor import create_board, open_exchange
from tools.random_checkpoint import write_nano

ROOT = Path(rank.__file__).parents[1]
PATIENCE_S = 60.0

# What the supervisor does after its fork, without the fork: pytest's own process has threads by now.
CHILD = """
import json, socket, sys
import msgspec
from dsparkd import log
from dsparkd.config import Config
from dsparkd.ipc.wiring import RankWiring, SharedRegion
dp_rank, *fds = map(int, sys.argv[1:5])
config = msgspec.json.decode(sys.argv[5], type=Config)
board, memory, session, *kicks = json.loads(sys.argv[7])
log.configure("rank", dp_rank, "json", "info")
from dsparkd import rank
exec(sys.argv[6])
shared = SharedRegion(memory, session, tuple(kicks)) if kicks else None
code = rank.main(config, RankWiring(dp_rank, *(socket.socket(fileno=fd) for fd in fds), shared=shared, board=board))
sys.stderr.flush()
import os
os._exit(code)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A cpu server of the shipped geometry with random weights."""
    directory = tmp_path_factory.mktemp("rank")
    write_nano(directory / "checkpoint", seed=5)
    engine = EngineConfig(
        checkpoint=str(directory / "checkpoint"),
        device="cpu",
        dtype="float32",
        max_context_tokens=2048,
        crash_dir=str(directory / "crash"),
    )
    whole = Config(
        engine=engine,
        kv=KVConfig(device_bytes=64 << 20),
        scheduler=SchedulerConfig(max_rows=4, chunk_tokens=256),
        grammar=GrammarConfig(enabled=False),  # tests/e2e has them
    )
    return resolve(whole, Hardware(num_cuda_devices=0))


class Process:
    """One rank process and the parent's ends of its channels."""

    def __init__(
        self, config: Config, dp_rank: int, peer: socket.socket, patch: str, shared: SharedRegion | None, board: int
    ) -> None:
        parent, parent_there = socket.socketpair()
        text, text_there = socket.socketpair()
        ends = (parent_there, text_there, peer)
        numbers = [end.fileno() for end in ends]
        words = [board, shared.memory, shared.session, *shared.kicks] if shared is not None else [board, -1, 0]
        arguments = [str(dp_rank), *map(str, numbers), msgspec.json.encode(config).decode(), patch, json.dumps(words)]
        inherited = [*numbers, board, *(shared.descriptors() if shared is not None else ())]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments], pass_fds=inherited, cwd=ROOT, stderr=subprocess.PIPE
        )
        for end in ends:
            end.close()
        options = {"send_timeout_s": 5.0, "max_pending_bytes": 1 << 26}
        self.parent = Channel(parent, decode_from_rank, **options)
        self.detokenizer = Channel(text, decode_to_detokenizer, **options)
        self.told: list[Message] = []
        self.deltas: list[TokenDelta] = []
        self.farewells: list[str] = []

    def collect(self) -> None:
        """Read what has arrived; the end of a channel is not an error here."""
        for channel in (self.parent, self.detokenizer):
            try:
                messages = channel.receive_nowait()
            except PeerError:
                continue
            for message in messages:
                if isinstance(message, TokenDeltas):
                    self.deltas += message.deltas
                elif isinstance(message, Farewell) and channel is self.detokenizer:
                    self.farewells.append(message.source)
                else:
                    self.told.append(message)

    def last(self, kind: type[Message]) -> Message | None:
        """The newest message of a kind."""
        return next((message for message in reversed(self.told) if type(message) is kind), None)

    def end(self) -> tuple[int, list[dict[str, object]], str]:
        """Wait for the end: exit code, log lines, and whatever else was on standard error."""
        _, stderr = self.process.communicate(timeout=PATIENCE_S)
        lines, rest = [], []
        for line in stderr.decode().splitlines():
            if line.startswith("{"):
                lines.append(json.loads(line))
            else:
                rest.append(line)
        return self.process.returncode, lines, "\n".join(rest)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.parent.close()
        self.detokenizer.close()


class Server:
    """Two rank processes. patch: Python that each child runs before its main."""

    def __init__(self, config: Config, patch: str = "") -> None:
        peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.shared = open_exchange(config)
        self._board = create_board()
        self.board = BoardReader(open_board(self._board))
        self.ranks = tuple(
            Process(config, dp_rank, peers[dp_rank], patch, self.shared, self._board) for dp_rank in (0, 1)
        )

    def parked(self) -> bool:
        """Whether both ranks say that they sleep."""
        found = [self.board.read(dp_rank) for dp_rank in (0, 1)]
        return all(snapshot is not None and snapshot.parked for snapshot in found)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, [each.told[-3:] for each in self.ranks]
            for each in self.ranks:
                each.collect()
            time.sleep(0.002)

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: all(each.last(RankReady) or each.last(StartFailed) for each in self.ranks))
        assert all(each.last(RankReady) for each in self.ranks), [each.last(StartFailed) for each in self.ranks]

    def close(self) -> None:
        for each in self.ranks:
            each.close()
        for number in (self._board, *(self.shared.descriptors() if self.shared is not None else ())):
            os.close(number)


def request(request_id: str, length: int, max_tokens: int, **sampling: object) -> TokenizedRequest:
    params = msgspec.convert({"max_tokens": max_tokens, "seed": 3, "ignore_eos": True, **sampling}, SamplingParams)
    now = time.monotonic_ns()
    return TokenizedRequest(
        request_id=request_id,
        prompt_ids=tuple(5 + (index * 7) % 200 for index in range(length)),
        sampling=params,
        received_ns=now,
        encoded_ns=now,
        tokenized_ns=now,
        dispatched_ns=now,
    )


@pytest.fixture
def serve(config: Config) -> Iterator[Callable[..., Server]]:
    started = []

    def start(patch: str = "", **changes: object) -> Server:
        server = Server(msgspec.structs.replace(config, **changes), patch)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.mark.parametrize("kind", ["native", "gloo"])
def test_ranks_start_serve_and_leave_together(serve: Callable[..., Server], kind: str) -> None:
    """R-09, L-33, L-41, X-27, M-06: one life of the pair, from the first progress message to exit code 0.

    Warm equals cold, and a request gives the same ids on either rank.
    """
    server = serve(exchange=msgspec.convert({"kind": kind}, ExchangeConfig))
    server.wait_until_ready()
    other = {"native": "gloo", "gloo": "native"}[kind]
    for dp_rank, each in enumerate(server.ranks):
        ready = each.last(RankReady)
        assert isinstance(ready, RankReady)
        assert ready.gc_frozen_objects > 0
        assert ready.longest_tick_s > 0
        states = {path.path: path.state for path in ready.paths}
        assert (states[f"{kind}_exchange"], states[f"{other}_exchange"]) == ("active", "off")
        stages = [message.stage for message in each.told if isinstance(message, Progress)]
        assert list(dict.fromkeys(stages)) == ["groups", "weights", "pools", "warm_up"]
        batch = (request("cold", 520, 8), request("greedy", 40, 8, temperature=0.0))
        each.parent.send_nowait(RoutedBatch(dp_rank, 1, batch))
    server.wait_for(lambda: all(sum(delta.finish is not None for delta in each.deltas) == 2 for each in server.ranks))
    server.ranks[0].parent.send_nowait(RoutedBatch(0, 2, (request("warm", 520, 8),)))
    server.wait_for(lambda: sum(delta.finish is not None for delta in server.ranks[0].deltas) == 3)
    outputs = [
        {
            name: tuple(token for delta in each.deltas if delta.request_id == name for token in delta.token_ids)
            for name in ("cold", "greedy", "warm")
        }
        for each in server.ranks
    ]
    assert len(outputs[0]["cold"]) == 8
    assert outputs[0]["cold"] == outputs[1]["cold"] == outputs[0]["warm"]
    assert outputs[0]["greedy"] == outputs[1]["greedy"]
    finish = server.ranks[0].deltas[-1].finish
    assert finish is not None
    assert finish.cached_tokens == 512

    server.wait_for(server.parked)
    server.ranks[1].parent.send_nowait(Abort("nobody"))
    server.ranks[0].parent.send_nowait(Shutdown())
    server.ranks[1].parent.send_nowait(Shutdown())
    server.wait_for(lambda: all(each.process.poll() is not None for each in server.ranks))

    ticks = set()
    for dp_rank, each in enumerate(server.ranks):
        each.collect()
        code, lines, noise = each.end()
        assert (code, noise) == (0, "")
        events = [line["event"] for line in lines]
        assert events[0] == "rank_ready"
        assert events[-2:] == ["rank_closed_pools", "rank_stopped"]
        assert not [line for line in lines if line["level"] in ("warning", "error")]
        assert each.farewells == [f"rank{dp_rank}"]
        assert isinstance(each.told[-1], Farewell)
        frame = each.last(MetricsFrame)
        assert isinstance(frame, MetricsFrame)
        assert frame.values[f"dsparkd_gc_frozen_objects\0{dp_rank}"] > 0
        assert frame.values[f"dsparkd_path_active\0{dp_rank}\0mixed_step"] == 1
        assert frame.values[f"dsparkd_requests_total\0{dp_rank}\0length"] == 3 - dp_rank
        ticks.add(frame.values[f"dsparkd_exchange_sequence\0{dp_rank}\0plan"])
        finished = [line for line in lines if line["event"] == "request_finished"]
        for line in finished:
            names = ("received", "encoded", "tokenized", "dispatched", "delivered", "first_planned")
            times = [line[f"{name}_ns"] for name in names]
            assert all(times)
            assert times == sorted(times)
    assert len(ticks) == 1


@pytest.mark.parametrize("kind", ["native", "gloo"])
def test_a_killed_peer_fails_the_other_rank_with_a_report(
    serve: Callable[..., Server], config: Config, kind: str
) -> None:
    """R38, L-38: exit 70 in seconds, with the last plans of both ranks in its report to the parent."""
    server = serve(exchange=msgspec.convert({"kind": kind}, ExchangeConfig))
    server.wait_until_ready()
    server.ranks[0].parent.send_nowait(RoutedBatch(0, 1, (request("long", 30, 2000),)))
    server.wait_for(lambda: len(server.ranks[0].deltas) > 5)
    server.ranks[1].process.kill()
    server.wait_for(lambda: server.ranks[0].last(CrashReport) is not None)
    code, lines, _ = server.ranks[0].end()

    assert code == 70
    assert [line["event"] for line in lines if line["level"] == "error"] == ["rank_failed"]
    said = server.ranks[0].last(CrashReport)
    assert isinstance(said, CrashReport)
    report = json.loads(said.report)
    assert report["requests"] == {"grammar_wait": 0, "waiting": 0, "prefill": 0, "decode": 1}
    assert 1 <= len(report["ticks"]) <= 256
    assert report["ticks"][-1]["rows"][0]["request_id"] == "long"
    assert [vote["tick"] for vote in report["ticks"][-1]["votes"]] == [report["ticks"][-1]["tick"]] * 2
    assert "PeerError" in report["error"]
    assert report["stacks"]


def test_a_hung_tick_shows_all_stacks_and_ends_the_rank(serve: Callable[..., Server]) -> None:
    """L-32: blocked while holding the interpreter, where no Python code could react; the other rank fails too."""
    patch = """
import ctypes, dsparkd.executor.executor as module
def hang(self, plan, counts):
    if plan.rows and plan.rows[0].request_id == "hang":
        ctypes.PyDLL(None).sleep(60)
    return launch(self, plan, counts)
launch, module.Executor.launch = module.Executor.launch, hang
"""
    watchdog = msgspec.convert({"tick_timeout_s": 1.5}, WatchdogConfig)
    exchange = msgspec.convert({"timeout_s": 1.0}, ExchangeConfig)
    server = serve(patch, watchdog=watchdog, exchange=exchange)
    server.wait_until_ready()
    server.ranks[0].parent.send_nowait(RoutedBatch(0, 1, (request("hang", 5, 2),)))
    code, _, noise = server.ranks[0].end()
    assert code == -signal.SIGALRM
    assert "most recent call first" in noise
    assert "in hang" in noise
    assert server.ranks[1].end()[0] == 70


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv": KVConfig(device_bytes=1 << 20)}, "kv.device_bytes"),
        ({"health": HealthConfig(max_age_s=0.31, heartbeat_s=0.1)}, "health.max_age_s"),
    ],
)
def test_a_start_failure_names_the_key_and_exits_78(
    serve: Callable[..., Server], changes: dict[str, object], expected: str
) -> None:
    """L-15, L-40: the parent hears why nothing will listen; exit 78 is not restarted."""
    slow = """
import dsparkd.rank, itertools
counter = itertools.count()
dsparkd.rank.time.monotonic_ns = lambda: next(counter) * 500_000_000
"""
    server = serve(slow, **changes)
    server.wait_for(lambda: any(each.last(StartFailed) for each in server.ranks))
    told = next(each for each in server.ranks if each.last(StartFailed))
    failure = told.last(StartFailed)
    assert isinstance(failure, StartFailed)
    assert failure.exit_code == 78
    assert expected in failure.error
    assert told.end()[0] == 78


def test_snapshots_must_be_able_to_be_fresh() -> None:
    """L-15: max_age_s below three times the longest warm-up tick is refused with both numbers."""
    rank.require_fresh_snapshots(HealthConfig(max_age_s=30), 10.0)
    with pytest.raises(ConfigError, match=r"30(\.0)?: the longest warm-up tick took 10\.100 s"):
        rank.require_fresh_snapshots(HealthConfig(max_age_s=30.0), 10.1)


def test_frozen_objects_are_counted_and_spared() -> None:
    """L-41: what lives for ever is out of later collections; the count is what the gauge shows."""
    keep = [[] for _ in range(1_000)]
    try:
        assert rank.freeze_garbage() >= 1_000
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert len(keep) == 1_000


def test_warm_up_runs_the_largest_steps_on_valid_memory(config: Config) -> None:
    """L-15: the longest tick is measured on the largest prefill and the widest decode; both ranks run the same."""
    chunk, decode = rank.warm_up_plans(config, num_pages=40, max_drafts=0)
    assert (chunk.kind, chunk.num_tokens) == (StepKind.PREFILL, 256)
    assert (decode.kind, decode.num_tokens) == (StepKind.DECODE, 4)
    for plan in (chunk, decode):
        assert {start.slot for start in plan.slot_starts} == {row.slot for row in plan.rows}
        assert all(0 < page < 40 for row in plan.rows for page in row.page_table)

    clock = iter([0, 5, 10, 2_000_000_010]).__next__
    steps = []
    fake = SimpleNamespace(step=lambda plan, counts: steps.append((plan, counts)))
    assert rank.warm_up(fake, [chunk, decode], 1, clock) == 2.0
    assert steps == [(chunk, (256, 256)), (decode, (4, 4))]


def test_what_the_first_pass_compiles_is_no_tick() -> None:
    """L-15: a start with an empty cache of kernels would ask for time-outs of minutes, and never come up again."""
    clock = iter([0, 60_000_000_000, 60_000_000_000, 60_500_000_000]).__next__
    plan = SimpleNamespace(num_tokens=3)
    assert rank.warm_up(SimpleNamespace(step=lambda plan, counts: None), [plan], 2, clock) == 0.5
    assert rank.WARM_UP_PASSES == {"cpu": 1, "cuda": 2}


@pytest.fixture
def pairs() -> list[tuple[socket.socket, socket.socket]]:
    """A rank's ends and their far ones: parent, detokenizer, peer."""
    return [socket.socketpair() for _ in range(3)]


@pytest.fixture
def far(pairs: list[tuple[socket.socket, socket.socket]]) -> socket.socket:
    """What the parent would read."""
    return pairs[0][1]


@pytest.fixture
def built(config: Config, pairs: list[tuple[socket.socket, socket.socket]]) -> Iterator[rank.Rank]:
    """A rank that has started nothing."""
    log.configure("rank", 0, "json", "info")
    yield rank.Rank(config, RankWiring(0, *(pair[0] for pair in pairs), board=-1))
    for left, right in pairs:
        left.close()
        right.close()


def test_a_missing_peer_at_the_last_barrier_is_named_and_no_group_destroyed(
    built: rank.Rank, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """L-37: destroying groups whose other side has gone may hang, so the process leaves with exit 70."""
    calls = []

    def refuse(timeout_s: float) -> None:
        raise PeerError(f"rank 1 did not reach the barrier in {timeout_s}")

    built._executor = SimpleNamespace(close=lambda: calls.append("executor"))
    built._groups = SimpleNamespace(barrier=refuse, close=lambda: calls.append("groups"))
    assert built.leave() == 70
    assert calls == ["executor"]

    built._groups = SimpleNamespace(barrier=calls.append, close=lambda: calls.append("groups"))
    assert built.leave() == 0
    assert calls[1:] == ["executor", 10.0, "groups"]


def test_a_parent_that_has_gone_is_no_second_failure(
    built: rank.Rank, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """L-39: who would read the report ended first."""
    built._wiring.parent.shutdown(socket.SHUT_RDWR)
    built.tell_crash(PeerError("x"))
    assert b"parent_lost" in capfdbinary.readouterr().err


def test_the_code_of_a_failed_exchange_is_counted_and_told_at_once(built: rank.Rank, far: socket.socket) -> None:
    """M-02, X-31: the last frame of a failing rank carries it; no later second would."""
    built.tell_crash(ExchangeError("dsx: rank 1 ended", code="PEER_DEAD", channel=0, sequence=7))
    told = Channel(far, decode_from_rank, send_timeout_s=5.0, max_pending_bytes=1 << 20).receive_nowait()
    frame, report = told
    assert isinstance(frame, MetricsFrame)
    assert frame.values["dsparkd_exchange_errors_total\x000\x00PEER_DEAD"] == 1
    assert isinstance(report, CrashReport)
    assert "rank 1 ended" in json.loads(report.report)["error"]
    assert report.cause == "ExchangeError PEER_DEAD: dsx: rank 1 ended"
    assert report.is_consequence


@pytest.mark.parametrize(
    ("error", "cause", "blames_another"),
    [
        (InvariantError("agreed on 3 tokens,\n planned 2"), "InvariantError: agreed on 3 tokens, planned 2", False),
        (ZeroDivisionError(), "ZeroDivisionError: no message", False),
        (RuntimeError("x" * 1000), "RuntimeError: " + "x" * 300, False),
        (PeerError("the peer rank closed its socket"), "PeerError: the peer rank closed its socket", True),
        (ExchangeError("dsx: late", code="TIMEOUT", channel=0, sequence=7), "ExchangeError TIMEOUT: dsx: late", False),
        (ExchangeError("dsx: it", code="PEER_ERROR", channel=0, sequence=7), "ExchangeError PEER_ERROR: dsx: it", True),
    ],
)
def test_a_cause_is_one_short_line_that_says_whether_another_process_failed_first(
    error: Exception, cause: str, blames_another: bool
) -> None:
    """L-38: every client gets it, and the parent chooses between two of them."""
    assert rank.describe_cause(error) == cause
    assert rank.is_consequence(error) is blames_another


def test_senders_must_be_able_to_wait_for_a_tick() -> None:
    """routing.send_timeout_s below three times the longest warm-up tick would take a busy rank for a stuck one."""
    rank.require_patient_senders(RoutingConfig(send_timeout_s=5), 1.6)
    with pytest.raises(ConfigError, match=r"routing\.send_timeout_s = 5(\.0)?: the longest warm-up tick took 1\.700 s"):
        rank.require_patient_senders(RoutingConfig(send_timeout_s=5), 1.7)


def test_an_admitted_request_is_answered_before_its_first_token(serve: Callable[..., Server]) -> None:
    """decisions.md 15: the parent sends the status line only after Admitted."""
    server = serve()
    server.wait_until_ready()
    server.ranks[1].parent.send_nowait(RoutedBatch(1, 1, (request("x", 2048, 4),)))
    server.ranks[1].parent.send_nowait(RoutedBatch(1, 2, (request("y", 20, 1),)))
    server.wait_for(lambda: any(delta.finish for delta in server.ranks[1].deltas))
    answers = [message for message in server.ranks[1].told if not isinstance(message, MetricsFrame)]
    assert [type(answer).__name__ for answer in answers[-2:]] == ["Refused", "Admitted"]
    assert isinstance(answers[-1], Admitted)
    assert server.ranks[1].deltas[-1].request_id == "y"


@pytest.mark.parametrize(
    ("share", "spin_s", "why"),
    [
        (2.0, 20e-6, "spins 20 us"),
        (1.99, 0.0, "does not spin: fewer than two CPUs"),
        (1.0, 0.0, "does not spin: fewer than two CPUs"),
    ],
)
def test_a_rank_without_two_cpus_does_not_spin(share: float, spin_s: float, why: str) -> None:
    """X-19: looking for the peer on a core that the peer needs only delays it; /server_info says so."""
    config = ExchangeConfig()
    assert rank.choose_spin_s(config.spin_s, share) == spin_s
    native, gloo = rank.exchange_paths(config, spin_s)
    assert (native.path, native.state, native.why) == ("native_exchange", "active", f'exchange.kind = "native", {why}')
    assert (gloo.path, gloo.state) == ("gloo_exchange", "off")


def test_an_off_spin_is_not_taken_for_a_narrow_machine() -> None:
    """X-19: spin_s = 0 is the operator's choice."""
    native, _ = rank.exchange_paths(ExchangeConfig(spin_s=0.0), 0.0)
    assert native.why.endswith("spins 0 us")


def test_a_rank_that_waits_alone_leaves_when_the_parent_ends_all_waits(serve: Callable[..., Server]) -> None:
    """X-24: its peer is stopped, no tick ends, and no signal handler could run; the region's stop word reaches it.

    It says farewell like in any stop, and goes without its peer after the barrier's deadline.
    """
    shutdown = msgspec.convert({"barrier_timeout_s": 0.5}, ShutdownConfig)
    server = serve(shutdown=shutdown)
    server.wait_until_ready()
    server.wait_for(server.parked)
    assert server.shared is not None
    server.ranks[1].process.send_signal(signal.SIGSTOP)
    server.ranks[0].parent.send_nowait(RoutedBatch(0, 1, (request("alone", 30, 5),)))
    rank_0_waits = 0x104
    server.wait_for(lambda: os.pread(server.shared.memory, 4, rank_0_waits) == b"\1\0\0\0")
    stop_region(server.shared.memory)
    code, lines, _ = server.ranks[0].end()
    server.ranks[1].process.kill()
    assert code == 70
    assert [line["event"] for line in lines if line["level"] == "error"] == ["teardown_barrier_missed"]
    assert not server.ranks[0].last(StartFailed)


@pytest.mark.parametrize(("processors", "has_seat"), [(1, False), (2, True), (3, True), (4, False), (32, False)])
def test_a_rank_has_a_seat_where_processors_are_few(processors: int, has_seat: bool) -> None:
    """X-28: with one each, whoever wakes finds its own; on a single one there is nothing to choose."""
    assert (rank.choose_seat(1, range(processors)) is not None) is has_seat


def test_m06_every_way_of_drafting_says_why() -> None:
    """M-06: on, off and by which costs; /server_info and the log show it."""
    origin = Origin(machine="lab", device="cpu", dtype="float32", checkpoint="nano", measured="2026-11-30T00:00:00Z")
    one = ((1.0, 1.0), (1.0, 1.0))
    table = CostTable(version=1, origin=origin, rows=(1, 2), widths=(1, 6), verify_s=one, draft_s=(1.0, 1.0))
    costs = "conf/costs.json, measured on lab at 2026-11-30T00:00:00Z with nano"
    compact = SpeculationConfig(enabled=True, verify="compact", cost_table="conf/costs.json")
    cases = [
        (SpeculationConfig(), 0, None, ("off", "off"), ("dspark.enabled = false",)),
        (SpeculationConfig(enabled=True, max_verify=0), 0, None, ("off", "off"), ("dspark.max_verify = 0",)),
        (SpeculationConfig(enabled=True), 3, None, ("active", "off"), ("up to 3 of 5 drafts", '"coupled"', '= "all"')),
        (SpeculationConfig(enabled=True, acceptance="rejection"), 5, None, ("active", "off"), ('"rejection"',)),
        (compact, 5, None, ("active", "active"), ("every draft pays", '= "compact"')),
        (compact, 5, table, ("active", "active"), ("up to 5 of 5 drafts", '= "compact"', costs)),
    ]
    for config, most, measured, states, words in cases:
        paths = rank.draft_paths(config, most, 5, measured)
        assert [path.path for path in paths] == ["dspark", "dspark_compact"]
        assert tuple(path.state for path in paths) == states
        assert all(word in paths[0].why + paths[1].why for word in words)


def test_m06_graphs_say_why_they_are_off() -> None:
    """M-06: the device, or the operator."""
    cpu = EngineConfig(checkpoint="/c", device="cpu")
    shared = EngineConfig(checkpoint="/c", shared_device=True)
    for engine, why in (
        (cpu, 'engine.device = "cpu"'),
        (shared, "engine.shared_device = true"),
        (EngineConfig(checkpoint="/c"), "decode_graph.enabled = false"),
    ):
        path = rank.graph_path(engine, None)
        assert (path.path, path.state, path.why) == ("decode_graph", "off", why)


def test_m06_overlap_says_why_it_is_off() -> None:
    """M-06: drafts, or the operator; resolve() has decided by the device."""
    engine, kv = EngineConfig(checkpoint="/c", device="cpu"), KVConfig(device_bytes=1)
    for overlap, max_drafts, state, why in (
        (True, 0, "active", "scheduler.overlap = true"),
        (False, 0, "off", "scheduler.overlap = false"),
        (False, 5, "off", "dspark.enabled = true"),
    ):
        config = Config(engine=engine, kv=kv, scheduler=SchedulerConfig(overlap=overlap))
        path = rank.overlap_path(config, max_drafts)
        assert (path.path, path.state, path.why) == ("overlap", state, why)


def test_m06_weights_say_whether_answers_mean_anything() -> None:
    """M-06: figures are taken with weights that an operator must never serve with."""
    real = rank.weights_path(EngineConfig(checkpoint="/c"))
    assert (real.path, real.state) == ("random_weights", "off")
    noise = rank.weights_path(EngineConfig(checkpoint="/c", weights="random"))
    assert (noise.path, noise.state) == ("random_weights", "active")
    assert "mean nothing" in noise.why


def test_m06_a_packed_cache_is_said() -> None:
    """M-06: its ids are not those of a plain one."""
    for kv_dtype, state in (("model", "off"), ("fp8", "active")):
        engine = msgspec.convert({"checkpoint": "/c", "kv_dtype": kv_dtype}, EngineConfig)
        path = rank.cache_path(engine)
        assert (path.path, path.state, path.why) == ("packed_cache", state, f'engine.kv_dtype = "{kv_dtype}"')


def test_m06_stores_into_the_peers_memory_are_said() -> None:
    """M-06: two devices are needed for them; where they cannot be had, the start fails instead."""
    for settings, state, why in (
        ({"device": "cuda"}, "active", "up to 16777216 words at once; more go over NCCL"),
        ({"device": "cuda", "shared_device": True}, "off", "engine.shared_device = true"),
        ({"device": "cpu"}, "off", 'engine.device = "cpu"'),
    ):
        path = rank.peer_path(msgspec.convert({"checkpoint": "/c", **settings}, EngineConfig))
        assert (path.path, path.state, path.why) == ("peer_memory", state, why)


def test_a_warm_up_drafts_where_the_server_does(config: Config) -> None:
    """L-15: the longest tick is that of the widest step."""
    plans = rank.warm_up_plans(config, num_pages=40, max_drafts=5)
    rows = len(plans[1].rows)
    assert plans[1].speculation == Speculation(5, (6 * rows, 6 * rows))
    assert plans[0].speculation is None
