"""The process with the engine: it starts the others, and has them run each step along."""

import contextlib
import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dq_engine.child_process import start_module
from dq_engine.config import EngineConfig
from dq_engine.loading import Parts, load
from dq_engine.model.checkpoint import read_config
from dq_engine.parallel.group import Rank, check_divisible
from dq_engine.parallel.messages import Message, Run, Slot, Start, write
from dq_engine.process_folder import ProcessFolder
from dq_engine.runner import Runner
from dq_engine.scheduler import Step
from dq_engine.sequence import Sequence
from dq_engine.step_output import StepOutput

logger = logging.getLogger(__name__)

_STOP_S = 5.0


class Followers:
    """The other processes of a tensor-parallel engine; making it starts them. One engine of this kind a process.

    Args:
        config: of the engine.
        path: the checkpoint.

    Raises:
        ValueError: there are not enough GPUs.
    """

    def __init__(self, config: EngineConfig, path: Path) -> None:
        size = config.tensor_parallel_size
        devices = _devices(config.device, size)
        self._folder = ProcessFolder("dq-parallel-")
        self.rank = Rank(0, size, str(self._folder.path))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all of them are on this machine
        self._processes = []
        for index in range(1, size):
            process = start_module("dq_engine.parallel.follower")
            settings = {**config.model_dump(mode="json"), "device": devices[index]}
            first = {"config": settings, "path": str(path), "rank": [index, size, str(self._folder.path)]}
            process.stdin.write(json.dumps(first).encode() + b"\n")
            process.stdin.flush()
            self._processes.append(process)

    def send(self, message: Message) -> None:
        """Have all of them do something.

        Raises:
            OSError: one of them has died.
        """
        for process in self._processes:
            write(process.stdin, message)

    def stop(self) -> None:
        """End them."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if dist.is_initialized():
            leaving = threading.Thread(target=dist.destroy_process_group, name="dq-leave", daemon=True)
            leaving.start()
            leaving.join(_STOP_S)
            if leaving.is_alive():
                logger.warning("leaving the group of processes takes longer than %g s; it goes on by itself", _STOP_S)
        self._folder.remove()


class LeadingRunner(Runner):
    """A runner that has the others run the same. Whatever fails ends the engine: nobody could tell who is where."""

    isolates_faults = False
    followers: Followers

    def start(self, sequences: list[Sequence]) -> None:
        self.followers.send(Start([Slot.of(sequence) for sequence in sequences]))
        super().start(sequences)

    def run(self, step: Step) -> StepOutput | None:
        self.followers.send(Run.of(step))
        return super().run(step)


def load_with_followers(
    config: EngineConfig, path: Path, progress: Callable[[str, float], None]
) -> tuple[Parts, Followers]:
    """As `loading.load`, in this process and, at the same time, in those that share the engine with it.

    Raises:
        CheckpointError, ValueError: as `load`; also that the model or the settings are not for several processes.
    """
    check_divisible(read_config(path)[0], config.tensor_parallel_size)
    if config.lora_max_loras:
        raise ValueError("tensor_parallel_size: adapters need an engine of one GPU; set lora_max_loras to 0")
    followers = Followers(config, path)
    try:
        parts = load(config, path, progress, followers.rank, LeadingRunner)
    except BaseException:
        followers.stop()
        raise
    parts.runner.followers = followers
    return parts, followers


def _devices(device: str, size: int) -> list[str]:
    """Of each process: the GPU that is given and those after it, or the CPU."""
    name, _, number = device.partition(":")
    if name == "cpu" or name == "auto" and not torch.cuda.is_available():
        return ["cpu"] * size
    first = int(number or 0)
    if first + size > torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise ValueError(f"tensor_parallel_size is {size} and device {device}, but there are {there} CUDA devices")
    return [f"cuda:{first + index}" for index in range(size)]
