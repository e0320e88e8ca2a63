"""docs/adapters.md is so: its commands and its example run."""

import os
import re
import subprocess
import sys

import pytest
from triton_server import ROOT, TritonServer
from wav import read_wav

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs/adapters.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    """A folder in which the page's relative paths lead to this repository."""
    for name in (".venv", "models", "client_examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_the_commands(folder):
    serve, commands = blocks("sh")
    settings = dict(word.split("=", 1) for word in serve.split() if "=" in word)
    settings["DQ_ENGINE_LORA_DIR"] = str(ROOT / settings["DQ_ENGINE_LORA_DIR"])
    with TritonServer(model=ROOT / "models/small", environment=settings) as server:
        environment = {**os.environ, "VOXCPM_URL": server.grpc_url}
        done = subprocess.run(
            ["bash", "-ec", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r'"name": "(\w+)"', done.stdout) == ["ann", "kal", "ann"]
    assert len(read_wav(folder / "out.wav")[0]) > 48000


def test_the_example(folder):
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert sum(map(int, done.stdout.split())) > 48000
