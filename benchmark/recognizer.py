"""Which words of a matrix sentence were said, by pocketsphinx with the grammar of all matrix sentences."""

import sys
import tempfile
from pathlib import Path

import numpy as np
from pocketsphinx import Decoder

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from train_small.sentences import SLOTS  # noqa: E402

SAMPLE_RATE = 16000
_SILENCE = np.zeros(SAMPLE_RATE // 5, np.int16)
"""Before and after the speech: the decoder's own silence models need it to begin and end."""


class Recognizer:
    """A decoder; not for several threads at once. Its own errors are those on flite's own audio: see README.md."""

    def __init__(self) -> None:
        slots = " ".join(f"( {' | '.join(words)} )" for words in SLOTS)
        with tempfile.NamedTemporaryFile("w", suffix=".jsgf") as grammar:
            grammar.write(f"#JSGF V1.0;\ngrammar matrix;\npublic <sentence> = {slots};\n")
            grammar.flush()
            self._decoder = Decoder(samprate=SAMPLE_RATE, jsgf=grammar.name, lm=None, loglevel="FATAL")

    def words(self, samples: np.ndarray) -> list[str]:
        """What was heard in float32 [n] at 16 kHz: five words, or none where no sentence fits at all."""
        pcm = (np.clip(samples, -1, 1) * 32767).astype("<i2")
        self._decoder.start_utt()
        self._decoder.process_raw(np.concatenate([_SILENCE, pcm, _SILENCE]).tobytes(), full_utt=True)
        self._decoder.end_utt()
        heard = self._decoder.hyp()
        return heard.hypstr.split() if heard else []


def words_right(sentence: str, heard: list[str]) -> int:
    """How many words of a matrix sentence are in their place."""
    return sum(said == word for said, word in zip(sentence.split(), heard, strict=False))
