"""Which words were said, by pocketsphinx: with the grammar of the matrix sentences, or with its model of English."""

import sys
import tempfile
from pathlib import Path

import numpy as np
from pocketsphinx import Decoder

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from train_small.sentences import SLOTS, is_matrix  # noqa: E402

SAMPLE_RATE = 16000
_SILENCE = np.zeros(SAMPLE_RATE // 5, np.int16)
"""Before and after the speech: the decoder's own silence models need it to begin and end."""


class Recognizer:
    """Decoders; not for several threads at once. Their own errors are those on flite's own audio."""

    def __init__(self) -> None:
        slots = " ".join(f"( {' | '.join(words)} )" for words in SLOTS)
        with tempfile.NamedTemporaryFile("w", suffix=".jsgf") as grammar:
            grammar.write(f"#JSGF V1.0;\ngrammar matrix;\npublic <sentence> = {slots};\n")
            grammar.flush()
            self._matrix = Decoder(samprate=SAMPLE_RATE, jsgf=grammar.name, lm=None, loglevel="FATAL")
        self._english: Decoder | None = None

    def words_right(self, sentence: str, samples: np.ndarray) -> tuple[int, int]:
        """How many words of a sentence are heard in float32 [n] at 16 kHz, and how many it has.

        Of a matrix sentence, those in their places; of another, all but the errors of the best alignment.
        """
        if is_matrix(sentence):
            return in_place(sentence.split(), self._heard(self._matrix, samples)), len(SLOTS)
        self._english = self._english or Decoder(samprate=SAMPLE_RATE, loglevel="FATAL")
        words = sentence.lower().replace(",", "").split()
        return max(0, len(words) - errors(words, self._heard(self._english, samples))), len(words)

    def _heard(self, decoder: Decoder, samples: np.ndarray) -> list[str]:
        pcm = (np.clip(samples, -1, 1) * 32767).astype("<i2")
        decoder.start_utt()
        decoder.process_raw(np.concatenate([_SILENCE, pcm, _SILENCE]).tobytes(), full_utt=True)
        decoder.end_utt()
        heard = decoder.hyp()
        return heard.hypstr.split() if heard else []


def in_place(words: list[str], heard: list[str]) -> int:
    """How many words are in their places."""
    return sum(said == word for said, word in zip(words, heard, strict=False))


def errors(words: list[str], heard: list[str]) -> int:
    """Substitutions, insertions and deletions from the one to the other, the fewest."""
    row = list(range(len(heard) + 1))
    for index, word in enumerate(words, start=1):
        diagonal, row[0] = row[0], index
        for column, said in enumerate(heard, start=1):
            diagonal, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, diagonal + (word != said))
    return row[-1]
