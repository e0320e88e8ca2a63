"""perf_analyzer as the README has it: its figures are those of the requests that it sent."""

import json
import os
import re
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
from triton_server import ROOT

README = (ROOT / "README.md").read_text()
(COMMANDS,) = re.findall(r"^```sh\n(mkdir -p build; .+?)^```$", README, re.MULTILINE | re.DOTALL)


def statistics(server) -> dict:
    with urllib.request.urlopen(f"http://{server.http_url}/v2/models/voxcpm2/stats", timeout=5) as reply:
        return json.load(reply)["model_stats"][0]["inference_stats"]


def number(pattern: str, text: str) -> float:
    (value,) = re.findall(pattern, text)
    return float(value)


@pytest.mark.parametrize("kind", ["text", pytest.param("cloning", marks=pytest.mark.slow)])
def test_the_commands(server, tmp_path, kind):
    for name in ("benchmark", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    lines = re.split(r"(?<!\\)\n", COMMANDS.strip())
    assert len(lines) == 5
    command = "\n".join(line for line in lines if kind in line)
    before = statistics(server)
    done = subprocess.run(
        ["bash", "-ec", command.replace("localhost:8001", server.grpc_url)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "rror" not in said + done.stderr

    count = int(number(r"--request-count (\d+)", lines[1]))
    after = statistics(server)
    assert after["success"]["count"] - before["success"]["count"] == count
    assert after["fail"]["count"] == before["fail"]["count"]
    assert number(r"(?m)^    Request count: (\d+)$", said) == count
    # It stops to measure when the last request has been sent, and may leave out those that end after that.
    assert count - 2 <= number(r"Successful request count: (\d+)", said) <= count

    (measured,) = json.loads((tmp_path / "build" / f"{kind}.json").read_text())["experiments"]
    assert len(measured["requests"]) == count
    first, last = (
        np.array([request["response_timestamps"][index] - request["timestamp"] for request in measured["requests"]])
        for index in (0, -1)
    )
    assert (first > 0).all()
    assert (first < last).all()
    assert all(len(request["response_timestamps"]) > 3 for request in measured["requests"])
    assert number(r"Avg latency: (\d+) usec", said) == pytest.approx(last.mean() / 1e3, rel=0.05)
    assert f"concurrency 2: {count} requests, 0 unanswered\n" in said
    assert number(r"first response, ms: average (\d+),", said) == pytest.approx(first.mean() / 1e6, abs=1)
    assert number(r"last response, ms: average (\d+),", said) == pytest.approx(last.mean() / 1e6, abs=1)
    # The input is what the file says: a recording is among the inputs when it clones.
    sent = [request["request_inputs"] for request in measured["requests"]]
    assert all(("reference_audio" in fields) == (kind == "cloning") for fields in sent)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), ("{}", "is no file of"), ("x", "is no file of")]
)
def test_a_file_that_perf_analyzer_did_not_write(tmp_path, content, message):
    file = tmp_path / "export.json"
    if content is not None:
        file.write_text(content)
    command = [sys.executable, str(ROOT / "benchmark/perf_analyzer/first_response.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {file}") and message in done.stderr and done.stderr.count("\n") == 1
