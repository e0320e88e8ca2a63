"""benchmark/: its arithmetic on made-up arrivals, its loops, and the commands with the small model on a CPU."""

import asyncio
import importlib
import io
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
from triton_server import ROOT
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

sys.path.insert(0, str(ROOT / "benchmark"))

import bench_common  # noqa: E402
import bench_drivers  # noqa: E402
import commands  # noqa: E402
import drivers  # noqa: E402
import load  # noqa: E402
import quality  # noqa: E402
import workers  # noqa: E402
from speaking import Speaking, Spoken  # noqa: E402
from stream_metrics import PATCH_S, StreamRecord, figures, peak_streams, percentile  # noqa: E402
from table import table  # noqa: E402
from utterances import make_utterances  # noqa: E402
from workload import Range, make_jobs, poisson_arrivals  # noqa: E402

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def record(*arrivals: tuple[float, float], due: float = 10.0, failure: str | None = None) -> StreamRecord:
    return StreamRecord(due, due, [(due + time, seconds) for time, seconds in arrivals], failure)


STEADY = ((0.05, PATCH_S), (0.15, PATCH_S), (0.25, 2 * PATCH_S), (0.45, PATCH_S))
"""Five patches: 0.4 s from the first chunk to the last, always ahead of playback."""


def test_figures_of_one_stream():
    steady = record(*STEADY)
    assert steady.ttfb_s == pytest.approx(0.05)
    assert steady.audio_s == pytest.approx(0.8)
    assert steady.patch_s == pytest.approx(0.4 / 4)
    assert steady.rtf == pytest.approx(0.4 / 0.8)
    assert steady.largest_gap_s == pytest.approx(0.2)
    assert steady.dry_s == 0
    assert record((0.05, PATCH_S)).patch_s is None


def test_a_request_that_was_sent_late_waits_from_when_it_was_due():
    late = StreamRecord(due=1.0, sent=1.5, arrivals=[(1.6, PATCH_S)])
    assert late.ttfb_s == pytest.approx(0.6)
    assert figures([late], 1.0)["sent_late_ms_p99"] == pytest.approx(500)


@pytest.mark.parametrize(
    ("arrivals", "dry_s"),
    [
        ([(0, 0.16), (0.16, 0.16), (0.32, 0.16)], 0),  # each just in time
        ([(0, 0.16), (0.20, 0.16), (0.30, 0.16)], 0.04),
        ([(0, 0.16), (0.20, 0.16), (0.40, 0.16)], 0.08),  # dry twice; the first delay moved what follows
        ([(0, 0.16), (0.05, 0.48), (0.60, 0.16)], 0),  # a larger gap that larger chunks cover
        ([(5.0, 0.16)], 0),  # late, but once it plays it never stops
    ],
)
def test_underrun(arrivals, dry_s):
    assert record(*arrivals).dry_s == pytest.approx(dry_s, abs=1e-6)


def test_percentiles():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, q) for q in (0, 0.5, 1)] == [1, 2.5, 4]
    for q in (0.1, 0.5, 0.9, 0.99):
        assert percentile(values, q) == pytest.approx(float(np.percentile(values, 100 * q)))
    assert percentile([1.0, math.inf, math.inf], 0) == 1
    assert percentile([1.0, 2.0, math.inf], 0.5) == 2
    assert percentile([1.0, 2.0, math.inf], 0.6) == math.inf
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_failed_streams_count_in_every_figure():
    records = [record(*STEADY) for _ in range(6)]
    records += [record(failure="refused"), record(*STEADY[:2], failure="error"), record(failure="timeout")]
    records.append(record((0.05, 0.32), (0.50, PATCH_S)))
    row = figures(records, wall_s=2.0)
    assert (row["streams"], row["refused"], row["errors"], row["timeouts"]) == (10, 1, 1, 1)
    assert row["ttfb_ms_p50"] == pytest.approx(50)  # audio came of 8 of 10
    assert row["ttfb_ms_p90"] is row["ttfb_ms_p99"] is None
    assert row["patch_ms_p50"] == pytest.approx(100)
    assert row["patch_ms_p99"] is row["rtf_p99"] is row["gap_ms_max"] is row["dry_ms_max"] is None
    assert row["underrun"] == 0.4
    assert row["audio_s_per_s"] == pytest.approx((6 * 0.8 + 0.32 + 0.48) / 2)
    assert row["first_chunk_one_patch"] == pytest.approx(7 / 8, abs=1e-4)
    all_refused = figures([record(failure="refused")] * 3, wall_s=1.0)
    assert (all_refused["underrun"], all_refused["ttfb_ms_p50"], all_refused["audio_s_per_s"]) == (1, None, 0)
    json.dumps(all_refused, allow_nan=False)


