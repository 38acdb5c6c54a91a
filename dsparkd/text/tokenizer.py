"""Tokenizer: text to ids and ids to bytes, over a checkpoint's tokenizer.json; markers only by their exact spelling.

Byte-level BPE. Added tokens (role markers, `</think>`, ...) are left out of the object that encodes, so text can never
turn into a marker: whoever wants one asks `marker_id` for it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import tokenizers

from dsparkd.errors import CheckpointError

FILE_NAME = "tokenizer.json"


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool


class _Model(msgspec.Struct):
    type: str
    vocab: dict[str, int]


class _Head(msgspec.Struct):
    """What is read of tokenizer.json here; its other members are the tokenizers library's business."""

    added_tokens: list[_AddedToken]
    model: _Model


class Tokenizer:
    """Immutable after `load`, so any thread may use it.

    vocab_size: one more than the largest id; ids without an entry decode to nothing.
    digest: SHA-256 of the file, in hex. max_piece_bytes: the most bytes that one id stands for.
    """

    def __init__(
        self,
        plain: tokenizers.Tokenizer,
        pieces: list[bytes],
        markers: dict[str, int],
        special: frozenset[int],
        digest: str,
    ) -> None:
        self.vocab_size = len(pieces)
        self.max_piece_bytes = max(map(len, pieces), default=0)
        self.digest = digest
        self._plain = plain
        self._pieces = pieces
        self._markers = markers
        self._special = special

    @classmethod
    def load(cls, checkpoint_dir: Path) -> Tokenizer:
        """Read `checkpoint_dir`/tokenizer.json. Raises CheckpointError when it is missing or not byte-level BPE."""
        path = checkpoint_dir / FILE_NAME
        try:
            raw = path.read_bytes()
            head = msgspec.json.decode(raw, type=_Head)
            whole: dict[str, object] = msgspec.json.decode(raw, type=dict[str, object])
            plain = tokenizers.Tokenizer.from_str(msgspec.json.encode(whole | {"added_tokens": []}).decode())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise CheckpointError(f"{path}: not a tokenizer file ({error})") from error
        except Exception as error:  # the tokenizers library raises nothing narrower for a bad file
            raise CheckpointError(f"{path}: refused by the tokenizers library ({error})") from error
        if head.model.type != "BPE":
            raise CheckpointError(f"{path}: model.type is {head.model.type!r}; only byte-level 'BPE' is supported")
        return cls(
            plain,
            _pieces(path, head),
            {token.content: token.id for token in head.added_tokens},
            frozenset(token.id for token in head.added_tokens if token.special),
            hashlib.sha256(raw).hexdigest(),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, and no marker whatever the text says."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def marker_id(self, content: str) -> int:
        """Id of an added token by its exact spelling. Raises CheckpointError when the tokenizer has none."""
        try:
            return self._markers[content]
        except KeyError:
            raise CheckpointError(f"{FILE_NAME}: no added token {content!r}") from None

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of all added tokens, special or not."""
        return frozenset(self._markers.values())

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that an id stands for; empty for an id without an entry."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens hides the id: BOS, EOS, padding and placeholders, but not `</think>` and DSML."""
        return token_id in self._special


def _pieces(path: Path, head: _Head) -> list[bytes]:
    """Bytes of every id, index = id."""
    added = {token.id: token.content.encode() for token in head.added_tokens}
    size = 1 + max([*head.model.vocab.values(), *added], default=-1)
    pieces = [b""] * size
    alphabet = _byte_alphabet()
    for text, token_id in head.model.vocab.items():
        if token_id in added:
            continue
        try:
            pieces[token_id] = bytes([alphabet[character] for character in text])
        except KeyError as error:
            raise CheckpointError(f"{path}: vocabulary entry {text!r} is not byte-level (at {error})") from error
    for token_id, content in added.items():
        pieces[token_id] = content
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}
