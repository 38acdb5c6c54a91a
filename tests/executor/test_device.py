"""What a rank's GPU must be: every refusal names what was found and what is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from dsparkd.config import Config, EngineConfig, KVConfig, SchedulerConfig, SpeculationConfig
from dsparkd.errors import CapabilityError, ConfigError
from dsparkd.executor.device import Gpu, require_device, room_for
from dsparkd.model.config import parse_model_config
from tests.model.values import flash_values

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", (9, 0), 139 * GIB)
# A tenth of the released layers at the released widths: listing all tensors takes a second.
SHORT = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 0, 4, 128, 0, 0, 0],
    "dspark_target_layer_ids": [1, 2, 3],
}
MODEL = parse_model_config(flash_values(dspark=True) | SHORT)


@dataclass(frozen=True)
class FakeDriver:
    gpus: tuple[Gpu, ...] = (H200, H200)
    reaches: bool = True

    def count(self) -> int:
        return len(self.gpus)

    def gpu(self, index: int) -> Gpu:
        return self.gpus[index]

    def can_reach(self, index: int, peer: int) -> bool:
        assert index != peer
        return self.reaches


def config_of(
    device_bytes: int | None = 20 * GIB, *, fraction: float | None = None, shared: bool = False, device: str = "cuda"
) -> Config:
    return Config(
        engine=EngineConfig(
            checkpoint="/nonexistent",
            device="cuda" if device == "cuda" else "cpu",
            shared_device=shared,
            weights="random",
        ),
        kv=KVConfig(device_bytes=device_bytes, device_fraction=fraction),
        scheduler=SchedulerConfig(chunk_tokens=2048),
        dspark=SpeculationConfig(enabled=True),
    )


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_two_h200s_hold_the_released_geometry(dp_rank: int) -> None:
    """Half of the experts each, and 20 GiB for the cache."""
    whole = parse_model_config(flash_values(dspark=True))
    require_device(config_of(), whole, dp_rank, FakeDriver())
    require_device(config_of(None, fraction=0.8), whole, dp_rank, FakeDriver())


def test_the_cpu_needs_no_driver() -> None:
    """A laptop has none."""
    require_device(config_of(device="cpu"), MODEL, 0, FakeDriver(gpus=()))


@pytest.mark.parametrize(
    ("gpus", "shared", "message"),
    [((H200,), False, "2 CUDA devices (found 1)"), ((), True, "1 CUDA devices (found 0)")],
)
def test_a_missing_gpu_is_counted(gpus: tuple[Gpu, ...], shared: bool, message: str) -> None:
    """The parent counts device files; what the driver then gives may be less."""
    with pytest.raises(CapabilityError) as error:
        require_device(config_of(shared=shared), MODEL, 1, FakeDriver(gpus=gpus))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("capability", "is_enough"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)]
)
def test_an_older_gpu_is_refused_and_a_newer_one_is_not(capability: tuple[int, int], is_enough: bool) -> None:
    """Nothing stops Blackwell."""
    driver = FakeDriver(gpus=(H200, replace(H200, name="Some GPU", capability=capability)))
    if is_enough:
        require_device(config_of(), MODEL, 1, driver)
        return
    with pytest.raises(CapabilityError, match=r"compute capability 9\.0 \(device 1, Some GPU, has 8\.9\)"):
        require_device(config_of(), MODEL, 1, driver)
    require_device(config_of(), MODEL, 0, driver)  # each rank speaks for its own


def test_gpus_that_cannot_reach_each_other_are_refused() -> None:
    """Two ranks on one device need no peer access."""
    with pytest.raises(CapabilityError, match=r"peer access between 2 devices .* reach 0 others"):
        require_device(config_of(), MODEL, 0, FakeDriver(reaches=False))
    roomy = replace(H200, free_bytes=400 * GIB)
    require_device(config_of(shared=True), MODEL, 1, FakeDriver(gpus=(roomy,), reaches=False))


@pytest.mark.parametrize("shared", [False, True])
def test_too_little_memory_is_told_in_bytes_before_anything_is_loaded(shared: bool) -> None:
    """What is needed is what the message says, to the byte; two ranks on one device need it twice."""
    with pytest.raises(CapabilityError) as error:
        require_device(config_of(shared=shared), MODEL, 0, FakeDriver(gpus=(replace(H200, free_bytes=GIB),) * 2))
    message = str(error.value)
    needed = int(message.split("missing ")[1].split(" bytes")[0])
    assert f"has {GIB} bytes free" in message
    assert (32 < needed / GIB < 36) if not shared else (64 < needed / GIB < 72)
    require_device(config_of(shared=shared), MODEL, 0, FakeDriver(gpus=(replace(H200, free_bytes=needed),) * 2))
    with pytest.raises(CapabilityError):
        require_device(config_of(shared=shared), MODEL, 0, FakeDriver(gpus=(replace(H200, free_bytes=needed - 1),) * 2))


def test_a_fraction_of_what_the_weights_leave_must_hold_one_sequence() -> None:
    """Else the start would fail after minutes of loading."""
    small = replace(H200, free_bytes=16 * GIB)
    with pytest.raises(ConfigError, match="use at least"):
        require_device(config_of(None, fraction=0.01), MODEL, 0, FakeDriver(gpus=(small, small)))
    with pytest.raises(CapabilityError, match="free device memory"):
        require_device(
            config_of(None, fraction=0.5), MODEL, 0, FakeDriver(gpus=(replace(H200, free_bytes=10 * GIB),) * 2)
        )


def test_a_device_that_runs_out_of_memory_at_start_is_no_reason_to_start_again() -> None:
    """Exit 78 instead of 70: the same steps would need the same memory; what was asked for and free stands in it."""
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free."
    with pytest.raises(CapabilityError) as error, room_for("the largest steps"):
        raise torch.OutOfMemoryError(said + "\nmore")
    assert f"device memory for the largest steps ({said})" in str(error.value)
    assert "kv.device_fraction" in error.value.remedy
    assert error.value.exit_code == 78
    with pytest.raises(ValueError, match="other"), room_for("the largest steps"):
        raise ValueError("other")
