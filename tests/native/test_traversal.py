"""The native pool: its proofs at start, its locks, signals and processes, and matchers that fail half-way."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
import xgrammar
from xgrammar.tvm_ffi_binding import GrammarMatcher

from dsparkd.errors import CapabilityError, InvariantError
from dsparkd.grammar.matcher import ffi_matcher
from dsparkd.native import traversal
from dsparkd.native.traversal import MatcherHandle, MethodInfo, NativeTraversal, Walk, WalkStatus
from dsparkd.native.traversal_build import HERE, STRICT, tvm_ffi_headers
from tests.grammar.grammars import PADDED_SIZE, compile_all, tokenizer_info

WORDS = -(-PADDED_SIZE // 32)
INFO = vars(GrammarMatcher)["__tvm_ffi_type_info__"]
OPEN, CLOSE = ord("("), ord(")")


@pytest.fixture(scope="module")
def parentheses() -> xgrammar.CompiledGrammar:
    return compile_all(tokenizer_info())[3]


@pytest.fixture
def pool() -> Iterator[NativeTraversal]:
    opened = NativeTraversal.open(2)
    yield opened
    opened.close()


def make_walk(num_trees: int = 2, num_nodes: int = 4) -> Walk:
    drafts = np.full((num_trees, num_nodes), OPEN, np.int64)
    walk = Walk(drafts, np.full((num_trees * num_nodes, WORDS), 0x7FFFFFFF, np.int32), PADDED_SIZE, 2)
    walk.begin(num_trees)
    return walk


# --- start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_source_is_free_of_warnings(compiler: str, tmp_path: Path) -> None:
    """Two compilers, every warning an error; a machine without both of them cannot check the C part."""
    command = [compiler, *STRICT, "-O2", f"-I{tvm_ffi_headers()}", "-c", str(HERE / "traversal.c"), "-o"]
    result = subprocess.run([*command, str(tmp_path / "traversal.o")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_library_built_against_another_interface_refuses_to_open(tmp_path: Path) -> None:
    """decisions 33: a wheel that was exchanged later must not be called with the old one's structs."""
    headers = tmp_path / "include"
    shutil.copytree(tvm_ffi_headers(), headers)
    header = headers / "tvm" / "ffi" / "c_api.h"
    text = header.read_text(encoding="utf-8")
    changed = text.replace("#define TVM_FFI_VERSION_MINOR 1\n", "#define TVM_FFI_VERSION_MINOR 97\n")
    assert changed != text
    header.write_text(changed, encoding="utf-8")
    library = tmp_path / "other.so"
    command = ["gcc", "-std=c11", "-shared", "-fPIC", "-pthread", f"-I{headers}", str(HERE / "traversal.c"), "-o"]
    subprocess.run([*command, str(library)], check=True)
    other = ctypes.CDLL(str(library))
    out = ctypes.c_void_p()

    code = other.dsparkd_traversal_open(None, 1, ctypes.byref(out))

    assert code == traversal.lib.DSPARKD_OTHER_VERSION
    assert out.value is None
    built, loaded = traversal.versions()
    assert built[:2] == loaded[:2]


def test_an_interface_of_another_version_is_a_start_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """D-01: the message names the key and both versions."""

    class Refusing:
        DSPARKD_OTHER_VERSION = traversal.lib.DSPARKD_OTHER_VERSION
        DSPARKD_OK = traversal.lib.DSPARKD_OK

        def dsparkd_traversal_open(self, *_: object) -> int:
            return self.DSPARKD_OTHER_VERSION

        def dsparkd_traversal_versions(self, built: list[int], loaded: list[int]) -> None:
            built[0], built[1], loaded[0], loaded[1], loaded[2] = 0, 97, 0, 1, 16

    monkeypatch.setattr(traversal, "lib", Refusing())
    with pytest.raises(CapabilityError, match=r"grammar\.traversal.*0\.97 \(found 0\.1\.16\)"):
        NativeTraversal.open(1)


