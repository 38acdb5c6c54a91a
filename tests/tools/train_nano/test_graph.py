"""The training graph is held against the server's forward pass, document by document."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsparkd.kv.geometry import PoolSizes
from dsparkd.model.config import parse_model_config
from tools.oracle import Engine, relative_error
from tools.random_checkpoint import nano_config
from tools.train_nano.graph import Mode, Target
from tools.train_nano.packing import pack, positions_of
from tools.train_nano.sinkhorn import sinkhorn_reference

LENGTHS = (300, 37, 650, 4)  # one document without an HCA entry, one of a single window


def small_values(topk: int) -> dict[str, object]:
    """The nano geometry with few words and experts, stored in float32."""
    values = nano_config(vocab_size=320, noise_token_id=0)
    return values | {
        "index_topk": topk,
        "n_routed_experts": 8,
        "torch_dtype": "float32",
        "quantization_config": None,
        "expert_dtype": None,
    }


def random_target(values: dict[str, object]) -> Target:
    """A target whose every parameter is far from neutral."""
    target = Target(parse_model_config(values), torch.device("cpu"), torch.float32, seed=1, quantise=False)
    generator = torch.Generator().manual_seed(2)
    for stacks in target.values.values():
        for tensor in stacks.values():
            if tensor.is_floating_point():
                tensor.data += torch.randn(tensor.shape, generator=generator) * 0.05
    return target


def write(target: Target, values: dict[str, object], directory: Path) -> None:
    """The target as an unquantised official checkpoint."""
    import json

    tensors: dict[str, Tensor] = {}
    for name, tensor in target.official().items():
        if ".experts." in name:
            prefix, part = name.rsplit(".", 1)
            tensors |= {f"{prefix}.{e}.{part}.weight": tensor[e].contiguous() for e in range(tensor.shape[0])}
        else:
            tensors[name] = tensor.contiguous()
    directory.mkdir(exist_ok=True)
    plain = {key: value for key, value in values.items() if not key.startswith("dspark")}
    (directory / "config.json").write_text(json.dumps(plain), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")


def packed_row() -> tuple[Tensor, Tensor, list[slice]]:
    """One row of 1,024 tokens: documents at multiples of 4, padding between and behind."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 320, (1, 1024), generator=generator)
    document = torch.full((1, 1024), -1)
    places, start = [], 0
    for number, length in enumerate(LENGTHS):
        places.append(slice(start, start + length))
        document[0, places[-1]] = number
        start += -(-length // 4) * 4
    return ids, document, places


@pytest.mark.parametrize(("topk", "sparse"), [(512, False), (16, True)])
def test_packed_documents_get_the_logits_that_the_server_computes(tmp_path: Path, topk: int, sparse: bool) -> None:
    """A checkpoint trained on another function than the served one would lose what it learned, silently."""
    values = small_values(topk)
    target = random_target(values)
    write(target, values, tmp_path / "model")
    ids, document, places = packed_row()

    with torch.no_grad():
        features = target.features(ids, pack(document, document >= 0, target.config), Mode(sparse=sparse))
        logits = (features.hidden @ features.head.T)[0]

    for place in places:
        engine = Engine(tmp_path / "model", sizes=PoolSizes(20, 4, 1))
        expected = engine.logits(ids[0, place].tolist(), [place.stop - place.start])
        assert relative_error(logits[place], expected) < 2e-5


def test_positions_restart_with_every_document() -> None:
    """Padding counts as a document of its own; its positions are never read."""
    document = torch.tensor([[0, 0, 0, -1, 1, 1, 2, 2]])

    assert positions_of(document).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]


def test_sinkhorn_rows_and_columns_sum_to_one() -> None:
    """The reference that the GPU kernel is held against is doubly stochastic itself."""
    comb = sinkhorn_reference(torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0)), 20, 1e-6)

    assert torch.allclose(comb.sum(1), torch.ones(50, 4), atol=1e-4)
    assert torch.allclose(comb.sum(2), torch.ones(50, 4), atol=1e-3)
