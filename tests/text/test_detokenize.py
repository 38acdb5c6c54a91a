"""Deltas joined are the one-shot text for every split of the bytes, with and without stop strings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsparkd.errors import InvariantError
from dsparkd.text.detokenize import IncrementalText
from dsparkd.text.stops import StopMatcher

SPLIT_ME = ["😀", "中", "🇩🇪", "é", "a😀b中c🇫🇷d"]


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """Split at the given offsets."""
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[a:b] for a, b in itertools.pairwise(edges)] or [b""]


def stream(pieces: list[bytes], stops: list[str], *, keep_stop: bool = False) -> list[str]:
    """Deltas as the detokenizer makes them: the rank's matcher says where the request ends and what is cut."""
    text, matcher = IncrementalText(stops), StopMatcher(stops)
    deltas = []
    for piece in pieces[:-1]:
        hit = matcher.feed(piece)
        if hit is not None:
            return [*deltas, text.finish(piece, hit.after_bytes if keep_stop else hit.cut_bytes)]
        deltas.append(text.feed(piece))
    hit = matcher.feed(pieces[-1])
    cut = 0 if hit is None else hit.after_bytes if keep_stop else hit.cut_bytes
    return [*deltas, text.finish(pieces[-1], cut)]


@pytest.mark.parametrize("whole", SPLIT_ME)
def test_characters_split_at_every_byte_come_whole_and_once(whole: str) -> None:
    """R25: no U+FFFD in the middle, nothing lost, and a character comes with its last byte, not later."""
    data = whole.encode()
    for at in range(len(data) + 1):
        text = IncrementalText([])
        first = text.feed(data[:at])
        assert first == data[:at].decode(errors="ignore")
        assert first + text.feed(data[at:]) + text.finish(b"", 0) == whole


def test_every_byte_alone_gives_each_character_at_its_last_byte() -> None:
    """R25: a stream of one-byte tokens is the finest split."""
    text = IncrementalText([])
    deltas = [text.feed(bytes([byte])) for byte in "a中😀".encode()]

    assert deltas == ["a", "", "", "中", "", "", "", "😀"]


def test_half_a_character_at_the_end_is_one_replacement_character_and_only_there() -> None:
    """R25: U+FFFD only for bytes that stay invalid when the output ends."""
    text = IncrementalText([])

    assert text.feed("ok 😀".encode()[:-1]) == "ok "
    assert text.finish(b"", 0) == "�"


def test_invalid_bytes_in_the_middle_are_replaced_at_once() -> None:
    """A byte that no later one can repair must not hold the stream up."""
    text = IncrementalText([])

    assert text.feed(b"a\xffb\xc3") == "a�b"
    assert text.feed(b"\xa9") == "é"


def test_a_possible_stop_string_is_held_back_until_it_is_refuted() -> None:
    """A client must never see the beginning of a stop string that then completes."""
    text = IncrementalText(["</end>", "STOP"])

    assert text.feed(b"a </e") == "a "
    assert text.feed(b"m> S") == "</em> "
    assert text.feed(b"T") == ""
    assert text.finish(b"OP tail", len(b"STOP tail")) == ""


def test_a_held_beginning_is_shown_when_the_output_ends_without_the_rest() -> None:
    """Held back is not lost: a length stop inside a possible stop string shows it."""
    text = IncrementalText(["STOP"])

    assert text.feed(b"a STO") == "a "
    assert text.finish(b"", 0) == "STO"


def test_a_cut_beyond_what_is_held_is_an_invariant_error() -> None:
    """Rank and detokenizer would then disagree about the bytes, and shown text cannot be taken back."""
    text = IncrementalText(["ab"])
    text.feed(b"xyz")

    with pytest.raises(InvariantError, match="cuts 5 bytes"):
        text.finish(b"ab", 5)


@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 24), max_size=10))
def test_deltas_joined_equal_the_one_shot_text_for_any_bytes_and_split(data: bytes, cuts: list[int]) -> None:
    """R25: also for bytes that are no UTF-8 at all."""
    assert "".join(stream(pieces_of(data, cuts), [])) == data.decode(errors="replace")


@given(
    text=st.text(alphabet="ab中😀", max_size=16),
    stops=st.lists(st.text(alphabet="ab中😀", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 64), max_size=12),
    keep_stop=st.booleans(),
)
def test_deltas_joined_end_at_the_stop_string_for_every_split(
    text: str, stops: list[str], cuts: list[int], keep_stop: bool
) -> None:
    """R25 with R21: stop strings across tokens and chunks; no delta shows a part of what is cut."""
    data = text.encode()
    ends = [(data.find(s.encode()) + len(s.encode()), data.find(s.encode())) for s in stops if s.encode() in data]
    end, start = min(ends, default=(len(data), len(data)))
    expected = data[: end if keep_stop else start].decode()

    deltas = stream(pieces_of(data, cuts), stops, keep_stop=keep_stop)

    assert "".join(deltas) == expected
    shown = ""
    for delta in deltas:
        shown += delta
        assert expected.startswith(shown)
