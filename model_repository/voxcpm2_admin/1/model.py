"""Administration: passes operations to the process that voxcpm2 runs in, over its control socket."""

import sys

# The stub looks for modules first where the server was started: a json.py that lies there is not Python's.
sys.path[:] = filter(None, sys.path)

import json
import math

import numpy as np
import triton_python_backend_utils as pb_utils

from dq_engine.errors import RequestError, invalid
from dq_engine.request import MAX_ENCODED_AUDIO_BYTES
from dq_engine.serving.call_model import CallModel
from dq_engine.serving.control_client import json_arguments
from dq_engine.serving.control_protocol import ControlCall, ControlResult
from dq_engine.serving.request_parser import scalar

THREADS, MAX_WAITING = 8, 24
TIMEOUT_S = 300.0
LIMITS = {"payload": MAX_ENCODED_AUDIO_BYTES, "operation": 64, "token": 4096}


class TritonPythonModel:
    """One thin instance. `execute` returns at once; the answer comes on a thread of the client's."""

    def initialize(self, args: dict[str, str]) -> None:
        self._calls = CallModel(args, THREADS, MAX_WAITING, _call, _respond)

    def execute(self, requests: list) -> None:
        self._calls.execute(requests)

    def finalize(self) -> None:
        self._calls.stop()


def _call(inputs: dict[str, np.ndarray]) -> ControlCall:
    fields = {}
    for name, array in inputs.items():
        fields[name] = scalar(name, array, np.object_, text=name in ("operation", "token"))
        if len(fields[name]) > LIMITS.get(name, math.inf):
            raise invalid(name, f"has {len(fields[name])} bytes, the limit is {LIMITS[name]}")
    fields["arguments"] = json_arguments(fields["arguments"])
    return ControlCall(**fields, timeout_s=TIMEOUT_S)


def _respond(sender, answer: ControlResult | RequestError) -> None:
    if isinstance(answer, RequestError):
        error = pb_utils.TritonError(str(answer), getattr(pb_utils.TritonError, answer.code))
        response = pb_utils.InferenceResponse(error=error)
    else:
        result = np.array([json.dumps(answer.value).encode()], np.object_)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("result", result)])
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
