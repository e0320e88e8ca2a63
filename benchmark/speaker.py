"""Whose voice it is: linear discriminants of a voice's spectral envelope and pitch, trained on flite's own audio."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE_RATE = 16000
_WINDOW, _HOP, _FFT = 400, 160, 512
_MELS, _CEPSTRA = 26, 19
_LOUD = 0.1
"""Frames above this share of the loudest are listened to."""
_SHRINKAGE = 0.05
_PITCH_HZ = (60, 320)


def _mel_filters() -> np.ndarray:
    mel = np.linspace(0, 2595 * np.log10(1 + 7600 / 700), _MELS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    hz = np.linspace(0, SAMPLE_RATE / 2, _FFT // 2 + 1)
    rising = (hz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hz) / (edges[2:] - edges[1:-1])[:, None]
    return np.clip(np.minimum(rising, falling), 0, None)


_FILTERS = _mel_filters()
_COSINES = np.cos(np.pi * np.arange(1, _CEPSTRA + 1)[:, None] * (np.arange(_MELS) + 0.5) / _MELS)


def features(samples: np.ndarray) -> np.ndarray:
    """float32 [n] at 16 kHz to [2 * 19 + 1]: means and deviations of the cepstra, and the logarithm of the pitch."""
    count = 1 + max(0, len(samples) - _WINDOW) // _HOP
    samples = np.pad(samples.astype(np.float64), (0, max(0, _WINDOW - len(samples))))
    frames = samples[np.arange(count)[:, None] * _HOP + np.arange(_WINDOW)]
    level = np.sqrt((frames**2).mean(1))
    frames = frames[level >= _LOUD * level.max()]
    power = np.abs(np.fft.rfft(frames * np.hanning(_WINDOW), _FFT)) ** 2
    cepstra = np.log(power @ _FILTERS.T + 1e-8) @ _COSINES.T
    centered = frames - frames.mean(1, keepdims=True)
    spectrum = np.abs(np.fft.rfft(centered, 2 * _FFT)) ** 2
    correlation = np.fft.irfft(spectrum)
    lags = slice(SAMPLE_RATE // _PITCH_HZ[1], SAMPLE_RATE // _PITCH_HZ[0])
    ratio = correlation[:, lags] / (correlation[:, :1] + 1e-12)
    voiced = ratio.max(1) > 0.5
    lag = lags.start + ratio[voiced].argmax(1) if voiced.any() else np.array([lags.stop])
    return np.concatenate([cepstra.mean(0), cepstra.std(0), [np.median(np.log(SAMPLE_RATE / lag))]])


@dataclass(frozen=True)
class SpeakerModel:
    """A classifier of voices.

    Args:
        voices: their names.
        weights: [voices, features].
        bias: [voices].
        error: the share of held-out recordings of flite that it gets wrong.
        tested: how many these were.
    """

    voices: list[str]
    weights: np.ndarray
    bias: np.ndarray
    error: float
    tested: int

    def recognize(self, samples: np.ndarray) -> str:
        """The voice that float32 [n] at 16 kHz is most like."""
        return self.voices[int(np.argmax(self.weights @ features(samples) + self.bias))]

    @classmethod
    def load(cls, path: Path) -> "SpeakerModel":
        with np.load(path) as stored:
            voices = [str(name) for name in stored["voices"]]
            return cls(voices, stored["weights"], stored["bias"], float(stored["error"]), int(stored["tested"]))

    def save(self, path: Path) -> None:
        """Write a .npz file without pickled objects."""
        np.savez(
            path,
            voices=np.array(self.voices),
            weights=self.weights.astype(np.float32),
            bias=self.bias.astype(np.float32),
            error=self.error,
            tested=self.tested,
        )


def train_speaker_model(recordings: dict[str, list[np.ndarray]], held_out: dict[str, list[np.ndarray]]) -> SpeakerModel:
    """Linear discriminant analysis, its covariance drawn a little towards its diagonal.

    Args:
        recordings, held_out: of each voice, float32 [n] at 16 kHz.
    """
    voices = sorted(recordings)
    points = {voice: np.stack([features(samples) for samples in recordings[voice]]) for voice in voices}
    means = np.stack([points[voice].mean(0) for voice in voices])
    spread = np.concatenate([points[voice] - mean for voice, mean in zip(voices, means, strict=True)])
    covariance = spread.T @ spread / len(spread)
    covariance = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * np.diag(np.diag(covariance))
    weights = np.linalg.solve(covariance, means.T).T
    model = SpeakerModel(voices, weights, -0.5 * (weights * means).sum(1), 0.0, 0)
    tests = [(voice, samples) for voice in voices for samples in held_out[voice]]
    wrong = sum(model.recognize(samples) != voice for voice, samples in tests)
    return SpeakerModel(voices, weights, model.bias, wrong / len(tests), len(tests))
