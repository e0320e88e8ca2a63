"""What a caller asks for (`Request`) and what comes back (`Chunk`)."""

import math
import unicodedata
from dataclasses import dataclass

import numpy as np

from dq_engine.errors import RequestError, invalid

MAX_TEXT_CHARACTERS = 4096
MAX_AUDIO_BYTES = 16 * 2**20
# Base64 of it, in lines of 64 characters with CR LF, and a data URL's prefix.
MAX_ENCODED_AUDIO_BYTES = math.ceil(MAX_AUDIO_BYTES * 4 / 3 * 66 / 64) + 256
MIN_AUDIO_SECONDS, MAX_AUDIO_SECONDS = 0.1, 60.0
MAX_CFG, MAX_TEMPERATURE = 10.0, 2.0
# A seed drawn for the user must survive JSON, whose numbers are doubles.
MAX_DRAWN_SEED = 2**53


@dataclass(kw_only=True)
class Request:
    """One text to speak. The field names are those of the Triton contract.

    Args:
        text: what to say, 1 to 4,096 characters.
        control: description of a voice or a style; not together with a prompt.
        prompt_text: the words of the prompt, given together with its audio or latents.
        prompt_audio: a recording to continue: the bytes of an audio file, or base64 of them; 0.1 to 60 s.
        prompt_latents: the same, already encoded: float32 [frames, feat_dim], frames a multiple of the patch size.
        reference_audio: a recording of the voice to clone, as `prompt_audio`.
        reference_latents: the same, already encoded.
        cfg_value: weight of classifier-free guidance, 0 to 10.
        temperature: scale of the initial noise of every patch, 0 to 2.
        seed: key of the noise, at least 0; drawn and reported when absent.
        min_generate_length: with n, the model's stop is obeyed after n + 2 patches at the earliest, as in the official
            model; 2 by default.
        max_generate_length: most patches to make; replaces the guard of 6 x text tokens + 10.
        return_latents: hand the generated latents out with the last chunk.
        lora: name of a registered adapter to speak with.
        voice: name of a stored voice; brings a reference, a prompt or both.
    """

    text: str
    control: str | None = None
    prompt_text: str | None = None
    prompt_audio: bytes | None = None
    prompt_latents: np.ndarray | None = None
    reference_audio: bytes | None = None
    reference_latents: np.ndarray | None = None
    cfg_value: float = 2.0
    temperature: float = 1.0
    seed: int | None = None
    min_generate_length: int | None = None
    max_generate_length: int | None = None
    return_latents: bool = False
    lora: str | None = None
    voice: str | None = None

    @property
    def has_prompt(self) -> bool:
        return self.prompt_audio is not None or self.prompt_latents is not None

    def validate(self, feat_dim: int, patch_size: int) -> None:
        """Check everything that can be checked without decoding audio or tokenizing.

        Raises:
            RequestError: INVALID_ARG, naming the first field at fault and the limit that it broke.
        """
        check_text("text", self.text)
        if self.control is not None:
            check_text("control", self.control)
            if self.has_prompt:
                raise invalid("control", "cannot be combined with a prompt")
        if self.has_prompt != (self.prompt_text is not None):
            missing, given = ("prompt_text", "prompt audio") if self.has_prompt else ("prompt_audio", "prompt_text")
            raise invalid(missing, f"is required with {given}: a prompt is a recording and its words")
        for field in ("prompt_text", "voice", "lora"):
            if (text := getattr(self, field)) is not None:
                check_text(field, text)
        for kind in ("prompt", "reference"):
            audio, latents = getattr(self, f"{kind}_audio"), getattr(self, f"{kind}_latents")
            if audio is not None and latents is not None:
                raise invalid(f"{kind}_latents", f"cannot be combined with {kind}_audio")
            if audio is not None and not len(audio):
                raise invalid(f"{kind}_audio", "is empty")
            if latents is not None:
                check_latents(f"{kind}_latents", latents, feat_dim, patch_size)
        _check_range("cfg_value", self.cfg_value, 0.0, MAX_CFG)
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise invalid("seed", f"must be between 0 and 2^63 - 1, got {self.seed}")
        for field in ("min_generate_length", "max_generate_length"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise invalid(field, f"must be at least 1, got {value}")
        low, high = self.min_generate_length, self.max_generate_length
        if low is not None and high is not None and low > high:
            raise invalid("min_generate_length", f"must not exceed max_generate_length ({high}), got {low}")


def check_text(field: str, text: str) -> None:
    """Raises RequestError: INVALID_ARG, `text` is not 1 to MAX_TEXT_CHARACTERS characters of text."""
    if not text.strip():
        raise invalid(field, "is empty")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise invalid(field, f"has {len(text)} characters, the limit is {MAX_TEXT_CHARACTERS}")
    for index, character in enumerate(text):
        if unicodedata.category(character) in ("Cc", "Cs") and not character.isspace():
            raise invalid(field, f"has the control character U+{ord(character):04X} at position {index}")


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid(field, f"must be between {low:g} and {high:g}, got {value:g}")


def check_latents(field: str, latents: np.ndarray, feat_dim: int, patch_size: int) -> None:
    """Raises RequestError: INVALID_ARG, `latents` are not whole patches of finite numbers."""
    if latents.ndim != 2 or latents.shape[1] != feat_dim:
        raise invalid(field, f"must have shape [frames, {feat_dim}], got {list(latents.shape)}")
    if not len(latents) or len(latents) % patch_size:
        raise invalid(field, f"must have a multiple of {patch_size} frames and at least one, got {len(latents)}")
    if not np.isfinite(latents).all():
        raise invalid(field, "has values that are not finite")


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream. Exactly one chunk of a stream, its last, has a `finish_reason` or an `error`.

    Args:
        samples: float32 [n] at the model's sample rate; may be empty in the last chunk only.
        finish_reason: "stop" (by the model), "length" (the maximum was reached) or "cancelled".
        stats: seed, patches, audio_s, ttfb_ms, queue_ms, prompt_tokens, cached_tokens; on the last, if it finished.
        latents: float32 [frames, feat_dim], what was generated; on the last chunk when asked for.
        error: why the stream broke off.
    """

    samples: np.ndarray
    finish_reason: str | None = None
    stats: dict | None = None
    latents: np.ndarray | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
