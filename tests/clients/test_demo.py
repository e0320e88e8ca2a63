"""tools/demo.py as `make demo` runs it, to the end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import demo as demo_module
import numpy as np
import psutil
import pytest
import soundfile
from forwarder import Forwarder
from loopback_hub import COMMIT, LoopbackHub
from PIL import Image
from reference.processes import processes_below
from triton_server import ROOT
from wav import read_wav

SENTENCE = "rachel wants five pretty flowers"
DEMO = [sys.executable, str(ROOT / "tools" / "demo.py")]


def environment(**settings: str | os.PathLike) -> dict[str, str]:
    """This process's, with the demo's settings; those that are not given are empty, as the Makefile exports them."""
    unset = {"MODEL": "models/small", "TEXT": "", "REFERENCE": "", "OUT": ""}
    return {**os.environ, **unset, **{name: str(value) for name, value in settings.items()}}


def demo(cwd: Path = ROOT, **settings: str | os.PathLike) -> subprocess.CompletedProcess:
    return subprocess.run(DEMO, env=environment(**settings), cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The demo with nothing set but where the result goes: the finished process and the wav file's path."""
    out = tmp_path_factory.mktemp("demo") / "demo.wav"
    result = demo(OUT=out)
    assert result.returncode == 0, result.stderr
    return result, out


def test_the_sound_is_a_true_wav_file(plain):
    samples, rate = read_wav(plain[1])
    assert rate == 48000
    assert 1.5 <= len(samples) / rate <= 5
    assert np.sqrt(np.mean((samples / 32768.0) ** 2)) > 0.01


def test_the_picture_shows_something(plain):
    picture = Image.open(plain[1].with_suffix(".png"))
    assert picture.format == "PNG"
    assert picture.size == (1200, 720)
    # The spectrogram's half has many colours, the waveform's half some that are not white.
    pixels = np.asarray(picture.convert("RGB"))
    assert len(np.unique(pixels[360:].reshape(-1, 3), axis=0)) > 100
    assert (pixels[:360] != 255).any(axis=2).mean() > 0.01


def test_it_says_what_it_did(plain):
    result, out = plain
    samples, rate = read_wav(out)
    seconds = len(samples) / rate
    assert result.stderr == ""
    for words in ("7.7 M parameters", "flite", "make demo MODEL=openbmb/VoxCPM2", "MODEL=/directory"):
        assert words in result.stdout
    assert "REFERENCE=" not in result.stdout
    assert re.search(rf"speaking +━+ {seconds:.2f} s of audio", result.stdout)
    lines = result.stdout.splitlines()[-4:]
    assert lines[0] == f'"{SENTENCE}", seed 0, finish reason: stop'
    ttfb_ms, rtf = re.fullmatch(r"TTFB (\d+) ms \(.*\), RTF (\d+\.\d\d) \(.*\)", lines[1]).groups()
    assert 1 <= int(ttfb_ms) < 60_000
    assert 0.01 < float(rtf) < 20
    assert lines[2] == f"{out}: {seconds:.2f} s of audio, 16-bit PCM, 48000 Hz"
    assert lines[3] == f"{out.with_suffix('.png')}: its waveform and spectrogram"


def test_own_text_and_voice(plain, tmp_path):
    text = "steven sold two old chairs"
    result = demo(OUT=tmp_path / "own.wav", TEXT=text, REFERENCE=plain[1])
    assert result.returncode == 0, result.stderr
    assert "clones only the voices that it was trained on (models/small/README.md)" in result.stdout
    (example,) = re.findall(r"REFERENCE=(\S+)", result.stdout)
    assert soundfile.info(ROOT / example).duration > 1
    assert f'"{text}", seed 0' in result.stdout
    samples, rate = read_wav(tmp_path / "own.wav")
    assert 1 <= len(samples) / rate <= 5
    assert (tmp_path / "own.png").stat().st_size > 20_000


