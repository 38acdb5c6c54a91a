"""The generated tasks: right answers, fixed splits, the variety that the model is promised to have met."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from dsparkd.text.encoding import PastCall
from tools.train_nano.tasks import SPLITS, TASKS, Answer, Example, Split, Task, draw
from tools.train_nano.tasks.arithmetic import LIMIT
from tools.train_nano.tasks.calling import REFUSAL
from tools.train_nano.tasks.copying import TEST_NAMES
from tools.train_nano.tasks.example import split_of
from tools.train_nano.tasks.fields import NUMBER_WORDS
from tools.train_nano.tasks.manners import DEFINITIONS, UNKNOWN
from tools.train_nano.tasks.score import result

ROOT = Path(__file__).resolve().parents[3]
SHORT = 1024  # tokens of a recall example, so that tests are quick
# Of the first examples of every task and split: the shipped checkpoint was trained and is examined on just these.
GOLDEN = "ede5436a1f16636b4897e855183972fdc2a4e05e9914aac32b1c2a87b504e07b"


def draws(task: Task, split: Split, count: int) -> list[Example]:
    return [draw(task, split, index, SHORT if task == "recall" else None) for index in range(count)]


def digest(count: int) -> str:
    texts = [repr(example) for task in TASKS for split in SPLITS for example in draws(task, split, count)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def user_text(example: Example) -> str:
    return "\n".join(turn.content for turn in example.chat.turns if turn.role == "user")


def working(example: Example) -> list[str]:
    """The lines of steps."""
    return (example.answer.reasoning or example.answer.content.rsplit("\n", 1)[0]).split("\n")


def test_the_examples_are_those_of_the_shipped_checkpoint() -> None:
    """A change to a generator would let training examples slip into the test split of a model that is already there.

    Whoever means it retrains the model, and then replaces the digest.
    """
    assert digest(20) == GOLDEN


def test_another_process_draws_the_same_examples() -> None:
    """Hashes of text differ from process to process; nothing may depend on them."""
    code = "import test_tasks; print(test_tasks.digest(4))"
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == digest(4)


@pytest.mark.parametrize("task", TASKS)
def test_reading_the_right_answer_gives_what_is_expected(task: Task) -> None:
    """Otherwise a perfect model would fail, or the gate would compare nothing."""
    for split in SPLITS:
        for example in draws(task, split, 60):
            assert result(example, example.answer) == example.expected


@pytest.mark.parametrize("task", TASKS)
def test_half_think_with_every_effort_and_some_have_a_system_prompt(task: Task) -> None:
    """A mode that was never trained would be a broken mode."""
    examples = draws(task, "train", 400)
    thinking = [example for example in examples if example.chat.thinking]
    assert 0.4 < len(thinking) / 400 < 0.6
    efforts = Counter(example.chat.effort for example in thinking)
    assert efforts["low"] > 5 * efforts["high"] > 0
    assert efforts["low"] > 5 * efforts["max"] > 0
    assert all(example.chat.effort is None for example in examples if not example.chat.thinking)
    assert all((example.answer.reasoning is not None) == example.chat.thinking for example in examples)
    assert sum(example.chat.turns[0].role == "system" for example in examples) / 400 > 0.2


def test_each_split_gets_its_share_of_combinations() -> None:
    """A sixteenth is kept for tests, half of that for validation."""
    counts = Counter(split_of("copy", str(number)) for number in range(8000))
    assert set(counts) == set(SPLITS)
    assert 400 < counts["test"] < 600
    assert 200 < counts["validation"] < 300


def questions_of(task: Task, split: Split, count: int) -> Iterator[str]:
    """Everything that is asked and answered, that of earlier turns included."""
    for example in draws(task, split, count):
        match task:
            case "chat":
                yield from (turn.content for turn in example.chat.turns if turn.role == "user")
            case "recall":
                yield from (turn.content for turn in example.chat.turns if turn.role == "assistant")
                yield example.answer.content
            case "copy":
                yield " ".join(re.findall(r"[\w.-]+", example.expected))
            case "extraction":
                yield example.expected
            case "arithmetic":
                yield re.sub(r"\D+", " ", user_text(example)) + "; ".join(working(example))
            case "tools":
                yield f"{user_text(example)} {[tool.name for tool in example.chat.tools]}"


# Small records, or sums of two small numbers, may come about in two ways that are two combinations.
@pytest.mark.parametrize(
    ("task", "shared"), [("chat", 0), ("recall", 0), ("copy", 0), ("tools", 0), ("extraction", 12)]
)
def test_what_is_tested_was_never_trained(task: Task, shared: int) -> None:
    """A combination belongs to one split, in earlier turns of a conversation as well."""
    test = set(questions_of(task, "test", 300))
    train = set(questions_of(task, "train", 3000))
    assert len(test) > 100
    assert len(test & train) <= shared


@pytest.mark.parametrize("split", SPLITS)
def test_earlier_questions_of_recall_are_of_the_same_split(split: Split) -> None:
    """Values are drawn from so many that a mere comparison of what was asked would never find one in two splits."""
    asked = 0
    for example in draws("recall", split, 200):
        for turn in example.chat.turns:
            if turn.role == "assistant":
                found = re.fullmatch(r"The (\w+) of (\S+) is (.+)\.", turn.content)
                assert found is not None
                assert split_of("recall", " ".join(found.groups())) == split
                asked += 1
    assert asked > 10


def test_every_step_of_a_sum_is_true_and_leads_to_the_answer() -> None:
    """A wrong step would be learnt; a number beyond the bound would not."""
    lengths = Counter()
    for example in draws("arithmetic", "train", 3000):
        steps = working(example)
        lengths[len(steps)] += 1
        for step in steps:
            *sums, value = step.split(" = ")
            assert 0 <= int(value) <= LIMIT, step
            for one in sums:
                assert re.fullmatch(r"\d+( [-+*/] \d+)+", one), step
                assert eval(one) == int(value), step
        assert steps[-1].endswith(f" = {example.expected}")
    assert set(lengths) == {1, 2, 3, 4}


def test_a_sum_with_thinking_answers_with_its_last_line_alone() -> None:
    """The steps are reasoning then, and content otherwise."""
    for example in draws("arithmetic", "train", 100):
        last = f"Answer: {example.expected}"
        if example.chat.thinking:
            assert example.answer.content == last
        else:
            assert example.answer.content.endswith(f"\n{last}")


def test_records_fit_their_schemas() -> None:
    """The answer is one instance of the schema, spelled canonically, in the order of the schema's properties."""
    for example in draws("extraction", "train", 600):
        assert isinstance(example.schema, dict)
        record = json.loads(example.answer.content)
        jsonschema.Draft202012Validator(example.schema).validate(record)
        assert example.answer.content == json.dumps(record, ensure_ascii=False)
        properties = list(example.schema["properties"])
        assert list(record) == [key for key in properties if key in record]


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def test_the_text_says_every_value_of_its_record() -> None:
    """What the text does not say nobody could extract. Dates and small numbers may be said in words."""
    for example in draws("extraction", "train", 600):
        text = user_text(example)
        for value in leaves(json.loads(example.expected)):
            if isinstance(value, bool) or value is None:
                continue
            if isinstance(value, str) and re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
                assert value in text or value[:4] in text
            elif isinstance(value, int) and value <= 12:
                assert str(value) in text or NUMBER_WORDS[value] in text
            else:
                assert str(value) in text, (value, text)


