"""A request's states: what may follow what, and what it holds in each."""

from __future__ import annotations

import itertools

import pytest

from dsparkd.errors import InvariantError
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory, Request, State

LEGAL = {
    (State.GRAMMAR_WAIT, State.WAITING),
    (State.WAITING, State.PREFILL),
    (State.PREFILL, State.DECODE),
    (State.PREFILL, State.WAITING),
    (State.DECODE, State.WAITING),
    *((state, State.FINISHED) for state in State if state is not State.FINISHED),
}


def request_of(lab, name="x", prompt=9, arrival=1, awaits_grammar=False, **sampling):
    return Request(
        lab.request(name, prompt, **sampling),
        arrival=arrival,
        delivered_ns=1,
        max_context_tokens=64,
        awaits_grammar=awaits_grammar,
    )


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, repeat=2)))
def test_only_the_pictures_transitions_are_legal(lab, before, after):
    """An abort (to finished) is legal in every live state; nothing follows the end."""
    request = request_of(lab)
    request.state = before
    if (before, after) in LEGAL:
        request.move_to(after)
        assert request.state is after
    else:
        with pytest.raises(InvariantError, match=f"{before} -> {after}"):
            request.move_to(after)


def test_admission_is_all_or_nothing(lab):
    """A request that waits holds no page: half of them would block those that could finish."""
    memory = Memory(num_pages=4, num_slots=3, num_snapshots=2, page_tokens=lab.PAGE)
    big, small = request_of(lab, prompt=13), request_of(lab, prompt=9)
    assert not memory.admit(big, 0)
    assert (memory.pages.num_free, memory.slots.num_free, big.state) == (3, 2, State.WAITING)
    assert not memory.admit(small, 1)
    assert memory.pages.num_free == 3
    assert memory.admit(small, 0)
    assert (memory.pages.num_free, memory.slots.num_free) == (0, 1)


def test_admission_never_evicts_its_own_prefix(lab):
    """The matched pages are counted as available until they are held; taking them would leave a broken table."""
    memory = Memory(num_pages=6, num_slots=3, num_snapshots=2, page_tokens=lab.PAGE)
    first = request_of(lab, prompt=list(range(13)))
    assert memory.admit(first, 0)
    first.num_computed = 12
    memory.keep_prefix(first, 12, memory.tree.allocate_snapshot())
    memory.release(first)
    assert (memory.pages.num_cached, memory.pages.num_free) == (3, 2)

    second = request_of(lab, prompt=list(range(21)))  # 6 pages of a pool of 5
    assert not memory.admit(second, 0)
    assert (memory.pages.num_cached, memory.pages.num_used) == (3, 0)

    third = request_of(lab, prompt=list(range(17)))
    assert memory.admit(third, 0)
    assert third.num_computed == third.cached_tokens == 12
    assert third.pending_start.position == 12
    assert len(set(third.pages)) == 5


def test_a_lock_ends_when_the_slot_is_filled_or_the_request_leaves(lab):
    """Otherwise its snapshot could never be evicted again."""
    memory = Memory(num_pages=9, num_slots=3, num_snapshots=1, page_tokens=lab.PAGE)
    first = request_of(lab, prompt=list(range(9)))
    assert memory.admit(first, 0)
    first.num_computed = 8
    memory.keep_prefix(first, 8, memory.tree.allocate_snapshot())
    memory.release(first)

    for leave in (memory.release, memory.start):
        again = request_of(lab, prompt=list(range(9)))
        assert memory.admit(again, 0)
        assert memory.tree.allocate_snapshot() is None
        leave(again)
        if again.slot:
            memory.release(again)
    assert memory.tree.allocate_snapshot() is not None


def test_queue_keeps_arrival_order_and_puts_the_retracted_first(lab):
    """R-05: fair order; who was put back goes on first, oldest of them first."""
    queue = RequestQueue()
    memory = Memory(num_pages=33, num_slots=9, num_snapshots=1, page_tokens=lab.PAGE)
    requests = [request_of(lab, f"r{item}", arrival=item) for item in range(6)]
    queue.add(requests)
    for request in requests[:4]:
        memory.admit(request, 0)
        queue.start(request)
    for request in (requests[3], requests[1]):
        memory.release(request)
        queue.put_back(request)

    assert [request.request_id for request in queue.waiting()] == ["r1", "r3", "r4", "r5"]
    assert [request.request_id for request in queue.running()] == ["r0", "r2"]
    assert queue.counts() == {State.GRAMMAR_WAIT: 0, State.WAITING: 4, State.PREFILL: 2, State.DECODE: 0}
    assert queue.num_outstanding_tokens == 6 * 9


def test_a_request_without_its_grammar_starts_never_and_counts(lab):
    """G-20: it holds nothing and is planned by nobody, but the router must see it."""
    queue = RequestQueue()
    waiting, ready = request_of(lab, "waiting", awaits_grammar=True), request_of(lab, "ready")
    queue.add([waiting])
    assert not queue.has_work
    queue.add([ready])
    assert queue.has_work

    assert [request.request_id for request in queue.waiting()] == ["ready"]
    assert (len(queue), queue.num_waiting, queue.num_outstanding_tokens) == (2, 2, 18)
    assert queue.find("waiting") is waiting
    queue.has_grammar(waiting)
    assert [request.request_id for request in queue.waiting()] == ["ready", "waiting"]
    assert (waiting.state, queue.num_outstanding_tokens) == (State.WAITING, 18)


def test_a_live_id_cannot_be_queued_twice(lab):
    """R-14: the parent refuses duplicates; two of one id would share one stream."""
    queue = RequestQueue()
    queue.add([request_of(lab, "same")])
    with pytest.raises(InvariantError, match="same"):
        queue.add([request_of(lab, "same")])
    queue.remove(queue.find("same"))
    queue.add([request_of(lab, "same")])
    with pytest.raises(InvariantError):
        queue.remove(request_of(lab, "stranger"))
