"""Framing, back-pressure and ends of channels, over real socketpairs."""

import asyncio
import socket
from collections.abc import Iterator

import msgspec
import pytest
import uvloop

from dsparkd.errors import InvariantError, PeerError
from dsparkd.ipc.channel import AsyncChannel, Channel
from dsparkd.messages import Abort, RoutedBatch, SamplingParams, TokenizedRequest, ToRank, decode_to_rank, encode

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def channel(sock: socket.socket, **changes: float) -> Channel[ToRank]:
    options = {"send_timeout_s": 5.0, "max_pending_bytes": 1 << 20, **changes}
    return Channel(
        sock,
        decode_to_rank,
        send_timeout_s=options["send_timeout_s"],
        max_pending_bytes=int(options["max_pending_bytes"]),
        name="rank 0",
    )


def batch(num_items: int, frame: int = 1) -> RoutedBatch:
    requests = tuple(
        TokenizedRequest(
            request_id=f"{frame}-{index}",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=4, seed=index),
            received_ns=1,
            encoded_ns=2,
            tokenized_ns=3,
            dispatched_ns=4,
        )
        for index in range(num_items)
    )
    return RoutedBatch(dp_rank=0, frame=frame, requests=requests)


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    """R-04: a batch crosses as one frame, so a reader sees all its items or none."""
    sender, receiver = channel(pair[0]), channel(pair[1])
    sent = [batch(64), Abort("1-0"), batch(1, frame=2)]

    for message in sent:
        sender.send_nowait(message)

    assert receiver.receive_nowait() == sent


def test_receive_drains_at_most_max_frames_and_keeps_the_rest(pair: Pair) -> None:
    """R-16: 300 frames queued are taken as 256 and 44, and none is cut."""
    receiver = channel(pair[1])
    bodies = [encode(batch(1, frame)) for frame in range(300)]
    pair[0].sendall(b"".join(len(body).to_bytes(4, "little") + body for body in bodies))

    first = receiver.receive_nowait(256)
    has_rest = receiver.has_frames
    second = receiver.receive_nowait(256)

    assert (len(first), len(second)) == (256, 44)
    assert has_rest, "the rest is in memory: the socket alone would not wake the reader"
    assert [message.frame for message in first + second if isinstance(message, RoutedBatch)] == list(range(300))


def test_a_frame_that_arrives_in_single_bytes_is_delivered_once_it_is_whole(pair: Pair) -> None:
    """Streams cut anywhere; half a frame is not a message."""
    receiver = channel(pair[1])
    body = encode(Abort("x"))
    frame = len(body).to_bytes(4, "little") + body

    seen = []
    for byte in frame:
        pair[0].send(bytes([byte]))
        seen.append(receiver.receive_nowait())

    assert seen == [[]] * (len(frame) - 1) + [[Abort("x")]]


def test_frames_before_the_end_are_delivered_before_the_end(pair: Pair) -> None:
    """L-35: what a peer sent before it left still counts."""
    sender, receiver = channel(pair[0]), channel(pair[1])
    sender.send_nowait(Abort("last"))
    sender.close()

    assert receiver.receive_nowait() == [Abort("last")]
    with pytest.raises(PeerError, match="rank 0 closed"):
        receiver.receive_nowait()


def test_an_end_inside_a_frame_is_named(pair: Pair) -> None:
    """L-14: a writer killed in the middle of a frame never yields a message."""
    receiver = channel(pair[1])
    pair[0].send((100).to_bytes(4, "little") + b"half")
    pair[0].close()

    with pytest.raises(PeerError, match="inside a frame"):
        receiver.receive_nowait()


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1 not msgpack",
        msgspec.msgpack.encode({"type": "Abort", "request_id": "x", "extra": 1}),
        msgspec.msgpack.encode({"type": "RoutedBatch", "dp_rank": 0, "frame": 2, "requests": []}),
    ],
    ids=["garbage", "unknown field", "no item"],
)
def test_a_malformed_frame_is_an_invariant_error_with_its_number(pair: Pair, body: bytes) -> None:
    """R-17: it is the sender's bug and fails the pair; the number finds the frame in the sender's log."""
    receiver = channel(pair[1])
    good = encode(Abort("x"))
    pair[0].send(len(good).to_bytes(4, "little") + good + len(body).to_bytes(4, "little") + body)

    with pytest.raises(InvariantError, match="frame 2 from rank 0"):
        receiver.receive_nowait()


