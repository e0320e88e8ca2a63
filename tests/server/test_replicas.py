"""Two servers, each with workers of its own, that share the folder of the stored voices."""

import json
import shutil
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from reference.recordings import write_voice
from talk import TEXT, Talk, inputs, is_final, speak
from triton_server import ROOT, TritonServer
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow

SEEN_S = 2.0
LONG = {"text": TEXT, "min_generate_length": 60, "max_generate_length": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared") / "voices"


@pytest.fixture(scope="module")
def servers(folder):
    settings = {"DQ_ENGINE_VOICES_DIR": str(folder), "DQ_ENGINE_VOICES_MAX_COUNT": "3", "DQ_ENGINE_THREADS": "1"}
    with (
        TritonServer(model=ROOT / "models" / "small", environment=settings) as one,
        TritonServer(model=ROOT / "models" / "small", environment=settings) as other,
    ):
        yield one, other


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> tuple[bytes, bytes]:
    """Of the same length, so that their files have the same size."""
    folder = tmp_path_factory.mktemp("recordings")
    paths = (folder / "low.wav", 110), (folder / "high.wav", 230)
    return tuple(write_voice(p, seconds=1.1, rate=24_000, channels=1, pitch=hz, seed=1).read_bytes() for p, hz in paths)


def admin(server: TritonServer, operation: str, payload: bytes | None = None, **arguments) -> dict:
    fields = {"operation": operation, "arguments": json.dumps(arguments)}
    fields |= {} if payload is None else {"payload": payload}
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return json.loads(client.infer("voxcpm2_admin", inputs(fields), client_timeout=60).as_numpy("result")[0])


def refusal(call: Callable, *arguments, **fields) -> str:
    with pytest.raises(InferenceServerException) as error:
        call(*arguments, **fields)
    return error.value.message()


def latents(server: TritonServer, **fields) -> np.ndarray:
    settings = {"text": TEXT, "seed": 5, "max_generate_length": 3, "return_latents": True}
    return speak(server, settings | fields)[-1].as_numpy("latents")


def names(server: TritonServer) -> list[str]:
    return [voice["name"] for voice in admin(server, "list_voices")["voices"]]


def within_two_seconds(look: Callable[[], bool]) -> None:
    ends = time.monotonic() + SEEN_S
    while not look():
        assert time.monotonic() < ends, "not seen in time"


def test_each_sees_what_the_other_keeps_removes_and_keeps_anew(servers, recordings):
    one, other = servers
    low, high = (latents(one, reference_audio=recording) for recording in recordings)
    assert np.abs(low - high).max() > 0.1
    assert refusal(latents, other, voice="ann").startswith("NOT_FOUND: ")

    admin(one, "register_voice", recordings[0], name="ann")
    within_two_seconds(lambda: names(other) == ["ann"])
    for server in servers:
        np.testing.assert_allclose(latents(server, voice="ann"), low, atol=1e-4)

    with Talk(one, LONG | {"voice": "ann"}) as talk:
        talk.next()
        admin(other, "delete_voice", name="ann")
        within_two_seconds(lambda: names(one) == [])
        assert refusal(latents, one, voice="ann") == 'NOT_FOUND: voice: there is no stored voice named "ann"'
        assert is_final(talk.rest()[-1])  # who uses it goes on

    admin(other, "register_voice", recordings[1], name="ann")
    for server in servers:  # the first had the old one in memory
        np.testing.assert_allclose(latents(server, voice="ann"), high, atol=1e-4)
    admin(one, "delete_voice", name="ann")
    admin(one, "register_voice", recordings[0], name="ann")
    for server in servers:
        np.testing.assert_allclose(latents(server, voice="ann"), low, atol=1e-4)
    admin(other, "delete_voice", name="ann")
    assert names(one) == names(other) == []


def test_of_two_registrations_at_two_servers_one_wins_and_the_quota_is_of_both(servers, recordings):
    ends, barrier = [], threading.Barrier(4)

    def register(server: TritonServer) -> None:
        barrier.wait()
        try:
            ends.append(admin(server, "register_voice", recordings[0], name="bob")["name"])
        except InferenceServerException as error:
            ends.append(error.message().partition(":")[0])

    threads = [threading.Thread(target=register, args=(server,)) for server in servers * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ends) == ["ALREADY_EXISTS"] * 3 + ["bob"]
    one, other = servers
    admin(one, "register_voice", recordings[0], name="carl")
    admin(other, "register_voice", recordings[0], name="dora")
    full = "UNAVAILABLE: 3 voices are stored, the limit is voices_max_count"
    assert [refusal(admin, server, "register_voice", recordings[0], name="eve") for server in servers] == [full] * 2
    for name in "bob", "carl", "dora":
        admin(one, "delete_voice", name=name)


def test_a_folder_that_goes_away_and_comes_back(servers, recordings, folder):
    """An unmounted volume, say: requests with a voice are told, all others are served."""
    one, other = servers
    admin(one, "register_voice", recordings[0], name="ann")
    known = latents(other, voice="ann")
    away = folder.with_name("away")
    folder.rename(away)
    for server in servers:
        assert refusal(latents, server, voice="ann").startswith("UNAVAILABLE: voice: the folder of ")
        gone = refusal(admin, server, "register_voice", recordings[1], name="bob")
        assert gone == "UNAVAILABLE: the folder of voices cannot be changed: No such file or directory"
        assert refusal(admin, server, "list_voices").startswith("UNAVAILABLE: the folder of voices cannot be read: ")
        assert latents(server).shape == (12, 64)
    shutil.copytree(away, folder)  # with other numbers of files and folders
    for server in servers:
        np.testing.assert_allclose(latents(server, voice="ann"), known, atol=1e-4)
    admin(other, "delete_voice", name="ann")
    assert names(one) == []
