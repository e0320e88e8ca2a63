"""What the quality measure has spoken: sentences that the small model was not trained on, in every mode."""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from train_small.flite import VOICES  # noqa: E402
from train_small.sentences import free_sentence, matrix_sentence  # noqa: E402

MATRIX_MODES = ("zero-shot", "control", "reference", "continuation")
MODES = (*MATRIX_MODES, "free")
"""In "free" sentences are free English, with the voice as control."""
_MISHEARD = {"got", "bought"}
"""The recognizer takes these for each other in flite's own audio too; sentences with them are left out."""
RECORDINGS = Path(__file__).resolve().parent / "recordings"
REFERENCES = {
    "slt": "william kept seven green chairs",
    "rms": "kathy ordered six white flowers",
    "awb": "steven wants four thin toys",
}
PROMPTS = {
    "slt": "lucy sold nine dark tables",
    "rms": "doris gives eight cheap windows",
    "awb": "rachel prefers ten old rings",
}
"""The words of recordings/<voice>_reference.flac and recordings/<voice>_prompt.flac, spoken by flite."""


@dataclass(frozen=True)
class Utterance:
    """One request.

    Args:
        sentence: what is to be heard.
        mode: one of MODES.
        voice: whose it should be; None in zero-shot, where any will do.
    """

    sentence: str
    mode: str
    voice: str | None
    seed: int

    def fields(self) -> dict:
        """The request's inputs, by the names of the contract."""
        fields = {"text": self.sentence, "seed": self.seed}
        if self.mode in ("control", "free"):
            fields["control"] = self.voice
        elif self.mode == "reference":
            fields["reference_audio"] = (RECORDINGS / f"{self.voice}_reference.flac").read_bytes()
        elif self.mode == "continuation":
            fields["text"] = " " + self.sentence
            fields["prompt_text"] = PROMPTS[self.voice]
            fields["prompt_audio"] = (RECORDINGS / f"{self.voice}_prompt.flac").read_bytes()
        return fields


def make_utterances(count: int, seed: int, modes: tuple[str, ...] = MATRIX_MODES) -> list[Utterance]:
    """Utterances of all modes and voices in turn, no sentence twice."""
    rng = random.Random(seed)
    used = {*REFERENCES.values(), *PROMPTS.values()}
    utterances = []
    for index in range(count):
        mode = modes[index % len(modes)]
        draw = free_sentence if mode == "free" else matrix_sentence
        while (sentence := draw(rng, held_out=True)) in used or _MISHEARD & set(sentence.split()):
            pass
        used.add(sentence)
        voice = None if mode == "zero-shot" else VOICES[index // len(modes) % len(VOICES)]
        utterances.append(Utterance(sentence, mode, voice, rng.randrange(2**31)))
    return utterances
