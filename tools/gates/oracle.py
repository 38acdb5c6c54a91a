"""Gate `oracle`: logits of transformers' DeepSeek-V4 and ours agree, however the tokens are cut into steps.

    python -m tools.gates oracle [--json]
    python -m tools.gates oracle --device cuda [--dtype float32|bfloat16] [--kv-dtype model|fp8] [--per-task 1] [--json]

Each case is a random small geometry with every parameter drawn at random, written in the official layout, and read
back by two readers that share no code. Reference: transformers in float32, eager, in one pass and over its own cache.
Ours: one pass, random chunks, token by token. An error is the largest difference over the largest logit.

On cuda the shipped checkpoint is compared, on real texts, read as it is stored (FP4 experts, FP8 linears) and from a
copy without quantisation (tools/placed_logits.py): in both dtypes unless one is named.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dsparkd.kv.geometry import PoolSizes
from tools import placed_logits
from tools.harness import ensure_checkpoint
from tools.oracle import Engine, load_oracle, oracle_logits, relative_error
from tools.placement import Placement
from tools.random_checkpoint import Values, nano_config, write_checkpoint

TOLERANCE = 1e-4
LENGTHS = (1, 2, 5, 33, 127, 128, 130, 260, 515, 700, 900, 1100)
STORED = ("float32",) * 12 + ("fp4", "fp8", "bfloat16")  # the last three: official quantised, and plain, storage
LENGTHS_STORED = (*LENGTHS, 600, 300, 300)


@dataclass(frozen=True, slots=True)
class Case:
    """One geometry's errors; cached is transformers over its own cache against itself, so its own noise."""

    seed: int
    stored: str
    length: int
    layers: str
    window: int
    topk: int
    index_heads: int
    one_shot: float
    chunked: float
    single: float
    cached: float
    seconds: float

    @property
    def worst(self) -> float:
        """The largest error of ours."""
        return max(self.one_shot, self.chunked, self.single)


