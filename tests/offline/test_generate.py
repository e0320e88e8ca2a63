"""`voxcpm-generate` as its users run it, and that it keeps an engine busy."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from reference.recordings import write_voice
from triton_server import ROOT
from tritonclient import grpc as grpcclient

from dq_engine.audio.output import pcm16
from dq_engine.engine import DqCoreEngine, EngineConfig, Request
from dq_engine.offline.batch import speak_all
from dq_engine.offline.manifest import Item, Row

SMALL = str(ROOT / "models" / "small")
COMMAND = [sys.executable, "-m", "dq_engine.offline.command"]
SENTENCES = ["rachel wants five pretty flowers", "peter sells nine green toys", "hello there"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_voice(tmp_path / "voice.wav", seconds=0.5, rate=44_100, channels=2)
    return tmp_path


def start(folder: Path, rows: list[dict | str], *options: str) -> subprocess.Popen:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "manifest.jsonl").write_text("\n".join(lines))
    settings = {"DQ_ENGINE_MODEL": SMALL, "DQ_ENGINE_DEVICE": "cpu", "DQ_ENGINE_MAX_NUM_SEQS": "2"}
    # A server's, perhaps: no item is to fail of them.
    settings |= {"DQ_ENGINE_QUEUE_SIZE": "1", "DQ_ENGINE_QUEUE_TIMEOUT_S": "0.001"}
    return subprocess.Popen(
        [*COMMAND, str(folder / "manifest.jsonl"), str(folder / "out"), *options],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def generate(folder: Path, rows: list[dict | str], *options: str) -> tuple[int, str, str]:
    """Exit status, standard output and error."""
    process = start(folder, rows, *options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def table(folder: Path) -> list[dict]:
    with (folder / "out" / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def served(server, fields: dict) -> np.ndarray:
    """The samples, int16 [n], that the server answers with."""
    kinds = {"seed": ("INT64", np.int64), "cfg_value": ("FP32", np.float32)}
    inputs = []
    for name, value in {**fields, "output_format": "pcm16"}.items():
        kind, dtype = kinds.get(name, ("BYTES", np.object_))
        tensor = grpcclient.InferInput(name, [1], kind)
        tensor.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype))
        inputs.append(tensor)
    pieces: list = []
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: pieces.append(error or result))
        client.async_stream_infer("voxcpm2", inputs)
        ends = time.monotonic() + 60
        while not pieces or pieces[-1].as_numpy("finish_reason") is None:
            assert time.monotonic() < ends
            time.sleep(0.02)
    return np.frombuffer(b"".join(piece.as_numpy("audio_bytes")[0] for piece in pieces), "<i2")


def test_a_manifest_becomes_what_the_server_says(server, folder):
    rows = [
        {"id": "plain", "text": SENTENCES[0], "seed": 1},
        {"id": "guided", "text": SENTENCES[1], "cfg_value": 1.5},
        {"id": "cloned", "text": SENTENCES[2], "reference": "voice.wav", "seed": 2},
        {"id": "../outside", "text": "hello"},
        {"id": "continued", "text": SENTENCES[2], "prompt": "voice.wav", "prompt_text": SENTENCES[1], "seed": 4},
        {"id": "silent", "text": " "},
        "no JSON",
        {"id": "unheard", "text": "hello", "reference": "nothing.wav"},
        {"id": "unknown", "text": "hello", "lora": "nobody"},
        {"id": "no text", "text": "\ud800"},
        {"id": "beyond", "text": "hello", "seed": 10**30},
    ]
    status, out, err = generate(folder, rows, "--seed", "5")
    assert status == 1, err
    assert out.startswith("4 spoken, 0 done before, 7 failed; ")
    assert re.search(r"8/8 \[.*, \d+\.\d s of audio a second\]", err), "all but those that are wrong by themselves"
    voice = (folder / "voice.wav").read_bytes()
    requests = {
        "plain": {"text": SENTENCES[0], "seed": 1},
        "guided": {"text": SENTENCES[1], "seed": 5, "cfg_value": 1.5},
        "cloned": {"text": SENTENCES[2], "seed": 2, "reference_audio": voice},
        "continued": {"text": SENTENCES[2], "seed": 4, "prompt_audio": voice, "prompt_text": SENTENCES[1]},
    }
    shown = {row["id"]: row for row in table(folder)}
    ids = [row["id"] if isinstance(row, dict) and row["id"] != "no text" else "" for row in rows]
    assert [row["id"] for row in table(folder)] == ids
    for id, fields in requests.items():
        samples, rate = soundfile.read(folder / "out" / f"{id}.wav", dtype="int16")
        np.testing.assert_allclose(samples, served(server, fields), atol=33)
        assert (shown[id]["status"], shown[id]["wav"], rate) == ("ok", f"{id}.wav", 48000)
        assert (int(shown[id]["seed"]), 7680 * int(shown[id]["patches"])) == (fields["seed"], len(samples))
        assert float(shown[id]["audio_s"]) == len(samples) / rate
    errors = {id: row["error"] for id, row in shown.items() if row["status"] == "error"}
    assert errors == {
        "../outside": "id: must be 1 to 200 bytes of letters, digits, _ - and . and begin with none of the last two",
        "silent": "INVALID_ARG: text: is empty",
        "": "holds half of a surrogate pair, which is no text",
        "unheard": f"INVALID_ARG: reference: {folder}/nothing.wav is no file",
        "unknown": 'NOT_FOUND: lora: there is no registered adapter named "nobody"',
        "beyond": f"INVALID_ARG: seed: must be between 0 and 2^63 - 1, got {10**30}",
    }
    assert "line 7: is no JSON: Expecting value: line 1 column 1 (char 0)\n" in err
    assert "line 6 (silent): INVALID_ARG: text: is empty\n" in err
    assert sorted(os.listdir(folder)) == ["manifest.jsonl", "out", "voice.wav"]


@pytest.mark.slow
def test_adapters_and_stored_voices(folder, monkeypatch):
    """From a table, with an adapter that is given on the command line and one that the environment has loaded."""
    monkeypatch.setenv("DQ_ENGINE_VOICES_DIR", str(folder / "voices"))
    adapter = ROOT / "models" / "adapters" / "kal"
    settings = {"lora_max_loras": 1, "lora_dir": str(adapter.parent), "max_num_seqs": 4}
    config = EngineConfig(model=SMALL, device="cpu", threads=1, realtime=False, **settings)
    rows = {"plain": {}, "adapted": {"lora": "deep"}, "stored": {"voice": "ann"}}
    rows["both"] = rows["adapted"] | rows["stored"]
    rows["preloaded"] = {"lora": "kal", "seed": 2}
    said = {}
    with DqCoreEngine(config) as engine:
        reference, _ = engine.encode((folder / "voice.wav").read_bytes(), "reference")
        engine.voices.register("ann", reference)
        for name in ("deep", "kal"):
            engine.register_lora(name, "kal")
        for id, fields in rows.items():
            chunks = engine.submit(Request(text=SENTENCES[0], **{"seed": 1} | fields))
            said[id] = pcm16(np.concatenate([chunk.samples for chunk in chunks])).astype(int)
    lines = ["id,text,seed,lora,voice"]
    for id, row in rows.items():
        lines.append(f"{id},{SENTENCES[0]},{row.get('seed', 1)},{row.get('lora', '')},{row.get('voice', '')}")
    (folder / "m.csv").write_text("\r\n".join(lines))
    (folder / "link, or so").symlink_to(adapter.parent)
    for name, value in {"DIR": folder / "link, or so", "PRELOAD": "kal"}.items():
        monkeypatch.setenv(f"DQ_ENGINE_LORA_{name}", str(value))
    shutil.copytree(adapter, folder / "deep")  # not in that folder
    words = [*COMMAND, "m.csv", "out", "--model", SMALL, "--lora", "deep=deep"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5 spoken, 0 done before, 0 failed; ")
    for id, samples in said.items():
        spoken, _ = soundfile.read(folder / "out" / f"{id}.wav", dtype="int16")
        np.testing.assert_allclose(spoken, samples, atol=33)
        others = [other for name, other in said.items() if name != id]
        assert all(other.size != samples.size or np.abs(other - samples).max() > 330 for other in others)
    more = [*words, "--lora", f"more={adapter}"]  # which none of them uses
    again = subprocess.run(more, cwd=folder, capture_output=True, text=True, timeout=120)
    assert again.stdout == "nothing to speak: 5 done before, 0 failed\n"
    (folder / "voices" / "ann.safetensors").unlink()  # what was made with it is made anew, or fails
    monkeypatch.setenv("DQ_ENGINE_LORA_PRELOAD", f"kal={folder / 'deep'}")  # not in the environment's folder
    refused = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and 'must not hold ".."' in refused.stderr
    monkeypatch.setenv("DQ_ENGINE_LORA_PRELOAD", "kal")
    again = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert again.stdout.startswith("0 spoken, 3 done before, 2 failed; ")
    assert 'line 4 (stored): NOT_FOUND: voice: there is no stored voice named "ann"' in again.stderr


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(folder):
    rows = [{"id": f"i{n}", "text": SENTENCES[n % 3], "seed": n} for n in range(30)]
    process = start(folder, rows)
    done = lambda: sorted((folder / "out").glob("*.wav"))  # noqa: E731
    ends = time.monotonic() + 60
    while len(done()) < 3:
        assert time.monotonic() < ends and process.poll() is None
        time.sleep(0.01)
    other, _, err = generate(folder, rows)
    assert (other, err) == (2, f"voxcpm-generate: another process writes to {folder}/out\n")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path: path.stat().st_mtime_ns for path in done()}
    assert 3 <= len(before) < 30
    assert all(soundfile.info(path).frames for path in before)
    journal = (folder / "out" / "results.jsonl").read_text().splitlines()
    with (folder / "out" / "results.jsonl").open("a") as file:
        file.write('{"id": "i29", "finger')  # as a crash may leave it
    rows[0]["seed"] = 100  # this one is to be spoken anew
    status, out, err = generate(folder, rows)
    assert status == 0, err
    kept = [json.loads(line)["id"] for line in journal if '"i0"' not in line]
    assert out.startswith(f"{30 - len(kept)} spoken, {len(kept)} done before, 0 failed; ")
    assert all(before[folder / "out" / f"{id}.wav"] == (folder / "out" / f"{id}.wav").stat().st_mtime_ns for id in kept)
    assert [(row["id"], row["status"], int(row["seed"])) for row in table(folder)] == [
        (row["id"], "ok", row["seed"]) for row in rows
    ]
    assert not list((folder / "out").glob(".*"))
    status, out, _ = generate(folder, rows)
    assert (status, out) == (0, "nothing to speak: 30 done before, 0 failed\n")


@pytest.mark.slow
def test_what_stops_a_run(folder):
    """In --model's words; the table is there all the same."""
    status, _, err = generate(folder, [{"id": "a", "text": "hello"}], "--model", "/nowhere")
    assert status == 1
    assert "voxcpm-generate: /nowhere is neither a directory nor a hub id of the form owner/name\n" in err
    assert [(row["id"], row["status"]) for row in table(folder)] == [("a", "")]


@pytest.mark.slow
def test_no_slot_is_free_while_items_wait():
    """24 items of 8 patches in 4 slots: with all of them busy, 48 steps and the few in which streams begin and end."""
    config = EngineConfig(model=SMALL, device="cpu", threads=1, max_num_seqs=4, realtime=False)
    rows = [Row(id=str(n), text="hello", min_generate_length=8, max_generate_length=8) for n in range(24)]
    with DqCoreEngine(config) as engine:
        before = engine.snapshot()["steps"]
        outcomes = list(speak_all(engine, [Item(n, row.id, row) for n, row in enumerate(rows)], ROOT))
        steps = engine.snapshot()["steps"] - before
    assert sorted(int(outcome.item.id) for outcome in outcomes) == list(range(24))
    assert {outcome.samples.size for outcome in outcomes} == {8 * 7680}
    assert 48 <= steps <= 56
