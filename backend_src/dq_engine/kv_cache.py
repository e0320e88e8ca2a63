"""Which blocks of the KV cache belong to whom, and which hold a prefix that somebody else can use.

A full block is published under a key that says what all tokens up to its end are; a stream whose prompt begins with the
same tokens takes it over instead of computing it again. A block that nobody holds stays published until the room is
needed, the least recently used first, and those of stored voices last.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

Key = Hashable


class BlockPool:
    """Blocks of the KV cache.

    Each block is free (nobody holds it and nothing is known of it), cached (nobody holds it, it is published) or held.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._published: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Published blocks that nobody holds, the least recently used first."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """The same, of blocks that `keep` was called for."""
        self._keep = [False] * num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out now: free or cached."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._kept)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_size)

    def lookup(self, keys: Sequence[Key]) -> list[int]:
        """The published blocks of the longest prefix of `keys` (one a block); nothing is held by this."""
        blocks = []
        for key in keys:
            block = self._published.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, count: int, prefix: Sequence[int] = ()) -> list[int] | None:
        """Hold `prefix` (found by `lookup`) and `count` new blocks; None, and nothing changed, if too few are left."""
        if count > self.num_available - sum(not self._holders[block] for block in prefix):
            return None
        for block in prefix:
            self._cached.pop(block, None)
            self._kept.pop(block, None)
            self._holders[block] += 1
        new = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._holders[block] = 1
            new.append(block)
        return [*prefix, *new]

    def publish(self, block: int, key: Key) -> None:
        """A held block has been filled; others may use it. Of two blocks with one key the first stays published."""
        if self._keys[block] is None and key not in self._published:
            self._published[key] = block
            self._keys[block] = key

    def keep(self, blocks: Sequence[int]) -> None:
        """Held blocks that will be wanted again: once nobody holds them, they make room only when no others can."""
        for block in blocks:
            self._keep[block] = True

    def release(self, blocks: Sequence[int]) -> None:
        """One holder lets its blocks go, the last of them first: a prefix is worth more than what follows it."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was given back twice"
            if self._holders[block]:
                continue
            if self._keys[block] is None:
                self._keep[block] = False
                self._free.append(block)
            else:
                (self._kept if self._keep[block] else self._cached)[block] = None

    def check(self) -> None:
        """Assert that every block is free, cached or held, and in one of these states only."""
        held = sum(count > 0 for count in self._holders)
        assert held + self.num_available == self.num_blocks
        assert len({*self._free, *self._cached, *self._kept}) == self.num_available
        assert all(self._keys[block] == key for key, block in self._published.items())

    def _evict(self) -> int:
        block, _ = (self._cached or self._kept).popitem(last=False)
        del self._published[self._keys[block]]
        self._keys[block], self._keep[block] = None, False
        return block
