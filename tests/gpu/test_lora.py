"""Adapters on a GPU: the kernels give what the torch lines give, and so does an engine whose steps are CUDA graphs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dq_engine import nano
from dq_engine.config import EngineConfig
from dq_engine.engine import DqCoreEngine, Request
from dq_engine.graphs import capture
from dq_engine.kernels import lora
from dq_engine.kernels.lora import AdapterRows, equal_tiles, lora_add, lora_add_torch, prompt_tiles
from dq_engine.kernels.paged_attention import query_tiles
from dq_engine.lora.layers import LoraSettings
from dq_engine.model.checkpoint import load_checkpoint

pytestmark = pytest.mark.gpu

MODEL = "models/small"
ATTENTION, BETWEEN = ["q_proj", "k_proj", "v_proj", "o_proj"], ["enc_to_lm_proj", "lm_to_dit_proj", "res_to_dit_proj"]
NAMES = ["ann", "ben", "cleo", "dan"]
# As `tests/gpu/test_kernels.py`: of a value of about 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def make_rows(kind: str) -> AdapterRows:
    slots = torch.tensor([3, -1, 0, 4, 3, 1], device="cuda")
    if kind == "decode":
        return equal_tiles(slots, 1)
    if kind == "LocDiT":
        return equal_tiles(slots, 11, copies=2)
    lengths = [5, 40, 1, 33, 128, 17]
    starts = torch.tensor(np.cumsum([0, *lengths]), device="cuda")
    padded = np.concatenate([query_tiles(lengths, 24), np.full((4, 2), -1)])
    return prompt_tiles(torch.from_numpy(padded).cuda(), 24, starts, slots, sum(lengths) + 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("early", [False, True], ids=["one after the other", "early"])
@pytest.mark.parametrize("kind", ["decode", "LocDiT", "prompts"])
@pytest.mark.parametrize(
    ("sizes", "rank", "inputs"),
    [([2048, 256, 256], 32, 2048), ([1024], 32, 2048), ([6144, 6144], 240, 2048), ([130, 66, 10], 16, 104)],
)
def test_the_kernels_add_what_the_torch_lines_add(sizes, rank, inputs, kind, early, dtype, monkeypatch):
    if early and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a GPU of compute capability 9")
    monkeypatch.setattr(lora, "_launches_early", lambda device: early)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    torch.manual_seed(0)
    rows = make_rows(kind)
    flat = torch.randn(5, len(sizes) * rank * inputs + sum(sizes) * rank + 128, device="cuda").to(dtype)
    a = flat[:, : len(sizes) * rank * inputs].unflatten(1, (len(sizes), rank, inputs))
    b = flat[:, -sum(sizes) * rank :].unflatten(1, (sum(sizes), rank))
    a.div_(inputs**0.5)
    b.div_(rank**0.5)
    x, y = (torch.randn(rows.count, width, device="cuda").to(dtype) for width in (inputs, sum(sizes)))
    exact, ours, again = y.float().clone(), y.clone(), y.clone()
    lora_add_torch(exact, x.float(), a.float(), b.float(), sizes, rows)
    lora_add(ours, x, a, b, sizes, rows)
    lora_add(again, x, a, b, sizes, rows)
    assert ((ours.float() - exact).abs() / exact.abs().clamp(min=1.0)).max() < TOLERANCE[dtype]
    assert torch.equal(ours, again)
    none = torch.ones(rows.count, dtype=torch.bool, device="cuda")
    for _, index in rows.by_slot:
        none[index] = False
    assert none.any() and torch.equal(ours[none], y[none]) and not torch.equal(ours[~none], y[~none])


def test_kernels_that_are_launched_early_wait_for_what_they_read(monkeypatch):
    """A chain of layers in a CUDA graph, as LocDiT's, gives the same as kernels that begin when the last has ended."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a GPU of compute capability 9")
    torch.manual_seed(0)
    size, depth, rows = 1024, 30, make_rows("LocDiT")
    weights = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) / size**0.5 for _ in range(depth)]
    a = torch.randn(depth, 5, 1, 32, size, device="cuda", dtype=torch.bfloat16) / size**0.5
    b = torch.randn(depth, 5, size, 32, device="cuda", dtype=torch.bfloat16) / 32**0.5
    x = torch.zeros(rows.count, size, device="cuda", dtype=torch.bfloat16)

    def layers(x):
        for layer, weight in enumerate(weights):
            y = torch.nn.functional.linear(x, weight)
            lora_add(y, x, a[layer], b[layer], [size], rows)
            x = torch.nn.functional.rms_norm(y, [size])
        return (x,)

    graphs = []
    for early in (True, False):
        monkeypatch.setattr(lora, "_launches_early", lambda device, early=early: early)
        with torch.inference_mode():
            graphs.append(capture(layers, [x], None))
    for _ in range(100):
        x.normal_()
        results = []
        for graph, (output,) in graphs:
            graph.replay()
            results.append(output.clone())
        assert results[0].isfinite().all() and torch.equal(*results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Random adapters of different ranks for the model that ships."""
    folder = tmp_path_factory.mktemp("adapters")
    settings = LoraSettings(1, 32, ATTENTION, ATTENTION, BETWEEN)
    checkpoint = load_checkpoint(Path(MODEL), torch.device("cpu"), torch.float32, 10, lambda *_: None, settings)
    for seed, name in enumerate(NAMES):
        generator, rank, state = torch.Generator().manual_seed(seed), 4 + 8 * seed, {}
        for layer in checkpoint.lora.layers:
            for target, size in zip(layer.targets, layer.sizes, strict=True):
                state[f"{target}.lora_A"] = torch.randn(rank, layer.inputs, generator=generator) / layer.inputs**0.5
                state[f"{target}.lora_B"] = 0.2 * torch.randn(size, rank, generator=generator) / rank**0.5
        (folder / name).mkdir()
        save_file(state, folder / name / "lora_weights.safetensors")
        config = {"lora_config": {"r": rank, "alpha": rank}}
        (folder / name / "lora_config.json").write_text(json.dumps(config))
    return folder


def speak(folder: Path, slots: int = 4, patches: int = 8, **settings) -> tuple[dict[str | None, np.ndarray], dict]:
    """Latents of one text with each adapter and with none, all at once, and the engine's counters."""
    config = EngineConfig(
        model=MODEL,
        max_num_seqs=8,
        realtime=False,
        lora_max_loras=slots,
        lora_dir=str(folder),
        lora_target_proj_modules=",".join(BETWEEN),
        **settings,
    )
    rng = np.random.default_rng(0)
    with DqCoreEngine(config) as engine:
        reference = rng.standard_normal((40 * engine.patch_size, engine.feat_dim)).astype(np.float32)
        for name in NAMES:
            engine.register_lora(name, name)
        on_host = [adapter.weights.row for adapter in engine._adapters._adapters.values()]
        assert settings["device"] == "cpu" or all(row.is_pinned() for row in on_host)
        streams = {
            name: engine.submit(
                Request(
                    text="lucy wants two old chairs",
                    lora=name,
                    seed=5,
                    min_generate_length=patches,
                    max_generate_length=patches,
                    reference_latents=reference if name in ("ben", None) else None,
                    return_latents=True,
                )
            )
            for name in (*NAMES, None)
        }
        latents = {name: list(stream)[-1].latents for name, stream in streams.items()}
        return latents, engine.snapshot()


def test_a_mixed_batch_in_graphs_equals_the_cpu(folder, monkeypatch):
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(backend, "allow_tf32", False)
    exact, _ = speak(folder, device="cpu")
    for slots in (4, 2):  # with two they take turns
        ours, counters = speak(folder, slots, device="cuda", dtype="float32", prefill_graph_lora=True)
        assert counters["lora_loads"] >= 4 and (counters["lora_evictions"] > 0) == (slots == 2)
        for name in exact:
            # Until one of the quantizer's roundings goes the other way, which sends what follows elsewhere: 1e-5.
            errors = np.abs(ours[name] - exact[name]).reshape(8, -1).max(axis=1)
            assert errors[:2].max() < 1e-4 and errors.max() < 0.1, (name, errors)
    for one in exact:
        for other in exact:
            assert one == other or np.abs(exact[one] - exact[other]).max() > 0.1, "they sound alike"


@pytest.mark.parametrize("settings", [{}, {"prefill_graph_lora": True}, {"enforce_eager": True}], ids=str)
def test_bfloat16_with_the_kernels_and_with_torch_lines(folder, monkeypatch, settings):
    """The first patch, before rounding sends them different ways: far nearer to one another than to other adapters."""
    ours, counters = speak(folder, patches=1, device="cuda", **settings)
    assert settings.get("enforce_eager") or counters["prefill_graph_hits"] > 0
    monkeypatch.setattr(nano, "lora_add", lora_add_torch)
    theirs, _ = speak(folder, patches=1, device="cuda", enforce_eager=True)
    for name in NAMES:
        same = np.linalg.norm(ours[name] - theirs[name])
        other = min(np.linalg.norm(ours[name] - theirs[n]) for n in theirs if n != name)
        assert same < 0.3 * other, (name, same, other)
