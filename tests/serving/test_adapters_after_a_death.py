"""Two real workers, one of which is killed, or stopped for a while, beside adapters that are registered."""

import json
import os
import shutil
import signal

import pytest
from collector import SMALL, TEXT, Collector, config, wait_until

from dq_engine.errors import RequestError
from dq_engine.request import Request
from dq_engine.serving.messages import Finished
from dq_engine.serving.supervisor import Supervisor

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name in "kept", "changed", "gone":
        shutil.copytree(SMALL.parent / "adapters" / "kal", folder / name)
    return folder


@pytest.fixture(scope="module")
def supervisor(folder):
    room = {"lora_max_loras": 2, "lora_dir": str(folder), "lora_preload": "kept"}
    room["voices_dir"] = str(folder.with_name("voices"))
    supervisor = Supervisor([config(**room), config(**room)])
    supervisor.start()
    yield supervisor
    supervisor.stop()


def listed(supervisor: Supervisor, worker: int) -> dict[str, dict]:
    adapters = supervisor.call("list_loras", {}, None, 30.0, worker).value["adapters"]
    return {adapter["name"]: adapter for adapter in adapters}


def test_files_that_were_changed_or_removed(supervisor, folder):
    """All requests are served, and as before."""
    for name in "changed", "gone":
        supervisor.adapters.register(name, name)
    shutil.rmtree(folder / "gone")
    about = json.loads((folder / "changed" / "lora_config.json").read_text())
    about["lora_config"]["alpha"] *= 2
    (folder / "changed" / "lora_config.json").write_text(json.dumps(about))
    os.kill(supervisor._slots[0].worker.process.pid, signal.SIGKILL)
    wait_until(lambda: supervisor.ready_workers == [1], 20, "its death")
    wait_until(lambda: supervisor.ready_workers == [0, 1], 90, "its successor")

    assert {name: adapter["state"] for name, adapter in listed(supervisor, 0).items()} == {"kept": "ready"}
    assert listed(supervisor, 1).keys() == {"kept", "changed", "gone"}
    for name in "kept", "changed", "gone":
        streams = [Collector(supervisor, Request(text=TEXT, lora=name, max_generate_length=2)) for _ in range(3)]
        assert all(isinstance(stream.rest()[-1][1], Finished) for stream in streams)
        assert {stream.routed.worker for stream in streams} == ({0, 1} if name == "kept" else {1})

    supervisor.adapters.register("changed", "changed")
    one, other = (listed(supervisor, worker)["changed"] for worker in (0, 1))
    assert one["digest"] == other["digest"] and one["alpha"] == about["lora_config"]["alpha"]
    with pytest.raises(RequestError, match="^NOT_FOUND: path"):
        supervisor.adapters.register("gone", "gone")
    supervisor.adapters.unregister("gone")
    (_, failed), *_ = Collector(supervisor, Request(text=TEXT, lora="gone")).rest()
    assert failed.code == "NOT_FOUND"


def test_a_registration_that_one_worker_ends_too_late(supervisor, folder, monkeypatch):
    """Who was told that it failed finds it nowhere, also later."""
    before = [listed(supervisor, worker)["kept"]["digest"] for worker in (0, 1)]
    shutil.copy(folder / "changed" / "lora_config.json", folder / "kept" / "lora_config.json")
    put_back, undone = supervisor.adapters._put_back, []
    monkeypatch.setattr(supervisor.adapters, "_put_back", lambda *of: undone.append((of, put_back(*of))))
    pid = supervisor._slots[1].worker.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RequestError, match="^UNAVAILABLE: register_lora was not answered within"):
            supervisor.adapters.register("late", "kept", timeout_s=3.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: [of for of, _ in undone] == [("late", 0), ("late", 1)], 20, "an end of it")
    assert listed(supervisor, 0).keys() == listed(supervisor, 1).keys() == {"kept", "changed"}
    assert [listed(supervisor, worker)["kept"]["digest"] for worker in (0, 1)] == before
    (_, failed), *_ = Collector(supervisor, Request(text=TEXT, lora="late")).rest()
    assert failed.code == "NOT_FOUND"
    supervisor.adapters.register("late", "kept")
    assert all("late" in listed(supervisor, worker) for worker in (0, 1))


def test_folders_that_are_gone(supervisor, folder):
    """As shares that are down: what needs no adapter is served by all workers, the rest by those that have it."""
    moved, voices = folder.rename(folder.with_name("elsewhere")), folder.with_name("voices")
    voices.rmdir()
    voices.touch()
    os.kill(supervisor._slots[0].worker.process.pid, signal.SIGKILL)
    wait_until(lambda: supervisor.ready_workers == [1], 20, "its death")
    wait_until(lambda: supervisor.ready_workers == [0, 1], 90, "its successor")
    for lora, workers in (None, {0, 1}), ("kept", {1}):
        streams = [Collector(supervisor, Request(text=TEXT, lora=lora, max_generate_length=2)) for _ in range(3)]
        assert all(isinstance(stream.rest()[-1][1], Finished) for stream in streams)
        assert {stream.routed.worker for stream in streams} == workers
    with pytest.raises(RequestError, match="^UNAVAILABLE: path: the folder of .* cannot be opened"):
        supervisor.adapters.register("kept", "kept")
    register = {"name": "ann", "given_as_payload": "reference_latents"}
    for worker in 0, 1:
        with pytest.raises(RequestError, match="^UNAVAILABLE: the folder of voices cannot be changed"):
            supervisor.call("register_voice", register, bytes(4 * 64 * 4), 30.0, worker)
    voices.unlink()
    voices.mkdir()
    moved.rename(folder)
    supervisor.adapters.register("kept", "kept")
    assert "kept" in listed(supervisor, 0)
    for worker in 0, 1:
        described = supervisor.call("register_voice", register | {"name": f"ann{worker}"}, b"\0" * 1024, 30.0, worker)
        assert described.value["reference_frames"] == 4
