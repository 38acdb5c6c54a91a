"""Stop strings across tokens, inside tokens and among each other."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dsparkd.text.stops import StopHit, StopMatcher


def feed_all(matcher: StopMatcher, pieces: list[bytes]) -> tuple[int, StopHit] | None:
    """Feed pieces until a hit; its index and the hit."""
    for index, piece in enumerate(pieces):
        hit = matcher.feed(piece)
        if hit is not None:
            return index, hit
    return None


def test_a_stop_string_inside_one_token_cuts_itself_and_what_follows() -> None:
    """The rank reports ids as they are; only the text is cut."""
    assert StopMatcher(["END"]).feed(b"a END b") == StopHit("END", cut_bytes=5, after_bytes=2)


def test_a_stop_string_split_over_tokens_is_found_at_the_token_that_completes_it() -> None:
    """R21: a stop split over two blocks must be seen, at the token at which it ends and not later."""
    assert feed_all(StopMatcher(["</done>"]), [b"ok </", b"do", b"ne", b">tail", b"more"]) == (
        3,
        StopHit("</done>", cut_bytes=len(b"</done>tail"), after_bytes=4),
    )


def test_a_false_start_does_not_hide_a_real_one() -> None:
    """A matcher that restarts behind a failed prefix would miss this."""
    assert feed_all(StopMatcher(["aab"]), [b"a", b"a", b"a", b"b"]) == (3, StopHit("aab", 3, 0))


def test_the_stop_string_that_ends_first_wins() -> None:
    """R21: the earliest event decides, whatever the order in the request."""
    hit = StopMatcher(["long stop", "st"]).feed(b"a long stop")
    assert hit == StopHit("st", cut_bytes=4, after_bytes=2)


def test_of_two_that_end_together_the_longer_is_cut() -> None:
    """The shorter one would leave the beginning of the longer in the text."""
    assert feed_all(StopMatcher(["b", "ab"]), [b"xa", b"b"]) == (1, StopHit("ab", cut_bytes=2, after_bytes=0))


def test_a_stop_string_of_split_characters_is_found() -> None:
    """R25: DSpark chunks split 中 and 😀 at any byte."""
    text = "x😀中".encode()
    for at in range(1, len(text)):
        got = feed_all(StopMatcher(["😀中"]), [text[:at], text[at:]])
        assert got == (1, StopHit("😀中", 7, 0))


def test_hidden_tokens_and_no_stop_strings_never_hit() -> None:
    """A hidden token shows nothing, so a stop string continues across it."""
    assert StopMatcher([]).feed(b"anything") is None
    assert feed_all(StopMatcher(["ab"]), [b"a", b"", b"b"]) == (2, StopHit("ab", 2, 0))


def test_after_a_hit_that_was_let_pass_the_next_one_is_found_behind_it() -> None:
    """min_tokens may let a stop string pass; the one after it counts again, and never overlaps it."""
    matcher = StopMatcher(["aa"])

    assert matcher.feed(b"aa") == StopHit("aa", 2, 0)
    assert matcher.feed(b"a") is None
    assert matcher.feed(b"a") == StopHit("aa", 2, 0)


@given(
    text=st.text(alphabet="ab😀", max_size=20),
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_a_hit_is_the_earliest_end_in_the_whole_text_for_every_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """R21: where tokens end may not decide whether or where a stop string is found."""
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]

    got = feed_all(StopMatcher(stops), pieces)

    ends = [(data.find(s.encode()) + len(s.encode()), data.find(s.encode())) for s in stops if s.encode() in data]
    if not ends:
        assert got is None
        return
    assert got is not None
    index, hit = got
    end, start = min(ends)
    fed = sum(len(piece) for piece in pieces[: index + 1])
    assert (fed - hit.cut_bytes, fed - hit.after_bytes) == (start, end)
    assert fed - len(pieces[index]) < end  # not a token too late
    assert data[start:end].decode() == hit.stop
