"""TIMING prints a line for each step and each decoding; TRACE_FILE gets a trace that a browser can show."""

import json
import logging
import re

import pytest

from dq_engine.engine import DqCoreEngine, EngineConfig, Request
from dq_engine.timing import StepTimes


def test_a_line_for_each_step_and_a_trace_of_the_first(caplog, tmp_path):
    trace = tmp_path / "traces" / "steps.json"
    config = EngineConfig(model="models/small", timing=True, trace_file=str(trace), trace_steps=5, threads=1)
    with caplog.at_level(logging.INFO, "dq_engine.timing"), DqCoreEngine(config) as engine:
        caplog.clear()
        list(engine.submit(Request(text="nine green toys", min_generate_length=8, max_generate_length=8)))
        state = engine.snapshot()
    lines = [record.getMessage() for record in caplog.records if record.name == "dq_engine.timing"]
    steps = [line for line in lines if line.startswith("step: ")]
    assert len(steps) == state["steps"] == 8
    first = re.fullmatch(
        r"step: 1 patches, [1-9]\d* prompt tokens; host [\d.]+ ms, device ([\d.]+) ms, prefill ([\d.]+) ms of it, "
        r"idle before it [\d.]+ ms",
        steps[0],
    )
    assert first and 0 < float(first[2]) < float(first[1])
    assert all(re.match(r"step: 1 patches, 0 prompt tokens; .* prefill 0\.00 ms", line) for line in steps[1:])
    assert sum(bool(re.fullmatch(r"audio: 1 patches; VAE [\d.]+ ms, delivery [\d.]+ ms", line)) for line in lines) == 8
    assert 0 < state["delivery_seconds"] < state["vae_seconds"]
    assert state["host_seconds"] > 0 and state["idle_seconds"] >= 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("addmm" in event.get("name", "") or "linear" in event.get("name", "") for event in events)


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    for wrong, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "steps.json", "File exists")):
        with pytest.raises(ValueError, match=f"^trace_file: {wrong} cannot be written: {why}$"):
            StepTimes(False, str(wrong), 1)
