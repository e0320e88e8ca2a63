"""CUDA graphs of a function of a batch: captured once per bucket of batch sizes, replayed on the smallest that fits."""

from collections.abc import Callable, Sequence

import torch

from dq_engine.parallel.group import agree_on_least

_FIRST_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144)


def batch_buckets(limit: int) -> list[int]:
    """Batch sizes to capture up to `limit`: fine at first, then every 32, from 256 on every 64.

    A step lasts as long as its bucket's: with 129 streams in one of 160 it would be a fifth longer than it has to be.
    """
    buckets = [*_FIRST_BUCKETS, *range(160, 257, 32), *range(320, limit + 64, 64)]
    return [b for b in buckets if b < limit] + [limit]


class BatchGraphs:
    """Graphs of one function.

    Args:
        function: of tensors whose first dimension is the batch; returns tensors [B, ...].
        examples: for each argument a tensor [1, ...] of the shape and dtype that it has.
        buckets: batch sizes to capture, ascending.
        scratch_slot: for a function whose first argument, int64 [B], says which slots' state it uses: the slot of the
            rows that fill a bucket up, whose state is nobody's. None for a function without state.
        progress: told how far it is, 0 to 1.
        pool: of other graphs whose memory these may use also, as no two ever run at once.
        stream: to capture on; the kernels get its priority. None for one of the usual priority.
    """

    @torch.inference_mode()
    def __init__(
        self,
        function: Callable[..., tuple[torch.Tensor, ...]],
        examples: Sequence[torch.Tensor],
        buckets: Sequence[int],
        scratch_slot: int | None,
        progress: Callable[[float], None],
        pool: tuple[int, int] | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.buckets, self.scratch_slot = list(buckets), scratch_slot
        largest = self.buckets[-1]
        self._inputs = [torch.zeros(largest, *e.shape[1:], dtype=e.dtype, device=e.device) for e in examples]
        if scratch_slot is not None:
            self._inputs[0].fill_(scratch_slot)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]] = {}
        self.seconds: dict[int, float] = {}
        """How long the device takes for each bucket."""
        progress(0.0)
        # The largest first: the smaller ones then find its memory in the pool.
        for count, bucket in enumerate(reversed(self.buckets), start=1):
            arguments = [tensor[:bucket] for tensor in self._inputs]
            graph, outputs = capture(function, arguments, pool, stream)
            pool = graph.pool()
            self._graphs[bucket] = graph, outputs
            self.seconds[bucket] = replay_seconds(graph)
            progress(count / len(self.buckets))
        self.pool = pool

    def seconds_of(self, size: int) -> float:
        """How long the device takes for a batch."""
        return self.seconds[self._bucket(size)]

    @torch.inference_mode()
    def __call__(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the function; what it returns is the caller's own, and no later replay writes to it."""
        size = arguments[0].size(0)
        bucket = self._bucket(size)
        for static, argument in zip(self._inputs, arguments, strict=True):
            static[:size].copy_(argument)
        if self.scratch_slot is not None:
            self._inputs[0][size:bucket].fill_(self.scratch_slot)
        graph, outputs = self._graphs[bucket]
        graph.replay()
        return tuple(output[:size].clone() for output in outputs)

    def _bucket(self, size: int) -> int:
        return next(b for b in self.buckets if b >= size)


def capture(
    function: Callable[..., tuple[torch.Tensor, ...]],
    arguments: Sequence[torch.Tensor],
    pool: tuple[int, int] | None,
    side: torch.cuda.Stream | None = None,
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """Run a function once, then capture it; the graph, and what it will have put its outputs into.

    Args:
        pool: of another graph whose memory this one may use also, as the two never run at once.
        side: to capture on.
    """
    side = side or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side):
        outputs = function(*arguments)
    return graph, outputs


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay, the second of two; the same in all processes of a tensor-parallel engine."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return agree_on_least(begin.elapsed_time(end) / 1e3, torch.device("cuda", torch.cuda.current_device()))
