"""Process main: TokenDelta of both ranks in, TextDelta for the parent out; no torch.

One wake-up takes everything that both ranks have sent and answers with one message. The process leaves after both
ranks' farewells, when all text is out.
"""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, assert_never

from dsparkd import log as log_module
from dsparkd.config import Config
from dsparkd.errors import EXIT_FATAL, EXIT_OK, FatalError, InvariantError, PeerError, StartError
from dsparkd.ipc.channel import Channel
from dsparkd.ipc.wiring import DetokenizerWiring
from dsparkd.messages import (
    DetokenizeOptions,
    Farewell,
    Progress,
    StartFailed,
    TextDelta,
    TextDeltas,
    TextLogprob,
    ToDetokenizer,
    TokenDelta,
    TokenDeltas,
    TokenLogprob,
    decode_to_detokenizer,
)
from dsparkd.text.detokenize import IncrementalText
from dsparkd.text.tokenizer import Tokenizer

log = log_module.get()

SOURCE = "detokenizer"
# How often text that the parent has not read is looked at for its deadline.
CHECK_PERIOD_S = 1.0
# Text that the parent has not read: more than all streams of a server hold, and at worst all log-probabilities of
# prompts that the parent lets be under way; so beyond it the parent is stuck.
MAX_PENDING_BYTES = 256 << 20


def main(config: Config, wiring: DetokenizerWiring) -> int:
    """Run the process until both ranks said farewell; returns the exit code."""
    parent = Channel(
        wiring.parent,
        _refuse_frame,
        send_timeout_s=config.routing.send_timeout_s,
        max_pending_bytes=MAX_PENDING_BYTES,
        name="parent",
    )
    try:
        tokenizer = Tokenizer.load(Path(config.engine.checkpoint))
        parent.send_nowait(Progress(dp_rank=-1, stage="detokenizer_ready", done=1, total=1))
        log.info("detokenizer_ready", vocab_size=tokenizer.vocab_size)
        return Loop(Detokenizer(tokenizer), parent, wiring.ranks).run()
    except StartError as error:
        log.warning("detokenizer_start_failed", error=str(error))
        _tell_start_failed(parent, error)
        return error.exit_code
    except FatalError as error:
        log.error("detokenizer_failed", error=str(error))
        return EXIT_FATAL
    except Exception:
        log.exception("detokenizer_crashed")
        return EXIT_FATAL


def _tell_start_failed(parent: Channel[NoReturn], error: StartError) -> None:
    try:
        parent.send_nowait(StartFailed(role=SOURCE, exit_code=error.exit_code, error=str(error)))
    except PeerError:
        log.warning("parent_lost")


def _refuse_frame(frame: bytes) -> NoReturn:
    raise InvariantError(f"the parent sent {len(frame)} bytes to the detokenizer, which takes none from it")


@dataclass
class _Stream:
    """One request's text and what was asked of it."""

    text: IncrementalText
    skip_special_tokens: bool


