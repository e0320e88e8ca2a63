"""A VoxCPM 1.5 behind a real server: its rate, its voice from a prompt, what it does not know."""

import json

import numpy as np
import pytest
from reference.checkpoints import FIRST_GENERATION, make_checkpoint
from reference.recordings import write_voice
from talk import Talk, samples, speak
from triton_server import TritonServer

from dq_engine.engine import DqCoreEngine, EngineConfig, Request

pytestmark = pytest.mark.slow

FIELDS = {"text": "oh no", "seed": 3, "min_generate_length": 6, "max_generate_length": 6}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    (shape,) = (shape for shape in FIRST_GENERATION if shape.name == "voxcpm-1.5")
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / shape.name, shape)


@pytest.fixture(scope="module")
def server(checkpoint):
    with TritonServer(model=checkpoint) as server:
        yield server


def test_the_server_says_what_the_engine_says(server, checkpoint, tmp_path):
    """The engine is compared with the official package in tests/engine."""
    voice = write_voice(tmp_path / "voice.wav", seconds=0.3, rate=44_100, channels=1, pitch=120, seed=3).read_bytes()
    with DqCoreEngine(EngineConfig(model=str(checkpoint), device="cpu", threads=1)) as engine:
        for prompt in {}, {"prompt_text": "well", "prompt_audio": voice}:
            responses = speak(server, FIELDS | prompt)
            assert {int(response.as_numpy("sample_rate")[0]) for response in responses} == {44_100}
            stats = json.loads(responses[-1].as_numpy("stats")[0])
            ours = np.concatenate([chunk.samples for chunk in engine.submit(Request(**FIELDS, **prompt))])
            assert ours.size == stats["patches"] * engine.patch_samples and np.abs(ours).max() > 0.01
            np.testing.assert_allclose(samples(responses), ours, atol=1e-4)


def test_what_it_does_not_know_is_refused(server):
    with Talk(server, FIELDS | {"control": "low"}) as talk:
        assert talk.error().startswith("INVALID_ARG: control: is for VoxCPM2; this model, a VoxCPM 0.5B or 1.5, ")
