"""The detokenizer as a process would run it, on socketpairs: order, batching, logprobs, and every way to end."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsparkd import detokenizer
from dsparkd.config import Config, EngineConfig, KVConfig
from dsparkd.errors import EXIT_CONFIG, EXIT_FATAL, EXIT_OK, InvariantError
from dsparkd.ipc.channel import Channel
from dsparkd.ipc.wiring import DetokenizerWiring
from dsparkd.messages import (
    DetokenizeOptions,
    Farewell,
    Finish,
    FromDetokenizer,
    Progress,
    StartFailed,
    TextDelta,
    TextDeltas,
    TextLogprob,
    ToDetokenizer,
    TokenDelta,
    TokenDeltas,
    TokenLogprob,
    decode_from_detokenizer,
    decode_to_detokenizer,
)
from dsparkd.text.tokenizer import Tokenizer

LIMIT_S = 10.0
EOS = 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of single bytes: id = byte value, and EOS."""
    directory = tmp_path_factory.mktemp("checkpoint")
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte) if byte in printable else chr(256 + hidden.index(byte)): byte for byte in range(256)}
    added = {
        "id": EOS,
        "content": "<eos>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    model = {"type": "BPE", "vocab": vocab, "merges": [], "dropout": None, "unk_token": None, "byte_fallback": False}
    whole = {
        "version": "1.0",
        "added_tokens": [added],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    return directory


@dataclass
class Running:
    """The process main in a thread, and the other ends of its sockets."""

    thread: threading.Thread
    exit_codes: list[int]
    parent: Channel[FromDetokenizer]
    ranks: tuple[Channel[ToDetokenizer], Channel[ToDetokenizer]]
    sockets: list[socket.socket]

    def close(self) -> None:
        """Leave nothing open: the thread's process would have closed its own ends by exiting."""
        for sock in self.sockets:
            sock.close()

    def received(self, kind: type) -> list[object]:
        """Messages of one kind: waits for at least one."""
        while True:
            self.parent_socket_ready()
            found = [message for message in self.parent.receive_nowait() if isinstance(message, kind)]
            if found:
                return found

    def parent_socket_ready(self) -> None:
        """Wait for bytes from the detokenizer."""
        poll = select.poll()
        poll.register(self.parent, select.POLLIN)
        assert poll.poll(LIMIT_S * 1000), "the detokenizer sent nothing"

    def texts(self, count: int) -> list[TextDelta]:
        """The next `count` text deltas."""
        found: list[TextDelta] = []
        while len(found) < count:
            for message in self.received(TextDeltas):
                assert isinstance(message, TextDeltas)
                found += message.deltas
        return found

    def exit_code(self) -> int:
        """Wait for the end."""
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "the detokenizer did not end"
        return self.exit_codes[0]


def start(checkpoint: Path) -> Running:
    """Run main on fresh socketpairs."""
    parent, rank0, rank1 = (socket.socketpair() for _ in range(3))
    config = Config(engine=EngineConfig(checkpoint=str(checkpoint), device="cpu"), kv=KVConfig(device_bytes=1 << 20))
    exit_codes: list[int] = []
    wiring = DetokenizerWiring(parent[1], (rank0[1], rank1[1]))
    thread = threading.Thread(target=lambda: exit_codes.append(detokenizer.main(config, wiring)))
    thread.start()

    def channel(sock: socket.socket, decode):  # type: ignore[no-untyped-def]
        return Channel(sock, decode, send_timeout_s=LIMIT_S, max_pending_bytes=1 << 24)

    ranks = (channel(rank0[0], decode_to_detokenizer), channel(rank1[0], decode_to_detokenizer))
    sockets = [*parent, *rank0, *rank1]
    return Running(thread, exit_codes, channel(parent[0], decode_from_detokenizer), ranks, sockets)


@pytest.fixture
def running(checkpoint: Path) -> Iterator[Running]:
    """A detokenizer that is ready; ends with its parent if the test did not end it."""
    process = start(checkpoint)
    (progress,) = process.received(Progress)
    assert progress == Progress(dp_rank=-1, stage="detokenizer_ready", done=1, total=1)
    yield process
    process.parent.close()
    process.exit_code()
    process.close()


def ids(text: str) -> tuple[int, ...]:
    """Ids of a text under the byte tokenizer."""
    return tuple(text.encode())


def finish(reason: str = "stop", cut_bytes: int = 0) -> Finish:
    """An end of a request."""
    return Finish(reason=reason, cut_bytes=cut_bytes, prompt_tokens=1, cached_tokens=0, output_tokens=1)  # type: ignore[arg-type]


def begin(request_id: str, text: str, *stops: str, skip: bool = True, end: Finish | None = None) -> TokenDelta:
    """The first delta of a request."""
    options = DetokenizeOptions(stop_strings=stops, skip_special_tokens=skip)
    return TokenDelta(request_id=request_id, token_ids=ids(text), options=options, finish=end)


def test_many_requests_of_one_tick_come_back_as_one_message_in_order(running: Running) -> None:
    """Never one message a token: a tick of a rank is one wake-up, and a request's deltas keep their order."""
    first = tuple(begin(f"r{i}", f"text {i} ") for i in range(40))
    second = tuple(TokenDelta(request_id=f"r{i}", token_ids=ids("end"), finish=finish()) for i in range(40))
    running.ranks[0].send_nowait(TokenDeltas(0, first))
    (message,) = running.received(TextDeltas)
    running.ranks[0].send_nowait(TokenDeltas(0, second))

    assert isinstance(message, TextDeltas)
    assert [(d.request_id, d.text) for d in message.deltas] == [(f"r{i}", f"text {i} ") for i in range(40)]
    assert [(d.request_id, d.text, d.finish) for d in running.texts(40)] == [
        (f"r{i}", "end", finish()) for i in range(40)
    ]


def test_split_characters_and_stop_strings_of_two_requests_do_not_mix(running: Running) -> None:
    """R25: each request has its own half characters and its own held-back text."""
    emoji = ids("😀")
    options = DetokenizeOptions(stop_strings=("STOP",), skip_special_tokens=True)
    running.ranks[0].send_nowait(TokenDeltas(0, (TokenDelta(request_id="a", token_ids=emoji[:2], options=options),)))
    running.ranks[1].send_nowait(TokenDeltas(1, (begin("b", "x ST", "STOP"),)))
    assert {d.request_id: d.text for d in running.texts(2)} == {"a": "", "b": "x "}

    running.ranks[0].send_nowait(TokenDeltas(0, (TokenDelta(request_id="a", token_ids=emoji[2:], finish=finish()),)))
    ending = TokenDelta(request_id="b", token_ids=ids("OP!"), finish=finish(cut_bytes=5))
    running.ranks[1].send_nowait(TokenDeltas(1, (ending,)))

    assert {d.request_id: d.text for d in running.texts(2)} == {"a": "😀", "b": ""}


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "a<eos>")])
def test_special_tokens_are_shown_only_on_request(running: Running, skip: bool, text: str) -> None:
    """skip_special_tokens hides the text; the ids are reported either way."""
    options = DetokenizeOptions(stop_strings=(), skip_special_tokens=skip)
    delta = TokenDelta(request_id="a", token_ids=(97, EOS), options=options, finish=finish())
    running.ranks[0].send_nowait(TokenDeltas(0, (delta,)))

    (got,) = running.texts(1)

    assert (got.text, got.token_ids) == (text, (97, EOS))


