"""Steps over a small checkpoint of every layer kind: the same ids whatever the way in which they are computed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec
import pytest
import torch
import xgrammar

from dsparkd.config import Config, EngineConfig, Hardware, KVConfig, SchedulerConfig, resolve
from dsparkd.errors import CapabilityError, CheckpointError, InvariantError
from dsparkd.executor.collectives import RankGroups
from dsparkd.executor.executor import Executor, require_compiler
from dsparkd.executor.masks import Masker
from dsparkd.executor.plan import Plan, PlanRow, RowOutput, SlotStart, SnapshotSave, StepKind, StepOutput
from dsparkd.grammar.compiler import tokenizer_info
from dsparkd.grammar.matcher import Matcher
from dsparkd.grammar.traversal import open_traversal
from dsparkd.grammar.vocabulary import make_vocabulary
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams, TokenizedRequest, TokenLogprob
from dsparkd.model.config import load_model_config
from dsparkd.model.weights import load_both_shards
from dsparkd.scheduler.policy import Limits, Planner
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory, Request
from dsparkd.scheduler.results import Committer, Launched
from dsparkd.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
PAGE = 128
VOCAB = 320
NUM_TOKENS = 259  # ids that the tokenizer knows
GREEDY = SamplingParams(max_tokens=64, seed=1, temperature=0.0)
SEEDED = SamplingParams(max_tokens=64, seed=77, temperature=0.9, top_p=0.95)


def config_of(checkpoint: Path, device_bytes: int = 4 << 20, max_context_tokens: int = 1024) -> Config:
    """A cpu server's configuration over the checkpoint."""
    return resolve(
        Config(
            engine=EngineConfig(
                checkpoint=str(checkpoint), device="cpu", dtype="float32", max_context_tokens=max_context_tokens
            ),
            kv=KVConfig(device_bytes=device_bytes, page_tokens=PAGE),
            scheduler=SchedulerConfig(max_rows=6),
        ),
        Hardware(num_cuda_devices=0),
    )


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> Executor:
    """Both shards in this process; tests use slots, pages and snapshots of their own and may leave them dirty."""
    torch.set_num_threads(1)
    config = load_model_config(checkpoint)
    model, exchange = load_both_shards(checkpoint, config, torch.float32, CPU)
    pool = KVPool(config.kv_geometry(PAGE, "float32"), PoolSizes(40, 7, 4, 2), torch.float32, CPU)
    return Executor(0, model, 0, pool, exchange, Tokenizer.load(checkpoint))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Ids of known tokens."""
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


class Sequence:
    """What a scheduler keeps of one request, as far as its plan rows need it."""

    def __init__(self, name: str, ids: tuple[int, ...], params: SamplingParams, slot: int, first_page: int) -> None:
        self.name = name
        self.prompt_ids = ids
        self.params = params
        self.slot = slot
        self.pages = tuple(range(first_page, first_page + 6))
        self.output_ids: tuple[int, ...] = ()
        self.computed = 0

    def row(self, limit: int = 10**6, top: int | None = None) -> PlanRow:
        """The next chunk of at most `limit` tokens; it samples when it reaches the end."""
        known = self.prompt_ids + self.output_ids
        ids = known[self.computed : self.computed + limit]
        last = self.computed + len(ids) == len(known)
        return PlanRow(
            request_id=self.name,
            slot=self.slot,
            input_ids=ids,
            start=self.computed,
            page_table=self.pages,
            num_logits=len(ids) if top is not None else int(last),
            sampling=self.params if last else None,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            prompt_top_logprobs=top,
        )

    def take(self, row: PlanRow, output: RowOutput) -> None:
        """Commit a row's output."""
        self.computed += len(row.input_ids)
        self.output_ids += output.token_ids


def run(executor: Executor, rows: list[PlanRow], **parts: tuple) -> tuple[RowOutput, ...]:  # type: ignore[type-arg]
    """One step without a peer."""
    plan = Plan(StepKind.MIXED, tuple(rows), **parts)
    return executor.step(plan, (plan.num_tokens, 0)).rows


