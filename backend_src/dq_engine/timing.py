"""Where the time of steps goes: a line of text for each, and a trace of some for chrome://tracing or Perfetto."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)


class StepTimes:
    """Prints the times of steps, and traces the first of them. Used by the engine's thread only.

    Args:
        printed: whether there is a line for each step.
        trace_file: where the trace of the first steps goes; empty for none.
        trace_steps: how many those are.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, printed: bool, trace_file: str, trace_steps: int) -> None:
        self._printed, self._trace_file, self._trace_left = printed, trace_file, trace_steps if trace_file else 0
        self._profile: profile | None = None
        if trace_file:
            try:  # now, and not when it is full
                Path(trace_file).parent.mkdir(parents=True, exist_ok=True)
                open(trace_file, "a").close()
            except OSError as error:
                raise ValueError(f"trace_file: {trace_file} cannot be written: {error.strerror}") from None

    def step_begins(self) -> None:
        """Before a step is decided on."""
        if self._trace_left and self._profile is None:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profile.start()

    def step_ended(
        self,
        rows: int,
        prefill_tokens: int,
        host_seconds: float,
        seconds: float,
        prefill_seconds: float,
        idle_seconds: float,
    ) -> None:
        """After a step's outputs have been read.

        Args:
            rows: patches that it made.
            prefill_tokens: tokens of prompts that it took in.
            host_seconds: what deciding on it and launching it took.
            seconds: what the device took.
            prefill_seconds: what of that was for the prompts.
            idle_seconds: how long the device had had nothing to do before it.
        """
        if self._printed:
            logger.info(
                "step: %d patches, %d prompt tokens; host %.2f ms, device %.2f ms, prefill %.2f ms of it, "
                "idle before it %.2f ms",
                rows,
                prefill_tokens,
                1e3 * host_seconds,
                1e3 * seconds,
                1e3 * prefill_seconds,
                1e3 * idle_seconds,
            )
        if self._profile is not None:
            self._trace_left -= 1
            if not self._trace_left:
                self._write()

    def delivered(self, rows: int, vae_seconds: float, seconds: float) -> None:
        """After the audio of a step has been handed on (on the delivery thread).

        Args:
            rows: its patches.
            vae_seconds: what decoding them took.
            seconds: what handing them to their streams took.
        """
        if self._printed:
            logger.info("audio: %d patches; VAE %.2f ms, delivery %.2f ms", rows, 1e3 * vae_seconds, 1e3 * seconds)

    def _write(self) -> None:
        self._profile.stop()
        try:
            self._profile.export_chrome_trace(self._trace_file)
            logger.info("the trace is in %s", self._trace_file)
        except (OSError, RuntimeError) as error:
            logger.error("the trace could not be written to %s: %s", self._trace_file, error)
        self._profile = None
