"""The flite synthesizer through its C library (Debian's libflite1): the voices that the small model learns."""

import ctypes

import numpy as np

VOICES = ["slt", "rms", "awb"]
"""Those that the small model learns. kal too is in what its AudioVAE learns, and an adapter speaks it."""
SAMPLE_RATE = 16000
LIBRARIES = {"slt": "cmu_us_slt", "rms": "cmu_us_rms", "awb": "cmu_us_awb", "kal": "cmu_us_kal16"}
"""Of each voice that there is."""
_SILENCE_BEFORE, _SILENCE_AFTER = 1280, 2560
"""Samples kept around the speech: 80 and 160 ms."""
_HOP = 80
_LOUDNESS = 0.08
"""Root mean square that every sentence is brought to; 1 is full scale."""


class _Wave(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    ]


class Flite:
    """The synthesizer in this process.

    Raises:
        OSError: libflite is not installed.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libflite.so.1", mode=ctypes.RTLD_GLOBAL)
        for name in ("libflite_usenglish.so.1", "libflite_cmulex.so.1"):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        self._library.flite_init()
        self._library.flite_text_to_wave.restype = ctypes.POINTER(_Wave)
        self._library.flite_text_to_wave.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self._library.delete_wave.argtypes = [ctypes.POINTER(_Wave)]
        self._voices: dict[str, int] = {}

    def say(self, text: str, voice: str) -> np.ndarray:
        """Speak a text.

        Returns:
            int16 [n] at 16 kHz, of one loudness, with 80 ms of silence before the speech and 160 ms after it.
        """
        if voice not in self._voices:
            name = LIBRARIES[voice]
            library = ctypes.CDLL(f"libflite_{name}.so.1", mode=ctypes.RTLD_GLOBAL)
            register = getattr(library, f"register_{name}")
            register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
            self._voices[voice] = register(None)
        wave = self._library.flite_text_to_wave(text.encode(), self._voices[voice])
        try:
            content = wave.contents
            if content.sample_rate != SAMPLE_RATE:
                raise ValueError(f"flite's voice {voice} has {content.sample_rate} Hz")
            samples = np.ctypeslib.as_array(content.samples, (content.num_samples,)).astype(np.float32) / 32768
        finally:
            self._library.delete_wave(wave)
        return _trimmed(samples)


def _trimmed(samples: np.ndarray) -> np.ndarray:
    hops = samples[: len(samples) // _HOP * _HOP].reshape(-1, _HOP)
    level = np.sqrt((hops**2).mean(axis=1))
    loud = np.flatnonzero(level > 0.02 * level.max())
    begin = max(0, loud[0] * _HOP - _SILENCE_BEFORE)
    samples = samples[begin : loud[-1] * _HOP + _HOP + _SILENCE_AFTER]
    samples = samples * (_LOUDNESS / np.sqrt((samples**2).mean()))
    return (np.clip(samples, -0.99, 0.99) * 32767).astype(np.int16)
