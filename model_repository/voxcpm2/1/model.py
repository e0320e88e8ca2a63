"""The Triton face of the engine: tensors in, a request to the engine worker, audio out. No engine logic lives here."""

import sys

# The stub looks for modules first where the server was started: a json.py that lies there is not Python's.
sys.path[:] = filter(None, sys.path)

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError
from dq_engine.logs import configure
from dq_engine.metrics import PREFIX, Definition, Metrics, Playback
from dq_engine.serving.administration import Administration
from dq_engine.serving.cancel_watcher import CancelWatcher
from dq_engine.serving.control_server import ControlServer
from dq_engine.serving.control_socket import ControlSocketError, socket_path
from dq_engine.serving.messages import Audio, Failed, Finished, StreamMessage
from dq_engine.serving.parent_watch import end_with_parent
from dq_engine.serving.request_log import RequestLog
from dq_engine.serving.request_parser import GRPC_MARK, ParsedRequest, parse_request
from dq_engine.serving.signature import INPUTS, OUTPUTS, Tensor
from dq_engine.serving.supervisor import RoutedStream, Supervisor, WorkerStartError

logger = logging.getLogger("dq_engine.model")

KEEP_ALIVE_S = 0.15


class TritonPythonModel:
    """One thin instance; the engines run in worker processes, one a device."""

    @staticmethod
    def auto_complete_config(config: "pb_utils.ModelConfig") -> "pb_utils.ModelConfig":
        """What a config.pbtxt leaves out; called when the model is loaded.

        Raises:
            ValueError: what it says of a tensor, of batching or of responses is not so; names it.
        """
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        given = config.as_dict()
        for kind, tensors in ("input", INPUTS), ("output", OUTPUTS):
            for name in {tensor["name"] for tensor in given[kind]} - {tensor.name for tensor in tensors}:
                raise ValueError(f"config.pbtxt: the model has no {kind} {name}")
        for tensor in INPUTS:
            config.add_input(_properties(tensor) | {"optional": tensor.name != "text"})
        for tensor in OUTPUTS:
            config.add_output(_properties(tensor))
        return config

    def initialize(self, args: dict[str, str]) -> None:
        try:
            self._start(args)
        except Exception as error:
            if path := os.environ.get("START_ERROR_FILE"):  # docker/entrypoint.sh's, which ends with it
                Path(path).write_text(f"{error}\n")
            raise

    def _start(self, args: dict[str, str]) -> None:
        model_config = json.loads(args["model_config"])
        if sum(group["count"] * max(1, len(group["gpus"])) for group in model_config["instance_group"]) > 1:
            raise pb_utils.TritonModelException(
                "config.pbtxt: instance_group must be one instance, [ { kind: KIND_CPU, count: 1 } ]; "
                "its engine workers use the devices that the setting `devices` names"
            )
        settings = {name: value["string_value"] for name, value in model_config.get("parameters", {}).items()}
        if settings.get("model", "").startswith("."):
            settings["model"] = str((Path(args["model_repository"]) / settings["model"]).resolve())
        configure("warning")  # until the settings are known
        self._config = config = EngineConfig.from_parameters(settings)
        configure(config.log_level)
        self._name = args["model_name"]
        # The engine warms up by itself; who configures Triton's warm-up too gets it, before the model is served.
        samples = model_config.get("model_warmup", [])
        self._warm_ups = sum(max(1, sample["count"]) * max(1, sample["batch_size"]) for sample in samples)
        self._sample_rate: int | None = None
        workers = config.of_workers()
        self._metrics = Metrics(_metric_family, args["model_name"], args["model_version"], len(workers))
        self._watcher = CancelWatcher()
        self._supervisor = Supervisor(workers, self._heartbeat)
        end_with_parent(self._supervisor.kill)
        try:
            self._supervisor.start()
        except WorkerStartError as error:
            raise pb_utils.TritonModelException(f"the engine did not start: {error}") from None
        try:
            token = config.admin_token and config.admin_token.get_secret_value()
            administration = Administration(self._supervisor, token)
            self._control = ControlServer(socket_path(config.control_socket, self._name), administration.handle)
        except ControlSocketError as error:
            self._supervisor.stop()
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list) -> None:
        """Take requests; Triton brings one at a time, as nothing is batched.

        Raises:
            TritonModelException: all were refused, each with an answer. Only so do Triton's statistics count failures.
        """
        self._warm_ups -= 1
        taken = [self._take(request) for request in requests]
        if not any(taken):
            raise pb_utils.TritonModelException("the request was refused")

    def _take(self, request) -> bool:
        """Hand a request to a worker, or answer it with an error."""
        parameters = json.loads(request.parameters())
        over_http = parameters.pop(GRPC_MARK, None) is None
        if parameters.get("id") == request.request_id():  # as a JSON field it is both
            del parameters["id"]
        log = RequestLog(
            self._name,
            request.request_id(),
            "http" if over_http else "grpc",
            self._config.log_text,
            json.loads(request.trace().get_context() or "null"),
        )
        stream = ResponseStream(request.get_response_sender(), self._metrics, log)
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            parsed = parse_request(inputs, parameters)
            if over_http and parsed.stream:
                stream.keep_alive_rate = parsed.sample_rate or self._sample_rate
            routed = stream.route(self._supervisor, parsed)
        except RequestError as error:
            stream.fail(Failed(0, error.code, error.message))
            return False
        except Exception as error:
            logger.exception("taking a request failed")
            stream.fail(Failed(0, "INTERNAL", f"taking the request failed: {error}"))
            return False
        self._watcher.watch(stream, routed.cancel)
        return True

    def _heartbeat(self, worker: int, snapshot: dict | None) -> None:
        """Once a second, and before a worker is started again; on the supervisor's thread."""
        self._metrics.heartbeat(worker, snapshot)
        if snapshot is not None:
            self._sample_rate = snapshot["sample_rate"]
        # Before it unloads a model or stops, Triton waits for running streams, and for ever for one that its client
        # cancelled just after its end. It calls nothing meanwhile, and may crash when its exit timeout is over (seen
        # with 2.51). So the streams and the worker are ended as soon as the model is on its way out.
        # (Asked before the model is served, tritonserver may crash or hang; a request is the first sign that it is.)
        if self._warm_ups < 0 and not self._is_served():
            self._supervisor.begin_stop()

    def _is_served(self) -> bool:
        """False while the model is unloaded and while the server stops."""
        try:
            return pb_utils.is_model_ready(self._name)
        except pb_utils.TritonModelException:
            return False

    def finalize(self) -> None:
        self._control.close()
        self._supervisor.stop()
        self._watcher.stop()
        self._metrics.stop()