def generate(executor: Executor, sequences: list[Sequence], count: int, chunk: int = 10**6) -> None:
    """Run sequences together until each has `count` outputs; short ones decode while long ones prefill."""
    starts = tuple(SlotStart(s.slot, None, 0) for s in sequences if s.computed == 0)
    while live := [s for s in sequences if len(s.output_ids) < count]:
        rows = [s.row(chunk) for s in live]
        outputs = run(executor, rows, slot_starts=starts)
        starts = ()
        for sequence, row, output in zip(live, rows, outputs, strict=True):
            sequence.take(row, output)


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_ids_are_the_same_alone_batched_and_chunked(executor: Executor, params: SamplingParams) -> None:
    """D-13 without masks: however the prefill is cut, the first token is the same, and so is all that follows.

    Path invariance over a step's composition: neighbours, other slots and pages, chunk sizes.
    """
    lengths = [3, 127, 128, 300, 41]
    alone = []
    for i, length in enumerate(lengths):
        sequence = Sequence(f"s{i}", prompt(length, i), params, slot=1, first_page=1)
        generate(executor, [sequence], 6)
        alone.append(sequence.output_ids)

    together = [
        Sequence(f"s{i}", prompt(n, i), params, slot=6 - i, first_page=1 + 6 * i) for i, n in enumerate(lengths)
    ]
    generate(executor, together, 6, chunk=100)

    assert [s.output_ids for s in together] == alone
    assert all(token_id < NUM_TOKENS for ids in alone for token_id in ids)


@pytest.fixture(scope="module")
def info(checkpoint: Path) -> xgrammar.TokenizerInfo:
    """The tokens as a rank tells XGrammar of them."""
    vocabulary = make_vocabulary(Tokenizer.load(checkpoint), VOCAB, (load_model_config(checkpoint).eos_token_id,))
    return tokenizer_info(vocabulary)


@pytest.fixture(scope="module")
def masked(checkpoint: Path, info: xgrammar.TokenizerInfo) -> Executor:
    """As `executor`, with grammars."""
    torch.set_num_threads(1)
    config = load_model_config(checkpoint)
    model, exchange = load_both_shards(checkpoint, config, torch.float32, CPU)
    pool = KVPool(config.kv_geometry(PAGE, "float32"), PoolSizes(40, 7, 4), torch.float32, CPU)
    masker = Masker(open_traversal("native", 1, info), 6, 1, VOCAB, timeout_s=60.0, hang_s=60.0)
    return Executor(0, model, 0, pool, exchange, Tokenizer.load(checkpoint), masker)


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_grammar_holds_the_prefills_own_token_however_the_prefill_is_cut(
    masked: Executor, info: xgrammar.TokenizerInfo, params: SamplingParams
) -> None:
    """D-13: one mask and one advance for the first token; prefills of 1, 3 and 5 chunks give the same ids."""
    compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar('root ::= "q" [a-f0-9]{6} "!"')
    outputs = set()
    for chunk in (10**6, 2 * PAGE, PAGE):
        sequence = Sequence("s", prompt(5 * PAGE - 3), params, slot=1, first_page=1)
        matcher = Matcher(compiled)
        starts: tuple[SlotStart, ...] = (SlotStart(1, None, 0),)
        while len(sequence.output_ids) < 8:
            row = sequence.row(chunk)
            row = dataclasses.replace(row, matcher=matcher if row.sampling is not None else None)
            (output,) = run(masked, [row], slot_starts=starts)
            starts = ()
            assert output.failure is None
            sequence.take(row, output)
            matcher.queue(output.token_ids)
        outputs.add(sequence.output_ids)

    (ids,) = outputs
    assert re.fullmatch("q[a-f0-9]{6}!", bytes(ids).decode())