def outline(schema: object) -> object:
    """A schema without its words and numbers."""
    if not isinstance(schema, dict):
        return None
    shape: dict[str, object] = {}
    for key, value in schema.items():
        match key:
            case "properties":
                shape[key] = [outline(member) for member in value.values()]
            case "items" | "additionalProperties":
                shape[key] = outline(value)
            case "anyOf":
                shape[key] = [outline(member) for member in value]
            case "$defs":
                shape[key] = sorted(value)
            case "type":
                shape[key] = value
            case _:
                shape[key] = True
    return shape


def test_schemas_have_many_shapes_and_every_kind_of_part() -> None:
    """At least 200 shapes; each part of a schema that is promised; the schema stated in both ways, half each."""
    examples = draws("extraction", "train", 1500)
    shapes = {json.dumps(outline(example.schema)) for example in examples}
    assert len(shapes) > 1000
    together = json.dumps([example.schema for example in examples], ensure_ascii=False)
    for part in (
        *('"enum"', '"const"', '"pattern"', '"format"', '"anyOf"', '"$ref"', '"minimum"', '"maxLength"'),
        *(
            '"exclusiveMinimum"',
            '"minItems"',
            '"uniqueItems"',
            '"additionalProperties": {',
            '"additionalProperties": fal',
        ),
        *('"type": ["string", "null"]', '"items": {"type": "object"', '"items": {"type": "array"', '"title"'),
        *('"größe"', '"東京"', '"boolean"', '"number"', '"description"', '"$schema"', '"$defs"'),
    ):
        assert part in together, part
    by_format = [example for example in examples if example.chat.response_schema is not None]
    assert 0.45 < len(by_format) / len(examples) < 0.55
    for example in examples:
        stated = [turn for turn in example.chat.turns if turn.role == "system" and '{"' in turn.content]
        assert bool(stated) == (example.chat.response_schema is None)
        if not stated:
            assert example.chat.response_schema == example.schema
    answers = [json.loads(example.expected) for example in examples]
    assert any(None in answer.values() for answer in answers)
    assert any(
        len(answer) < len(example.schema["properties"]) for answer, example in zip(answers, examples, strict=True)
    )


