"""CUDA graphs of prefill: a step's prompts are padded to the cheapest bucket of (prompts, tokens) that holds them."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from dq_engine.graphs import BatchGraphs, capture, replay_seconds
from dq_engine.parallel.group import agree_on_least
from dq_engine.prefill import PrefillArrays, PrefillShape, PromptBatch
from dq_engine.prefill_buckets import Bucket, patch_buckets
from dq_engine.slot_state import to_device

# A graph that takes so many times as long as its prompts would without one is not used. Launching kernel by kernel
# keeps the host busy too, so it has to be much. Our own buckets do not waste so much; those of the setting may.
_TOO_DEAR = 2.0


class PrefillGraphs:
    """The graphs.

    Args:
        encode: LocEnc, of [A, patch_size, feat_dim] and, for prompts that use adapters, each patch's adapter slot,
            int64 [A]; returns [A, hidden].
        forward: of the parts of an array and of `encoded` [1 + A, hidden]; returns tensors [prompts, ...].
        buckets: what to capture.
        patches: an example, [1, patch_size, feat_dim].
        hidden: width of what LocEnc returns.
        queries_per_tile: of the attention kernel.
        scratch_slot, scratch_row: the slot, and the row of the cache, of padding.
        adapters: for prompts that use adapters.
        progress: told how far it is, 0 to 1.
    """

    @torch.inference_mode()
    def __init__(
        self,
        encode: Callable[..., torch.Tensor],
        forward: Callable[[PrefillArrays, torch.Tensor], tuple[torch.Tensor, ...]],
        buckets: Sequence[Bucket],
        patches: torch.Tensor,
        hidden: int,
        queries_per_tile: int,
        scratch_slot: int,
        scratch_row: int,
        adapters: bool,
        progress: Callable[[float], None],
    ) -> None:
        self._adapters = adapters
        self._scratch_slot, self._scratch_row = scratch_slot, scratch_row
        most = max(tokens for _, tokens in buckets)
        self._encoded = patches.new_zeros(1 + most, hidden)
        examples = [patches, *([patches.new_zeros(1, dtype=torch.int64)] if adapters else [])]
        self._encode = BatchGraphs(
            lambda *inputs: (encode(*inputs),), examples, patch_buckets(most), None, lambda x: progress(x / 2)
        )
        self._graphs: dict[PrefillShape, tuple[torch.cuda.CUDAGraph, torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self.seconds: dict[PrefillShape, float] = {}
        """How long the device takes for each bucket, LocEnc aside."""
        self.counters: Counter[str] = Counter(prefill_graph_hits=0, prefill_graph_fallbacks=0, prefill_padding_tokens=0)
        pool = None
        for count, (prompts, tokens) in enumerate(sorted(buckets, key=lambda b: -b[1]), start=1):
            shape = PrefillShape(prompts, tokens, tokens // queries_per_tile + prompts)
            array = torch.zeros(shape.size, dtype=torch.int64, device=patches.device)
            parts = shape.split(array)
            parts.slots.fill_(scratch_slot)
            # One prompt of all the tokens, within the scratch block: what capturing writes and measures.
            parts.cache_slots.fill_(scratch_row)
            parts.tiles.fill_(-1)
            graph, outputs = capture(lambda array, s=shape: forward(s.split(array), self._encoded), [array], pool)
            pool = graph.pool()
            self._graphs[shape] = graph, array, outputs
            self.seconds[shape] = replay_seconds(graph)
            progress(0.5 + count / len(buckets) / 2)
        began = time.monotonic()
        forward(shape.split(array), self._encoded)
        self._launch_seconds = agree_on_least(time.monotonic() - began, patches.device)

    @property
    def token_seconds(self) -> list[tuple[int, float]]:
        """Tokens of each bucket, ascending, and how long they take."""
        return sorted((shape.tokens, seconds) for shape, seconds in self.seconds.items())

    @torch.inference_mode()
    def __call__(self, batch: PromptBatch) -> tuple[tuple[torch.Tensor, ...], float] | None:
        """Run prompts in the cheapest bucket that holds them.

        Returns:
            What `forward` gives, the first rows for the batch, and the seconds that the device takes; None without such
            a bucket, or if it is too dear.
        """
        need, shape = batch.shape, self._fit(batch)
        if shape is None:
            self.counters["prefill_graph_fallbacks"] += 1
            return None
        self.counters["prefill_graph_hits"] += 1
        self.counters["prefill_padding_tokens"] += shape.tokens - need.tokens
        new, seconds = self._encoded[:0], self.seconds[shape]
        if batch.num_new_patches:
            seconds += self._encode.seconds_of(batch.num_new_patches)
            inputs = [to_device(batch.new_patches(), self._encoded.device).to(self._encoded.dtype)]
            if self._adapters:
                inputs.append(to_device(batch.adapters(), self._encoded.device))
            new = self._encode(*inputs)[0]
        if batch.num_patches:
            self._encoded[1 : 1 + batch.num_patches] = batch.encoded(new)
        graph, array, outputs = self._graphs[shape]
        array.copy_(to_device(batch.array(shape, self._scratch_slot, self._scratch_row), array.device))
        graph.replay()
        return tuple(output[: need.prompts].clone() for output in outputs), seconds

    def _fit(self, batch: PromptBatch) -> PrefillShape | None:
        """The cheapest bucket that holds prompts, unless they are clearly cheaper without."""
        need = batch.shape
        fitting = [s for s in self._graphs if s.prompts >= need.prompts and s.tokens >= need.tokens]
        shape = min(fitting, key=self.seconds.__getitem__, default=None)
        if shape is None:
            return None
        # Without a graph: as long as the host needs to launch it, or the device for these tokens.
        eager = max(self._launch_seconds, self.seconds[shape] * need.tokens / shape.tokens)
        return None if self.seconds[shape] > _TOO_DEAR * eager else shape
