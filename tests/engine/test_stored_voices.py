"""Stored voices in the engine: what they give, whom they concern, and that their reference stays in the KV cache."""

import numpy as np
import pytest
from reference.checkpoints import SHAPES

from dq_engine.engine import Request

RANDOM = np.random.default_rng(5)
REFERENCE = RANDOM.standard_normal((4 * 38, 64)).astype(np.float32)
PROMPT = RANDOM.standard_normal((4 * 3, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def engine(open_case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("voices")
    engine = open_case(SHAPES[0], voices_dir=str(folder), num_kvcache_blocks=12, max_num_seqs=2).engine
    engine.voices.register("reference", REFERENCE)
    engine.voices.register("prompt", prompt_latents=PROMPT, prompt_text="a word")
    return engine


def speak(engine, **fields):
    settings = {"text": "hello there", "seed": 1, "max_generate_length": 3, "return_latents": True}
    return list(engine.submit(Request(**settings | fields)))[-1]


def test_a_voice_gives_what_its_latents_give(engine):
    prompt = {"prompt_latents": PROMPT, "prompt_text": "a word"}
    for fields, same in [
        ({"voice": "reference"}, {"reference_latents": REFERENCE}),
        ({"voice": "prompt"}, prompt),
        ({"voice": "reference", **prompt}, {"reference_latents": REFERENCE, **prompt}),
        ({"voice": "prompt", "reference_latents": REFERENCE}, {"reference_latents": REFERENCE, **prompt}),
    ]:
        np.testing.assert_allclose(speak(engine, **fields).latents, speak(engine, **same).latents, atol=1e-5)


def test_what_does_not_go_with_a_voice(engine):
    with pytest.raises(Exception, match="^INVALID_ARG: control: cannot be combined with a prompt$"):
        speak(engine, voice="prompt", control="slow")
    assert speak(engine, voice="reference", control="slow").finish_reason == "length"
    with pytest.raises(Exception, match='^INVALID_ARG: prompt_text: cannot be combined with the voice "prompt"'):
        speak(engine, voice="prompt", prompt_text="a word")


def test_its_reference_stays_in_the_kv_cache(engine):
    speak(engine, voice="reference")
    for seed in range(100, 108):
        other = np.random.default_rng(seed).standard_normal(REFERENCE.shape).astype(np.float32)
        assert speak(engine, reference_latents=other).stats["cached_tokens"] == 0
    # The full blocks, of 16 tokens, of 38 patches and the two tokens around them.
    assert speak(engine, voice="reference", text="another text").stats["cached_tokens"] == 32


def test_a_reference_of_half_a_minute_costs_less_than_a_block_after_its_first_use(open_case, tmp_path):
    """Counted in the tokens that the language models take in, beside those of a request without a voice."""
    engine = open_case(SHAPES[0], voices_dir=str(tmp_path), num_kvcache_blocks=40, max_num_seqs=1).engine
    reference = RANDOM.standard_normal((4 * 188, 64)).astype(np.float32)
    engine.voices.register("long", reference)

    def taken_in(text: str, **fields) -> int:
        before = engine.snapshot()["prefill_tokens"]
        speak(engine, text=text, **fields)
        return engine.snapshot()["prefill_tokens"] - before

    alone, first, again = taken_in("one text"), taken_in("two text", voice="long"), taken_in("six text", voice="long")
    assert first == alone + 188 + 2
    assert alone <= again < alone + 16


def test_its_prompt_is_encoded_once(engine, monkeypatch):
    """Whatever is said with it, and beside whatever reference; the latents are those of a prompt that is not kept."""
    prompt, encoded = np.random.default_rng(6).standard_normal((4 * 40, 64)).astype(np.float32), []
    engine.voices.register("long", prompt_latents=prompt, prompt_text="a word")
    encode = engine._runner._encode

    def counted(patches, adapters=None):
        encoded.append(len(patches))
        return encode(patches, adapters)

    monkeypatch.setattr(engine._runner, "_encode", counted)
    given = {"prompt_latents": prompt, "prompt_text": "a word"}
    for text, beside, expected in (
        ("one text", {}, [40]),
        ("another text", {}, []),
        ("a third text", {"reference_latents": REFERENCE[: 4 * 3]}, [3]),
    ):
        encoded.clear()
        spoken = speak(engine, text=text, voice="long", **beside)
        assert encoded == expected
        np.testing.assert_allclose(spoken.latents, speak(engine, text=text, **given, **beside).latents, atol=1e-5)


def test_without_a_folder_there_are_no_voices(open_case):
    engine = open_case(SHAPES[0], max_num_seqs=1).engine
    assert engine.voices is None
    with pytest.raises(Exception, match='^NOT_FOUND: voice: there is no stored voice named "ann"$'):
        engine.submit(Request(text="hello", voice="ann"))
