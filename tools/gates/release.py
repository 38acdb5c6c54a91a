"""Gate `release`: every other gate has a passing result that was made on exactly this commit, from an unchanged tree.

    python -m tools.gates release --results DIR [--run] [--only NAME ...] [--json]

--run runs the gates (all, or those named) and writes DIR/NAME.json with the commit. Without it, DIR is judged alone; a
result of another commit, or of a tree with changes, counts as absent. Gates for the GPU host are run there with --only
and their files copied into DIR.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.dispatch import names
from tools.harness import ROOT

OWN_NAME = "release"


@dataclass(frozen=True)
class State:
    """What is checked out: the commit, and whether the tree is exactly that commit's."""

    commit: str
    clean: bool


@dataclass(frozen=True)
class Verdict:
    """One gate's result as it counts for the release."""

    gate: str
    ok: bool
    why: str


def git_state(root: Path = ROOT) -> State:
    """Ask git for the commit and for changes of tracked or new files."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    return State(git("rev-parse", "HEAD"), not git("status", "--porcelain"))


def run_gate(gate: str, directory: Path, state: State) -> None:
    """Run one gate and write its result with the commit that it was made on."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.gates", gate, "--json"], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True
    )
    lines = done.stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        result = None
    record = {"gate": gate, **asdict(state), "exit_code": done.returncode, "result": result}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{gate}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def judge(gate: str, directory: Path, commit: str) -> Verdict:
    """Read one result file and say whether it counts."""
    try:
        record = json.loads((directory / f"{gate}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Verdict(gate, False, "absent")
    except json.JSONDecodeError:
        return Verdict(gate, False, "absent: the file is not JSON")
    if record.get("gate") != gate:
        return Verdict(gate, False, f"absent: the file is the result of {record.get('gate')}")
    if record.get("commit") != commit:
        return Verdict(gate, False, f"absent: made on commit {str(record.get('commit'))[:12]}")
    if record.get("clean") is not True:
        return Verdict(gate, False, "absent: made on a tree with changes")
    if record.get("exit_code") != 0:
        return Verdict(gate, False, f"failed with exit code {record.get('exit_code')}")
    return Verdict(gate, True, "passed")


def main(argv: list[str]) -> int:
    """Judge, or run and judge; 0 when every gate counts."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates release", description="results of this very commit")
    parser.add_argument("--results", type=Path, required=True, help="directory of result files")
    parser.add_argument("--run", action="store_true", help="run the gates first")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="with --run: these gates")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    gates = [name for name in names("tools.gates") if name != OWN_NAME]
    state = git_state()
    for gate in (arguments.only or gates) if arguments.run else ():
        run_gate(gate, arguments.results, state)
    verdicts = [judge(gate, arguments.results, state.commit) for gate in gates]
    ok = all(verdict.ok for verdict in verdicts)
    if arguments.json:
        table = [asdict(verdict) for verdict in verdicts]
        print(json.dumps({"ok": ok, "commit": state.commit, "gates": table}))
    else:
        for verdict in verdicts:
            print(f"{'ok' if verdict.ok else 'FAIL':4} {verdict.gate:<12} {verdict.why}")
        print(f"{'ok' if ok else 'FAIL'}: commit {state.commit[:12]}")
    return 0 if ok else 1
