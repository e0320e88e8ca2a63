"""A request's line in the log: what is in it, at which level, and that nobody's words are."""

import datetime
import io
import json
import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from triton_server import ROOT

from dq_engine.logs import configure
from dq_engine.metrics import Playback
from dq_engine.request import Request
from dq_engine.serving.messages import Failed, Finished
from dq_engine.serving.request_log import RequestLog
from dq_engine.serving.request_parser import ParsedRequest

SECRET = "my secret\nwords"
STATS = {
    "seed": 3,
    "patches": 4,
    "audio_s": 0.64,
    "ttfb_ms": 1.0,
    "queue_ms": 2.5,
    "prompt_tokens": 9,
    "cached_tokens": 0,
}
PARSED = ParsedRequest(
    Request(
        text=SECRET,
        prompt_text=SECRET,
        prompt_audio=b"RIFFsecret",
        reference_latents=np.zeros((8, 64), np.float32),
        lora="ann",
    ),
    "opus",
    None,
    True,
)


@pytest.fixture
def lines():
    """Reads what has been logged."""
    configure("info")
    handlers = logging.getLogger("dq_engine.requests").handlers
    (handler,) = (handler for handler in handlers if type(handler) is logging.StreamHandler)  # pytest adds its own
    standard_error = handler.setStream(written := io.StringIO())
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    handler.setStream(standard_error)
    logging.getLogger("dq_engine").setLevel(logging.NOTSET)


def request_log(with_texts: bool = False, trace: dict | None = None, request_id: str = "ann") -> RequestLog:
    return RequestLog("voxcpm2", request_id, "http", with_texts, trace)


def played() -> Playback:
    playback = Playback(0.0)
    playback.chunk(0.16, 0.25)
    playback.chunk(0.48, 0.35)
    return playback


def finished(log: RequestLog) -> None:
    log.parsed(PARSED)
    log.routed(1, 17)
    log.finished(Finished(17, b"", 48000, "stop", STATS), played())


def test_a_finished_request(lines):
    finished(request_log())
    (line,) = lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line.pop("total_ms") > 0
    assert line == {
        "level": "info",
        "event": "request",
        "model": "voxcpm2",
        "id": "ann",
        "over": "http",
        "text_characters": 15,
        "prompt_text_characters": 15,
        "prompt_audio_bytes": 10,
        "reference_latents_frames": 8,
        "output_format": "opus",
        "streamed": True,
        "worker": 1,
        "stream": 17,
        "lora": "ann",
        "outcome": "stop",
        "sample_rate": 48000,
        "seed": 3,
        "patches": 4,
        "audio_s": 0.64,
        "queue_ms": 2.5,
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "ttfb_ms": 250.0,
        "largest_gap_ms": 100.0,
        "rtf": round(0.1 / 0.64, 3),
        "sent_s": 0.64,
        "ran_dry": False,
    }


def test_texts_when_they_are_asked_for(lines):
    finished(request_log(with_texts=True))
    (line,) = lines()  # one line, though there is a line break in it
    assert line["text"] == line["prompt_text"] == SECRET
    assert "prompt_audio" not in line


@pytest.mark.parametrize(
    ("failed", "level", "told"),
    [
        (Failed(1, "INVALID_ARG", "text: has the control character U+0000"), "info", {"field": "text"}),
        (Failed(1, "INVALID_ARG", f"{SECRET}: is neither"), "info", {"field": "unknown"}),
        (Failed(1, "NOT_FOUND", f'voice: there is no "{SECRET}"'), "info", {"field": "voice"}),
        (Failed(1, "UNAVAILABLE", "the queue is full"), "warning", {"message": "the queue is full"}),
        (Failed(1, "INTERNAL", "the worker died"), "error", {"message": "the worker died"}),
        (Failed(1, "CANCELLED", "the client left"), "info", {}),
    ],
)
def test_failed_requests(lines, failed, level, told):
    log = request_log(trace={"traceparent": "00-ab-cd-01"})
    log.parsed(PARSED)
    log.failed(failed, Playback(0.0))
    (line,) = lines()
    outcome = "cancelled" if failed.code == "CANCELLED" else "error"
    assert (line["level"], line["outcome"], line["code"]) == (level, outcome, failed.code)
    assert line["trace"] == {"traceparent": "00-ab-cd-01"}
    assert {name: line[name] for name in ("field", "message") if name in line} == told
    assert "secret" not in json.dumps(line)
    assert "ttfb_ms" not in line
    assert "lora" not in line


def test_levels(lines):
    configure("warning")
    finished(request_log())
    request_log().failed(Failed(1, "UNAVAILABLE", "the queue is full"), Playback(0.0))
    assert [line["code"] for line in lines()] == ["UNAVAILABLE"]


def test_lines_of_text_have_the_same_times():
    """Of another process: pytest has set this one's logging up."""
    code = "import logging; from dq_engine.logs import configure; configure('info'); "
    code += "logging.getLogger('dq_engine.x').info('a'); logging.getLogger('other').info('b')"
    environment = {**os.environ, "TZ": "America/New_York"}
    began = datetime.datetime.now(datetime.timezone.utc)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    time, rest = done.stderr.split(" ", 1)
    assert rest == "INFO dq_engine.x: a\n"
    assert re.fullmatch(r".{19}\.\d{3}\+00:00", time)
    assert abs((datetime.datetime.fromisoformat(time) - began).total_seconds()) < 60


def test_a_long_id_is_cut(lines):
    request_log(request_id="x" * 10_000).failed(Failed(1, "INTERNAL", "x"), Playback(0.0))
    assert lines()[0]["id"] == "x" * 128


def test_the_document_names_every_field(lines):
    finished(request_log(with_texts=True, trace={"traceparent": "x"}))
    for code in "INVALID_ARG", "INTERNAL":
        request_log().failed(Failed(1, code, "x"), played())
    written = {name for line in lines() for name in line}
    rows = re.findall(r"^\| (`.+?) \| .+? \|", (ROOT / "docs/logs.md").read_text(), re.MULTILINE)
    named = re.findall(r"`(\w+)`", " ".join(rows))
    # What this request has not, another may have.
    others = {"control", "control_characters", "reference_audio_bytes", "prompt_latents_frames", "voice"}
    assert written | others == set(named)
    assert len(named) == len(set(named))
