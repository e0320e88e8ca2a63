"""What is used of the official `voxcpm` package. It imports torchaudio, which only VoxCPM 1 needs."""

from torchaudio_standing_in import torchaudio_standing_in

with torchaudio_standing_in():
    from voxcpm.model.voxcpm2 import LoRAConfig, VoxCPM2Model, VoxCPMConfig
    from voxcpm.modules.audiovae.audio_vae_v2 import AudioVAE, AudioVAEConfig, CausalConv1d, Snake1d

__all__ = ["AudioVAE", "AudioVAEConfig", "CausalConv1d", "LoRAConfig", "Snake1d", "VoxCPM2Model", "VoxCPMConfig"]
