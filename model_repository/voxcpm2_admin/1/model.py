"""Administration: passes operations to the process that voxcpm2 runs in, over its control socket."""

import json
import logging
import math

import numpy as np
import triton_python_backend_utils as pb_utils

from dq_engine.errors import RequestError, invalid
from dq_engine.request import MAX_ENCODED_AUDIO_BYTES
from dq_engine.serving.control_client import ControlClient, control_address, json_arguments
from dq_engine.serving.control_protocol import ControlCall, ControlResult
from dq_engine.serving.request_parser import refuse_parameters, scalar

THREADS, MAX_WAITING = 8, 24
TIMEOUT_S = 300.0
LIMITS = {"payload": MAX_ENCODED_AUDIO_BYTES, "operation": 64, "token": 4096}


class TritonPythonModel:
    """One thin instance. `execute` returns at once; the answer comes on a thread of the client's."""

    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        parameters = json.loads(args["model_config"])["parameters"]
        address = control_address({name: value["string_value"] for name, value in parameters.items()})
        self._client = ControlClient(*address, THREADS, MAX_WAITING)

    def execute(self, requests: list) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                refuse_parameters(json.loads(request.parameters()))
                inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                self._client.submit(_call(inputs), lambda answer, sender=sender: _respond(sender, answer))
            except RequestError as error:
                _respond(sender, error)
            except Exception as error:
                logging.getLogger(__name__).exception("taking a request failed")
                _respond(sender, RequestError("INTERNAL", f"taking the request failed: {error}"))

    def finalize(self) -> None:
        self._client.stop()


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
