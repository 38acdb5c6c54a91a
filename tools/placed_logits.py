"""Logits of the shipped checkpoint on a device against transformers, for the gate `oracle`.

Real texts, teacher-forced: at each position both have seen the same tokens. Reference: transformers in float32 on the
cpu. In bfloat16, or where keys are cached in 8 bits, the control is our cpu engine in the same formats, whose
arithmetic is torch's: what the device rounds may not be more than that, but for a share. A position where another
token is likeliest is explained if the reference's lead over the token taken is at most twice the largest error that
the control has anywhere: two logits are off there.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsparkd.kv.geometry import PoolSizes
from tools.oracle import CPU, Engine, load_oracle, oracle_logits
from tools.placement import Placement
from tools.train_nano.encode import Encoder
from tools.train_nano.tasks import TASKS, draw

TOLERANCE = 1e-3  # of float32, the largest error over the largest logit
MEAN_RATIO = 1.5  # of bfloat16's mean error to the control's
MAX_TOKENS = 700
SINGLES = 12  # tokens at a text's end that go one by one in the third way
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Placed:
    """All texts' logits in one place, against the reference. Errors are of logits, over the largest of their text.

    other_bits: positions whose logits are not the same, to the bit, in random chunks or token by token. differing:
    positions with another likeliest token; lead: the largest lead of the reference there, over the same. unexplained:
    positions where rounding does not explain it.
    """

    placement: str
    texts: int
    positions: int
    worst: float
    mean: float
    differing: int
    lead: float
    unexplained: int
    other_bits: int
    control_worst: float | None
    control_mean: float | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing depends on the way, and errors are those of the number format."""
        if self.control_mean is None:
            return self.worst <= TOLERANCE and not self.unexplained and not self.other_bits
        return self.mean <= MEAN_RATIO * self.control_mean and not self.unexplained and not self.other_bits

    def line(self) -> str:
        """One line under HEADER."""
        control = "" if self.control_mean is None else f"{self.control_worst:8.1e} {self.control_mean:8.1e}"
        return (
            f"{self.placement:42} {self.positions:9} {self.worst:8.1e} {self.mean:8.1e} {control:>17} "
            f"{self.differing:9} {self.lead:8.1e} {self.unexplained:11} {self.other_bits:10} {self.seconds:5.1f}  "
            f"{'ok' if self.ok else 'FAIL'}"
        )


HEADER = (
    f"{'placed':42} positions    worst     mean  (worst, mean: cpu) differing     lead unexplained other bits     s"
)


class Reference:
    """transformers' logits of each text, computed once."""

    def __init__(self, checkpoint: Path, per_task: int) -> None:
        self.checkpoint = checkpoint
        self.texts = list(texts(Encoder(checkpoint / "tokenizer.json"), per_task))
        oracle = load_oracle(checkpoint)
        self.logits = [oracle_logits(oracle, ids) for ids in self.texts]
        self._controls: dict[Placement, list[Tensor]] = {}

    def control(self, placed: Placement) -> list[Tensor]:
        """Errors of ours on the cpu in the same formats, each text in one pass; nothing where these are float32's."""
        same = Placement("cpu", placed.dtype, placed.kv_dtype)
        if same == Placement():
            return []
        if same not in self._controls:
            engine = open_engine(self.checkpoint, same)
            logits = [engine.logits(ids, [len(ids)]) for ids in self.texts]
            self._controls[same] = [error_of(*pair) for pair in zip(logits, self.logits, strict=True)]
        return self._controls[same]


def texts(encoder: Encoder, per_task: int) -> Iterator[list[int]]:
    """Questions of every task's test split with their right answers."""
    for task in TASKS:
        found = index = 0
        while found < per_task:
            ids = encoder.encode(draw(task, "test", index)).ids
            if len(ids) <= MAX_TOKENS:
                yield ids
                found += 1
            index += 1


def open_engine(checkpoint: Path, placed: Placement) -> Engine:
    """An engine in one process."""
    device = torch.device("cuda", 0) if placed.on_cuda else CPU
    sizes = PoolSizes(1 + 3 * -(-MAX_TOKENS // 256), 4, 1)
    return Engine(checkpoint, DTYPES[placed.dtype], sizes=sizes, device=device, kv_dtype=placed.kv_dtype)


def compare(reference: Reference, checkpoint: Path, placed: Placement) -> Placed:
    """Compute every text in one pass, in random chunks, and its end token by token. checkpoint: what is read there."""
    began = time.perf_counter()
    engine = open_engine(checkpoint, placed)
    control = reference.control(placed)
    control_worst = max((float(error.max()) for error in control), default=0.0)
    found: list[tuple[Tensor, Difference]] = []
    other_bits = 0
    pages = engine.geometry.num_pages_for(MAX_TOKENS)
    for number, (ids, theirs) in enumerate(zip(reference.texts, reference.logits, strict=True)):
        ways = []
        for way, chunks in enumerate(chunks_of(len(ids), number)):
            first = 1 + way * pages
            ways.append(engine.logits(ids, chunks, 1 + way, tuple(range(first, first + pages))).cpu())
        other_bits += int(torch.stack([(way != ways[0]).any(1) for way in ways[1:]]).any(0).sum())
        error = error_of(ways[0], theirs)
        found.append((error, differences(ways[0], theirs, control_worst if control else float(error.max()))))
    all_errors = torch.cat([error.flatten() for error, _ in found])
    return Placed(
        placement=str(placed),
        texts=len(found),
        positions=sum(len(ids) for ids in reference.texts),
        worst=float(all_errors.max()) if bool(all_errors.isfinite().all()) else float("inf"),
        mean=float(all_errors.mean()),
        differing=sum(each.count for _, each in found),
        lead=max(each.lead for _, each in found),
        unexplained=sum(each.unexplained for _, each in found),
        other_bits=other_bits,
        control_worst=control_worst if control else None,
        control_mean=float(torch.cat([error.flatten() for error in control]).mean()) if control else None,
        seconds=round(time.perf_counter() - began, 1),
    )


def chunks_of(length: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """One pass; random chunks; one chunk, then token by token."""
    generator = random.Random(seed)
    cuts = sorted({0, length, *(generator.randrange(length) for _ in range(4))})
    singles = min(length - 1, SINGLES)
    parts = [after - before for before, after in itertools.pairwise(cuts)]
    return [length], parts, [length - singles] + [1] * singles


def error_of(logits: Tensor, reference: Tensor) -> Tensor:
    """logits [T, V] float32 -> how far each is off [T, V], over the text's largest."""
    return (logits.cpu() - reference).abs() / reference.abs().max()


@dataclass(frozen=True, slots=True)
class Difference:
    """See Placed."""

    count: int
    lead: float
    unexplained: int


def differences(logits: Tensor, reference: Tensor, largest: float) -> Difference:
    """Where another token is likeliest; largest: what a logit may be off by, over the text's largest."""
    taken = logits.argmax(1)
    differs = taken != reference.argmax(1)
    leads = (reference.amax(1) - reference.gather(1, taken[:, None]).squeeze(1)) / reference.abs().max()
    leads = leads[differs]
    lead = float(leads.max()) if len(leads) else 0.0
    return Difference(int(differs.sum()), lead, int((leads > 2 * largest).sum()))


def placements(given: Placement, dtypes: Sequence[str]) -> Iterator[Placement]:
    """Weights as stored and dense, in each dtype."""
    for dtype in dtypes:
        for is_dense in (False, True):
            yield Placement(
                given.device, "float32" if dtype == "float32" else "bfloat16", given.kv_dtype, False, is_dense
            )
