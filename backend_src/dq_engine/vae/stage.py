"""The decoding stage: new latents of all streams of a step, in one batch, beside the next step."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dq_engine.graphs import BatchGraphs
from dq_engine.marks import Mark, mark, seconds_between
from dq_engine.slot_state import to_device
from dq_engine.vae.decoder import StreamingDecoder


@dataclass
class DecodedStep:
    """Audio of one step, on its way to the host.

    Args:
        audio: float32 [R, samples].
        began, ready: passed when the decoding began and when the audio has arrived; seconds of a clock on a CPU.
    """

    audio: torch.Tensor
    began: Mark
    ready: Mark

    @property
    def seconds(self) -> float:
        """How long it took, once it has been waited for."""
        return seconds_between(self.began, self.ready)

    def wait(self) -> np.ndarray:
        if not isinstance(self.ready, float):
            self.ready.synchronize()
        return self.audio.numpy()


class VaeStage:
    """Owns the decoder's slots. On a GPU everything runs on a CUDA stream of its own.

    Args:
        decoder: on the device, in the dtype it is to run in.
        device: where it is.
        gpu_latents: False to take the latents by way of the host.
    """

    def __init__(self, decoder: StreamingDecoder, device: torch.device, gpu_latents: bool) -> None:
        self.decoder, self.device, self._gpu_latents = decoder, device, gpu_latents
        self._graphs: BatchGraphs | None = None
        self.dtype = decoder.dtype
        # What is decoded is wanted now; the step beside it takes longer anyway.
        self.cuda_stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def capture(
        self, buckets: list[int], latents: torch.Tensor, scratch_slot: int, progress: Callable[[str, float], None]
    ) -> dict[int, float]:
        """Capture the decoding of one patch as CUDA graphs.

        Args:
            buckets: numbers of streams, ascending.
            latents: a patch as an example, [1, patch_size, feat_dim], in any dtype.
            scratch_slot: the decoder's slot that no stream uses.

        Returns:
            Seconds of decoding one patch each, by the number of streams.
        """
        slots = torch.full((1,), scratch_slot, device=self.device)
        self._graphs = BatchGraphs(
            lambda slots, latents: (self.decoder.decode(latents, slots),),
            [slots, latents.to(self.dtype)],
            buckets,
            scratch_slot,
            lambda x: progress("VAE graphs", x),
            stream=self.cuda_stream,
        )
        return self._graphs.seconds

    def drop_graphs(self) -> None:
        """Forget what was captured, and free its memory."""
        self._graphs = None

    def save(self, slot: int) -> torch.Tensor:
        """The state of a stream that has to leave its slot."""
        with self._on_stream():
            return self.decoder.save(slot)

    def restore(self, slot: int, state: torch.Tensor) -> None:
        """Let a stream that had to leave go on in another slot."""
        with self._on_stream():
            self.decoder.restore(slot, state)

    def start(self, contexts: dict[int, np.ndarray | None]) -> None:
        """Begin streams in slots, each after decoding (and dropping) its context.

        Args:
            contexts: for each slot float32 [patches, patch_size, feat_dim], or None.
        """
        with self._on_stream():
            self.decoder.reset(self._upload(np.array(list(contexts))))
            # Patch by patch, each of all that have so many.
            known = {slot: context for slot, context in contexts.items() if context is not None}
            for index in range(max(map(len, known.values()), default=0)):
                patches = {slot: context[index] for slot, context in known.items() if len(context) > index}
                self._decode(self._upload(np.array(list(patches))), self._upload(np.stack(list(patches.values()))))

    def decode(self, slots: torch.Tensor, latents: torch.Tensor) -> DecodedStep:
        """Decode the next patch of each stream.

        Args:
            slots: int64 [R].
            latents: [R, patch_size, feat_dim].
        """
        if not self._gpu_latents:
            latents = latents.cpu().to(self.device)
        if self.cuda_stream is not None:
            self.cuda_stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            began = mark(self.device, self.cuda_stream)
            audio = self._decode(slots, latents)
            if self.cuda_stream is None:
                return DecodedStep(audio, began, mark(self.device, self.cuda_stream))
            # The allocator must not hand these to the main stream before this one has read them.
            slots.record_stream(self.cuda_stream)
            latents.record_stream(self.cuda_stream)
            host = torch.empty(audio.shape, pin_memory=True).copy_(audio, non_blocking=True)
            return DecodedStep(host, began, mark(self.device, self.cuda_stream))

    def _decode(self, slots: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        if self._graphs is None:
            return self.decoder.decode(latents.to(self.dtype), slots)
        return self._graphs(slots, latents)[0]

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)

    def _on_stream(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.cuda_stream is None else torch.cuda.stream(self.cuda_stream)
