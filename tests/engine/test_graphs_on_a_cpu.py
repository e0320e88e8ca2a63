"""Everything about CUDA graphs but CUDA: buckets, padding, scratch slots and fixed inputs, with graphs that run anew.

A graph here remembers its function and its arguments, and a replay runs it and writes into the same outputs.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from reference.adapters import AdapterShape, adapter_sizes, random_weights, write_adapter
from reference.checkpoints import SHAPES
from reference.listening import Heard, hear

from dq_engine import engine as engine_module
from dq_engine import graphs, prefill_graphs
from dq_engine.attention.sdpa import SdpaBackend
from dq_engine.engine import DqCoreEngine, EngineConfig, Request
from dq_engine.engine_graphs import Graphs

SHAPE = SHAPES[0]
SETTINGS = {"max_num_seqs": 6, "realtime": False, "prefill_buckets": "1:32,3:64,6:200"}


class StandIn:
    """A graph."""

    def __init__(self, function, arguments: list[torch.Tensor], outputs: tuple[torch.Tensor, ...]) -> None:
        self._function, self._arguments, self._outputs = function, arguments, outputs

    def pool(self) -> None:
        """Memory is not shared."""

    def replay(self) -> None:
        for output, now in zip(self._outputs, self._function(*self._arguments), strict=True):
            output.copy_(now)


def capture(function, arguments, pool, side=None) -> tuple[StandIn, tuple[torch.Tensor, ...]]:
    outputs = tuple(output.clone() for output in function(*arguments))
    return StandIn(function, arguments, outputs), outputs


def paged(self, q, k_cache, v_cache, metadata, scale):
    """Of prompts in a graph: what the host must not know is read off the device."""
    if metadata.query_starts is None or metadata.lengths is not None:
        return sdpa_paged(self, q, k_cache, v_cache, metadata, scale)
    lengths = metadata.query_starts.diff().tolist()
    metadata.lengths = [(n, all_) for n, all_ in zip(lengths, metadata.context_lens.tolist(), strict=True) if n]
    made = q.new_zeros(q.shape)
    if total := sum(lengths):
        made[:total] = sdpa_paged(self, q[:total], k_cache, v_cache, metadata, scale)
    metadata.lengths = None
    return made


sdpa_paged = SdpaBackend.paged


@pytest.fixture(scope="module")
def with_graphs() -> Iterator[list[tuple[str, float]]]:
    """What is told of an engine's progress."""
    load, told = engine_module.load, []

    def load_and_capture(config, path, _, *rest):
        def progress(stage: str, fraction: float) -> None:
            told.append((stage, fraction))

        parts = load(config, path, progress, *rest)
        Graphs(parts.runner, parts.vae, config, parts.limits.max_num_seqs).capture(progress)
        return parts

    with pytest.MonkeyPatch.context() as patch:
        for module in (graphs, prefill_graphs):
            patch.setattr(module, "capture", capture)
            patch.setattr(module, "replay_seconds", lambda graph: 1e-3)
        patch.setattr(SdpaBackend, "graphs_prefill", True)
        patch.setattr(SdpaBackend, "paged", paged)
        patch.setattr(engine_module, "load", load_and_capture)
        yield told


REFERENCE = np.random.default_rng(0).standard_normal((40, SHAPE.feat_dim)).astype(np.float32)
PROMPT = np.random.default_rng(1).standard_normal((24, SHAPE.feat_dim)).astype(np.float32)
KINDS = [
    {"text": "oh no"},
    {"text": "a longer text, with a description", "control": "low", "cfg_value": 1.5},
    {"text": "why", "reference_latents": REFERENCE, "temperature": 0.7},
    {"text": "no", "voice": "ann"},
    {"text": "so", "voice": "ann", "reference_latents": REFERENCE[:8]},
    {"text": "long " * 60},
    {"text": "at last", "voice": "ann"},
]


ADAPTED = [{"text": "oh no", "lora": "x"}, {"text": "oh no", "lora": "y"}, {"text": "so", "voice": "ann", "lora": "x"}]


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory) -> Path:
    """A folder with two."""
    folder, shape = tmp_path_factory.mktemp("adapters"), AdapterShape(seed=0, rank=4)
    sizes = adapter_sizes(checkpoint(SHAPE)[0], shape)
    for seed, name in enumerate("xy"):
        write_adapter(folder / name, random_weights(sizes, AdapterShape(seed=seed, rank=4)), shape)
    return folder