def test_logprobs_get_the_text_and_bytes_of_each_token(running: Running) -> None:
    """A token of half a character has no text of its own, so clients need its bytes; a hidden token keeps its name."""
    own = TokenLogprob(0xF0, -0.5, ((97, -1.0), (EOS, -2.0)))
    delta = TokenDelta(
        request_id="a",
        token_ids=(0xF0,),
        options=DetokenizeOptions(stop_strings=(), skip_special_tokens=True),
        logprobs=(own,),
        prompt_logprobs=(TokenLogprob(98, None),),
    )
    running.ranks[0].send_nowait(TokenDeltas(0, (delta,)))

    (got,) = running.texts(1)

    alternatives = ((97, "a", b"a", -1.0), (EOS, "<eos>", b"<eos>", -2.0))
    assert got.logprobs == (TextLogprob(0xF0, "�", b"\xf0", -0.5, alternatives),)
    assert got.prompt_logprobs == (TextLogprob(98, "b", b"b", None),)


def test_it_leaves_after_both_farewells_and_not_after_one(running: Running) -> None:
    """L-35: rank 0 says farewell early while rank 1 still streams; no text is lost and the exit is clean."""
    running.ranks[0].send_nowait(TokenDeltas(0, (begin("a", "last words", end=finish()),)))
    running.ranks[0].send_nowait(Farewell("rank0"))
    running.ranks[1].send_nowait(TokenDeltas(1, (begin("b", "one "),)))
    assert {d.text for d in running.texts(2)} == {"last words", "one "}
    running.ranks[0].close()
    for _ in range(50):
        running.ranks[1].send_nowait(TokenDeltas(1, (TokenDelta(request_id="b", token_ids=ids("more ")),)))
    running.ranks[1].send_nowait(
        TokenDeltas(1, (TokenDelta(request_id="b", token_ids=ids("end"), finish=finish("abort")),))
    )
    running.ranks[1].send_nowait(Farewell("rank1"))

    assert running.exit_code() == EXIT_OK
    text, farewells = "", []
    for message in running.parent.receive_nowait():
        if isinstance(message, TextDeltas):
            text += "".join(delta.text for delta in message.deltas)
        else:
            farewells.append(message)
    assert text == "more " * 50 + "end"
    assert farewells == [Farewell("detokenizer")]


