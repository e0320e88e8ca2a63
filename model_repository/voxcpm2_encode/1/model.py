"""Recordings to latents: passes them to the engine worker of voxcpm2, over its control socket."""

import sys

# The stub looks for modules first where the server was started: a json.py that lies there is not Python's.
sys.path[:] = filter(None, sys.path)

import numpy as np
import triton_python_backend_utils as pb_utils

from dq_engine.errors import RequestError, invalid
from dq_engine.request import MAX_AUDIO_BYTES, MAX_ENCODED_AUDIO_BYTES
from dq_engine.serving.call_model import CallModel
from dq_engine.serving.control_protocol import ControlCall, ControlResult
from dq_engine.serving.request_parser import scalar

THREADS, MAX_WAITING = 16, 48
TIMEOUT_S = 60.0


class TritonPythonModel:
    """One thin instance. `execute` returns at once; the answer comes on a thread of the client's."""

    def initialize(self, args: dict[str, str]) -> None:
        self._calls = CallModel(args, THREADS, MAX_WAITING, _call, _respond)

    def execute(self, requests: list) -> None:
        self._calls.execute(requests)

    def finalize(self) -> None:
        self._calls.stop()


def _call(inputs: dict[str, np.ndarray]) -> ControlCall:
    audio = scalar("audio", inputs["audio"], np.object_, text=False)
    if len(audio) > MAX_ENCODED_AUDIO_BYTES:
        raise invalid("audio", f"has {len(audio)} bytes, the limit is {MAX_AUDIO_BYTES}")
    purpose = scalar("purpose", inputs["purpose"], np.object_)
    return ControlCall("encode", {"purpose": purpose}, audio, timeout_s=TIMEOUT_S)


def _respond(sender, answer: ControlResult | RequestError) -> None:
    if isinstance(answer, RequestError):
        response = pb_utils.InferenceResponse(
            error=pb_utils.TritonError(str(answer), getattr(pb_utils.TritonError, answer.code))
        )
    else:
        latents = np.frombuffer(answer.payload, np.float32).reshape(-1, 64)
        seconds = np.array([answer.value["seconds"]], np.float32)
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor("latents", latents), pb_utils.Tensor("seconds", seconds)]
        )
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
