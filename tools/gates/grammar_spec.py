"""Gate `grammar_spec`: whatever is drafted and accepted, an answer with a grammar is its sentence, and the same one.

    python -m tools.gates grammar_spec [--grammars 2000] [--checkpoint DIR] [--skip-server] [--json]

Random grammars over the checkpoint's ids are walked along random and hostile drafts; what follows is chosen at random
from the masks, and accepted by both rules with verify lengths cut at random. A fresh matcher that hears every emitted
id is the judge: it refuses none, and has ended where an answer ended. Then the 64 constraints of the gate `schemas` are
answered at max_verify 0, 1 and gamma, 32 at once and alone: the texts are equal, and valid by `jsonschema` or `re`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray

from dsparkd.errors import GrammarError
from dsparkd.executor.accept import NO_TOKEN, Block, NoiseKeys, accept_coupled, accept_rejection
from dsparkd.grammar.compiler import Compiler
from dsparkd.grammar.matcher import Matcher, ffi_matcher
from dsparkd.grammar.vocabulary import make_vocabularies
from dsparkd.messages import Grammar
from dsparkd.model.config import load_model_config
from dsparkd.native.traversal import NativeTraversal, Walk, WalkStatus
from dsparkd.text.tokenizer import Tokenizer
from tools import exam
from tools.gates import schemas
from tools.harness import Server, Tables, ensure_checkpoint

GRAMMARS = 2000
AT_ONCE = 16
MAX_STEPS = 24
CONCURRENCY = 32
PIECES = ("a", "b", "ab", " ", "the ", "12", "x=", "é", "日")


@dataclass
class Walked:
    """What the walks came to. faults: an id that a fresh matcher refused, an end that is none, a walk that failed."""

    grammars: int = 0
    refused_grammars: int = 0
    ended: int = 0
    ids: int = 0
    accepted_drafts: int = 0
    refused_drafts: int = 0
    shortened: int = 0  # windows with fewer usable rows than drafts, because one was refused or ended the grammar
    faults: list[str] = field(default_factory=list)


# --- random grammars


def random_regex(draw: random.Random, depth: int = 0) -> str:
    """A pattern that always has a sentence, and few states."""
    if depth == 3 or draw.random() < 0.3:
        return draw.choice(("a", "b", "[a-f]", "[0-9]{1,3}", "the ", "é", "[^\\n]"))
    parts = [random_regex(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return draw.choice(("".join(parts), f"({'|'.join(parts)})", f"({parts[0]}){{0,{draw.randint(1, 3)}}}{parts[-1]}"))


def random_ebnf(draw: random.Random) -> str:
    """Rules that name later ones, and perhaps themselves behind a letter, beside an alternative that ends."""
    count = draw.randint(1, 4)
    lines = []
    for number in range(count):
        name = "root" if number == 0 else f"r{number}"
        later = [f"r{other}" for other in range(number + 1, count)]
        sequences = [
            " ".join(
                draw.choice([json.dumps(draw.choice(PIECES), ensure_ascii=False), "[0-9]", *later]) for _ in range(3)
            )
            for _ in range(draw.randint(1, 3))
        ]
        if draw.random() < 0.5:
            sequences.append(f'"({number}" {name} ")"')
        lines.append(f"{name} ::= {' | '.join(sequences)}")
    return "\n".join(lines) + "\n"


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, object]:
    """A schema with small instances."""
    kind = draw.choice(
        ("string", "integer", "boolean", "enum", "array", "object") if depth < 2 else ("integer", "enum")
    )
    match kind:
        case "string":
            return {"type": "string", "maxLength": draw.randint(0, 8)}
        case "integer":
            return {"type": "integer", "minimum": draw.randint(-5, 5), "maximum": draw.randint(6, 500)}
        case "enum":
            return {"enum": draw.sample(["red", "green", 1, 2.5, None, True, "日本"], draw.randint(1, 3))}
        case "array":
            return {"type": "array", "items": random_schema(draw, depth + 1), "maxItems": draw.randint(0, 3)}
        case "object":
            names = [f"k{number}" for number in range(draw.randint(0, 3))]
            properties = {name: random_schema(draw, depth + 1) for name in names}
            return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        case _:
            return {"type": "boolean"}


def random_grammar(draw: random.Random) -> Grammar:
    """One of the three kinds."""
    match draw.randrange(3):
        case 0:
            return Grammar(kind="regex", text=random_regex(draw))
        case 1:
            return Grammar(kind="ebnf", text=random_ebnf(draw))
        case _:
            return Grammar(kind="json_schema", text=json.dumps(random_schema(draw)), max_whitespace=2)


# --- walks


class Answer:
    """One request: its matcher, what it emitted, and whether that is a whole sentence by now."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_id: int) -> None:
        self.matcher = Matcher(compiled)
        self.compiled = compiled
        self.ids: list[int] = []
        self.has_ended = False
        self._stop_id = stop_id

    def take(self, ids: Sequence[int]) -> None:
        """Keep an accepted run, up to the id that ends the grammar."""
        for token_id in ids:
            self.ids.append(token_id)
            self.matcher.queue((token_id,))
            if token_id == self._stop_id:
                self.has_ended = True
                return

    def judge(self) -> str | None:
        """What a fresh matcher finds wrong with what was emitted."""
        fresh = xgrammar.GrammarMatcher(self.compiled)
        for place, token_id in enumerate(self.ids):
            if fresh.is_terminated() or not fresh.accept_token(token_id):
                return f"id {token_id} at {place} of {self.ids}"
        if self.has_ended != fresh.is_terminated():
            return f"{self.ids} ended: {self.has_ended}, by the grammar: {fresh.is_terminated()}"
        if self.has_ended and not (self.matcher.commit() and self.matcher.is_terminated):
            return f"the matcher has not ended behind {self.ids}"
        return None


