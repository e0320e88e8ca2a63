"""voxcpm2_admin and voxcpm-admin through a server with a token: voices, adapters, draining, information, fencing."""

import base64
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from reference.adapters import AdapterShape, random_weights, write_adapter
from reference.processes import processes_below
from reference.recordings import write_voice
from safetensors import safe_open
from talk import TEXT, Talk, inputs, is_final, speak, wait_until
from triton_server import ROOT, TritonServer
from tritonclient.utils import InferenceServerException

SMALL = ROOT / "models" / "small"
PAGE = (ROOT / "docs" / "administration.md").read_text()
TOKEN = "a secret, ümlauts too"
MEDIUM = {"text": TEXT, "min_generate_length": 25, "max_generate_length": 25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Adapters: `loud`, and what is none."""
    folder = tmp_path_factory.mktemp("adapters")
    shape = AdapterShape(seed=1, dit=(), between=())
    sizes = {}
    with safe_open(SMALL / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if re.fullmatch(r"base_lm\..*\.[qkvo]_proj\.weight", name):
                outputs, inputs = file.get_slice(name).get_shape()
                layer = name.removesuffix(".weight")
                sizes |= {f"{layer}.lora_A": (shape.rank, inputs), f"{layer}.lora_B": (outputs, shape.rank)}
    write_adapter(folder / "loud", random_weights(sizes, shape), shape)
    (folder / "broken").mkdir()
    (folder / "broken" / "lora_weights.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    (folder / "broken" / "lora_config.json").write_text('{"lora_config": {"r": 8, "alpha": 16}}')
    (folder / "link").symlink_to("/etc")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder):
    environment = {
        "DQ_ENGINE_ADMIN_TOKEN": TOKEN,
        "DQ_ENGINE_VOICES_DIR": str(tmp_path_factory.mktemp("store") / "voices"),
        "DQ_ENGINE_VOICES_MAX_COUNT": "3",
        "DQ_ENGINE_DEVICES": "cpu",
        "DQ_ENGINE_LORA_MAX_LORAS": "2",
        "DQ_ENGINE_LORA_DIR": str(folder),
    }
    options = re.findall(r"--(?:http|grpc)-restricted-\S+(?==\S+=SECRET)", PAGE)
    assert len(options) == 2
    what = "model-repository,logging,trace,shared-memory:operator=SECRET"
    arguments = tuple(f"{option}={what}" for option in options)
    with TritonServer(model=SMALL, environment=environment, arguments=arguments) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def voice(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("voice") / "voice.wav"
    return write_voice(path, seconds=1.1, rate=24_000, channels=1, pitch=120, seed=3).read_bytes()


def admin(client, operation: str, arguments: dict | bytes | None = None, token=TOKEN, **fields) -> dict:
    arguments = arguments if isinstance(arguments, bytes) else json.dumps(arguments or {})
    fields |= {"operation": operation, "arguments": arguments} | ({"token": token} if token is not None else {})
    return json.loads(client.infer("voxcpm2_admin", inputs(fields), client_timeout=120).as_numpy("result")[0])


def refusal(client, *arguments, **fields) -> str:
    with pytest.raises(InferenceServerException) as error:
        admin(client, *arguments, **fields)
    return error.value.message()


def stream_error(server, fields: dict) -> str:
    with Talk(server, fields) as talk:
        return talk.error()


def latents(server, fields: dict) -> np.ndarray:
    settings = {"text": TEXT, "seed": 5, "max_generate_length": 3, "return_latents": True}
    return speak(server, settings | fields)[-1].as_numpy("latents")


@pytest.fixture
def clean(client):
    """No voices are left behind."""
    yield
    for stored in admin(client, "list_voices")["voices"]:
        admin(client, "delete_voice", {"name": stored["name"]})


def test_the_token(client):
    required = "INVALID_ARG: token: is required; voxcpm-admin takes it from --token or DQ_ENGINE_ADMIN_TOKEN"
    wrong = "INVALID_ARG: token: is not the administration's"
    for token, refused in ((None, required), ("", required), ("wrong", wrong), (TOKEN + "x", wrong)):
        assert refusal(client, "information", token=token) == refused
        assert refusal(client, "fly", token=token) == refused
    assert admin(client, "information")["sample_rate"] == 48_000


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        ("fly", {}, "operation: must be one of register_voice, list_voices, "),
        ("x" * 65, {}, "operation: has 65 bytes, the limit is 64"),
        ("information", b"", "arguments: Input data was truncated"),
        ("information", b"[]", "arguments: Expected `object`, got `array`"),
        ("information", b"\xff", "arguments: JSON is malformed: invalid character"),
        ("information", b"[" * 100_000, "arguments: "),
        ("information", {"a": 1}, "arguments: Object contains unknown field `a`"),
        ("get_voice", {}, "arguments: Object missing required field `name`"),
        ("get_voice", {"name": 5}, "arguments: Expected `str`, got `int` - at `$.name`"),
        ("register_voice", {"name": "a", "prompt_latents": ["x"]}, "prompt_latents: must be one flat list of numbers"),
        ("information", b" " * (16 * 2**20 + 1), "arguments: has 16777217 bytes, the limit is 16777216"),
        ("information", {"x" * 100_000: 1}, "arguments: Object contains unknown field `xxx"),
        ("register_lora", {"name": "x", "path": "😀" * 100_000}, 'path: "😀😀😀'),
        ("register_lora", {"name": "x", "path": "loud\0"}, 'path: "loud\\0/lora_config.json" is not the name'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_calls(client, operation, arguments, message):
    assert refusal(client, operation, arguments).startswith(f"INVALID_ARG: {message}")


def test_information(client):
    about = admin(client, "information")
    assert (about["sample_rate"], about["encoder_sample_rate"]) == (48_000, 16_000)
    assert (about["latent_width"], about["patch_size"], about["patch_s"]) == (64, 4, 0.16)
    assert about["limits"]["text_characters"] == 4096
    assert about["limits"]["max_model_len"] == 1024
    assert about["settings"]["voices_max_count"] == 3
    assert about["settings"]["max_num_seqs"] == 16  # what the device decides is in force too
    assert (about["settings"]["devices"], about["settings"]["device"]) == ("cpu", "cpu")
    assert "admin_token" not in about["settings"]
    assert about["versions"]["nano-vllm-voxcpm"] == "2.0.5"
    assert TOKEN not in json.dumps(about)


def test_the_token_is_in_no_log_and_in_no_models_parameters(server, client):
    refusal(client, "information", token="wrong")
    assert TOKEN.encode() not in server.log_path.read_bytes()
    for model in ("voxcpm2", "voxcpm2_admin", "voxcpm2_encode"):
        assert TOKEN not in json.dumps(client.get_model_config(model, as_json=True))


@pytest.mark.usefixtures("clean")
def test_voices_from_audio_and_from_latents(server, client, voice):
    stored = admin(client, "register_voice", {"name": "ann"}, payload=voice)
    assert (stored["name"], stored["reference_frames"], stored["prompt_frames"]) == ("ann", 28, 0)
    sent = latents(server, {"reference_audio": voice})
    np.testing.assert_allclose(latents(server, {"voice": "ann"}), sent, atol=1e-4)

    text = "a few words"
    both = {"name": "both", "prompt_audio": base64.b64encode(voice).decode(), "prompt_text": text}
    admin(client, "register_voice", both, payload=voice)
    fields = {"reference_audio": voice, "prompt_audio": voice, "prompt_text": text}
    # With this recording the model makes 1e-4 of an error of 1e-7 in the noise.
    np.testing.assert_allclose(latents(server, {"voice": "both"}), latents(server, fields), atol=1e-3)
    assert np.abs(latents(server, {"voice": "both"}) - sent).max() > 0.1

    # "Keep this designed voice": what a request has generated is a prompt, or a reference.
    designed = speak(server, {"text": TEXT, "control": "a low voice", "seed": 1, "return_latents": True})[-1]
    made = designed.as_numpy("latents")
    arguments = {"name": "designed", "payload": "prompt_latents", "prompt_text": TEXT}
    kept = admin(client, "register_voice", arguments, payload=made.tobytes())
    assert kept["prompt_frames"] == len(made)
    fields = {"prompt_latents": made, "prompt_text": TEXT}
    np.testing.assert_allclose(latents(server, {"voice": "designed"}), latents(server, fields), atol=1e-4)

    assert refusal(client, "register_voice", {"name": "more"}, payload=voice) == (
        "UNAVAILABLE: 3 voices are stored, the limit is voices_max_count"
    )
    assert [stored["name"] for stored in admin(client, "list_voices")["voices"]] == ["ann", "both", "designed"]
    assert admin(client, "get_voice", {"name": "both"})["prompt_text"] == text
    admin(client, "delete_voice", {"name": "designed"})
    numbers = made.reshape(-1).astype(float).tolist()
    as_reference = admin(client, "register_voice", {"name": "designed", "reference_latents": numbers})
    assert (as_reference["reference_frames"], as_reference["prompt_frames"]) == (len(made), 0)


@pytest.mark.usefixtures("clean")
def test_wrong_voices(server, client, voice):
    admin(client, "register_voice", {"name": "ann"}, payload=voice)
    cases = [
        ({"name": "ann"}, voice, 'ALREADY_EXISTS: name: there is a stored voice named "ann"; delete it first'),
        ({"name": "../x"}, voice, "INVALID_ARG: name: must be 1 to 64 letters, digits, - or _"),
        ({"name": "b"}, None, "INVALID_ARG: reference_latents: a voice holds a reference, a prompt or both"),
        ({"name": "b"}, b"", "INVALID_ARG: reference_audio: is empty"),
        ({"name": "b"}, voice[:999], "INVALID_ARG: reference_audio: ends early: "),
        ({"name": "b", "reference_latents": [0.0]}, voice, "INVALID_ARG: reference_latents: cannot be combined with"),
        ({"name": "b", "payload": "prompt_audio"}, voice, "INVALID_ARG: prompt_text: is required with prompt audio"),
        ({"name": "b", "payload": "reference_latents"}, b"abc", "INVALID_ARG: reference_latents: must hold float32"),
        ({"name": "b", "payload": "reference_latents"}, bytes(4), "INVALID_ARG: reference_latents: must hold 64 num"),
        ({"name": "b", "payload": "reference_latents"}, bytes(256), "INVALID_ARG: reference_latents: must have a mul"),
        ({"name": "b", "payload": "name"}, voice, "INVALID_ARG: arguments: Invalid enum value 'name'"),
    ]
    for arguments, payload, message in cases:
        fields = {} if payload is None else {"payload": payload}
        assert refusal(client, "register_voice", arguments, **fields).startswith(message), message
    nobody = 'NOT_FOUND: name: there is no stored voice named "bob"'
    assert refusal(client, "get_voice", {"name": "bob"}) == nobody
    assert refusal(client, "delete_voice", {"name": "bob"}) == nobody
    assert stream_error(server, {"text": TEXT, "voice": "bob"}) == (
        'NOT_FOUND: voice: there is no stored voice named "bob"'
    )
    assert stream_error(server, {"text": TEXT, "voice": "../ann"}) == (
        "INVALID_ARG: voice: must be 1 to 64 letters, digits, - or _"
    )
    assert stream_error(server, {"text": TEXT, "voice": "ann", "reference_audio": voice}) == (
        'INVALID_ARG: reference_audio: cannot be combined with the voice "ann", which holds a reference'
    )


@pytest.mark.usefixtures("clean")
def test_a_deleted_voice_in_use_finishes_its_streams(server, client, voice):
    admin(client, "register_voice", {"name": "ann"}, payload=voice)
    with Talk(server, MEDIUM | {"voice": "ann"}) as talk:
        talk.next()
        assert admin(client, "delete_voice", {"name": "ann"}) == {"deleted": "ann"}
        assert stream_error(server, {"text": TEXT, "voice": "ann"}).startswith("NOT_FOUND: ")
        assert is_final(talk.rest()[-1])


@pytest.mark.usefixtures("clean")
def test_a_reference_is_computed_once(server, client, tmp_path):
    path = write_voice(tmp_path / "v.wav", seconds=6, rate=16_000, channels=1, pitch=120, seed=4)
    admin(client, "register_voice", {"name": "ann"}, payload=path.read_bytes())
    cached = []
    for text in ("one old chair", "nine green toys"):
        last = speak(server, {"text": text, "voice": "ann", "max_generate_length": 1})[-1]
        cached.append(json.loads(last.as_numpy("stats")[0])["cached_tokens"])
    assert cached == [0, 32]  # of 38 patches and the two tokens around them, the full blocks of 16


@pytest.mark.usefixtures("clean")
def test_two_registrations_at_once(client, voice):
    results, barrier = [], threading.Barrier(4)

    def register() -> None:
        barrier.wait()
        try:
            results.append(admin(client, "register_voice", {"name": "ann"}, payload=voice)["name"])
        except InferenceServerException as error:
            results.append(error.message().partition(":")[0])

    threads = [threading.Thread(target=register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == ["ALREADY_EXISTS"] * 3 + ["ann"]


def test_adapters(server, client, folder):
    cases = [
        ("nothing", "NOT_FOUND: path: "),
        ("../loud", 'INVALID_ARG: path: "'),
        ("/etc/passwd", "INVALID_ARG: path: "),
        ("link/passwd", "INVALID_ARG: path: "),
        ("broken", "INVALID_ARG: path: "),
    ]
    for path, message in cases:
        assert refusal(client, "register_lora", {"name": "loud", "path": path}).startswith(message), path
    assert stream_error(server, {"text": TEXT, "lora": "loud"}).startswith("NOT_FOUND: lora: ")
    (registered,) = admin(client, "register_lora", {"name": "loud", "path": "loud"})["workers"]
    assert (registered["worker"], registered["name"]) == (0, "loud")
    (listed,) = admin(client, "list_loras")["workers"]
    (adapter,) = listed["adapters"]
    assert (adapter["name"], adapter["version"]) == ("loud", 1)
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(adapter["created"])
    assert -1 <= age.total_seconds() < 60  # the form of voices' `created`, see tests/unit/test_voices.py
    plain, loud = latents(server, {}), latents(server, {"lora": "loud"})
    assert np.abs(plain - loud).max() > 0.1

    admin(client, "unregister_lora", {"name": "loud"})
    assert stream_error(server, {"text": TEXT, "lora": "loud"}).startswith("NOT_FOUND: lora: ")
    assert refusal(client, "unregister_lora", {"name": "loud"}).startswith("NOT_FOUND: name: ")


@pytest.mark.slow
def test_a_worker_that_dies_comes_back_with_the_adapters(server, client):
    admin(client, "register_lora", {"name": "loud", "path": "loud"})
    loud = latents(server, {"lora": "loud"})
    (worker,) = processes_below(server.pid, "dq_engine.serving.worker")
    os.kill(worker.pid, signal.SIGKILL)

    def again() -> bool:
        with contextlib.suppress(InferenceServerException):
            return np.abs(latents(server, {"lora": "loud"}) - loud).max() < 1e-3
        return False

    wait_until(again, 60, "a new worker with the adapter")
    admin(client, "unregister_lora", {"name": "loud"})


def test_draining(server, client):
    with Talk(server, MEDIUM) as talk:
        talk.next()
        assert admin(client, "drain") == {"draining": True}
        statistics = admin(client, "statistics")
        assert statistics["draining"]
        assert statistics["workers"][0]["active"] == 1
        assert stream_error(server, {"text": TEXT}) == "UNAVAILABLE: the server is being drained"
        assert is_final(talk.rest()[-1])
    assert admin(client, "undrain") == {"draining": False}
    assert is_final(speak(server, {"text": TEXT, "max_generate_length": 1})[-1])


def test_json_over_http(server):
    url = f"http://{server.http_url}/v2/models/voxcpm2_admin/generate"
    fields = {"operation": "statistics", "arguments": "{}", "token": TOKEN}
    answer = httpx.post(url, json=fields, timeout=60).json()
    assert json.loads(answer["result"])["workers"][0]["slots"] == 16
    answer = httpx.post(url, json=fields | {"tokem": "x"}, timeout=60).json()
    assert answer == {"error": "INVALID_ARG: tokem: is neither an input nor a parameter of this model"}
    answer = httpx.post(url, json=fields | {"token": "x"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]) == (400, "INVALID_ARG: token: is not the administration's")


def test_infer_over_http(server):
    fields = {"operation": "information", "arguments": "{}", "token": TOKEN}
    given = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [value]} for name, value in fields.items()]
    url = f"http://{server.http_url}/v2/models/voxcpm2_admin/infer"
    (output,) = httpx.post(url, json={"inputs": given}, timeout=60).json()["outputs"]
    assert json.loads(output["data"][0])["latent_width"] == 64
    assert httpx.post(url, json={"inputs": given[:2]}, timeout=60).json()["error"].startswith("INVALID_ARG: token: ")


def test_voxcpm2_refuses_these_operations(server):
    assert "operation" in stream_error(server, {"text": TEXT, "operation": "drain"})


def test_tritons_own_administration_is_fenced(server, client):
    """The fence that docs/administration.md advises, for Triton's own ways to load models and to change logs."""
    url = f"http://{server.http_url}/v2/repository/index"
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=10)
    assert error.value.code == 403
    with urllib.request.urlopen(urllib.request.Request(url, b"{}", {"operator": "SECRET"}), timeout=10):
        pass
    with pytest.raises(InferenceServerException, match="restricted"):
        client.get_model_repository_index()
    names = {"triton-grpc-protocol-operator": "SECRET"}
    assert client.get_model_repository_index(headers=names).models


