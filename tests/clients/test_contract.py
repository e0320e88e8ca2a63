"""docs/contract.md is so: its examples run, its errors come word for word, its tables name what there is."""

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile
from triton_server import ROOT

from dq_engine.audio.file_encoder import MP3_RATES, OPUS_RATES
from dq_engine.audio.input import decode_audio
from dq_engine.audio.output import FORMATS
from dq_engine.errors import RequestError

CONTRACT = (ROOT / "docs/contract.md").read_text()
SOURCE = "".join(path.read_text() for path in (ROOT / "backend_src/dq_engine").rglob("*.py"))
TONE = 0.5 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)


def section(title: str) -> str:
    return CONTRACT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables' rows, without their heads."""
    lines = [line for line in re.sub(r"^\|.*\n\|(?:-+\|)+\n", "", text, flags=re.M).splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


ENCODE = section("voxcpm2_encode")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", CONTRACT, re.MULTILINE | re.DOTALL)


def run(server, command: list[str], folder: Path) -> str:
    """What a program of the page prints; it finds the server where this one is."""
    command[-1] = command[-1].replace("localhost:8001", server.grpc_url).replace("localhost:8000", server.http_url)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def recording(samples=TONE, rate=48_000, format="WAV", subtype=None) -> bytes:
    data = io.BytesIO()
    soundfile.write(data, samples, rate, format=format, subtype=subtype)
    return data.getvalue()


def seconds(path: Path, **options) -> float:
    samples, rate = soundfile.read(path, **options)
    assert np.sqrt(np.mean(samples**2)) > 0.01  # it speaks
    return len(samples) / rate


def test_the_grpc_example(server, tmp_path):
    (code,) = (block for block in blocks("python") if "start_stream" in block)
    said = run(server, [sys.executable, "-c", code], tmp_path)
    stats = json.loads(said.removeprefix("stop "))
    assert seconds(tmp_path / "hello.opus") == pytest.approx(stats["audio_s"])


def test_the_http_example(server, tmp_path):
    (code,) = (block for block in blocks("python") if "generate_stream" in block)
    said = run(server, [sys.executable, "-c", code], tmp_path)
    assert said.startswith("stop {'seed': ")
    options = {"samplerate": 8_000, "channels": 1, "format": "RAW", "subtype": "ULAW"}
    assert 1.5 <= seconds(tmp_path / "hello.ulaw", **options) <= 5


def test_the_example_of_a_continuation(server, tmp_path):
    (code,) = (block for block in blocks("python") if "prompt_latents" in block)
    assert run(server, [sys.executable, "-c", code], tmp_path) == ""
    assert 1.5 <= seconds(tmp_path / "one.flac") <= 5
    assert 0.6 <= seconds(tmp_path / "two.flac") <= 15


def test_the_example_of_a_recording_that_is_encoded_once(server, tmp_path):
    (code,) = (block for block in blocks("python") if "voxcpm2_encode" in block)
    (tmp_path / "voice.mp3").write_bytes(recording(format="MP3"))
    assert run(server, [sys.executable, "-c", code], tmp_path) == ""
    for number in range(2):
        assert 0.6 <= seconds(tmp_path / f"{number}.flac") <= 15


def test_the_curl_example(server, tmp_path):
    (command,) = blocks("sh")
    (tmp_path / "voice.mp3").write_bytes(recording(format="MP3"))
    assert run(server, ["bash", "-euc", command], tmp_path) == ""
    assert 0.6 <= seconds(tmp_path / "out.mp3") <= 15


def test_the_length_of_a_streamed_flac_file(server):
    names = {}
    (code,) = (block for block in blocks("python") if "def flac_with_length" in block)
    exec(code, names)
    fields = {"text": "hello there", "output_format": "flac_base64", "sample_rate": 16_000}
    url = f"http://{server.http_url}/v2/models/voxcpm2/generate_stream"
    lines = httpx.post(url, json=fields, timeout=60).text.splitlines()
    events = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
    assert len(events) > 1
    data = b"".join(base64.b64decode(event["audio_bytes"]) for event in events)
    count = round(json.loads(events[-1]["stats"])["audio_s"] * 16_000)
    samples, rate = soundfile.read(io.BytesIO(names["flac_with_length"](data, count)))
    assert (len(samples), rate) == (count, 16_000)


ERRORS = rows(section("Errors"))
ANSWERS = [(json.loads(row[0].strip("`")), row[1].strip("`")) for row in ERRORS if row[0].startswith("`{")]


@pytest.mark.parametrize(("fields", "answer"), ANSWERS, ids=lambda value: str(value)[:40])
def test_answers_to_wrong_requests(server, fields, answer):
    fields = {name: [0] * value if name.endswith("latents") else value for name, value in fields.items()}
    request = {"text": "hello", "stream": False} | fields
    response = httpx.post(f"http://{server.http_url}/v2/models/voxcpm2/generate", json=request, timeout=60)
    assert (response.status_code, response.json()) == (400, {"error": answer})


def wrong_recordings() -> dict[str, bytes]:
    wav, flac = recording(), recording(format="FLAC")
    ogg, mp3 = recording(format="OGG", subtype="OPUS"), recording(format="MP3")
    long_flac = recording(np.zeros(61 * 8_000), 8_000, "FLAC")
    word = int.from_bytes(long_flac[18:26], "big") >> 36 << 36
    return {
        "half of a wav file": wav[: 44 + 48_000],
        "half of an ogg file": ogg[: len(ogg) // 2],
        "an ogg file without its last page": ogg[: ogg.rindex(b"OggS")],
        "half of an mp3 file": mp3[: len(mp3) // 2],
        "half of a flac file": flac[: len(flac) // 2],
        "a header and nothing behind it": b"fLaC",
        "ADPCM": recording(subtype="MS_ADPCM"),
        "61 seconds": recording(np.zeros(61 * 8_000), 8_000),
        "61 seconds, as a flac file of unknown length": long_flac[:18] + word.to_bytes(8, "big") + long_flac[26:],
        "silence": recording(np.zeros(48_000)),
        "float samples with a NaN": recording(np.where(np.arange(48_000) == 5, np.nan, TONE), subtype="FLOAT"),
        "float samples of 16 bits' range": recording(32_768 * TONE, subtype="FLOAT"),
        "a rate of 4,000 Hz": recording(rate=4_000),
        "nine channels": recording(np.stack([TONE] * 9, axis=1)),
        "17 MiB": wav + bytes(17 * 2**20 - len(wav)),
    }


def test_answers_to_wrong_recordings():
    described = {when: answer.strip("`") for when, answer in (row for row in ERRORS if len(row) == 2)}
    given = wrong_recordings()
    answers = {}
    for when, data in given.items():
        with pytest.raises(RequestError) as error:
            decode_audio(data, "f", 16_000)
        answers[when] = error.value.message.removeprefix("f: ")
    assert {when: described.get(when) for when in given} == answers


def test_answers_about_the_servers_state_are_in_the_source():
    answers = [row[0] for row in ERRORS if re.match(r"`(UNAVAILABLE|INTERNAL): ", row[0])]
    assert len(answers) == 6
    for answer in answers:
        words = answer.strip("`").partition(": ")[2]
        assert all(part in SOURCE for part in re.split(r"\b\d+\b", words)), answer


ENCODE_ERRORS = [(json.loads(row[0].strip("`")), row[1].strip("`")) for row in rows(ENCODE) if row[0].startswith("`{")]


@pytest.mark.parametrize(("fields", "answer"), ENCODE_ERRORS, ids=lambda value: str(value)[:40])
def test_answers_to_what_cannot_be_encoded(server, fields, answer):
    response = httpx.post(f"http://{server.http_url}/v2/models/voxcpm2_encode/generate", json=fields, timeout=60)
    assert (response.status_code, response.json()) == (400, {"error": answer})


ENCODE_INPUTS, ENCODE_OUTPUTS = re.findall(r"^\| (?:in|out)put \|.*\n(?:\|.*\n)+", ENCODE, re.MULTILINE)


@pytest.mark.parametrize(
    ("model", "kind", "table"),
    [
        ("voxcpm2", "input", section("Inputs")),
        ("voxcpm2", "output", section("Outputs")),
        ("voxcpm2_encode", "input", ENCODE_INPUTS),
        ("voxcpm2_encode", "output", ENCODE_OUTPUTS),
    ],
    ids=["inputs", "outputs", "encode-inputs", "encode-outputs"],
)
def test_the_tables_are_those_of_the_model_configuration(model, kind, table):
    configuration = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    listed = re.search(rf"^{kind} \[\n(.*?)^\]", configuration, re.MULTILINE | re.DOTALL)[1]
    types = {"TYPE_STRING": {"STRING", "BYTES"}}
    expected = re.findall(r'name: "(\w+)", data_type: (\w+), dims: \[ (.*?) \]', listed)
    described = []
    for names, type_and_shape, *_ in rows(table):
        type, _, shape = type_and_shape.partition(" ")
        described += [(name, type, shape.strip("[]") or "1") for name in re.findall(r"`(\w+)`", names)]
    assert sorted(name for name, _, _ in described) == sorted(name for name, _, _ in expected)
    for name, type, shape in expected:
        (its,) = (row for row in described if row[0] == name)
        assert its[1] in types.get(type, {type.removeprefix("TYPE_")}), name
        assert its[2] == shape, name


def test_every_format_and_its_rates():
    table = rows(section("Output formats"))
    assert [name for row in table for name in re.findall(r"`(\w+)`", row[0])] == list(FORMATS)
    rates = {row[0].strip("`"): tuple(int(rate.replace(",", "")) for rate in row[2].split(", ")) for row in table[-2:]}
    assert rates == {"mp3": MP3_RATES, "opus": OPUS_RATES}


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", CONTRACT)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link.partition("#")[0]).exists()] == []