def test_an_absurd_length_is_refused_before_it_is_waited_for(pair: Pair) -> None:
    """A length beyond the limit can only be a bug; waiting for its bytes would hang."""
    receiver = channel(pair[1])
    pair[0].send(b"\xff\xff\xff\xff")

    with pytest.raises(InvariantError, match="announced a frame"):
        receiver.receive_nowait()


def test_sending_to_a_peer_that_does_not_read_never_blocks_and_fails_at_the_bound(pair: Pair) -> None:
    """decisions 17: a bounded queue, beyond it a pair failure."""
    sender = channel(pair[0], max_pending_bytes=1 << 16)

    def flood() -> None:
        for frame in range(100_000):
            sender.send_nowait(batch(64, frame))

    with pytest.raises(PeerError, match="does not read"):
        flood()

    assert sender.wants_write


def test_a_byte_that_waits_beyond_the_deadline_is_a_peer_error(pair: Pair) -> None:
    """decisions 17: the queue has a deadline; the clock is the test's, so nothing here waits."""
    now = [0]
    sender = Channel(
        pair[0], decode_to_rank, send_timeout_s=5.0, max_pending_bytes=1 << 30, name="rank 0", clock=lambda: now[0]
    )
    while not sender.wants_write:
        sender.send_nowait(batch(64))

    now[0] = int(5e9)
    assert not sender.flush_nowait()
    now[0] = int(5e9) + 1
    with pytest.raises(PeerError, match="has not read"):
        sender.flush_nowait()


def test_a_peer_that_takes_a_frame_in_pieces_is_not_stuck(pair: Pair) -> None:
    """R-08: a rank empties its socket once a tick, so a batch of megabytes takes many ticks."""
    now = [0]
    sender = Channel(
        pair[0], decode_to_rank, send_timeout_s=5.0, max_pending_bytes=1 << 30, name="rank 0", clock=lambda: now[0]
    )
    receiver = channel(pair[1])
    sender.send_nowait(batch(50_000))
    assert sender.wants_write

    ticks = 0
    got: list[ToRank] = []
    while not got:
        now[0] += int(4e9)
        got = receiver.receive_nowait()
        sender.flush_nowait()
        ticks += 1

    assert ticks > 2, "the frame must outlast the deadline for this test to mean something"
    assert got == [batch(50_000)]


def test_pending_bytes_leave_once_the_peer_reads_again(pair: Pair) -> None:
    """A slow peer gets everything, in order."""
    sender, receiver = channel(pair[0], max_pending_bytes=1 << 30), channel(pair[1])
    frames = 0
    while frames < 50 or not sender.wants_write:
        sender.send_nowait(batch(64, frames))
        frames += 1

    got: list[ToRank] = []
    while not sender.flush_nowait():
        got += receiver.receive_nowait()
    got += receiver.receive_nowait()

    assert [message.frame for message in got if isinstance(message, RoutedBatch)] == list(range(frames))


def test_sending_to_a_closed_peer_is_a_peer_error(pair: Pair) -> None:
    """R-08: the sender learns that its frame cannot be delivered."""
    sender = channel(pair[0])
    pair[1].close()

    with pytest.raises(PeerError, match="closed its channel"):
        sender.send_nowait(Abort("x"))


