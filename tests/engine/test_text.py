"""Text becomes the tokens that the official package makes of it: white space, Chinese words, the control."""

import pytest
from reference.checkpoints import SHAPES
from reference.listening import assert_close, hear

from dq_engine.engine import Request

TEXTS = {
    "white space": " oh \n\n no\t\u3000so\u00a0 ",
    "Chinese words": "你好世界",
    "a Chinese word inside": "ok 你好, 今天 我们go",
    "a part of a Chinese word": "你 好好世",
    "punctuation": '"oh" - (no); so? 50% & more!',
    "characters that it does not know": "naïve 🎉 日本 مرحبا",
    "special tokens as text": "<s>oh</s> <0x41> <unk>",
    "parentheses of its own": "(low)oh",
}


@pytest.fixture(scope="module")
def case(open_case):
    return open_case(SHAPES[1], realtime=False)


def compare(case, ours: dict, theirs: dict, text: str) -> int:
    """Tokens of the prompt; what was generated must be what the official model generates."""
    seed, spoken = case.official.speak_clearly(text, seeds=range(20), max_length=6, **theirs)
    request = Request(text=text, seed=seed, max_generate_length=6, return_latents=True, **ours)
    result = hear(case.engine.submit(request))
    assert_close(result.latents, spoken.latents, 1e-4, case.official.patch_size, repr(text))
    return result.stats["prompt_tokens"]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_text(case, text):
    compare(case, {}, {}, text)


@pytest.mark.parametrize("control", ["low", "  a low \n voice ", "你好", "(slow)"])
def test_control(case, control):
    """The official command line strips it and puts it in parentheses before the text."""
    tokens = compare(case, {"control": control}, {"control": control.strip()}, "oh")
    assert tokens > len(case.official.tokens("oh")) + 1


@pytest.mark.parametrize("prompt_text", ["so", " so  it\nwas ", "你好世界 "])
def test_prompt_text(case, prompt_text, prompt_wav):
    """It goes before the text as it is; only the text's white space is collapsed."""
    prompt = case.official.encode(prompt_wav, "prompt")
    ours = {"prompt_text": prompt_text, "prompt_latents": prompt}
    tokens = compare(case, ours, {"prompt": (prompt_text, prompt)}, " oh  no")
    patches = len(prompt) // case.official.patch_size
    assert tokens == len(case.official.tokens(prompt_text + " oh no")) + 1 + patches


def test_chinese_words_are_split(case):
    """The tokenizer has tokens for whole words; four characters must be four tokens, and "start of audio" a fifth."""
    tokenizer = case.official.model.text_tokenizer.tokenizer
    assert len(tokenizer.tokenize("你好世界")) == 2
    assert compare(case, {}, {}, "你好世界") == 5


def test_white_space_is_collapsed(case):
    once, many = (
        hear(case.engine.submit(Request(text=text, seed=3, max_generate_length=6, return_latents=True)))
        for text in ("oh no so", "oh\n\n no \t so")
    )
    assert_close(many.latents, once.latents, 1e-4, case.official.patch_size, "latents")


def test_tokens_of_a_reference_and_a_prompt(case, reference_wav, prompt_wav):
    """[start, reference, end] text, start of audio, prompt."""
    reference, prompt = case.official.encode(reference_wav, "reference"), case.official.encode(prompt_wav, "prompt")
    ours = {"reference_latents": reference, "prompt_text": "so", "prompt_latents": prompt}
    tokens = compare(case, ours, {"reference": reference, "prompt": ("so", prompt)}, " oh")
    patches = (len(reference) + len(prompt)) // case.official.patch_size
    assert tokens == 2 + patches + len(case.official.tokens("so oh")) + 1
