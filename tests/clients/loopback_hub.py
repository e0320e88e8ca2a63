"""A model hub on the loopback interface: what huggingface_hub's snapshot_download asks a hub for, and no more."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LoopbackHub:
    """Serves a folder as the repository `repo_id` while the context is open.

    Attributes:
        endpoint: the value of HF_ENDPOINT.
        requests: what was asked for so far, as "METHOD path".
    """

    def __init__(self, repo_id: str, folder: Path):
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(repo_id, files, self.requests))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="loopback-hub")

    def __enter__(self) -> "LoopbackHub":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(repo_id: str, files: dict[str, Path], requests: list[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            requests.append(f"{self.command} {self.path}")
            if self.path == f"/api/models/{repo_id}/revision/main":
                siblings = [{"rfilename": name} for name in files]
                self._answer(200, json.dumps({"id": repo_id, "sha": COMMIT, "siblings": siblings}).encode())
            elif (match := re.fullmatch(f"/{repo_id}/resolve/{COMMIT}/(.+)", self.path)) and match[1] in files:
                data = files[match[1]].read_bytes()
                headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                self._answer(200, data, headers)
            else:
                self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        do_GET = do_HEAD

        def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_) -> None:
            """The tests look at `requests`."""

    return Handler