def test_a_large_backlog_is_written_out_before_it_leaves(running: Running) -> None:
    """L-35: text that does not fit into the socket waits for the parent instead of being dropped."""
    megabyte = "x" * (1 << 20)
    running.ranks[0].send_nowait(TokenDeltas(0, (begin("a", megabyte, end=finish()),)))
    running.ranks[0].send_nowait(Farewell("rank0"))
    running.ranks[1].send_nowait(Farewell("rank1"))
    while running.ranks[0].wants_write:
        running.ranks[0].flush_nowait()

    (delta,) = running.texts(1)

    assert delta.text == megabyte
    assert running.exit_code() == EXIT_OK


def test_a_rank_that_dies_does_not_take_the_other_ranks_text_along(running: Running) -> None:
    """L-35: what was sent is delivered, the other rank is heard to its end, and the exit code says that it failed."""
    running.ranks[0].send_nowait(TokenDeltas(0, (begin("a", "half"),)))
    running.ranks[0].close()
    assert running.texts(1)[0].text == "half"
    running.ranks[1].send_nowait(TokenDeltas(1, (begin("b", "whole", end=finish()),)))
    assert running.texts(1)[0].text == "whole"
    running.ranks[1].send_nowait(Farewell("rank1"))

    assert running.exit_code() == EXIT_FATAL


def test_it_ends_with_its_parent(running: Running) -> None:
    """L-39: an end-of-file on the parent's socket is the parent's death."""
    running.parent.close()

    assert running.exit_code() == EXIT_FATAL


def test_a_delta_of_an_unknown_request_ends_the_process(running: Running) -> None:
    """Rank and detokenizer disagree about what is in flight: a bug, and text would go astray."""
    running.ranks[0].send_nowait(TokenDeltas(0, (TokenDelta(request_id="ghost", token_ids=(97,)),)))

    assert running.exit_code() == EXIT_FATAL


def test_a_request_cannot_begin_twice(checkpoint: Path) -> None:
    """The second would silently swallow the first one's held text."""
    texts = detokenizer.Detokenizer(Tokenizer.load(checkpoint))
    texts.apply(begin("a", "x"))

    with pytest.raises(InvariantError, match="began twice"):
        texts.apply(begin("a", "y"))


def test_an_ended_request_leaves_nothing_behind(checkpoint: Path) -> None:
    """A server runs for months; the same id may come again."""
    texts = detokenizer.Detokenizer(Tokenizer.load(checkpoint))
    texts.apply(begin("a", "x", end=finish()))

    assert len(texts) == 0
    assert texts.apply(begin("a", "y")).text == "y"


def test_a_checkpoint_without_tokenizer_is_a_start_failure(tmp_path: Path) -> None:
    """The parent needs the reason, the supervisor the exit code."""
    process = start(tmp_path)

    (failed,) = process.received(StartFailed)

    assert isinstance(failed, StartFailed)
    assert (failed.role, failed.exit_code) == ("detokenizer", EXIT_CONFIG)
    assert "tokenizer.json" in failed.error
    assert process.exit_code() == EXIT_CONFIG
    process.close()