def random_geometry(seed: int, stored: str) -> Values:
    """A small geometry with every layer kind, drawn from a seed; stored: float32, bfloat16, fp8 or fp4 (experts)."""
    draw = random.Random(seed)
    values = nano_config(vocab_size=320, noise_token_id=0)
    for key in list(values):
        if key.startswith("dspark"):
            del values[key]
    ratios = [0, 4, 128] + [draw.choice((0, 4, 128)) for _ in range(draw.randrange(5))]
    draw.shuffle(ratios)
    heads = draw.choice((4, 8))
    experts = draw.choice((8, 12, 16))
    head_dim, index_dim = draw.choice((32, 64, 96)), draw.choice((32, 48))
    values |= {
        "hidden_size": draw.choice((64, 96, 160)),
        "num_hidden_layers": len(ratios),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "qk_rope_head_dim": draw.choice((8, 16, 32)),
        "q_lora_rank": draw.choice((24, 40, 64)),
        "o_groups": draw.choice((1, 2, 4)),
        "o_lora_rank": draw.choice((16, 24)),
        "sliding_window": draw.choice((8, 32, 100, 128)),
        "compress_ratios": [*ratios, 0],
        "max_position_embeddings": 2048,
        "index_n_heads": draw.choice((16, 24, 32)),
        "index_head_dim": index_dim,
        "index_topk": draw.choice((4, 16, 64, 100)),
        "hc_sinkhorn_iters": draw.choice((2, 20)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.choice((1, 2, 3, 6)),
        "moe_intermediate_size": draw.choice((32, 48)),
        "num_hash_layers": draw.randrange(4),
        "routed_scaling_factor": draw.choice((1.0, 1.5, 2.5)),
        "swiglu_limit": draw.choice((1.0, 10.0)),  # 1.0 binds
        "rope_scaling": {
            "type": "yarn",
            "factor": draw.choice((4, 16)),
            "original_max_position_embeddings": draw.choice((128, 512, 65536)),
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "torch_dtype": "float32" if stored == "float32" else "bfloat16",
    }
    if stored in ("float32", "bfloat16"):
        values |= {"quantization_config": None, "expert_dtype": None}
    else:
        values["expert_dtype"] = stored
    return values


def random_chunks(total: int, seed: int) -> list[int]:
    """Cut total tokens: long chunks, short ones, runs of single tokens."""
    draw = random.Random(seed)
    chunks: list[int] = []
    while total:
        run = [1] * draw.randrange(6) if draw.random() < 0.4 else [draw.choice((2, 3, 7, 64, 128, 130, 256))]
        for length in run:
            chunks.append(min(length, total))
            total -= chunks[-1]
            if not total:
                break
    return chunks


def run_case(seed: int, stored: str, length: int, directory: Path) -> Case:
    """Write, load twice, compare."""
    began = time.perf_counter()
    values = random_geometry(seed, stored)
    config = write_checkpoint(directory, values, seed, num_shards=1 + seed % 2)
    oracle, engine = load_oracle(directory), Engine(directory, sizes=PoolSizes(20, 4, 1))
    draw = random.Random(seed)
    ids = [draw.randrange(config.vocab_size) for _ in range(length)]
    reference = oracle_logits(oracle, ids)
    singles = min(length, 24)
    cached_chunks = [length - singles] * (length > singles) + [1] * singles
    return Case(
        seed=seed,
        stored=stored,
        length=length,
        layers=" ".join(map(str, config.compress_ratios)),
        window=config.sliding_window,
        topk=config.index_topk,
        index_heads=config.index_n_heads,
        one_shot=relative_error(engine.logits(ids, [length], 1, (1, 2, 3, 4, 5)), reference),
        chunked=relative_error(engine.logits(ids, random_chunks(length, seed), 2, (10, 9, 8, 7, 6)), reference),
        single=relative_error(engine.logits(ids, [1] * length, 3, (11, 13, 15, 14, 12)), reference),
        cached=relative_error(oracle_logits(oracle, ids, cached_chunks), reference),
        seconds=time.perf_counter() - began,
    )


def compare_shipped(arguments: argparse.Namespace) -> int:
    """The shipped checkpoint on cuda; 0 when every difference is explained."""
    began = time.perf_counter()
    checkpoint = ensure_checkpoint().resolve()
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to compare on")
    reference = placed_logits.Reference(checkpoint, arguments.per_task)
    found: list[placed_logits.Placed] = []
    if not arguments.json:
        print(placed_logits.HEADER, flush=True)
    given = Placement("cuda", kv_dtype=arguments.kv_dtype)
    for placed in placed_logits.placements(given, arguments.dtype):
        with placed.checkpoint(checkpoint) as directory:
            found.append(placed_logits.compare(reference, directory, placed))
        if not arguments.json:
            print(found[-1].line(), flush=True)
    elapsed, ok = round(time.perf_counter() - began, 1), all(one.ok for one in found)
    if arguments.json:
        print(json.dumps({"ok": ok, "elapsed_s": elapsed, "placed": [asdict(one) for one in found]}))
    else:
        texts = len(reference.texts)
        print(f"{'ok' if ok else 'FAIL'}: {texts} texts, {len(found)} ways to store and compute, {elapsed} s")
    return 0 if ok else 1


def main(argv: list[str]) -> int:
    """Run every case; 0 when all agree within TOLERANCE."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates oracle", description="compare with transformers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--kv-dtype", choices=("model", "fp8"), default="model", help="cuda: how keys are cached")
    parser.add_argument("--per-task", type=int, default=1, help="cuda: texts of each task")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.device == "cuda":
        return compare_shipped(arguments)
    began = time.perf_counter()
    cases: list[Case] = []
    header = "seed stored   length window topk heads one-shot chunked  single   (cached)    s  layers"
    if not arguments.json:
        print(header, flush=True)
    for seed, (stored, length) in enumerate(zip(STORED, LENGTHS_STORED, strict=True)):
        with tempfile.TemporaryDirectory() as name:
            case = run_case(seed, stored, length, Path(name))
        cases.append(case)
        if not arguments.json:
            mark = "ok" if case.worst <= TOLERANCE else "FAIL"
            print(
                f"{case.seed:4} {case.stored:8} {case.length:6} {case.window:6} {case.topk:4} {case.index_heads:5} "
                f"{case.one_shot:8.1e} {case.chunked:8.1e} {case.single:8.1e} {case.cached:8.1e} {case.seconds:5.1f}  "
                f"{case.layers}  {mark}",
                flush=True,
            )
    elapsed = time.perf_counter() - began
    ok = all(case.worst <= TOLERANCE for case in cases)
    if arguments.json:
        print(json.dumps({"ok": ok, "tolerance": TOLERANCE, "elapsed_s": elapsed, "cases": [asdict(c) for c in cases]}))
    else:
        print(f"{'ok' if ok else 'FAIL'}: {len(cases)} geometries, tolerance {TOLERANCE:.0e}, {elapsed:.0f} s")
    return 0 if ok else 1
