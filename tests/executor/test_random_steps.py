"""Random steps of one executor: whatever a request shares them with, it gets what it gets alone."""

from __future__ import annotations

import dataclasses
import random

import pytest

from dsparkd.executor.plan import Plan, PlanRow, SlotStart, StepKind
from dsparkd.messages import SamplingParams
from tests.executor.test_graphs import GREEDY, ROWS, SEEDED, Lab, Text, advance

# Around where rings, entries and pages end, and where the indexer begins to choose.
LENGTHS = (2, 9, 127, 254, 300, 519)
NUM_IDS = 14  # of each request
SIZES = (1, 2, 3, 6, 7, 40, 1000)  # of chunks: up to six tokens are stored before the step's first one reads its ring


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab("cpu")


@pytest.fixture(scope="module")
def alone(lab: Lab) -> dict[tuple[int, SamplingParams], Text]:
    """Each prompt in one chunk, then an id a step, with nobody beside it."""
    texts = {(n, params): Text(lab.ids[:n], params, 1) for n in LENGTHS for params in (GREEDY, SEEDED)}
    for text in texts.values():
        start = (SlotStart(1, None, 0),)
        text.take(lab.step([text.row()], replays=False, kind=StepKind.PREFILL, starts=start)[0][0])
        while len(text.outputs) < NUM_IDS:
            advance(lab, [text], replays=False)
    return texts


@dataclasses.dataclass
class Guest:
    """A request and how much of its prompt has been computed."""

    text: Text
    done: int = 0

    def chunk(self, size: int) -> PlanRow:
        """Its next tokens; the last of them are sampled behind."""
        row, stop = self.text.row(), min(self.done + size, len(self.text.ids))
        is_last = stop == len(self.text.ids)
        return dataclasses.replace(
            row,
            input_ids=self.text.ids[self.done : stop],
            start=self.done,
            num_logits=int(is_last),
            sampling=row.sampling if is_last else None,
        )


def prefill(lab: Lab, draw: random.Random, decoding: list[Text], guests: list[Guest]) -> int:
    """A step of chunks, beside rows that decode; returns how many of them are stored early."""
    chunks = [guest.chunk(draw.choice(SIZES)) for guest in guests]
    starts = tuple(SlotStart(chunk.slot, None, 0) for chunk in chunks if not chunk.start)
    kind = StepKind.MIXED if decoding else StepKind.PREFILL
    plan = Plan(kind, (*(text.row() for text in decoding), *chunks), starts)
    outputs = lab.executor.step(plan, (plan.num_tokens, 0)).rows
    texts = [*decoding, *(guest.text for guest in guests)]
    for text, row, output in zip(texts, plan.rows, outputs, strict=True):
        if row.sampling is not None:
            text.take(output)
    for guest, chunk in zip(guests, chunks, strict=True):
        guest.done += len(chunk.input_ids)
    return len(chunks) * (max(len(chunk.input_ids) for chunk in chunks) <= 1 + lab.gamma)


def decode(lab: Lab, draw: random.Random, texts: list[Text]) -> int | None:
    """A step of any width, all drafts or some, eager or on a tier, beside a peer's rows; returns the tier."""
    most = draw.choice((0, 2, lab.gamma, lab.gamma))
    room = draw.randint(0, len(texts) * most) if most and draw.random() < 0.3 else None
    peer = draw.choice((0, 0, 1, ROWS))
    return advance(lab, texts, replays=draw.random() < 0.7, most=most, room=room, peer=peer)


@pytest.mark.parametrize("seed", range(4))
def test_a_request_gets_what_it_gets_alone(lab: Lab, alone: dict[tuple[int, SamplingParams], Text], seed: int) -> None:
    """P-22, T-04: ids and log-probabilities, to the bit: in chunks of any sizes that others decode beside, some of them
    stored before they are read; with drafts, some of them refused; in slots that others had."""
    draw = random.Random(seed)
    lab.executor._drafts_ahead = bool(seed % 2)
    free, guests, ended = list(range(1, 1 + ROWS)), list[Guest](), list[Text]()
    num_early, tiers = 0, set()
    while len(ended) < 2 * ROWS:
        if free and (not guests or draw.random() < 0.4):
            place = free.pop(draw.randrange(len(free)))
            guests.append(Guest(Text(lab.ids[: draw.choice(LENGTHS)], draw.choice((GREEDY, SEEDED)), place)))
        waiting = [guest for guest in guests if guest.done < len(guest.text.ids)]
        decoding = [guest.text for guest in guests if guest not in waiting]
        decoding = draw.sample(decoding, draw.randint(0, len(decoding)))
        if waiting and draw.random() < 0.6:
            num_early += prefill(lab, draw, decoding, draw.sample(waiting, draw.randint(1, len(waiting))))
        elif decoding:
            tiers.add(decode(lab, draw, decoding))
        for guest in [guest for guest in guests if len(guest.text.outputs) >= NUM_IDS]:
            guests.remove(guest)
            free.append(guest.text.place)
            ended.append(guest.text)
    for text in ended:
        plain = alone[len(text.ids), text.params]
        assert text.outputs[:NUM_IDS] == plain.outputs
        assert logprobs(text)[:NUM_IDS] == logprobs(plain)
    assert num_early
    assert {None, 16} <= tiers


def logprobs(text: Text) -> list[object]:
    """Of each id; `seen` has them in turn with the chances of drafts."""
    return [each for step in text.seen[::2] for each in step or ()]  # type: ignore[attr-defined]
