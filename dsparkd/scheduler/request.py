"""One request's state, its legal transitions, and what it holds on the device. Owned by the tick thread.

    grammar_wait -> waiting -> prefill -> decode -> finished        an abort is legal in every state
                       ^----------'----------'   retracted for want of pages: keeps its output ids and resumes from
                                                 its prefix

Position p of a sequence is its p-th id, prompt and output together. `num_computed` ids have been through the model.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import SlotStart
from dsparkd.kv.pages import IdAllocator, PageAllocator
from dsparkd.kv.radix import Node, PrefixTree
from dsparkd.messages import TokenizedRequest, TokenLogprob
from dsparkd.text.stops import StopMatcher

if TYPE_CHECKING:
    from dsparkd.grammar.matcher import Matcher


class State(StrEnum):
    """Where a request is."""

    GRAMMAR_WAIT = "grammar_wait"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


_LEGAL = {
    State.GRAMMAR_WAIT: (State.WAITING, State.FINISHED),
    State.WAITING: (State.PREFILL, State.FINISHED),
    State.PREFILL: (State.DECODE, State.WAITING, State.FINISHED),
    State.DECODE: (State.WAITING, State.FINISHED),
    State.FINISHED: (),
}


class Request:
    """A request between admission and its last delta.

    arrival: number in order of admission at this rank. max_outputs: ids it may still grow to, the context's edge
    included. slot is 0, pages empty and locked None while it holds nothing.
    """

    def __init__(
        self,
        message: TokenizedRequest,
        *,
        arrival: int,
        delivered_ns: int,
        max_context_tokens: int,
        awaits_grammar: bool = False,
    ) -> None:
        self.message = message
        self.arrival = arrival
        self.delivered_ns = delivered_ns
        self.first_planned_ns = 0
        self.first_output_ns = 0
        self.last_output_ns = 0
        self.max_outputs = min(message.sampling.max_tokens, max_context_tokens - len(message.prompt_ids))
        self.state = State.GRAMMAR_WAIT if awaits_grammar else State.WAITING
        self.matcher: Matcher | None = None  # of its own; kept through retractions
        # Its grammar begins behind the reasoning.
        self.is_thinking = awaits_grammar and message.starts_in_reasoning
        self.output_ids: tuple[int, ...] = ()
        self.stops = StopMatcher(message.sampling.stop_strings)
        self.num_computed = 0
        self.num_retractions = 0
        self.cached_tokens: int | None = None  # of the first admission: what the client's prompt was spared
        # The first prompt token follows nothing, so it has no log-probability.
        self.prompt_logprobs = [TokenLogprob(message.prompt_ids[0], None)] if message.sampling.prompt_logprobs else None
        self.announced = False  # whether a delta has carried the detokenizer's options
        self.slot = 0
        self.pages: list[int] = []
        self.locked: Node | None = None
        self.branch_tokens = 0  # where the tree's other sequences part from this one
        self.pending_start: SlotStart | None = None
        self.decode_snapshot: tuple[Node, int] | None = None
        self.survival: tuple[float, ...] | None = None  # chances of its drafts, a mean over its blocks
        self.steps_since_drafts = 0

    @property
    def request_id(self) -> str:
        """The id that the parent chose."""
        return self.message.request_id

    @property
    def ids(self) -> tuple[int, ...]:
        """The whole sequence so far."""
        return self.message.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        """Length of the whole sequence so far."""
        return len(self.message.prompt_ids) + len(self.output_ids)

    @property
    def uses_prefix_cache(self) -> bool:
        """False where every prompt token's log-probability is wanted: cached tokens are not computed."""
        return not self.message.sampling.prompt_logprobs

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be read."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.message.prompt_ids)

    def move_to(self, state: State) -> None:
        """Change state. Raises InvariantError for a transition that the module's picture does not have."""
        if state not in _LEGAL[self.state]:
            raise InvariantError(f"request {self.request_id}: {self.state} -> {state}")
        self.state = state


