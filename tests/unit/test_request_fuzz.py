"""Whatever a client sends, the parser and the checks behind it give a request or a RequestError that names a field."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dq_engine.audio.output import OutputEncoder
from dq_engine.errors import RequestError
from dq_engine.request import Request
from dq_engine.serving.messages import Submit, decode_to_worker, encode
from dq_engine.serving.request_parser import ParsedRequest, parse_request
from dq_engine.serving.signature import INPUTS

NAMES = [tensor.name for tensor in INPUTS]
BYTES = st.one_of(
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(max_size=40),
    st.sampled_from([b"", b"\x00", b" ", b"a" * 5000, b"f32", b"wav_base64", b"opus", b"RIFF", "é🙂".encode()]),
)
ARRAYS = st.one_of(
    BYTES.map(lambda value: np.array([value], np.object_)),
    st.lists(BYTES, max_size=3).map(lambda values: np.array(values, np.object_)),
    st.floats(width=32).map(lambda value: np.array([value], np.float32)),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: np.array([value], np.int64)),
    st.integers(-(2**31), 2**31 - 1).map(lambda value: np.array([value], np.int32)),
    st.integers(-2, 50_000).map(lambda value: np.array([value], np.int32)),
    st.booleans().map(lambda value: np.array([value])),
    hnp.arrays(
        np.float32, st.tuples(st.integers(0, 12), st.sampled_from([64, 64, 1, 63])), elements=st.floats(width=32)
    ),
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int8, np.uint64, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
)
RIGHT = {
    "TYPE_STRING": BYTES.map(lambda value: np.array([value], np.object_)),
    "TYPE_FP32": st.floats(-1, 11, width=32).map(lambda value: np.array([value], np.float32)),
    "TYPE_INT64": st.integers(-1, 2**63 - 1).map(lambda value: np.array([value], np.int64)),
    "TYPE_INT32": st.integers(-1, 50_000).map(lambda value: np.array([value], np.int32)),
    "TYPE_BOOL": st.booleans().map(lambda value: np.array([value])),
}


@st.composite
def requests(draw) -> tuple[dict[str, np.ndarray], dict]:
    """Inputs and parameters: mostly of the right names and types, so that some of them are good."""
    inputs = {}
    for tensor in draw(st.lists(st.sampled_from(INPUTS), max_size=5)):
        inputs[tensor.name] = draw(ARRAYS if draw(st.integers(0, 4)) == 0 else RIGHT[tensor.data_type])
    if draw(st.integers(0, 9)):
        inputs["text"] = np.array([draw(st.text(min_size=1, max_size=20).map(str.encode))], np.object_)
    if not draw(st.integers(0, 19)):
        inputs[draw(st.text(max_size=10))] = draw(ARRAYS)
    parameters = draw(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=5), max_size=1))
    return inputs, parameters if not draw(st.integers(0, 9)) else {}


def check(case: tuple[dict[str, np.ndarray], dict]) -> str:
    """What came of it: "good", or the field that is at fault."""
    inputs, parameters = case
    try:
        parsed = parse_request(inputs, parameters)
        parsed.request.validate(64, 4)
        OutputEncoder(parsed.output_format, 48_000, parsed.sample_rate or 48_000)
    except RequestError as error:
        assert error.code in ("INVALID_ARG", "NOT_FOUND")
        field, colon, told = error.message.partition(": ")
        assert colon
        assert told
        given = [name.replace("\0", "\\0") for name in (*inputs, *parameters)]
        assert field in (*NAMES, *given) or any(error.message.startswith(name) for name in given)
        assert len(error.message) < 400, "an error repeats no more than a little of what was sent"
        return field
    _check_good(parsed, inputs)
    return "good"


def _check_good(parsed: ParsedRequest, inputs: dict[str, np.ndarray]) -> None:
    """Nothing that was sent is lost or changed, neither by the parser nor on the way to the worker."""
    message = Submit(1, parsed.request, parsed.output_format, parsed.sample_rate, parsed.stream)
    arrived = decode_to_worker(encode(message))
    values = {**vars(arrived.request), "output_format": arrived.output_format, "sample_rate": arrived.sample_rate}
    values["stream"] = arrived.stream
    for name, value in values.items():
        if name not in inputs:
            default = getattr(Request(text=""), name, {"output_format": "f32", "stream": True}.get(name))
            assert name == "text" or value == default
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, inputs[name])
        else:
            sent = inputs[name][0]
            assert value == (sent.decode() if isinstance(value, str) else sent)


FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_requests():
    """Some of them are good, and nearly every field is at fault once: they try what they seem to."""
    found = set()

    @settings(max_examples=400, derandomize=True, database=None, **FUZZ)
    @given(requests())
    def run(case):
        found.add(check(case))

    run()
    assert "good" in found
    assert len(set(NAMES) - found) <= 3


@pytest.mark.slow
@settings(max_examples=10_000, **FUZZ)
@given(requests())
def test_many_requests(case):
    check(case)


def test_long_names_are_not_repeated():
    for inputs, parameters in ({"x" * 10_000: np.zeros(1)}, {}), ({}, {"x" * 10_000: 1}):
        with pytest.raises(RequestError) as error:
            parse_request({"text": np.array([b"a"], np.object_), **inputs}, parameters)
        assert len(error.value.message) < 200
