"""A real tritonserver with this repository's models, for the demo and the tests: docker/entrypoint.sh on free ports.

    with TritonServer(model="models/small") as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 6.0  # docker/entrypoint.sh promises 5


class ServerError(RuntimeError):
    """The server did not start, or died. The message holds the end of its log."""


class TritonServer:
    """Starts the server when the context is entered, returns when it is ready, and stops it when the context is left.

    Several of them run at once on one machine. Enter it in a thread that lives as long as the server: the server is
    told to stop when that thread ends, so that a killed test run leaves nothing behind.

    Args:
        model: a checkpoint's directory or hub id; None leaves it to the environment and config.pbtxt.
        model_repository: None is this repository's.
        environment: added to this process's environment, such as {"DQ_ENGINE_MAX_NUM_SEQS": "4"}.
        arguments: further arguments of tritonserver.
        ports: (HTTP, gRPC, metrics); None chooses free ones.
        host: the address to listen on.
        model_control: clients may load and unload models (--model-control-mode=explicit).
        entrypoint: the script to run.
        log_path: the server's output goes there; None makes a temporary file, removed after a stop without a fault.
        ready_timeout_s: how long the model may take to load, a download included.
        on_progress: called about 5 times a second while the server starts, with the seconds since the start and the
            last line of its log.

    Attributes:
        http_port, grpc_port, metrics_port: int, known before the start.
        http_url, grpc_url, metrics_url: "host:port", as tritonclient takes it.
        log_path: Path of the server's output.
        pid: process id of docker/entrypoint.sh.
    """

    def __init__(
        self,
        model: str | os.PathLike | None = None,
        *,
        model_repository: str | os.PathLike | None = None,
        environment: Mapping[str, str] | None = None,
        arguments: tuple[str, ...] = (),
        ports: tuple[int, int, int] | None = None,
        host: str = "127.0.0.1",
        model_control: bool = False,
        entrypoint: str | os.PathLike = ROOT / "docker/entrypoint.sh",
        log_path: str | os.PathLike | None = None,
        ready_timeout_s: float = 120.0,
        on_progress: Callable[[float, str], None] | None = None,
    ):
        self.http_port, self.grpc_port, self.metrics_port = ports or free_ports(3, host)
        self.http_url, self.grpc_url, self.metrics_url = (
            f"{host}:{port}" for port in (self.http_port, self.grpc_port, self.metrics_port)
        )
        self._environment = {
            **os.environ,
            **({"MODEL": str(model)} if model is not None else {}),
            **({"MODEL_REPOSITORY": str(model_repository)} if model_repository is not None else {}),
            **({"MODEL_CONTROL_MODE": "explicit"} if model_control else {}),
            **(environment or {}),
            "HOST": host,
            "HTTP_PORT": str(self.http_port),
            "GRPC_PORT": str(self.grpc_port),
            "METRICS_PORT": str(self.metrics_port),
        }
        self._command = ["setpriv", "--pdeathsig", "TERM", "--", str(entrypoint), *arguments]
        self._ready_timeout_s = ready_timeout_s
        self._on_progress = on_progress
        self._temporary = log_path is None
        if log_path is None:
            handle, log_path = tempfile.mkstemp(prefix="tritonserver-", suffix=".log")
            os.close(handle)
        self.log_path = Path(log_path)
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self.stop()
        if self._temporary and kind is None:
            self.log_path.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until every model is ready.

        Raises:
            ServerError: it ended, or was not ready within ready_timeout_s; it is stopped then.
        """
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the program, which then leaves the context
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server as SIGTERM does; returns when all of it is gone, at once if it is."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise ServerError(f"docker/entrypoint.sh did not stop within {STOP_S} s{self._log_tail()}") from None

    def kill(self) -> None:
        """Kill docker/entrypoint.sh, as an out-of-memory killer would; the server follows by itself."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def check(self) -> None:
        """Raises ServerError, with the end of the log, if the server has ended."""
        if self._process.poll() is not None:
            raise ServerError(f"tritonserver ended with {self._process.returncode}{self._log_tail()}")

    def is_ready(self) -> bool:
        """Whether the server answers and every model is ready."""
        try:
            with urllib.request.urlopen(f"http://{self.http_url}/v2/health/ready", timeout=5) as response:
                return response.status == 200
        except OSError:  # urllib's URLError and HTTPError are
            return False

    def _serves_metrics(self) -> bool:
        """tritonserver begins with that some 40 ms after it says that it is ready."""
        host, port = self.metrics_url.rsplit(":", 1)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
            return True
        return False

    def _wait_until_ready(self) -> None:
        began = time.monotonic()
        while not (self.is_ready() and self._serves_metrics()):
            self.check()
            elapsed = time.monotonic() - began
            if elapsed > self._ready_timeout_s:
                raise ServerError(f"tritonserver was not ready after {self._ready_timeout_s:g} s{self._log_tail()}")
            if self._on_progress is not None:
                self._on_progress(elapsed, self._log_lines(1))
            time.sleep(0.2)

    def _log_lines(self, count: int) -> str:
        """The last lines of the log, without the tables that tritonserver prints whatever happens."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 65536))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip() and line[0] not in "|+"][-count:])

    def _log_tail(self) -> str:
        return f"; the end of {self.log_path}:\n{self._log_lines(30)}"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports on which nothing listens now, below those that the kernel gives to outgoing connections."""
    with contextlib.ExitStack() as held:
        ports = []
        for port in random.SystemRandom().sample(range(20000, 32000), 1000):
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise ServerError(f"no {count} free ports on {host}")