def test_peak_streams():
    spans = [(0, 1), (0.5, 2), (0.9, 1.5), (2.5, 3)]
    records = [StreamRecord(begin, begin, [(end, PATCH_S)]) for begin, end in spans]
    assert peak_streams(records) == 3


def test_every_request_is_its_own_and_comes_again_with_the_seed():
    jobs = make_jobs(50, Range(14, 126), Range(10, 48), 2.1, "1 open")
    again = make_jobs(50, Range(14, 126), Range(10, 48), 2.1, "1 open")
    assert [(job.text, job.patches) for job in jobs] == [(job.text, job.patches) for job in again]
    assert all(np.array_equal(a.reference_latents, b.reference_latents) for a, b in zip(jobs, again, strict=True))
    assert len({job.text for job in jobs}) == 50
    assert len({job.reference_latents.tobytes() for job in jobs}) == 50
    assert {14 <= len(job.text) <= 126 and 10 <= job.patches <= 48 for job in jobs} == {True}
    assert {(job.reference_latents.shape, job.reference_latents.dtype) for job in jobs} == {
        ((52, 64), np.dtype(np.float32))
    }
    assert make_jobs(1, Range(14, 14), Range(48, 48), 0, "2")[0].reference_latents is None


def test_poisson_arrivals():
    times = poisson_arrivals(20, 100, "3")
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert times == poisson_arrivals(20, 100, "3")
    assert times[0] == 0 and times == sorted(times) and times[-1] < 100
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)  # as wide as their mean: exponential


@pytest.mark.parametrize("text", ["x", "", "0", "5:4", "1:2:3", "1.5"])
def test_a_range_that_is_none(text):
    with pytest.raises(ValueError, match="neither a whole number|is needed"):
        Range.parse(text)


class Scripted(drivers.Driver):
    """Two patches 20 ms apart for each request, but what `faults` says happens to the texts numbered there."""

    def __init__(self, faults: dict[int, Exception | None]) -> None:
        self.faults, self.texts, self.given_up = faults, [], 0

    async def start(self) -> dict:
        return {}

    async def speak(self, job):
        number = len(self.texts)
        self.texts.append(job.text)
        yield PATCH_S
        try:
            await asyncio.sleep(0.02 if self.faults.get(number, True) else 60)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if number in self.faults:
            raise self.faults[number]
        yield PATCH_S

    async def stop(self) -> None:
        pass


@pytest.mark.alone
def test_a_closed_loop_discards_its_warm_up_and_counts_failures():
    # Requests 0 to 3 are the warm-up; the fault of the first must not be seen.
    faults = {1: RuntimeError("warm-up"), 4: drivers.Refused("UNAVAILABLE: full"), 6: ValueError("bad"), 9: None}
    driver = Scripted(faults)
    plan = load.Plan(Range(14, 14), Range(2, 2), seconds=1, streams=8, timeout_s=0.5, seed=0)
    (row,) = asyncio.run(load.measure_rows(driver, plan, "closed", 4, 0))
    assert (row["row"], row["load"]) == ("closed", 4)
    assert len(set(driver.texts)) == len(driver.texts) == 4 + 8
    assert (row["streams"], row["refused"], row["errors"], row["timeouts"]) == (8, 1, 1, 1)
    assert driver.given_up == 1
    assert row["first_failure"] == "UNAVAILABLE: full"
    assert row["underrun"] == 3 / 8
    assert row["patch_ms_p50"] == pytest.approx(20, abs=10)
    assert row["peak_streams"] == 4
    assert row["cached_tokens"] is None


