"""What the Python interface raises: `RequestError`s that are also the built-in errors its users catch."""

from dq_engine.errors import RequestError


class InvalidRequestError(RequestError, ValueError):
    """The request is wrong, or names a prompt or an adapter that is not there."""


class FailedRequestError(RequestError, RuntimeError):
    """The pool could not serve the request: overload (UNAVAILABLE), a worker that died or broke (INTERNAL), a stop."""


_NAMES = {"text": "target_text", "reference_latents": "ref_audio_latents", "lora": "lora_name", "audio": "wav"}
"""The engine's fields that have another name in this interface."""


def to_raise(error: RequestError) -> RequestError:
    """The same error as one of the two above."""
    if error.code not in ("INVALID_ARG", "NOT_FOUND"):
        return FailedRequestError(error.code, error.message)
    field, colon, rest = error.message.partition(":")
    return InvalidRequestError(error.code, _NAMES.get(field, field) + colon + rest)
