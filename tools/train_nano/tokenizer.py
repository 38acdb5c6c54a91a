"""Train the tokenizer of the shipped checkpoint.

    python -m tools.train_nano.tokenizer [--out conf/nano/tokenizer.json]

Byte-level BPE of 4,096 ids, cut and marked as DeepSeek-V4's, except that digits stand alone: sums and copies of
numbers are then the same for every length. The corpus is examples of all tasks as the server renders them, and the
language reference that ships inside Python; the same minor version of Python gives the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import deepseek_recipe as recipe
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.nano_tokenizer import FIRST_SPECIAL, MARKERS, NOISE_TOKEN
from tools.nano_tokenizer import SPLITS as RELEASED_SPLITS
from tools.train_nano.tasks import TASKS, Example, draw
from tools.train_nano.tasks.fields import COUNTRY_NAMES, LANGUAGES, MATERIALS, THINGS, UNICODE
from tools.train_nano.tasks.words import ADJECTIVES, CITIES, COLORS, NAMES, NOUNS

VOCAB_SIZE = 4096
DEFAULT_PATH = Path(__file__).resolve().parent.parent.parent / "conf" / "nano" / "tokenizer.json"

# In the place of the released cut into threes.
_CUTS = (r"\p{N}", *RELEASED_SPLITS[1:])
_EXAMPLES = {"arithmetic": 6000, "extraction": 8000, "recall": 1000, "copy": 8000, "tools": 5000, "chat": 3000}
_RECALL_TOKENS = 1024
# Words that records and calls hold: each should be one token at the start of a JSON string as well as behind a space.
_VALUES = tuple(
    dict.fromkeys(
        (*NAMES, *CITIES, *COLORS, *MATERIALS, *LANGUAGES, *COUNTRY_NAMES, *THINGS, *UNICODE, *ADJECTIVES, *NOUNS)
    )
)
_REPEATS = 600  # enough for all of them


def train_tokenizer(share: float = 1.0) -> Tokenizer:
    """Return a tokenizer of VOCAB_SIZE ids. share: part of the examples to learn from."""
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _CUTS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS) - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in FIRST_SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(share), trainer)
    tokenizer.add_special_tokens([AddedToken(NOISE_TOKEN, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=True) for text in MARKERS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}")
    return tokenizer


def corpus(share: float) -> Iterator[str]:
    """Yield texts without their markers, which are added tokens and never learnt."""
    for task in TASKS:
        for index in range(int(_EXAMPLES[task] * share)):
            yield from _plain_parts(draw(task, "train", index, _RECALL_TOKENS))
    for value in _VALUES:
        yield from [value, f" {value}"] * _REPEATS
    for noun in NOUNS:
        yield from [f"-{noun}"] * _REPEATS  # as in the keys of recall
    for name in sorted(topics.topics):
        yield topics.topics[name]


def _plain_parts(example: Example) -> Iterator[str]:
    """Render prompt and answer, and cut them at the markers."""
    chat, answer = example.chat, example.answer
    for turn in chat.turns:
        yield turn.content
    rendered = recipe.DeepseekV4Encoding().render_conversation(
        recipe.Conversation(
            [
                recipe.UserMessage(""),
                recipe.AssistantMessage(
                    answer.content,
                    reasoning_content=answer.reasoning,
                    tool_calls=[recipe.ToolCall(c.call_id, c.name, c.arguments) for c in answer.calls] or None,
                ),
            ],
            thinking_mode=chat.thinking,
            reasoning_effort=chat.effort,
            tools=[recipe.ToolDefinition(tool.name, tool.description, tool.parameters) for tool in chat.tools],
            response_schema=chat.response_schema,
        )
    )
    position = 0
    for start, end in rendered.special_ranges:
        if start > position:
            yield rendered.prompt[position:start]
        position = end


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--share", type=float, default=1.0, help="part of the examples to learn from")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    train_tokenizer(arguments.share).save(str(arguments.out))


if __name__ == "__main__":
    main()
