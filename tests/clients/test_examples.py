"""client_examples/ as a user runs them: their own processes, against a real server."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import av
import numpy as np
import pytest
import soundfile
from forwarder import Forwarder
from triton_server import ROOT, TritonServer, free_ports
from wav import read_wav

TEXT = "rachel wants five pretty flowers"
EXAMPLES = ["speak.py", "speak_http.py"]


def command(example: str, *arguments: str, port: int) -> list[str]:
    url = f"localhost:{port}" if example == "speak.py" else f"http://localhost:{port}"
    return [sys.executable, str(ROOT / "client_examples" / example), *arguments, "--url", url]


def speak(example: str, server, *arguments: str) -> subprocess.CompletedProcess:
    port = server.grpc_port if example == "speak.py" else server.http_port
    return subprocess.run(command(example, *arguments, port=port), capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def recording(server, tmp_path_factory):
    """A wav file of TEXT, spoken by the small model."""
    path = tmp_path_factory.mktemp("recording") / "voice.wav"
    result = speak("speak.py", server, TEXT, "--seed", "0", "--output", str(path))
    assert result.returncode == 0, result.stderr
    return path


@pytest.mark.parametrize("example", EXAMPLES)
def test_writes_a_wav_file_and_prints_the_figures(example, server, tmp_path, recording):
    output = tmp_path / "out.wav"
    result = speak(example, server, TEXT, "--seed", "0", "--output", str(output))
    assert (result.returncode, result.stderr) == (0, "")
    samples, rate = read_wav(output)
    assert rate == 48000
    assert len(samples) % 7680 == 0  # whole patches
    assert 1.5 <= len(samples) / rate <= 5
    assert np.sqrt(np.mean((samples / 32768.0) ** 2)) > 0.01  # it speaks
    first, second = result.stdout.splitlines()
    assert first == f"{output}: {len(samples) / rate:.2f} s of audio, finish reason: stop"
    ttfb_ms, rtf = re.fullmatch(r"TTFB (\d+) ms, RTF (\d+\.\d\d)", second).groups()
    assert 1 <= int(ttfb_ms) < 60_000
    assert 0.01 < float(rtf) < 20
    # The same seed, in another process or over the other protocol, is the same audio, to 1e-3 of full scale.
    assert np.abs(samples.astype(int) - read_wav(recording)[0]).max() <= 33


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("option", ["reference", "prompt", "control", "other seed"])
def test_every_option_reaches_the_model(example, option, server, tmp_path, recording):
    arguments = {
        "reference": ["--seed", "0", "--reference", str(recording)],
        "prompt": ["--seed", "0", "--prompt-audio", str(recording), "--prompt-text", TEXT],
        "control": ["--seed", "0", "--control", "awb"],
        "other seed": ["--seed", "1"],
    }[option]
    output = tmp_path / "out.wav"
    result = speak(example, server, TEXT, *arguments, "--output", str(output))
    assert result.returncode == 0, result.stderr
    samples, plain = read_wav(output)[0], read_wav(recording)[0]
    assert len(samples) >= 4 * 7680
    assert len(samples) != len(plain) or not np.array_equal(samples, plain)


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("suffix", [".flac", ".mp3", ".OPUS", ".ogg"])
def test_the_suffix_chooses_the_format(example, suffix, server, tmp_path, recording):
    output = tmp_path / f"out{suffix}"
    result = speak(example, server, TEXT, "--seed", "0", "--output", str(output))
    assert (result.returncode, result.stderr) == (0, "")
    about = soundfile.info(output)
    assert (about.format, about.subtype) == {
        ".flac": ("FLAC", "PCM_16"),
        ".mp3": ("MP3", "MPEG_LAYER_III"),
        ".opus": ("OGG", "OPUS"),
        ".ogg": ("OGG", "OPUS"),
    }[suffix.lower()]
    samples, rate = soundfile.read(output, dtype="int16")
    known = read_wav(recording)[0]
    assert rate == 48000
    if suffix == ".flac":
        assert np.abs(samples.astype(int) - known).max() <= 33
    else:  # an mp3 has its codec's delay
        assert 0 <= len(samples) - len(known) <= (4000 if suffix == ".mp3" else 0)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("out.aac", "{}/out.aac must end in one of .wav, .flac, .mp3, .opus, .ogg"),
        ("no/out.wav", "there is no directory {}/no"),
    ],
)
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_file_that_cannot_be_written(example, tmp_path, output, reason):
    """It is said before anything is spoken."""
    words = command(example, TEXT, "--output", str(tmp_path / output), port=1)
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, f"error: --output: {reason.format(tmp_path)}\n")


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_text_that_may_be_cut_off_is_said(example, server, tmp_path):
    result = speak(example, server, TEXT, "--max-generate-length", "3", "--output", str(tmp_path / "out.wav"))
    assert result.returncode == 0
    assert result.stdout.splitlines()[0].endswith(": 0.48 s of audio, finish reason: length")
    assert re.fullmatch(r"warning: .* cut off: .*--max-generate-length, or .* sentence by sentence\n", result.stderr)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_adapter_is_asked_for(example, server):
    result = speak(example, server, TEXT, "--lora", "ann")
    assert result.stderr == 'error: NOT_FOUND: lora: there is no registered adapter named "ann"\n'


@pytest.mark.parametrize(
    ("example", "scheme"),
    [("speak.py", "grpc://"), ("speak.py", "http://"), ("speak_http.py", ""), ("speak_http.py", "http://")],
)
def test_the_address_from_the_environment_with_and_without_a_scheme(example, scheme, server, tmp_path):
    urls = {"speak.py": ("VOXCPM_URL", server.grpc_url), "speak_http.py": ("VOXCPM_HTTP_URL", server.http_url)}
    name, url = urls[example]
    words = [sys.executable, str(ROOT / "client_examples" / example), TEXT, "--max-generate-length", "1"]
    words += ["--output", str(tmp_path / "out.wav")]
    environment = {**os.environ, name: scheme + url}
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert len(read_wav(tmp_path / "out.wav")[0]) == 7680


@pytest.mark.parametrize("example", EXAMPLES)
def test_errors_of_the_server_are_one_line(example, server, tmp_path):
    output = tmp_path / "out.wav"
    result = speak(example, server, TEXT, "--prompt-text", "hello", "--output", str(output))
    words = "a prompt is a recording and its words"
    assert result.stderr == f"error: INVALID_ARG: prompt_audio: is required with prompt_text: {words}\n"
    assert (result.returncode, result.stdout, output.exists()) == (1, "", False)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_recording_that_is_none(example, server, tmp_path):
    text = tmp_path / "voice.wav"
    text.write_text("this is no audio\n" * 100)
    result = speak(example, server, TEXT, "--reference", str(text))
    assert result.stderr.startswith("error: INVALID_ARG: reference_audio: ")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ([TEXT, "--seed", str(2**63)], 1, f"--seed: must be between 0 and 2^63 - 1, got {2**63}"),
        (
            ["a", "--max-generate-length", "-1"],
            1,
            "--max-generate-length: must be between 0 and 2^31 - 1, got -1",
        ),
        ([b"na\xefve"], 2, "argument text: invalid utf8 value: 'na\\udcefve'"),
    ],
)
def test_arguments_that_cannot_be_sent(example, arguments, status, reason):
    result = subprocess.run(command(example, *arguments, port=1), capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    assert result.stderr.splitlines()[-1].endswith(f"error: {reason}")


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_server_there(example, tmp_path):
    (port,) = free_ports(1)
    began = time.monotonic()
    result = subprocess.run(command(example, TEXT, port=port), capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert time.monotonic() - began < 20
    assert result.stderr.startswith("error: no answer from ")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_file_that_cannot_be_read_or_written(example, server, tmp_path):
    (tmp_path / "out.wav").mkdir()
    for arguments, message in [
        (["--reference", "/none/voice.wav"], "/none/voice.wav: No such file or directory"),
        (["--output", str(tmp_path / "out.wav")], f"{tmp_path}/out.wav: Is a directory"),
    ]:
        result = speak(example, server, TEXT, *arguments)
        assert (result.returncode, result.stderr) == (1, f"error: {message}\n")


@pytest.mark.parametrize("example", EXAMPLES)
def test_ctrl_c_cancels_the_request(example, server, tmp_path):
    port = server.grpc_port if example == "speak.py" else server.http_port
    long_text = f"{TEXT} and " * 20
    wait_for_streams(server, 0)  # the metrics may still speak of the test before
    process = subprocess.Popen(
        command(example, long_text, "--output", str(tmp_path / "out.wav"), port=port),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_streams(server, 1)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, error) == (1, "", "cancelled\n")
    wait_for_streams(server, 0)
    assert not (tmp_path / "out.wav").exists()


def test_a_server_that_stops_half_way(tmp_path):
    """What has come is kept."""
    with TritonServer(model=ROOT / "models" / "small") as own:
        jobs = [("speak.py", own.grpc_port, "a.mp3"), ("speak_http.py", own.http_port, "b.opus")]
        processes = [
            subprocess.Popen(
                command(example, f"{TEXT} and " * 20, "--output", str(tmp_path / name), port=port),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for example, port, name in jobs
        ]
        try:
            wait_for_streams(own, 2)
            wait_for_metric(own, r"voxcpm2_patches_total{.*} \d{2,}")
            own.stop()
            for process, (_, _, name) in zip(processes, jobs, strict=True):
                out, error = process.communicate(timeout=5)
                assert (process.returncode, out) == (1, "")
                partial = f"({tmp_path / name} is partial: it holds what came before)"
                assert error == f"error: UNAVAILABLE: the server is shutting down {partial}\n"
                assert speech(tmp_path / name) > 0.3
        finally:
            for process in processes:
                process.kill()


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_a_connection_that_breaks_half_way(example, suffix, server, tmp_path):
    output = tmp_path / f"out{suffix}"
    with Forwarder(server.grpc_port if example == "speak.py" else server.http_port, cut_after=150_000) as forwarder:
        words = [f"{TEXT} and " * 20, "--seed", "0", "--output", str(output)]
        words = [*command(example, *words, port=0)[:-1], forwarder.url]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"error: the connection was lost: .*\n", result.stderr)
    assert result.stderr.endswith(f" ({output} is partial: it holds what came before)\n")
    assert speech(output) > 0.5


def speech(path) -> float:
    """Seconds of a file that holds speech."""
    with av.open(path) as file:
        frames = [np.asarray(frame.to_ndarray(), np.float64) for frame in file.decode(audio=0)]
        rate = file.streams.audio[0].rate
    samples = np.concatenate(frames, axis=1).ravel()
    assert samples.std() > 0.05 * np.abs(samples).max() > 0
    return len(samples) / rate


def wait_for_streams(server, count: int) -> None:
    """Until the server's metrics speak of this many running streams."""
    wait_for_metric(server, rf"voxcpm2_active_streams{{.*}} {count}")


def wait_for_metric(server, line: str) -> None:
    """Until the server's metrics, which it refreshes once a second, have such a line."""
    end = time.monotonic() + 15
    while True:
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=5) as response:
            if re.search(rf"^{line}$", response.read().decode(), re.MULTILINE):
                return
        assert time.monotonic() < end, f"the server's metrics never had {line}"
        time.sleep(0.1)


def test_the_result_is_readable_by_others(recording):
    samples, rate = soundfile.read(recording, dtype="int16")
    assert rate == 48000
    assert np.array_equal(samples, read_wav(recording)[0])
