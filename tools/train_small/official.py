"""What is used of the official `voxcpm` package. It imports torchaudio, which only VoxCPM 1 needs."""

import contextlib
import importlib.machinery
import importlib.util
import sys
import types

import transformers  # noqa: F401  before the stand-in below: it looks for torchaudio when it is imported


@contextlib.contextmanager
def _torchaudio_standing_in():
    if importlib.util.find_spec("torchaudio") is not None:
        yield
        return
    module = types.ModuleType("torchaudio")
    module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", loader=None)
    sys.modules["torchaudio"] = module
    try:
        yield
    finally:
        del sys.modules["torchaudio"]


with _torchaudio_standing_in():
    from voxcpm.model.voxcpm2 import LoRAConfig, VoxCPM2Model, VoxCPMConfig
    from voxcpm.modules.audiovae.audio_vae_v2 import AudioVAE, AudioVAEConfig, CausalConv1d, Snake1d

__all__ = ["AudioVAE", "AudioVAEConfig", "CausalConv1d", "LoRAConfig", "Snake1d", "VoxCPM2Model", "VoxCPMConfig"]
