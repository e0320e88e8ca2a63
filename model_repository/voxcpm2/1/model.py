"""The Triton face of the engine: tensors in, a request to the engine worker, audio out. No engine logic lives here."""

import json
import logging
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError
from dq_engine.serving.cancel_watcher import CancelWatcher
from dq_engine.serving.messages import Failed, Finished, StreamMessage
from dq_engine.serving.parent_watch import end_with_parent
from dq_engine.serving.request_parser import parse_request
from dq_engine.serving.supervisor import Supervisor, WorkerStartError

TTFB_BUCKETS_S = [0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0]


class TritonPythonModel:
    """One thin instance; the engine runs in a worker process."""

    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        model_config = json.loads(args["model_config"])
        settings = {name: value["string_value"] for name, value in model_config["parameters"].items()}
        if settings.get("model", "").startswith("."):
            settings["model"] = str((Path(args["model_repository"]) / settings["model"]).resolve())
        config = EngineConfig.from_parameters(settings)
        self._name, self._was_served = args["model_name"], False
        self._metrics = Metrics(args["model_name"], args["model_version"], workers=1)
        self._watcher = CancelWatcher()
        self._supervisor = Supervisor([config], self._heartbeat)
        end_with_parent(self._supervisor.kill)
        try:
            self._supervisor.start()
        except WorkerStartError as error:
            raise pb_utils.TritonModelException(f"the engine did not start: {error}") from None

    def execute(self, requests: list) -> None:
        self._was_served = True
        for request in requests:
            stream = ResponseStream(request.get_response_sender(), self._metrics)
            try:
                inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                parsed = parse_request(inputs, json.loads(request.parameters()))
                stream.output_format = parsed.output_format
                routed = self._supervisor.submit(
                    parsed.request, parsed.output_format, parsed.sample_rate, parsed.stream, stream.on_message
                )
            except RequestError as error:
                stream.fail(error.code, error.message)
            except Exception as error:
                logging.getLogger(__name__).exception("taking a request failed")
                stream.fail("INTERNAL", f"taking the request failed: {error}")
            else:
                stream.worker = routed.worker
                self._watcher.watch(stream, routed.cancel)

    def _heartbeat(self, worker: int, snapshot: dict | None) -> None:
        """Once a second, on the supervisor's thread."""
        self._metrics.update(worker, snapshot)
        # Before it unloads a model or stops, Triton waits for running streams, and for ever for one that its client
        # cancelled just after its end. It calls nothing meanwhile, and may crash when its exit timeout is over (seen
        # with 2.51). So the streams and the worker are ended as soon as the model is on its way out.
        # (Asked before the model is served, tritonserver may crash; a request is the first sign that it is.)
        if snapshot is not None and self._was_served and not self._is_served():
            self._supervisor.begin_stop()

    def _is_served(self) -> bool:
        """False while the model is unloaded and while the server stops."""
        try:
            return pb_utils.is_model_ready(self._name)
        except pb_utils.TritonModelException:
            return False

    def finalize(self) -> None:
        self._supervisor.stop()
        self._watcher.stop()


class ResponseStream:
    """The responses to one request.

    Messages come on the supervisor's thread; the cancel watcher asks for cancellation on its own.
    """

    def __init__(self, sender, metrics: "Metrics") -> None:
        self.output_format = "f32"
        self.worker = 0
        self._sender, self._metrics = sender, metrics
        self._arrived = time.monotonic()
        self._first_sent = False
        # After the final response the sender must not be asked for anything: the server has freed what it points to.
        self._lock = threading.Lock()
        self.closed = False

    def on_message(self, message: StreamMessage) -> None:
        if isinstance(message, Failed):
            self.fail(message.code, message.message)
            return
        tensors = [pb_utils.Tensor("sample_rate", np.array([message.sample_rate], np.int32))]
        if self.output_format == "f32":
            tensors.append(pb_utils.Tensor("audio", np.frombuffer(message.audio, np.float32)))
        else:
            tensors.append(pb_utils.Tensor("audio_bytes", np.array([message.audio], np.object_)))
        if isinstance(message, Finished):
            tensors.append(_string("finish_reason", message.finish_reason))
            tensors.append(_string("stats", json.dumps(message.stats)))
            if message.latents is not None:
                tensors.append(pb_utils.Tensor("latents", message.latents))
        self._send(pb_utils.InferenceResponse(tensors), last=isinstance(message, Finished))
        if not self._first_sent:
            self._first_sent = True
            self._metrics.first_audio(self.worker, time.monotonic() - self._arrived)

    def fail(self, code: str, message: str) -> None:
        """End with an error. Its text starts with the code, because a gRPC stream carries no code."""
        # The Python backend names its codes as RequestError does.
        error = pb_utils.TritonError(f"{code}: {message}", getattr(pb_utils.TritonError, code))
        self._send(pb_utils.InferenceResponse(error=error), last=True)

    def is_cancelled(self) -> bool:
        """Whether the client has left; a round trip to the server."""
        with self._lock:
            return not self.closed and self._sender.is_cancelled()

    def _send(self, response, last: bool) -> None:
        with self._lock:
            self.closed = last
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)


class Metrics:
    """What the server's metrics endpoint says of the streams. Every call is a round trip to the server."""

    def __init__(self, model: str, version: str, workers: int) -> None:
        labels = [{"model": model, "version": version, "worker": str(index)} for index in range(workers)]
        family, kind = pb_utils.MetricFamily, pb_utils.MetricFamily
        active = family(name="voxcpm2_active_streams", description="Streams that are being spoken", kind=kind.GAUGE)
        queued = family(name="voxcpm2_queued_streams", description="Requests that wait for a slot", kind=kind.GAUGE)
        ttfb = family(
            name="voxcpm2_ttfb_seconds", description="Request to first audio, in the server", kind=kind.HISTOGRAM
        )
        self._families = [active, queued, ttfb]  # a family that is collected takes its metrics along
        self._active = [active.Metric(labels=label) for label in labels]
        self._queued = [queued.Metric(labels=label) for label in labels]
        self._ttfb = [ttfb.Metric(labels=label, buckets=TTFB_BUCKETS_S) for label in labels]

    def update(self, worker: int, snapshot: dict | None) -> None:
        self._active[worker].set(snapshot["active"] if snapshot else 0)
        self._queued[worker].set(snapshot["queued"] if snapshot else 0)

    def first_audio(self, worker: int, seconds: float) -> None:
        self._ttfb[worker].observe(seconds)


def _string(name: str, text: str):
    return pb_utils.Tensor(name, np.array([text.encode()], np.object_))
