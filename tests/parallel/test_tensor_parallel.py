"""One engine over two processes (float32, gloo): the latents of one process, whatever is asked for."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from reference.checkpoints import SHAPES, make_checkpoint
from triton_server import ROOT

from dq_engine import engine
from dq_engine.engine import DqCoreEngine, EngineConfig, Request
from dq_engine.errors import CheckpointError
from dq_engine.serving.messages import Failed
from dq_engine.serving.supervisor import Supervisor

SMALL = ROOT / "models" / "small"
# So few blocks that streams are preempted: 12 of 16 tokens, where the requests below want some 4 each.
SETTINGS = {"device": "cpu", "threads": 1, "max_num_seqs": 4, "num_kvcache_blocks": 12, "max_model_len": 128}


def latents(frames: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(frames, width)).astype(np.float32)


def requests(patch_size: int, width: int) -> list[Request]:
    """Every kind, more than there are slots; two begin alike, so that the second finds blocks of the first."""
    prompt, reference = latents(3 * patch_size, width, 1), latents(18 * patch_size, width, 2)
    fields: list[dict] = [
        {"text": "oh no"},
        {"text": "so it is", "prompt_text": "well", "prompt_latents": prompt},
        {"text": "one", "reference_latents": reference},
        {"text": "two", "reference_latents": reference, "cfg_value": 1.0, "temperature": 0.5},
        {"text": "a", "control": "low"},
        {"text": "both", "reference_latents": reference, "prompt_text": "b", "prompt_latents": prompt},
        {"text": "a voice", "voice": "stored"},
        {"text": "the same", "voice": "stored"},
    ]
    lengths = {"min_generate_length": 24, "max_generate_length": 30}
    return [Request(seed=n, return_latents=True, **lengths, **field) for n, field in enumerate(fields)]


def speak(model: Path, size: int) -> tuple[list[np.ndarray], dict]:
    """The latents of all requests, and the engine's counters."""
    config = {"model": str(model), "realtime": False, "tensor_parallel_size": size, **SETTINGS}
    with tempfile.TemporaryDirectory() as folder, DqCoreEngine(EngineConfig(voices_dir=folder, **config)) as engine:
        prompt = latents(5 * engine.patch_size, engine.feat_dim, 3)
        engine.voices.register("stored", prompt_latents=prompt, prompt_text="of old")
        streams = [engine.submit(request) for request in requests(engine.patch_size, engine.feat_dim)]
        return [list(stream)[-1].latents for stream in streams], engine.snapshot()


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / SHAPES[0].name, SHAPES[0])


@pytest.fixture(params=[pytest.param("small", marks=pytest.mark.slow), "random"])
def model(request, random_checkpoint) -> Path:
    return SMALL if request.param == "small" else random_checkpoint


def test_two_processes_give_what_one_gives(model, tmp_path):
    """In a process of its own: torch.distributed is a process's, not an engine's."""
    code = f"""
        import pickle, sys
        sys.path[:0] = {[str(ROOT / "tests"), str(ROOT / "tools"), str(Path(__file__).parent)]!r}
        from pathlib import Path
        import test_tensor_parallel as test
        pickle.dump(test.speak(Path({str(model)!r}), 2), open({str(tmp_path / "spoken")!r}, "wb"))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ours, counters = pickle.loads((tmp_path / "spoken").read_bytes())
    threads = torch.get_num_threads()
    theirs, expected = speak(model, 1)
    torch.set_num_threads(threads)
    for one, other in zip(ours, theirs, strict=True):
        # The trained model carries rounding on (4e-4 seen, with other companions in the batch).
        np.testing.assert_allclose(one, other, atol=1e-3 if model == SMALL else 1e-4)
    assert counters["preemptions"] > 0 and counters["cached_tokens"] >= 16
    assert counters["patches"] == expected["patches"]


@pytest.mark.parametrize(
    ("size", "message"),
    [(3, r"tensor_parallel_size \(3\) does not divide the checkpoint's KV heads \(2\)"), (4, r"KV heads \(2\)")],
)
def test_a_number_that_does_not_divide_the_heads_is_refused(random_checkpoint, size, message):
    with pytest.raises(CheckpointError, match=message):
        DqCoreEngine(EngineConfig(model=str(random_checkpoint), device="cpu", tensor_parallel_size=size)).start()
    assert not _followers()


def test_adapters_are_refused(random_checkpoint):
    settings = {"lora_max_loras": 1, "lora_dir": str(random_checkpoint), "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match="^tensor_parallel_size: adapters need an engine of one GPU"):
        DqCoreEngine(EngineConfig(model=str(random_checkpoint), device="cpu", **settings)).start()


def test_a_start_that_fails_leaves_no_process_behind(random_checkpoint, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the folder is gone")

    monkeypatch.setattr(engine, "VoiceStore", fail)
    config = {"model": str(random_checkpoint), "tensor_parallel_size": 2, "voices_dir": str(tmp_path), **SETTINGS}
    with pytest.raises(OSError, match="^the folder is gone"):
        DqCoreEngine(EngineConfig(**config)).start()
    assert not _followers()


def _followers() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [p for p in below if p.status() != psutil.STATUS_ZOMBIE and "dq_engine.parallel.follower" in p.cmdline()]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_process_that_dies_takes_its_engine_with_it_and_both_are_replaced(who):
    config = EngineConfig(model=str(SMALL), tensor_parallel_size=2, **SETTINGS | {"num_kvcache_blocks": 0})
    supervisor = Supervisor([config])
    supervisor.start()
    try:
        (follower,), leader = _followers(), supervisor._slots[0].worker.process.pid
        messages: list = []
        request = Request(text="go", min_generate_length=90, max_generate_length=90)
        supervisor.submit(request, "f32", None, True, messages.append)
        _wait_until(lambda: messages, "audio")
        os.kill(follower.pid if who == "follower" else leader, signal.SIGKILL)
        _wait_until(lambda: isinstance(messages[-1], Failed), "the end of the stream")
        assert messages[-1].code == "INTERNAL"
        _wait_until(lambda: not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE, "its end")
        _wait_until(lambda: not psutil.pid_exists(leader) and supervisor.ready_workers == [0], "a new worker")
        assert len(_followers()) == 1
    finally:
        supervisor.stop()
    _wait_until(lambda: not _followers(), "the end of all")


def _wait_until(condition, what: str) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.02)
