"""Files below a configured folder: what is read, and what is refused with which words."""

import errno
import json
import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from dq_engine import guarded_files
from dq_engine.errors import RequestError
from dq_engine.guarded_files import MAX_HEADER_BYTES, load_tensors, read_guarded


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "adapters"
    (folder / "ann").mkdir(parents=True)
    (folder / "ann" / "weights").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    return folder


def refusal(folder, name, max_bytes=100) -> str:
    with pytest.raises(RequestError) as error:
        read_guarded(folder, str(name), max_bytes, "path")
    return str(error.value)


def test_files_inside_are_read(folder, tmp_path, monkeypatch):
    assert read_guarded(folder, "ann/weights", 6, "path") == b"inside"
    assert read_guarded(folder, str(folder / "ann" / "weights"), 6, "path") == b"inside"
    link = tmp_path / "link"
    link.symlink_to(folder)  # the operator's own
    assert read_guarded(link, "ann/weights", 6, "path") == b"inside"
    monkeypatch.chdir(tmp_path)  # the setting may be relative, and the name absolute
    for relative in Path("adapters"), Path("adapters/../adapters"):
        assert read_guarded(relative, str(folder / "ann" / "weights"), 6, "path") == b"inside"
        assert refusal(relative, tmp_path / "secret").endswith(f" is not below {relative}")


@pytest.mark.parametrize("name", ["../secret", "ann/../../secret", "ann/../ann/weights"])
def test_no_path_climbs_out(folder, name):
    assert refusal(folder, name) == f'INVALID_ARG: path: "{name}" must not hold ".."'


def test_an_absolute_path_elsewhere(folder, tmp_path):
    assert refusal(folder, "/etc/passwd") == f'INVALID_ARG: path: "/etc/passwd" is not below {folder}'
    sibling = tmp_path / "adapters2"
    sibling.mkdir()
    (sibling / "x").write_bytes(b"x")
    assert "is not below" in refusal(folder, sibling / "x")


@pytest.mark.parametrize("name", ["", ".", "/", "a\0b"])
def test_no_name(folder, name):
    assert refusal(folder, name).startswith("INVALID_ARG: path: ")


def test_symbolic_links_are_not_followed(folder, tmp_path):
    (folder / "file").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "same").symlink_to(folder / "ann" / "weights")
    for name in ("file", "up/secret", "same"):
        assert refusal(folder, name) == f'INVALID_ARG: path: "{name}" leads through a symbolic link'


def test_what_is_no_regular_file(folder):
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        for name in ("pipe", "s", "ann", "ann/weights/deeper"):
            assert refusal(folder, name) == f'INVALID_ARG: path: "{name}" is not a regular file'


def test_a_missing_file(folder):
    assert refusal(folder, "bob/weights") == 'NOT_FOUND: path: there is no file "bob/weights"'
    words = 'the folder of "weights" cannot be opened: No such file or directory'
    assert refusal(folder / "bob", "weights") == f"UNAVAILABLE: path: {words}"


@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_what_is_the_machines_fault_is_not_the_files(folder, monkeypatch, call, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    handles = os.listdir("/proc/self/fd")
    monkeypatch.setattr(guarded_files.os, call, fail)
    what = 'the folder of "ann/weights" cannot be opened' if call == "open" else '"ann/weights" cannot be read'
    assert refusal(folder, "ann/weights") == f"UNAVAILABLE: path: {what}: {os.strerror(number)}"
    assert os.listdir("/proc/self/fd") == handles


def test_a_name_that_is_too_long(folder):
    assert refusal(folder, "a" * 300) == f'INVALID_ARG: path: "{"a" * 300}" cannot be read: File name too long'


def test_an_oversized_file(folder):
    assert refusal(folder, "ann/weights", 5) == 'INVALID_ARG: path: "ann/weights" has 6 bytes, the limit is 5'


@pytest.mark.parametrize("change", [b"insideX", b"insid", b"INSIDE"])
def test_a_file_that_changes_while_it_is_read(folder, monkeypatch, change):
    real = os.read

    def read(handle, count):
        piece = real(handle, count)
        if piece:
            (folder / "ann" / "weights").write_bytes(change)
        return piece

    monkeypatch.setattr(guarded_files.os, "read", read)
    assert refusal(folder, "ann/weights") == 'INVALID_ARG: path: "ann/weights" was changed while it was read'


def file_of(header, data: bytes = b"", length: int | None = None) -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def test_tensors_and_metadata():
    data = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, {"note": "hi"})
    tensors, metadata = load_tensors(data, "x", "path")
    assert metadata == {"note": "hi"}
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].dtype == torch.bfloat16


HOSTILE = {
    "empty": b"",
    "short": b"\x10",
    "a huge header": file_of({}, length=2**63),
    "a large header": file_of(b"{}" + b" " * MAX_HEADER_BYTES),
    "a header beyond the end": file_of({}, length=100),
    "no JSON": file_of(b"{" * 50),
    "a list": file_of([]),
    "deep": file_of(b"[" * 100_000),
    "an unknown type": file_of({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "a negative size": file_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
    "a shape beyond its data": file_of({"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4]}}, bytes(4)),
    "a shape that overflows": file_of({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}),
    "an offset beyond the end": file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(4)),
    "an offset backwards": file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
    "an overlap": file_of({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, bytes(4)),
    "a hole": file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
    "more data": file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)),
    "metadata that is no text": file_of({"__metadata__": {"a": [1]}}),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers(data):
    with pytest.raises(RequestError, match=r'^INVALID_ARG: path: "x" ') as error:
        load_tensors(data, "x", "path")
    assert len(str(error.value)) < 400


GOOD = save({"a": torch.arange(4.0), "b": torch.zeros(2, 2)}, {"k": "v"})


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
def test_damaged_files_load_or_are_refused(at, byte, length):
    data = bytearray(GOOD)
    data[at] = byte
    try:
        tensors, _ = load_tensors(bytes(data[:length]), "x", "path")
    except RequestError as error:
        assert error.code == "INVALID_ARG"
    else:
        assert sum(np.prod(t.shape) for t in tensors.values()) <= 32
