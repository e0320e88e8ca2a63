"""docs/administration.md is so: its commands and its example run, its table names every operation."""

import json
import re
import subprocess
import sys

import httpx
import pytest
from reference.recordings import write_voice
from triton_server import ROOT

from dq_engine.serving.administration import Administration

PAGE = (ROOT / "docs/administration.md").read_text()
OPERATIONS = re.findall(r"^\| `(\w+)` \|(.*?)\|.*\|$", PAGE.partition("| operation |")[2], re.MULTILINE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    """A folder with a recording, in which the page's relative paths lead to this repository."""
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    write_voice(tmp_path / "voice.wav", seconds=0.5, rate=16_000, channels=1, pitch=150, seed=1)
    return tmp_path


def test_the_commands(server, folder):
    (commands,) = (block for block in blocks("sh") if "voxcpm-admin" in block)
    answers = {}
    for command in commands.splitlines():
        command = command.replace("voxcpm-admin", f"voxcpm-admin --url {server.grpc_url}")
        done = subprocess.run(["bash", "-ec", command], cwd=folder, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), command
        answers[command.split(" ", 3)[3]] = json.loads(done.stdout)
    assert [voice["name"] for voice in answers["voices list"]["voices"]] == ["ann", "bob"]
    assert answers["voices show ann"]["reference_frames"] == 16
    assert answers["drain"] == {"draining": True}
    assert answers["undrain"] == {"draining": False}


def test_a_stored_voice_with_the_client_examples(server, folder):
    register = f".venv/bin/voxcpm-admin --url {server.grpc_url} voices register eve --reference voice.wav"
    subprocess.run(["bash", "-ec", register], cwd=folder, check=True, capture_output=True, timeout=60)
    for script, url in ("speak.py", server.grpc_url), ("speak_http.py", f"http://{server.http_url}"):
        words = [ROOT / "client_examples" / script, "hello there", "--url", url, "--output", folder / "out.wav"]
        for voice, status in ("eve", 0), ("adam", 1):
            command = [sys.executable, *words, "--voice", voice]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == status, done.stderr
        assert 'there is no stored voice named "adam"' in done.stderr


def test_the_example(server, folder):
    (code,) = blocks("python")
    code = code.replace("localhost:8000", server.http_url)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"'name': 'carl', 'reference_frames': 16, 'prompt_frames': 0", done.stdout)
    assert re.search(r"'name': 'dora', 'reference_frames': 0, 'prompt_frames': \d\d", done.stdout)


def test_every_operation_has_its_row(server):
    fields = {"operation": "?", "arguments": "{}"}
    url = f"http://{server.http_url}/v2/models/voxcpm2_admin/generate"
    answer = httpx.post(url, json=fields, timeout=60).json()["error"]
    assert answer == f'INVALID_ARG: operation: must be one of {", ".join(name for name, _ in OPERATIONS)}, got "?"'


def test_the_arguments_are_those_of_the_operations():
    operations = Administration(type("Nobody", (), {})(), None)._fenced
    for name, cell in OPERATIONS:
        assert re.findall(r"`(\w+)`", cell) == list(operations[name][0].__struct_fields__), name


@pytest.mark.parametrize("kind", ["input", "output"])
def test_the_tables_are_those_of_the_model_configuration(kind):
    configuration = (ROOT / "model_repository/voxcpm2_admin/config.pbtxt").read_text()
    listed = re.search(rf"^{kind} \[(.*?)\]\n(?=output|\n|#)", configuration, re.MULTILINE | re.DOTALL)[1]
    (table,) = re.findall(rf"^\| {kind} \|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == re.findall(r'name: "(\w+)"', listed)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link.partition("#")[0]).exists()] == []