@pytest.mark.alone
def test_an_open_loop_does_not_wait_for_the_engine():
    driver = Scripted({})
    plan = load.Plan(Range(14, 14), Range(2, 2), seconds=1, streams=8, timeout_s=5, seed=0)
    arrivals = poisson_arrivals(40, 1, "0 open 40 14 2 0 arrivals")
    (row,) = asyncio.run(load.measure_rows(driver, plan, "open", 40, 0))
    assert row["streams"] == len(arrivals)
    assert row["wall_s"] == pytest.approx(arrivals[-1] + 0.02, abs=0.1)
    assert row["refused"] == row["errors"] == row["timeouts"] == row["underrun"] == 0


@pytest.mark.alone
def test_a_burst_is_told_apart_from_the_streams_beside_it():
    driver = Scripted({number: drivers.Refused("UNAVAILABLE: full") for number in range(5 + 32, 5 + 32 + 5)})
    plan = load.Plan(Range(14, 14), Range(2, 2), seconds=1, streams=8, timeout_s=5, seed=0)
    running, burst = asyncio.run(load.measure_rows(driver, plan, "burst", 5, 0))
    assert (running["row"], running["load"], running["streams"], running["refused"]) == ("running", 32, 32, 0)
    assert (burst["row"], burst["load"], burst["streams"], burst["refused"]) == ("burst", 5, 5, 5)
    assert (running["underrun"], burst["underrun"]) == (0, 1)
    assert running["wall_s"] == burst["wall_s"] >= load.BURST_AFTER_S


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_compare_on_a_cpu(tmp_path):
    """One slot and one place in the queue: of 4 requests at once 2 are refused. The stock engine needs a GPU."""
    options = "--engines nano,engine --closed 1,4 --rates 1 --seconds 1 --patches 6 --streams 2 --references 0"
    result = run(
        "benchmark/compare.py",
        "models/small",
        *options.split(),
        f"--out={tmp_path}",
        CUDA_VISIBLE_DEVICES="",
        DQ_ENGINE_MAX_NUM_SEQS="1",
        DQ_ENGINE_QUEUE_SIZE="1",
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "compare.jsonl").read_text().splitlines()]
    assert [(row["engine"], row["row"]) for row in rows] == [
        ("nano", "failed"),
        ("engine", "start"),
        ("engine", "closed"),
        ("engine", "closed"),
        ("engine", "open"),
    ]
    failed, start, one, four, arrivals = rows
    assert "exit code 1" in failed["error"]
    assert start["settings"]["slots"] == 1 and start["settings"]["realtime"] is True
    assert (one["load"], one["streams"], one["refused"], one["first_chunk_one_patch"]) == (1, 2, 0, 1)
    assert 0.3 <= one["audio_s"] <= 2 * 6 * PATCH_S + 1e-3
    assert 0 < one["ttfb_ms_p50"] <= one["ttfb_ms_p99"] < 5000
    assert one["patch_ms_p50"] > 0 and one["cached_tokens"] == 0
    assert (four["load"], four["streams"], four["refused"]) == (4, 4, 2)
    assert "the queue is full" in four["first_failure"]
    assert four["ttfb_ms_p90"] is None and four["underrun"] >= 0.5
    assert arrivals["load"] == 1 and arrivals["streams"] >= 1 and arrivals["wall_s"] > 0
    shown = result.stdout[result.stdout.rindex("\nload") :]
    assert "4 at once" in shown and "never" in shown and "2/4" in shown
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "compare.md").read_text().splitlines()[2].startswith("| 1 at once patches 6 | - → ")

    # Resumed: what is there stays as it is, and only the rows that are missing are measured.
    lines = (tmp_path / "compare.jsonl").read_text().splitlines()
    (tmp_path / "compare.jsonl").write_text("".join(f"{line}\n" for line in lines if '"open"' not in line))
    options = options.replace("nano,engine", "engine").replace("--closed 1,4", "--closed 1 --characters 14,30:40")
    result = run("benchmark/compare.py", "models/small", *options.split(), f"--out={tmp_path}", "--resume")
    assert result.returncode == 0, result.stderr
    again = [json.loads(line) for line in (tmp_path / "compare.jsonl").read_text().splitlines()]
    assert again[:3] == rows[1:4]
    assert [(row["row"], row.get("characters")) for row in again[3:]] == [
        ("start", None),
        ("open", "14"),
        ("closed", "30:40"),
        ("open", "30:40"),
    ]
    assert "1 at once text 30:40 patches 6" in (tmp_path / "compare.md").read_text()


