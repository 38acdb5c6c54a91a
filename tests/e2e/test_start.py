"""The real server's start: what it says, in which order, and every way to refuse it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.harness import ROOT, Server, Tables, alive, ensure_checkpoint
from tools.streams import Streams


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return ensure_checkpoint()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsparkd", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


def complete(server: Server, prompt: str = "Hello") -> dict[str, object]:
    body = {"model": "nano", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        server.base_url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        result: dict[str, object] = json.load(answer)
        return result


def test_ready_follows_the_start_and_the_stop(checkpoint: Path) -> None:
    """L-16: nobody answers until both ranks are warm, then 200, then 503 or nobody from the stop signal on."""
    with Server() as server:
        seen: list[tuple[int | None, bool]] = []
        done = threading.Event()

        def poll() -> None:
            while not done.is_set():
                stopping = bool(server.events("signal_received"))  # before the status, which may be older than a signal
                seen.append((server.status("/ready"), stopping))
                time.sleep(0.01)

        poller = threading.Thread(target=poll)
        poller.start()
        try:
            server.wait_ready()
            assert complete(server)["object"] == "text_completion"
            assert server.stop() == 0
        finally:
            done.set()
            poller.join()

        before = [status for status, stopping in seen if not stopping]
        assert set(before[: before.index(200)]) == {None}
        assert {status for status, stopping in seen if stopping} <= {503, None}
        ready = server.events("rank_ready")
        assert {fields["dp_rank"] for fields in ready} == {0, 1}
        assert [fields["event"] for fields in server.events()].index("listening") > max(
            number for number, fields in enumerate(server.events()) if fields["event"] == "rank_ready"
        )


def test_on_the_cpu_every_process_is_batch_work_but_ranks_that_sleep_and_the_probe(checkpoint: Path) -> None:
    """A woken parent or detokenizer must not push a rank off its core: the other rank would wait, too.

    A parked rank is other work where processors are few, so that it wakes at once (X-28); a server that was started in
    another class than the usual one stays there. The probe process is idle work: it forks and ends children for every
    new grammar (decisions 14).
    """
    own = os.sched_getscheduler(0)
    expected = os.SCHED_BATCH if own == os.SCHED_OTHER else own
    with Server() as server:
        server.wait_ready()
        children = server.children()
        ranks = [children["rank 0"], children["rank 1"]]
        texts = [server.pid, children["detokenizer"]]
        assert os.sched_getscheduler(children["probe"]) == os.SCHED_IDLE
        assert {os.sched_getscheduler(pid) for pid in texts} == {expected}
        with Streams(server.base_url, 4, 4_000) as streams:
            streams.wait_flowing()
            assert {os.sched_getscheduler(pid) for pid in [*texts, *ranks]} == {expected}
            server.kill()
            streams.outcomes()


def test_a_warm_rank_has_frozen_its_garbage(checkpoint: Path) -> None:
    """L-41: the permanent generation is filled before READY, and exported."""
    with Server() as server:
        server.wait_ready()
        complete(server)
        deadline = time.monotonic() + 30
        while (text := server.get("/metrics")).count("dsparkd_gc_frozen_objects{") < 2:
            assert time.monotonic() < deadline, "frames come each second"
            time.sleep(0.1)

        frozen = [float(line.split()[1]) for line in text.splitlines() if line.startswith("dsparkd_gc_frozen_objects{")]
        assert all(count > 10_000 for count in frozen)


def break_weights(directory: Path) -> str:
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return shard.name


def remove_weights(directory: Path) -> str:
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.unlink()
    return shard.name


def break_config(directory: Path) -> str:
    values = json.loads((directory / "config.json").read_text())
    values["hidden_size"] = -1
    (directory / "config.json").write_text(json.dumps(values))
    return "hidden_size"


def change_geometry(directory: Path) -> str:
    values = json.loads((directory / "config.json").read_text())
    values["moe_intermediate_size"] *= 2
    (directory / "config.json").write_text(json.dumps(values))
    return "layers."


def remove_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json"


@pytest.mark.parametrize(
    "damage",
    [break_weights, remove_weights, break_config, change_geometry, remove_tokenizer],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_checkpoint_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    """L-40: whatever is wrong with the files, exit 78, one error line that names it, and no process is left."""
    directory = tmp_path / "nano"
    shutil.copytree(checkpoint, directory)
    culprit = damage(directory)

    with Server({"engine": {"checkpoint": str(directory)}}) as server:
        assert server.wait_exit(40) == 78

        errors = [str(fields["error"]) for fields in server.events() if fields["level"] == "error"]
        plain = [line for line in server.log_text().splitlines() if line.startswith("dsparkd: ")]
        assert len(errors + plain) == 1, server.log_text()
        assert culprit in (errors + plain)[0]
        assert not [pid for pid in server.pids() if alive(pid)]


@pytest.mark.parametrize(
    ("overrides", "culprit"),
    [
        ({"engine": {"checkpoint": "/nowhere"}}, "/nowhere"),
        ({"kv": {"device_bytes": 4096}}, "kv.device_bytes"),
        ({"kv": {"device_bytes": 48_000_000}}, "kv.device_bytes = 48000000: gives"),
        (
            {"engine": {"max_context_tokens": 16385}},
            "engine.max_context_tokens = 16385: the checkpoint was made for 16384",
        ),
        ({"engine": {"device": "cuda"}}, "engine.device"),
        ({"scheduler": {"chunk_tokens": 100}}, "scheduler.chunk_tokens"),
        ({"nonsense": {"key": 1}}, "nonsense"),
        ({"grammar.store": {"directory": "/etc"}}, "grammar.store: missing privacy of /etc"),
    ],
)
def test_a_wrong_key_is_refused_before_anything_is_forked(checkpoint: Path, overrides: Tables, culprit: str) -> None:
    """L-40, C-01: exit 78 and one line, in a second, with no child."""
    if "device" in overrides.get("engine", {}) and list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has the devices, so the key is right")
    with Server(overrides) as server:
        assert server.wait_exit(10) == 78

        (line,) = server.log_text().splitlines()
        assert line.startswith("dsparkd: ")
        assert culprit in line
        assert server.children() == {}


def test_a_traversal_that_is_not_installed_is_refused_by_both_ranks_and_never_replaced(checkpoint: Path) -> None:
    """D-01, O-11: no released XGrammar has a batched call; exit 78 names the key and what to set instead."""
    with Server({"grammar": {"traversal": "batched"}}) as server:
        assert server.wait_exit(60) == 78

        (error,) = [str(fields["error"]) for fields in server.events("start_failed")]
        assert 'grammar.traversal = "batched"' in error
        assert 'set grammar.traversal = "native"' in error
        assert not [pid for pid in server.pids() if alive(pid)]


def test_without_grammars_there_is_no_probe_process(checkpoint: Path) -> None:
    """`grammar.enabled = false` costs nothing and says so, to operators and to clients."""
    with Server({"grammar": {"enabled": False}}) as server:
        server.wait_ready()
        assert set(server.children()) == {"detokenizer", "rank 0", "rank 1"}
        paths = json.loads(server.get("/server_info"))["ranks"][0]["paths"]
        states = {path["path"]: (path["state"], path["why"]) for path in paths}
        assert states["grammar_traversal"] == ("off", "grammar.enabled = false")
        assert not (server.directory / "grammar").exists()
        assert complete(server)["object"] == "text_completion"
        assert server.stop() == 0


@pytest.mark.parametrize("fault", ["missing", "readable by others"])
def test_a_key_file_that_cannot_be_trusted_is_refused(checkpoint: Path, tmp_path: Path, fault: str) -> None:
    """C-01: server.api_keys_file must be readable, and by its owner alone; check-config says the same one line."""
    keys = tmp_path / "keys"
    if fault != "missing":
        keys.write_text("secret\n", encoding="utf-8")
        keys.chmod(0o644)
    with Server({"server": {"api_keys_file": str(keys)}}) as server:
        assert server.wait_exit(20) == 78

        (line,) = server.log_text().splitlines()
        assert line.startswith("dsparkd: server.api_keys_file = ")
        assert server.children() == {}
        checked = run("check-config", "--config", str(server.config_file))
        assert (checked.returncode, checked.stderr.strip()) == (78, line)


def test_a_taken_port_is_refused(checkpoint: Path) -> None:
    """L-40: another server's port; it keeps it."""
    with socket.create_server(("127.0.0.1", 0)) as taken, Server(port=taken.getsockname()[1]) as server:
        assert server.wait_exit(10) == 78
        assert "server.port" in server.log_text()


