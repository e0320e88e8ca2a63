"""The same engine on a GPU: float32 gives the CPU's audio, bf16 speaks, the half-precision VAE stays close."""

import numpy as np
import pytest
import torch

from dq_engine.config import EngineConfig
from dq_engine.engine import DqCoreEngine, Request
from dq_engine.vae.decoder import StreamingDecoder

pytestmark = pytest.mark.gpu

MODEL = "models/small"
REQUESTS = [
    Request(text="peter bought nine green toys", seed=1, return_latents=True),
    Request(text="(slt)lucy wants two old chairs", seed=2, return_latents=True),
    Request(text="thomas sees ten white rings", seed=3, cfg_value=1.5, temperature=0.8, return_latents=True),
]


def _speak(**settings) -> list:
    with DqCoreEngine(EngineConfig(model=MODEL, max_num_seqs=8, **settings)) as engine:
        streams = [engine.submit(request) for request in REQUESTS]
        results = []
        for stream in streams:
            chunks = list(stream)
            results.append((np.concatenate([c.samples for c in chunks]), chunks[-1]))
        return results


@pytest.fixture(scope="module")
def on_cpu() -> list:
    return _speak(device="cpu")


def test_float32_equals_the_cpu(on_cpu):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for (_, cpu), (_, gpu) in zip(on_cpu, _speak(device="cuda", dtype="float32", attention="sdpa"), strict=True):
        assert gpu.stats["patches"] == cpu.stats["patches"] and gpu.finish_reason == cpu.finish_reason == "stop"
        assert np.abs(gpu.latents - cpu.latents).max() < 1e-2


def test_bfloat16_stops_by_itself_and_is_not_silent(on_cpu):
    for (audio, last), (reference, _) in zip(_speak(device="cuda"), on_cpu, strict=True):
        assert last.finish_reason == "stop"
        assert 0.5 < len(audio) / len(reference) < 2
        assert 0.3 < np.sqrt(np.mean(audio**2)) / np.sqrt(np.mean(reference**2)) < 3


def test_ways_to_compare_give_the_same():
    """GPU_LATENTS=0 is another way for the same numbers, VAE_COMPILE=0 another order of sums in half precision."""
    usual = _speak(device="cuda")
    for (audio, _), (other, _) in zip(usual, _speak(device="cuda", gpu_latents=False), strict=True):
        assert np.array_equal(audio, other)
    for (audio, _), (other, _) in zip(usual, _speak(device="cuda", vae_compile=False), strict=True):
        assert 10 * np.log10(np.mean(audio**2) / np.mean((audio - other) ** 2)) > 40


def test_half_precision_vae_signal_to_noise_ratio(on_cpu):
    from pathlib import Path

    from dq_engine.model.checkpoint import load_checkpoint

    device = torch.device("cuda")
    vae = load_checkpoint(Path(MODEL), device, torch.bfloat16, 10, lambda *_: None).vae
    latents = torch.from_numpy(on_cpu[0][1].latents).to(device)[None]
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    exact = StreamingDecoder(vae, 1).decode(latents, slots)
    for dtype in (torch.float16, torch.bfloat16):
        audio = StreamingDecoder(vae, 1, dtype).decode(latents.to(dtype), slots)
        ratio = 10 * torch.log10(exact.square().mean() / (audio - exact).square().mean())
        print(f"AudioVAE in {dtype}: signal-to-noise ratio {ratio:.1f} dB against float32")
        assert dtype == torch.bfloat16 or ratio > 30
