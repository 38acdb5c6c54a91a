"""systemd/dsparkd.service: verified, rated, explained, and started against a manager's socket."""

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.harness import ROOT, Server, ensure_checkpoint

UNIT = ROOT / "systemd" / "dsparkd.service"
MAX_EXPOSURE = 2.5


def settings() -> list[tuple[str, str, str]]:
    """Name, value and the comment above each setting."""
    found, comment = [], ""
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment += line + "\n"
        elif match := re.fullmatch(r"(\w+)=(.*)", line):
            found.append((match[1], match[2], comment))
        else:
            comment = ""
    return found


def value(name: str) -> str:
    (only,) = [value for found, value, _ in settings() if found == name]
    return only


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    # No skip when the program is missing: .ci/run installs it, and a skipped check is no check.
    program = shutil.which("systemd-analyze")
    assert program is not None, "install systemd (apt-get install systemd)"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def test_the_unit_verifies_clean(tmp_path: Path) -> None:
    """An unknown setting or a typo is ignored by systemd at run time; verify names it."""
    copy = tmp_path / "dsparkd.service"
    # The program is not installed where the test runs; everything else of the unit is checked as it is.
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/dsparkd/.venv/bin/dsparkd", sys.executable))

    done = analyze("verify", str(copy))

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_is_hardened() -> None:
    """The overall exposure that systemd-analyze computes stays within the bound."""
    done = analyze("security", "--offline=true", "--no-pager", str(UNIT))

    match = re.search(r"Overall exposure level.*: ([\d.]+)", done.stdout)
    assert match is not None, done.stderr
    assert float(match[1]) <= MAX_EXPOSURE


def test_what_is_left_open_is_explained_beside_it() -> None:
    """Whoever hardens further must know what breaks."""
    explained = {name: comment for name, _, comment in settings()}
    for name in ("DevicePolicy", "ProcSubset", "MemoryDenyWriteExecute", "RestrictAddressFamilies", "LimitMEMLOCK"):
        assert len(explained[name]) > 40, name
    text = UNIT.read_text(encoding="utf-8")
    for absent in ("PrivateDevices", "PrivateNetwork", "IPAddressDeny"):
        assert re.search(rf"^# .*{absent}", text, re.MULTILINE), absent


def test_devices_state_and_restart_fit_the_server() -> None:
    """L-38, decisions 19: notify, no restart after 78, CUDA's devices, places to write, time to stop."""
    assert (value("Type"), value("Restart"), value("RestartPreventExitStatus")) == ("notify", "on-failure", "78")
    assert (value("StateDirectory"), value("CacheDirectory")) == ("dsparkd", "dsparkd")
    assert value("KillMode") == "mixed", "a signal to the children would break the order of the stop"
    devices = {text.split()[0] for name, text, _ in settings() if name == "DeviceAllow"}
    assert {"char-nvidia", "char-nvidiactl", "char-nvidia-uvm"} <= devices
    from dsparkd.config import ShutdownConfig

    shutdown = ShutdownConfig()
    assert float(value("TimeoutStopSec")) >= shutdown.drain_timeout_s + shutdown.exit_timeout_s + 30


def test_the_command_of_the_unit_starts_and_notifies(tmp_path: Path) -> None:
    """decisions 31: ExecStart's own words, with this interpreter and a small configuration, against a fake manager."""
    ensure_checkpoint()
    program, *arguments = shlex.split(value("ExecStart"))
    assert program.endswith("/bin/dsparkd")
    assert arguments == ["--config", "/etc/dsparkd/dsparkd.toml"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(120)
        states: list[str] = []

        def receive_until(word: str) -> None:
            while not any(word in state for state in states):
                states.append(manager.recv(4096).decode())

        command = (sys.executable, "-m", "dsparkd", *arguments[:-1])
        with Server(command=command, environment={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as server:
            receive_until("READY=1")
            assert server.status("/ready") == 200
            assert any("EXTEND_TIMEOUT_USEC=" in state for state in states)
            assert not any("STOPPING=1" in state for state in states)
            server.send_signal(signal.SIGTERM)
            receive_until("STOPPING=1")
            assert server.wait_exit(60) == 0


@pytest.mark.parametrize("name", ["ExecStart", "Documentation", "WorkingDirectory"])
def test_paths_agree_with_the_operators_manual(name: str) -> None:
    """docs/operating.md installs to where the unit looks."""
    manual = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    roots = [root for root in ("/opt/dsparkd", "/etc/dsparkd", "/var/lib/dsparkd") if root in value(name)]
    assert roots
    assert all(root in manual for root in roots)