@pytest.mark.parametrize(("output_format", "engine", "seed"), [("f32", "triton", 0), ("mp3", "triton-mp3", 1)])
def test_the_load_of_a_real_server(server, tmp_path, output_format, engine, seed):
    path = tmp_path / "rows.jsonl"
    options = ["--closed=2", "--patches=4", "--streams=2", "--references=1", f"--json={path}"]
    options += [f"--output-format={output_format}", f"--seed={seed}"]  # the same requests would come from the cache
    result = run("benchmark/load.py", "triton", server.grpc_url, *options)
    assert result.returncode == 0, result.stderr
    start, row = [json.loads(line) for line in path.read_text().splitlines()]
    assert (start["engine"], start["settings"]["url"]) == (engine, server.grpc_url)
    assert (row["load"], row["reference_s"], row["cached_tokens"]) == (2, 1, 0)
    assert (row["streams"], row["refused"], row["errors"], row["timeouts"]) == (2, 0, 0, 0)
    padding = 2 * (1105 + 2 * 1152) / 48000 if output_format == "mp3" else 0  # the most: docs/contract.md
    assert 2 * 4 * PATCH_S - 1e-6 <= row["audio_s"] <= 2 * 4 * PATCH_S + padding + 1e-6  # no stop before the fourth
    assert row["ttfb_ms_p50"] > 0 and row["patch_ms_p50"] > 0
    assert row["first_chunk_one_patch"] is not None  # a busy server joins patches


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("load engine models/small", "nothing to measure"),
        ("load engine models/small --closed=1,x", "is not a list of numbers"),
        ("load engine models/small --closed=0", "whole numbers from 1"),
        ("load engine models/small --closed=1 --patches=0", "1 <= LOW <= HIGH"),
        ("load engine models/small --closed=1 --json=/nowhere/a.json", "'--json': there is no directory /nowhere"),
        ("compare models/small --engines=engine --patches=5:4 --out=/nowhere", "1 <= LOW <= HIGH"),
        ("lora models/small --registered=", "give --streams and --registered"),
        ("lora models/small --patches=5:4 --out=/nowhere", "1 <= LOW <= HIGH"),
        ("listeners localhost:1 --patches=5:4", "1 <= LOW <= HIGH"),
        ("workers models/small --patches=5:4 --out=/nowhere", "1 <= LOW <= HIGH"),
        ("quality measure engine models/small --streams=x", "is not a list of numbers"),
        ("quality measure engine models/small --plot=/", "'--plot': / is a directory"),
        ("stand_in models/small", "models/small is there already"),
    ],
)
def test_bad_options_are_named(command, message):
    name, *arguments = command.split()
    result = CliRunner().invoke(importlib.import_module(name).app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("load triton localhost:1 --closed=1", "no gRPC from localhost:1 (8001 by default): "),
        ("load engine /nowhere --closed=1", "/nowhere is neither a directory nor a hub id of the form owner/name"),
        ("listeners localhost:1", "no gRPC from localhost:1 (8001 by default): "),
        ("quality measure triton localhost:1 --sentences=1", "no gRPC from localhost:1 (8001 by default): "),
        ("quality measure engine /nowhere --sentences=1", "/nowhere is neither a directory nor a hub id"),
        ("compare models/small --out=/proc/nowhere", "/proc/nowhere: No such file or directory"),
        ("lora /nowhere --out={out}", "/nowhere/config.json: No such file or directory"),
        ("workers /nowhere --out={out}", "entrypoint: /nowhere is neither a directory nor a hub id of the form owner"),
        ("stand_in /proc/nowhere", "/proc/nowhere: No such file or directory"),
    ],
)
def test_what_goes_wrong_is_one_line(command, message, tmp_path, monkeypatch):
    name, *arguments = command.format(out=tmp_path).split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    on_end = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            commands.run(importlib.import_module(name).app)
    finally:
        signal.signal(signal.SIGTERM, on_end)
    assert ended.value.code.startswith(f"error: {message}") and "\n" not in ended.value.code


