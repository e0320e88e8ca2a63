"""Messages arrive as they were sent, and nothing else gets through."""

import dataclasses

import msgspec
import numpy as np
import pytest

from dq_engine.request import Request
from dq_engine.serving.messages import (
    Audio,
    Cancel,
    Failed,
    Finished,
    Heartbeat,
    Progress,
    Ready,
    Shutdown,
    StartFailed,
    Submit,
    decode_from_worker,
    decode_to_worker,
    encode,
)

LATENTS = np.random.default_rng(0).standard_normal((12, 64), np.float32)


@pytest.mark.parametrize("message", [Cancel(7), Shutdown()])
def test_to_worker(message):
    assert decode_to_worker(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Progress("weights", 0.5),
        Ready(48000, 16000, 64, 4, 7680),
        StartFailed("no such file"),
        Audio(3, b"\x00\xff", 48000),
        Finished(3, b"", 16000, "stop", {"seed": 2**53 - 1, "ttfb_ms": 1.5}),
        Failed(3, "INTERNAL", "broken"),
        Heartbeat({"active": 2, "closed": None}),
    ],
)
def test_from_worker(message):
    assert decode_from_worker(encode(message)) == message


def test_a_request_arrives_whole():
    request = Request(
        text="你好",
        prompt_text="a",
        prompt_latents=LATENTS,
        reference_audio=b"RIFF\xff\x00",
        cfg_value=1.5,
        seed=2**63 - 1,
        max_generate_length=9,
        return_latents=True,
    )
    got = decode_to_worker(encode(Submit(1, request, "wav", None, False)))
    assert (got.id, got.output_format, got.sample_rate, got.stream) == (1, "wav", None, False)
    assert got.request.prompt_latents.dtype == np.float32
    np.testing.assert_array_equal(got.request.prompt_latents, LATENTS)
    assert dataclasses.replace(got.request, prompt_latents=None) == dataclasses.replace(request, prompt_latents=None)


def test_latents_arrive_whole_from_a_view():
    got = decode_from_worker(encode(Finished(1, b"", 48000, "length", {}, LATENTS[::2].T)))
    np.testing.assert_array_equal(got.latents, LATENTS[::2].T)


def test_numpy_numbers_in_stats_become_plain_ones():
    got = decode_from_worker(encode(Finished(1, b"", 48000, "stop", {"patches": np.int64(4), "s": np.float32(0.5)})))
    assert got.stats == {"patches": 4, "s": 0.5}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Cancel", "id": "seven"}),
        encode(Ready(48000, 16000, 64, 4, 7680)),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode_to_worker(data)


def test_an_object_without_a_message_form_is_refused():
    with pytest.raises(NotImplementedError, match="no message form for object"):
        encode(Heartbeat({"x": object()}))
