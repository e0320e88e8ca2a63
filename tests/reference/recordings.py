"""Recordings for the tests, made of harmonics with a moving pitch, syllables and some breath."""

from pathlib import Path

import numpy as np
import soundfile


def write_voice(path: Path, *, seconds: float, rate: int, channels: int = 1, pitch: float = 120, seed: int = 0) -> Path:
    """Write a 16-bit PCM file that sounds a little like somebody speaking.

    Args:
        rate: in Hz.
        pitch: of the voice, in Hz.
        seed: of the breath.
    """
    time = np.arange(round(seconds * rate)) / rate
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.1 * np.sin(2 * np.pi * 2.3 * time))) / rate
    harmonics = np.arange(1, int(3500 / pitch))
    formants = sum(np.exp(-(((harmonics * pitch - center) / 200) ** 2)) for center in (500, 1500, 2500))
    voiced = (formants[:, None] * np.sin(harmonics[:, None] * phase)).sum(axis=0)
    breath = np.random.default_rng(seed).normal(size=(channels, len(time)))
    sound = np.sin(np.pi * 4 * time) ** 2 * voiced + 0.1 * breath
    soundfile.write(path, (0.4 * sound / np.abs(sound).max()).T, rate, subtype="PCM_16")
    return path
