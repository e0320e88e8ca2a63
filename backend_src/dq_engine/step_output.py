"""What a step has made."""

from dataclasses import dataclass

import numpy as np
import torch

from dq_engine.marks import Mark, seconds_between


@dataclass
class StepOutput:
    """What a step made, still on the device (R streams, in the order of `Step.sampled`).

    Args:
        latents: [R, patch_size, feat_dim], owned by whoever holds this.
        slots: int64 [R], on the device.
        stop_host: bool [R], on the host once `ready` has passed.
        latents_host: float32 [R, patch_size, feat_dim], likewise.
        ready: None on a CPU.
        launched_at: when the host began with it, by time.monotonic().
        prompts: marks before and after the prompts; None without any.
        least_seconds: what the device surely needs for it, by its graphs; 0 where that is not known.
        host_seconds: what the host took to decide on it and to launch it.
    """

    latents: torch.Tensor
    slots: torch.Tensor
    stop_host: torch.Tensor
    latents_host: torch.Tensor
    ready: torch.cuda.Event | None
    launched_at: float
    least_seconds: float
    prompts: tuple[Mark, Mark] | None
    host_seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether the device has finished it, where it runs beside the host."""
        return self.ready is not None and self.ready.query()

    @property
    def prefill_seconds(self) -> float:
        """What the device took for the step's prompts, once it has been waited for."""
        return 0.0 if self.prompts is None else seconds_between(*self.prompts)

    def wait(self) -> tuple[list[bool], np.ndarray]:
        """Wait for the step; its stop flags and its latents."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.stop_host.tolist(), self.latents_host.numpy()
