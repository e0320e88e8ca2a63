"""The errors that leave the engine, each with a code that clients can act on."""

from typing import Literal

ErrorCode = Literal["INVALID_ARG", "NOT_FOUND", "ALREADY_EXISTS", "UNAVAILABLE", "CANCELLED", "INTERNAL"]

MAX_MESSAGE = 640
"""Characters of a message. gRPC drops one of more than 8 KiB, in which a character may take 12 bytes."""


class RequestError(Exception):
    """One request failed; nobody else is affected.

    `str(error)` starts with the code's name, because a gRPC stream carries an error's message but not its code. What is
    too long for its way, a name that somebody gave, say, is left out of the message's middle.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        message = _short(as_unicode(message).replace("\0", "\\0"))  # C ends texts at a NUL
        super().__init__(f"{code}: {message}")
        self.code: ErrorCode = code
        self.message = message

    def __reduce__(self):
        return type(self), (self.code, self.message)


def invalid(field: str, message: str) -> RequestError:
    """An INVALID_ARG error about one field of a request, to be raised."""
    return RequestError("INVALID_ARG", f"{field}: {message}")


def as_unicode(text: str) -> str:
    """Text that can be sent: a name out of a file or of the system may hold half of a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()


def _short(text: str) -> str:
    if len(text) <= MAX_MESSAGE:
        return text
    gap = " ... "
    head = (MAX_MESSAGE - len(gap)) // 2
    return text[:head] + gap + text[head + len(gap) - MAX_MESSAGE :]


class CheckpointError(Exception):
    """A checkpoint that cannot be served; the message says what is wrong with it and how to mend it."""
