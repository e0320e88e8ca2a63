"""The small model through the engine and the real server: right words, right voice, in time; under load the same."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from quality import failures, figures, measure_rows, speak_all
from speaking import EngineSpeaking, Spoken, TritonSpeaking
from triton_server import ROOT
from utterances import make_utterances

from dq_engine.engine import DqCoreEngine, EngineConfig, Request
from dq_engine.runner import Runner
from dq_engine.vae.decoder import StreamingDecoder
from dq_engine.vae.stage import VaeStage

SMALL = ROOT / "models" / "small"
FEW = make_utterances(6, seed=3)


def speak_together(engine: DqCoreEngine, streams: int) -> list[Spoken]:
    return asyncio.run(speak_all(EngineSpeaking(engine), FEW, streams))


@pytest.fixture(scope="module")
def alone() -> list[Spoken]:
    with DqCoreEngine(EngineConfig(model=str(SMALL), device="cpu", threads=1)) as engine:
        return speak_together(engine, 1)


def test_no_stream_begins_with_a_click(alone):
    for spoken in alone:
        assert np.abs(spoken.samples[: spoken.sample_rate // 100]).max() < 0.02


def rows(judge, alone: list[Spoken], together: list[Spoken]) -> list[dict]:
    """Of FEW, alone and together."""
    return [
        {"streams": streams, **figures(judge, FEW, spoken, alone)}
        for streams, spoken in ((1, alone), (len(FEW), together))
    ]


def test_the_server_says_the_right_words_alone_and_under_load(judge, server):
    async def measure() -> list[dict]:
        speaking = TritonSpeaking(server.grpc_url)
        try:
            return await measure_rows(speaking, judge, make_utterances(8, seed=1), [1, 8])
        finally:
            await speaking.close()

    measured = asyncio.run(measure())
    assert failures(measured, same_audio=True) == []
    for row in measured:
        assert row["long_pauses"] == row["cut_off"] == row["runaway"] == row["clipped"] == 0
        assert row["cached_tokens"] > 0 or row["streams"] == 1, "prefix hits under load"


SETTINGS = {"device": "cpu", "threads": 1, "realtime": False, "max_num_seqs": 3, "num_kvcache_blocks": 12}
"""Too few slots and blocks for all at once."""


def test_a_healthy_engine_passes_with_cancellations_and_preemptions(judge, alone):
    with DqCoreEngine(EngineConfig(model=str(SMALL), **SETTINGS)) as engine:
        for _ in range(3):  # they take ever more blocks, and the youngest streams lose theirs
            engine.submit(Request(text="a", min_generate_length=70, max_generate_length=70), lambda chunk: None)
        together = speak_together(engine, len(FEW))
        counters = engine.snapshot()
    assert failures(rows(judge, alone, together), same_audio=True) == []
    assert counters["preemptions"] > 0


def return_a_reused_buffer(monkeypatch) -> None:
    buffer = torch.zeros(SETTINGS["max_num_seqs"], 7680)
    decode = VaeStage.decode

    def faulty(self, slots, latents):
        decoded = decode(self, slots, latents)
        buffer[: len(slots)] = decoded.audio
        return dataclasses.replace(decoded, audio=buffer[: len(slots)])

    monkeypatch.setattr(VaeStage, "decode", faulty)


def shift_the_stop_flags_by_one(monkeypatch) -> None:
    run = Runner.run

    def faulty(self, step):
        output = run(self, step)
        return output and dataclasses.replace(output, stop_host=output.stop_host.roll(1))

    monkeypatch.setattr(Runner, "run", faulty)


def keep_the_vae_state_of_the_stream_before(monkeypatch) -> None:
    monkeypatch.setattr(StreamingDecoder, "reset", lambda self, slots: None)


@pytest.mark.parametrize(
    ("inject", "found"),
    [
        (return_a_reused_buffer, ["words_right", "same_audio"]),
        (shift_the_stop_flags_by_one, ["stopped_in_time", "same_audio"]),
        (keep_the_vae_state_of_the_stream_before, ["same_audio"]),
    ],
)
def test_a_broken_engine_fails(judge, alone, monkeypatch, inject, found):
    inject(monkeypatch)
    with DqCoreEngine(EngineConfig(model=str(SMALL), **SETTINGS)) as engine:
        together = speak_together(engine, len(FEW))
    said = failures(rows(judge, alone, together), same_audio=True)
    assert all(any(name in line for line in said) for name in found), said
    assert not [line for line in said if line.startswith("1 streams")]
