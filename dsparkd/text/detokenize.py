"""Incremental decoding: token bytes to text, whole characters only, with possible stop strings held back.

Whatever the split into deltas, their texts joined are the one-shot decoding of all bytes that are shown.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from dsparkd.errors import InvariantError

_new_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalText:
    """Text of one request's output; owned by the detokenizer's thread.

    Two things wait inside: bytes that may turn out to be the beginning of a stop string, because the rank ends a
    request at a stop string only when all of it is there, and the first bytes of a character whose others are to come.
    U+FFFD stands only for bytes that no later byte can make valid.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = [stop.encode() for stop in stop_strings]
        self._longest_begin = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = bytearray()
        self._decoder = _new_decoder(errors="replace")

    def feed(self, shown: bytes) -> str:
        """Take the next bytes and return the text that is certain now; may be empty."""
        self._held += shown
        certain = len(self._held) - self._possible_stop_bytes()
        text = self._decoder.decode(bytes(self._held[:certain]))
        del self._held[:certain]
        return text

    def finish(self, shown: bytes, cut_bytes: int) -> str:
        """Take the last bytes, drop the last cut_bytes of all, and return the rest of the text.

        Raises InvariantError when bytes that were already shown would have to be dropped.
        """
        self._held += shown
        if cut_bytes > len(self._held):
            raise InvariantError(f"a stop string cuts {cut_bytes} bytes, but only {len(self._held)} are held back")
        text = self._decoder.decode(bytes(self._held[: len(self._held) - cut_bytes]), final=True)
        self._held.clear()
        return text

    def _possible_stop_bytes(self) -> int:
        """Length of the longest end of the held bytes that begins a stop string."""
        for start in range(max(0, len(self._held) - self._longest_begin), len(self._held)):
            if any(stop.startswith(self._held[start:]) for stop in self._stops):
                return len(self._held) - start
        return 0