def test_d14_a_row_with_a_grammar_leaves_its_neighbours_ids_alone(
    masked: Executor, executor: Executor, info: xgrammar.TokenizerInfo
) -> None:
    """D-14: through the whole step, masks and all, a free row's ids are those of a server without grammars."""
    free = Sequence("free", prompt(90, 2), SEEDED, slot=2, first_page=10)
    generate(executor, [free], 5)
    again = Sequence("free", prompt(90, 2), SEEDED, slot=2, first_page=10)
    held = Sequence("held", prompt(60, 4), SEEDED, slot=3, first_page=20)
    matcher = Matcher(xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar('root ::= "abcde"'))
    starts: tuple[SlotStart, ...] = (SlotStart(2, None, 0), SlotStart(3, None, 0))
    for _ in range(5):
        rows = [again.row(), dataclasses.replace(held.row(), matcher=matcher)]
        outputs = run(masked, rows, slot_starts=starts)
        starts = ()
        for sequence, row, output in zip((again, held), rows, outputs, strict=True):
            sequence.take(row, output)
        matcher.queue(outputs[1].token_ids)

    assert again.output_ids == free.output_ids
    assert bytes(held.output_ids) == b"abcde"


def test_d16_a_row_that_thinks_before_its_grammar_cannot_end(executor: Executor) -> None:
    """D-16: the plan says so, and the step keeps the end out whatever the model wants."""
    eos_id = executor.model_config.eos_token_id
    params = msgspec.structs.replace(GREEDY, logit_bias=((eos_id, 100.0),))
    for is_thinking in (False, True):
        sequence = Sequence("s", prompt(9), params, slot=1, first_page=1)
        row = dataclasses.replace(sequence.row(), is_thinking=is_thinking)
        (output,) = run(executor, [row], slot_starts=(SlotStart(1, None, 0),))
        assert (output.token_ids == (eos_id,)) == (not is_thinking)


