"""With an adapter the engine gives what the official model gives with it: alone, and beside others in one batch."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from reference.adapters import (
    ATTENTION,
    BETWEEN,
    MLP,
    AdapterShape,
    adapter_sizes,
    load_official,
    random_weights,
    write_adapter,
)
from reference.checkpoints import SHAPES
from reference.listening import assert_close, hear

from dq_engine.engine import Request

SHAPE = SHAPES[0]
LATENTS, AUDIO = 1e-4, 1e-3
ALL = {"lora_target_modules_lm": ",".join(ATTENTION + MLP), "lora_target_modules_dit": ",".join(ATTENTION + MLP)}
# Of different ranks, targets and scalings; the third has q and v only, the last nothing but projections.
ADAPTERS = {
    "everything": AdapterShape(seed=1, rank=8, lm=ATTENTION + MLP, dit=ATTENTION + MLP),
    "attention": AdapterShape(seed=2, rank=20, alpha=10),
    "some": AdapterShape(seed=3, rank=3, alpha=5, lm=("q_proj", "v_proj", "up_proj"), dit=("v_proj",), between=()),
    "projections": AdapterShape(seed=4, rank=1, alpha=1, lm=(), dit=(), between=BETWEEN),
}


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory) -> Path:
    """The adapters of ADAPTERS for the checkpoint of SHAPE."""
    folder = tmp_path_factory.mktemp("adapters")
    for index, (name, shape) in enumerate(ADAPTERS.items()):
        weights = random_weights(adapter_sizes(checkpoint(SHAPE)[0], shape), shape)
        write_adapter(folder / name, weights, shape, "ckpt" if index % 2 else "safetensors")
    return folder


@pytest.fixture(scope="module")
def case(open_case, folder):
    case = open_case(SHAPE, realtime=False, lora_max_loras=4, lora_max_rank=20, lora_dir=str(folder), **ALL)
    for name in ADAPTERS:
        case.engine.register_lora(name, folder / name)
    return case


@pytest.fixture(scope="module")
def spoken(case, folder, reference_wav, prompt_wav) -> dict:
    """What the official model makes of one request with each adapter, and with none: fields and outcome by name."""
    fields = {
        "everything": {"text": "oh no", "reference": reference_wav},
        "attention": {"text": "a longer text, to be cut"},
        "some": {"text": "yes", "prompt": ("well", prompt_wav)},
        "projections": {"text": "no", "reference": reference_wav},
        None: {"text": "oh no", "reference": reference_wav},
    }
    outcomes = {}
    for name, given in fields.items():
        official = case.official if name is None else load_official(case.path, ADAPTERS[name], folder / name)
        given = {**given, "min_length": 10, "max_length": 13}
        seed, theirs = official.speak_clearly(given.pop("text"), seeds=range(20), **given)
        outcomes[name] = seed, theirs, fields[name]
    return outcomes


def request_for(name: str | None, seed: int, fields: dict) -> Request:
    ours = {"text": fields["text"]}
    if "reference" in fields:
        ours["reference_audio"] = fields["reference"].read_bytes()
    if "prompt" in fields:
        ours |= {"prompt_text": fields["prompt"][0], "prompt_audio": fields["prompt"][1].read_bytes()}
    lengths = {"min_generate_length": 10, "max_generate_length": 13, "return_latents": True}
    return Request(lora=name, seed=seed, **lengths, **ours)


def assert_equal(ours, theirs, official) -> None:
    assert_close(ours.latents, theirs.latents, LATENTS, official.patch_size, "latents")
    assert ours.finish_reason == theirs.finish_reason
    assert_close(ours.audio, theirs.audio, AUDIO, official.patch_samples, "audio")


@pytest.mark.parametrize("name", ADAPTERS)
def test_alone(case, spoken, name):
    seed, theirs, fields = spoken[name]
    assert_equal(hear(case.engine.submit(request_for(name, seed, fields))), theirs, case.official)
    base = hear(case.engine.submit(request_for(None, seed, fields)))
    both = min(len(base.latents), len(theirs.latents))
    assert np.abs(base.latents[:both] - theirs.latents[:both]).max() > 0.1, "the adapter changes nothing"


@pytest.mark.parametrize("stagger", [0, 2], ids=["at once", "staggered"])
def test_four_adapters_and_none_in_one_batch(case, spoken, stagger, monkeypatch):
    """All at once, or each `stagger` steps after the one before."""
    streams, steps, most = {}, 0, 0
    turn = threading.Condition()
    run = case.engine._loop._runner.run

    def in_turn(step):
        nonlocal steps, most
        with turn:
            due = min(steps // stagger, len(spoken) - 1) if stagger else len(spoken) - 1
            assert turn.wait_for(lambda: len(streams) > due, 60)
            while not stagger and case.engine.snapshot()["recordings_waiting"]:
                time.sleep(0.001)
            steps, most = steps + 1, max(most, len(step.sampled))
            turn.notify()
        return run(step)

    monkeypatch.setattr(case.engine._loop._runner, "run", in_turn)
    for index, (name, (seed, _, fields)) in enumerate(spoken.items()):
        with turn:
            assert turn.wait_for(lambda due=index * stagger: steps >= due, 60)
        stream = case.engine.submit(request_for(name, seed, fields))
        with turn:
            streams[name] = stream
            turn.notify()
    heard = {name: hear(stream) for name, stream in streams.items()}
    assert most == len(spoken) if not stagger else most >= 2, "they did not overlap"
    for name, ours in heard.items():
        assert_equal(ours, spoken[name][1], case.official)


def test_prompts_in_pieces(open_case, folder, spoken):
    """Chunked prefill, and slots that adapters of different sizes have one after the other."""
    settings = {"realtime": False, "max_prefill_tokens": 7, "max_prefill_seqs": 2, "lora_max_rank": 20, **ALL}
    case = open_case(SHAPE, lora_max_loras=2, lora_dir=str(folder), **settings)
    for name in ADAPTERS:
        case.engine.register_lora(name, name)
    streams = {n: case.engine.submit(request_for(n, seed, fields)) for n, (seed, _, fields) in spoken.items()}
    for name, stream in streams.items():
        assert_equal(hear(stream), spoken[name][1], case.official)
    assert case.engine.snapshot()["lora_evictions"] > 0