def test_a_model_of_the_hub(tmp_path):
    with LoopbackHub("someone/small-voxcpm2", ROOT / "models" / "small") as hub:
        settings = {"MODEL": "someone/small-voxcpm2", "HF_ENDPOINT": hub.endpoint, "HF_HOME": tmp_path / "hub"}
        settings["TQDM_POSITION"] = "-1"  # huggingface_hub draws the progress of bytes on terminals only, or so
        result = demo(OUT=tmp_path / "hub.wav", **settings)
        assert result.returncode == 0, result.stderr
        assert f"GET /someone/small-voxcpm2/resolve/{COMMIT}/model.safetensors" in hub.requests
        assert "model.safetensors: 100%" in result.stderr.replace("\r", "\n")  # the progress of the download
        assert "stand-in" not in result.stdout
        assert len(read_wav(tmp_path / "hub.wav")[0]) >= 48000
        # The second time nothing is fetched again.
        hub.requests.clear()
        code = "from dq_engine.config import resolve_checkpoint; print(resolve_checkpoint('someone/small-voxcpm2'))"
        again = subprocess.run(
            [sys.executable, "-c", code], env=environment(**settings), capture_output=True, text=True, timeout=60
        )
        assert sorted(path.name for path in Path(again.stdout.strip()).iterdir()) == [
            "audiovae.pth",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert not [request for request in hub.requests if request.startswith("GET /someone")]


def test_a_model_that_the_hub_does_not_have(tmp_path):
    with LoopbackHub("someone/small-voxcpm2", ROOT / "models" / "small") as hub:
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": tmp_path / "hub"}
        result = demo(OUT=tmp_path / "x.wav", MODEL="someone/else", **settings)
    assert result.returncode == 1
    message = f"there is no directory someone/else, and it could not be downloaded from {hub.endpoint}: "
    assert result.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "x.wav").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"MODEL": "/no/such/model"}, "error: /no/such/model is neither a directory nor a hub id"),
        ({"OUT": "/no/such/folder/demo.wav"}, "OUT: the directory /no/such/folder does not exist"),
        ({"OUT": "demo.mp3"}, "OUT: demo.mp3 does not end in .wav"),
        ({"TEXT": os.fsdecode(b"na\xefve")}, "TEXT: is not UTF-8"),
        ({"MODEL": "modles/small", "HF_HUB_OFFLINE": "1"}, "error: there is no directory modles/small, and "),
        ({"REFERENCE": "/no/such/voice.wav"}, "error: /no/such/voice.wav: No such file or directory"),
    ],
)
def test_what_is_not_there_is_said_before_anything_starts(settings, message, tmp_path):
    began = time.monotonic()
    result = demo(**{"OUT": tmp_path / "x.wav", **settings})
    assert time.monotonic() - began < 15
    assert result.returncode == 1
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_a_checkpoint_that_cannot_be_served(tmp_path):
    (tmp_path / "model").mkdir()
    result = demo(OUT=tmp_path / "x.wav", MODEL=tmp_path / "model")
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: the engine did not start: {tmp_path / 'model'} has no config.json")
    assert result.stderr.count("\n") == 1


def test_a_stream_that_breaks_off_leaves_what_came(server, tmp_path, monkeypatch):
    with Forwarder(server.grpc_port, cut_after=100_000) as forwarder:

        @contextlib.contextmanager
        def started(**_):
            yield types.SimpleNamespace(grpc_url=forwarder.url, log_path="/tmp/server.log")

        monkeypatch.setattr(demo_module, "TritonServer", started)
        for name, value in environment(OUT=tmp_path / "x.wav", TEXT=f"{SENTENCE} and " * 20).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit) as ended:
            demo_module.main()
    kept = f"({tmp_path}/x.wav is partial: it holds what came before)"
    log = re.escape(f"; the server's log is /tmp/server.log {kept}")
    assert re.fullmatch(rf"error: the connection was lost: .*{log}", ended.value.code)
    samples, rate = read_wav(tmp_path / "x.wav")
    assert rate == 48000 and 0.5 < len(samples) / rate < 1.1
    assert np.sqrt(np.mean((samples / 32768.0) ** 2)) > 0.01


def test_ctrl_c_stops_the_server(tmp_path):
    process = subprocess.Popen(
        DEMO,
        env=environment(OUT=tmp_path / "x.wav", TEXT=f"{SENTENCE} and " * 20),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while not processes_below(process.pid, "tritonserver"):
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, error) == (1, "cancelled\n")
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert not (tmp_path / "x.wav").exists()
