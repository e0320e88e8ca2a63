"""Encodings and operations by the thousand, many of them wrong: every one is answered, and nothing is left."""

import contextlib
import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from reference.recordings import write_voice
from triton_server import ROOT, TritonServer
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.alone

CLIENTS, ROUNDS = 16, 60
MARKS = ("voxcpm2/1/model.py", "voxcpm2_encode/1/model.py", "voxcpm2_admin/1/model.py", "dq_engine.serving.worker")


def tensors(fields: dict) -> list:
    inputs = []
    for name, value in fields.items():
        inputs.append(grpcclient.InferInput(name, [1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([value], np.object_))
    return inputs


def ask(client, number: int, voice: bytes) -> str:
    """One call, and the code that it is answered with."""
    name = f"n{number % 5}"
    operation, arguments = [
        ("register_voice", {"name": name}),
        ("delete_voice", {"name": name}),
        ("list_voices", {}),
        ("fly", {}),
    ][number // 3 % 4]
    admin = {"operation": operation.encode(), "arguments": json.dumps(arguments).encode(), "payload": voice}
    encode = {"audio": voice if number % 5 else voice[:100], "purpose": b"reference"}
    model, fields = ("voxcpm2_admin", admin) if number % 3 == 0 else ("voxcpm2_encode", encode)
    try:
        client.infer(model, tensors(fields), client_timeout=60)
    except InferenceServerException as error:
        return error.message().partition(":")[0]
    return "OK"


def uses(server: TritonServer) -> dict[str, tuple[int, int, float]]:
    """Of each process: file handles, threads, MiB."""
    found = {}
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            for mark in MARKS:
                if mark in line:
                    found[mark] = process.num_fds(), process.num_threads(), process.memory_info().rss / 2**20
    return found


@pytest.mark.slow
def test_a_soak(tmp_path):
    path = write_voice(tmp_path / "v.wav", seconds=0.4, rate=16_000, channels=1, pitch=120, seed=1)
    voice, folder = path.read_bytes(), tmp_path / "voices"
    with TritonServer(model=ROOT / "models" / "small", environment={"DQ_ENGINE_VOICES_DIR": str(folder)}) as server:
        counts: Counter[str] = Counter()

        def run(client_number: int, rounds: int) -> None:
            with grpcclient.InferenceServerClient(server.grpc_url) as client:
                counts.update(ask(client, client_number * 1000 + n, voice) for n in range(rounds))

        def soak(rounds: int) -> None:
            threads = [threading.Thread(target=run, args=(n, rounds)) for n in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive()

        soak(20)
        before = uses(server)
        assert set(before) == set(MARKS)
        soak(ROUNDS)
        after = uses(server)
        assert sum(counts.values()) == CLIENTS * (20 + ROUNDS), "every call is answered"
        assert set(counts) == {"OK", "INVALID_ARG", "NOT_FOUND", "ALREADY_EXISTS"}, "and none for want of room"
        for mark in MARKS:
            handles, threads, mib = (new - old for new, old in zip(after[mark], before[mark], strict=True))
            assert handles <= 2 and threads <= 2 and mib < 48, mark
        assert not list(Path(folder).glob("*.unfinished"))
