"""Recordings that come in, the longest ones, keep nobody else waiting: counted in steps and patches, not in seconds."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from triton_server import ROOT

from dq_engine.engine import DqCoreEngine, EngineConfig, Request

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from audio_files import file_of, speech_like

SPEECH = speech_like(5.0, 16_000)
PATCHES = 6


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(model=str(ROOT / "models" / "small"), device="cpu", threads=1, max_num_seqs=8)
    with DqCoreEngine(config) as engine:
        yield engine


def counted(engine: DqCoreEngine) -> tuple[int, int]:
    """Speak a short request; the engine's steps until its first chunk was handed over, and until its end.

    The first may be one too many: the engine goes on while a chunk is handed over.
    """
    before, first, ended = engine.snapshot()["steps"], [], threading.Event()

    def on_chunk(chunk) -> None:
        first.append(engine.snapshot()["steps"] - before)
        if chunk.is_last:
            ended.set()

    engine.submit(Request(text="hello", seed=1, min_generate_length=PATCHES, max_generate_length=PATCHES), on_chunk)
    assert ended.wait(60)
    assert len(first) == PATCHES
    return first[0], engine.snapshot()["steps"] - before


def with_recording(engine: DqCoreEngine, seconds: int, on_chunk) -> None:
    mp3 = file_of(np.tile(SPEECH, seconds // 5), 16_000, "MP3")
    engine.submit(Request(text="hello", reference_audio=mp3, max_generate_length=1), on_chunk)


@pytest.mark.parametrize(("count", "seconds"), [(1, 20), pytest.param(4, 60, marks=pytest.mark.slow)])
def test_mp3_files_come_in(engine, count, seconds):
    """As long as they are being read and encoded, others get their first audio after one step, and every patch after
    one step more, as they do alone."""
    assert counted(engine)[1] == PATCHES
    spoken, answered = [], threading.Semaphore(0)

    def on_chunk(chunk) -> None:
        spoken.append(chunk)
        if chunk.is_last:
            answered.release()

    for _ in range(count):
        with_recording(engine, seconds, on_chunk)
    beside = []
    while not spoken:  # none of them has got anything yet: they are in the encode stage
        beside.append(counted(engine))
    assert len(beside) > 3, "the recordings are long enough to be told from"
    # The last one may have met the prompts of those whose recordings were ready.
    assert all(first <= 2 and steps == PATCHES for first, steps in beside[:-1]), beside
    for _ in range(count):
        assert answered.acquire(timeout=120)
    assert all(chunk.error is None for chunk in spoken)


def test_a_recording_that_takes_for_ever_keeps_nobody_waiting(engine, monkeypatch):
    release = threading.Event()
    encoder, spoken, done = engine._encode.encoder, [], threading.Event()
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda *args: (release.wait(60), encode(*args))[1])
    with_recording(engine, 5, lambda chunk: (spoken.append(chunk), done.set() if chunk.is_last else None))
    for _ in range(3):
        assert counted(engine)[1] == PATCHES
    assert engine.snapshot()["queued"] == 1
    assert spoken == []
    release.set()
    assert done.wait(60)
    assert spoken[-1].finish_reason == "length"