class ResponseStream:
    """The responses to one request.

    Messages come on the supervisor's thread; the cancel watcher asks for cancellation on its own.
    """

    def __init__(self, sender, metrics: Metrics, log: RequestLog) -> None:
        self._sender, self._metrics, self._log = sender, metrics, log
        self._playback = Playback(time.monotonic())
        self._worker: int | None = None
        self.keep_alive_rate: int | None = None
        """In Hz; of a stream that must not wait in silence."""
        self._output_format, self._streamed = "f32", True
        # After the final response the sender must not be asked for anything: the server has freed what it points to.
        self._lock = threading.Lock()
        self._responded = False
        self.closed = False

    def route(self, supervisor: Supervisor, request: ParsedRequest) -> RoutedStream:
        """Hand the request to a worker.

        Raises:
            RequestError: UNAVAILABLE.
        """
        self._output_format, self._streamed = request.output_format, request.stream
        self._log.parsed(request)
        with self._lock:  # what comes back at once waits until the worker is known
            routed = supervisor.submit(
                request.request, request.output_format, request.sample_rate, request.stream, self._on_message
            )
            self._worker = routed.worker
            self._log.routed(routed.worker, routed.id)
        return routed

    def _on_message(self, message: StreamMessage) -> None:
        if isinstance(message, Failed):
            self.fail(message)
            return
        last = isinstance(message, Finished)
        self._send(pb_utils.InferenceResponse(self._tensors(message)), last)
        is_first = self._playback.first is None
        self._playback.chunk(message.seconds, time.monotonic())
        if is_first and self._streamed:
            self._metrics.first_audio(self._worker, self._playback)
        if last:
            playback = self._playback if self._streamed else None
            queue_s = 1e-3 * message.stats["queue_ms"]
            self._metrics.finished(self._worker, playback, message.finish_reason, queue_s)
            self._log.finished(message, self._playback)

    def _tensors(self, message: Audio | Finished) -> list:
        tensors = [pb_utils.Tensor("sample_rate", np.array([message.sample_rate], np.int32))]
        if self._output_format == "f32":
            tensors.append(pb_utils.Tensor("audio", np.frombuffer(message.audio, np.float32)))
        else:
            tensors.append(pb_utils.Tensor("audio_bytes", np.array([message.audio], np.object_)))
        if isinstance(message, Finished):
            tensors.append(_string("finish_reason", message.finish_reason))
            tensors.append(_string("stats", json.dumps(message.stats)))
            if message.latents is not None:
                tensors.append(pb_utils.Tensor("latents", message.latents))
        return tensors

    def fail(self, message: Failed) -> None:
        """End with an error. Its text starts with the code, because a gRPC stream carries no code."""
        # The Python backend names its codes as RequestError does.
        error = pb_utils.TritonError(f"{message.code}: {message.message}", getattr(pb_utils.TritonError, message.code))
        self._send(pb_utils.InferenceResponse(error=error), last=True)
        self._metrics.failed(self._worker, message.code)
        self._log.failed(message, self._playback)

    def keep_alive(self) -> None:
        """Send an HTTP client that waits no audio, once.

        Triton (2.51) does not read a connection before its first response, so it does not notice that it was closed.
        """
        waits = not self._responded and time.monotonic() - self._playback.arrived >= KEEP_ALIVE_S
        if self.keep_alive_rate is not None and waits:
            tensors = self._tensors(Audio(0, b"", self.keep_alive_rate))
            self._send(pb_utils.InferenceResponse(tensors), last=False, if_first=True)

    def is_cancelled(self) -> bool:
        """Whether the client has left; a round trip to the server."""
        with self._lock:
            return not self.closed and self._sender.is_cancelled()

    def _send(self, response, last: bool, if_first: bool = False) -> None:
        with self._lock:
            if if_first and self._responded:
                return
            self._responded, self.closed = True, last
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)


def _metric_family(definition: Definition) -> Callable:
    """Registers a metric with the server; the result makes its time series, of given labels."""
    family = pb_utils.MetricFamily(
        name=PREFIX + definition.name,
        description=definition.description,
        kind=getattr(pb_utils.MetricFamily, definition.kind.upper()),
    )
    if definition.buckets:
        return lambda labels: family.Metric(labels=labels, buckets=list(definition.buckets))
    return lambda labels: family.Metric(labels=labels)


def _properties(tensor: Tensor) -> dict:
    return {"name": tensor.name, "data_type": tensor.data_type, "dims": list(tensor.dims)}


def _string(name: str, text: str):
    return pb_utils.Tensor(name, np.array([text.encode()], np.object_))
