"""/metrics after known workloads: exact counts, a worker that dies, and the table of docs/metrics.md."""

import contextlib
import json
import os
import re
import signal
import time
import urllib.request

import psutil
import pytest
from reference.processes import processes_below
from talk import LONG, SAMPLES_PER_PATCH, TEXT, Talk, metrics, samples, speak, wait_until
from triton_server import ROOT, TritonServer

from dq_engine.metrics import DEFINITIONS, PREFIX

UP = 'voxcpm2_worker_up{model="voxcpm2",version="1",worker="0"}'


@pytest.fixture
def server(tight_server: TritonServer) -> TritonServer:
    return tight_server


class Change:
    """What a workload changed of the metrics."""

    def __init__(self, server: TritonServer) -> None:
        self.server, self.before = server, metrics(server)

    def __call__(self, name: str, worker: str = "0", **own: str) -> float:
        labels = sorted({"model": "voxcpm2", "version": "1", "worker": worker, **own}.items(), key=_position)
        key = f"{PREFIX}{name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in labels)}}}"
        return metrics(self.server)[key] - self.before[key]


def test_finished_streams(server):
    time.sleep(1.2)  # what came before is counted with the next heartbeat
    change = Change(server)
    fields = {"text": TEXT, "seed": 1, "min_generate_length": 7, "max_generate_length": 7}
    spoken = [speak(server, fields), speak(server, fields)]
    speak(server, fields | {"stream": False, "output_format": "opus"})
    stopped = speak(server, {"text": TEXT, "seed": 3})
    stats = [json.loads(results[-1].as_numpy("stats")[0]) for results in spoken]
    last = json.loads(stopped[-1].as_numpy("stats")[0])
    patches = 3 * 7 + last["patches"]
    wait_until(lambda: change("patches_total") == patches, 3, "a heartbeat")
    wait_until(lambda: change("rtf_count") == 3, 3, "the streams' own are set")
    assert change("audio_seconds_total") == pytest.approx(0.16 * patches)
    assert sum(samples(r).size for r in (*spoken, stopped)) == SAMPLES_PER_PATCH * (patches - 7)
    assert change("finished_streams_total", reason="length") == 3
    assert change("finished_streams_total", reason="stop") == 1
    assert change("errors_total", code="INTERNAL") == change("cancelled_streams_total") == 0
    # Of the prompt all but what was found in the cache was computed, each time.
    tokens, cached = last["prompt_tokens"], change("cached_tokens_total")
    assert change("prefill_tokens_total") == 4 * tokens - cached
    assert cached == stats[0]["cached_tokens"] + stats[1]["cached_tokens"] + 2 * last["cached_tokens"]
    assert 0 < last["cached_tokens"] < tokens
    assert change("steps_total") == patches, "one at a time"
    # The one whose audio came at once has been in no player's hands.
    assert [change(f"{name}_count") for name in ("ttfb_seconds", "largest_gap_seconds", "rtf")] == [3, 3, 3]
    assert change("queue_seconds_count") == 4
    assert 0 < change("ttfb_seconds_sum") < change("step_seconds_total")
    assert change("ttfb_seconds_bucket", le="+Inf") == 3
    assert 0 < change("vae_seconds_total") < change("step_seconds_total")
    assert 0 < change("prefill_seconds_total") < change("step_seconds_total")


def test_refused_and_cancelled(server):
    change = Change(server)
    for fields in {"text": ""}, {"text": TEXT, "voice": "nobody"}, {"text": TEXT, "output_format": "aac"}:
        with Talk(server, fields) as talk:
            talk.error()
    with Talk(server, {"text": TEXT}, parameters={"speed": 1}) as talk:
        talk.error()
    with contextlib.ExitStack() as talks:
        for _ in range(4):
            talks.enter_context(Talk(server, LONG))
        wait_until(lambda: change("active_streams") == change("queued_streams") == 2, 20, "two speak, two wait")
        for _ in range(3):
            with Talk(server, LONG) as talk:
                assert talk.error() == "UNAVAILABLE: the queue is full (2 requests wait)"
        assert change("kv_blocks_free") < 0
    wait_until(lambda: change("cancelled_streams_total") == 4, 10, "they are gone")
    wait_until(lambda: change("active_streams") == change("queued_streams") == 0, 3, "a heartbeat")
    assert change("errors_total", code="UNAVAILABLE") == 3
    refused = change("errors_total", code="INVALID_ARG") + change("errors_total", worker="none", code="INVALID_ARG")
    assert refused == 3
    assert change("errors_total", code="NOT_FOUND") + change("errors_total", worker="none", code="NOT_FOUND") == 1
    assert change("kv_blocks_free") == change("kv_blocks") == 0
    assert change("finished_streams_total", reason="length") == change("queue_seconds_count") == 0


