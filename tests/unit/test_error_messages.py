"""What an error says, in a form that reaches whoever asked."""

import pickle

import pytest

from dq_engine.errors import MAX_MESSAGE, RequestError, invalid

GRPC_LIMIT_BYTES = 8192


def test_code_and_message():
    error = invalid("text", "is empty")
    assert (error.code, error.message, str(error)) == ("INVALID_ARG", "text: is empty", "INVALID_ARG: text: is empty")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_long_message_keeps_both_ends():
    message = invalid("path", f'"{"x" * 100_000}" is not below /adapters').message
    assert len(message) == MAX_MESSAGE
    assert message.startswith('path: "xxx') and " ... " in message and message.endswith('xxx" is not below /adapters')
    assert invalid("a", "b" * (MAX_MESSAGE - 3)).message == "a: " + "b" * (MAX_MESSAGE - 3)
    assert RequestError("INTERNAL", message).message == message  # passed on by another process


def test_every_message_is_short_enough_for_grpc():
    """Which writes a byte that is not ASCII as three."""
    assert 3 * len(str(RequestError("ALREADY_EXISTS", "😀" * 10_000)).encode()) < GRPC_LIMIT_BYTES


@pytest.mark.parametrize(("given", "said"), [("a\ud800b", "a\\ud800b"), ("a\0b", "a\\0b"), ("a\nb", "a\nb")])
def test_what_cannot_be_sent_is_spelled_out(given, said):
    assert RequestError("NOT_FOUND", given).message == said
