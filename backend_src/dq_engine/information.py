"""What an operator or a client's author may want to know of a running engine."""

import dataclasses
import importlib.metadata
import platform

import torch

from dq_engine import request
from dq_engine.engine import DqCoreEngine

_PACKAGES = ("dq-engine", "nano-vllm-voxcpm", "torch", "triton", "transformers", "safetensors", "av")


def information(engine: DqCoreEngine) -> dict:
    """The model's rates (Hz) and sizes, the limits of a request, versions, and the settings in force; plain JSON."""
    settings = engine.config.model_dump(mode="json", exclude={"admin_token"})
    settings |= {name: value for name, value in dataclasses.asdict(engine.limits).items() if name in settings}
    device = engine.device
    return {
        "sample_rate": engine.sample_rate,
        "encoder_sample_rate": engine.encoder_sample_rate,
        "latent_width": engine.feat_dim,
        "patch_size": engine.patch_size,
        "patch_s": engine.patch_samples / engine.sample_rate,
        "limits": {
            "text_characters": request.MAX_TEXT_CHARACTERS,
            "recording_bytes": request.MAX_AUDIO_BYTES,
            "recording_s": [request.MIN_AUDIO_SECONDS, request.MAX_AUDIO_SECONDS],
            "cfg_value": request.MAX_CFG,
            "temperature": request.MAX_TEMPERATURE,
            "max_model_len": engine.limits.max_model_len,
            "kv_tokens": engine.limits.kv_tokens,
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "versions": {"python": platform.python_version(), **_versions()},
        "settings": settings,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # triton, on a machine without a GPU
            continue
    return versions
