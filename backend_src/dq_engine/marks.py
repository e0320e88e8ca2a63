"""Marks in what a device does, to tell how long a part of it took."""

import time

import torch

Mark = torch.cuda.Event | float
"""Seconds of a clock on a CPU, where nothing runs ahead."""


def mark(device: torch.device, stream: torch.cuda.Stream | None = None) -> Mark:
    """A mark behind all that the device has been told to do on a stream; None is the current one."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def seconds_between(began: Mark, ended: Mark) -> float:
    """How long the device took from one mark to the other, once both have been passed."""
    return ended - began if isinstance(ended, float) else 1e-3 * began.elapsed_time(ended)