def test_health_does_not_depend_on_work_and_work_not_on_health(checkpoint: Path) -> None:
    """L-10, U-09: probes move no request counter and no load, and answer beside a running request."""
    with Server() as server:
        server.wait_ready()
        complete(server)
        time.sleep(1.2)  # the ranks' frames of the request are in

        def work() -> list[str]:
            wanted = (
                "dsparkd_requests_total",
                "dsparkd_prompt_tokens_total",
                "dsparkd_routed",
                "dsparkd_load_requests",
            )
            return [line for line in server.get("/metrics").splitlines() if line.startswith(wanted)]

        before = work()
        codes = [server.status(path) for path in ("/health", "/ready", "/health_scheduler") * 100]
        assert set(codes) == {200}
        assert work() == before


def test_the_command_line_says_what_it_is() -> None:
    """Three commands: serve, check-config, --version."""
    version = run("--version")
    assert (version.returncode, version.stdout.split()[0]) == (0, "dsparkd")
    assert run().returncode == 2
    assert "--config" in run().stderr
    assert run("frobnicate", "--config", "x").returncode == 2


def test_check_config_prints_the_tree_and_what_the_ranks_then_hold(checkpoint: Path, tmp_path: Path) -> None:
    """The memory is computed before any weight is read, and is what the ranks report later, byte for byte."""
    with Server() as server:
        server.wait_ready()
        (ready, _) = server.events("rank_ready")
        checked = run("check-config", "--config", str(server.config_file))
    assert checked.returncode == 0
    assert "chunk_tokens = 1024" in checked.stdout, "resolved, not as written"
    weights = [line.split()[-2] for line in checked.stdout.splitlines() if line.startswith("  weights")]
    assert sum(map(float, weights)) == pytest.approx(int(str(ready["weight_bytes"])) / (1 << 20), abs=0.2)
    pools = [
        line.split()[-2] for line in checked.stdout.splitlines() if line.startswith(("  kv", "  rings", "  bound"))
    ]
    kv_bytes = ready["kv_bytes"]
    assert isinstance(kv_bytes, dict)
    assert sum(map(float, pools)) == pytest.approx(sum(kv_bytes.values()) / (1 << 20), abs=0.2)


