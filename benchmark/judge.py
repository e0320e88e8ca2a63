"""What is right and wrong with a spoken sentence, and the figures over many."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import soxr
from recognizer import SAMPLE_RATE, Recognizer
from speaker import SpeakerModel

_HOP = SAMPLE_RATE // 100
_SOUND = 0.05
"""10 ms are sound where they have this share of the loudest 10 ms' amplitude; flite's own pauses stay below."""
LONGEST_PAUSE_S = 0.4
LATEST_STOP_S = 0.5
_CUT_OFF = 0.25
"""Sound that goes on at this share of the loudest in the last 10 ms was cut off."""
LONGEST_WORD_S = 0.9
"""On average over a sentence; flite's slowest matrix sentence takes 0.56 s a word."""
SAME_AUDIO = 1e-3
ONE_LEVEL = 0.1
"""What a value that rounding takes to the quantizer's next level may change in the samples, see
tests/quality/test_rounding.py; a stream that got another's data is farther off, or does not end where it should."""


@dataclass(frozen=True)
class Verdict:
    """Of one sentence.

    Args:
        words, of_words: right, and all.
        voice: whose it is, by the speaker model.
        pause_s: the longest pause inside the speech.
        tail_s: from the last sound to the end.
        cut_off: it ended while something was being said, or before anything was.
        runaway: it did not stop by itself, or long after any such sentence would end.
        clipped: samples at full scale.
    """

    words: int
    of_words: int
    voice: str
    seconds: float
    pause_s: float
    tail_s: float
    cut_off: bool
    runaway: bool
    clipped: int

    @property
    def stopped_in_time(self) -> bool:
        """By itself, within half a second after the last sound, and not before it."""
        return not self.runaway and not self.cut_off and self.tail_s <= LATEST_STOP_S


class Judge:
    """Listens to sentences.

    Args:
        speakers: the voices that it knows.
    """

    def __init__(self, speakers: SpeakerModel) -> None:
        self._recognizer, self._speakers = Recognizer(), speakers

    def listen(self, sentence: str, samples: np.ndarray, sample_rate: int, finish_reason: str) -> Verdict:
        """Judge float32 [n] that should say the sentence."""
        heard = soxr.resample(samples, sample_rate, SAMPLE_RATE).astype(np.float32)
        level = np.sqrt((heard[: len(heard) // _HOP * _HOP].reshape(-1, _HOP) ** 2).mean(1))
        sound = np.flatnonzero(level > _SOUND * level.max()) if level.size else np.array([], int)
        pause = np.diff(sound).max(initial=1) - 1
        tail = len(level) - 1 - sound[-1] if len(sound) else len(level)
        words, of_words = self._recognizer.words_right(sentence, heard)
        return Verdict(
            words=words,
            of_words=of_words,
            voice=self._speakers.recognize(heard),
            seconds=len(samples) / sample_rate,
            pause_s=float(pause / 100),
            tail_s=float(tail / 100),
            cut_off=not len(sound) or bool(level[-1] > _CUT_OFF * level.max()),
            runaway=finish_reason != "stop"
            or len(samples) > (1 + LONGEST_WORD_S * len(sentence.split())) * sample_rate,
            clipped=int((np.abs(samples) >= 0.999).sum()),
        )


def summary(verdicts: Sequence[Verdict], voices: Sequence[str | None]) -> dict:
    """The figures over some sentences.

    Args:
        voices: the voice that was asked for in each; None where any will do.
    """
    count = len(verdicts)
    asked = [(verdict.voice, voice) for verdict, voice in zip(verdicts, voices, strict=True) if voice is not None]
    return {
        "sentences": count,
        "words_right": sum(v.words for v in verdicts) / sum(v.of_words for v in verdicts),
        "voice_right": sum(heard == voice for heard, voice in asked) / len(asked) if asked else None,
        "stopped_in_time": sum(v.stopped_in_time for v in verdicts) / count,
        "long_pauses": sum(v.pause_s > LONGEST_PAUSE_S for v in verdicts),
        "cut_off": sum(v.cut_off for v in verdicts),
        "runaway": sum(v.runaway for v in verdicts),
        "clipped": sum(v.clipped > 0 for v in verdicts),
        "seconds": round(sum(v.seconds for v in verdicts), 1),
    }


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of two recordings' samples; infinite where their lengths differ."""
    return float(np.abs(ours - theirs).max(initial=0)) if len(ours) == len(theirs) else float("inf")
