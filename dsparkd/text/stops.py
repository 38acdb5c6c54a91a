"""Stop strings found in the bytes of a text as its tokens come; the rank ends a request by them.

Matching is on bytes, so a stop string may begin inside one token and end inside another, or share a token with what
follows it. UTF-8 synchronizes itself: a match in valid text begins and ends at whole characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopHit(NamedTuple):
    """A stop string that the output now contains.

    cut_bytes: trailing bytes of all output so far, from the stop string's first byte on.
    after_bytes: those of them that follow the stop string (it ended inside a token).
    """

    stop: str
    cut_bytes: int
    after_bytes: int


class StopMatcher:
    """Looks for the stop strings of one request; owned by whoever feeds it.

    Of several that occur, the one that ends first counts; of those that end together, the longest, so that no part
    of another is left in the text.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = [(stop, stop.encode()) for stop in stop_strings]
        self._longest = max((len(encoded) for _, encoded in self._stops), default=0)
        self._tail = b""  # the last bytes in which a stop string may have begun

    def feed(self, token_bytes: bytes) -> StopHit | None:
        """Take the bytes of the next token that are shown; None unless a stop string ended in them.

        A token whose text is hidden (skip_special_tokens) must be fed as b"". Whoever lets a hit pass (min_tokens) may
        go on: the next stop string is looked for behind it.
        """
        if not self._stops or not token_bytes:
            return None
        text = self._tail + token_bytes
        hits = [
            (start + len(encoded), start, stop) for stop, encoded in self._stops if (start := text.find(encoded)) >= 0
        ]
        if hits:
            end, start, stop = min(hits)
            self._tail = text[end:]
            return StopHit(stop, len(text) - start, len(text) - end)
        self._tail = text[len(text) - min(len(text), self._longest - 1) :]
        return None
