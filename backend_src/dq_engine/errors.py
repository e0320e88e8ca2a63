"""The errors that leave the engine, each with a code that clients can act on."""

from typing import Literal

ErrorCode = Literal["INVALID_ARG", "NOT_FOUND", "ALREADY_EXISTS", "UNAVAILABLE", "CANCELLED", "INTERNAL"]


class RequestError(Exception):
    """One request failed; nobody else is affected.

    `str(error)` starts with the code's name, because a gRPC stream carries an error's message but not its code.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        message = as_unicode(message)
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


class CheckpointError(Exception):
    """A checkpoint that cannot be served; the message says what is wrong with it and how to mend it."""
