"""Eight different requests at once give what each gives alone; the noise depends on a request's seed only."""

import time

import numpy as np
import pytest
import torch
from reference.checkpoints import SHAPES, Shape
from reference.listening import Heard, assert_close, hear

from dq_engine.engine import Request
from dq_engine.noise import patch_noise

SHAPE = SHAPES[0]


@pytest.fixture(scope="module")
def requests(reference_wav, prompt_wav) -> list[Request]:
    """All kinds, from files and from latents, each with its own lengths and guidance."""
    reference, prompt = reference_wav.read_bytes(), prompt_wav.read_bytes()
    latents = np.random.default_rng(0).standard_normal((20, SHAPE.feat_dim)).astype(np.float32)
    kinds = [
        {"text": "oh no"},
        {"text": "a longer text", "control": "low", "cfg_value": 1.5},
        {"text": "oh", "reference_audio": reference},
        {"text": "yes", "prompt_text": "well", "prompt_audio": prompt, "cfg_value": 3.0},
        {"text": "no", "reference_audio": reference, "prompt_text": "well", "prompt_audio": prompt},
        {"text": "why", "reference_latents": latents, "temperature": 0.7},
        {"text": "so", "prompt_text": "and", "prompt_latents": latents[:4]},
        {"text": "你好 world", "reference_latents": latents[4:], "prompt_text": "b", "prompt_latents": latents[:12]},
    ]
    lengths = [30, 26, 40, 24, 33, 28, 36, 25]
    return [
        Request(seed=seed, min_generate_length=20, max_generate_length=length, return_latents=True, **fields)
        for seed, (fields, length) in enumerate(zip(kinds, lengths, strict=True))
    ]


@pytest.fixture(scope="module")
def alone(open_case, requests) -> list[Heard]:
    engine = open_case(SHAPE, max_num_seqs=1).engine
    return [hear(engine.submit(request)) for request in requests]


@pytest.mark.parametrize(
    "settings",
    [
        {"realtime": False},
        {},
        {"realtime": False, "max_num_seqs": 3},
        {"realtime": False, "max_prefill_tokens": 7, "max_prefill_seqs": 2},
    ],
    ids=["all at once", "protecting those that run", "three slots", "prompts in pieces"],
)
def test_eight_requests_staggered(open_case, requests, alone, settings):
    case = open_case(SHAPE, **settings)
    streams, most = [], 0
    for request in requests:
        streams.append(case.engine.submit(request))
        time.sleep(0.03)  # some patches; the first are still running when the last comes
        most = max(most, case.engine.snapshot()["active"])
    together = [hear(stream) for stream in streams]
    # Protecting those that run may mean one after the other, where the machine is slow.
    assert most >= 2 or case.engine.config.realtime, "they did not overlap"
    for index, (ours, expected) in enumerate(zip(together, alone, strict=True)):
        assert (ours.finish_reason, ours.stats["patches"]) == (expected.finish_reason, expected.stats["patches"])
        assert_close(ours.latents, expected.latents, 1e-4, case.official.patch_size, f"latents of request {index}")
        assert_close(ours.audio, expected.audio, 1e-4, case.official.patch_samples, f"audio of request {index}")


def test_the_same_seed_beside_others(open_case, requests):
    """Twins with one seed are equal, whether one started later or other streams run beside it; another seed is not."""
    case = open_case(SHAPE, realtime=False)
    twin = Request(text="oh no", seed=2**63 - 1, max_generate_length=24, min_generate_length=23, return_latents=True)
    other = Request(text="oh no", seed=2**63 - 2, max_generate_length=24, min_generate_length=23, return_latents=True)
    alone = hear(case.engine.submit(twin))
    streams = [case.engine.submit(twin), *(case.engine.submit(r) for r in requests[:4])]
    time.sleep(0.05)
    streams += [case.engine.submit(twin), case.engine.submit(other)]
    first, *_, second, different = [hear(stream) for stream in streams]
    for ours in (first, second):
        assert_close(ours.latents, alone.latents, 1e-4, case.official.patch_size, "latents of a twin")
    assert np.abs(different.latents[: SHAPE.patch_size] - alone.latents[: SHAPE.patch_size]).max() > 0.1


def test_a_voice_is_reused_and_never_taken_for_another(open_case):
    """References of one length, then other words of the same voice: what is in the cache must be that very voice's."""
    case = open_case(SHAPE)
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((50 * SHAPE.patch_size, SHAPE.feat_dim)).astype(np.float32) for _ in range(2))
    b[: 35 * SHAPE.patch_size] = a[: 35 * SHAPE.patch_size]  # they part in the third block of 16 tokens
    cached = []
    for reference, text in [(a, "oh"), (b, "oh"), (a, "no"), (b, "so"), (a, "oh")]:
        seed, theirs = case.official.speak_clearly(text, seeds=range(20), reference=reference, max_length=6)
        request = Request(text=text, seed=seed, reference_latents=reference, max_generate_length=6, return_latents=True)
        ours = hear(case.engine.submit(request))
        assert_close(ours.latents, theirs.latents, 1e-4, SHAPE.patch_size, f"latents of {text!r}")
        cached.append(ours.stats["cached_tokens"])
    assert cached == [0, 32, 48, 48, 48]


def test_a_drawn_seed_is_reported_and_gives_the_same_again(open_case):
    engine = open_case(SHAPE).engine
    first = hear(engine.submit(Request(text="oh", max_generate_length=6, return_latents=True)))
    seed = first.stats["seed"]
    assert 0 <= seed < 2**53
    again = hear(engine.submit(Request(text="oh", seed=seed, max_generate_length=6, return_latents=True)))
    assert_close(again.latents, first.latents, 1e-4, SHAPE.patch_size, "latents")
    assert hear(engine.submit(Request(text="oh", max_generate_length=1))).stats["seed"] != seed


def test_the_engine_draws_the_noise_of_the_seed(open_case):
    """With one Euler step, which is zero, a patch is its noise: bit for bit, for every stream of a batch."""
    case = open_case(Shape("noise", seed=5, stop_offset=1e3), inference_timesteps=1, realtime=False)
    seeds = [0, 1, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1]
    streams = [
        case.engine.submit(
            Request(
                text="oh",
                seed=seed,
                temperature=0.5 + 0.5 * (index % 2),
                max_generate_length=9 + index,
                return_latents=True,
            )
        )
        for index, seed in enumerate(seeds)
    ]
    for index, (seed, stream) in enumerate(zip(seeds, streams, strict=True)):
        steps = torch.arange(9 + index)
        noise = patch_noise(torch.full_like(steps, seed), steps, SHAPE.patch_size, SHAPE.feat_dim)
        expected = (noise * (0.5 + 0.5 * (index % 2))).transpose(1, 2).reshape(-1, SHAPE.feat_dim)
        np.testing.assert_array_equal(hear(stream).latents, expected.numpy())
