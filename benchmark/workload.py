"""What is asked for, and when: the same for every engine, and drawn anew for every request, so that no cache helps."""

import random
import string
from dataclasses import dataclass

import numpy as np

LATENT_FRAMES_PER_S, FRAMES_PER_PATCH, LATENT_CHANNELS = 25, 4, 64


@dataclass(frozen=True)
class Range:
    """Whole numbers from low to high, both included; written "48" or "20:120"."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"

    @classmethod
    def parse(cls, text: str, at_least: int = 1) -> "Range":
        """Raises ValueError: it is not such a range, or begins below `at_least`."""
        low, _, high = text.partition(":")
        try:
            result = cls(int(low), int(high or low))
        except ValueError:
            raise ValueError(f"{text!r} is neither a whole number nor LOW:HIGH") from None
        if not at_least <= result.low <= result.high:
            raise ValueError(f"{text!r}: {at_least} <= LOW <= HIGH is needed")
        return result


@dataclass(frozen=True)
class Job:
    """One request.

    Args:
        text: letters and spaces, one token each for a byte tokenizer.
        patches: most patches to make; with a checkpoint that never stops, so many are made.
        reference_latents: float32 [frames, 64] of a voice to clone, or None.
        lora: name of a registered adapter, or None.
    """

    text: str
    patches: int
    reference_latents: np.ndarray | None
    lora: str | None = None


def make_jobs(count: int, characters: Range, patches: Range, reference_s: float, seed: str) -> list[Job]:
    """`count` requests, each with its own text and its own noise for a reference of `reference_s` seconds (0: none)."""
    rng = random.Random(seed)
    frames = int(reference_s * LATENT_FRAMES_PER_S) // FRAMES_PER_PATCH * FRAMES_PER_PATCH
    jobs = []
    for _ in range(count):
        length = rng.randint(characters.low, characters.high)
        letters = [rng.choice(string.ascii_lowercase)]  # a space in front may be lost to a tokenizer
        letters += rng.choices(string.ascii_lowercase + " ", k=length - 1)
        noise = np.random.default_rng(rng.getrandbits(64))
        latents = noise.standard_normal((frames, LATENT_CHANNELS), np.float32) if frames else None
        jobs.append(Job("".join(letters), rng.randint(patches.low, patches.high), latents))
    return jobs


def poisson_arrivals(rate: float, seconds: float, seed: str) -> list[float]:
    """Times of independent arrivals at `rate` a second within [0, seconds), ascending; the first at 0."""
    rng = random.Random(seed)
    times, time = [], 0.0
    while time < seconds:
        times.append(time)
        time += rng.expovariate(rate)
    return times