def opened(sock: socket.socket, send_timeout_s: float) -> AsyncChannel[ToRank]:
    inner = Channel(sock, decode_to_rank, send_timeout_s=send_timeout_s, max_pending_bytes=1 << 30, name="rank 0")
    return AsyncChannel(inner, asyncio.get_running_loop())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_both_loops_carry_a_flood_in_both_directions(pair: Pair, run: object) -> None:
    """Senders wait for room and receivers for frames; nothing is lost, whichever loop runs."""
    assert callable(run)

    async def flood() -> tuple[list[ToRank], list[ToRank]]:
        left, right = opened(pair[0], 5.0), opened(pair[1], 5.0)

        async def send_all(end: AsyncChannel[ToRank]) -> None:
            for frame in range(200):
                await end.send(batch(64, frame))

        async def receive_all(end: AsyncChannel[ToRank]) -> list[ToRank]:
            got: list[ToRank] = []
            while len(got) < 200:
                got += await end.receive()
            return got

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(send_all(left))
            group.create_task(send_all(right))
            at_left = group.create_task(receive_all(left))
            at_right = group.create_task(receive_all(right))
        left.close()
        right.close()
        return at_left.result(), at_right.result()

    for got in run(flood()):
        assert [message.frame for message in got] == list(range(200))


async def test_an_async_send_to_a_stuck_peer_fails_at_its_deadline_and_for_good(pair: Pair) -> None:
    """R-08: after half a frame nothing else may follow, so every later send fails with the same cause."""
    end = opened(pair[0], 0.05)

    async def flood() -> None:
        while True:
            await end.send(batch(64))

    with pytest.raises(PeerError, match="has not read"):
        await flood()
    with pytest.raises(PeerError, match="has not read"):
        await end.send(Abort("x"))
    end.close()


async def test_an_async_send_outlasts_its_deadline_while_the_peer_reads(pair: Pair) -> None:
    """R-08: one large batch to a rank with long ticks must not end the server."""
    now = [0]
    inner = Channel(
        pair[0], decode_to_rank, send_timeout_s=5.0, max_pending_bytes=1 << 30, name="rank 0", clock=lambda: now[0]
    )
    end, receiver = AsyncChannel(inner, asyncio.get_running_loop()), channel(pair[1])
    sending = asyncio.ensure_future(end.send(batch(50_000)))

    ticks = 0
    got: list[ToRank] = []
    async with asyncio.timeout(30):
        while not got:
            await asyncio.sleep(0.001)  # the loop fills the socket again
            now[0] += int(4e9)
            got = receiver.receive_nowait()
            ticks += 1

    assert ticks > 2, "the frame must outlast the deadline for this test to mean something"
    assert got == [batch(50_000)]
    await sending
    end.close()


async def test_a_cancelled_send_does_not_cut_its_frame(pair: Pair) -> None:
    """A client that leaves cancels its handler; the frames of others must stay readable."""
    end, receiver = opened(pair[0], 5.0), channel(pair[1])
    sends = [asyncio.ensure_future(end.send(batch(64, frame))) for frame in range(64)]
    await asyncio.sleep(0)
    waiting = [send for send in sends if not send.done()]
    assert waiting, "the socket must be full for this test to mean something"
    for send in waiting:
        send.cancel()

    got: list[ToRank] = []
    async with asyncio.timeout(10):
        while len(got) < 64:
            got += receiver.receive_nowait()
            await asyncio.sleep(0)

    assert [message.frame for message in got if isinstance(message, RoutedBatch)] == list(range(64))
    end.close()


async def test_an_async_receiver_learns_of_the_end(pair: Pair) -> None:
    """End-of-file is the peer's death, and wakes who waits."""
    end = opened(pair[0], 5.0)
    waiting = asyncio.ensure_future(end.receive())
    await asyncio.sleep(0)
    pair[1].close()

    with pytest.raises(PeerError, match="rank 0 closed"):
        await asyncio.wait_for(waiting, 5)
    end.close()


async def test_closing_releases_waiting_senders_and_the_receiver(pair: Pair) -> None:
    """Every wait has an owner that can end it."""
    end = opened(pair[0], 60.0)
    receiving = asyncio.ensure_future(end.receive())
    sends = [asyncio.ensure_future(end.send(batch(64, frame))) for frame in range(64)]
    await asyncio.sleep(0)
    waiting = [send for send in sends if not send.done()]
    assert waiting

    end.close()
    results = await asyncio.gather(*waiting, receiving, return_exceptions=True)

    assert all(isinstance(result, PeerError) for result in results)
