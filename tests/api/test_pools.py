"""`from dq_engine import VoxCPM`: what programs written for nano-vllm-voxcpm call, and what they get back."""

import asyncio
import dataclasses
import importlib
import inspect
import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from reference.recordings import write_voice
from triton_server import ROOT

import dq_engine.nano  # noqa: F401  lets nano-vllm-voxcpm be imported without flash-attn
from dq_engine import AsyncVoxCPM2ServerPool, LoRAConfig, SyncVoxCPM2ServerPool, VoxCPM
from dq_engine.errors import CheckpointError
from dq_engine.serving.messages import Audio
from dq_engine.serving.supervisor import WorkerStartError

nano = importlib.import_module("nanovllm_voxcpm")
nano_config = importlib.import_module("nanovllm_voxcpm.models.voxcpm2.config")
nano_server = importlib.import_module("nanovllm_voxcpm.models.voxcpm2.server")

SMALL = str(ROOT / "models" / "small")
SENTENCE = "rachel wants five pretty flowers"
PATCH = 7680


def workers() -> list[int]:
    return [p.pid for p in psutil.Process().children() if "dq_engine.serving.worker" in " ".join(p.cmdline())]


@pytest.fixture(scope="module")
def pool() -> Iterator[SyncVoxCPM2ServerPool]:
    """As in nano-vllm-voxcpm's synchronous example, but for the model and what a CPU needs."""
    pool = VoxCPM.from_pretrained(
        SMALL,
        max_num_batched_tokens=8192,
        max_num_seqs=16,
        max_model_len=4096,
        gpu_memory_utilization=0.95,
        enforce_eager=False,
        devices=[0],
        threads=1,
    )
    assert isinstance(pool, SyncVoxCPM2ServerPool)
    yield pool
    pool.stop()
    assert workers() == []


def parameters(function) -> dict[str, object]:
    """Names and defaults, in their order."""
    return {parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()}


def test_the_parameters_are_those_of_nano():
    """Of the package that is installed: names, order and defaults, but for the two that the README tells of."""
    theirs = parameters(nano.VoxCPM.from_pretrained)
    ours = parameters(VoxCPM.from_pretrained)
    assert list(ours)[:-1] == list(theirs)[:-1]
    assert (ours.pop("max_num_seqs"), theirs.pop("max_num_seqs")) == (None, 512)  # 512 where there is a GPU
    assert (ours.pop("devices"), theirs.pop("devices")) == ((), [])
    assert {name: ours[name] for name in list(theirs)[:-1]} == {name: theirs[name] for name in list(theirs)[:-1]}
    for our_pool, their_pool in (
        (AsyncVoxCPM2ServerPool, nano_server.AsyncVoxCPM2ServerPool),
        (SyncVoxCPM2ServerPool, nano_server.SyncVoxCPM2ServerPool),
    ):
        for name in (name for name in vars(their_pool) if not name.startswith("_")):
            theirs, ours = parameters(getattr(their_pool, name)), parameters(getattr(our_pool, name))
            if name == "generate":
                assert (ours.pop("max_generate_length"), theirs.pop("max_generate_length")) == (None, 2000)
            if name == "encode_latents":
                assert (ours.pop("wav_format"), ours.pop("purpose")) == ("", "prompt")
                del theirs["wav_format"]
            assert ours == theirs, name


def test_room_for_adapters_is_described_as_in_nano():
    assert dataclasses.asdict(LoRAConfig()) == nano_config.LoRAConfig().model_dump()


def test_the_readme_example_without_an_event_loop(pool):
    model_info = pool.get_model_info()
    assert model_info == {
        "sample_rate": 48000,
        "encoder_sample_rate": 16000,
        "output_sample_rate": 48000,
        "channels": 1,
        "feat_dim": 64,
        "patch_size": 4,
        "model_path": SMALL,
    }
    chunks = []
    for chunk in pool.generate(target_text=SENTENCE, cfg_value=1.5, seed=0):
        chunks.append(chunk)
    assert all(chunk.dtype == np.float32 and chunk.shape == (PATCH,) and chunk.flags.writeable for chunk in chunks)
    wav = np.concatenate(chunks, axis=0)
    assert 1.5 <= wav.size / model_info["sample_rate"] <= 5
    assert 0.05 < np.abs(wav).max() < 1


