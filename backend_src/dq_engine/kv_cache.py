"""Which blocks of the KV cache belong to whom."""


class BlockPool:
    """Blocks of the KV cache, handed out whole and given back whole.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing changed) if fewer are free."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def release(self, blocks: list[int]) -> None:
        """Take blocks back from the one who held them."""
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.num_blocks, "a block was given back twice"
