"""Clients that are sent to a wrong port, or to one that speaks TLS: each says so in a line."""

import os
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme
from forwarder import Forwarder
from triton_server import ROOT, free_ports
from typer.testing import CliRunner

from dq_engine.admin_cli import app

sys.path.insert(0, str(ROOT / "client_examples"))
import speak  # noqa: E402
import speak_http  # noqa: E402

CLIENTS = ["speak.py", "speak_http.py", "voxcpm-admin"]


def told(client: str, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a client says of an address that is none of its servers'."""
    if client == "voxcpm-admin":
        result = CliRunner().invoke(app, ["--url", url, "info"])
        assert result.exit_code == 1
        return result.stderr.removesuffix("\n")
    monkeypatch.setattr("sys.argv", [client, "hello", "--url", url, "--output", os.devnull + ".wav"])
    with pytest.raises(SystemExit) as ended:
        {"speak.py": speak, "speak_http.py": speak_http}[client].main()
    assert ended.value.code.startswith("error: ")
    return ended.value.code.removeprefix("error: ")


@pytest.mark.parametrize(
    ("client", "ports", "message"),
    [
        ("speak.py", ["http", "metrics"], "no answer from {}: no gRPC is spoken there, or only with TLS (grpcs://) ("),
        ("voxcpm-admin", ["http", "metrics"], "no answer from {}: no gRPC is spoken there, or only with TLS "),
        ("speak_http.py", ["grpc"], "no answer from http://{}: no HTTP is spoken there, or only with TLS (https://) ("),
        (
            "speak_http.py",
            ["metrics"],
            "http://{}/v2/models/voxcpm2/generate_stream answers 405 Not Allowed: this is no server's HTTP port (",
        ),
        ("speak.py", ["nobody's"], "no answer from {}: nothing listens there; is the server running, and"),
        ("voxcpm-admin", ["nobody's"], "no answer from {}: nothing listens there; is the server running, and"),
        ("speak_http.py", ["nobody's"], "no answer from http://{}: nothing listens there; is the server running, and"),
    ],
)
def test_another_port_than_the_clients(client, ports, message, server, monkeypatch):
    urls = {"http": server.http_url, "grpc": server.grpc_url, "metrics": server.metrics_url}
    urls["nobody's"] = f"127.0.0.1:{free_ports(1)[0]}"
    for port in ports:
        line = told(client, urls[port], monkeypatch)
        assert line.startswith(message.format(urls[port])) and "\n" not in line
        first, second = ("HTTP", "gRPC") if "http" in client else ("gRPC", "HTTP")
        usual = {"HTTP": 8000, "gRPC": 8001}
        assert f"({first} is on port {usual[first]} by default, {second} on {usual[second]}, metrics on 8002" in line


def test_tls_to_a_port_without(server, monkeypatch):
    grpcs, https = f"grpcs://{server.grpc_url}", f"https://{server.http_url}"
    for client, url, message in [
        ("speak.py", grpcs, f"no answer from {server.grpc_url}: no TLS is spoken there, so leave grpcs:// away ("),
        ("voxcpm-admin", grpcs, f"no answer from {server.grpc_url}: no TLS is spoken there, so leave grpcs:// away ("),
        (
            "speak_http.py",
            https,
            f"no answer from {https}: no TLS is spoken there, so http:// in the place of https://",
        ),
    ]:
        line = told(client, url, monkeypatch)
        assert line.startswith(message) and "\n" not in line
    closed = httpx.ConnectError("TLS/SSL connection has been closed (EOF) (_ssl.c:992)")  # Triton's answer now and then
    assert speak_http.explain(closed) == "no TLS is spoken there, so http:// in the place of https://"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_proxy_with_tls(client, server, tmp_path, monkeypatch):
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(tls)
    tls.set_alpn_protocols(["h2", "http/1.1"])
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trusting = dict.fromkeys(["SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"], str(tmp_path / "ca.pem"))
    http = client == "speak_http.py"
    with Forwarder(server.http_port if http else server.grpc_port, tls) as proxy:
        url = f"{'https' if http else 'grpcs'}://{proxy.url}"
        if client == "voxcpm-admin":
            words = [Path(sys.executable).with_name(client), "--url", url, "info"]
        else:
            words = [sys.executable, ROOT / "client_examples" / client, "hello", "--url", url]
            words += ["--max-generate-length", "1", "--output", tmp_path / "out.wav"]
        done = subprocess.run(words, env={**os.environ, **trusting}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        line = told(client, proxy.url, monkeypatch)
        assert "is spoken there, or only with TLS (" in line and "\n" not in line