class Walker:
    """Walks batches of answers in windows of `width` nodes."""

    def __init__(self, stop_id: int, vocab_size: int, width: int, seed: int) -> None:
        self._stop_id, self._vocab_size, self._width = stop_id, vocab_size, width
        self._draw = random.Random(seed)
        self._chance = np.random.default_rng(seed)
        self._traversal = NativeTraversal.open(2)
        words = -(-vocab_size // 32)
        mask = np.full((AT_ONCE * width, words), -1, np.int32)
        self._walk = Walk(np.zeros((AT_ONCE, width), np.int64), mask, vocab_size, max_commits=width)
        self._scratch = np.zeros((1, words), np.int32)

    def play(self, answers: Sequence[Answer], walked: Walked) -> None:
        """Run a batch to its ends or MAX_STEPS, then judge it."""
        for step in range(MAX_STEPS):
            live = [answer for answer in answers if not answer.has_ended]
            if not live:
                break
            self._step(live, step, walked)
        for answer in answers:
            fault = answer.judge()
            if fault is not None:
                walked.faults.append(fault)
            walked.ended += answer.has_ended
            walked.ids += len(answer.ids)

    def _step(self, live: Sequence[Answer], step: int, walked: Walked) -> None:
        walk = self._walk
        drafts = [self._drafts(answer) for answer in live]
        walk.begin(len(live))
        for tree, (answer, drafted) in enumerate(zip(live, drafts, strict=True)):
            walk.drafts[tree, 1:] = drafted
            walk.add(answer.matcher.handle, tree, commits=answer.matcher.take_queue())
        # Now and then the time is over at once: then each has its first row only.
        self._traversal.run(walk, time.monotonic_ns() if self._draw.random() < 0.1 else 0)
        rows = walk.mask.reshape(-1, self._width, walk.num_words)
        usable = [self._usable(tree, walked) for tree in range(len(live))]
        allowed = unpack(rows[: len(live)], self._vocab_size)
        block = Block(
            torch.tensor(drafts),
            torch.tensor([self._draw.randint(0, self._width - 1) for _ in live]),
            torch.tensor(usable),
        )
        accepted = self._accept(block, allowed, step)
        for answer, drafted, ids, can in zip(live, drafts, accepted, usable, strict=True):
            # Of a row that has failed, nothing is kept; the fault is noted.
            kept = [token_id for token_id in ids if token_id != NO_TOKEN] if can else []
            walked.accepted_drafts += max(0, len(kept) - 1)
            walked.refused_drafts += len(drafted) - max(0, len(kept) - 1)
            walked.shortened += can < self._width
            answer.take(kept)

    def _usable(self, tree: int, walked: Walked) -> int:
        status = self._walk.status(tree)
        if status not in (WalkStatus.WALKED, WalkStatus.LATE):
            walked.faults.append(f"a walk ended as {status.name}")
            return 0
        return int(self._walk.usable_rows[tree])

    def _accept(self, block: Block, allowed: NDArray[np.bool_], step: int) -> list[list[int]]:
        """Choose from the masks and accept, by one rule in one step and by the other in the next."""
        # What the target thinks of each id: random, with a liking for the drafts, or nothing would be accepted.
        weights = torch.from_numpy(self._chance.random(allowed.shape, np.float32)) * 1e-3
        weights[:, :-1].scatter_add_(2, block.draft_ids[:, :, None], torch.full((*block.draft_ids.shape, 1), 8.0))
        # A mask with no bit would divide by zero, but no such mask is usable.
        weights *= torch.from_numpy(allowed)
        if step % 2:
            return accept_coupled(block, weights.argmax(dim=-1)).ids.tolist()
        probs = weights / weights.sum(dim=-1, keepdim=True).clamp_(min=1e-30)
        believed = torch.zeros_like(probs[:, :-1]).scatter_(2, block.draft_ids[:, :, None], 1.0)
        keys = NoiseKeys(*(torch.randint(0, 2**31, (len(probs),)) for _ in range(3)))
        return accept_rejection(block, believed, probs, keys).ids.tolist()

    def _drafts(self, answer: Answer) -> list[int]:
        """A window's drafts: a legal chain up to a random place, then anything; or anything at all."""
        length = self._width - 1
        drafts = list(self._legal(answer, self._draw.choice((0, 1, length, length))))
        while len(drafts) < length:
            drafts.append(self._stop_id if self._draw.random() < 0.2 else self._draw.randrange(self._vocab_size))
        return drafts

    def _legal(self, answer: Answer, count: int) -> Iterator[int]:
        """Ids that a matcher at the answer's place takes one after the other, in a hurry to end."""
        matcher = xgrammar.GrammarMatcher(answer.compiled)
        for token_id in answer.ids:
            matcher.accept_token(token_id)
        for _ in range(count):
            if matcher.is_terminated():
                return
            ffi_matcher(matcher).fill_next_token_bitmask(self._scratch, 0, False)
            ids = np.flatnonzero(unpack(self._scratch[None], self._vocab_size)[0, 0])
            if not len(ids):
                return
            chosen = (
                self._stop_id if self._stop_id in ids and self._draw.random() < 0.4 else int(self._draw.choice(ids))
            )
            matcher.accept_token(chosen)
            yield chosen

    def close(self) -> None:
        """End the traversal's threads."""
        self._traversal.close()


def unpack(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Masks [R, W, words] as booleans [R, W, vocab_size]."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(raw, axis=-1, bitorder="little")[..., :vocab_size].astype(np.bool_)


def walk_grammars(checkpoint: Path, count: int, seed: int = 24) -> Walked:
    """Play `count` random grammars; those that the compiler refuses are counted and drawn anew."""
    config = load_model_config(checkpoint)
    tokenizer = Tokenizer.load(checkpoint)
    vocabularies = make_vocabularies(tokenizer, config.vocab_size, (config.eos_token_id,))
    compiler = Compiler(vocabularies, 1)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    walker = Walker(config.eos_token_id, config.vocab_size, 1 + config.gamma, seed)
    walked = Walked()
    try:
        while walked.grammars < count and not walked.faults:
            batch: list[Answer] = []
            while len(batch) < min(AT_ONCE, count - walked.grammars):
                try:
                    batch.append(Answer(compiler.compile(random_grammar(draw)), config.eos_token_id))
                except GrammarError:
                    walked.refused_grammars += 1
            walked.grammars += len(batch)
            walker.play(batch, walked)
    finally:
        walker.close()
    return walked


# --- 64 constraints over HTTP


def answer_all(checkpoint: Path, cases: Sequence[schemas.Case], most: int, at_once: int) -> list[str]:
    """Each case's answer as it is spelled, or what is wrong with it behind an exclamation mark."""
    overrides: Tables = {
        **schemas.PATIENT,
        "engine": {"checkpoint": str(checkpoint), "dtype": "float32"},
        "dspark": {"enabled": True, "max_verify": most},
    }

    def ask(pair: tuple[int, schemas.Case]) -> str:
        number, case = pair
        try:
            message, finish = asker.ask(case, number % 2, stream=False)
        except (AssertionError, OSError) as error:
            return f"! {error}"
        wrong = case.check(message) or ("" if finish in ("stop", "tool_calls") else f"ended with {finish}")
        if wrong:
            return f"! {wrong}"
        return str(schemas.spelled(message) if message.get("tool_calls") else message["content"])

    with Server(overrides) as server:
        asker = schemas.Asker(server.wait_ready().base_url)
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(ask, enumerate(cases)))


def find_cases(checkpoint: Path) -> list[schemas.Case]:
    """The schemas gate's cases; plain decoding says which questions the checkpoint answers rightly by itself."""
    model = checkpoint.name
    engine = {"checkpoint": str(checkpoint), "dtype": "float32"}
    with Server({**schemas.PATIENT, "engine": engine, "dspark": {"enabled": False}}) as server:
        known = schemas.Known(server.wait_ready().base_url, model, exam.load_encoding(checkpoint))
        return [
            *schemas.extraction_cases(known, model),
            *schemas.call_cases(known, model),
            *schemas.shape_cases(model),
        ]


def compare_answers(checkpoint: Path) -> tuple[int, list[str]]:
    """How many answers were compared, and what differs or is wrong."""
    cases = find_cases(checkpoint)
    gamma = load_model_config(checkpoint).gamma
    ways = ((0, CONCURRENCY), (1, CONCURRENCY), (gamma, CONCURRENCY), (gamma, 1))
    answers = {way: answer_all(checkpoint, cases, *way) for way in ways}
    base = answers[ways[0]]
    faults = []
    for (most, at_once), given in answers.items():
        for case, one, other in zip(cases, base, given, strict=True):
            name = f"{case.name}, max_verify {most}, {at_once} at once"
            if other.startswith("!"):
                faults.append(f"{name}: {other}")
            elif one != other:
                faults.append(f"{name}: {other[:120]!r}, not {one[:120]!r}")
    return sum(map(len, answers.values())), faults


def main(argv: list[str]) -> int:
    """Walk and ask; 0 when every answer is a sentence and the same one."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gates grammar_spec", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--grammars", type=int, default=GRAMMARS)
    parser.add_argument("--checkpoint", type=Path, help="directory; the shipped checkpoint by default")
    parser.add_argument("--skip-server", action="store_true", help="walk random grammars only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    began = time.perf_counter()
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    walked = walk_grammars(checkpoint, arguments.grammars)
    compared, faults = (0, []) if arguments.skip_server else compare_answers(checkpoint)
    ok = not walked.faults and not faults and walked.accepted_drafts > 0 and walked.shortened > 0
    elapsed = round(time.perf_counter() - began, 1)
    if arguments.json:
        facts = {"ok": ok, "elapsed_s": elapsed, "checkpoint": checkpoint.name}
        print(json.dumps(facts | {"walked": asdict(walked), "answers": compared, "faults": faults}))
        return 0 if ok else 1
    for fault in (*walked.faults, *faults):
        print(f"FAIL {fault}")
    print(
        f"{walked.grammars} grammars, {walked.ended} answers ended, {walked.ids} ids, {walked.accepted_drafts} drafts "
        f"accepted, {walked.refused_drafts} not, {walked.shortened} windows shortened"
    )
    print(f"{'ok' if ok else 'FAIL'}: {compared} answers compared, {elapsed} s")
    return 0 if ok else 1