class Memory:
    """What requests take from the device: a slot, pages, the lock on the prefix they start from."""

    def __init__(self, *, num_pages: int, num_slots: int, num_snapshots: int, page_tokens: int) -> None:
        """Take the pool's sizes: page 0 and slot 0 belong to padding and count in them."""
        self.pages = PageAllocator(num_pages)
        self.slots = IdAllocator(1, num_slots - 1)
        self.first_inner_slot = num_slots  # those behind are nobody's: each step has them all for its snapshots
        self.snapshots = IdAllocator(0, num_snapshots)
        self.tree = PrefixTree(self.pages, self.snapshots, page_tokens)
        self.page_tokens = page_tokens

    def admit(self, request: Request, num_spare_pages: int) -> bool:
        """Give a waiting request a slot and all pages of its sequence so far, or nothing at all.

        num_spare_pages must stay available beside them, so that the rows that run can grow before somebody is put
        back. On success the request is in prefill, from the end of the longest cached prefix on.
        """
        if not self.slots.num_free:
            return False
        match = self.tree.match(request.ids) if request.uses_prefix_cache else None
        branch_tokens = self.tree.shared_tokens(request.ids) if request.uses_prefix_cache else 0
        prefix = match.pages if match is not None else ()
        # Before anything is evicted: the prefix itself must not be.
        self.pages.retain(prefix)
        needed = -(-request.num_tokens // self.page_tokens) - len(prefix)
        if needed + num_spare_pages > self.pages.num_free + self.pages.num_cached:
            self.pages.release(prefix)
            return False
        if match is not None:
            self.tree.lock(match.node)
            request.locked = match.node
        grown = self.tree.allocate_pages(needed)
        if grown is None:
            raise InvariantError(f"{needed} pages were available and are not")
        request.pages = [*prefix, *grown]
        request.slot = self.slots.allocate()
        request.branch_tokens = branch_tokens
        request.num_computed = match.num_tokens if match is not None else 0
        request.pending_start = SlotStart(
            slot=request.slot, snapshot=match.snapshot if match is not None else None, position=request.num_computed
        )
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
        request.move_to(State.PREFILL)
        return True

    def grow(self, request: Request, count: int = 1) -> bool:
        """Make room for `count` more computed tokens; False when no page is to be had."""
        missing = self.num_missing(request, count)
        if not missing:
            return True
        grown = self.tree.allocate_pages(missing)
        if grown is None:
            return False
        request.pages += grown
        return True

    def num_missing(self, request: Request, count: int) -> int:
        """Pages that a request lacks for `count` more computed tokens."""
        return max(0, -(-(request.num_computed + count) // self.page_tokens) - len(request.pages))

    def start(self, request: Request) -> None:
        """Note that the slot has been filled: the snapshot that it was filled from may go."""
        request.pending_start = None
        self._unlock(request)

    def keep_prefix(self, request: Request, position: int, snapshot: int) -> None:
        """Put the computed prefix that ends at position, and its snapshot, into the tree.

        While decoding only the last boundary is of use to the next turn, so it replaces the one before.
        """
        node, pages = self.tree.insert(request.ids[:position], request.pages, snapshot)
        self.pages.retain(pages)
        self.pages.release(request.pages[: len(pages)])
        request.pages[: len(pages)] = pages
        if request.state is State.DECODE:
            if request.decode_snapshot is not None:
                self.tree.drop_snapshot(*request.decode_snapshot)
            request.decode_snapshot = (node, snapshot)

    def release(self, request: Request) -> None:
        """Take back everything that a request in prefill or decode holds. Raises InvariantError on a second call."""
        if not request.slot:
            raise InvariantError(f"request {request.request_id} holds nothing")
        self._unlock(request)
        self.slots.free(request.slot)
        self.pages.release(request.pages)
        request.slot = 0
        request.pages = []
        request.num_computed = 0
        request.pending_start = None
        request.decode_snapshot = None
        request.survival = None

    def _unlock(self, request: Request) -> None:
        if request.locked is not None:
            self.tree.unlock(request.locked)
            request.locked = None
