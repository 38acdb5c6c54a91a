"""The table of tensors, against the counts and bytes of the published checkpoints."""

from __future__ import annotations

import math

import pytest

from dsparkd.model.checkpoint import StoredDtype, TensorSpec, expected_tensors, nextn_tensors
from dsparkd.model.config import parse_model_config
from tests.model.values import flash_values

SIZES = {StoredDtype.BF16: 2, StoredDtype.F32: 4, StoredDtype.I64: 8}


def num_bytes(specs: dict[str, TensorSpec], prefix: str = "", part: str = "") -> int:
    return sum(
        math.prod(spec.shape) * SIZES.get(spec.dtype, 1)
        for name, spec in specs.items()
        if name.startswith(prefix) and part in name
    )


def test_flash_with_dspark_has_the_published_tensors() -> None:
    """72,317 tensors, 6 of them global; per layer 1565 SWA, 1576 CSA, 1569 HCA; stages 1568, 1565, 1572."""
    specs = expected_tensors(parse_model_config(flash_values(dspark=True)))

    def count(prefix: str) -> int:
        return sum(name.startswith(prefix) for name in specs)

    assert len(specs) == 72_317
    assert [count(f"layers.{layer}.") for layer in (1, 2, 3)] == [1565, 1576, 1569]
    assert [count(f"mtp.{stage}.") for stage in range(3)] == [1568, 1565, 1572]
    assert len(specs) - count("layers.") - count("mtp.") == 6


def test_preview_flash_has_the_published_tensors() -> None:
    """69,187 with the NextN block that only those checkpoints hold."""
    config = parse_model_config(flash_values(dspark=False))
    assert len(expected_tensors(config)) + len(nextn_tensors(config)) == 69_187


@pytest.mark.parametrize(
    ("part", "published"),
    [
        (".ffn.experts.", 147_169_738_752),
        (".shared_experts.", 1_082_196_480),
        (".indexer.", 275_353_344),
        (".attn.compressor.", 525_722_624),
        ("tid2eid", 18_616_320),
        ("hc_", 135_537_756),
    ],
)
def test_flash_parts_take_the_published_bytes(part: str, published: int) -> None:
    """Shapes and dtypes together reproduce the byte totals of the release."""
    specs = expected_tensors(parse_model_config(flash_values(dspark=False)))
    assert num_bytes(specs, part=part) == published


@pytest.mark.parametrize(("dspark", "published"), [(True, 166_878_536_440), (False, 159_609_485_896)])
def test_flash_releases_take_the_published_bytes(dspark: bool, published: int) -> None:
    """The total of the release's index, to the byte; the preview's includes its NextN block."""
    config = parse_model_config(flash_values(dspark))
    specs = expected_tensors(config) | ({} if dspark else nextn_tensors(config))
    assert num_bytes(specs) == published


def test_shapes_that_fill_no_block_round_their_scales_up() -> None:
    """The release has multiples of 128 and 32 only; a small geometry need not."""
    values = flash_values(dspark=False) | {"q_lora_rank": 130, "moe_intermediate_size": 40}
    specs = expected_tensors(parse_model_config(values))
    assert specs["layers.0.attn.wq_a.scale"].shape == (2, 32)
    assert specs["layers.0.ffn.experts.0.w2.scale"].shape == (4096, 2)
    assert specs["layers.0.ffn.experts.0.w2.weight"].shape == (4096, 20)
