"""What Triton's users expect of a model: configuration and its completion, warm-up, index, load, unload, statistics."""

import json
import re
import time
import urllib.request

import pytest
import tritonclient.grpc as grpcclient
from repositories import MINIMAL, write_repository
from talk import LABELS, LONG, TEXT, Talk, metrics, samples, speak, wait_until
from triton_server import ROOT, TritonServer
from tritonclient.utils import InferenceServerException

from dq_engine.serving.signature import INPUTS, OUTPUTS


def fetch(server: TritonServer, path: str, method: str = "GET"):
    request = urllib.request.Request(f"http://{server.http_url}/v2/{path}", b"" if method == "POST" else None)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def tensors(configuration: dict, kind: str) -> list[tuple]:
    return [(t["name"], t["data_type"], tuple(t["dims"]), t.get("optional", False)) for t in configuration[kind]]


def test_the_configuration_that_ships_is_what_the_model_completes(server, tight_server):
    shipped, completed = (fetch(s, "models/voxcpm2/config") for s in (server, tight_server))
    for kind, known in ("input", INPUTS), ("output", OUTPUTS):
        expected = [(t.name, t.data_type, t.dims, kind == "input" and t.name != "text") for t in known]
        assert tensors(shipped, kind) == tensors(completed, kind) == expected
    for configuration in shipped, completed:
        assert configuration["max_batch_size"] == 0
        assert configuration["model_transaction_policy"] == {"decoupled": True}
        assert [group["count"] for group in configuration["instance_group"]] == [1]
    assert completed["parameters"] == {}
    assert completed["model_warmup"][0]["name"] == "one patch"


def test_a_wrong_configuration_is_refused_and_the_model_serves_on(tight_server):
    """What is wrong is told by name."""
    good = fetch(tight_server, "models/voxcpm2/config")
    seed = [tensor["name"] for tensor in good["input"]].index("seed")
    cases = [
        (
            lambda c: c["input"][seed].update(data_type="TYPE_INT32"),
            "input 'seed', model provides TYPE_INT64",
        ),
        (lambda c: c["output"][0].update(dims=[2]), "tensor 'audio': the model expects dims [-1] but"),
        (lambda c: c["input"][seed].update(name="speed"), "config.pbtxt: the model has no input speed"),
        (lambda c: c.update(model_transaction_policy={"decoupled": False}), "decoupled property"),
        (lambda c: c.update(max_batch_size=8), "max_batch_size 8"),
        (lambda c: c["instance_group"][0].update(count=2), "instance_group must be one instance"),
        (lambda c: c.update(parameters={"speed": {"string_value": "2"}}), "engine settings: speed: "),
    ]
    with grpcclient.InferenceServerClient(tight_server.grpc_url) as client:
        for change, told in cases:
            configuration = json.loads(json.dumps(good))
            change(configuration)
            with pytest.raises(InferenceServerException, match=re.escape(told)):
                client.load_model("voxcpm2", config=json.dumps(configuration))
        assert client.is_model_ready("voxcpm2")
    assert speak(tight_server, {"text": TEXT})[-1].as_numpy("finish_reason").tolist() == [b"stop"]


@pytest.mark.slow
def test_index_unload_and_load(tight_server):
    def index() -> list[dict]:
        return fetch(tight_server, "repository/index", "POST")

    spoken = samples(speak(tight_server, {"text": TEXT, "seed": 3}))
    assert index() == [{"name": "voxcpm2", "version": "1", "state": "READY"}]
    with grpcclient.InferenceServerClient(tight_server.grpc_url) as client:
        client.unload_model("voxcpm2")
        unloaded = {"name": "voxcpm2", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
        wait_until(lambda: index() == [unloaded], 5, "it is unloaded")
        assert not client.is_model_ready("voxcpm2")
        wait_until(lambda: metrics(tight_server)[f"voxcpm2_worker_up{LABELS}"] == 0, 5, "the gauge says so")
        before = metrics(tight_server)
        with pytest.raises(InferenceServerException):
            client.load_model("voxcpm3")
        client.load_model("voxcpm2")
        assert client.is_model_ready("voxcpm2")
    assert index() == [{"name": "voxcpm2", "version": "1", "state": "READY"}]
    assert abs(samples(speak(tight_server, {"text": TEXT, "seed": 3})) - spoken).max() < 1e-3
    # A heartbeat or two later it still serves: the warm-up was not taken for the sign that it is being served.
    time.sleep(1.5)
    assert speak(tight_server, {"text": TEXT})[-1].as_numpy("finish_reason").tolist() == [b"stop"]
    now = metrics(tight_server)
    assert now[f"voxcpm2_patches_total{LABELS}"] > before[f"voxcpm2_patches_total{LABELS}"], "counters go on"
    assert now[f"voxcpm2_worker_up{LABELS}"] == 1
    restarts = f"voxcpm2_worker_restarts_total{LABELS}"
    assert now[restarts] == before[restarts]


def test_statistics(tight_server):
    """Triton counts a request when the model has taken or refused it, before it is known how it ends."""

    def counts() -> dict[str, float]:
        (found,) = fetch(tight_server, "models/voxcpm2/stats")["model_stats"]
        inferences = {"inferences": found["inference_count"], "executions": found["execution_count"]}
        with urllib.request.urlopen(f"http://{tight_server.metrics_url}/metrics", timeout=5) as reply:
            text = reply.read().decode()
        for kind in "success", "failure":  # of the metrics, which outlive a reload
            own = rf'^nv_inference_request_{kind}{{model="voxcpm2",(?:reason="\w+",)?version="1"}} (\d+)$'
            inferences[f"nv {kind}"] = sum(map(int, re.findall(own, text, re.MULTILINE)))
        return inferences | {name: found["inference_stats"][name]["count"] for name in ("success", "fail")}

    before = counts()
    for _ in range(3):
        speak(tight_server, {"text": TEXT, "max_generate_length": 2})
    for _ in range(2):  # refused at once
        with Talk(tight_server, {"text": TEXT}, parameters={"speed": 2}) as talk:
            assert talk.error() == "INVALID_ARG: speed: is neither an input nor a parameter of this model"
    with Talk(tight_server, {"text": TEXT, "max_generate_length": 10**6}) as talk:  # refused by the worker
        assert talk.error().startswith("INVALID_ARG: ")
    with Talk(tight_server, LONG) as talk:  # cancelled
        talk.next()
    now = counts()
    changed = {name: now[name] - before[name] for name in now}
    assert (changed["success"], changed["fail"]) == (3 + 1 + 1, 2)
    assert (changed["nv success"], changed["nv failure"]) == (3 + 1 + 1, 2)
    assert (changed["inferences"], changed["executions"]) == (3 + 1 + 1, 3 + 2 + 1 + 1)


@pytest.mark.slow
def test_without_a_configuration_and_with_a_long_warm_up(tmp_path):
    """A warm-up that lasts longer than a heartbeat."""
    warm_up = MINIMAL.replace('"max_generate_length" value', '"min_generate_length" value')
    for name, configuration in ("none", None), ("long", warm_up):
        repository = write_repository(tmp_path / name, configuration)
        (repository / "voxcpm2/warmup/length").write_bytes((50).to_bytes(4, "little"))
        with TritonServer(model=ROOT / "models/small", model_repository=repository) as server:
            assert len(fetch(server, "models/voxcpm2/config")["input"]) == len(INPUTS)
            assert speak(server, {"text": TEXT})[-1].as_numpy("finish_reason").tolist() == [b"stop"]
