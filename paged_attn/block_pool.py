"""Physical blocks of a paged KV cache: a free list and a count of owners for each."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BlockPool", "OutOfBlocksError"]


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than an operation needs; nothing was changed."""

    def __init__(self, what: str, needed: int, free: int, total: int) -> None:
        super().__init__(f"{what}: needs {needed} blocks, {free} of {total} are free")
        self.needed = needed
        self.free = free


class BlockPool:
    """Physical blocks 0 .. num_blocks - 1, each free or with a count of owners.

    O(1) for each block allocated, shared or freed; the block freed last is reused first.
    """

    def __init__(self, num_blocks: int) -> None:
        check_count("BlockPool: num_blocks", num_blocks, 0)
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the next block is at the end
        self._owners = [0] * num_blocks
        self._num_shared = 0

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def num_shared(self) -> int:
        """Blocks with more than one owner."""
        return self._num_shared

    def ref_count(self, block: int) -> int:
        """Owners of `block`, 0 if it is free. Raises ValueError for an id outside the pool."""
        if not 0 <= block < self.num_blocks:
            raise self._outside("ref_count", block)
        return self._owners[block]

    def allocate(self, n: int = 1) -> list[int]:
        """Takes `n` free blocks, each with one owner; OutOfBlocksError if there are fewer."""
        check_count("BlockPool.allocate: n", n, 0)
        keep = len(self._free) - n
        if keep < 0:
            raise OutOfBlocksError("BlockPool.allocate", n, self.num_free, self.num_blocks)
        blocks = self._free[keep:]
        del self._free[keep:]
        blocks.reverse()
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds an owner to each of `blocks`; ValueError if one of them is free."""
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise self._outside("share", block)
            if self._owners[block] == 0:
                raise ValueError(f"BlockPool.share: block {block} is free, it has no owner yet")
        for block in blocks:
            self._owners[block] += 1
            if self._owners[block] == 2:
                self._num_shared += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes one owner from each of `blocks`; a block that loses its last becomes free.

        A block may be named as often as it has owners; once more is a ValueError.
        """
        owners = self._owners
        num_free = len(self._free)
        for i, block in enumerate(blocks):
            if not 0 <= block < self.num_blocks or owners[block] == 0:
                for freed in blocks[:i]:
                    owners[freed] += 1
                    self._num_shared += owners[freed] == 2
                del self._free[num_free:]
                if not 0 <= block < self.num_blocks:
                    raise self._outside("free", block)
                raise ValueError(
                    f"BlockPool.free: block {block} has {owners[block]} owners, cannot lose "
                    f"{1 + sum(other == block for other in blocks[:i])}"
                )
            owners[block] -= 1
            if owners[block] == 0:
                self._free.append(block)
            elif owners[block] == 1:
                self._num_shared -= 1

    def check_invariants(self) -> None:
        """Raises AssertionError unless every block is either free, once, or has owners. O(n)."""
        require(len(set(self._free)) == len(self._free), "a block is twice in the free list")
        without_owner = {block for block, count in enumerate(self._owners) if count == 0}
        require(set(self._free) == without_owner, "the free list is not the blocks with no owner")
        require(min(self._owners, default=0) >= 0, "a block has a negative count of owners")
        shared = sum(count > 1 for count in self._owners)
        require(self._num_shared == shared, f"{shared} blocks are shared, not {self._num_shared}")

    def _outside(self, method: str, block: int) -> ValueError:
        return ValueError(
            f"BlockPool.{method}: block must be in [0, {self.num_blocks}), got {block}"
        )


def check_count(what: str, value: int, minimum: int) -> None:
    """Raises TypeError unless `value` is an int, ValueError if it is below `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{what} must be at least {minimum}, got {value}")


def require(condition: bool, message: str) -> None:
    """Raises AssertionError, also under python -O, unless an invariant holds."""
    if not condition:
        raise AssertionError(f"blocks: {message}")
