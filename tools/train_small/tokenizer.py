"""The small model's tokenizer: a byte is a token, a space another; ids 101 to 104 are left to the audio markers."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
AUDIO_START, AUDIO_END, REFERENCE_START, REFERENCE_END = 101, 102, 103, 104
_FIRST_BYTE, _SPACE = 128, 384


def tokens(text: str) -> list[int]:
    """The ids of a text, a space before it included, as the tokenizer files give them."""
    ids = [_SPACE]
    for character in text:
        ids += [_SPACE] if character == " " else [_FIRST_BYTE + byte for byte in character.encode()]
    return ids


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": _SPACE}
    vocabulary |= {f"<0x{byte:02X}>": _FIRST_BYTE + byte for byte in range(256)}
    used = set(vocabulary.values())
    vocabulary |= {f"<reserved_{token}>": token for token in range(VOCABULARY) if token not in used}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "add_eos_token": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