def test_the_readme_example_in_an_event_loop(pool):
    """The streams of one loop run together, each as if it were alone; a worker that dies ends all of them."""
    before = set(workers())

    async def main() -> list[np.ndarray]:
        server = VoxCPM.from_pretrained(
            model=SMALL,
            devices=[0],
            max_num_batched_tokens=8192,
            max_num_seqs=16,
            gpu_memory_utilization=0.95,
            threads=1,
        )
        assert isinstance(server, AsyncVoxCPM2ServerPool)
        await server.wait_for_ready()
        model_info = await server.get_model_info()
        assert int(model_info["sample_rate"]) == 48000

        async def speak(seed: int, text: str = SENTENCE) -> np.ndarray:
            chunks = []
            async for chunk in server.generate(target_text=text, cfg_value=2, seed=seed):
                assert chunk.dtype == np.float32 and chunk.shape == (PATCH,)
                chunks.append(chunk)
            return np.concatenate(chunks, axis=0)

        together = await asyncio.gather(*(speak(seed) for seed in range(3)))
        (worker,) = before.symmetric_difference(workers())
        asked = [asyncio.create_task(speak(seed, " ".join([SENTENCE] * 10))) for seed in range(3)]
        await asyncio.sleep(0.3)
        os.kill(worker, signal.SIGKILL)
        for end in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20):
            assert isinstance(end, RuntimeError) and str(end).startswith("INTERNAL: the engine worker 0 died; ")
        with pytest.raises(RuntimeError, match="^UNAVAILABLE: no engine worker is ready; a restart is under way$"):
            await server.encode_latents(b"any", "wav")
        await server.stop()
        with pytest.raises(RuntimeError, match="^UNAVAILABLE: "):
            await speak(0)
        return together

    for seed, wav in enumerate(asyncio.run(main())):
        alone = np.concatenate(list(pool.generate(SENTENCE, cfg_value=2, seed=seed)))
        np.testing.assert_allclose(wav, alone, atol=1e-3)


def test_a_length_is_a_number_of_chunks(pool):
    chunks = list(pool.generate(SENTENCE, max_generate_length=3, seed=np.int64(0)))
    assert [chunk.shape for chunk in chunks] == [(PATCH,)] * 3


def test_patches_that_a_busy_worker_joined_are_chunks_again(pool):
    joined = np.arange(3 * PATCH, dtype=np.float32)
    chunks = list(pool._pool.chunks(Audio(1, joined.tobytes(), 48000)))
    assert [chunk.shape for chunk in chunks] == [(PATCH,)] * 3
    assert all(chunk.flags.writeable for chunk in chunks)
    np.testing.assert_array_equal(np.concatenate(chunks), joined)


def voice(path, **how) -> bytes:
    return write_voice(path / "voice.wav", **{"seconds": 0.5, "rate": 44_100, "channels": 2, **how}).read_bytes()


def test_a_recording_is_encoded_for_the_one_or_the_other(pool, tmp_path):
    """0.5 s are 3.125 patches: a prompt's first is filled up, a reference's last."""
    encoded = {purpose: pool.encode_latents(voice(tmp_path), "wav", purpose) for purpose in ("prompt", "reference")}
    assert pool.encode_latents(voice(tmp_path), "wav") == encoded["prompt"]
    prompt, reference = (np.frombuffer(encoded[p], np.float32).reshape(-1, 64) for p in ("prompt", "reference"))
    assert prompt.shape == reference.shape == (16, 64)
    assert np.isfinite(prompt).all() and np.isfinite(reference).all()
    assert np.abs(prompt[-4:] - reference[-4:]).max() > 0.1
    with pytest.raises(ValueError, match="^INVALID_ARG: wav: is neither a wav, flac, ogg or mp3 file nor "):
        pool.encode_latents(b"hello", "wav")
    with pytest.raises(ValueError, match='^INVALID_ARG: purpose: must be "reference" or "prompt", got "x"$'):
        pool.encode_latents(voice(tmp_path), "wav", "x")
    with pytest.raises(ValueError, match="^INVALID_ARG: wav: must be an audio file's bytes, got str$"):
        pool.encode_latents("voice.wav", "wav")


def test_a_stored_prompt_is_the_prompt_itself(pool, tmp_path):
    async def store() -> str:
        """The pools share everything but the way to wait."""
        shared = AsyncVoxCPM2ServerPool(pool._pool)
        return await shared.add_prompt(voice(tmp_path), "wav", "peter sells nine green toys")

    prompt_id = asyncio.run(store())
    reference = pool.encode_latents(voice(tmp_path, pitch=220), "wav", "reference")
    given = {"target_text": "rachel wants", "ref_audio_latents": reference, "max_generate_length": 4, "seed": 1}
    stored = list(pool.generate(prompt_id=prompt_id, **given))
    prompt_latents = pool.encode_latents(voice(tmp_path), "wav")
    prompt_text = "peter sells nine green toys"
    direct = list(pool.generate(prompt_latents=prompt_latents, prompt_text=prompt_text, **given))
    without = list(pool.generate(**given))
    np.testing.assert_allclose(np.concatenate(stored), np.concatenate(direct), atol=1e-3)
    assert np.abs(np.concatenate(stored)[:PATCH] - np.concatenate(without)[:PATCH]).max() > 1e-2
    pool.remove_prompt(prompt_id)
    with pytest.raises(ValueError, match="^NOT_FOUND: prompt_id: "):
        list(pool.generate(prompt_id=prompt_id, **given))
    with pytest.raises(KeyError):
        pool.remove_prompt(prompt_id)