def test_a_stream_that_falls_behind_its_player_is_an_underrun(server):
    """The worker is stopped for longer than it can be ahead."""
    time.sleep(1.2)
    change = Change(server)
    worker = _worker(server)
    with Talk(server, LONG | {"min_generate_length": 40, "max_generate_length": 40}) as talk:
        talk.next()
        worker.suspend()
        try:
            with pytest.raises(Exception, match="^$"):  # queue.Empty
                while True:
                    talk.next(timeout=3.0)
        finally:
            worker.resume()
        talk.rest()
    wait_until(lambda: change("rtf_count") == 1, 3, "it ended")
    assert change("underruns_total") == 1
    assert 3.0 <= change("largest_gap_seconds_sum") < 20
    wait_until(lambda: change("patches_total") == 40, 3, "a heartbeat")


def test_a_worker_that_dies(server):
    speak(server, {"text": TEXT, "max_generate_length": 2})
    change = Change(server)
    with Talk(server, LONG) as talk:
        talk.next()
        os.kill(_worker(server).pid, signal.SIGKILL)
        assert talk.error().startswith("INTERNAL: ")
    wait_until(lambda: metrics(server)[UP] == 0, 2, "it is down")
    wait_until(lambda: change("errors_total", code="INTERNAL") == 1, 2, "it is told")
    with Talk(server, {"text": TEXT}) as talk:
        assert talk.error().startswith("UNAVAILABLE: ")
    wait_until(lambda: change("errors_total", worker="none", code="UNAVAILABLE") == 1, 2, "it is told")
    wait_until(lambda: metrics(server)[UP] == 1, 60, "a new one serves")
    wait_until(lambda: change("worker_restarts_total") == 1, 2, "it is told")
    patches = change("patches_total")
    assert patches >= 0, "what the dead one had counted is kept"
    speak(server, {"text": TEXT, "min_generate_length": 2, "max_generate_length": 2})
    wait_until(lambda: change("patches_total") == patches + 2, 3, "the new one's are added")


def test_the_document_names_what_there_is(server):
    rows = re.findall(r"^\| `(\w+)(?:\{(\w+)\})?` \| (\w+) \| (.+?) \|$", _document(), re.MULTILINE)
    assert rows == [(PREFIX + d.name, d.label, d.kind, d.description) for d in DEFINITIONS]
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=5) as response:
        text = response.read().decode()
    kinds = dict(re.findall(rf"^# TYPE ({PREFIX}\w+) (\w+)$", text, re.MULTILINE))
    assert kinds == {name: kind for name, _, kind, _ in rows}
    helps = dict(re.findall(rf"^# HELP ({PREFIX}\w+) (.+)$", text, re.MULTILINE))
    assert helps == {name: description for name, _, _, description in rows}
    for name, label, kind, _ in rows:
        lines = re.findall(rf"^{name}(?:_bucket)?\{{(.+)\}} ", text, re.MULTILINE)
        expected = sorted(["model", "version", "worker", *([label] if label else [])])
        expected += ["le"] if kind == "histogram" else []
        assert lines
        assert all(re.findall(r"(\w+)=", line) == expected for line in lines), name


def _position(label: tuple[str, str]) -> tuple[bool, str]:
    """Where Triton puts a label: by the alphabet, a bucket's bound last."""
    return label[0] == "le", label[0]


def _document() -> str:
    return (ROOT / "docs/metrics.md").read_text()


def _worker(server: TritonServer) -> psutil.Process:
    (worker,) = processes_below(server.pid, "dq_engine.serving.worker")
    return worker
