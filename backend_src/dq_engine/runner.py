"""One step on the device: prompts, patches, or both, in CUDA graphs where there are some."""

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import torch

from dq_engine.attention.base import BLOCK_SIZE, PagedMetadata
from dq_engine.graphs import BatchGraphs
from dq_engine.marks import mark
from dq_engine.model.backbone import Backbone, PromptTokens
from dq_engine.model.checkpoint import Checkpoint
from dq_engine.model.diffusion import Diffusion
from dq_engine.noise import patch_noise
from dq_engine.prefill import PrefillArrays, PromptBatch
from dq_engine.prefill_buckets import Bucket
from dq_engine.prefill_graphs import PrefillGraphs
from dq_engine.prompt_encodings import PromptEncodings
from dq_engine.scheduler import Prefill, Step
from dq_engine.sequence import Sequence
from dq_engine.slot_state import SlotState, to_device
from dq_engine.step_output import StepOutput


class Runner:
    """Runs steps of one model.

    Args:
        checkpoint: the loaded model.
        attention: the `attention` setting.
        inference_timesteps: Euler steps of a patch.
        max_num_seqs: slots.
        max_model_len: most tokens of a stream.
    """

    isolates_faults = True
    """Whether another step may be run after one that raised."""

    def __init__(
        self, checkpoint: Checkpoint, attention: str, inference_timesteps: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        model = checkpoint.model
        self.backbone = Backbone(model, attention)
        self.attention = self.backbone.attention
        self.diffusion = Diffusion(model.feat_decoder.estimator, inference_timesteps, checkpoint.mean_mode)
        weight = model.lm_to_dit_proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.patch_size, self.feat_dim = model.patch_size, model.feat_dim
        self.max_model_len = max_model_len
        self.state = SlotState(max_num_seqs, max_model_len, self.patch_size, self.feat_dim, self.device, self.dtype)
        self.scratch_slot = self.state.scratch_slot
        self._lora = checkpoint.lora
        self._encodings = PromptEncodings()
        # Each by whether any of the streams has an adapter; those without are not slowed down by there being adapters.
        self._decode_graphs: dict[bool, BatchGraphs] = {}
        self._lm_graphs: dict[bool, BatchGraphs] = {}
        self._sample_graphs: dict[bool, BatchGraphs] = {}
        self._prefill_graphs: dict[bool, PrefillGraphs] = {}
        self._decoded: Counter[str] = Counter()

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make the KV cache: `num_blocks` for the streams, and one for the scratch slot."""
        self.attention.allocate(num_blocks + 1)
        self.state.block_tables[self.scratch_slot] = num_blocks
        self._scratch_row = num_blocks * BLOCK_SIZE

    def capture(
        self,
        buckets: list[int],
        prefill_buckets: list[Bucket],
        prefill_adapters: bool,
        progress: Callable[[str, float], None],
    ) -> tuple[dict[int, float], list[tuple[int, float]]]:
        """Capture the decode step, prefill, and LocDiT for the streams that come out of it, as CUDA graphs.

        Args:
            buckets: numbers of streams, ascending.
            prefill_buckets: of prompts and tokens; none for an eager prefill.
            prefill_adapters: also of prompts that use adapters.

        Returns:
            Seconds of a decode step, by its number of streams; numbers of prompt tokens, ascending, and their seconds.
        """
        slots = torch.full((1,), self.scratch_slot, device=self.device)
        mu = torch.zeros(1, self.backbone.mu_size, dtype=self.dtype, device=self.device)
        pool = None
        for adapters in (False, True) if self._lora is not None else (False,):
            name = " with adapters" if adapters else ""
            self._decode_graphs[adapters] = BatchGraphs(
                lambda slots, a=adapters: self._decode_and_sample(slots, a),
                [slots],
                buckets,
                self.scratch_slot,
                lambda x, n=name: progress("decode graphs" + n, x),
                pool,
            )
            pool = self._decode_graphs[adapters].pool
            # Beside streams whose prompt is complete only the language models' part: LocDiT then runs once for all.
            self._lm_graphs[adapters] = BatchGraphs(
                lambda slots, a=adapters: self._decode(slots, self.max_model_len, a),
                [slots],
                buckets,
                self.scratch_slot,
                lambda x, n=name: progress("language model graphs" + n, x),
                pool,
            )
            self._sample_graphs[adapters] = BatchGraphs(
                lambda slots, mu, a=adapters: (self._sample(slots, mu, a),),
                [slots, mu],
                buckets,
                self.scratch_slot,
                lambda x, n=name: progress("LocDiT graphs" + n, x),
                pool,
            )
            if not prefill_buckets or not self.attention.backend.graphs_prefill or adapters and not prefill_adapters:
                continue
            self._prefill_graphs[adapters] = PrefillGraphs(
                self._encode,
                lambda parts, encoded, a=adapters: self._forward_prompts(parts, encoded, a),
                prefill_buckets,
                self.state.condition[:1],
                self.backbone.hidden_size,
                self.attention.queries_per_tile,
                self.scratch_slot,
                self._scratch_row,
                adapters,
                lambda x, n=name: progress("prefill graphs" + n, x),
            )
        prefill_seconds = self._prefill_graphs[False].token_seconds if self._prefill_graphs else []
        return self._decode_graphs[False].seconds, prefill_seconds

    def drop_graphs(self) -> None:
        """Forget what was captured, and free its memory."""
        for graphs in (self._decode_graphs, self._lm_graphs, self._sample_graphs, self._prefill_graphs):
            graphs.clear()
        gc.collect()

    @property
    def counters(self) -> dict[str, int]:
        """How often patches and prompts ran in a graph, how often without, and the tokens of padding that that cost."""
        total = self._decoded.copy()
        for graphs in self._prefill_graphs.values():
            total.update(graphs.counters)
        return dict(total)

    def start(self, sequences: list[Sequence]) -> None:
        """`SlotState.start`. The loop calls this and `run`: parallel/leader.py has other processes do the same."""
        self.state.start(sequences)

    @torch.inference_mode()
    def run(self, step: Step) -> StepOutput | None:
        """Launch one step; None if no stream gets a patch in it.

        Nothing but the KV cache is changed before everything has been computed: a step that raised can be run again.
        """
        launched_at = time.monotonic()
        if step.grown:
            self.state.extend_block_tables(step.grown)
        mu, stop, seconds, prompts = None, None, 0.0, None
        if step.prefills:
            began = mark(self.device)
            mu, stop, seconds = self._prefill(step.prefills)
            prompts = began, mark(self.device)
        slots = [s.slot for s in step.sampled]
        if not slots:
            return None
        self._decoded["decode_graph_hits"] += bool(self._decode_graphs)
        slots = self._upload(np.array(slots, np.int64))
        completed, decoding = slots.split([len(slots) - len(step.decodes), len(step.decodes)])
        if self._decode_graphs and not len(completed):
            graphs = self._decode_graphs[_any_adapter(step.decodes)]
            latents, stop = graphs(decoding)
            seconds += graphs.seconds_of(len(decoding))
        else:
            parts = [(mu, stop)] if len(completed) else []
            if len(decoding):
                adapters, longest = _any_adapter(step.decodes), max(s.cache_length for s in step.decodes)
                graphs = self._lm_graphs.get(adapters)
                parts.append(graphs(decoding) if graphs else self._decode(decoding, longest, adapters))
                seconds += graphs.seconds_of(len(decoding)) if graphs else 0.0
            mu, stop = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            adapters = _any_adapter(step.sampled)
            graphs = self._sample_graphs.get(adapters)
            latents = graphs(slots, mu)[0] if graphs else self._sample(slots, mu, adapters)
            seconds += graphs.seconds_of(len(slots)) if graphs else 0.0
        return StepOutput(latents, slots, *self._to_host(stop, latents.float()), launched_at, seconds, prompts)

    def _sample(self, slots: torch.Tensor, mu: torch.Tensor, adapters: bool) -> torch.Tensor:
        """The next patch of each stream, kept as its state and returned, [R, patch_size, feat_dim]."""
        noise = patch_noise(self.state.seeds[slots], self.state.steps[slots], self.patch_size, self.feat_dim)
        noise = (noise * self.state.temperature[slots][:, None, None]).transpose(1, 2).to(self.dtype)
        with self._lora.sampling(self.state.adapters[slots]) if adapters else contextlib.nullcontext():
            latents = self.diffusion.forward(noise, mu, self.state.condition[slots], self.state.cfg_value[slots])
        self.state.condition[slots] = latents
        self.state.steps[slots] += slots != self.scratch_slot
        return latents

    def _decode_and_sample(self, slots: torch.Tensor, adapters: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mu, stop = self._decode(slots, self.max_model_len, adapters)
        return self._sample(slots, mu, adapters), stop

    def _prefill(self, prefills: list[Prefill]) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Take prompt tokens in; mu and stop of the streams whose prompt is complete, and what it takes at least."""
        # The prompts that end here first: theirs are the rows that are returned.
        ordered = sorted(prefills, key=lambda p: not p.completes)
        batch = PromptBatch(ordered, self.attention.queries_per_tile, self._encodings)
        adapters = _any_adapter(p.sequence for p in prefills)
        graphs = self._prefill_graphs.get(adapters)
        replayed = graphs(batch) if graphs is not None else None
        (mu, stop), seconds = replayed or (self._prefill_eagerly(batch, adapters), 0.0)
        return mu[: batch.completed], stop[: batch.completed], seconds

    def _prefill_eagerly(self, batch: PromptBatch, adapters: bool) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self.state.condition.new_zeros(1, self.backbone.hidden_size)
        new = encoded[:0]
        if batch.num_new_patches:
            slots = self._upload(batch.adapters()) if adapters else None
            new = self._encode(self._upload(batch.new_patches()).to(self.dtype), slots)
        encoded = torch.cat([encoded, batch.encoded(new)])
        array = self._upload(batch.array(batch.shape, self.scratch_slot, self._scratch_row))
        return self._forward_prompts(batch.shape.split(array), encoded, adapters, batch.lengths)

    def _encode(self, patches: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """LocEnc's outputs, [A, hidden], for patches of prompts that have these adapter slots, int64 [A]."""
        with contextlib.nullcontext() if adapters is None else self._lora.encoding(adapters):
            return self.backbone.encode(patches)

    def _forward_prompts(
        self,
        parts: PrefillArrays,
        encoded: torch.Tensor,
        adapters: bool,
        lengths: list[tuple[int, int]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.attention.metadata = PagedMetadata(
            slots=parts.cache_slots,
            block_tables=self.state.block_tables[parts.slots],
            context_lens=parts.context_lens,
            max_context=self.max_model_len,
            query_starts=parts.query_starts,
            tiles=parts.tiles,
            lengths=lengths,
        )
        tokens = PromptTokens(parts.token_ids, parts.positions, encoded, parts.patch_index, parts.sample_rows)
        if not adapters:
            return self.backbone.prefill(tokens)
        used = self.state.adapters[parts.slots]
        cut = parts.tiles, self.attention.queries_per_tile, parts.query_starts
        with self._lora.prompts(used, *cut, len(parts.token_ids)):
            return self.backbone.prefill(tokens)

    def _decode(self, slots: torch.Tensor, max_context: int, adapters: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed each stream its last patch; mu and stop for the next."""
        positions = self.state.offset[slots] + self.state.steps[slots]
        tables = self.state.block_tables[slots]
        blocks = tables.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0].long()
        self.attention.metadata = PagedMetadata(
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=tables,
            context_lens=(positions + 1).to(torch.int32),
            max_context=max_context,
        )
        with self._lora.decoding(self.state.adapters[slots]) if adapters else contextlib.nullcontext():
            return self.backbone.decode(self.state.condition[slots], positions)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)

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


def _any_adapter(sequences: Iterable[Sequence]) -> bool:
    return any(s.adapter is not None for s in sequences)
