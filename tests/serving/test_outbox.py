"""Chunks on their way out of a worker: order, joining, encoding, the bound."""

import base64
import threading

import numpy as np
import pytest

from dq_engine.audio.output import OutputEncoder
from dq_engine.errors import RequestError
from dq_engine.request import Chunk
from dq_engine.serving import outbox as outbox_module
from dq_engine.serving.messages import Audio, Failed, Finished, Heartbeat, Result, decode_from_worker, encode
from dq_engine.serving.outbox import Outbox, OutgoingStream


class Road:
    """A receiver that takes messages only while it is open."""

    def __init__(self, is_open: bool = True) -> None:
        self.messages = []
        self.open = threading.Event()
        self.reached = threading.Event()
        if is_open:
            self.open.set()

    def send(self, message) -> None:
        self.reached.set()
        assert self.open.wait(10)
        self.messages.append(message)


def _samples(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32) / 4096


def _stream(
    id: int = 1, output_format: str = "f32", whole: bool = False, rate: int = 48000, gave_up=None, lane: int = 0
):
    encoder = OutputEncoder(output_format, 48000, rate)
    return OutgoingStream(id, encoder, rate, whole, gave_up or (lambda: None), lane)


NOTHING = np.zeros(0, np.float32)
STATS = {"patches": 3}


def test_an_open_road_takes_every_chunk_in_order():
    road = Road()
    outbox, stream = Outbox(road.send), _stream()
    for start in (0, 10, 20):
        road.reached.clear()
        outbox.put(stream, Chunk(_samples(start, 10)))
        assert road.reached.wait(10)
    outbox.put(stream, Chunk(_samples(30, 5), finish_reason="stop", stats=STATS))
    outbox.close()
    assert b"".join(m.audio for m in road.messages) == _samples(0, 35).tobytes()
    assert all(isinstance(m, Audio) for m in road.messages[:-1])
    last = road.messages[-1]
    assert isinstance(last, Finished)
    assert (last.finish_reason, last.stats, last.latents) == ("stop", STATS, None)


@pytest.mark.parametrize("value", ["\ud800", 2**64, object()], ids=["no Unicode", "a large number", "no type of ours"])
def test_an_answer_that_cannot_be_sent_is_the_callers_trouble_alone(value):
    sent = []
    outbox = Outbox(lambda message: sent.append(decode_from_worker(encode(message))))
    outbox.post(Result(7, {"a": value}))
    outbox.post(Result(8, {"a": 1}))
    outbox.close()
    assert sent == [Failed(7, "INTERNAL", "the answer cannot be sent; the log tells why"), Result(8, {"a": 1})]


def test_every_error_can_be_sent():
    sent = []
    outbox = Outbox(lambda message: sent.append(decode_from_worker(encode(message))))
    error = RequestError("INTERNAL", "the file \ud800x")
    outbox.put(_stream(), Chunk(NOTHING, error=error))
    outbox.close()
    assert sent == [Failed(1, "INTERNAL", "the file \\ud800x")]
    assert str(error) == "INTERNAL: the file \\ud800x"


def test_a_busy_road_joins_what_gathers_per_stream():
    road = Road(is_open=False)
    outbox = Outbox(road.send)
    outbox.post(Heartbeat({}))
    assert road.reached.wait(10)  # the sending thread is stuck with the heartbeat
    first, second = _stream(1), _stream(2)
    for start in range(0, 40, 10):
        outbox.put(first, Chunk(_samples(start, 10)))
        outbox.put(second, Chunk(_samples(100 + start, 10)))
    road.open.set()
    outbox.close()
    sizes = [(m.id, len(m.audio)) for m in road.messages[1:]]
    assert sizes == [(1, 40), (2, 40), (1, 120), (2, 120)], "the first chunk goes by itself"
    for id, start in ((1, 0), (2, 100)):
        assert b"".join(m.audio for m in road.messages[1:] if m.id == id) == _samples(start, 40).tobytes()


@pytest.mark.parametrize("rate", [48000, 16000])
def test_joined_chunks_of_base64_decode_one_by_one(rate):
    road = Road(is_open=False)
    outbox, stream = Outbox(road.send), _stream(output_format="pcm16_base64", rate=rate)
    outbox.post(Heartbeat({}))
    for start in range(0, 3000, 1000):
        outbox.put(stream, Chunk(_samples(start, 1000) / 2))
    outbox.put(stream, Chunk(NOTHING, finish_reason="stop"))
    road.open.set()
    outbox.close()
    whole = OutputEncoder("pcm16", 48000, rate)
    expected = whole.finish(_samples(0, 3000) / 2)
    assert b"".join(base64.b64decode(m.audio, validate=True) for m in road.messages[1:]) == expected
    assert len(expected) == 2 * 3000 * rate // 48000
    assert sum(m.seconds for m in road.messages[1:]) == pytest.approx(3000 / 48000)