@pytest.mark.parametrize(
    ("mutation", "is_sound"),
    [
        (("", ""), True),
        (("while (pool->num_left > 0)", "while (0)"), False),
        (("if (!atomic_compare_exchange_strong(&worker->stage, &expected, SETTLING))", "if (0 * expected)"), False),
        (("own->commits = ids;", "own->commits = walk->commits + (size_t)request * commits;"), False),
        (("TVMFFIObjectIncRef(at.matcher);", ""), False),
    ],
    ids=[
        "as it is",
        "does not wait for its workers",
        "writes although it was given up",
        "reads the walk that gave it up",
        "holds no reference",
    ],
)
def test_the_pools_threads_are_free_of_races(tmp_path: Path, mutation: tuple[str, str], is_sound: bool) -> None:
    """decisions 30: by the thread sanitizer, which must catch a pool that leaves before its workers have, and a step
    that was given up and goes on in the memory of a walk that is over."""
    source = (HERE / "traversal.c").read_text(encoding="utf-8")
    old, new = mutation
    assert old in source
    (tmp_path / "traversal.c").write_text(source.replace(old, new), encoding="utf-8")
    driver = Path(__file__).parent / "traversal_driver.c"
    command = ["gcc", "-std=c11", "-g", "-O1", "-fsanitize=thread", "-pthread", f"-I{HERE}", f"-I{tvm_ffi_headers()}"]
    program = tmp_path / "walks"
    subprocess.run([*command, str(tmp_path / "traversal.c"), str(driver), "-o", str(program)], check=True)

    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)

    assert (result.returncode == 0 and "ThreadSanitizer" not in result.stderr) == is_sound, result.stderr[:2000]


@dataclass(frozen=True)
class Method:
    """A row of a type's table of methods."""

    name: str
    metadata: dict[str, str] | None
    func: MatcherHandle | None


@pytest.mark.parametrize("name", ["accept_token", "fill_next_token_bitmask", "rollback", "is_terminated"])
def test_a_method_that_is_missing_or_takes_something_else_is_a_start_failure(name: str) -> None:
    """D-01: an upgrade of XGrammar is noticed before the first call, not inside it."""
    methods: list[MethodInfo] = [Method(m.name, m.metadata, m.func) for m in INFO.methods]
    assert set(traversal.find_methods(INFO.type_key, methods)) == set(traversal._SIGNATURES)
    place = next(i for i, method in enumerate(methods) if method.name == name)
    known = methods[place]
    assert isinstance(known, Method)
    assert known.metadata is not None
    schema = known.metadata["type_schema"]
    for changed in (
        None,
        replace(known, func=None),
        replace(known, metadata=None),
        replace(known, metadata={"type_schema": "not json"}),
        replace(known, metadata={"type_schema": schema.replace('"params":[', '"params":[{"type":"int"},')}),
        replace(known, metadata={"type_schema": schema.replace('"return":[{"type":"', '"return":[{"type":"ffi.')}),
    ):
        others = [method for method in methods if method.name != name]
        with pytest.raises(CapabilityError, match=rf"grammar\.traversal.*GrammarMatcher\.{name}"):
            traversal.find_methods(INFO.type_key, others if changed is None else [*others, changed])
    with pytest.raises(CapabilityError, match="GrammarMatcher"):
        traversal.find_methods("another.Type", methods)


@pytest.mark.parametrize(
    ("drafts", "mask"),
    [
        (np.zeros((2, 4), np.int32), np.zeros((8, WORDS), np.int32)),
        (np.zeros((2, 4), np.int64), np.zeros((8, WORDS), np.int64)),
        (np.zeros(8, np.int64), np.zeros((8, WORDS), np.int32)),
        (np.zeros((2, 4), np.int64), np.zeros((8, WORDS + 1), np.int32)),
        (np.zeros((2, 4), np.int64), np.zeros((7, WORDS), np.int32)),
        (np.zeros((2, 8), np.int64)[:, ::2], np.zeros((8, WORDS), np.int32)),
        (np.zeros((2, 4), np.int64), np.zeros((8, WORDS + 1), np.int32)[:, :WORDS]),
    ],
    ids=["drafts int32", "mask int64", "drafts flat", "mask wide", "mask short", "drafts strided", "mask strided"],
)
def test_memory_of_another_kind_is_a_bug(drafts: np.ndarray, mask: np.ndarray) -> None:
    """D-02: XGrammar ignores strides and would write outside of a view, so nothing but whole memory comes near it."""
    with pytest.raises(InvariantError):
        Walk(drafts, mask, PADDED_SIZE, 1)