def cli(server, *words, token=TOKEN, status=0) -> dict | str:
    program = Path(sys.executable).with_name("voxcpm-admin")
    environment = {**os.environ, "VOXCPM_URL": server.grpc_url, "DQ_ENGINE_ADMIN_TOKEN": token}
    done = subprocess.run([program, *words], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout) if status == 0 else done.stderr.strip()


@pytest.mark.usefixtures("clean")
def test_the_command_line(server, client, voice, tmp_path):
    (tmp_path / "v.wav").write_bytes(voice)
    made = np.arange(256, dtype=np.float32).reshape(4, 64)
    np.save(tmp_path / "v.npy", made)
    words = ["--reference", tmp_path / "v.npy", "--prompt", tmp_path / "v.wav", "--prompt-text", "a few words"]
    stored = cli(server, "voices", "register", "ann", *words)
    assert (stored["reference_frames"], stored["prompt_frames"]) == (4, 28)
    assert admin(client, "list_voices")["voices"] == [stored]
    assert cli(server, "voices", "show", "bob", status=1) == 'NOT_FOUND: name: there is no stored voice named "bob"'
    assert cli(server, "info", token="x", status=1) == "INVALID_ARG: token: is not the administration's"
    required = "INVALID_ARG: token: is required; voxcpm-admin takes it from --token or DQ_ENGINE_ADMIN_TOKEN"
    assert cli(server, "info", token="", status=1) == required
    message = "a recording is missing: --reference, or --prompt-audio with --prompt-text"
    assert cli(server, "voices", "register", "x", status=1) == message
    np.save(tmp_path / "flat.npy", made.ravel())
    (tmp_path / "text.npy").write_text("no latents")
    for path, message in [
        (tmp_path / "flat.npy", f"{tmp_path}/flat.npy: must be floats of shape [frames, 64], got float32 [256]"),
        (tmp_path / "text.npy", f"{tmp_path}/text.npy: is no .npy file of numbers: the magic string is not correct; "),
        ("/none/v.wav", "--reference: /none/v.wav cannot be read: No such file or directory"),
        (tmp_path, f"--reference: {tmp_path} cannot be read: Is a directory"),
    ]:
        told = cli(server, "voices", "register", "x", "--reference", path, status=1)
        assert told.startswith(message) and "\n" not in told
    assert cli(server, "--url", f"grpc://{server.grpc_url}", "info") == cli(server, "info")
    assert cli(server, "voices", "register", status=2).endswith("\n\nError: Missing argument 'name'.")


@pytest.mark.usefixtures("clean")
def test_the_example_of_the_page_with_a_token(server, voice, tmp_path):
    (tmp_path / "voice.wav").write_bytes(voice)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    words = [sys.executable, "-c", code.replace("localhost:8000", server.http_url)]
    environment = {**os.environ, "DQ_ENGINE_ADMIN_TOKEN": TOKEN}
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{'name': 'carl', ")
