"""Voices and adapters are changed without pause while workers are killed: each call is answered, and all agree."""

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from triton_server import ROOT

from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError
from dq_engine.request import Request
from dq_engine.serving.administration import Administration
from dq_engine.serving.control_protocol import ControlCall
from dq_engine.serving.messages import Failed, Finished
from dq_engine.serving.supervisor import Supervisor
from dq_engine.voices import VoiceStore

pytestmark = [pytest.mark.slow, pytest.mark.alone]

CALLERS, DEATHS, NAMES = 6, 4, ("a", "b", "c")
CODES = {"OK", "UNAVAILABLE", "INTERNAL", "NOT_FOUND", "ALREADY_EXISTS"}
LATENTS = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)


def settings(voices: Path) -> EngineConfig:
    room = {"lora_max_loras": 1, "lora_dir": str(ROOT / "models" / "adapters"), "lora_preload": "a=kal"}
    return EngineConfig(model=str(ROOT / "models" / "small"), device="cpu", threads=1, voices_dir=str(voices), **room)


class Caller:
    """Calls one operation after the other, drawn at random, and counts how they end."""

    def __init__(self, supervisor: Supervisor, seed: int) -> None:
        self._supervisor, self._administration = supervisor, Administration(supervisor, None)
        self._draw = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.stopped.wait(0.02):
            name = self._draw.choice(NAMES)
            kind = self._draw.choice(["register_voice", "delete_voice", "register_lora", "unregister_lora", "speak"])
            try:
                self._speak(name) if kind == "speak" else self._call(kind, name)
                self.ends["OK"] += 1
            except RequestError as error:
                self.ends[error.code] += 1
            except Exception as error:
                self.ends[repr(error)] += 1

    def _call(self, kind: str, name: str) -> None:
        arguments, payload = {"name": name}, None
        if kind == "register_voice":
            arguments["payload"], payload = "reference_latents", LATENTS.tobytes()
        elif kind == "register_lora":
            arguments["path"] = "kal"
        self._administration.handle(ControlCall(kind, arguments, payload, timeout_s=30.0))

    def _speak(self, name: str) -> None:
        ended = threading.Event()
        messages: list = []

        def on_message(message) -> None:
            messages.append(message)
            if isinstance(message, Finished | Failed):
                ended.set()

        request = Request(text="hello there", max_generate_length=3, **{self._draw.choice(["lora", "voice"]): name})
        self._supervisor.submit(request, "f32", None, True, on_message)
        assert ended.wait(30), "a stream without an end"
        if isinstance(messages[-1], Failed):
            raise RequestError(messages[-1].code, messages[-1].message)


def test_all_calls_are_answered_and_all_workers_agree_afterwards(tmp_path):
    draw = random.Random(7)
    supervisor = Supervisor([settings(tmp_path / "voices")] * 2)
    supervisor.start()
    try:
        callers = [Caller(supervisor, seed) for seed in range(CALLERS)]
        for _ in range(DEATHS):
            time.sleep(draw.uniform(1, 3))
            os.kill(supervisor._slots[draw.choice(supervisor.ready_workers)].worker.process.pid, signal.SIGKILL)
            _wait_for(lambda: supervisor.ready_workers == [0, 1], 90)
        for caller in callers:
            caller.stopped.set()
            caller.thread.join(60)
            assert not caller.thread.is_alive(), "a call without an answer"
        # And while there is one worker only:
        supervisor.adapters.register("a", "kal")
        os.kill(supervisor._slots[0].worker.process.pid, signal.SIGKILL)
        _wait_for(lambda: supervisor.ready_workers == [1], 20)
        supervisor.adapters.register("b", "kal")
        supervisor.adapters.unregister("a")
        _wait_for(lambda: supervisor.ready_workers == [0, 1], 90)
        ends = sum((caller.ends for caller in callers), Counter())
        assert set(ends) <= CODES and ends["OK"] > 50 and ends["INTERNAL"] > 0, ends
        one, other = (_adapters(supervisor, worker) for worker in (0, 1))
        assert "a" not in one and "b" in one and one == other
        store = VoiceStore(tmp_path / "voices", 100, 2**30, 64, 4)
        kept = [voice["name"] for voice in store.describe_all()]
        for name in kept:
            assert (store.get(name).reference_latents == LATENTS).all()
        store.register("last", LATENTS)
        assert sorted(os.listdir(tmp_path / "voices")) == sorted(f"{name}.safetensors" for name in [*kept, "last"])
    finally:
        supervisor.stop()


def _adapters(supervisor: Supervisor, worker: int) -> set[str]:
    listed = supervisor.call("list_loras", {}, None, 30.0, worker).value["adapters"]
    return {adapter["name"] for adapter in listed}


def _wait_for(condition, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)
