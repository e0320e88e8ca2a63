"""What a request gives alone it gives under load, beside prefix hits, chunked prefills, preemptions, cancellations."""

import random
import threading
import time

import numpy as np
import pytest
from reference.checkpoints import Shape
from reference.listening import Heard, assert_close, hear

from dq_engine.engine import DqCoreEngine, EngineConfig, Request

# Two dimensions of quantization: where rounding is a matter of the last bits, nothing can be equal to 1e-4.
SHAPE = Shape("under-load", seed=11, fsq_dim=2, stop_offset=7.0)
REQUESTS = 32
WORDS = ["peter", "sees", "nine", "small", "old", "dark", "toys", "and", "sofas", "with", "large", "red", "rings"]


def make_request(index: int) -> Request:
    """Zero-shot, reference, prompt and both in turn, of different lengths; every third shares its reference."""
    rng = random.Random(index)
    fields = {}
    latents = [
        np.random.default_rng(i).standard_normal((4 * patches, 64)).astype(np.float32)
        for i, patches in enumerate((10, 17, 25))
    ]
    if index % 4 in (1, 3):
        fields["reference_latents"] = latents[index % 3]
    if index % 4 in (2, 3):
        fields |= {"prompt_latents": latents[(index + 1) % 3][: 4 * rng.randint(1, 9)], "prompt_text": "hello there"}
    return Request(
        text=" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6))),
        seed=index,
        max_generate_length=rng.randint(20, 70),
        return_latents=True,
        **fields,
    )


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint(SHAPE)[0]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> dict:
    """Settings of a device on which sums are exact to the last bits."""
    return {"device": request.param, "dtype": "float32", "attention": "sdpa", "threads": 1}


@pytest.fixture(scope="module")
def alone(path, device) -> list[Heard]:
    with DqCoreEngine(EngineConfig(model=str(path), max_num_seqs=1, **device)) as engine:
        return [hear(engine.submit(make_request(index))) for index in range(REQUESTS)]


def test_requests_of_every_kind_give_what_they_give_alone(path, device, alone):
    config = EngineConfig(
        model=str(path), max_num_seqs=8, num_kvcache_blocks=12, max_num_batched_tokens=40, realtime=False, **device
    )
    with DqCoreEngine(config) as engine:
        streams, cancelled = [], []
        for index in range(REQUESTS):
            streams.append(engine.submit(make_request(index)))
            if index % 4 == 0:
                cancelled.append(engine.submit(make_request(1000 + index)))
                threading.Timer(0.02 * index, cancelled[-1].cancel).start()
            time.sleep(0.01)
        under_load = [hear(stream) for stream in streams]
        reasons = {hear(stream).finish_reason for stream in cancelled}
        state = engine.snapshot()
    for index, (ours, expected) in enumerate(zip(under_load, alone, strict=True)):
        assert ours.finish_reason == expected.finish_reason
        assert_close(ours.latents, expected.latents, 1e-4, 4, f"latents of request {index}")
        assert_close(
            ours.audio, expected.audio, 1e-4, len(expected.audio) // expected.stats["patches"], f"audio of {index}"
        )
    assert {h.finish_reason for h in alone} == {"stop", "length"}, "both ends must be among them"
    assert "cancelled" in reasons
    assert state["preemptions"] > 0 and state["cached_tokens"] > 0
    assert any(h.stats["prompt_tokens"] > config.max_num_batched_tokens for h in under_load), "no chunked prefill"
    assert state["active"] == state["queued"] == 0 and state["kv_blocks_free"] == state["kv_blocks_total"] == 12