def speak(model: Path, folder: Path, kinds: list[dict], **settings) -> tuple[list[Heard], list[Heard], dict]:
    """The requests one after the other and all at once, and the engine's counters."""
    requests = [
        Request(seed=n, min_generate_length=9 + n, max_generate_length=9 + n, return_latents=True, **fields)
        for n, fields in enumerate(KINDS + ADAPTED)
        if fields in kinds
    ]
    config = EngineConfig(model=str(model), device="cpu", threads=1, voices_dir=str(folder), **{**SETTINGS, **settings})
    with DqCoreEngine(config) as engine:
        engine.voices.register("ann", prompt_latents=PROMPT, prompt_text="well")
        for name in "xy" if engine.config.lora_max_loras else "":
            engine.register_lora(name, name)
        alone = [hear(engine.submit(request)) for request in requests]
        streams = [engine.submit(request) for request in requests]
        return alone, [hear(stream) for stream in streams], engine.snapshot()


def assert_same(ours: list[Heard], expected: list[Heard]) -> None:
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one.latents, other.latents, atol=1e-4)
        np.testing.assert_allclose(one.audio, other.audio, atol=1e-4)


@pytest.fixture(scope="module")
def eager(checkpoint, adapters, tmp_path_factory) -> list[Heard]:
    """What each request makes without graphs, those with adapters last."""
    voices, model = tmp_path_factory.mktemp("voices"), checkpoint(SHAPE)[0]
    return speak(model, voices, KINDS + ADAPTED, lora_max_loras=2, lora_dir=str(adapters))[0]


def test_with_graphs_it_says_the_same(checkpoint, eager, with_graphs, tmp_path):
    with_graphs.clear()
    alone, together, counters = speak(checkpoint(SHAPE)[0], tmp_path, KINDS)
    stages = {stage: [done for name, done in with_graphs if name == stage] for stage, _ in with_graphs}
    assert list(stages) == [f"loading the {part}" for part in ("tokenizer", "weights", "AudioVAE")] + [
        f"capturing {kind} graphs" for kind in ("decode", "language model", "LocDiT", "prefill", "VAE")
    ]
    for stage, done in stages.items():
        assert done == sorted(done) and done[0] == 0 and (done[-1] == 1 or stage == "loading the tokenizer"), stage
    assert_same(alone + together, 2 * eager[: len(KINDS)])
    assert counters["decode_graph_hits"] > 50 and counters["prefill_graph_hits"] > 8
    assert counters["prefill_graph_fallbacks"] > 0, "no bucket holds the longest"
    assert counters["prefill_padding_tokens"] > 0


@pytest.mark.parametrize("prefill", [False, True])
def test_with_adapters_too(checkpoint, eager, adapters, with_graphs, tmp_path, prefill):
    settings = {"lora_max_loras": 2, "lora_dir": str(adapters), "prefill_graph_lora": prefill}
    alone, together, counters = speak(checkpoint(SHAPE)[0], tmp_path, KINDS[:3] + ADAPTED, **settings)
    assert_same(alone + together, 2 * (eager[:3] + eager[len(KINDS) :]))
    assert counters["prefill_graph_fallbacks"] == 0 and counters["prefill_graph_hits"] > 3


def test_a_bucket_that_is_far_too_large_is_not_used(checkpoint, eager, with_graphs, tmp_path, monkeypatch):
    """Of 500 tokens, where a replay takes long: the prompt of 300 runs in it, the short ones without."""
    monkeypatch.setattr(prefill_graphs, "replay_seconds", lambda graph: 60.0)
    kinds = [KINDS[0], KINDS[2], KINDS[5]]
    alone, together, counters = speak(checkpoint(SHAPE)[0], tmp_path, kinds, prefill_buckets="6:500")
    assert_same(alone + together, 2 * [eager[0], eager[2], eager[5]])
    assert counters["prefill_graph_hits"] >= 1
    assert counters["prefill_graph_fallbacks"] >= 2
