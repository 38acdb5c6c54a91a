"""Kernels compiled side by side: what is asked for ahead is compiled, none of it runs, and all is there behind it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from triton import AsyncCompileMode, knobs
from triton.runtime._async_compile import active_mode
from triton.runtime.errors import PTXASError

from dsparkd.errors import EXIT_CONFIG, CapabilityError, CheckpointError
from dsparkd.kernels.cuda import compiling
from dsparkd.kernels.cuda.linear import TritonLinear, forms_of
from dsparkd.kernels.weight import Format, dense
from tests.kernels.cuda.values import noise

# Newer versions take what undoes a compilation that failed.
MORE = [lambda *_: None] * (len(inspect.signature(AsyncCompileMode.submit).parameters) - 4)


class Compiled:
    """What a compiler gives."""

    def __init__(self, log: list[str], key: str) -> None:
        self._log, self._key = log, key

    @property
    def run(self) -> Callable[[], None]:
        self._log.append(f"load {self._key}")
        return lambda: None


class Function:
    """A kernel as Triton keeps it: compiled where it is not, and launched unless it is only warmed up."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.known: dict[str, Compiled] = {}
        self.threads: set[int] = set()
        self.gate: threading.Event | None = None  # that the compiler waits for

    def __call__(self, key: str) -> None:
        self.run(key, grid=(1,), warmup=False)

    def run(self, key: str, *, grid: tuple[int, ...], warmup: bool) -> object:
        mode = active_mode.get()
        if key not in self.known and mode is not None:
            kernel = mode.submit(key, lambda: self._compile(key), lambda made: self.known.update({key: made}), *MORE)
            if warmup:
                return kernel
            kernel.result()
        elif key not in self.known:
            self.known[key] = self._compile(key)
        if not warmup:
            self.log.append(f"launch {key}")
        return self.known.get(key)

    def _compile(self, key: str) -> Compiled:
        if self.gate is not None:
            self.gate.wait(10)
        if key == "broken":
            raise PTXASError("does not compile")
        self.threads.add(threading.get_ident())
        self.log.append(f"compile {key}")
        return Compiled(self.log, key)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Iterator[Function]:
    monkeypatch.setattr(compiling, "JITFunction", Function)
    yield Function([])
    active_mode.set(None)  # some versions leave it where a kernel does not compile


def test_what_is_asked_for_ahead_is_compiled_once_and_not_launched(function: Function) -> None:
    """Others' launches run meanwhile, also of what waits to be compiled; behind it everything is on the device."""
    with compiling.side_by_side(3):
        for _ in range(3):  # a layer each
            with compiling.ahead():
                function("a")
                function("b")
        function("real")
    assert sorted(entry for entry in function.log if entry.startswith("compile")) == [
        "compile a",
        "compile b",
        "compile real",
    ]
    assert [entry for entry in function.log if entry.startswith("launch")] == ["launch real"]
    assert {"load a", "load b"} <= set(function.log)
    assert threading.get_ident() not in function.threads
    function("a")
    assert function.log[-1] == "launch a"


def test_alone_what_is_asked_for_ahead_is_launched(function: Function) -> None:
    """Benches and tests make kernels without a start around them."""
    with compiling.ahead():
        function("a")
    assert function.log == ["compile a", "launch a"]


def test_a_kernel_that_does_not_compile_ends_the_start(function: Function) -> None:
    """As what it is, with the exit code of a start that will not go better again; launches are launches behind it."""

    def start() -> None:
        with compiling.side_by_side(2), compiling.ahead():
            function("a")
            function("broken")

    with pytest.raises(CapabilityError, match=r"PTXASError: .*does not compile") as caught:
        start()
    assert caught.value.exit_code == EXIT_CONFIG
    assert "launch a" not in function.log
    active_mode.set(None)
    with compiling.ahead():
        function("a")
    assert function.log[-1] == "launch a"


def test_another_failure_waits_for_no_compiler(function: Function) -> None:
    """A checkpoint that is wrong is said at once, whatever is still to be compiled."""
    gate = threading.Event()
    function.gate = gate

    def start() -> None:
        with compiling.side_by_side(1):
            with compiling.ahead():
                for key in "abc":
                    function(key)
            gate.set()
            raise CheckpointError("model.safetensors is missing")

    with pytest.raises(CheckpointError, match="is missing"):
        start()
    assert len(function.log) < 3, "what had not begun never does"


@pytest.mark.gpu
def test_no_form_of_a_product_is_compiled_behind_a_start() -> None:
    """Every number of rows finds its kernel, and its product is that of a form that was compiled when it was needed."""
    device = torch.device("cuda")
    weight, x = noise(320, 768).bfloat16().to(device), noise(300, 768).bfloat16().to(device)
    expected = TritonLinear(dense(weight))(x[:37])
    with compiling.side_by_side(4):
        other = TritonLinear(dense(noise(336, 1536).bfloat16().to(device)))
        other.compile()
        product = TritonLinear(dense(weight))
        product.compile()
    seen: list[str] = []

    def compiles(*, repr: str, **_: object) -> bool:
        seen.append(repr)
        return False

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, compiles
    try:
        for num_rows in (1, 16, 32, 48, 300):
            other(torch.zeros((num_rows, 1536), dtype=torch.bfloat16, device=device))
        assert torch.equal(product(x[:37]), expected)
    finally:
        knobs.runtime.jit_cache_hook = before
    assert len(forms_of(336, 1536, 1, Format.DENSE, torch.bfloat16)) > 2
    assert seen == []