def test_a_grammar_without_a_masker_is_refused(
    executor: Executor, info: xgrammar.TokenizerInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is never sampled past its grammar, and found before the peer would wait in expert layers."""
    monkeypatch.setattr(executor, "_forward", None)
    sequence = Sequence("s", prompt(5), GREEDY, slot=1, first_page=1)
    matcher = Matcher(xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar('root ::= "a"'))
    with pytest.raises(InvariantError, match="no mask"):
        run(executor, [dataclasses.replace(sequence.row(), matcher=matcher)], slot_starts=(SlotStart(1, None, 0),))


def test_a_sequence_resumes_from_a_snapshot_with_the_ids_of_a_cold_run(executor: Executor) -> None:
    """A prefix hit continues at a page end in a slot that held something else, with rings from a snapshot."""
    cold = Sequence("cold", prompt(300), SEEDED, slot=1, first_page=1)
    generate(executor, [cold], 5)

    first = Sequence("first", prompt(300), SEEDED, slot=2, first_page=7)
    row = first.row(2 * PAGE)
    run(
        executor,
        [row],
        slot_starts=(SlotStart(2, None, 0),),
        snapshot_saves=(SnapshotSave(2, 3, 2 * PAGE),),
    )
    other = Sequence("other", prompt(200, 9), GREEDY, slot=4, first_page=20)
    generate(executor, [other], 2)
    hit = Sequence("hit", prompt(300), SEEDED, slot=4, first_page=7)
    hit.computed = 2 * PAGE
    row = hit.row()
    hit.take(row, run(executor, [row], slot_starts=(SlotStart(4, 3, 2 * PAGE),))[0])
    generate(executor, [hit], 5)

    assert hit.output_ids == cold.output_ids


def test_snapshots_inside_a_chunk_are_those_of_chunks_that_end_there(executor: Executor) -> None:
    """Decision 10: to the bit, beside a neighbour, from any start of the chunk, and resumed from with a cold run's ids.

    A prompt needs no step more for the snapshot that an equal one resumes from.
    """
    ids = prompt(300, 5)
    cold = Sequence("cold", ids, SEEDED, slot=1, first_page=1)
    generate(executor, [cold], 5)
    pool = executor._pool
    kept = (pool.window_snapshots, pool.draft_snapshots, pool.overlap_snapshots)

    def snapshot(number: int) -> list[torch.Tensor]:
        # Flat rows of each tensor, as many a snapshot.
        return [each.view(each.shape[0], 4, -1)[:, number].clone() for each in kept if each.numel()]

    cut = Sequence("cut", ids, SEEDED, slot=2, first_page=7)
    starts: tuple[SlotStart, ...] = (SlotStart(2, None, 0),)
    for number, end in enumerate((PAGE, 2 * PAGE)):
        row = cut.row(PAGE)
        saves = (SnapshotSave(2, number, end),)
        cut.take(row, run(executor, [row], slot_starts=starts, snapshot_saves=saves)[0])
        starts = ()
    expected = [snapshot(0), snapshot(1)]

    for first in (0, PAGE):
        whole = Sequence("whole", ids, SEEDED, slot=3, first_page=13)
        neighbour = Sequence("neighbour", prompt(200, 6), GREEDY, slot=4, first_page=20)
        starts = (SlotStart(3, None, 0), SlotStart(4, None, 0))
        if first:
            row = whole.row(first)
            whole.take(row, run(executor, [row], slot_starts=starts[:1])[0])
            starts = starts[1:]
        saves = (SnapshotSave(3, 3, 2 * PAGE, inner_slot=7), SnapshotSave(4, 0, PAGE, inner_slot=8))
        if not first:
            saves = (SnapshotSave(3, 2, PAGE, inner_slot=8), saves[0])
        rows = [neighbour.row(), whole.row()]
        outputs = run(executor, rows, slot_starts=starts, snapshot_saves=saves)
        whole.take(rows[1], outputs[1])
        assert whole.output_ids == cold.output_ids[:1]
        for number, wanted in ((3, expected[1]), *([] if first else [(2, expected[0])])):
            assert all(torch.equal(got, want) for got, want in zip(snapshot(number), wanted, strict=True))

    hit = Sequence("hit", ids, SEEDED, slot=5, first_page=13)
    hit.computed = 2 * PAGE
    row = hit.row()
    hit.take(row, run(executor, [row], slot_starts=(SlotStart(5, 3, 2 * PAGE),))[0])
    generate(executor, [hit], 5)
    assert hit.output_ids == cold.output_ids


def test_rows_follow_the_ids_of_chunks_that_have_not_landed(executor: Executor) -> None:
    """Overlap: ids are counted over the rows that sample; a chunk between them that ends no prompt gives none."""
    names = (("stream", 9), ("long", 200), ("short", 50))
    plain = [Sequence(name, prompt(size, 3), SEEDED, 1 + n, 1 + 6 * n) for n, (name, size) in enumerate(names)]
    generate(executor, plain, 3, chunk=PAGE)

    stream, long, short = (
        Sequence(name, prompt(size, 3), SEEDED, 4 + n, 19 + 6 * n) for n, (name, size) in enumerate(names)
    )

    def behind(sequence: Sequence, follows: int) -> PlanRow:
        last = len(sequence.prompt_ids) + len(sequence.output_ids)
        row = dataclasses.replace(sequence.row(), start=last, num_logits=1, sampling=SEEDED)
        return dataclasses.replace(row, input_ids=(0,), follows=follows)

    def launch(*rows: PlanRow, starts: tuple[SlotStart, ...] = ()) -> Callable[[], StepOutput]:
        plan = Plan(StepKind.MIXED, rows, starts)
        return executor.launch(plan, (plan.num_tokens, 0))

    rows = [stream.row()]
    first = launch(*rows, starts=(SlotStart(4, None, 0),))
    second = launch(
        behind(stream, 0), long.row(PAGE), short.row(), starts=(SlotStart(5, None, 0), SlotStart(6, None, 0))
    )
    stream.take(rows[0], first().rows[0])
    long.computed, short.computed = PAGE, 50
    third = launch(behind(stream, 0), long.row(), behind(short, 1))
    outputs = second().rows
    assert outputs[1].token_ids == ()
    stream.output_ids += outputs[0].token_ids
    short.output_ids += outputs[2].token_ids
    long.computed = 200
    fourth = launch(behind(long, 1), behind(short, 2))
    for sequence, output in zip((stream, long, short), third().rows, strict=True):
        sequence.output_ids += output.token_ids
    for sequence, output in zip((long, short), fourth().rows, strict=True):
        sequence.output_ids += output.token_ids

    for sequence, other, count in zip((stream, long, short), plain, (3, 2, 3), strict=True):
        assert sequence.output_ids == other.output_ids[:count]
        assert len(sequence.output_ids) == count


class AnyTexts:
    """Of a request without stop strings nobody reads its text."""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def is_special(self, token_id: int) -> bool:
        return False


Got = dict[str, list[TokenLogprob]]


def serve(executor: Executor, batches: list[list[TokenizedRequest]], snapshot_pages: int) -> tuple[Got, int]:
    """Plan, run and commit as the loop does with overlap, a batch more each second step.

    Returns what each request got, id by id with its log-probability, and how many page ends were kept inside chunks.
    """
    sizes = executor.sizes
    queue = RequestQueue()
    memory = Memory(
        num_pages=sizes.num_pages, num_slots=sizes.num_slots, num_snapshots=sizes.num_snapshots, page_tokens=PAGE
    )
    limits = Limits(sizes.num_inner_slots * PAGE, PAGE, snapshot_pages * PAGE, PAGE)
    planner, committer = Planner(queue, memory, limits), Committer(queue, memory, AnyTexts(), frozenset())
    got: Got = {item.request_id: [] for batch in batches for item in batch}
    flights: list[tuple[Plan, Launched, Callable[[], StepOutput]]] = []
    arrivals, steps, num_inner = itertools.count(1), itertools.count(), 0
    waiting = list(batches)
    while waiting or len(queue) or flights:
        if waiting and next(steps) % 2 == 0:
            items = waiting.pop(0)
            queue.add(
                [Request(item, arrival=next(arrivals), delivered_ns=1, max_context_tokens=4096) for item in items]
            )
        sampling = [row.request_id for plan, _, _ in flights for row in plan.rows if row.sampling is not None]
        proposal = planner.propose({request_id: index for index, request_id in enumerate(sampling)})
        landing = list(flights)
        if proposal.decode_rows or proposal.chunk_rows:
            plan = planner.settle(proposal, StepKind.MIXED)
            num_inner += sum(save.inner_slot is not None for save in plan.snapshot_saves)
            flights.append((plan, committer.launched(plan), executor.launch(plan, (plan.num_tokens, 0))))
        for flight in landing:
            plan, launched, wait = flight
            for delta in committer.commit(plan, wait(), launched).deltas:
                got[delta.request_id] += delta.logprobs or ()
            flights.remove(flight)
    return got, num_inner


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_share_and_part_anywhere_get_what_each_gets_alone(executor: Executor, seed: int) -> None:
    """Path invariance through planner, executor and commit: hits that end at a page end inside somebody's chunk, steps
    behind chunks that have not landed, prompts of whole pages and one token more or less; ids and log-probabilities."""
    dice = random.Random(seed)
    base = prompt(4 * PAGE, seed)
    lengths = (3 * PAGE, 3 * PAGE - 1, 3 * PAGE + 1, 2 * PAGE, dice.randrange(1, 4 * PAGE), dice.randrange(1, 4 * PAGE))
    requests = []
    for number, length in enumerate(lengths):
        common = dice.choice((length, PAGE, dice.randrange(length)))
        ids = base[:common] + prompt(4 * PAGE, 10 * seed + number)[common:length]
        params = msgspec.structs.replace(SEEDED, max_tokens=4, seed=number, top_logprobs=0, ignore_eos=True)
        requests.append(
            TokenizedRequest(
                request_id=f"r{number}",
                prompt_ids=ids,
                sampling=params,
                received_ns=1,
                encoded_ns=2,
                tokenized_ns=3,
                dispatched_ns=4,
            )
        )
    dice.shuffle(requests)
    batches = [requests[:2], requests[2:5], requests[5:]]

    got, num_inner = serve(executor, batches, snapshot_pages=1 + seed % 2)

    assert num_inner
    for request in requests:
        alone, _ = serve(executor, [[request]], snapshot_pages=100)
        assert got[request.request_id] == alone[request.request_id]
        assert len(alone[request.request_id]) == 4


def test_a_retracted_sequence_resumes_with_the_ids_of_an_undisturbed_run(executor: Executor) -> None:
    """After a retract, prompt and outputs so far are prefilled again; the noise goes by absolute position."""
    whole = Sequence("whole", prompt(140), SEEDED, slot=1, first_page=1)
    generate(executor, [whole], 8)
    retracted = Sequence("retracted", prompt(140), SEEDED, slot=2, first_page=7)
    generate(executor, [retracted], 4)

    retracted.computed, retracted.slot = 0, 3
    generate(executor, [retracted], 8, chunk=64)

    assert retracted.output_ids == whole.output_ids


def test_prompt_logprobs_join_over_chunks_beside_a_decoding_neighbour(executor: Executor) -> None:
    """D-27: each chunk reads the tokens behind its own, the first of the next chunk included, the last has none."""
    ids = prompt(40)
    params = msgspec.structs.replace(GREEDY, top_logprobs=1, prompt_logprobs=True)
    whole = Sequence("whole", ids, params, slot=1, first_page=1)
    (expected,) = run(executor, [whole.row(top=2)], slot_starts=(SlotStart(1, None, 0),))
    neighbour = Sequence("neighbour", prompt(9, 1), SEEDED, slot=2, first_page=7)
    generate(executor, [neighbour], 1)

    parts = Sequence("parts", ids, params, slot=3, first_page=13)
    starts, read, outputs = (SlotStart(3, None, 0),), [], []
    while not parts.output_ids:
        rows = [neighbour.row(), parts.row(16, top=2)]
        outputs = list(run(executor, rows, slot_starts=starts))
        starts = ()
        neighbour.take(rows[0], outputs[0])
        parts.take(rows[1], outputs[1])
        assert outputs[0].prompt_logprobs is None
        assert outputs[1].prompt_logprobs is not None
        read += outputs[1].prompt_logprobs

    assert expected.prompt_logprobs is not None
    assert [entry.token_id for entry in read] == list(ids[1:])
    assert tuple(read) == expected.prompt_logprobs
    assert all(len(entry.top) == 2 for entry in read)
    assert outputs[1].token_ids == expected.token_ids
    assert outputs[1].logprobs == expected.logprobs


def test_two_ranks_give_the_ids_of_one_process_also_while_the_other_is_idle(
    executor: Executor, checkpoint: Path
) -> None:
    """A rank without tokens takes part with its experts; whichever rank has a request, its ids are the same."""
    expected = Sequence("local", prompt(50), SEEDED, slot=1, first_page=1)
    generate(executor, [expected], 3)
    peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    config = config_of(checkpoint)

    def rank_main(rank: int) -> list[tuple[int, ...]]:
        groups = RankGroups.open(rank, peers[rank], CPU, startup_timeout_s=30, timeout_s=30)
        own = Executor.build(config, rank, groups.expert_exchange(), lambda stage, done, total: None)
        groups.barrier(30)
        outputs = []
        for busy in ((True, False), (False, True), (True, True)):  # which ranks have the request
            sequence = Sequence("own", prompt(50), SEEDED, slot=1, first_page=1)
            starts = (SlotStart(1, None, 0),)
            while len(sequence.output_ids) < 3:
                num_tokens = len(sequence.row().input_ids)
                counts = (num_tokens * busy[0], num_tokens * busy[1])
                if busy[rank]:
                    rows = (sequence.row(),)
                    output = own.step(Plan(StepKind.MIXED, rows, slot_starts=starts), counts)
                    sequence.take(rows[0], output.rows[0])
                else:
                    assert own.step(Plan(StepKind.MIXED, ()), counts).rows == ()
                    # Follow the peer's lengths.
                    sequence.computed += num_tokens
                    sequence.output_ids += (0,)
                starts = ()
            if busy[rank]:
                outputs.append(sequence.output_ids)
        groups.barrier(30)
        own.close()
        groups.close()
        return outputs

    with peers[0], peers[1], ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(rank_main, rank) for rank in (0, 1)]
        for future in as_completed(futures, 60):
            future.result()  # the first failure is the cause; its peer fails later, by the time-out
        results = [future.result() for future in futures]

    assert results == [[expected.output_ids] * 2] * 2


def test_a_plan_that_is_not_the_agreed_one_is_refused_before_any_exchange(executor: Executor) -> None:
    """X-11: one rank entering expert layers with other counts than its peer knows would hang both."""
    row = Sequence("s", prompt(5), GREEDY, slot=1, first_page=1).row()

    with pytest.raises(InvariantError, match="5 tokens"):
        executor.step(Plan(StepKind.PREFILL, (row,)), (6, 0))


def test_prompt_logprobs_need_logits_of_every_token(executor: Executor) -> None:
    """Fewer logit rows would read the wrong token's distribution."""
    row = Sequence("s", prompt(5), GREEDY, slot=1, first_page=1).row(top=0)

    with pytest.raises(InvariantError, match="log-probabilities"):
        run(executor, [PlanRow(**{name: getattr(row, name) for name in row.__slots__} | {"num_logits": 1})])


def test_build_loads_with_progress_and_stays_inside_the_budget(checkpoint: Path) -> None:
    """The operator sees the load move, and the pools take what kv.device_bytes allows and no more."""
    stages: list[tuple[str, int, int]] = []
    config = config_of(checkpoint)
    model_config = load_model_config(checkpoint)
    _, exchange = load_both_shards(checkpoint, model_config, torch.float32, CPU)

    built = Executor.build(config, 0, exchange, lambda *stage: stages.append(stage))

    weights = [(done, total) for stage, done, total in stages if stage == "weights"]
    assert weights[-1][0] == weights[-1][1] > 0
    assert [done for done, _ in weights] == sorted(done for done, _ in weights)
    assert stages[-1][0] == "pools"
    assert sum(built.kv_bytes.values()) <= 4 << 20
    assert built.sizes.num_slots == 7
    assert built.weight_bytes > 0


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A prompt could then hold an id without an embedding."""
    whole = json.loads((checkpoint / "tokenizer.json").read_text())
    whole["added_tokens"].append(whole["added_tokens"][0] | {"id": VOCAB, "content": "<beyond>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    config = load_model_config(checkpoint)
    model, exchange = load_both_shards(checkpoint, config, torch.float32, CPU)
    pool = KVPool(config.kv_geometry(PAGE, "float32"), PoolSizes(2, 2, 0), torch.float32, CPU)

    with pytest.raises(CheckpointError, match=str(VOCAB)):
        Executor(0, model, 0, pool, exchange, Tokenizer.load(tmp_path))


def test_build_proves_the_cpu_kernels_before_it_loads_anything(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build whose bits depend on the batch is a start failure, so the proof must really run at the start."""

    def refuse() -> None:
        raise CapabilityError(feature="kernels", missing="row invariance", remedy="rebuild")

    monkeypatch.setattr("dsparkd.executor.executor.require_row_invariance", refuse)
    stages: list[tuple[str, int, int]] = []
    exchange = load_both_shards(checkpoint, load_model_config(checkpoint), torch.float32, CPU)[1]

    with pytest.raises(CapabilityError, match="row invariance"):
        Executor.build(config_of(checkpoint), 0, exchange, lambda *stage: stages.append(stage))

    assert stages == []


def test_a_host_without_a_c_compiler_is_told_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would fail in the first step, and the unit would be restarted for nothing."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("dsparkd.executor.executor.shutil.which", lambda name: None)
    with pytest.raises(CapabilityError, match="install gcc or clang"):
        require_compiler()

    monkeypatch.setattr("dsparkd.executor.executor.shutil.which", lambda name: f"/usr/bin/{name}")
    require_compiler()
