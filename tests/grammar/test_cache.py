"""Memory of compiled grammars: bounds, sharing, refusals, cancelling; with a fake clock and threads that race."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import cast

import pytest
import xgrammar

from dsparkd.config import GrammarCacheConfig
from dsparkd.errors import GrammarError, RequestError
from dsparkd.grammar.cache import ENTRY_OVERHEAD_BYTES, MAX_JOBS, Compiled, GrammarCache, Job, Ticket
from dsparkd.messages import Grammar
from tests.grammar.grammars import compile_all, tokenizer_info

S = 10**9


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def grammar(text: str, max_whitespace: int = 32) -> Grammar:
    return Grammar(kind="regex", text=text, max_whitespace=max_whitespace)


def ticket(text: str) -> Ticket:
    return Ticket(grammar(text), 0, S)


def compiled(num_bytes: int = 100) -> Compiled:
    return Compiled(cast(xgrammar.CompiledGrammar, object()), num_bytes)


def own(cache: GrammarCache, text: str) -> tuple[Ticket, Job]:
    asked = ticket(text)
    job = cache.look_up(asked)
    assert job is not None
    return asked, job


def put(cache: GrammarCache, text: str, num_bytes: int = 100) -> None:
    _, job = own(cache, text)
    cache.finish(job, compiled(num_bytes), "compile", remember=True)


def refuse(cache: GrammarCache, text: str) -> None:
    _, job = own(cache, text)
    cache.finish(job, GrammarError("bad", code="invalid_grammar"), "compile", remember=True)


def is_held(cache: GrammarCache, text: str) -> bool:
    """Asks, and takes its own question back."""
    asked = ticket(text)
    job = cache.look_up(asked)
    if job is not None:
        cache.cancel(asked)
        cache.keep(job)
    return asked.is_done


def test_a_look_up_is_answered_attached_or_owned() -> None:
    """G-11: exactly one of three, and the sources say which."""
    cache = GrammarCache(GrammarCacheConfig())
    first, job = own(cache, "a")
    second, third = ticket("a"), ticket("a")
    assert cache.look_up(second) is None
    assert not second.is_done
    held = compiled()

    told = cache.finish(job, held, "compile", remember=True)

    assert told == [first, second]
    assert cache.look_up(third) is None
    assert [t.source for t in (first, second, third)] == ["compile", "in_flight", "memory"]
    assert all(t.outcome is held for t in (first, second, third))


def test_each_ticket_makes_a_matcher_of_its_own() -> None:
    """G-12, G-17: what is held is shared, and never advanced."""
    native = compile_all(tokenizer_info())[3]
    cache = GrammarCache(GrammarCacheConfig())
    first, job = own(cache, "a")
    second = ticket("a")
    cache.look_up(second)
    cache.finish(job, Compiled(native, native.memory_size_bytes), "compile", remember=True)
    one, other = first.matcher(), second.matcher()
    one.queue([ord("(")])
    assert one.commit()
    assert one.handle is not other.handle
    assert not one.is_completed
    assert other.is_completed


def test_options_are_part_of_the_key_and_texts_are_compared_whole() -> None:
    """G-05: two options of one schema are two entries; a digest never decides."""
    cache = GrammarCache(GrammarCacheConfig())
    _, job = own(cache, "a")
    cache.finish(job, compiled(), "compile", remember=True)
    other = Ticket(grammar("a", max_whitespace=0), 0, S)
    assert cache.look_up(other) is not None

    class Collides(Grammar, frozen=True):
        def __hash__(self) -> int:
            return 7

    one, two = Collides(kind="regex", text="one"), Collides(kind="regex", text="two")
    first = cache.look_up(Ticket(one, 0, S))
    assert first is not None
    cache.finish(first, compiled(), "compile", remember=True)
    assert cache.look_up(Ticket(two, 0, S)) is not None


def test_threads_that_ask_at_once_share_one_job() -> None:
    """G-12: 64 threads behind a barrier, one compile."""
    cache = GrammarCache(GrammarCacheConfig())
    barrier = threading.Barrier(64)
    tickets = [ticket("a") for _ in range(64)]
    jobs: list[Job | None] = [None] * 64

    def ask(place: int) -> None:
        barrier.wait()
        jobs[place] = cache.look_up(tickets[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (job,) = [job for job in jobs if job is not None]
    assert len(cache.finish(job, compiled(), "compile", remember=True)) == 64
    assert sorted(t.source for t in tickets) == ["compile"] + ["in_flight"] * 63


class SteppedLock:
    """A lock at whose every release another party gets a turn; also refuses native calls while it is held."""

    def __init__(self) -> None:
        self._inner = threading.Lock()
        self.is_held = False
        self.turn: Iterator[None] = iter(())

    def __enter__(self) -> None:
        self._inner.acquire()
        self.is_held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_held = False
        self._inner.release()
        turn, self.turn = self.turn, iter(())  # the other party releases the lock, too
        next(turn, None)
        self.turn = turn


def test_a_grammar_is_never_in_neither_state() -> None:
    """G-14: whatever happens between two holds of the lock, a look-up finds it in flight or in memory."""
    draw = random.Random(5)
    for _ in range(300):
        lock = SteppedLock()
        cache = GrammarCache(GrammarCacheConfig(), lock=cast(threading.Lock, lock))
        _, job = own(cache, "a")
        found: list[Job | None] = []

        def interleave(cache: GrammarCache = cache, found: list[Job | None] = found) -> Iterator[None]:
            for _ in range(4):
                if draw.random() < 0.7:
                    found.append(cache.look_up(ticket("a")))
                yield

        lock.turn = interleave()
        found.append(cache.look_up(ticket("a")))
        cache.finish(job, compiled(), "compile", remember=True)
        found.append(cache.look_up(ticket("a")))
        assert set(found) == {None}, "a second compile was begun"


def test_nothing_native_happens_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """G-11: neither a matcher is made nor a grammar asked for its size while others wait for the lock."""
    lock = SteppedLock()
    native = compile_all(tokenizer_info())[3]
    made: list[bool] = []
    original = xgrammar.GrammarMatcher.__init__

    def watched(self: xgrammar.GrammarMatcher, *arguments: xgrammar.CompiledGrammar) -> None:
        made.append(lock.is_held)
        original(self, *arguments)

    monkeypatch.setattr(xgrammar.GrammarMatcher, "__init__", watched)
    cache = GrammarCache(GrammarCacheConfig(), lock=cast(threading.Lock, lock))
    _, job = own(cache, "a")
    cache.finish(job, Compiled(native, 1), "compile", remember=True)
    again = ticket("a")
    cache.look_up(again)
    again.matcher()
    assert made == [False]


def test_the_account_equals_the_sum_and_keeps_both_limits() -> None:
    """G-15: after each of 10,000 random inserts and hits."""
    config = GrammarCacheConfig(bytes=40_000, entries=25, negative_entries=4)
    cache = GrammarCache(config)
    draw = random.Random(6)
    for _ in range(10_000):
        text = "x" * draw.randrange(1, 60)
        asked = ticket(text)
        job = cache.look_up(asked)
        if job is not None:
            bad = draw.random() < 0.1
            outcome = GrammarError("bad", code="invalid_grammar") if bad else compiled(draw.randrange(1, 5000))
            cache.finish(job, outcome, "compile", remember=True)
        state = cache.state()
        total = sum(num_bytes for _, num_bytes in cache._entries.values())
        assert state.num_bytes == total + sum(refused.num_bytes for refused in cache._refused.values())
        assert state.num_bytes <= config.bytes
        assert state.num_entries <= config.entries
        assert state.num_refused <= config.negative_entries
    assert cache.state().evictions["bytes"] > 0


def test_an_entry_counts_its_grammar_its_key_and_the_overhead() -> None:
    """G-15, O-09: XGrammar's own count, the text's bytes (not characters) and 512."""
    cache = GrammarCache(GrammarCacheConfig())
    put(cache, "äö", 1000)
    assert cache.state().num_bytes == 1000 + 4 + ENTRY_OVERHEAD_BYTES


def test_the_least_recently_used_goes_first() -> None:
    """G-16: a hit makes an entry the youngest."""
    cache = GrammarCache(GrammarCacheConfig(entries=3))
    for text in "abc":
        put(cache, text)
    assert is_held(cache, "a")
    put(cache, "d")
    assert [is_held(cache, text) for text in "abcd"] == [True, False, True, True]
    assert cache.state().evictions["entries"] == 1


def test_an_oversized_grammar_serves_who_waits_and_evicts_nothing() -> None:
    """G-16, O-09: it is compiled again the next time."""
    cache = GrammarCache(GrammarCacheConfig(bytes=100 * (100 + ENTRY_OVERHEAD_BYTES + 2)))
    for number in range(100):
        put(cache, f"{number:02}")
    asked, job = own(cache, "big")
    cache.finish(job, compiled(1 << 20), "compile", remember=True)
    assert asked.is_done
    assert cache.state().num_entries == 100
    assert cache.state().evictions == {"bytes": 0, "entries": 0, "oversized": 1, "flush": 0}
    assert not is_held(cache, "big")


def test_only_what_may_be_remembered_is_and_not_for_ever() -> None:
    """G-18, O-08: a refusal answers from memory for its time; a time-out never does."""
    clock = Clock()
    cache = GrammarCache(GrammarCacheConfig(negative_ttl_s=60), clock)
    refuse(cache, "bad")
    again = ticket("bad")
    assert cache.look_up(again) is None
    with pytest.raises(GrammarError, match="bad"):
        again.matcher()
    clock.now_ns = 60 * S - 1
    assert is_held(cache, "bad")
    clock.now_ns = 60 * S
    assert not is_held(cache, "bad")
    assert cache.state().num_bytes == 0

    late, job = own(cache, "slow")
    cache.finish(job, RequestError("late", status=504, code="grammar_timeout"), "compile", remember=False)
    assert isinstance(late.outcome, RequestError)
    assert not is_held(cache, "slow")
    put(cache, "slow")
    assert is_held(cache, "slow")


def test_refusals_push_out_each_other_and_no_grammar() -> None:
    """G-18: whoever sends one bad grammar after the other costs others nothing."""
    size = ENTRY_OVERHEAD_BYTES + 100 + 4
    cache = GrammarCache(GrammarCacheConfig(bytes=4 * size, negative_entries=3))
    put(cache, "good", 100)
    for number in range(50):
        refuse(cache, f"bad{number}")
    assert is_held(cache, "good")
    assert cache.state().num_refused == 3
    put(cache, "two!", 100)
    put(cache, "tri!", 100)
    put(cache, "for!", 100)
    assert cache.state().num_refused == 0
    assert [is_held(cache, text) for text in ("good", "two!", "tri!", "for!")] == [True] * 4


def test_a_cancelled_ticket_leaves_the_others_alone() -> None:
    """G-19: 8 wait, 7 leave at random points, 1,000 rounds; who stays gets it, who left never does."""
    draw = random.Random(7)
    for _ in range(1000):
        cache = GrammarCache(GrammarCacheConfig())
        first, job = own(cache, "a")
        tickets = [first, *(ticket("a") for _ in range(7))]
        for attached in tickets[1:]:
            cache.look_up(attached)
        stays = draw.randrange(8)
        leaving = [t for place, t in enumerate(tickets) if place != stays]
        draw.shuffle(leaving)
        early = draw.randrange(8)
        assert all(cache.cancel(t) for t in leaving[:early])
        assert cache.keep(job)
        told = cache.finish(job, compiled(), "compile", remember=True)
        assert tickets[stays] in told
        assert len(told) == 8 - early
        assert not any(cache.cancel(t) for t in tickets), "too late: they have been told"
        assert not any(t.is_done for t in leaving[:early])


def test_a_job_that_nobody_waits_for_is_dropped_and_may_be_asked_for_again() -> None:
    """G-19: it never reaches a worker."""
    cache = GrammarCache(GrammarCacheConfig())
    asked, job = own(cache, "a")
    assert cache.cancel(asked)
    assert not cache.keep(job)
    assert cache.state().num_in_flight == 0
    _, again = own(cache, "a")
    assert again is not job


def test_what_was_begun_before_a_flush_is_not_kept() -> None:
    """G-23: it serves those who wait."""
    cache = GrammarCache(GrammarCacheConfig())
    put(cache, "old")
    asked, job = own(cache, "a")
    cache.flush()
    cache.finish(job, compiled(), "compile", remember=True)
    assert asked.is_done
    assert cache.state().num_entries == 0
    assert cache.state().num_bytes == 0
    put(cache, "a")
    assert is_held(cache, "a")


def test_too_many_new_grammars_are_refused_at_once() -> None:
    """G-07: what is on its way is in no account, so its number is bounded; known grammars still answer."""
    cache = GrammarCache(GrammarCacheConfig())
    put(cache, "known")
    for number in range(MAX_JOBS):
        own(cache, str(number))
    refused = ticket("one more")
    assert cache.look_up(refused) is None
    with pytest.raises(RequestError) as caught:
        refused.matcher()
    assert (caught.value.status, caught.value.code) == (503, "grammar_unavailable")
    assert is_held(cache, "known")
    attached = ticket("0")
    assert cache.look_up(attached) is None
    assert not attached.is_done


@pytest.mark.parametrize("held", [True, False])
def test_a_grammar_that_showed_itself_too_slow_is_refused_and_forgotten_with_the_refusal(held: bool) -> None:
    """D-17: what held up a step would do so again; a refusal ends, for a limit of time says nothing certain (G-18)."""
    clock = Clock()
    cache = GrammarCache(GrammarCacheConfig(negative_ttl_s=60.0), clock)
    if held:
        put(cache, "slow")
    put(cache, "good")
    for _ in range(2):
        cache.condemn(grammar("slow"), GrammarError("too slow", code="grammar_too_costly"))
    asked = ticket("slow")
    assert cache.look_up(asked) is None
    assert isinstance(asked.outcome, GrammarError)
    assert asked.outcome.code == "grammar_too_costly"
    state = cache.state()
    assert (state.num_entries, state.num_refused) == (1, 1)
    assert state.num_bytes == 100 + len("good") + len("slow") + 2 * ENTRY_OVERHEAD_BYTES
    clock.now_ns += 61 * S
    assert cache.look_up(ticket("slow")) is not None
    assert cache.state().num_bytes == 100 + len("good") + ENTRY_OVERHEAD_BYTES
