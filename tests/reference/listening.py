"""What came out of the engine, and how it differs from what it should be."""

from dataclasses import dataclass

import numpy as np

from dq_engine.engine import Chunk, Stream


@dataclass(frozen=True)
class Heard:
    """A stream from its first chunk to its last.

    Args:
        chunks: samples of each chunk.
        latents: float32 [frames, feat_dim], None if not asked for.
    """

    chunks: list[np.ndarray]
    latents: np.ndarray | None
    finish_reason: str
    stats: dict

    @property
    def audio(self) -> np.ndarray:
        return np.concatenate(self.chunks)


def hear(stream: Stream) -> Heard:
    """Listen to a stream to its end."""
    return heard(list(stream))


def heard(chunks: list[Chunk]) -> Heard:
    """The same, of chunks that a callback collected."""
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    if last.error is not None:
        raise last.error
    return Heard([chunk.samples for chunk in chunks], last.latents, last.finish_reason, last.stats)


def assert_close(ours: np.ndarray, theirs: np.ndarray, limit: float, per_patch: int, what: str) -> None:
    """Assert that no value differs by more than `limit`; tells where the first that does is.

    Args:
        per_patch: rows (frames, samples) of a patch.
    """
    common = min(len(ours), len(theirs))
    difference = np.abs(ours[:common] - theirs[:common]).reshape(common, -1).max(axis=1)
    assert np.isfinite(difference).all(), f"{what}: values that are not finite"
    beyond = np.flatnonzero(difference > limit)
    if len(beyond):
        growth = [f"{difference[i : i + per_patch].max():.1e}" for i in range(0, common, per_patch)]
        raise AssertionError(
            f"{what}: differs by more than {limit:g} first in row {beyond[0] % per_patch} of patch "
            f"{beyond[0] // per_patch}; {len(ours) / per_patch:g} patches against {len(theirs) / per_patch:g}; "
            f"largest differences patch by patch: {' '.join(growth)}"
        )
    assert len(ours) == len(theirs), f"{what}: {len(ours) / per_patch:g} patches, not {len(theirs) / per_patch:g}"