def test_a_view_into_larger_memory_is_written_where_it_lies(
    pool: NativeTraversal, parentheses: xgrammar.CompiledGrammar
) -> None:
    """D-02: storage offsets are honoured."""
    whole = np.full((12, WORDS), 7, np.int32)
    walk = Walk(np.zeros((3, 4), np.int64)[1:], whole[2:10], PADDED_SIZE, 0)
    walk.begin(2)
    matcher = xgrammar.GrammarMatcher(parentheses)
    walk.add(ffi_matcher(matcher), 1)

    pool.run(walk, 0)

    assert (whole[:2] == 7).all()
    assert (whole[10:] == 7).all()
    assert (whole[2:6] == -1).all()
    assert walk.usable_rows[0] == 1
    assert (whole[6] >> OPEN % 32)[OPEN // 32] & 1


# --- one process, one caller ----------------------------------------------------------------------------------------


def test_a_forked_child_is_refused(pool: NativeTraversal) -> None:
    """The pool's threads do not exist in the child: it would wait for them for ever."""
    walk = make_walk()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pool.run(walk, 0)
        except InvariantError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pool.run(walk, 0)


def test_a_closed_pool_is_refused_and_its_threads_are_gone(parentheses: xgrammar.CompiledGrammar) -> None:
    """A walk after the end is a bug of ours, and an end leaves no thread behind."""
    before = len(os.listdir("/proc/self/task"))
    opened = NativeTraversal.open(4)
    assert len(os.listdir("/proc/self/task")) == before + 4
    opened.close()
    opened.close()
    assert len(os.listdir("/proc/self/task")) == before
    with pytest.raises(InvariantError, match="closed"):
        opened.run(make_walk(), 0)


def status_of_waiting_thread(task: str) -> str:
    """A thread's state once it waits for work: until it really runs, the C library keeps all its signals blocked."""
    while True:
        text = Path(f"/proc/self/task/{task}/status").read_text(encoding="ascii")
        if "State:\tS" in text:
            return text
        time.sleep(0.001)


def test_the_pool_handles_no_signal() -> None:
    """Python handles signals in its main thread; a pool thread that took one would do so in the middle of a walk."""
    known = set(os.listdir("/proc/self/task"))
    opened = NativeTraversal.open(3)
    started = set(os.listdir("/proc/self/task")) - known
    blocked = [status_of_waiting_thread(task) for task in started]
    opened.close()

    assert len(blocked) == 3
    for text in blocked:
        mask = int(next(line for line in text.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
            assert mask >> (number - 1) & 1, number
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the caller's own mask is as it was"


# --- matchers that fail ---------------------------------------------------------------------------------------------


class Script:
    """A matcher's methods as Python functions that tvm-ffi calls: which of them fails and when, and what was told."""

    def __init__(self, fault: str = "", at: int = 0) -> None:
        self.told: list[tuple[str, int]] = []
        self._fault, self._left = fault, at
        self.pause: Callable[[], None] = lambda: None
        self.rows: list[list[int]] = []  # what the next fills write

    def _note(self, name: str, value: int = 0) -> None:
        self.told.append((name, value))
        if name == self._fault:
            if self._left == 0:
                raise ValueError(f"{name} broke")
            self._left -= 1

    def accept_token(self, _matcher: object, token_id: int, _debug: bool) -> bool:
        self._note("accept", token_id)
        return True

    def fill(self, _matcher: object, mask: tvm_ffi.Tensor, row: int, _debug: bool) -> bool:
        """Allow every id, or what `rows` says of this matcher's row."""
        self.pause()
        self._note("fill", row)
        words = (ctypes.c_int32 * (mask.shape[0] * WORDS)).from_address(mask.data_ptr())
        words[row * WORDS : (row + 1) * WORDS] = self.rows.pop(0) if self.rows else [0x7FFFFFFF] * WORDS
        return True

    def rollback(self, _matcher: object, count: int) -> None:
        self._note("rollback", count)

    def is_terminated(self, _matcher: object) -> bool:
        self._note("terminated")
        return False

    def open(self, num_threads: int = 1) -> NativeTraversal:
        methods = {
            "accept_token": tvm_ffi.convert(self.accept_token),
            "fill_next_token_bitmask": tvm_ffi.convert(self.fill),
            "rollback": tvm_ffi.convert(self.rollback),
            "is_terminated": tvm_ffi.convert(self.is_terminated),
        }
        return NativeTraversal(methods, INFO.type_index, num_threads)


@pytest.mark.parametrize(
    ("fault", "at", "rolled_back"),
    [
        ("accept", 0, 0),  # the commit
        ("terminated", 0, 0),
        ("fill", 0, 0),
        ("accept", 2, 1),  # the second draft
        ("terminated", 2, 2),
        ("fill", 2, 2),
        ("rollback", 0, 3),
    ],
)
def test_a_matcher_that_raises_is_given_up_and_says_why(
    parentheses: xgrammar.CompiledGrammar, fault: str, at: int, rolled_back: int
) -> None:
    """Its state is unknown from then on: no row of it is used, whatever it had filled; drafts are taken back if any."""
    script = Script(fault, at)
    opened = script.open()
    walk = make_walk(1)
    matcher = xgrammar.GrammarMatcher(parentheses)
    walk.add(ffi_matcher(matcher), 0, commits=[OPEN])

    opened.run(walk, 0)
    opened.close()

    assert walk.status(0) == WalkStatus.MATCHER_FAILED
    assert f"{fault} broke" in walk.message(0)
    assert walk.usable_rows[0] == 0
    assert (walk.mask == -1).all()
    assert [value for name, value in script.told if name == "rollback"] == ([rolled_back] if rolled_back else [])


def test_thousands_of_failures_leave_no_memory_behind() -> None:
    """Each error that a matcher raises is taken over and released: 9,600 of them would hold 4 MB."""
    other = xgrammar.TokenizerInfo([b"a", b"b", b""], vocab_size=3, stop_token_ids=[2])
    compiled = xgrammar.GrammarCompiler(other, max_threads=1).compile_regex("a*b")
    matchers = [xgrammar.GrammarMatcher(compiled) for _ in range(64)]
    walk = make_walk(64, num_nodes=1)
    opened = NativeTraversal.open(2)

    def fail(rounds: int) -> None:
        for _ in range(rounds):
            walk.begin(64)
            for tree, matcher in enumerate(matchers):
                walk.add(ffi_matcher(matcher), tree)
            opened.run(walk, 0)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    fail(50)
    before = resident()
    fail(150)
    opened.close()

    assert walk.status(63) == WalkStatus.MATCHER_FAILED
    assert resident() - before < 2_000_000


def test_a_chain_is_taken_back_in_one_call(parentheses: xgrammar.CompiledGrammar) -> None:
    """One accept a draft and one rollback at the end; siblings are taken back only when the next one is tried."""
    script = Script()
    opened = script.open()
    walk = make_walk(1)
    matcher = xgrammar.GrammarMatcher(parentheses)
    walk.add(ffi_matcher(matcher), 0)

    opened.run(walk, 0)
    opened.close()

    assert [call for call in script.told if call[0] != "terminated"] == [
        ("fill", 0),
        *[step for node in (1, 2, 3) for step in (("accept", OPEN), ("fill", node))],
        ("rollback", 3),
    ]
    assert walk.usable_rows[0] == 4


def test_bits_behind_the_last_id_allow_nothing(parentheses: xgrammar.CompiledGrammar) -> None:
    """O-12: XGrammar leaves them set or not; a row that has no others is an empty one."""
    script = Script()
    opened = script.open()
    walk = make_walk(2, num_nodes=1)
    behind = 0x7FFFFFFF & ~((1 << PADDED_SIZE % 32) - 1)
    last = 1 << (PADDED_SIZE % 32 - 1)
    script.rows = [[0] * (WORDS - 1) + [behind], [0] * (WORDS - 1) + [behind | last]]
    matchers = [xgrammar.GrammarMatcher(parentheses) for _ in range(2)]
    for tree, matcher in enumerate(matchers):
        walk.add(ffi_matcher(matcher), tree)

    opened.run(walk, 0)
    opened.close()

    assert [walk.status(request) for request in range(2)] == [WalkStatus.NO_TOKEN, WalkStatus.WALKED]


def test_a_deadline_between_two_nodes_keeps_the_rows_before_it(parentheses: xgrammar.CompiledGrammar) -> None:
    """decisions 1: filled rows stay, the chain ends there, the matcher is put back."""
    script = Script()
    opened = script.open()
    walk = make_walk(1)
    matcher = xgrammar.GrammarMatcher(parentheses)
    walk.add(ffi_matcher(matcher), 0)
    deadline_ns = time.monotonic_ns() + 50_000_000

    def wait_at_the_third_row() -> None:
        if len([call for call in script.told if call[0] == "fill"]) == 2:
            while time.monotonic_ns() < deadline_ns:
                time.sleep(0.001)

    script.pause = wait_at_the_third_row
    opened.run(walk, deadline_ns)
    opened.close()

    assert walk.status(0) == WalkStatus.LATE
    assert walk.usable_rows[0] == 3
    assert script.told[-1] == ("rollback", 2)
    assert (walk.mask[3] == -1).all()


def test_a_second_caller_is_refused_while_one_walks(parentheses: xgrammar.CompiledGrammar) -> None:
    """Two walks at once would share one work list; and a walk holds no lock of Python while it runs."""
    script = Script()
    opened = script.open()
    inside, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert go_on.wait(10)

    script.pause = pause
    walk, other = make_walk(1), make_walk(1)
    matcher = xgrammar.GrammarMatcher(parentheses)
    walk.add(ffi_matcher(matcher), 0)
    thread = threading.Thread(target=opened.run, args=(walk, 0))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(InvariantError, match="two walks"):
        opened.run(other, 0)
    go_on.set()
    thread.join()
    opened.close()
    assert walk.usable_rows[0] == 4


def test_the_pool_shares_the_work(parentheses: xgrammar.CompiledGrammar) -> None:
    """D-28: two requests are inside their matchers at the same time, in two threads."""
    script = Script()
    opened = script.open(num_threads=2)
    meeting = threading.Barrier(2)
    script.pause = lambda: meeting.wait(10) and None
    walk = make_walk(2, num_nodes=1)
    matchers = [xgrammar.GrammarMatcher(parentheses) for _ in range(2)]
    for tree, matcher in enumerate(matchers):
        walk.add(ffi_matcher(matcher), tree)

    opened.run(walk, 0)
    opened.close()

    assert [walk.status(request) for request in range(2)] == [WalkStatus.WALKED] * 2, walk.message(0)


def test_the_walk_runs_without_pythons_lock(pool: NativeTraversal) -> None:
    """D-28: a thread that waits for the lock gets it while the walk runs; nothing else would give it up."""
    ambiguous = compile_all(tokenizer_info())[4]
    walk = make_walk(64, 6)
    walk.drafts[:] = ord("a")
    matchers = [xgrammar.GrammarMatcher(ambiguous) for _ in range(64)]
    for tree, matcher in enumerate(matchers):
        for _ in range(60):
            matcher.accept_token(ord("a"))
        walk.add(ffi_matcher(matcher), tree)
    order: list[str] = []
    begin = threading.Event()

    def other() -> None:
        begin.wait(10)
        order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        begin.set()
        pool.run(walk, 0)
        order.append("walked")
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert order == ["other", "walked"]


def test_the_compiled_part_links_nothing_of_the_wheels() -> None:
    """Its names resolve to the library that importing tvm_ffi loads, wherever that lies."""
    (library,) = HERE.glob(f"_traversal*{sysconfig.get_config_var('SHLIB_SUFFIX')}")
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "tvm" not in needed