class Detokenizer:
    """Texts of all requests in flight, by request id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._streams)

    def apply(self, delta: TokenDelta) -> TextDelta:
        """Turn one request's new ids into text. Raises InvariantError for a delta out of order."""
        if delta.options is not None:
            self._begin(delta.request_id, delta.options)
        stream = self._streams.get(delta.request_id)
        if stream is None:
            raise InvariantError(f"a delta of {delta.request_id!r}, which has not begun or has ended")
        shown = b"".join([self._shown(token_id, stream) for token_id in delta.token_ids])
        if delta.finish is None:
            text = stream.text.feed(shown)
        else:
            text = stream.text.finish(shown, delta.finish.cut_bytes)
            del self._streams[delta.request_id]
        return TextDelta(
            request_id=delta.request_id,
            text=text,
            token_ids=delta.token_ids,
            logprobs=self._with_text(delta.logprobs),
            prompt_logprobs=self._with_text(delta.prompt_logprobs),
            finish=delta.finish,
        )

    def _begin(self, request_id: str, options: DetokenizeOptions) -> None:
        if request_id in self._streams:
            raise InvariantError(f"request {request_id!r} began twice")
        self._streams[request_id] = _Stream(IncrementalText(options.stop_strings), options.skip_special_tokens)

    def _shown(self, token_id: int, stream: _Stream) -> bytes:
        if stream.skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _with_text(self, logprobs: tuple[TokenLogprob, ...] | None) -> tuple[TextLogprob, ...] | None:
        if logprobs is None:
            return None
        return tuple(
            TextLogprob(
                entry.token_id,
                *self._token(entry.token_id),
                entry.logprob,
                tuple((token_id, *self._token(token_id), logprob) for token_id, logprob in entry.top),
            )
            for entry in logprobs
        )

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of one id by itself; the text of half a character is a replacement character."""
        raw = self._tokenizer.token_bytes(token_id)
        return raw.decode(errors="replace"), raw


class Loop:
    """The process's one thread: waits on three sockets, never on one alone.

    A rank that ends without a farewell makes the whole server fail, which the parent sees by itself; what the ranks
    had sent is still delivered, then the process ends with EXIT_FATAL.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        parent: Channel[NoReturn],
        ranks: tuple[socket.socket, socket.socket],
    ) -> None:
        self._detokenizer = detokenizer
        self._parent = parent
        self._ranks = {
            sock.fileno(): Channel(
                sock,
                decode_to_detokenizer,
                send_timeout_s=CHECK_PERIOD_S,  # nothing is sent to a rank
                max_pending_bytes=MAX_PENDING_BYTES,
                name=f"rank{dp_rank}",
            )
            for dp_rank, sock in enumerate(ranks)
        }
        self._lost_ranks = 0
        self._poll = select.poll()

    def run(self) -> int:
        """Serve until both ranks have left. Raises PeerError when the parent is gone or stuck."""
        for descriptor in self._ranks:
            self._poll.register(descriptor, select.POLLIN)
        while self._ranks:
            ready = self._wait()
            texts = [self._detokenizer.apply(delta) for fd in ready if fd in self._ranks for delta in self._take(fd)]
            if texts:
                self._parent.send_nowait(TextDeltas(tuple(texts)))
        return self._leave()

    def _wait(self) -> list[int]:
        """Sleep until a socket is ready; flush and check the parent's; return the ready descriptors."""
        parent, wants_write = self._parent.fileno(), self._parent.wants_write
        self._poll.register(parent, select.POLLIN | (select.POLLOUT if wants_write else 0))
        ready = [descriptor for descriptor, _ in self._poll.poll(CHECK_PERIOD_S * 1000 if wants_write else None)]
        if parent in ready:
            self._parent.receive_nowait()  # raises at the parent's end; it sends nothing
        self._parent.flush_nowait()
        return ready

    def _take(self, descriptor: int) -> list[TokenDelta]:
        """All deltas that a rank has sent; forgets the rank at its farewell or end."""
        channel = self._ranks[descriptor]
        try:
            messages: list[ToDetokenizer] = channel.receive_nowait()
        except PeerError as error:
            log.error("rank_lost", peer=channel.name, error=str(error))
            self._lost_ranks += 1
            self._forget(descriptor)
            return []
        deltas: list[TokenDelta] = []
        for message in messages:
            match message:
                case TokenDeltas():
                    deltas += message.deltas
                case Farewell():
                    self._forget(descriptor)
                case _:
                    assert_never(message)
        return deltas

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._ranks.pop(descriptor).close()

    def _leave(self) -> int:
        """Write everything out, say farewell, and return the exit code."""
        if self._lost_ranks == 0:
            self._parent.send_nowait(Farewell(SOURCE))
        while self._parent.wants_write:
            self._wait()
        self._parent.close()
        log.info("detokenizer_left", lost_ranks=self._lost_ranks, unfinished=len(self._detokenizer))
        return EXIT_OK if self._lost_ranks == 0 else EXIT_FATAL
