"""Two engine workers behind one model: the setting `devices`."""

import os
import queue
import re
import signal
import time

import numpy as np
import pytest
from reference.processes import processes_below
from talk import LONG, TEXT, Talk, metrics, samples, speak, wait_until
from triton_server import ROOT, TritonServer
from tritonclient.utils import InferenceServerException

BOTH = (0, 1)


@pytest.fixture
def server():
    settings = {"DQ_ENGINE_DEVICES": "cpu,cpu", "DQ_ENGINE_MAX_NUM_SEQS": "4", "DQ_ENGINE_THREADS": "1"}
    with TritonServer(model=ROOT / "models" / "small", environment=settings) as server:
        yield server


def gauge(server: TritonServer, name: str, worker: int) -> float:
    return metrics(server)[f'voxcpm2_{name}{{model="voxcpm2",version="1",worker="{worker}"}}']


def workers(server: TritonServer) -> set[int]:
    return {process.pid for process in processes_below(server.pid, "dq_engine.serving.worker")}


@pytest.mark.slow
def test_streams_are_shared_out_and_a_worker_that_dies_is_replaced_while_the_other_goes_on(server):
    known = samples(speak(server, {"text": TEXT, "seed": 1, "max_generate_length": 4}))
    before = workers(server)
    assert len(before) == 2
    with Talk(server, LONG) as one, Talk(server, LONG) as other:
        one.next()
        other.next()
        wait_until(lambda: [gauge(server, "active_streams", w) for w in BOTH] == [1, 1], 10, "a stream each")
        os.kill(max(before), signal.SIGKILL)
        going_on = other if _first_to_fail(one, other) is one else one
        for _ in range(3):
            assert going_on.next().as_numpy("audio").size
        wait_until(lambda: sorted(gauge(server, "worker_up", w) for w in BOTH) == [0, 1], 10, "word of the death")
        again = samples(speak(server, {"text": TEXT, "seed": 1, "max_generate_length": 4}))
        np.testing.assert_allclose(again, known, atol=1e-3)
        wait_until(lambda: [gauge(server, "worker_up", w) for w in BOTH] == [1, 1], 60, "a new worker")
        assert len(workers(server)) == 2 and len(workers(server) & before) == 1
        with Talk(server, LONG) as new:
            new.next()
            wait_until(lambda: [gauge(server, "active_streams", w) for w in BOTH] == [1, 1], 10, "a stream each")


def _first_to_fail(*talks: Talk) -> Talk:
    """The one of these streams that its worker's death ends."""
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        for talk in talks:
            try:
                talk.next(timeout=0.05)
            except queue.Empty:
                continue
            except InferenceServerException as error:
                assert re.fullmatch(r"INTERNAL: the engine worker \d died; its streams are lost", error.message())
                return talk
    raise AssertionError("none of the streams ended")