def test_a_host_that_runs_ahead_changes_nothing(path, device, alone):
    """As on a GPU: a step is launched before it is known whom the last one stopped; the patch too many is dropped."""
    with DqCoreEngine(EngineConfig(model=str(path), max_num_seqs=8, realtime=False, **device)) as engine:
        engine._loop._run_ahead = 1
        launched = 0
        run = engine._loop._runner.run

        def counting(step):
            nonlocal launched
            launched += len(step.sampled)
            return run(step)

        engine._loop._runner.run = counting
        before = engine.snapshot()["patches"]
        streams = [engine.submit(make_request(index)) for index in range(12)]
        for index, stream in enumerate(streams):
            ours, expected = hear(stream), alone[index]
            assert ours.finish_reason == expected.finish_reason
            assert_close(ours.latents, expected.latents, 1e-4, 4, f"latents of request {index}")
        stops = sum(expected.finish_reason == "stop" for expected in alone[:12])
        kept = engine.snapshot()["patches"] - before
        assert stops and kept < launched <= kept + stops


def test_a_prompt_that_was_cancelled_half_way_and_then_again(path, device, alone):
    """What had been taken in of the cancelled prompt is used by the next, and the audio is the same."""
    index = next(i for i, heard in enumerate(alone) if heard.stats["prompt_tokens"] > 50)
    config = EngineConfig(model=str(path), max_num_seqs=4, max_num_batched_tokens=20, realtime=False, **device)
    with DqCoreEngine(config) as engine:
        runner, half_way, go_on = engine._loop._runner, threading.Event(), threading.Event()
        run = runner.run

        def pausing(step):
            output = run(step)
            half_way.set()
            go_on.wait(10)
            return output

        runner.run = pausing
        cancelled = engine.submit(make_request(index))
        assert half_way.wait(10)
        cancelled.cancel()
        go_on.set()
        assert [chunk.finish_reason for chunk in cancelled] == ["cancelled"]
        again = hear(engine.submit(make_request(index)))
        assert again.stats["cached_tokens"] == 16, "20 tokens had been taken in: one block"
        assert_close(again.latents, alone[index].latents, 1e-4, 4, "latents")


def test_a_cancelled_stream_frees_its_slot_and_makes_no_more_patches(path):
    with DqCoreEngine(EngineConfig(model=str(path), threads=1, max_num_seqs=1)) as engine:
        long = engine.submit(Request(text="a", min_generate_length=400, max_generate_length=400))
        next(iter(long))
        long.cancel()
        before = engine.snapshot()["patches"]
        assert list(long)[-1].finish_reason == "cancelled"
        assert engine.snapshot()["patches"] - before <= 2
        waiting = engine.submit(Request(text="b", max_generate_length=4))
        assert hear(waiting).finish_reason in ("length", "stop"), "the slot is free again"


def test_a_queued_stream_can_be_cancelled_and_one_that_waits_too_long_is_refused(path):
    config = EngineConfig(model=str(path), threads=1, max_num_seqs=1, queue_timeout_s=0.5)
    with DqCoreEngine(config) as engine:
        long = engine.submit(Request(text="a", min_generate_length=400, max_generate_length=400))
        left, late = (engine.submit(Request(text="b")) for _ in range(2))
        left.cancel()
        assert [chunk.finish_reason for chunk in left] == ["cancelled"]
        with pytest.raises(Exception, match=r"^UNAVAILABLE: waited 0.5 s for a free slot \(queue_timeout_s\)"):
            list(late)
        long.cancel()


def test_a_full_queue_is_refused_at_once(path):
    config = EngineConfig(model=str(path), threads=1, max_num_seqs=1, queue_size=2)
    with DqCoreEngine(config) as engine:
        streams = [engine.submit(Request(text="a", max_generate_length=100)) for _ in range(3)]
        with pytest.raises(Exception, match=r"^UNAVAILABLE: the queue is full \(2 requests wait\)"):
            engine.submit(Request(text="a"))
        for stream in streams:
            stream.cancel()


def test_a_stopped_engine_ends_every_stream(path):
    with DqCoreEngine(EngineConfig(model=str(path), threads=1, max_num_seqs=1)) as engine:
        streams = [engine.submit(Request(text="a", max_generate_length=200)) for _ in range(3)]
        next(iter(streams[0]))
    for stream in streams:
        with pytest.raises(Exception, match="^UNAVAILABLE: the engine was stopped"):
            list(stream)
    with pytest.raises(Exception, match="^UNAVAILABLE"):
        engine.submit(Request(text="a"))


