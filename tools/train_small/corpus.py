"""Sentences and their audio on disk, in shards that are written whole: training can begin before all are there."""

import json
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train_small.flite import VOICES, Flite
from train_small.sentences import free_sentence, matrix_sentence

SHARD = 250
"""Sentences."""
_flite: Flite | None = None


@dataclass
class Corpus:
    """What was spoken.

    Args:
        items: (text, voice) of each sentence.
        audio: int16 [n] at 16 kHz, the sentences one after the other.
        offsets: int64 [len(items) + 1], where each begins.
    """

    items: list[tuple[str, str]]
    audio: np.ndarray
    offsets: np.ndarray


def plan(matrix: int, free: int, seed: int, held_out: bool, voices: list[str] = VOICES) -> list[tuple[str, str]]:
    """The sentences of a corpus in a mixed order; the voices take turns."""
    rng = random.Random(seed)
    texts = [matrix_sentence(rng, held_out) for _ in range(matrix)] + [
        free_sentence(rng, held_out) for _ in range(free)
    ]
    items = [(text, voices[index % len(voices)]) for index, text in enumerate(texts)]
    rng.shuffle(items)
    return items


def write_corpus(folder: Path, items: list[tuple[str, str]], processes: int) -> None:
    """Speak the sentences; shards that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    planned, path = json.dumps(items), folder / "plan.json"
    if path.exists() and path.read_text() != planned:
        raise ValueError(f"{folder} holds another corpus")
    _write_whole(path, planned.encode())
    shards = [path for path in _shard_paths(folder, len(items)) if not path.exists()]
    with ProcessPoolExecutor(processes) as pool:
        for _ in pool.map(_write_shard, shards):
            pass


def load_corpus(folder: Path) -> tuple[Corpus, bool]:
    """The shards that are there, without a gap, and whether these are all."""
    items = [tuple(item) for item in json.loads((folder / "plan.json").read_text())]
    paths = _shard_paths(folder, len(items))
    present = 0
    while present < len(paths) and paths[present].exists():
        present += 1
    audio, offsets = [], [np.zeros(1, np.int64)]
    for path in paths[:present]:
        with np.load(path) as shard:
            audio.append(shard["audio"])
            offsets.append(shard["offsets"][1:] + offsets[-1][-1])
    audio = np.concatenate(audio) if audio else np.zeros(0, np.int16)
    return Corpus(items[: present * SHARD], audio, np.concatenate(offsets)), present == len(paths)


def _shard_paths(folder: Path, count: int) -> list[Path]:
    return [folder / f"shard_{index:03d}.npz" for index in range(-(-count // SHARD))]


def _write_shard(path: Path) -> None:
    global _flite
    _flite = _flite or Flite()
    index = int(path.stem.partition("_")[2])
    items = json.loads((path.parent / "plan.json").read_text())[index * SHARD : (index + 1) * SHARD]
    waves = [_flite.say(text, voice) for text, voice in items]
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        np.savez(file, audio=np.concatenate(waves), offsets=np.cumsum([0, *map(len, waves)], dtype=np.int64))
    os.replace(part, path)


def _write_whole(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)
