"""Who runs in the next step: all running streams, and as much of the waiting prompts as fits beside them."""

from collections import deque
from collections.abc import Callable, Set
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
    """What the device does next: prompts to take in, streams to generate a patch for.

    Args:
        grown: streams that got a block more for it, the last of their `blocks`.
    """

    prefills: list[Prefill]
    decodes: list[Sequence]
    grown: list[Sequence]

    @property
    def sampled(self) -> list[Sequence]:
        """The streams that get a patch, in the order of the device's rows."""
        return [p.sequence for p in self.prefills if p.completes] + self.decodes


class Scheduler:
    """First come, first served. A stream gets blocks for its prompt when it is admitted, and more as it grows.

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
        """In the order of their arrival."""
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def busy(self) -> bool:
        """Whether there is anything to do now; not while all who wait do so for their adapters to be loaded."""
        return bool(self.running) or any(s.adapter is None or not s.adapter.loading for s in self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its slot and blocks are free at once."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._release(sequence)

    def reserve_adapters(self) -> None:
        """Have the adapters of those who wait loaded, who waits longest first, as far as there are slots for them."""
        for sequence in self.waiting:
            if sequence.adapter is not None and not sequence.adapter.reserve():
                break

    def admit(self, limit: int) -> list[Sequence]:
        """Give slots and blocks to at most `limit` of those who have waited longest, as far as both last.

        Who waits for an adapter holds up nobody else.
        """
        admitted = []
        for sequence in tuple(self.waiting):
            if not self._free_slots or len(admitted) == limit:
                break
            if sequence.adapter is not None and not sequence.adapter.loaded:
                continue
            # The last token is computed in any case: the first patch comes out of it.
            prefix = self.pool.lookup(sequence.keys[: (sequence.prompt_length - 1) // self.pool.block_size])
            count = self.pool.blocks_for(sequence.prompt_length) - len(prefix)
            # A block for each running stream to grow into stays back, or admitting would soon mean preempting.
            if self.running and count + len(self.running) > self.pool.num_available:
                break
            blocks = self.pool.allocate(count, prefix)
            if blocks is None:
                break
            self.waiting.remove(sequence)
            sequence.blocks, sequence.slot = blocks, self._free_slots.pop()
            sequence.prefilled = len(prefix) * self.pool.block_size
            self.pool.keep(blocks[: sequence.kept_tokens // self.pool.block_size])
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def short_of_blocks(self) -> bool:
        """Whether the streams that run need more blocks for their next patches than there are."""
        return sum(self._must_grow(s) for s in self._decodable()) > self.pool.num_available

    def preempt_youngest(self, save: Callable[[Sequence], None]) -> Sequence:
        """Take the youngest stream's slot and blocks and put it at the head of the queue.

        Its full blocks stay published, so that little is computed twice if they last until its return.

        Args:
            save: called with it while it still has its slot; makes it ready to be taken in again.
        """
        sequence = self.running[-1]
        filled = sequence.cache_length // self.pool.block_size
        save(sequence)
        for block, key in zip(sequence.blocks[:filled], sequence.keys, strict=False):
            self.pool.publish(block, key)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def schedule(self, prefill_tokens: int, postponed: Set[Sequence] = frozenset()) -> Step | None:
        """The next step, or None when there is nothing to do. What it holds counts as launched.

        Args:
            prefill_tokens: most prompt tokens, below the settings' own limits.
            postponed: running streams that this step leaves out.
        """
        decodes = [s for s in self._decodable() if s not in postponed]
        grown = [s for s in decodes if self._must_grow(s)]
        for sequence in grown:
            sequence.blocks += self.pool.allocate(1)
        budget = min(prefill_tokens, self.max_prefill_tokens, self.max_num_batched_tokens - len(decodes))
        prefills: list[Prefill] = []
        for sequence in self.running:
            if budget <= 0 or len(prefills) == self.max_prefill_seqs:
                break
            length = min(sequence.prompt_length - sequence.prefilled, budget)
            if length:
                prefills.append(Prefill(sequence, sequence.prefilled, length))
                budget -= length
        if not prefills and not decodes:
            return None
        for sequence in decodes:
            sequence.launched += 1
        for prefill in prefills:
            prefill.sequence.prefilled += prefill.length
            prefill.sequence.launched += prefill.completes
        return Step(prefills, decodes, grown)

    def publish(self, prefills: list[Prefill]) -> None:
        """These prompts' tokens are in the cache, or will be before anything launched later reads them."""
        for prefill in prefills:
            sequence, size = prefill.sequence, self.pool.block_size
            for index in range(prefill.start // size, (prefill.start + prefill.length) // size):
                self.pool.publish(sequence.blocks[index], sequence.keys[index])

    def _decodable(self) -> list[Sequence]:
        return [s for s in self.running if s.prefilled == s.prompt_length and s.launched < s.max_patches]

    def _must_grow(self, sequence: Sequence) -> bool:
        return self.pool.blocks_for(sequence.cache_length + 1) > len(sequence.blocks)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self.pool.release(sequence.blocks)
        sequence.slot, sequence.blocks = -1, []
