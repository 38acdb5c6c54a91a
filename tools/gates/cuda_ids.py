"""Compares the greedy ids of two ranks on two GPUs, or on one that they share, with those of the cpu server in float32.

    python -m tools.gates cuda_ids [--requests 64] [--shared-device | --graphs | --overlap] [--json]

The same server and checkpoint run on the cpu in float32 and in bfloat16, then eager on cuda in both. Devices round
differently, so a token may differ where two candidates are as good as equal: a difference counts as explained when
the lead of the cpu's token over the second, at the first differing position, is within twice the largest difference
that rounding makes to the log-probabilities of tokens both agree on. In bfloat16 the cpu's run, whose arithmetic is
torch's reference, is the control: its largest difference counts too, and cuda's mean difference is held to its mean.

With --graphs it compares something else, on two GPUs: replayed decode steps and drafts with eager ones, in bfloat16,
plain and speculating, greedy and seeded. There every id and every log-probability must be the same, and those of
speculation the plain server's. With --overlap it compares steps that are launched ahead with those that are not, in the
same way: replayed on two GPUs, or eager on the one that is shared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dsparkd.config import GIB
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import Server, ensure_checkpoint
from tools.workload import Answer, Client, Item, mixed_items

MAX_TOKENS = 16
CONCURRENCY = 32
MEAN_RATIO = 1.5  # of cuda's mean rounding in bfloat16 to the control's


@dataclass(frozen=True)
class Comparison:
    """One device and dtype against the cpu in float32, all log-probabilities natural.

    differing: requests with any other id. rounding: the largest difference in log-probability of tokens before the
    first differing one. lead: the largest lead of the cpu's token at a first differing position. mean_bound: what
    mean_rounding may be, where a control says it.
    """

    device: str
    dtype: str
    requests: int
    differing: int
    agreeing_ids: int
    compared_ids: int
    rounding: float
    mean_rounding: float
    lead: float
    unexplained: int
    ranks_used: int
    seconds: float
    mean_bound: float | None = None

    @property
    def ok(self) -> bool:
        """Whether both ranks worked and rounding, no larger than it has to be, explains every difference."""
        is_bounded = self.mean_bound is None or self.mean_rounding <= self.mean_bound
        return self.unexplained == 0 and is_bounded and self.ranks_used == 2


@dataclass(frozen=True)
class Replay:
    """A server that replays against the same one eager.

    seen: requests with another id or log-probability. replayed, eager: decode steps of the replaying server, of both
    ranks. eager_replayed: of the other one, which has no graphs. not_plain: requests of the replaying server with
    another id or log-probability than the plain eager server's.
    """

    drafts: bool
    requests: int
    differing: int
    seen: int
    compared_ids: int
    replayed: int
    eager: int
    eager_replayed: int
    not_plain: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and graphs alone ran where they were on."""
        is_same = not self.differing and not self.seen and not self.not_plain
        return is_same and self.replayed > 0 and not self.eager and not self.eager_replayed


def compare_graphs(
    checkpoint: Path, items: list[Item], *, drafts: bool, plain: list[Answer] | None = None
) -> tuple[Replay, list[Answer]]:
    """Run the same requests eager and replayed; returns the eager answers, too. plain: those of the plain server."""
    start = time.perf_counter()
    counts: list[tuple[int, int]] = []

    def count(client: Client) -> None:
        steps = [client.counter("dsparkd_decode_steps_total", f'path="{path}"') for path in ("graph", "eager")]
        counts.append((int(steps[0]), int(steps[1])))

    answers = []
    for graphs in (False, True):
        tables = {"decode_graph": {"enabled": graphs}, "dspark": {"enabled": drafts}}
        placed: dict[str, object] = {"device": "cuda", "dtype": "bfloat16"}
        answers.append(run_server(checkpoint, placed, items, tables, count)[0])
    pairs = list(zip(*answers, strict=True))
    replay = Replay(
        drafts=drafts,
        requests=len(items),
        differing=sum(one.tokens != other.tokens for one, other in pairs),
        seen=sum(one.logprobs != other.logprobs for one, other in pairs),
        compared_ids=sum(len(answer.tokens) for answer in answers[0]),
        replayed=counts[1][0],
        eager=counts[1][1],
        eager_replayed=counts[0][0],
        not_plain=sum(
            (one.tokens, one.logprobs) != (other.tokens, other.logprobs)
            for one, other in zip(plain or answers[0], answers[1], strict=True)
        ),
        seconds=round(time.perf_counter() - start, 1),
    )
    return replay, answers[0]


