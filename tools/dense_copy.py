"""Writes a checkpoint without quantisation: the values that FP4 and FP8 weights stand for, as bfloat16.

    python -m tools.dense_copy --checkpoint DIR --out DIR

Scales are powers of two and the small formats have fewer digits than bfloat16, so the copy has the same values, and a
model that reads it differs from one that multiplies packed weights by the order of its sums alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsparkd.model.checkpoint import StoredDtype, expected_tensors
from dsparkd.model.config import parse_model_config
from tools.oracle import read_official

TORCH_DTYPES = {
    StoredDtype.BF16: torch.bfloat16,
    StoredDtype.F32: torch.float32,
    StoredDtype.I64: torch.int64,
}


def write_dense_copy(checkpoint: Path, directory: Path) -> None:
    """Write config.json, model.safetensors and copies of all other JSON files.

    Raises ValueError where bfloat16 does not hold a value, or a tensor of the layout is missing.
    """
    values = json.loads((checkpoint / "config.json").read_bytes())
    values |= {"quantization_config": None, "expert_dtype": None}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for path in checkpoint.glob("*.json"):
        if path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copy(path, directory / path.name)
    official = read_official(checkpoint)
    tensors = {}
    for name, spec in expected_tensors(parse_model_config(values)).items():
        if name not in official:
            raise ValueError(f"{checkpoint} has no {name}")
        exact = torch.from_numpy(official[name])
        tensors[name] = exact.to(TORCH_DTYPES[spec.dtype])
        if not torch.equal(tensors[name].to(exact.dtype), exact):
            raise ValueError(f"{name} has values that {spec.dtype} does not hold")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist")
    arguments = parser.parse_args()
    write_dense_copy(arguments.checkpoint, arguments.out)


if __name__ == "__main__":
    main()
