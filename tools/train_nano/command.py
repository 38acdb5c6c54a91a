"""Trains and exports the nano checkpoint, a slice of minutes at a time.

python -m tools.train_nano target  --minutes 9 --out RUN/target [--resume RUN/target]
python -m tools.train_nano drafter --minutes 4 --out RUN/drafter --target RUN/target
python -m tools.train_nano average --of RUN/one RUN/other --out RUN/target
python -m tools.train_nano export  --target RUN/target --drafter RUN/drafter --out conf/nano
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch._dynamo
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from dsparkd.model.config import parse_model_config
from tools.nano_tokenizer import NOISE_TOKEN
from tools.random_checkpoint import Values, nano_config
from tools.train_nano import drafter_trainee, target
from tools.train_nano.export import export
from tools.train_nano.optimiser import Optimiser
from tools.train_nano.parameters import ParameterTable
from tools.train_nano.tokenizer import DEFAULT_PATH
from tools.train_nano.training import Group, Log, Slice, Trainee, read_state, save_masters, train

DRAFTER = "mtp/"  # begins the names of its tensors


def main() -> None:
    """Start one process a GPU (or one on the cpu) and wait for them."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_nano", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("target", "drafter", "average", "export"))
    parser.add_argument("--minutes", type=float, default=9.0, help="a slice ends after them, or when the plan is done")
    parser.add_argument("--out", type=Path, required=True, help="state, masters and log.jsonl go here")
    parser.add_argument("--resume", type=Path, help="directory of an earlier slice")
    parser.add_argument("--target", type=Path, help="drafter, export: directory with the target's masters")
    parser.add_argument("--drafter", type=Path, help="export: directory with the drafter's masters")
    parser.add_argument("--of", type=Path, nargs="+", help="average: directories with masters")
    parser.add_argument("--steps", type=int, nargs="+", help="steps of each phase, instead of the plan's")
    parser.add_argument("--rows", type=int, default=24, help="rows of 2,048 tokens a GPU and step")
    parser.add_argument("--peak", type=float, default=1.0, help="scales the learning rates: less for trained weights")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "export":
        write_checkpoint(arguments.target, arguments.drafter, arguments.out)
        return
    if arguments.what == "average":
        save_masters(average([read_state(directory) for directory in arguments.of]), arguments.out, 0)
        return
    size = torch.cuda.device_count() or 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if size == 1:
        run(0, arguments, 1, port)
    else:
        spawn(run, (arguments, size, port), nprocs=size)  # type: ignore[no-untyped-call]


def nano_values() -> Values:
    """The shipped checkpoint's config.json."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_PATH))
    noise_token_id = tokenizer.token_to_id(NOISE_TOKEN)
    assert noise_token_id is not None
    return nano_config(tokenizer.get_vocab_size(), noise_token_id)


def write_checkpoint(target_masters: Path, drafter_masters: Path, out: Path) -> None:
    """Quantise the masters to the official layout."""
    values = nano_values()
    config = parse_model_config(values)
    masters = both_parts(read_state(target_masters), read_state(drafter_masters))
    state: dict[str, Tensor] = {}
    for prefix in ("", "layers", "mtp"):
        stacks = {name.partition("/")[2]: tensor for name, tensor in masters.items() if name.split("/")[0] == prefix}
        state |= ParameterTable(config, prefix).unstack(stacks)
    export(state, values, out)


def both_parts(target: dict[str, Tensor], drafter: dict[str, Tensor]) -> dict[str, Tensor]:
    """The target's tensors of one state and the drafter's of the other; either may be a whole checkpoint's."""
    return {name: tensor for name, tensor in target.items() if not name.startswith(DRAFTER)} | {
        name: tensor for name, tensor in drafter.items() if name.startswith(DRAFTER)
    }


def average(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of like models' floating-point tensors (arXiv 2203.05482); the others' values are the first one's."""
    first, rest = states[0], states[1:]
    mean: dict[str, Tensor] = {}
    for name, tensor in first.items():
        mean[name] = tensor
        if tensor.is_floating_point():
            total = sum((other[name].float() for other in rest), tensor.float())
            mean[name] = (total / len(states)).to(tensor.dtype)
    return mean


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
    plan = module.phases(arguments.rows)
    if arguments.steps:
        plan = [phase._replace(steps=steps) for phase, steps in zip(plan, arguments.steps, strict=True)]
    optimiser = Optimiser(
        trainee.parameters(), arguments.peak * module.MUON_RATE, arguments.peak * module.ADAM_RATE, module.DECAY
    )
    log = Log(arguments.out, group)
    done = train(trainee, optimiser, plan, group, part, module.DECAY_SHARE, log)
    log.write(event="plan done" if done else "slice over")
    if size > 1:
        dist.destroy_process_group()