def test_random_weights_need_no_files_and_say_everywhere_that_answers_mean_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    """An operator who left the key in has to see it in the log, in /server_info and in /metrics."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(checkpoint / name, tmp_path)
    with Server({"engine": {"checkpoint": str(tmp_path), "weights": "random"}}) as server:
        server.wait_ready()
        warnings = server.events("weights_are_random")
        assert [(line["level"], line["dp_rank"]) for line in warnings] in (
            [("warning", 0), ("warning", 1)],
            [("warning", 1), ("warning", 0)],
        )
        for rank in json.loads(server.get("/server_info"))["ranks"]:
            (path,) = [path for path in rank["paths"] if path["path"] == "random_weights"]
            assert path["state"] == "active"
            assert "mean nothing" in path["why"]
        assert 'dsparkd_path_active{dp_rank="1",path="random_weights"} 1.0' in server.get("/metrics")
        body = {"model": tmp_path.name, "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
        request = urllib.request.Request(
            server.base_url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        assert server.stop() == 0


def test_check_config_refuses_what_the_server_would_refuse(tmp_path: Path) -> None:
    """One line on standard error, exit 78, nothing else."""
    file = tmp_path / "bad.toml"
    file.write_text("[engine]\ncheckpoint = 'x'\n", encoding="utf-8")

    done = run("check-config", "--config", str(file))

    assert (done.returncode, done.stdout) == (78, "")
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_in_a_terminal_stops_the_server_once(checkpoint: Path) -> None:
    """SIGINT reaches the whole process group there; only the parent acts on it."""
    with Server() as server:
        server.wait_ready()
        for pid in server.pids():
            if alive(pid):
                os.kill(pid, signal.SIGINT)

        assert server.wait_exit(20) == 0
        assert all(end["exit_code"] == 0 for end in server.events("child_ended"))
