"""What XGrammar is told of the tokens: the text of each id, with control tokens out of reach."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import xgrammar

from dsparkd.text.tokenizer import Tokenizer

# In front of a marker's text: no UTF-8 text begins so, hence no string, pattern or rule ever matches the token, while a
# structural tag's {"type": "token"} still names it.
_UNSPEAKABLE = b"\xff"


@dataclass(frozen=True)
class Vocabulary:
    """One view of the tokens. digest covers every entry, their order, the stop ids and the size: 64 hex digits."""

    info: xgrammar.TokenizerInfo
    vocab_size: int
    digest: str


def make_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int], nameable: Collection[str] = ()
) -> Vocabulary:
    """Describe `vocab_size` ids, the model's logits, to XGrammar.

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
    stops = sorted(stop_ids)
    info = xgrammar.TokenizerInfo(entries, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stops)
    return Vocabulary(info, vocab_size, _digest(entries, stops, vocab_size))


def _digest(entries: Sequence[bytes], stop_ids: Sequence[int], vocab_size: int) -> str:
    """Hash with lengths, so that no two vocabularies read alike: XGrammar itself compares sizes only."""
    total = hashlib.sha256(f"{vocab_size} {stop_ids} {len(entries)}\n".encode())
    for entry in entries:
        total.update(len(entry).to_bytes(4, "little") + entry)
    return total.hexdigest()
