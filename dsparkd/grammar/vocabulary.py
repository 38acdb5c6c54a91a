"""What XGrammar is told of the tokens: the text of each id, with control tokens out of reach. Needs no xgrammar."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from dsparkd.grammar.key import Scope
from dsparkd.text.tokenizer import Tokenizer

# The markers that a tool call's grammar names as tokens.
TOOL_MARKERS = ("｜DSML｜",)
# In front of a marker's text: no UTF-8 text begins so, hence no string, pattern or rule ever matches the token, while a
# structural tag's {"type": "token"} still names it.
_UNSPEAKABLE = b"\xff"


@dataclass(frozen=True)
class Vocabulary:
    """One view of the tokens: bytes of each id, ids that end a document, and how many ids the model's logits have.

    digest covers all of it: 64 hex digits.
    """

    entries: tuple[bytes, ...]
    stop_ids: tuple[int, ...]
    vocab_size: int
    digest: str


@dataclass(frozen=True)
class Vocabularies:
    """The tokens as ordinary grammars see them, and with the markers that a tool call's grammar may name."""

    plain: Vocabulary
    tools: Vocabulary

    def scope(self) -> Scope:
        """What a stored grammar depends on beside its own key."""
        return Scope(
            xgrammar_version=version("xgrammar"),
            tokenizer_digest=f"{self.plain.digest}-{self.tools.digest}",
            vocab_size=self.plain.vocab_size,
        )


def make_vocabularies(tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]) -> Vocabularies:
    """Both views of one tokenizer; vocab_size is that of the model's logits."""
    return Vocabularies(
        make_vocabulary(tokenizer, vocab_size, stop_ids),
        make_vocabulary(tokenizer, vocab_size, stop_ids, TOOL_MARKERS),
    )


def make_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int], nameable: Collection[str] = ()
) -> Vocabulary:
    """Describe `vocab_size` ids.

    Every added token is blanked, so that it can be in no text; with the stock constructor all but one of them were
    allowed inside a JSON string. stop_ids end a document. nameable: spellings of markers that a structural tag may
    name as a token, and that are in no text either.
    Ids beyond the tokenizer's are in no text and never allowed.
    """
    markers = {tokenizer.marker_id(content): content for content in nameable}
    entries = [tokenizer.token_bytes(token_id) for token_id in range(min(vocab_size, tokenizer.vocab_size))]
    for token_id in tokenizer.added_ids:
        if token_id < len(entries):
            content = markers.get(token_id)
            entries[token_id] = b"" if content is None else _UNSPEAKABLE + content.encode()
    stops = tuple(sorted(stop_ids))
    return Vocabulary(tuple(entries), stops, vocab_size, _digest(entries, stops, vocab_size))


def _digest(entries: Sequence[bytes], stop_ids: Sequence[int], vocab_size: int) -> str:
    """Hash with lengths, so that no two vocabularies read alike: XGrammar itself compares sizes only."""
    total = hashlib.sha256(f"{vocab_size} {stop_ids} {len(entries)}\n".encode())
    for entry in entries:
        total.update(len(entry).to_bytes(4, "little") + entry)
    return total.hexdigest()