@pytest.mark.parametrize("fault", ["step", "values"])
def test_only_the_stream_at_fault_fails(path, fault, monkeypatch):
    """One of eight streams makes a step raise, or gives values that are not finite."""
    with DqCoreEngine(EngineConfig(model=str(path), threads=1, max_num_seqs=8, realtime=False)) as engine:
        expected = [hear(engine.submit(make_request(index))) for index in range(7)]
        runner = engine._loop._runner
        sample = runner._sample

        def faulty(slots, mu, adapters):
            bad = runner.state.seeds[slots] == 666
            if fault == "step" and bad.any():
                raise RuntimeError("boom")
            latents = sample(slots, mu, adapters)
            latents[bad] = float("nan")
            return latents

        monkeypatch.setattr(runner, "_sample", faulty)
        bad = engine.submit(Request(text="a", seed=666))
        good = [hear(stream) for stream in [engine.submit(make_request(index)) for index in range(7)]]
        message = "the step failed: boom" if fault == "step" else "patch 0 has values that are not finite"
        with pytest.raises(Exception, match=f"^INTERNAL: {message}"):
            list(bad)
        for ours, theirs in zip(good, expected, strict=True):
            assert_close(ours.latents, theirs.latents, 1e-4, 4, "latents")
        assert engine.snapshot()["closed"] is None


def test_a_step_that_hangs_is_noticed(path, monkeypatch):
    config = EngineConfig(model=str(path), threads=1, max_num_seqs=1, step_timeout_s=0.2)
    release = threading.Event()
    with DqCoreEngine(config) as engine:
        runner = engine._loop._runner
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda step: (release.wait(10), run(step))[1])
        assert not engine.snapshot()["stalled"]
        stream = engine.submit(Request(text="a", max_generate_length=4))
        deadline = time.monotonic() + 5
        while not engine.snapshot()["stalled"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        release.set()
        assert hear(stream).finish_reason == "length"
        assert not engine.snapshot()["stalled"]


def test_recordings_that_wait_are_bounded_in_bytes(path, monkeypatch):
    monkeypatch.setattr("dq_engine.audio.encode_stage.MAX_WAITING_BYTES", 1000)
    with DqCoreEngine(EngineConfig(model=str(path), threads=1, max_num_seqs=1)) as engine:
        with pytest.raises(Exception, match="^UNAVAILABLE: recordings of 0 MiB wait to be encoded"):
            engine.submit(Request(text="a", reference_audio=bytes(1001)))
        assert engine.snapshot()["queued"] == 0
        with pytest.raises(Exception, match="^INVALID_ARG: reference_audio"):
            list(engine.submit(Request(text="a", reference_audio=bytes(1000))))
        assert engine._encode._waiting_bytes == 0


def test_a_chunk_that_cannot_be_delivered_ends_only_its_stream(path, monkeypatch):
    with DqCoreEngine(EngineConfig(model=str(path), threads=1, max_num_seqs=4, realtime=False)) as engine:
        delivery = engine._delivery
        deliver_row = delivery._deliver_row

        def faulty(item, samples, now, crowd):
            if item.sequence.seed == 666:
                raise MemoryError("no room")
            deliver_row(item, samples, now, crowd)

        monkeypatch.setattr(delivery, "_deliver_row", faulty)
        good = engine.submit(Request(text="a", seed=1, max_generate_length=30))
        bad = engine.submit(Request(text="a", seed=666, min_generate_length=400, max_generate_length=400))
        with pytest.raises(Exception, match="^INTERNAL: delivering the audio failed: no room"):
            list(bad)
        assert hear(good).finish_reason in ("stop", "length")
        assert hear(engine.submit(Request(text="a", seed=2, max_generate_length=5))).stats["patches"] == 5
        assert engine.snapshot()["active"] == engine.snapshot()["queued"] == 0, "nothing more is made for it"
