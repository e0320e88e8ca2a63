"""All CUDA graphs of an engine: what memory they need, and capturing them."""

import gc
from collections.abc import Callable

import torch

from dq_engine.config import EngineConfig
from dq_engine.graphs import batch_buckets
from dq_engine.pacing import longest_prefill
from dq_engine.prefill_buckets import own_buckets, parse_buckets
from dq_engine.runner import Runner
from dq_engine.vae.stage import VaeStage


class Graphs:
    """The graphs of steps and of decoding.

    Args:
        runner, vae: what is captured.
        config: the settings.
        max_num_seqs: slots.
    """

    def __init__(self, runner: Runner, vae: VaeStage, config: EngineConfig, max_num_seqs: int) -> None:
        self._runner, self._vae, self._config, self._max_num_seqs = runner, vae, config, max_num_seqs
        most = min(filter(None, (config.max_num_batched_tokens, config.max_prefill_tokens)))
        longest = longest_prefill(most, config.realtime)
        prefill_buckets = parse_buckets(config.prefill_buckets) or own_buckets(longest, max_num_seqs)
        self._prefill_buckets = prefill_buckets if config.prefill_graph else []

    def probe(self, progress: Callable[[str, float], None]) -> int:
        """Bytes that the graphs will take, by capturing the largest of each kind, whose memory the others share.

        Leaves a KV cache behind that is good for nothing.
        """
        self._runner.allocate_kv_cache(1)
        before = _used(self._runner.device)
        largest = sorted(self._prefill_buckets, key=lambda bucket: bucket[1])[-1:]
        # The first time on a machine this is when the kernels are compiled: most of a start.
        buckets = [self._max_num_seqs]
        self._capture(buckets, largest, lambda stage, done: progress(f"compiling the kernels of {stage}", done))
        needed = _used(self._runner.device) - before
        self._runner.drop_graphs()
        self._vae.drop_graphs()
        _used(self._runner.device)
        return max(0, needed)

    def capture(self, progress: Callable[[str, float], None]) -> tuple[dict[int, float], list[tuple[int, float]]]:
        """Capture all.

        Returns:
            Seconds of a step and its decoding, by its number of streams; numbers of prompt tokens and their seconds.
        """
        buckets = batch_buckets(self._max_num_seqs)
        return self._capture(buckets, self._prefill_buckets, lambda stage, done: progress(f"capturing {stage}", done))

    @torch.inference_mode()
    def _capture(
        self, buckets: list[int], prefill_buckets: list[tuple[int, int]], progress: Callable[[str, float], None]
    ) -> tuple[dict[int, float], list[tuple[int, float]]]:
        adapters, example = self._config.prefill_graph_lora, self._runner.state.condition[:1]
        decode, prefill = self._runner.capture(buckets, prefill_buckets, adapters, progress)
        vocode = self._vae.capture(buckets, example, self._max_num_seqs, progress)
        return {rows: seconds + vocode[rows] for rows, seconds in decode.items()}, prefill


def _used(device: torch.device) -> int:
    """Bytes of the GPU that are in use, those aside that the allocator merely keeps."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
