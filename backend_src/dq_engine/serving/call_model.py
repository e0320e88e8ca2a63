"""What the models have in common whose requests are calls of another model's engine."""

import json
import logging
from collections.abc import Callable

import numpy as np

from dq_engine.errors import RequestError
from dq_engine.logs import configure
from dq_engine.serving.control_client import ControlClient, control_address
from dq_engine.serving.control_protocol import ControlCall, ControlResult
from dq_engine.serving.request_parser import refuse_parameters

logger = logging.getLogger(__name__)


class CallModel:
    """Takes Triton's requests, passes them on as calls, and has them answered on threads of the client's.

    Args:
        args: of the model's `initialize`.
        threads, max_waiting: of the `ControlClient`.
        make_call: a call from a request's inputs by name; raises RequestError.
        respond: answers through a response sender.
    """

    def __init__(
        self,
        args: dict[str, str],
        threads: int,
        max_waiting: int,
        make_call: Callable[[dict[str, np.ndarray]], ControlCall],
        respond: Callable[[object, ControlResult | RequestError], None],
    ) -> None:
        configure("info")
        parameters = json.loads(args["model_config"])["parameters"]
        address = control_address({name: value["string_value"] for name, value in parameters.items()})
        self._client = ControlClient(*address, threads, max_waiting)
        self._make_call, self._respond = make_call, respond

    def execute(self, requests: list) -> None:
        """Take requests; returns before they are answered."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                refuse_parameters(json.loads(request.parameters()))
                inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                self._client.submit(
                    self._make_call(inputs), lambda answer, sender=sender: self._respond(sender, answer)
                )
            except RequestError as error:
                self._respond(sender, error)
            except Exception as error:
                logger.exception("taking a request failed")
                self._respond(sender, RequestError("INTERNAL", f"taking the request failed: {error}"))

    def stop(self) -> None:
        """Take no more."""
        self._client.stop()