@dataclass(frozen=True)
class Ahead:
    """A server that launches steps ahead beside the same one that does not.

    differing, seen: requests with another id, or log-probability, finish reason or text. ahead, ahead_off: steps that
    were launched ahead, of both ranks, where that is on and off. dropped: rows that ran once for nothing.
    """

    requests: int
    differing: int
    seen: int
    compared_ids: int
    ahead: int
    ahead_off: int
    dropped: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and steps were launched ahead where they should be alone."""
        return not self.differing and not self.seen and self.ahead > 0 and not self.ahead_off


def compare_overlap(checkpoint: Path, items: list[Item], placed: dict[str, object]) -> Ahead:
    """Run the same requests with steps launched ahead and without. placed: keys of [engine]."""
    start = time.perf_counter()
    counts: list[tuple[int, int]] = []

    def count(client: Client) -> None:
        time.sleep(1.5)  # a rank's counters reach the parent once a second
        names = ("dsparkd_steps_ahead_total", "dsparkd_dropped_rows_total")
        counts.append((int(client.counter(names[0])), int(client.counter(names[1]))))

    answers = [
        run_server(checkpoint, placed, items, {"scheduler": {"overlap": overlap}, "dspark": {"enabled": False}}, count)[
            0
        ]
        for overlap in (False, True)
    ]
    pairs = list(zip(*answers, strict=True))
    return Ahead(
        requests=len(items),
        differing=sum(one.tokens != other.tokens for one, other in pairs),
        seen=sum(one != other for one, other in pairs),
        compared_ids=sum(len(answer.tokens) for answer in answers[0]),
        ahead=counts[1][0],
        ahead_off=counts[0][0],
        dropped=counts[1][1],
        seconds=round(time.perf_counter() - start, 1),
    )


def run_server(
    checkpoint: Path,
    placed: dict[str, object],
    items: list[Item],
    tables: Mapping[str, Mapping[str, object]] | None = None,
    look: Callable[[Client], None] = lambda client: None,
) -> tuple[list[Answer], int]:
    """Answers of one server, half of the items on each rank, and how many ranks gave tokens.

    tables: more of its configuration. look: is shown the server before it stops.
    """
    engine = {"checkpoint": str(checkpoint), "max_context_tokens": 2048, **placed}
    with Server({"engine": engine, "kv": {"device_bytes": GIB // 2}, **(tables or {})}) as server:
        client = Client(server.wait_ready(300).base_url)
        answers = client.complete_all(items, CONCURRENCY, lambda index: index % 2, alternatives=2)
        time.sleep(1.5)  # a rank's counters reach the parent once a second
        used = sum(client.counter("dsparkd_output_tokens_total", f'dp_rank="{rank}"') > 0 for rank in (0, 1))
        look(client)
        server.stop()
    return answers, used


def compare(
    device: str,
    dtype: str,
    base: list[Answer],
    answers: list[Answer],
    ranks_used: int,
    seconds: float,
    control: Comparison | None = None,
) -> Comparison:
    """Count differences up to each request's first: what follows continues another text.

    control: the reference arithmetic in the same dtype, against the same base.
    """
    roundings: list[float] = []
    leads: list[float] = []
    for ours, theirs in zip(base, answers, strict=True):
        agreeing = _num_agreeing(ours, theirs)
        pairs = zip(ours.logprobs[:agreeing], theirs.logprobs[:agreeing], strict=True)
        roundings += [abs(a - b) for a, b in pairs]
        if agreeing < len(ours.tokens):
            leads.append(ours.margins[agreeing])
    rounding = max(roundings, default=0.0)
    largest = max(rounding, control.rounding) if control is not None else rounding
    return Comparison(
        device=device,
        dtype=dtype,
        requests=len(base),
        differing=len(leads),
        agreeing_ids=len(roundings),
        compared_ids=sum(len(answer.tokens) for answer in base),
        rounding=rounding,
        mean_rounding=sum(roundings) / max(1, len(roundings)),
        lead=max(leads, default=0.0),
        unexplained=sum(lead > 2 * largest for lead in leads),
        ranks_used=ranks_used,
        seconds=round(seconds, 1),
        mean_bound=MEAN_RATIO * control.mean_rounding if control is not None else None,
    )


def _num_agreeing(ours: Answer, theirs: Answer) -> int:
    """Tokens before the first differing one."""
    count = 0
    for a, b in zip(ours.tokens, theirs.tokens, strict=False):
        if a != b:
            break
        count += 1
    return count


def report_graphs(replays: Sequence[Replay], seconds: float, *, as_json: bool) -> int:
    """Print the table; 0 when nothing differs."""
    ok, elapsed = all(one.ok for one in replays), round(seconds, 1)
    if as_json:
        print(json.dumps({"ok": ok, "elapsed_s": elapsed, "replays": [asdict(one) for one in replays]}))
        return 0 if ok else 1
    print("drafts  requests   ids  other ids  other logprobs  not plain  replayed steps  eager steps     s")
    for one in replays:
        print(
            f"{one.drafts!s:6} {one.requests:9} {one.compared_ids:5} {one.differing:10} {one.seen:15} "
            f"{one.not_plain:10} {one.replayed:15} {one.eager:12} {one.seconds:5.1f}  {'ok' if one.ok else 'FAIL'}"
        )
    print(f"{'ok' if ok else 'FAIL'}: graphs against eager, {elapsed} s")
    return 0 if ok else 1


def report_overlap(ahead: Ahead, *, as_json: bool) -> int:
    """Print the table; 0 when nothing differs."""
    if as_json:
        print(json.dumps({"ok": ahead.ok, "elapsed_s": ahead.seconds, "overlap": asdict(ahead)}))
        return 0 if ahead.ok else 1
    print("requests   ids  other ids  other answers  steps ahead  rows dropped")
    print(
        f"{ahead.requests:8} {ahead.compared_ids:5} {ahead.differing:10} {ahead.seen:14} {ahead.ahead:12} "
        f"{ahead.dropped:13}"
    )
    print(f"{'ok' if ahead.ok else 'FAIL'}: steps launched ahead against others, {ahead.seconds} s")
    return 0 if ahead.ok else 1


def main(argv: list[str]) -> int:
    """Compare float32 and bfloat16; 0 when rounding explains every difference."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates cuda_ids", description="ids of cuda against cpu")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path, help="directory; the small checkpoint by default")
    parser.add_argument("--shared-device", action="store_true", help="cuda: both ranks on one GPU")
    parser.add_argument("--graphs", action="store_true", help="replayed steps against eager ones")
    parser.add_argument("--overlap", action="store_true", help="steps launched ahead against others")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    vocab_size = Tokenizer.load(checkpoint).vocab_size
    items = mixed_items(arguments.requests, vocab_size, MAX_TOKENS, seed=3, greedy=True)
    began = time.perf_counter()
    if arguments.graphs:
        items = mixed_items(arguments.requests, vocab_size, MAX_TOKENS, seed=3)
        plain, answers = compare_graphs(checkpoint, items, drafts=False)
        drafted, _ = compare_graphs(checkpoint, items, drafts=True, plain=answers)
        return report_graphs([plain, drafted], time.perf_counter() - began, as_json=arguments.json)
    if arguments.overlap:
        items = mixed_items(arguments.requests, vocab_size, 2 * MAX_TOKENS, seed=3)
        ours: dict[str, object] = {"device": "cuda", "dtype": "bfloat16", "shared_device": arguments.shared_device}
        return report_overlap(compare_overlap(checkpoint, items, ours), as_json=arguments.json)
    base, _ = run_server(checkpoint, {"device": "cpu", "dtype": "float32"}, items)
    comparisons = []
    control: Comparison | None = None
    for device, dtype in (("cuda", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16")):
        start = time.perf_counter()
        placed: dict[str, object] = {"device": device, "dtype": dtype}
        if device == "cuda":
            placed["shared_device"] = arguments.shared_device
        answers, used = run_server(checkpoint, placed, items)
        comparison = compare(device, dtype, base, answers, used, time.perf_counter() - start, control)
        comparisons.append(comparison)
        control = comparison if device == "cpu" else None
    elapsed = round(time.perf_counter() - began, 1)
    ok = all(one.ok for one in comparisons)
    if arguments.json:
        print(json.dumps({"ok": ok, "elapsed_s": elapsed, "comparisons": [asdict(one) for one in comparisons]}))
    else:
        print("device dtype     requests differing  same ids    of  rounding (mean)   lead  unexplained ranks     s")
        for one in comparisons:
            print(
                f"{one.device:6} {one.dtype:9} {one.requests:8} {one.differing:9} {one.agreeing_ids:9} "
                f"{one.compared_ids:5}  {one.rounding:8.1e} {one.mean_rounding:6.0e} {one.lead:6.1e} "
                f"{one.unexplained:12} {one.ranks_used:5} {one.seconds:5.1f}  {'ok' if one.ok else 'FAIL'}"
            )
        print(f"{'ok' if ok else 'FAIL'}: against cpu float32, {elapsed} s")
    return 0 if ok else 1