def test_a_wrong_port_is_one_line_of_the_commands_themselves():
    for script, *arguments in (["quality.py", "measure", "triton"], ["listeners.py"], ["bench_inference.py", "--url"]):
        done = run(f"benchmark/{script}", *arguments, "localhost:1")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_how_far_the_measure_of_quality_is_is_seen_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Slow(Speaking):
        chunks = None

        async def speak(self, fields: dict) -> Spoken:
            await asyncio.sleep(0.15)  # tqdm shows a change after 0.1 s
            return Spoken(np.zeros(1, np.float32), 48000, "stop", {})

    monkeypatch.setattr(sys, "stderr", Terminal())
    asyncio.run(quality.speak_all(Slow(), make_utterances(3, seed=0), 1))
    shown = sys.stderr.getvalue()
    assert "1 streams: speaking" in shown
    assert all(f" {done}/3 [" in shown for done in (0, 1, 2))


def test_listeners_that_hear_nothing_are_an_error():
    said = pytest.raises(RuntimeError, match="1 of 1 processes of listeners ended with")
    with said, workers.listeners("localhost:1", 1, "14", "4", 0):
        pass


def test_the_table_shows_ratios_of_one_run():
    def rows(engine: str, scale: float) -> list[dict]:
        streams = [record(*[(scale * time, seconds) for time, seconds in STEADY])]
        kind = {"reference_s": 10, "characters": "14", "patches": "48"}
        return [{"row": "closed", "engine": engine, "load": 8, **kind, **figures(streams, scale)}]

    lines = table(rows("nano", 1.0) + rows("engine", 0.25), ["nano", "engine"]).splitlines()
    assert lines[-1].split() == ["x", "nano", *["0.25x"] * 6, "4.00x"]
    assert lines[-3].split()[:6] == ["8", "at", "once", "ref", "10", "nano"]


@pytest.mark.slow
def test_the_command_for_adapters(tmp_path):
    """Two adapters that stay on the device and four that do not fit there; listeners who pick any."""
    command = [sys.executable, "benchmark/lora.py", "models/small", "--engines=engine", "--streams=1,3"]
    command += ["--registered=2,4", "--slots=3", "--fewest=3", "--patches=4", "--users=2", "--seconds=3"]
    result = subprocess.run(
        [*command, f"--out={tmp_path}"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "lora.jsonl").read_text().splitlines()]
    closed = [(row["streams_at_once"], row["registered"]) for row in rows if row["row"] == "closed"]
    assert closed == [(streams, registered) for registered in (0, 2, 4) for streams in (1, 3)]
    measured = [row for row in rows if row["row"] in ("closed", "users")]
    assert all(row["failed"] == 0 and row["streams"] >= 1 for row in measured)
    assert sum(row["loads"] for row in measured) >= 4
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "the adapters were left behind"


