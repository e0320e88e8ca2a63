"""When a stream ends: the official guard, minimum and maximum, with models that always or never want to stop."""

import dataclasses

import pytest
from reference.checkpoints import SHAPES
from reference.listening import assert_close, hear

from dq_engine.engine import Request, RequestError

ALWAYS = dataclasses.replace(SHAPES[1], name="always-stops", stop_offset=-1e3)
NEVER = dataclasses.replace(SHAPES[1], name="never-stops", stop_offset=1e3)
MAX_LENGTH = 512  # of these checkpoints, in config.json


@pytest.fixture(scope="module")
def always(open_case):
    return open_case(ALWAYS, realtime=False)


@pytest.fixture(scope="module")
def never(open_case):
    return open_case(NEVER, realtime=False)


def compare(case, ours: dict, theirs: dict) -> tuple[int, str]:
    """Patches and finish reason of "oh no", which must be the official model's."""
    seed, spoken = case.official.speak_clearly("oh no", seeds=range(20), **theirs)
    result = hear(case.engine.submit(Request(text="oh no", seed=seed, return_latents=True, **ours)))
    assert_close(result.latents, spoken.latents, 1e-4, case.official.patch_size, "latents")
    assert result.finish_reason == spoken.finish_reason
    return result.stats["patches"], result.finish_reason


@pytest.mark.parametrize(("minimum", "patches"), [(None, 4), (1, 3), (2, 4), (3, 5), (10, 12)])
def test_minimum_has_the_official_meaning(always, minimum, patches):
    """A stop is obeyed after patch i, counted from 0, if i > minimum: 2 means at least 4 patches."""
    official = {} if minimum is None else {"min_length": minimum}
    assert compare(always, {"min_generate_length": minimum}, official) == (patches, "stop")


@pytest.mark.parametrize(("minimum", "maximum"), [(None, 1), (None, 2), (None, 3), (1, 1), (1, 2), (2, 3), (5, 5)])
def test_maximum_goes_before_the_minimum(always, minimum, maximum):
    official = {"max_length": maximum} | ({} if minimum is None else {"min_length": minimum})
    ours = {"min_generate_length": minimum, "max_generate_length": maximum}
    assert compare(always, ours, official) == (maximum, "length")


def test_a_stop_at_the_very_maximum_is_a_stop(always):
    assert compare(always, {"max_generate_length": 4}, {"max_length": 4}) == (4, "stop")


@pytest.mark.parametrize("maximum", [1, 7, 60])
def test_maximum_replaces_the_guard(never, maximum):
    """The guard of "oh no" is 46."""
    assert compare(never, {"max_generate_length": maximum}, {"max_length": maximum}) == (maximum, "length")


def test_guard_on_length(never, prompt_wav, reference_wav):
    """6 patches for each token of the target text, and 10; the control's tokens count, the prompt's do not."""
    official = never.official
    assert (len(official.tokens("oh no")), len(official.tokens("(low)oh no"))) == (6, 11)
    prompt, reference = official.encode(prompt_wav, "prompt"), official.encode(reference_wav, "reference")
    both = {"prompt_text": "so it was", "prompt_latents": prompt, "reference_latents": reference}
    assert compare(never, {}, {}) == (46, "length")
    assert compare(never, {"control": "low"}, {"control": "low"}) == (76, "length")
    assert compare(never, {"reference_latents": reference}, {"reference": reference}) == (46, "length")
    assert compare(never, both, {"prompt": ("so it was", prompt), "reference": reference}) == (46, "length")


def test_guard_of_a_single_token(never):
    assert len(never.official.tokens("o")) == 2
    assert hear(never.engine.submit(Request(text="o"))).stats["patches"] == 22


def test_the_room_in_the_model_bounds_the_guard(never):
    """One token a character and one for the start of audio; what is left is generated, to the last place."""
    text = "ab " * 150
    tokens = len(never.official.tokens(text)) + 1
    result = hear(never.engine.submit(Request(text=text)))
    assert result.stats["prompt_tokens"] == tokens
    assert (result.stats["patches"], result.finish_reason) == (MAX_LENGTH - tokens, "length")
    exact = Request(text=text, max_generate_length=MAX_LENGTH - tokens)
    assert hear(never.engine.submit(exact)).stats["patches"] == MAX_LENGTH - tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "oh", "max_generate_length": 509}, r"max_generate_length: 509 .* 4 tokens .*max_model_len \(512\)"),
        ({"text": "oh", "min_generate_length": 509}, r"text: .* 4 tokens and min_generate_length 509.*512"),
        ({"text": "ab " * 200}, r"text: the prompt has \d+ tokens, max_model_len is 512"),
    ],
)
def test_what_does_not_fit_is_refused(never, fields, message):
    with pytest.raises(RequestError, match=f"^INVALID_ARG: {message}"):
        never.engine.submit(Request(**fields))


def test_each_request_of_a_batch_has_its_own_lengths(always, never):
    wanted = [(always, [(3, 30, 5), (9, 30, 11), (20, 21, 21)]), (never, [(1, 5, 5), (1, 17, 17), (2, 11, 11)])]
    for case, lengths in wanted:
        streams = [
            case.engine.submit(Request(text="oh", seed=1, min_generate_length=low, max_generate_length=high))
            for low, high, _ in lengths
        ]
        assert [hear(stream).stats["patches"] for stream in streams] == [patches for *_, patches in lengths]
