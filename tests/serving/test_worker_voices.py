"""A worker whose folder of voices answers no more: who asks for a voice waits, and nobody else."""

import signal
import threading
from types import SimpleNamespace

import pytest
import zmq
from collector import wait_until

from dq_engine.errors import RequestError
from dq_engine.request import Request
from dq_engine.serving.messages import Cancel, Failed, Heartbeat, Shutdown, Submit, encode
from dq_engine.serving.worker import VOICE_READERS, Worker


class Engine:
    """Looks for voices only when it is told to; there is one, `ann`."""

    sample_rate = 48_000

    def __init__(self) -> None:
        self.look, self.submitted, self.cancelled = threading.Event(), [], []

    def snapshot(self) -> dict:
        return {}

    def submit(self, request: Request, on_chunk) -> SimpleNamespace:
        if request.voice is not None:
            assert self.look.wait(20)
            if request.voice != "ann":
                raise RequestError("NOT_FOUND", "voice: nobody")
        self.submitted.append(request.text)
        return SimpleNamespace(cancel=lambda: self.cancelled.append(request.text))


@pytest.fixture
def served(monkeypatch):
    """A worker's engine, what it posted, and a way to send to it; it runs on a thread."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # for the main thread only
    engine, posted, context = Engine(), [], zmq.Context()
    ours, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    inbox.bind("inproc://inbox")
    ours.connect("inproc://inbox")
    outbox = SimpleNamespace(post=posted.append)
    thread = threading.Thread(target=Worker(engine, outbox, []).run, args=(inbox,))
    thread.start()
    yield engine, posted, lambda message: ours.send(encode(message))
    engine.look.set()
    ours.send(encode(Shutdown()))
    thread.join(20)
    assert not thread.is_alive()
    for socket in ours, inbox:
        socket.close(0)
    context.term()


def submit(id: int, text: str, voice: str | None = None) -> Submit:
    return Submit(id, Request(text=text, voice=voice), "f32", None, True)


def test_who_wants_no_voice_does_not_wait_for_those_who_do(served):
    engine, posted, send = served
    for number in range(2 * VOICE_READERS):
        send(submit(number, f"with a voice {number}", "ann"))
    send(submit(100, "unknown", "bob"))
    send(submit(101, "without"))
    wait_until(lambda: engine.submitted == ["without"], 10, "the one without")
    beats = sum(isinstance(message, Heartbeat) for message in posted)
    wait_until(lambda: sum(isinstance(message, Heartbeat) for message in posted) > beats, 10, "a heartbeat")
    send(Cancel(3))
    send(Cancel(2 * VOICE_READERS - 1))  # its voice is not being looked for yet
    send(submit(102, "the second"))
    wait_until(lambda: engine.submitted == ["without", "the second"], 10, "the second")
    engine.look.set()
    wait_until(lambda: len(engine.submitted) == 2 + 2 * VOICE_READERS, 10, "all")
    wait_until(lambda: Failed(100, "NOT_FOUND", "voice: nobody") in posted, 10, "its refusal")
    assert sorted(engine.cancelled) == ["with a voice 3", f"with a voice {2 * VOICE_READERS - 1}"]
    send(Cancel(0))
    wait_until(lambda: "with a voice 0" in engine.cancelled, 10, "a cancellation after that")