@pytest.mark.slow
def test_precision_on_a_cpu(tmp_path):
    """There the engine is the float32 run itself: forced with its own patches it makes the same, up to rounding."""
    options = ["--engines=engine", "--streams=2", "--patches=4", f"--out={tmp_path}"]
    result = run("benchmark/precision.py", "models/small", *options, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "precision.json").read_text())["engine"]
    assert found["error"] < 1e-4 and found["first_patch_error"] < 1e-4
    assert found["vae_snr_db"] is None or found["vae_snr_db"] > 80

    # On two processes sums are made in another order.
    result = run("benchmark/precision.py", "models/small", *options, "--tensor-parallel=2", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "precision.json").read_text())["engine"]
    assert 0 < found["error"] < 1e-4


def test_the_targets_of_an_adapter_are_those_of_its_file():
    targets = bench_drivers.lora_targets(ROOT / "models" / "adapters" / "kal")
    attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert targets == {
        "enable_lm": True,
        "enable_dit": True,
        "enable_proj": True,
        "target_modules_lm": attention,
        "target_modules_dit": attention,
        "target_proj_modules": ["enc_to_lm_proj", "fusion_concat_proj", "lm_to_dit_proj", "res_to_dit_proj"],
    }


def test_requests_that_do_not_end_count_as_timeouts():
    async def run() -> list[StreamRecord]:
        async def request(seconds: float) -> StreamRecord:
            await asyncio.sleep(seconds)
            return record(*STEADY)

        return await bench_common.drained([asyncio.create_task(request(s)) for s in (0.0, 60.0)], 0.2)

    ended, lost = asyncio.run(run())
    assert ended.failure is None and ended.audio_s == pytest.approx(0.8)
    assert (lost.failure, lost.message) == ("timeout", "not done 0.2 s after the end")


def test_a_request_to_a_server_that_takes_too_long_is_given_up():
    bench = bench_common.Bench(bench_common.Common(url="x", http_timeout_s=0.1))
    bench._driver = Scripted({0: None})
    record = asyncio.run(bench.request(time.perf_counter()))
    assert (record.failure, record.message) == ("timeout", "given up after 0.1 s")
    assert bench._driver.given_up == 1


def test_a_server_that_has_no_room_refuses():
    class Full:
        async def chunks(self, fields):
            raise InferenceServerException("UNAVAILABLE: the queue is full")
            yield

    driver = bench_drivers.ServerDriver(bench_common.Common(url="x"))
    driver._speaking = Full()
    found = asyncio.run(load.measure(driver, make_jobs(1, Range(3, 3), Range(2, 2), 0, "")[0], 0.0, 1.0))
    assert (found.failure, found.message) == ("refused", "UNAVAILABLE: the queue is full")


def test_a_script_whose_requests_all_fail_does_not_end_well(capsys):
    bench = bench_common.Bench(bench_common.Common(url="x"))
    bench.report([record(*STEADY), record(failure="error")], 1.0)
    with pytest.raises(RuntimeError, match="every request failed"):
        bench.report([record(failure="error")], 1.0)


def test_a_server_has_its_own_adapters_again_in_the_end(monkeypatch):
    done = []

    async def administer(self, operation, arguments):
        done.append((operation, arguments["name"]))

    async def run():
        driver = bench_drivers.ServerDriver(bench_common.Common(url="localhost:1"))
        driver._speaking = bench_drivers.TritonSpeaking("localhost:1")
        await driver.register("a", "path")
        await driver.register("b", "path")
        await driver.stop()

    monkeypatch.setattr(bench_drivers.ServerDriver, "_administer", administer)
    asyncio.run(run())
    assert done == [("register_lora", "a"), ("register_lora", "b"), ("unregister_lora", "a"), ("unregister_lora", "b")]


