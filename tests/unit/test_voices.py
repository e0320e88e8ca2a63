"""Stored voices on disk: what is kept, refused, shared by replicas, and left by writers that are ended at any point."""

import json
import multiprocessing
import os
import random
import signal
import stat
import struct
import threading
import time

import numpy as np
import pytest
import torch
from reference.ending import Ending
from safetensors.torch import save

from dq_engine import atomic_folder
from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError
from dq_engine.request import Request
from dq_engine.serving.messages import Result, encode
from dq_engine.voices import VoiceStore

REFERENCE = np.arange(8 * 64, dtype=np.float32).reshape(8, 64) / 100
PROMPT = -REFERENCE[:4]


def open_store(folder, max_count=100, max_bytes=2**30) -> VoiceStore:
    return VoiceStore(folder, max_count, max_bytes, feat_dim=64, patch_size=4)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "voices")


def refusal(function, *arguments, **options) -> str:
    with pytest.raises(RequestError) as error:
        function(*arguments, **options)
    return str(error.value)


def test_a_voice_is_kept(store, tmp_path):
    described = store.register("Ann-1_b", REFERENCE, PROMPT, "häßliche words")
    assert {k: v for k, v in described.items() if k not in ("created", "bytes")} == {
        "name": "Ann-1_b",
        "reference_frames": 8,
        "prompt_frames": 4,
        "prompt_text": "häßliche words",
    }
    assert described["created"].endswith("+00:00")
    for seen in store, open_store(tmp_path / "voices"):
        voice = seen.get("Ann-1_b")
        assert (voice.reference_latents == REFERENCE).all()
        assert (voice.prompt_latents == PROMPT).all()
        assert voice.prompt_text == "häßliche words"
        assert seen.describe_all() == [described]
    assert stat.S_IMODE((tmp_path / "voices").stat().st_mode) == 0o700
    assert [p.name for p in (tmp_path / "voices").iterdir()] == ["Ann-1_b.safetensors"]


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "../a", "a/b", "ä", "a.b", "a\n", "a\0"])
def test_names_that_cannot_be(store, name):
    words = "must be 1 to 64 letters, digits, - or _"
    assert refusal(store.register, name, REFERENCE) == f"INVALID_ARG: name: {words}"
    assert refusal(store.get, name) == f"INVALID_ARG: voice: {words}"
    assert refusal(store.delete, name) == f"INVALID_ARG: name: {words}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "reference_latents: a voice holds a reference, a prompt or both"),
        ({"prompt_latents": PROMPT}, "prompt_text: is required with prompt audio: a prompt is a recording"),
        ({"reference_latents": PROMPT, "prompt_text": "a"}, "prompt_audio: is required with prompt_text: "),
        ({"prompt_latents": PROMPT, "prompt_text": " "}, "prompt_text: is empty"),
        ({"reference_latents": REFERENCE[:3]}, "reference_latents: must have a multiple of 4 frames"),
        ({"reference_latents": REFERENCE[:, :8]}, "reference_latents: must have shape [frames, 64], got [8, 8]"),
        ({"reference_latents": REFERENCE * np.nan}, "reference_latents: has values that are not finite"),
        (
            {"reference_latents": np.zeros((8196, 64), np.float32)},
            "reference_latents: has 8196 frames, the limit is 8192",
        ),
    ],
)
def test_voices_that_cannot_be(store, fields, message):
    assert refusal(store.register, "ann", **fields).startswith(f"INVALID_ARG: {message}")
    assert store.describe_all() == []


def test_a_voice_that_is_not_there(store):
    words = 'there is no stored voice named "bob"'
    assert refusal(store.get, "bob") == f"NOT_FOUND: voice: {words}"
    assert refusal(store.describe, "bob") == f"NOT_FOUND: name: {words}"
    assert refusal(store.delete, "bob") == f"NOT_FOUND: name: {words}"


def test_a_name_is_taken_once(store):
    store.register("ann", REFERENCE)
    message = 'ALREADY_EXISTS: name: there is a stored voice named "ann"; delete it first'
    assert refusal(store.register, "ann", PROMPT) == message
    assert (store.get("ann").reference_latents == REFERENCE).all()