def test_recall_hides_the_fact_once_among_similar_ones() -> None:
    """One sentence gives the value; others share a part of its key; some conversations ask several times."""
    turns = Counter()
    similar = 0
    for example in draws("recall", "train", 300):
        text = example.chat.turns[-1].content if len(example.chat.turns) < 3 else user_text(example)
        found = re.fullmatch(r"The (\w+) of (\S+) is (.+)\.", example.answer.content)
        assert found is not None
        attribute, key, value = found.groups()
        assert value == example.expected
        given = [s for s in re.split(r"(?<=[.?])\s", text) if key in s and value in s and attribute in s]
        assert len(given) == 1
        assert key in example.chat.turns[-1].content.rsplit("\n\n", 1)[-1]
        turns[sum(turn.role == "user" for turn in example.chat.turns)] += 1
        noun = key.split("-")[1]
        similar += len(set(re.findall(rf"\w+-{noun}-\d+", text))) > 1
    assert turns[1] > 100
    assert turns[2] + turns[3] > 50
    assert similar > 50


def test_recall_in_tests_asks_three_times_at_most() -> None:
    """More questions are a means of training."""
    counts = {sum(turn.role == "user" for turn in example.chat.turns) for example in draws("recall", "test", 200)}
    assert counts == {1, 2, 3}


