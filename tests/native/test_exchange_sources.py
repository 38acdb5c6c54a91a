"""exchange.c under two compilers' strict flags and three sanitizers, and the mutations that these must catch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dsparkd.native import build

SOURCE = build.HERE / "exchange.c"
DRIVER = Path(__file__).with_name("exchange_driver.c")
STRICT = ["-std=c11", *build.STRICT_FLAGS[1:]]


def compile_driver(target: Path, *flags: str, source: Path = SOURCE) -> Path:
    directory = target.parent
    if source is not SOURCE:  # the driver includes "exchange.c" from the first directory that has one
        shutil.copy(build.HERE / "exchange.h", directory)
    includes = [f"-I{source.parent}", f"-I{build.HERE}"]
    command = ["gcc", "-std=c11", "-g", *flags, *includes, str(DRIVER), "-o", str(target), "-lpthread"]
    subprocess.run(command, check=True)
    return target


def run(driver: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    # A hang is what ends it, not a machine with other work: two processes that never run together take a slice each.
    return subprocess.run([str(driver), *map(str, arguments)], capture_output=True, text=True, timeout=600)


def mutated(tmp_path: Path, line: str, replacement: str) -> Path:
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(line) == 1, "the mutation has lost its line"
    target = tmp_path / "exchange.c"
    target.write_text(text.replace(line, replacement), encoding="utf-8")
    return target


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_it_builds_under_strict_flags(compiler: str, tmp_path: Path) -> None:
    """X-01: and the layout's assertions hold for both compilers."""
    command = [compiler, *STRICT, "-c", str(SOURCE), "-o", str(tmp_path / "exchange.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "replacement"),
    [
        ("REGION_BYTES = 1536,", "REGION_BYTES = 1600,"),
        ("    struct rank_area rank[NUM_RANKS];", "    uint64_t extra;\n    struct rank_area rank[NUM_RANKS];"),
        ("    _Alignas(LINE_BYTES) struct owner_line owner;", "    struct owner_line owner;"),
    ],
)
def test_another_layout_does_not_compile(line: str, replacement: str, tmp_path: Path) -> None:
    """X-01: sizes, offsets and alignments are assertions of the compiler."""
    source = mutated(tmp_path, line, replacement)
    command = ["gcc", "-std=c11", f"-I{build.HERE}", "-c", str(source), "-o", str(tmp_path / "exchange.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver with the address and undefined-behaviour sanitizers."""
    flags = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    return compile_driver(tmp_path_factory.mktemp("address") / "driver", *flags)


@pytest.mark.parametrize(
    "arguments", [("misuse",), ("threads", 20_000, 20_000), ("threads", 2_000, 0), ("processes", 20_000, 20_000)]
)
def test_no_byte_is_touched_that_is_not_ours(address: Path, arguments: tuple[object, ...]) -> None:
    """X-30: address and undefined-behaviour sanitizers over exchanges, sleeps, refusals and short buffers."""
    done = run(address, *arguments)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("spin_ns", [0, 20_000])
def test_no_access_races(tmp_path: Path, spin_ns: int) -> None:
    """X-15, decisions 30: the thread sanitizer sees every payload ordered by its number, asleep or awake."""
    done = run(compile_driver(tmp_path / "driver", "-O1", "-fsanitize=thread"), "threads", 4_000, spin_ns)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "replacement"),
    [
        (
            "    atomic_store(&lines->slot[index].seq, sequence);",
            "    atomic_store_explicit(&lines->slot[index].seq, sequence, memory_order_relaxed);",
        ),
        (
            "atomic_load_explicit(number, memory_order_acquire) == sequence",
            "atomic_load_explicit(number, memory_order_relaxed) == sequence",
        ),
        ("    NUM_SLOTS = 2,", "    NUM_SLOTS = 2, /* but one is used */"),
    ],
    ids=["published without release", "read without acquire", "one slot"],
)
def test_the_thread_sanitizer_catches_mutations(tmp_path: Path, line: str, replacement: str) -> None:
    """decisions 30: a detector that finds nothing in a broken exchange proves nothing."""
    source = mutated(tmp_path, line, replacement)
    if "one is used" in replacement:
        text = source.read_text(encoding="utf-8")
        source.write_text(text.replace("sequence % NUM_SLOTS", "0 * sequence"), encoding="utf-8")
    driver = compile_driver(tmp_path / "driver", "-O1", "-fsanitize=thread", source=source)
    done = run(driver, "threads", 4_000, 100_000_000)
    assert done.returncode != 0
    assert "data race" in done.stderr or "line" in done.stderr


def test_half_a_million_exchanges_of_two_processes_are_whole(tmp_path: Path) -> None:
    """X-15: no torn, old or early word; pauses at random, so some sleep. `tools.gates lockstep` runs 10^7 of them."""
    done = run(compile_driver(tmp_path / "driver", "-O2"), "processes", 500_000, 20_000)
    assert (done.returncode, done.stderr) == (0, "")


def test_sleeps_lose_no_wake(tmp_path: Path) -> None:
    """X-17: spin 0, so that ranks sleep; many lost wakes, of 0.1 s each, would not end in time.

    `tools.gates lockstep` runs 10^6 of them and bounds the longest wait.
    """
    driver = compile_driver(tmp_path / "driver", "-O2")
    done = run(driver, "processes", 100_000, 0)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout.split()[0]) > 10_000
