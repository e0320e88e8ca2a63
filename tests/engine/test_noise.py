"""The noise is Philox 4x32-10 by the book, normal, and the same for a stream in every batch."""

import numpy as np
import pytest
import torch

from dq_engine.noise import patch_noise, philox

# Known answers from the Random123 distribution (kat_vectors, philox4x32 10).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter, key, answer):
    assert [f"{word.item():08x}" for word in philox(words(counter), words(key))] == answer.split()


def test_philox_of_a_batch_is_philox_of_each():
    counters, keys = ([words(known[i]) for known in KNOWN] for i in (0, 1))
    batch = philox([torch.cat(c) for c in zip(*counters, strict=True)], [torch.cat(k) for k in zip(*keys, strict=True)])
    assert [f"{word:08x}" for word in torch.stack(batch, dim=1).flatten().tolist()] == " ".join(
        known[2] for known in KNOWN
    ).split()


@pytest.mark.parametrize(("patch_size", "feat_dim"), [(4, 64), (5, 24), (3, 5)])
def test_shape_and_type(patch_size, feat_dim):
    noise = patch_noise(torch.tensor([1, 2]), torch.tensor([0, 0]), patch_size, feat_dim)
    assert noise.shape == (2, feat_dim, patch_size) and noise.dtype == torch.float32 and noise.isfinite().all()


def test_a_stream_has_the_same_noise_in_every_batch():
    seeds = torch.tensor([0, 5, 2**32, 2**53 - 1, 2**63 - 1])
    steps = torch.tensor([0, 7, 1, 1999, 2**31])
    together = patch_noise(seeds, steps, 4, 64)
    for row in range(len(seeds)):
        assert torch.equal(patch_noise(seeds[row : row + 1], steps[row : row + 1], 4, 64)[0], together[row])
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(patch_noise(seeds[order], steps[order], 4, 64), together[order])


def test_it_is_standard_normal_and_independent():
    """2^20 values: bounds at about 5 standard errors."""
    seeds, steps = torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64)
    noise = patch_noise(seeds, steps, 4, 64).double().view(64, 64, -1)
    values, n = noise.flatten(), noise.numel()
    assert abs(values.mean()) < 5 / n**0.5
    assert abs(values.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((values**3).mean()) < 5 * (15 / n) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert (values.abs() > 3).double().mean() == pytest.approx(0.0027, rel=0.1)
    flat = noise.reshape(64 * 64, -1)
    neighbours = {
        "next step": (noise[:, :-1], noise[:, 1:]),
        "next seed": (noise[:-1], noise[1:]),
        "next value": (flat[:, :-1], flat[:, 1:]),
        "other half": (flat[:, :128], flat[:, 128:]),
    }
    for name, (a, b) in neighbours.items():
        assert abs((a * b).mean()) < 5 / a.numel() ** 0.5, name


def test_no_two_patches_are_alike():
    seeds = torch.tensor([0, 1, 2, 2**32, 2**32 + 1, 2**62, 2**63 - 1]).repeat_interleave(50)
    noise = patch_noise(seeds, torch.arange(50).repeat(7), 4, 64).flatten(1).numpy()
    assert len(np.unique(noise, axis=0)) == len(noise)
