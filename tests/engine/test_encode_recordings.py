"""Recordings encoded once: the latents are those that a request's own recording becomes."""

import threading

import numpy as np
import pytest
from reference.checkpoints import SHAPES

from dq_engine.audio.encode_stage import Recording
from dq_engine.engine import DqCoreEngine, EngineConfig, Request


@pytest.fixture(scope="module")
def engine(open_case) -> DqCoreEngine:
    return open_case(SHAPES[0]).engine


def latents(engine: DqCoreEngine, **fields) -> np.ndarray:
    request = Request(text="hello", seed=1, max_generate_length=3, return_latents=True, **fields)
    return list(engine.submit(request))[-1].latents


def test_encoded_recordings_are_what_the_audio_is(engine, reference_wav, prompt_wav):
    reference, prompt = reference_wav.read_bytes(), prompt_wav.read_bytes()
    as_reference, seconds = engine.encode(reference, "reference")
    assert seconds == pytest.approx(0.33, abs=1e-3)
    given = latents(engine, reference_latents=as_reference)
    np.testing.assert_allclose(given, latents(engine, reference_audio=reference), atol=1e-5)
    as_prompt, seconds = engine.encode(prompt, "prompt")
    assert seconds == pytest.approx(0.217, abs=1e-3)
    fields = {"prompt_text": "a word"}
    given = latents(engine, prompt_latents=as_prompt, **fields)
    np.testing.assert_allclose(given, latents(engine, prompt_audio=prompt, **fields), atol=1e-5)
    other, _ = engine.encode(prompt, "reference")
    assert other.shape == as_prompt.shape
    assert not np.allclose(other, as_prompt, atol=1e-3)  # padded at the other end


@pytest.mark.parametrize(
    ("audio", "purpose", "message"),
    [
        (b"", "prompt", "INVALID_ARG: audio: is empty"),
        (b"RIFF", "prompt", "INVALID_ARG: audio: is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (b"x", "voice", 'INVALID_ARG: purpose: must be "reference" or "prompt", got "voice"'),
    ],
)
def test_what_cannot_be_encoded(engine, audio, purpose, message):
    with pytest.raises(Exception) as error:
        engine.encode(audio, purpose)
    assert str(error.value) == message


def test_recordings_of_many_callers_share_batches(engine, reference_wav, monkeypatch):
    encoder, batches, entered, release = engine._encode.encoder, [], threading.Event(), threading.Event()
    encode = type(encoder).encode

    def observed(waves, pad_left):
        batches.append(len(waves))
        entered.set()
        assert release.wait(20)
        return encode(encoder, waves, pad_left)

    monkeypatch.setattr(encoder, "encode", observed)
    data, results, before = reference_wav.read_bytes(), [], engine.snapshot()["recordings"]
    threads = [
        threading.Thread(target=lambda: results.append(engine.encode(data, "reference")[0].tobytes())) for _ in range(9)
    ]
    threads[0].start()
    assert entered.wait(20)
    for thread in threads[1:]:
        thread.start()
    while engine._encode._jobs.qsize() < 8:
        assert threads[-1].is_alive()
    release.set()
    for thread in threads:
        thread.join(20)
    assert batches == [1, 8]
    assert len(results) == 9
    while engine.snapshot()["recordings_waiting"]:
        assert engine._encode._thread.is_alive()
    assert engine.snapshot()["recordings"] - before == 9


def test_trouble_of_one_request_leaves_the_stage_alive(engine, reference_wav, monkeypatch):
    def broken(*arguments):
        raise MemoryError("no room")

    data = reference_wav.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(engine._prompts, "build", broken)
        with pytest.raises(Exception, match="^INTERNAL: the request could not be built: no room$"):
            list(engine.submit(Request(text="hello", reference_audio=data)))
        engine._encode.submit([Recording(data, "audio", False)], broken)
    assert engine.encode(data, "reference")[1] > 0
    assert engine.snapshot()["queued"] == 0


def test_who_waits_when_the_engine_stops_is_told(checkpoint, reference_wav, monkeypatch):
    engine = DqCoreEngine(EngineConfig(model=str(checkpoint(SHAPES[0])[0]), device="cpu", threads=1)).start()
    entered, release, errors = threading.Event(), threading.Event(), []
    encoder = engine._encode.encoder
    encode = encoder.encode

    def slow(*arguments):
        entered.set()
        assert release.wait(20)
        return encode(*arguments)

    monkeypatch.setattr(encoder, "encode", slow)

    def call() -> None:
        try:
            engine.encode(reference_wav.read_bytes(), "prompt")
        except Exception as error:
            errors.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(3)]
    threads[0].start()
    assert entered.wait(20)
    for thread in threads[1:]:
        thread.start()
    while engine._encode._jobs.qsize() < 2:
        assert threads[-1].is_alive()
    stream = engine.submit(Request(text="hello", reference_audio=reference_wav.read_bytes()))
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    while engine._encode._stopped is None:
        assert stopping.is_alive()
    release.set()
    for thread in [*threads, stopping]:
        thread.join(20)
        assert not thread.is_alive()
    assert errors == ["UNAVAILABLE: the engine was stopped"] * 2
    with pytest.raises(Exception, match="^UNAVAILABLE: the engine was stopped"):
        list(stream)
    with pytest.raises(Exception, match="^UNAVAILABLE: the engine was stopped"):
        engine.encode(reference_wav.read_bytes(), "prompt")
