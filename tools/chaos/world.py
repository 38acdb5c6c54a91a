"""The server under chaos as a service manager would run it: one configuration and port, a start after each end."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tools.chaos.client import Answer, Job, judge
from tools.harness import ROOT, Server, Tables, alive
from tools.traces import Traces

EXCHANGE_TIMEOUT_S = 10.0
LOG_LEVELS_OF_A_FAILURE = ("error",)
READY_TIMEOUT_S = 120.0
PROBE_TIMEOUT_S = 60.0

# Waits short enough that every one of them ends within an event; a busy machine needs more than the defaults of others.
TABLES: Tables = {
    "exchange": {"timeout_s": EXCHANGE_TIMEOUT_S},
    "watchdog": {"tick_timeout_s": 25.0},
    "health": {"max_age_s": 60.0},
    "shutdown": {"drain_timeout_s": 3.0, "barrier_timeout_s": 3.0, "exit_timeout_s": 20.0},
    # Small ticks: a busy machine takes seconds for the largest one, and the start measures it.
    "scheduler": {"max_rows": 8, "chunk_tokens": 256},
    "engine": {"max_context_tokens": 2048},
}


def post(port: int, body: Mapping[str, object], timeout_s: float) -> Answer:
    """Ask for one answer that is not streamed. Raises OSError."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    answer = Answer()
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        answer.status = response.status
        answer.take(json.loads(response.read()))
        answer.complete = True
    return answer


class World:
    """The server's current life and what its lives share. run_directory: where it writes everything but its log."""

    def __init__(self, port: int, run_directory: Path, base: Path) -> None:
        self.port = port
        self.run_directory = run_directory
        self._base = base
        self._tables: Tables = {
            **TABLES,
            "server": {"port": port},
            "engine": {**TABLES["engine"], "crash_dir": str(run_directory / "crash")},
            "grammar.store": {"directory": str(run_directory / "grammar")},
        }
        self._traces = Traces()
        self.server = self._start()
        self.lives = 1

    def _start(self) -> Server:
        environment = self._traces.environment(self.run_directory / "tmp")
        return Server(self._tables, environment=environment, base=self._base, port=self.port)

    def start_again(self) -> None:
        """Start the next life on the same configuration."""
        self.server.__exit__(None, None, None)
        self.server = self._start()
        self.lives += 1

    def end(self) -> None:
        """End whatever is left of the last life."""
        self.server.__exit__(None, None, None)

    def has_exited(self) -> bool:
        """Whether the parent has ended."""
        return self.server.process.poll() is not None

    def child(self, name: str) -> int:
        """Return the pid of a child that runs. Raises LookupError."""
        pid = self.server.children().get(name)
        if pid is None or not alive(pid):
            raise LookupError(f"{name} does not run")
        return pid

    def children(self) -> list[str]:
        """Names of the children that run, in the order of their start."""
        return [name for name, pid in self.server.children().items() if alive(pid)]

    def left(self) -> list[str]:
        """What the life that has ended left on the machine."""
        return self._traces.left(self.port, self.run_directory)

    def error_lines(self) -> list[str]:
        """Events of the parent's error lines in this life."""
        errors = [fields for fields in self.server.events() if fields.get("level") in LOG_LEVELS_OF_A_FAILURE]
        return [str(fields["event"]) for fields in errors if fields.get("role") == "parent"]

    def unhealthy(self, probes: list[Job]) -> str:
        """Why the server is not well; empty when it is: both probes say yes and both ranks answer rightly."""
        for path in ("/ready", "/health_scheduler"):
            status = self.server.status(path)
            if status != 200:
                return f"{path} answers {status}"
        for dp_rank, job in enumerate(probes):
            try:
                answer = post(self.port, {**job.body, "routed_dp_rank": dp_rank}, PROBE_TIMEOUT_S)
            except OSError as error:
                return f"rank {dp_rank} does not answer a plain request ({error})"
            verdict, detail = judge(job, answer)
            if verdict != "finished":
                return f"rank {dp_rank}: {verdict} {detail}"
        return ""

    def held(self) -> list[str]:
        """What the ranks still hold although no client waits; takes the seconds that metrics need to arrive."""
        deadline = time.monotonic() + 5
        while (found := self._held_now()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _held_now(self) -> list[str]:
        found = []
        for line in self.server.get("/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            watched = name.startswith(("dsparkd_scheduler_requests{", "dsparkd_http_open_streams", "dsparkd_load_"))
            used = name.startswith("dsparkd_kv_pages{") and 'state="used"' in name
            if (watched or used) and not name.startswith("dsparkd_load_refreshes") and float(value):
                found.append(line)
        return found


class Burners:
    """Processes that use every core for nothing; leave the `with` block to end them."""

    def __init__(self, count: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._count = count

    def __enter__(self) -> Burners:
        command = ["sh", "-c", "while :; do :; done"]
        self._processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(self._count)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def renice(pid: int, nice: int) -> None:
    """Set the nice value of every thread of a process."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


def fill(directory: Path) -> Path:
    """Write to a file until the file system has no room; returns the file."""
    path = directory / "filling"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        os.fsync(file.fileno())
    return path
