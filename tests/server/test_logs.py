"""What a real server writes to its log about requests."""

import base64
import json
import re
import urllib.request

import pytest
from talk import LONG, TEXT, Talk, speak, wait_until
from triton_server import ROOT, TritonServer

SECRET = "zebra umbrella"
TRACED = "0af7651916cd43dd8448eb211c80319c"


def lines(server: TritonServer, skip: int = 0) -> list[dict]:
    """The requests' lines, without the first `skip`."""
    return [json.loads(line) for line in server.log_path.read_text().splitlines() if line.startswith("{")][skip:]


def post(server: TritonServer, fields: dict, headers: dict[str, str] | None = None) -> dict:
    url = f"http://{server.http_url}/v2/models/voxcpm2/generate"
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(fields).encode(), headers or {}), timeout=60
    ) as reply:
        return json.load(reply)


def test_the_start_is_told_stage_by_stage_and_without_warnings(tight_server):
    log = tight_server.log_path.read_text()
    stages = ["loading the tokenizer", "loading the weights", "loading the AudioVAE", "warming up"]
    assert re.findall(r" INFO dq_engine\S+: worker 0: ([^,\n]+)$", log, re.MULTILINE)[:4] == stages
    assert ", 0% done" not in log and "legacy behaviour" not in log


def test_each_request_is_a_line_without_its_words(tight_server):
    before = len(lines(tight_server))
    speak(tight_server, {"text": SECRET, "max_generate_length": 3, "seed": 7}, request_id="ann")
    audio = base64.b64encode(b"secret recording").decode()
    with Talk(tight_server, {"text": SECRET, "reference_audio": audio}) as talk:
        assert talk.error().startswith("INVALID_ARG: reference_audio: ")
    with Talk(tight_server, {"text": TEXT, "voice": SECRET}) as talk:
        assert SECRET in talk.error()
    with Talk(tight_server, {"text": TEXT}, parameters={SECRET: 1}) as talk:
        assert SECRET in talk.error()
    with Talk(tight_server, LONG, request_id="bob") as talk:
        talk.next()
    reply = post(tight_server, {"text": SECRET, "stream": False, "max_generate_length": 2, "id": "cat"})
    assert reply["id"] == "cat"
    # A line of a test before may still come.
    known = {"ann", "reference_audio", "voice", "unknown", "bob", "cat"}
    wait_until(lambda: known <= {line["id"] or line.get("field") for line in lines(tight_server, before)}, 5, "ends")
    assert SECRET not in tight_server.log_path.read_text()
    assert audio not in tight_server.log_path.read_text()

    found = {line["id"] or line.get("field"): line for line in lines(tight_server, before)}
    ann = found["ann"]
    assert (ann["outcome"], ann["patches"], ann["seed"], ann["over"]) == ("length", 3, 7, "grpc")
    assert ann["text_characters"] == len(SECRET)
    assert ann["worker"] == 0
    assert 0 < ann["ttfb_ms"] < ann["total_ms"]
    assert found["reference_audio"]["reference_audio_bytes"] == len(audio)
    assert found["voice"]["code"] == "NOT_FOUND"
    assert found["unknown"]["code"] == "INVALID_ARG"
    assert found["bob"]["outcome"] == "cancelled"
    assert (found["cat"]["over"], found["cat"]["streamed"], found["cat"]["sent_s"]) == ("http", False, 0.32)
    streams = [line["stream"] for line in lines(tight_server, before) if "stream" in line]
    assert len(streams) == len(set(streams)) >= 4


@pytest.mark.slow
def test_texts_levels_and_traces():
    """With OpenTelemetry the line holds the trace, which a client's header may have begun."""
    options = ("mode=opentelemetry", "opentelemetry,url=http://127.0.0.1:9/v1/traces", "rate=1", "level=TIMESTAMPS")
    arguments = tuple(f"--trace-config={option}" for option in options)
    settings = {"DQ_ENGINE_LOG_TEXT": "1"}
    with TritonServer(model=ROOT / "models/small", environment=settings, arguments=arguments) as server:
        fields = {"text": SECRET, "stream": False, "max_generate_length": 1}
        post(server, fields, {"traceparent": f"00-{TRACED}-b7ad6b7169203331-01"})
        post(server, fields)
        wait_until(lambda: len(lines(server)) == 2, 5, "both have ended")
        first, second = lines(server)
        assert first["text"] == second["text"] == SECRET
        assert first["trace"]["traceparent"].startswith(f"00-{TRACED}-")
        assert len(second["trace"]["traceparent"]) == 55
    with TritonServer(model=ROOT / "models/small", environment={"DQ_ENGINE_LOG_LEVEL": "warning"}) as server:
        post(server, fields)
        with Talk(server, {"text": ""}) as talk:
            talk.error()
        text = server.log_path.read_text()
        assert lines(server) == []
        assert "INFO dq_engine" not in text
