"""What README.md and ARCHITECTURE.md say is so: their code and commands run, what they name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from pydantic_core import PydanticUndefined
from triton_server import ROOT
from wav import read_wav

from dq_engine.config import EngineConfig

README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
SENTENCE = "rachel wants five pretty flowers"


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for its_language, text in fenced if its_language == language]


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder in which the README's relative paths lead to this repository, and what is written stays apart."""
    for name in ("models", "client_examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "voxcpm-generate"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {Path(sys.executable).with_name(name)} "$@"\n')
        program.chmod(0o755)
    return tmp_path


def run(command: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-ec", command], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_engine_example(clone):
    code = blocks("python")[0]
    result = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert re.match(r"stop \{'seed': 0, 'patches': \d+, ", result.stdout)
    samples, rate = soundfile.read(clone / "engine.wav")
    assert rate == 48000
    assert 1.5 <= len(samples) / rate <= 5
    assert abs(samples).max() > 0.05


def test_the_pool_example(clone):
    _, code = blocks("python")
    result = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    samples, rate = soundfile.read(clone / "pool.wav")
    assert rate == 48000
    assert 1.5 <= len(samples) / rate <= 5
    assert abs(samples).max() > 0.05


def test_the_manifest_and_its_command(clone):
    (manifest,) = blocks("csv")
    (clone / "sentences.csv").write_text(manifest)
    (command,) = (block for block in blocks("sh") if "voxcpm-generate" in block)
    result = run(command, clone)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("2 spoken, 0 done before, 0 failed; ")
    assert sorted(os.listdir(clone / "spoken")) == ["results.csv", "results.jsonl", "s1.wav", "s2.wav"]
    samples, rate = read_wav(clone / "spoken" / "s1.wav")
    assert 1.5 <= len(samples) / rate <= 5


def test_the_commands_of_the_client_examples(server, clone):
    (commands,) = (block for block in blocks("sh") if "client_examples/" in block)
    for command in commands.splitlines():
        url = f"http://{server.http_url}" if "speak_http.py" in command else server.grpc_url
        result = run(f"{command} --url {url}", clone)
        assert (result.returncode, result.stderr) == (0, "")
        samples, rate = read_wav(clone / command.split()[-1])
        assert 1.3 <= len(samples) / rate <= 5


def test_the_curl_command(server, clone):
    (command,) = (block for block in blocks("sh") if "curl -s" in block)
    result = run(command.replace("localhost:8000", server.http_url), clone)
    assert (result.returncode, result.stderr) == (0, "")
    samples, rate = soundfile.read(clone / "out.wav")
    assert rate == 48000
    assert 1.5 <= len(samples) / rate <= 5
    result = run(command.replace("localhost:8000", server.http_url).replace(SENTENCE, ""), clone)
    assert (result.returncode, result.stderr) == (1, "INVALID_ARG: text: is empty\n")


def test_the_health_check(server, clone):
    (url,) = re.findall(r"`curl (localhost:8000/\S+)` answers 200", README)
    result = run(f"curl -s -o /dev/null -w '%{{http_code}}' {url.replace('localhost:8000', server.http_url)}", clone)
    assert result.stdout == "200"
    (metric,) = re.findall(r"`(curl -s localhost:8002/metrics .*)` succeeds", README)
    metric = metric.replace("\\|", "|").replace("localhost:8002", server.metrics_url)
    assert run(metric, clone).returncode == 0
    assert run(metric.replace("_up", "_down"), clone).returncode == 1


def test_every_setting_has_its_row():
    rows = re.findall(r"^\| `DQ_ENGINE_(\w+)` \| (.*?) ?\| (.+) \|$", README, re.MULTILINE)
    expected = []
    for name, field in EngineConfig.model_fields.items():
        default = field.default
        if default is PydanticUndefined or default is None:
            default = ""
        expected.append((name.upper(), str(int(default) if isinstance(default, bool) else default), field.description))
    assert rows == expected


def test_every_input_and_output_is_named_as_in_the_model_configuration():
    configuration = (ROOT / "model_repository/voxcpm2/config.pbtxt").read_text()
    names = re.findall(r'\{ name: "(\w+)", data_type: ', configuration)
    described = set(re.findall(r"`(\w+)`", README))
    assert set(names) - described == set()


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text())
    assert links
    here = [link.partition("#")[0] for link in links if not link.startswith("http")]
    assert [link for link in here if not (ROOT / link).exists()] == []


def test_what_is_where_is_there():
    (tree,) = (block for block in blocks("") if "model_repository/" in block)
    for line in tree.splitlines():
        assert (ROOT / line.split()[0]).is_dir(), line


def test_make_knows_every_target_and_variable():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"(?:^|`)make ([^`\n]*)", README, re.MULTILINE)
    assert commands
    for command in commands:
        target, *variables = command.split()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), command
        for variable in re.findall(r"([A-Z_]+)=", " ".join(variables)):
            assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE), command


def test_the_files_of_the_architecture_exist():
    rows = re.findall(r"^\| \w* ?\| (`.+?) \|", ARCHITECTURE, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        folder = ROOT / "backend_src" / "dq_engine"
        names = re.findall(r"`([\w./]+)`", row)
        for name in names:
            places = [ROOT / name, folder / name, folder / Path(names[0]).parent / name]
            assert any(os.path.exists(place) for place in places), name
