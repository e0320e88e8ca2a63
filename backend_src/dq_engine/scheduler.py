"""Who runs in the next step: all running streams, and as much of the waiting prompts as fits beside them."""

from collections import deque
from dataclasses import dataclass

from dq_engine.kv_cache import BlockPool
from dq_engine.sequence import Sequence


@dataclass
class Prefill:
    """A part of a prompt: tokens [start, start + length) of the sequence."""

    sequence: Sequence
    start: int
    length: int

    @property
    def completes(self) -> bool:
        return self.start + self.length == self.sequence.prompt_length


@dataclass
class Step:
    """What the device does next: prompts to take in, streams to generate a patch for."""

    prefills: list[Prefill]
    decodes: list[Sequence]

    @property
    def sampled(self) -> list[Sequence]:
        """The streams that get a patch, in the order of the device's rows."""
        return [p.sequence for p in self.prefills if p.completes] + self.decodes


class Scheduler:
    """First come, first served. A stream is admitted once a slot and blocks for its longest possible length are free.

    Args:
        pool: the KV cache's blocks.
        max_num_seqs: slots.
        max_num_batched_tokens: most tokens in one step; more than `max_num_seqs`.
        max_prefill_tokens: most prompt tokens in one step; 0 = no own limit.
        max_prefill_seqs: most prompts in one step; 0 = no own limit.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_tokens: int,
        max_prefill_seqs: int,
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prefill_tokens = max_prefill_tokens or max_num_batched_tokens
        self.max_prefill_seqs = max_prefill_seqs or max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def busy(self) -> bool:
        """Whether there is anything to do, now or later."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its slot and blocks are free at once."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self.pool.release(sequence.blocks)
        sequence.slot, sequence.blocks = -1, []

    def admit(self) -> list[Sequence]:
        """Give slots and blocks to those who have waited longest, as far as both last."""
        admitted = []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            blocks = self.pool.allocate(self.pool.blocks_for(sequence.max_length))
            if blocks is None:
                break
            self.waiting.popleft()
            sequence.blocks, sequence.slot = blocks, self._free_slots.pop()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do. What it holds counts as launched."""
        decodes = [s for s in self.running if s.prefilled == s.prompt_length and s.launched < s.max_patches]
        budget = min(self.max_prefill_tokens, self.max_num_batched_tokens - len(decodes))
        prefills: list[Prefill] = []
        for sequence in self.running:
            if budget <= 0 or len(prefills) == self.max_prefill_seqs:
                break
            length = min(sequence.prompt_length - sequence.prefilled, budget)
            if length:
                prefills.append(Prefill(sequence, sequence.prefilled, length))
                sequence.prefilled += length
                budget -= length
        if not prefills and not decodes:
            return None
        step = Step(prefills, decodes)
        for sequence in step.sampled:
            sequence.launched += 1
        return step