def test_of_two_at_once_one_wins_and_the_others_are_told(tmp_path):
    stores = [open_store(tmp_path / "voices") for _ in range(4)]
    for operation, expected in ("register", "ALREADY_EXISTS"), ("delete", "NOT_FOUND"):
        barrier, results = threading.Barrier(8), []

        def run(store, operation=operation, barrier=barrier, results=results):
            barrier.wait()
            try:
                arguments = ("ann", REFERENCE) if operation == "register" else ("ann",)
                getattr(store, operation)(*arguments)
                results.append("done")
            except RequestError as error:
                results.append(error.code)

        threads = [threading.Thread(target=run, args=(store,)) for store in stores * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(results) == sorted(["done"] + [expected] * 7)


def test_quotas(tmp_path):
    store = open_store(tmp_path / "count", max_count=2)
    store.register("a", REFERENCE)
    store.register("b", REFERENCE)
    message = "UNAVAILABLE: 2 voices are stored, the limit is voices_max_count"
    assert refusal(store.register, "c", REFERENCE) == message
    store.delete("a")
    size = store.register("c", REFERENCE)["bytes"]

    store = open_store(tmp_path / "bytes", max_bytes=2 * size)
    store.register("a", REFERENCE)
    store.register("b", REFERENCE)
    message = f"UNAVAILABLE: {2 * size} bytes of voices are stored and this has {size}, the limit is voices_max_bytes"
    assert refusal(store.register, "c", REFERENCE) == message


def test_a_full_disk_leaves_nothing(store, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_folder.os, "fsync", full)
    message = "UNAVAILABLE: the folder of voices cannot be changed: No space left on device"
    assert refusal(store.register, "ann", REFERENCE) == message
    assert list((tmp_path / "voices").iterdir()) == []


@pytest.mark.parametrize("call", range(1, 8))
def test_a_fault_at_any_call_of_the_system_leaves_nothing(store, tmp_path, call, monkeypatch):
    """No file handles, say: who is told that his voice was refused finds none."""
    count = 0

    def counted(function):
        def call_or_fail(*arguments, **options):
            nonlocal count
            count += 1
            if count == call:
                raise OSError(24, "Too many open files")
            return function(*arguments, **options)

        return call_or_fail

    with monkeypatch.context() as faulty:
        for name in "open", "fsync":
            faulty.setattr(atomic_folder.os, name, counted(getattr(os, name)))
        for name in "open", "rename":
            faulty.setattr(atomic_folder.Path, name, counted(getattr(atomic_folder.Path, name)))
        try:
            described = store.register("ann", REFERENCE)
        except RequestError as error:
            described = None
            assert str(error) == "UNAVAILABLE: the folder of voices cannot be changed: Too many open files"
    assert (described is not None) == (call > count)
    assert store.describe_all() == ([] if described is None else [described])
    assert len(list((tmp_path / "voices").iterdir())) == (described is not None)


def test_a_folder_that_is_gone(store, tmp_path):
    store.register("ann", REFERENCE)
    (tmp_path / "voices").rename(tmp_path / "elsewhere")
    message = "UNAVAILABLE: the folder of voices cannot be changed: No such file or directory"
    assert refusal(store.register, "bob", REFERENCE) == message
    assert refusal(store.delete, "ann") == message
    assert refusal(store.describe_all) == message.replace("changed", "read")
    message = 'the folder of "ann.safetensors" cannot be opened: No such file or directory'
    assert refusal(store.get, "ann") == f"UNAVAILABLE: voice: {message}"
    assert refusal(store.describe, "ann") == f"UNAVAILABLE: name: {message}"
    (tmp_path / "elsewhere").rename(tmp_path / "voices")
    assert (store.get("ann").reference_latents == REFERENCE).all()


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file cannot be used: File exists"):
        EngineConfig(model="m", voices_dir=str(tmp_path / "file"))
    store = open_store(tmp_path / "file")  # a worker that is started again serves all the same
    assert refusal(store.register, "ann", REFERENCE).startswith("UNAVAILABLE: the folder of voices cannot be changed: ")
    assert refusal(store.get, "ann").startswith("UNAVAILABLE: voice: the folder of ")
    (tmp_path / "file").unlink()
    (tmp_path / "file").mkdir()
    store.register("ann", REFERENCE)


def test_replicas_see_each_others_voices_and_deletions(tmp_path):
    one, other = open_store(tmp_path / "voices"), open_store(tmp_path / "voices")
    one.register("ann", REFERENCE)
    assert (other.get("ann").reference_latents == REFERENCE).all()
    held = other.get("ann")
    one.delete("ann")
    assert refusal(other.get, "ann").startswith("NOT_FOUND: ")
    one.register("ann", PROMPT)
    assert (other.get("ann").reference_latents == PROMPT).all()
    assert (held.reference_latents == REFERENCE).all()  # who uses the old one goes on
    one.delete("ann")
    one.register("ann", REFERENCE[:4])  # while nobody looked
    assert (other.get("ann").reference_latents == REFERENCE[:4]).all()


def test_a_voice_is_read_once(store, monkeypatch):
    store.register("ann", REFERENCE)
    first = store.get("ann")
    assert store.get("ann") is first
    store.delete("ann")
    store.register("ann", REFERENCE)
    assert store.get("ann") is not first


def test_the_memory_of_voices_is_bounded(store, monkeypatch):
    monkeypatch.setattr("dq_engine.voices._CACHE_BYTES", 2 * REFERENCE.nbytes)
    for name in "abc":
        store.register(name, REFERENCE)
    a, b, _ = (store.get(name) for name in "abc")
    assert store.get("b") is b
    assert store.get("a") is not a


@pytest.mark.parametrize("damage", ["short", "noise", "metadata", "values", "link", "large"])
def test_damaged_files_are_told_of_and_harm_nobody(store, tmp_path, damage):
    store.register("ann", REFERENCE)
    store.register("bob", PROMPT)
    path = tmp_path / "voices" / "ann.safetensors"
    data = path.read_bytes()
    if damage == "short":
        path.write_bytes(data[:-1])
    elif damage == "noise":
        path.write_bytes(os.urandom(len(data)))
    elif damage == "metadata":
        path.write_bytes(data.replace(b"prompt_text", b"prompt_tent"))
    elif damage == "values":
        path.write_bytes(data[:-4] + np.array([np.inf], np.float32).tobytes())
    elif damage == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(data + bytes(9 * 2**20))
    assert refusal(store.get, "ann").startswith('INTERNAL: voice: the stored voice "ann" is damaged')
    assert [voice["name"] for voice in store.describe_all()] == ["ann", "bob"]
    assert (store.get("bob").reference_latents == PROMPT).all()
    store.delete("ann")
    store.register("ann", REFERENCE)
    assert (store.get("ann").reference_latents == REFERENCE).all()


ABOUT = {"version": 1, "prompt_text": None, "created": "2026-11-30T13:00:00+00:00"}
HOSTILE = {
    "a huge shape": ({"shape": [10**30, 64]}, ABOUT),
    "a shape of something else": ({"shape": [{"a": [1]}, 64]}, ABOUT),
    "no shape": ({"shape": []}, ABOUT),
    "half of a surrogate pair": ({}, ABOUT | {"prompt_text": "\ud800"}),
    "a long text": ({}, ABOUT | {"prompt_text": "a" * 500_000}),
    "a text that is none": ({}, ABOUT | {"prompt_text": ["a"]}),
    "no time": ({}, ABOUT | {"created": "\ud800"}),
    "a time that is none": ({}, ABOUT | {"created": {"a": 1}}),
}


@pytest.mark.parametrize(("tensor", "about"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_told_of_in_words_that_can_be_sent(store, tmp_path, tensor, about):
    data = np.zeros((4, 64), np.float32).tobytes()
    tensor = {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, len(data)]} | tensor
    header = json.dumps({"__metadata__": {"voice": json.dumps(about)}, "reference_latents": tensor}).encode()
    (tmp_path / "voices" / "ann.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    told = 'the stored voice "ann" is damaged'
    assert refusal(store.get, "ann").startswith(f"INTERNAL: voice: {told}")
    assert refusal(store.describe, "ann").startswith(f"INTERNAL: name: {told}")
    (described,) = store.describe_all()
    assert (described["name"], sorted(described)) == ("ann", ["error", "name"])
    assert len(encode(Result(1, described))) < 400


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_latents_of_another_type(store, tmp_path, dtype):
    data = save({"reference_latents": torch.zeros(8, 64, dtype=dtype)}, {"voice": json.dumps(ABOUT)})
    (tmp_path / "voices" / "ann.safetensors").write_bytes(data)
    for look, field in (store.get, "voice"), (store.describe, "name"):
        message = f'INTERNAL: {field}: the stored voice "ann" is damaged: {field}: its latents are not float32'
        assert refusal(look, "ann") == message


def test_other_files_in_the_folder_are_left_alone(store, tmp_path):
    (tmp_path / "voices" / "notes.txt").write_text("mine")
    (tmp_path / "voices" / "a b.safetensors").write_text("mine")
    store.register("ann", REFERENCE)
    assert [voice["name"] for voice in store.describe_all()] == ["ann"]
    assert (tmp_path / "voices" / "notes.txt").exists()


def _is_whole_or_absent(store: VoiceStore) -> bool:
    try:
        voice = store.get("ann")
    except RequestError as error:
        assert error.code == "NOT_FOUND", error
        return False
    assert (voice.reference_latents == REFERENCE).all()
    return True


def _ended_at(step: int, folder) -> None:
    """Register a voice, and be gone at the given call of the system, half of its data written."""
    ending = Ending(step)
    real_open, real_rename = atomic_folder.Path.open, atomic_folder.Path.rename
    atomic_folder.Path.open = lambda path, mode: ending.halved(real_open(path, mode))
    atomic_folder.Path.rename = ending.counted(real_rename)
    atomic_folder.os.fsync = ending.counted(os.fsync)
    open_store(folder).register("ann", REFERENCE)
    os._exit(0)


def test_a_writer_that_is_ended_at_any_step_leaves_a_whole_voice_or_none(tmp_path):
    fork = multiprocessing.get_context("fork")
    found = []
    for step in range(1, 20):
        folder = tmp_path / str(step)
        store = open_store(folder)
        process = fork.Process(target=_ended_at, args=(step, folder))
        process.start()
        process.join(20)
        found.append(_is_whole_or_absent(store))
        assert len(store.describe_all()) == found[-1]
        if not found[-1]:
            store.register("ann", REFERENCE)
        assert [path.name for path in folder.iterdir()] == ["ann.safetensors"]
        if process.exitcode == 0:
            break
    assert found == [False] * 4 + [True] * 2  # two writes, fsync, rename; fsync of the folder; the end


def _delete_and_register(folder, begun) -> None:
    store = open_store(folder)
    begun.set()
    while True:
        if store.describe_all():
            store.delete("ann")
        store.register("ann", REFERENCE)


def test_writers_that_are_killed_at_random(tmp_path):
    fork, draw = multiprocessing.get_context("fork"), random.Random(1)
    store = open_store(tmp_path / "voices")
    found = []
    while len(found) < 40 or len(set(found)) < 2 and len(found) < 400:
        begun = fork.Event()
        process = fork.Process(target=_delete_and_register, args=(tmp_path / "voices", begun))
        process.start()
        assert begun.wait(20)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
        found.append(_is_whole_or_absent(store))
    assert set(found) == {True, False}, "killed at different points"
    if not _is_whole_or_absent(store):
        store.register("ann", REFERENCE)
    store.register("bob", REFERENCE)  # what the killed ones left unfinished is gone with it
    assert sorted(path.name for path in (tmp_path / "voices").iterdir()) == ["ann.safetensors", "bob.safetensors"]


def test_a_request_with_a_voice(store):
    store.register("both", REFERENCE, PROMPT, "words")
    store.register("reference", REFERENCE)
    store.register("prompt", prompt_latents=PROMPT, prompt_text="words")
    request = store.get("both").apply(Request(text="a", voice="both", seed=3))
    assert (request.seed, request.prompt_text) == (3, "words")
    assert (request.reference_latents == REFERENCE).all()
    assert (request.prompt_latents == PROMPT).all()
    request = store.get("reference").apply(Request(text="a", voice="reference", prompt_text="b", prompt_audio=b"x"))
    assert (request.prompt_text, request.prompt_audio) == ("b", b"x")


@pytest.mark.parametrize(
    ("name", "field", "kind"),
    [
        ("reference", "reference_audio", "reference"),
        ("reference", "reference_latents", "reference"),
        ("prompt", "prompt_audio", "prompt"),
        ("prompt", "prompt_latents", "prompt"),
        ("prompt", "prompt_text", "prompt"),
    ],
)
def test_a_request_that_brings_what_its_voice_holds(store, name, field, kind):
    store.register("reference", REFERENCE)
    store.register("prompt", prompt_latents=PROMPT, prompt_text="words")
    request = Request(text="a", voice=name, **{field: b"x"})
    message = f'INVALID_ARG: {field}: cannot be combined with the voice "{name}", which holds a {kind}'
    assert refusal(store.get(name).apply, request) == message
