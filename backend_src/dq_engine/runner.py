"""One step on the device. The state of every stream lives there, in tensors indexed by slot."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from dq_engine.attention.base import PagedMetadata
from dq_engine.attention.layers import ModelAttention
from dq_engine.model.backbone import Backbone, SiluAndMul, TokenBatch
from dq_engine.model.checkpoint import Checkpoint
from dq_engine.model.diffusion import Diffusion
from dq_engine.nano import mlp_layers
from dq_engine.noise import patch_noise
from dq_engine.scheduler import Prefill, Step
from dq_engine.sequence import Sequence


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
    """

    latents: torch.Tensor
    slots: torch.Tensor
    stop_host: torch.Tensor
    latents_host: torch.Tensor
    ready: torch.cuda.Event | None
    launched_at: float

    def wait(self) -> tuple[list[bool], np.ndarray]:
        """Wait for the step; its stop flags and its latents."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.stop_host.tolist(), self.latents_host.numpy()


class Runner:
    """Runs steps of one model.

    Args:
        checkpoint: the loaded model; its attention and activations are replaced.
        attention: the `attention` setting.
        inference_timesteps: Euler steps of a patch.
        max_num_seqs: slots.
        max_model_len: most tokens of a stream.
    """

    def __init__(
        self, checkpoint: Checkpoint, attention: str, inference_timesteps: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        model = checkpoint.model
        for module in mlp_layers(model):
            module.act_fn = SiluAndMul()
        self.attention = ModelAttention(model, attention)
        self.backbone = Backbone(model)
        self.diffusion = Diffusion(model.feat_decoder.estimator, inference_timesteps, checkpoint.mean_mode)
        weight = model.lm_to_dit_proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.patch_size, self.feat_dim = model.patch_size, model.feat_dim
        self.block_size = self.attention.backend.block_size

        def state(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(max_num_seqs, *shape, dtype=dtype, device=self.device)

        self.condition = state(self.patch_size, self.feat_dim, dtype=self.dtype)
        """The patch before: LocDiT's condition, and the language models' next input."""
        self.position, self.steps, self.seeds = state(), state(), state()
        self.cfg_value, self.temperature = state(dtype=self.dtype), state(dtype=torch.float32)
        self.block_tables = state(-(-max_model_len // self.block_size), dtype=torch.int32)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.attention.allocate(num_blocks)

    @torch.inference_mode()
    def start(self, sequence: Sequence) -> None:
        """Put the state of a sequence that was admitted, or is back after a preemption, into its slot."""
        slot = sequence.slot
        self.position[slot] = sequence.prompt_length
        self.steps[slot] = sequence.generated
        self.seeds[slot] = sequence.seed
        self.cfg_value[slot] = sequence.cfg_value
        self.temperature[slot] = sequence.temperature
        self.block_tables[slot, : len(sequence.blocks)] = self._to_device(np.array(sequence.blocks, np.int32))
        last_patch = sequence.last_patch
        self.condition[slot] = 0 if last_patch is None else self._to_device(last_patch).to(self.dtype)

    @torch.inference_mode()
    def run(self, step: Step) -> StepOutput | None:
        """Launch one step; None if no stream gets a patch in it.

        Nothing but the KV cache is changed before everything has been computed: a step that raised can be run again.
        """
        launched_at = time.monotonic()
        mu, stop, slots = [], [], [s.slot for s in step.sampled]
        if step.grown:
            self._extend_block_tables(step.grown)
        if step.prefills:
            outputs = self._prefill(step.prefills)
            mu.append(outputs[0])
            stop.append(outputs[1])
        if not slots:
            return None
        slots = self._to_device(np.array(slots, np.int64))
        decode_slots = slots[len(slots) - len(step.decodes) :]
        if step.decodes:
            outputs = self._decode(decode_slots, step.decodes)
            mu.append(outputs[0])
            stop.append(outputs[1])
        noise = patch_noise(self.seeds[slots], self.steps[slots], self.patch_size, self.feat_dim)
        noise = (noise * self.temperature[slots][:, None, None]).transpose(1, 2).to(self.dtype)
        latents = self.diffusion.forward(noise, torch.cat(mu), self.condition[slots], self.cfg_value[slots])
        self.condition[slots] = latents
        self.steps[slots] += 1
        self.position[decode_slots] += 1
        return StepOutput(latents, slots, *self._to_host(torch.cat(stop), latents.float()), launched_at)

    def _extend_block_tables(self, grown: list[Sequence]) -> None:
        rows, columns, blocks = zip(*((s.slot, len(s.blocks) - 1, s.blocks[-1]) for s in grown), strict=True)
        index = self._to_device(np.array([rows, columns], np.int64))
        self.block_tables[index[0], index[1]] = self._to_device(np.array(blocks, np.int32))

    def _prefill(self, prefills: list[Prefill]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take prompt tokens in; mu and stop of the streams whose prompt is complete."""
        ids, positions, cache_slots, patches, patch_rows, sample_rows = [], [], [], [], [], []
        offset = 0
        for p in prefills:
            s, end = p.sequence, p.start + p.length
            place = np.arange(p.start, end)
            ids.append(s.token_ids[p.start : end])
            positions.append(place)
            cache_slots.append(np.array(s.blocks)[place // self.block_size] * self.block_size + place % self.block_size)
            first, last = np.searchsorted(s.patch_rows, (p.start, end))
            patches.append(s.patches[first:last])
            patch_rows.append(s.patch_rows[first:last] - p.start + offset)
            offset += p.length
            if p.completes:
                sample_rows.append(offset - 1)
        lengths = [p.length for p in prefills]
        contexts = [p.start + p.length for p in prefills]
        tables = self.block_tables[self._to_device(np.array([p.sequence.slot for p in prefills]))]
        self.attention.metadata = PagedMetadata(
            slots=self._to_device(np.concatenate(cache_slots)),
            block_tables=tables,
            context_lens=self._to_device(np.array(contexts, np.int32)),
            max_context=max(contexts),
            query_lens=lengths,
            query_starts=self._to_device(np.cumsum([0, *lengths], dtype=np.int32)),
            context_lens_host=contexts,
        )
        return self.backbone.forward(
            TokenBatch(
                positions=self._to_device(np.concatenate(positions)),
                patches=self._to_device(np.concatenate(patches)).to(self.dtype),
                token_ids=self._to_device(np.concatenate(ids)),
                patch_rows=self._to_device(np.concatenate(patch_rows)),
                sample_rows=self._to_device(np.array(sample_rows, np.int64)),
            )
        )

    def _decode(self, slots: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed each stream its last patch; mu and stop for the next."""
        positions = self.position[slots]
        tables = self.block_tables[slots]
        blocks = tables.gather(1, (positions // self.block_size)[:, None])[:, 0].long()
        self.attention.metadata = PagedMetadata(
            slots=blocks * self.block_size + positions % self.block_size,
            block_tables=tables,
            context_lens=(positions + 1).to(torch.int32),
            max_context=max(s.cache_length for s in sequences),
        )
        return self.backbone.forward(TokenBatch(positions=positions, patches=self.condition[slots]))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _to_host(
        self, stop: torch.Tensor, latents: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return stop, latents, None
        host = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in (stop, latents)
        ]
        ready = torch.cuda.Event()
        ready.record()
        return *host, ready
