"""One step on the device. The state of every stream lives there, in tensors indexed by slot."""

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
        stop: bool [R], on the host once `ready` (None on a CPU) has passed.
        slots: int64 [R], on the device.
    """

    latents: torch.Tensor
    stop: torch.Tensor
    slots: torch.Tensor
    ready: torch.cuda.Event | None

    def stop_flags(self) -> list[bool]:
        """Wait for the step's stop flags."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.stop.tolist()


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
        """Put an admitted sequence's state into its slot."""
        slot = sequence.slot
        self.position[slot] = sequence.prompt_length
        self.steps[slot] = 0
        self.seeds[slot] = sequence.seed
        self.cfg_value[slot] = sequence.cfg_value
        self.temperature[slot] = sequence.temperature
        self.block_tables[slot, : len(sequence.blocks)] = self._to_device(np.array(sequence.blocks, np.int32))
        if sequence.continues:
            self.condition[slot] = self._to_device(sequence.patches[-1]).to(self.dtype)
        else:
            self.condition[slot] = 0

    @torch.inference_mode()
    def run(self, step: Step) -> StepOutput | None:
        """Launch one step; None if no stream gets a patch in it."""
        mu, stop, slots = [], [], [s.slot for s in step.sampled]
        if step.prefills:
            outputs = self._prefill(step.prefills)
            mu.append(outputs[0])
            stop.append(outputs[1])
        if not slots:
            return None
        slots = self._to_device(np.array(slots, np.int64))
        if step.decodes:
            outputs = self._decode(slots[len(slots) - len(step.decodes) :], step.decodes)
            mu.append(outputs[0])
            stop.append(outputs[1])
        stop_host, ready = self._to_host(torch.cat(stop))
        noise = patch_noise(self.seeds[slots], self.steps[slots], self.patch_size, self.feat_dim)
        noise = (noise * self.temperature[slots][:, None, None]).transpose(1, 2).to(self.dtype)
        latents = self.diffusion.forward(noise, torch.cat(mu), self.condition[slots], self.cfg_value[slots])
        self.condition[slots] = latents
        self.steps[slots] += 1
        return StepOutput(latents, stop_host, slots, ready)

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
        self.position[slots] += 1
        tables = self.block_tables[slots]
        blocks = tables.gather(1, (positions // self.block_size)[:, None])[:, 0].long()
        self.attention.metadata = PagedMetadata(
            slots=blocks * self.block_size + positions % self.block_size,
            block_tables=tables,
            context_lens=(positions + 1).to(torch.int32),
            # `launched` counts the patch of this very step; the first patch came out of the prompt.
            max_context=max(s.prompt_length + s.launched - 1 for s in sequences),
        )
        return self.backbone.forward(TokenBatch(positions=positions, patches=self.condition[slots]))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return tensor, None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return host, ready
