"""Turns an example into token ids: the prompt as the server makes it, the answer as the server's parser reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dsparkd.text.encoding import EOS, ChatEncoding, Effort, Rendered, Turn
from dsparkd.text.output import THINK_END
from dsparkd.text.tokenizer import FILE_NAME, Tokenizer
from tools.train_nano.tasks.example import Example

DEFAULT_EFFORT: Effort = "low"


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document. loss[i]: ids[i] is to be predicted; true for the answer and its EOS. num_prompt_ids come first."""

    ids: list[int]
    loss: list[bool]
    num_prompt_ids: int


class Encoder:
    """Immutable. tokenizer_path: a file called tokenizer.json. Raises CheckpointError when it cannot serve chat."""

    def __init__(self, tokenizer_path: Path) -> None:
        if tokenizer_path.name != FILE_NAME:
            raise ValueError(f"{tokenizer_path}: the file must be called {FILE_NAME}")
        self.tokenizer = Tokenizer.load(tokenizer_path.parent)
        self.encoding = ChatEncoding(self.tokenizer, DEFAULT_EFFORT)
        self._think_end_id = self.tokenizer.marker_id(THINK_END)
        self._eos_id = self.tokenizer.marker_id(EOS)

    def encode(self, example: Example) -> Encoded:
        """Return BOS, prompt, answer, EOS."""
        rendered = self.encoding.render(example.chat)
        prompt = self.encoding.tokenize(rendered).ids
        answer = self.encoding.tokenize(self._answer(example, rendered.text)).ids
        loss = self._history_loss(prompt) if example.history_is_answer else [False] * len(prompt)
        return Encoded(prompt + answer, loss + [True] * len(answer), len(prompt))

    def _answer(self, example: Example, prompt: str) -> Rendered:
        """Render the answer as the conversation's next turn, and take what follows the prompt.

        A turn that is to be continued keeps its reasoning whatever came before it, but cannot hold calls; a finished
        one can, and keeps its reasoning where tools are declared.
        """
        answer = example.answer
        turn = Turn(
            "assistant", answer.content, reasoning=answer.reasoning, calls=answer.calls, is_prefix=not answer.calls
        )
        whole = self.encoding.render(replace(example.chat, turns=[*example.chat.turns, turn]))
        text, markers = whole.text, whole.markers
        if answer.calls:
            # The renderer goes on to the next answer: the role marker and a think tag behind our EOS.
            markers = markers[:-2]
            text = text[: markers[-1][1]]
        else:
            markers = [*markers, (len(text), len(text) + len(EOS))]
            text += EOS
        start = len(prompt)
        if not text.startswith(prompt) or not text.endswith(EOS):
            raise ValueError(f"the answer does not continue the prompt: {prompt!r}, {text!r}")
        return Rendered(text[start:], [(a - start, b - start) for a, b in markers if a >= start])

    def _history_loss(self, prompt: list[int]) -> list[bool]:
        """Mark the past answers of a chat-mode prompt: from each `</think>` to its EOS."""
        loss = []
        inside = False
        for token_id in prompt:
            loss.append(inside)
            if token_id == self._think_end_id:
                inside = True
            elif token_id == self._eos_id:
                inside = False
        return loss
