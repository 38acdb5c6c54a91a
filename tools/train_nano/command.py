"""Train the nano checkpoint: `python -m tools.train_nano target|drafter --minutes M --out DIR [--resume DIR]`."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from types import ModuleType

import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer

from dsparkd.model.config import parse_model_config
from tools.nano_tokenizer import NOISE_TOKEN
from tools.random_checkpoint import Values, nano_config
from tools.train_nano import drafter_trainee, target
from tools.train_nano.optimiser import Optimiser
from tools.train_nano.tokenizer import DEFAULT_PATH
from tools.train_nano.training import Group, Log, Slice, Trainee, train


def main() -> None:
    """Start one process a GPU (or one on the cpu) and wait for them."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_nano", description=__doc__)
    parser.add_argument("what", choices=("target", "drafter"))
    parser.add_argument("--minutes", type=float, default=9.0, help="a slice ends after them, or when the plan is done")
    parser.add_argument("--out", type=Path, required=True, help="state, masters and log.jsonl go here")
    parser.add_argument("--resume", type=Path, help="directory of an earlier slice")
    parser.add_argument("--target", type=Path, help="drafter: directory with the target's masters")
    parser.add_argument("--scale", type=float, default=1.0, help="steps of the plan are multiplied by it")
    parser.add_argument("--rows", type=int, default=32, help="rows of 2,048 tokens a GPU and step")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    size = torch.cuda.device_count() or 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if size == 1:
        run(0, arguments, 1, port)
    else:
        mp.spawn(run, (arguments, size, port), nprocs=size)


def nano_values() -> Values:
    """The shipped checkpoint's config.json."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_PATH))
    return nano_config(tokenizer.get_vocab_size(), tokenizer.token_to_id(NOISE_TOKEN))


def run(rank: int, arguments: argparse.Namespace, size: int, port: int) -> None:
    """One process of the group."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.recompile_limit = 64
    if size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    group = Group(rank, size, device)
    config = parse_model_config(nano_values())
    part = Slice(arguments.minutes, arguments.resume, arguments.out, arguments.seed)
    if arguments.what == "target":
        trainee: Trainee = target.TargetTrainee(config, group, arguments.seed)
        module: ModuleType = target
    else:
        trainee = drafter_trainee.DrafterTrainee(config, group, arguments.seed, arguments.target)
        module = drafter_trainee
    plan = module.phases(arguments.scale, arguments.rows)
    optimiser = Optimiser(trainee.parameters(), module.MUON_RATE, module.ADAM_RATE, module.DECAY)
    log = Log(arguments.out, group)
    done = train(trainee, optimiser, plan, group, part, module.DECAY_SHARE, log)
    log.write(event="plan done" if done else "slice over")
    if size > 1:
        dist.destroy_process_group()