def test_a_script_by_its_upstream_name_on_a_real_server(server, tmp_path):
    """The rate that is given counts, not the server's 48,000 Hz: the four patches are twice as long."""
    options = "--concurrency=2 --warmup=0 --iters=1 --max-generate-length=4 --sample-rate=24000 --print-top-errors=1"
    options += f" --http-timeout-s=100 --http-consume-full --json-out={tmp_path}/new/out.json"
    done = run("benchmark/bench_inference.py", f"--url={server.grpc_url}", *options.split())
    assert done.returncode == 0, done.stderr
    requests = json.loads((tmp_path / "new/out.json").read_text())["requests"]
    assert [(request["failure"], request["audio_s"]) for request in requests] == 2 * [(None, pytest.approx(1.28))]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ([], 2, "give either --model or --url"),
        (["--model", "/nowhere"], 1, "error: the engine did not start: /nowhere is neither a directory"),
        (["--model", "models/small", "--target-text-file", "/nowhere"], 2, "--target-text-file: "),
        (["--model", "models/small", "--target-text", " "], 2, "--target-text is empty"),
        (["--model", "models/small", "--cfg-value", "11"], 2, "--cfg-value"),
    ],
)
def test_bad_options_of_the_scripts_by_upstream_names(options, status, message):
    import bench_inference
    import typer

    app = typer.Typer()
    app.command()(bench_common.command(bench_inference.run))
    result = CliRunner().invoke(app, options)
    assert result.exit_code == status and message in result.output, result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "begun"),
    [
        ("bench_inference.py", "--concurrency=2 --warmup=1 --iters=2 --seed=4", [4]),
        ("bench_closed_loop_users.py", "--num-users=3 --warmup-s=0.5 --duration-s=3 --max-loras=2", range(3, 40)),
        ("bench_open_loop_users.py", "--rps=3 --warmup-s=0.5 --duration-s=3", [9]),
    ],
)
def test_the_scripts_by_upstream_names_on_a_cpu(tmp_path, script, options, begun):
    """The text from a file; of the model, the adapters and the lengths what the options say."""
    (tmp_path / "text.txt").write_text("peter sells nine green toys\n")
    common = f"--model=models/small --devices=cpu --max-generate-length=5 --target-text-file={tmp_path}/text.txt"
    command = [sys.executable, f"benchmark/{script}", *common.split(), *options.split(), f"--json-out={tmp_path}/out"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out").read_text())
    assert len(result["requests"]) == result["summary"]["streams"] in begun
    for request in result["requests"]:
        assert request["failure"] is None and request["audio_s"] == pytest.approx(0.8)
        assert 0 < request["ttfb_ms"] <= 1e3 * request["wall_s"]
    assert result["summary"]["audio_s"] == pytest.approx(0.8 * len(result["requests"]))


@pytest.mark.slow
def test_workers_on_a_cpu(tmp_path):
    """One worker, then two, each with as many streams as were asked for, and the sum of what they spoke."""
    command = [sys.executable, "benchmark/workers.py", "models/small", "--devices=cpu,cpu", "--streams=3"]
    options = ["--seconds=6", "--settle=3", "--patches=8:14", f"--out={tmp_path}"]
    environment = ENVIRONMENT | {"DQ_ENGINE_REALTIME": "0"}  # on a busy machine the pacer would have some of them wait
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "workers.jsonl").read_text().splitlines()]
    assert [(row["workers"], row["streams"], row["failures"]) for row in rows] == [(1, 3, 0), (2, 3, 0)]
    for row in rows:
        each = row["each"]
        assert set(each) == {str(index) for index in range(row["workers"])}
        assert row["audio_s_per_s"] == pytest.approx(sum(worker["audio_s_per_s"] for worker in each.values()))
        assert sum(worker["streams"] for worker in each.values()) == pytest.approx(3 * row["workers"], abs=1.5)
        for worker in each.values():  # a step makes a patch for each of them, a prompt's step for fewer
            assert 0 < worker["audio_s_per_s"] <= 1.3 * PATCH_S * worker["streams"] * worker["steps_per_s"]
