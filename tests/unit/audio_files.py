"""Recordings for tests, written by libsndfile."""

import io

import numpy as np
import soundfile

TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)).astype(np.float32)
"""A second at 48 kHz."""


def file_of(samples: np.ndarray, rate: int, format: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(buffer, "w", rate, channels, subtype, format=format) as file:
        for start in range(0, len(samples), rate):  # libsndfile's Vorbis encoder dies of an hour at once
            file.write(samples[start : start + rate])
    return buffer.getvalue()


def speech_like(seconds: float, rate: int) -> np.ndarray:
    """Harmonics of a gliding pitch under syllables, float32 [n] within +-0.5: what codecs for speech and music take."""
    time = np.arange(int(seconds * rate)) / rate
    phase = 2 * np.pi * (120 * time + 20 * np.sin(2 * np.pi * 0.7 * time))
    top = min(3_000, 0.4 * rate)
    voice = sum(np.sin(k * phase) / k for k in range(1, int(top / 140)))
    return (0.25 * voice * (0.55 + 0.45 * np.sin(2 * np.pi * 4 * time))).astype(np.float32).clip(-0.5, 0.5)


def snr_db(original: np.ndarray, decoded: np.ndarray) -> float:
    """Signal-to-noise ratio in dB; `decoded` may be longer."""
    noise = decoded[: len(original)] - original
    return float(10 * np.log10(np.mean(original**2) / max(np.mean(noise**2), 1e-40)))


def lag_of(original: np.ndarray, decoded: np.ndarray) -> int:
    """Samples by which `decoded` comes later."""
    size = 1 << (len(original) + len(decoded)).bit_length()
    spectrum = np.fft.rfft(decoded, size) * np.conj(np.fft.rfft(original, size))
    best = int(np.argmax(np.fft.irfft(spectrum, size)))
    return best if best < size // 2 else best - size