def latents(frames: int = 8, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).normal(size=(frames, 64)).astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"target_text": " "}, "INVALID_ARG: target_text: is empty"),
        ({"target_text": 5}, "INVALID_ARG: target_text: expected `str`, got `int`"),
        ({"temperature": "hot"}, "INVALID_ARG: temperature: expected `float`, got `str`"),
        ({"cfg_value": 10.5}, "INVALID_ARG: cfg_value: must be between 0 and 10, got 10.5"),
        ({"seed": 2**70}, "INVALID_ARG: seed: must be between 0 and 2^63 - 1, got 1180591620717411303424"),
        ({"max_generate_length": 0}, "INVALID_ARG: max_generate_length: must be at least 1, got 0"),
        (
            {"max_generate_length": 2000},
            "INVALID_ARG: max_generate_length: 2000 and the prompt's 34 tokens exceed max_model_len (1024)",
        ),
        (
            {"prompt_text": "hello"},
            "INVALID_ARG: prompt_audio: is required with prompt_text: a prompt is a recording and its words",
        ),
        (
            {"prompt_latents": latents()},
            "INVALID_ARG: prompt_text: is required with prompt audio: a prompt is a recording and its words",
        ),
        (
            {"prompt_latents": latents()[:-1], "prompt_text": "hello"},
            "INVALID_ARG: prompt_latents: must hold float32 frames of 64 values, got 2047 bytes",
        ),
        (
            {"ref_audio_latents": latents(6)},
            "INVALID_ARG: ref_audio_latents: must have a multiple of 4 frames and at least one, got 6",
        ),
        ({"ref_audio_latents": [1.0]}, "INVALID_ARG: ref_audio_latents: must be bytes of float32 latents, got list"),
        ({"prompt_id": "x"}, "NOT_FOUND: prompt_id: there is no stored prompt 'x'"),
        (
            {"prompt_id": "x", "prompt_text": "hello"},
            "INVALID_ARG: prompt_id: cannot be combined with prompt_latents or prompt_text",
        ),
        ({"lora_name": "x"}, 'NOT_FOUND: lora_name: there is no registered adapter named "x"'),
        ({"lora_name": "\ud800"}, "INVALID_ARG: lora_name: has the control character U+D800 at position 0"),
    ],
)
def test_a_wrong_call_is_a_value_error(pool, parameters, message):
    with pytest.raises(ValueError) as caught:
        list(pool.generate(**{"target_text": SENTENCE, **parameters}))
    assert str(caught.value) == message


def test_who_stops_listening_frees_the_slot(pool):
    """Before the audio is made that nobody hears any more."""

    def counters() -> dict:
        return pool._pool._supervisor.call("snapshot", {}, None, 20).value

    (worker,), before = workers(), counters()["patches"]
    for _ in range(4):
        stream = pool.generate(" ".join([SENTENCE] * 8))  # some 100 patches
        next(stream)
        stream.close()
    ends = time.monotonic() + 20
    while counters()["active"]:
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert 4 <= counters()["patches"] - before < 100
    assert workers() == [worker]


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        ("/nowhere", {}, CheckpointError, "/nowhere is neither a directory nor a hub id"),
        (str(ROOT), {}, CheckpointError, "config.json"),
        (SMALL, {"speed": 2}, ValueError, "speed: is no setting"),
        (SMALL, {"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization: "),
        (SMALL, {"devices": ["tpu"]}, ValueError, "devices: "),
        (SMALL, {"devices": "0"}, ValueError, "devices: must be a list of devices, got '0'"),
        (SMALL, {"max_num_batched_tokens": 8, "max_num_seqs": 16}, WorkerStartError, "max_num_batched_tokens"),
    ],
)
def test_a_pool_that_cannot_be_says_why(pool, model, settings, error, message):
    before = workers()
    with pytest.raises(error, match=message):
        VoxCPM.from_pretrained(model, **settings)
    assert workers() == before


def test_a_pool_that_is_stopped_while_it_starts():
    async def main() -> None:
        server = VoxCPM.from_pretrained(SMALL, devices=["cpu"])
        waiting = asyncio.create_task(server.wait_for_ready())
        await asyncio.sleep(0.1)
        await server.stop()
        await server.stop()
        with pytest.raises(WorkerStartError, match="stopped before it was ready"):
            await waiting

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 10


def test_a_worker_that_dies_raises_and_is_replaced(pool):
    """The last test of this pool."""
    (worker,) = workers()
    stream = pool.generate(SENTENCE, max_generate_length=400)
    next(stream)
    threading.Timer(0.2, os.kill, (worker, signal.SIGKILL)).start()
    with pytest.raises(RuntimeError, match="^INTERNAL: the engine worker 0 died; its streams are lost$"):
        list(stream)
    with pytest.raises(RuntimeError, match="^UNAVAILABLE: no engine worker is ready; a restart is under way$"):
        list(pool.generate(SENTENCE))
    deadline = time.monotonic() + 60
    while True:
        try:
            assert len(list(pool.generate(SENTENCE, max_generate_length=2))) == 2
            break
        except RuntimeError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert workers() != [worker]