def test_a_whole_stream_is_one_message():
    road = Road()
    outbox, stream = Outbox(road.send), _stream(whole=True)
    outbox.put(stream, Chunk(_samples(0, 10)))
    outbox.put(stream, Chunk(_samples(10, 10)))
    latents = np.ones((8, 64), np.float32)
    outbox.put(stream, Chunk(_samples(20, 10), finish_reason="length", stats=STATS, latents=latents))
    outbox.close()
    (message,) = road.messages
    assert message.audio == _samples(0, 30).tobytes()
    assert message.finish_reason == "length"
    assert message.latents is latents


@pytest.mark.parametrize(
    ("last", "code", "text"),
    [
        (Chunk(NOTHING, error=RequestError("UNAVAILABLE", "full")), "UNAVAILABLE", "full"),
        (Chunk(NOTHING, finish_reason="cancelled"), "CANCELLED", "the client left"),
    ],
)
def test_an_unhappy_end_is_a_failed_message(last, code, text):
    road = Road()
    outbox = Outbox(road.send)
    outbox.put(_stream(5), last)
    outbox.close()
    assert road.messages == [Failed(5, code, text)]


def test_an_encoder_that_breaks_fails_its_stream_only():
    road, gave_up = Road(), threading.Event()
    outbox = Outbox(road.send)
    broken, good = _stream(1, gave_up=gave_up.set), _stream(2)

    def encode(samples):
        raise OSError("no codec")

    broken.encoder.encode = encode
    outbox.put(broken, Chunk(_samples(0, 10)))
    assert gave_up.wait(10)
    outbox.put(broken, Chunk(_samples(10, 10)))
    outbox.put(good, Chunk(_samples(0, 10), finish_reason="stop"))
    outbox.close()
    assert road.messages == [
        Failed(1, "INTERNAL", "encoding the audio failed: no codec"),
        Finished(2, _samples(0, 10).tobytes(), 48000, "stop", {}, seconds=10 / 48000),
    ]


def test_what_nobody_takes_is_bounded(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 100)
    road, gave_up = Road(is_open=False), threading.Event()
    outbox = Outbox(road.send)
    outbox.post(Heartbeat({}))
    assert road.reached.wait(10)
    first, second = _stream(1), _stream(2, gave_up=gave_up.set)
    outbox.put(first, Chunk(_samples(0, 20)))  # 80 bytes
    outbox.put(second, Chunk(_samples(0, 10)))
    assert gave_up.is_set()
    outbox.put(second, Chunk(_samples(0, 1)))  # comes before the engine knows
    road.open.set()
    outbox.put(first, Chunk(NOTHING, finish_reason="stop"))
    outbox.close()
    assert b"".join(m.audio for m in road.messages[1:] if m.id == 1) == _samples(0, 20).tobytes()
    (failed,) = [m for m in road.messages[1:] if m.id == 2]
    assert failed.code == "UNAVAILABLE"
    assert failed.message == "over 0 MiB of audio wait to be sent; this stream was given up"


def test_several_lanes_keep_each_stream_in_order():
    road, lock = Road(), threading.Lock()

    def send(message) -> None:
        with lock:
            road.send(message)

    outbox = Outbox(send, lanes=4)
    streams = [_stream(id, output_format="mp3" if id % 2 else "f32", lane=id % 4) for id in range(12)]
    for start in range(0, 40 * 480, 480):
        for stream in streams:
            outbox.put(stream, Chunk(_samples(start, 480) / 8))
    for stream in streams:
        outbox.put(stream, Chunk(NOTHING, finish_reason="stop"))
    outbox.close()
    for stream in streams:
        mine = [m for m in road.messages if m.id == stream.id]
        assert all(isinstance(m, Audio) for m in mine[:-1]) and isinstance(mine[-1], Finished)
        audio = b"".join(m.audio for m in mine)
        if stream.id % 2:
            alone = OutputEncoder("mp3", 48000, 48000)
            assert audio == alone.encode(_samples(0, 40 * 480) / 8) + alone.finish(NOTHING)
        else:
            assert audio == (_samples(0, 40 * 480) / 8).tobytes()
