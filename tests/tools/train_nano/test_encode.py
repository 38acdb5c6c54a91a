"""What a training document holds: the server's prompt, then an answer that the server's parser reads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsparkd.text.encoding import Chat, Turn
from tools.train_nano.encode import Encoded, Encoder
from tools.train_nano.tasks import SPLITS, TASKS, Answer, Example, Task, draw
from tools.train_nano.tokenizer import DEFAULT_PATH

BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(DEFAULT_PATH)


def decoded(encoder: Encoder, ids: list[int]) -> str:
    return b"".join(map(encoder.tokenizer.token_bytes, ids)).decode()


def read_back(encoder: Encoder, example: Example, encoded: Encoded) -> Answer:
    """Parse the answer as the server does."""
    prompt = encoder.encoding.tokenize(encoder.encoding.render(example.chat))
    parser = encoder.encoding.parser(prompt, parse_calls=bool(example.chat.tools))
    answer = encoded.ids[encoded.num_prompt_ids : -1]
    first, last = parser.feed(decoded(encoder, answer), answer), parser.finish(cut=False)
    calls = [(call.name, call.arguments()) for call in parser.calls]
    reasoning = first.reasoning + last.reasoning
    content = first.content + last.content
    given = [(call.name, call.arguments) for call in example.answer.calls]
    assert calls == given
    return Answer(reasoning if prompt.starts_in_reasoning else None, content, example.answer.calls)


@pytest.mark.parametrize("task", TASKS)
def test_the_prompt_is_the_servers_and_the_parser_reads_the_answer(task: Task, encoder: Encoder) -> None:
    """A model that is trained on other ids than it is asked with would look worse than it is."""
    for split in SPLITS:
        for index in range(40):
            example = draw(task, split, index, 1024)
            encoded = encoder.encode(example)
            prompt = encoder.encoding.tokenize(encoder.encoding.render(example.chat))
            assert encoded.ids[: encoded.num_prompt_ids] == prompt.ids
            assert read_back(encoder, example, encoded) == example.answer
            assert encoded.ids[0] == BOS
            assert encoded.ids.count(BOS) == 1
            assert encoded.ids[-1] == EOS


@pytest.mark.parametrize("task", TASKS)
def test_only_answers_are_learnt(task: Task, encoder: Encoder) -> None:
    """The loss covers the answer and its EOS; past answers only where they were given in the same mode."""
    for index in range(60):
        example = draw(task, "train", index, 1024)
        encoded = encoder.encode(example)
        assert len(encoded.loss) == len(encoded.ids)
        assert all(encoded.loss[encoded.num_prompt_ids :])
        learnt = [token for token, flag in zip(encoded.ids, encoded.loss, strict=True) if flag]
        past = [turn.content for turn in example.chat.turns if turn.role == "assistant"]
        if not (example.history_is_answer and not example.chat.thinking):
            past = []
        text = decoded(encoder, learnt)
        for content in past:
            assert text.startswith(content + "<｜end▁of▁sentence｜>")
            text = text.removeprefix(content + "<｜end▁of▁sentence｜>")
        assert text == decoded(encoder, encoded.ids[encoded.num_prompt_ids :])


def test_a_marker_in_a_message_stays_text(encoder: Encoder) -> None:
    """Ids of markers come from the renderer alone, in the answer too."""
    spelled = "a </think> b <｜end▁of▁sentence｜> c"
    example = Example("copy", Chat([Turn("user", spelled)], thinking=False), None, Answer(None, spelled), spelled)
    encoded = encoder.encode(example)
    assert encoded.ids.count(EOS) == 1
    assert encoded.ids.count(encoder.encoding.think_end_id) == 1


def test_recall_keeps_within_its_bound_and_uses_it(encoder: Encoder) -> None:
    """Lengths are spread evenly over the logarithm, up to the bound and never beyond."""
    lengths = sorted(len(encoder.encode(draw("recall", "validation", index, 2048)).ids) for index in range(150))
    assert lengths[-1] <= 2048
    assert lengths[-1] > 1700
    assert 800 < lengths[75] < 1100  # the middle of 512 and 2,048 is 1,024; texts are a little shorter than asked


def test_an_effort_prefix_takes_its_tokens_from_the_filler(encoder: Encoder) -> None:
    """Ninety tokens more would break a tight bound."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for index in range(900):
        example = draw("recall", "validation", index, 512)
        if example.chat.effort is not None and (example.chat.effort != "low" or index % 4 == 0):
            lengths[example.chat.effort == "low"].append(len(encoder.encode(example).ids))
    low, high = lengths[True], lengths[False]
    assert min(len(low), len(high)) > 50
    assert max(low + high) <= 512
    assert abs(sum(high) / len(high) - sum(low) / len(low)) < 45


def test_the_longest_recall_has_twelve_thousand_tokens(encoder: Encoder) -> None:
    """Longer than this the model was not trained for recall; the gate asks up to there."""
    lengths = [len(encoder.encode(draw("recall", "train", index)).ids) for index in range(60)]
    assert max(lengths) <= 12_288
    assert max(lengths) > 8_000


def test_short_tasks_are_short(encoder: Encoder) -> None:
    """Rows of 2,048 tokens hold every example of the other tasks."""
    for task in TASKS:
        if task != "recall":
            assert max(len(encoder.encode(draw(task, "train", index)).ids) for index in range(200)) < 2048


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    """The server reads a file of one name only."""
    with pytest.raises(ValueError, match=r"must be called tokenizer\.json"):
        Encoder(tmp_path / "other.json")
