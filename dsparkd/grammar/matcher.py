"""One request's place in its grammar, and the ids that it has yet to hear of."""

from __future__ import annotations

from collections.abc import Sequence

import xgrammar
from xgrammar.tvm_ffi_binding import GrammarMatcher

from dsparkd.messages import Grammar

# Each is over in microseconds, while winning Python's lock back beside a busy thread takes milliseconds.
_SHORT_METHODS = ("accept_token", "is_terminated", "is_completed", "rollback")


def keep_lock_in_short_calls() -> None:
    """Have XGrammar's short methods keep Python's lock; once per process, before the first matcher (D-28)."""
    for method in vars(GrammarMatcher)["__tvm_ffi_type_info__"].methods:
        if method.name in _SHORT_METHODS:
            method.func.release_gil = False


def ffi_matcher(matcher: xgrammar.GrammarMatcher) -> GrammarMatcher:
    """The object of tvm-ffi behind XGrammar's Python object: what a walk takes."""
    handle = matcher._handle
    assert isinstance(handle, GrammarMatcher)
    return handle


class Matcher:
    """The state of one request's grammar; made per request. Owned by the tick thread.

    `handle` is what a walk takes. Ids that the request keeps are queued here and told to XGrammar exactly once, by the
    next walk. `compiled` is shared with the requests of the same grammar; grammar: its text, where that is known.

    overtime_ns: processor time that its walks took beyond what one may. is_stuck: one of them was given up and may
    still run, so nothing of XGrammar may be called any more.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, grammar: Grammar | None = None) -> None:
        self.compiled = compiled
        self.grammar = grammar
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self.handle = ffi_matcher(self._matcher)
        self._queue: list[int] = []
        self.overtime_ns = 0
        self.is_stuck = False

    def queue(self, ids: Sequence[int]) -> None:
        """Note ids that the request keeps, in order."""
        self._queue += ids

    def take_queue(self) -> list[int]:
        """Hand the queued ids to whoever tells them to XGrammar now."""
        taken, self._queue = self._queue, []
        return taken

    def commit(self) -> bool:
        """Tell XGrammar the queued ids here and now; False when the grammar refuses one.

        For tests and tools: it takes as long as the grammar makes it.
        """
        return all(self._matcher.accept_token(token_id) for token_id in self.take_queue())

    @property
    def is_terminated(self) -> bool:
        """Whether the stop id has been committed."""
        return self._matcher.is_terminated()

    @property
    def is_completed(self) -> bool:
        """Whether what was committed is a whole sentence; more may be possible, and the stop id is."""
        return self._matcher.is_completed()
