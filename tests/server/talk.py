"""What the tests of this folder do with a server: inputs, one request on a gRPC stream of its own, metrics."""

import contextlib
import queue
import time
import urllib.request
from collections.abc import Callable

import numpy as np
import tritonclient.grpc as grpcclient
from contract_inputs import inputs
from triton_server import TritonServer
from tritonclient.utils import InferenceServerException

TEXT = "peter sells nine green toys"
SAMPLES_PER_PATCH = 7680
LONG = {"text": TEXT, "min_generate_length": 400, "max_generate_length": 400}
"""A request that goes on for 10 s and more, unless it is stopped."""
MEDIUM = LONG | {"min_generate_length": 120, "max_generate_length": 120}


def is_final(result) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


class Talk:
    """One request on a gRPC stream, by the synchronous client. Leaving the context closes the stream."""

    def __init__(
        self, server: TritonServer, fields: dict, request_id: str = "", parameters: dict | None = None
    ) -> None:
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self.client = grpcclient.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))
        self._unanswered = 0
        self.send(fields, request_id, parameters)

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def send(self, fields: dict, request_id: str = "", parameters: dict | None = None, outputs=None) -> None:
        self._unanswered += 1
        self.client.async_stream_infer(
            "voxcpm2", inputs(fields), outputs=outputs, request_id=request_id, parameters=parameters
        )

    def next(self, timeout: float = 60):
        """The next response.

        Raises:
            InferenceServerException: it is an error.
        """
        result, error = self._answers.get(timeout=timeout)
        self._unanswered -= error is not None or is_final(result)
        if error is not None:
            raise error
        return result

    def rest(self, timeout: float = 60) -> list:
        """The responses to the last."""
        results = [self.next(timeout)]
        while not is_final(results[-1]):
            results.append(self.next(timeout))
        return results

    def error(self, timeout: float = 20) -> str:
        """The message of the error that ends the stream, past the responses that came before."""
        while True:
            try:
                assert not is_final(self.next(timeout)), "it ended without an error"
            except InferenceServerException as error:
                return error.message()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the server may be gone
            # Triton 2.51 never frees a request that is cancelled just after its end, nor unloads its model.
            self.client.stop_stream(cancel_requests=self._unanswered > 0)
        self.client.close()


def speak(server: TritonServer, fields: dict, request_id: str = "") -> list:
    """All responses to one request."""
    with Talk(server, fields, request_id) as talk:
        return talk.rest()


def samples(results: list) -> np.ndarray:
    """The f32 audio of a stream's responses, float32 [n]."""
    return np.concatenate([result.as_numpy("audio") for result in results])


def metrics(server: TritonServer) -> dict[str, float]:
    """The server's voxcpm2 metrics: name and labels as they are printed -> value."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("voxcpm2_")}


LABELS = '{model="voxcpm2",version="1",worker="0"}'


def active_streams(server: TritonServer) -> float:
    return metrics(server)[f"voxcpm2_active_streams{LABELS}"]


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"not within {seconds} s: {what}"
        time.sleep(0.05)