def test_copies_are_exact_and_tests_have_twenty_names() -> None:
    """The names of the answer are those of the request, in order."""
    for split in SPLITS:
        for example in draws("copy", split, 100):
            names = re.findall(r"[^\s,\"\[\]]+", example.expected.replace("\n- ", "\n").removeprefix("- "))
            assert len(set(names)) == len(names)
            assert 4 <= len(names) <= 24
            assert split != "test" or len(names) == TEST_NAMES
            text = user_text(example)
            places = [re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", text) for name in names]
            starts = [place.start() for place in places if place]
            assert len(starts) == len(names)
            assert starts == sorted(starts)


def calls_of(example: Example) -> list[dict[str, object]]:
    if not example.answer.calls:
        return []
    expected = json.loads(example.expected)
    return expected if isinstance(expected, list) else [expected]


def test_calls_fit_the_declared_tools() -> None:
    """Name and arguments are those of a declaration, in the order of its schema; one to eight are declared."""
    kinds = Counter()
    sizes = set()
    for example in draws("tools", "train", 1500):
        tools = {tool.name: tool for tool in example.chat.tools}
        sizes.add(len(tools))
        assert len(tools) == len(example.chat.tools)
        calls = calls_of(example)
        for call in calls:
            schema = tools[str(call["name"])].parameters
            assert isinstance(schema, dict)
            arguments = call["arguments"]
            assert isinstance(arguments, dict)
            jsonschema.Draft202012Validator({**schema, "additionalProperties": False}).validate(arguments)
            assert list(arguments) == [key for key in schema["properties"] if key in arguments]
        if example.expected == REFUSAL:
            kinds["refusal"] += 1
        elif not calls:
            kinds["result"] += 1
            assert example.chat.turns[-1].role == "tool"
            assert example.chat.turns[-1].content in example.answer.content
        else:
            kinds[f"{len(calls)} calls"] += 1
    assert sizes == set(range(1, 9))
    assert set(kinds) == {"refusal", "result", "1 calls", "2 calls"}
    assert min(kinds.values()) > 75


def test_the_request_says_every_argument() -> None:
    """Yes and no for booleans; everything else literally."""
    for example in draws("tools", "train", 800):
        text = user_text(example)
        for call in calls_of(example):
            for value in leaves(call["arguments"]):
                if not isinstance(value, bool):
                    assert str(value) in text


def test_one_question_has_one_answer() -> None:
    """At temperature 0 a model can give one only."""
    answers: dict[str, str] = {}
    for example in draws("chat", "train", 3000):
        ask = example.chat.turns[-1].content
        assert answers.setdefault(ask, example.expected) == example.expected


def test_chat_knows_capitals_and_definitions_and_what_it_does_not_know() -> None:
    """About 60 capitals, 100 definitions, and a plain word for the rest."""
    expected = Counter(example.expected for example in draws("chat", "train", 3000))
    assert sum(text.startswith("The capital of ") for text in expected) >= 60
    assert sum(text in expected for text in DEFINITIONS.values()) >= 100
    assert 300 < expected[UNKNOWN] < 900


def replaced(example: Example, content: str, calls: tuple[PastCall, ...] = ()) -> str | None:
    return result(example, Answer(None, content, calls))


def test_wrong_and_unreadable_answers_are_told_apart() -> None:
    """A score that forgives everything would pass any model."""
    (total,) = draws("arithmetic", "test", 1)
    assert replaced(total, f"1 + 1 = 2\nAnswer: {total.expected}") == total.expected
    assert replaced(total, f"Answer: {total.expected}0") != total.expected
    assert replaced(total, f"Answer: {total.expected}\n") is None
    assert replaced(total, total.expected) is None
    assert replaced(total, f"The Answer: {total.expected}") is None
    assert replaced(total, f"Answer: {total.expected} or more") is None
    (record,) = draws("extraction", "test", 1)
    assert replaced(record, json.dumps(json.loads(record.expected), indent=1)) == record.expected
    assert replaced(record, record.expected[:-1]) is None
    (value,) = draws("recall", "test", 1)
    assert replaced(value, f"The code of x-y-11 is {value.expected}.") == value.expected
    assert replaced(value, value.expected) is None
    (copy,) = draws("copy", "test", 1)
    assert replaced(copy, copy.expected + "\n") != copy.expected
    call = next(example for example in draws("tools", "test", 50) if len(calls_of(example)) == 1)
    assert replaced(call, "", call.answer.calls) == call.expected
    assert replaced(call, "", call.answer.calls * 2) != call.expected
    assert replaced(call, "", (PastCall("1", "x", "{"),)) is None
    assert replaced(call, "no") == "no"
