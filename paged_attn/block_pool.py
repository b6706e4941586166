"""Physical blocks of a paged KV cache: a free list, a count of owners for each, cached blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from paged_attn._checks import check_count, refuse_shallow_copy, require
from paged_attn.block_events import BlockEvent

__all__ = ["BlockPool", "OutOfBlocksError"]


class OutOfBlocksError(RuntimeError):
    """The pool has fewer blocks to give than an operation needs; nothing was changed."""

    def __init__(self, what: str, needed: int, free: int, total: int, reserved: int = 0) -> None:
        kept = f", {reserved} of them kept back by the watermark" if reserved else ""
        super().__init__(f"{what}: needs {needed} blocks, {free} of {total} are free{kept}")
        self.needed = needed
        self.free = free
        self._made_of = what, needed, free, total, reserved

    def __reduce__(self) -> tuple[type[OutOfBlocksError], tuple[str, int, int, int, int]]:
        # An exception is made again from `args`, which is the message alone.
        return type(self), self._made_of


class BlockPool:
    """Physical blocks 0 .. num_blocks - 1: each free, or with a count of owners, or cached.

    A *cached* block has no owner but contents that may be wanted again (see `keep`). It is given
    away, least recently released first, when no free block is left. O(1) for each block allocated,
    shared or freed; the block freed last is reused first.

    Attributes:
        num_blocks: blocks of the pool.
        owners: the count of each block; for reading.
        on_evict: called with each cached block that is about to be given away, or None.
        events: where changes are recorded, or None (the default) to record nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks = check_count("BlockPool: num_blocks", num_blocks, 0)
        self.on_evict: Callable[[int], None] | None = None
        self.events: list[BlockEvent] | None = None
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the next block is at the end
        self.owners = [0] * num_blocks
        self._num_shared = 0
        self._kept: set[int] = set()  # become cached, not free, when the last owner leaves
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first is evicted first

    __copy__ = refuse_shallow_copy

    @property
    def num_free(self) -> int:
        """Blocks without an owner and without contents that are wanted."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without an owner whose contents are kept until they are evicted."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - self.num_available

    @property
    def num_shared(self) -> int:
        """Blocks with more than one owner."""
        return self._num_shared

    def ref_count(self, block: int) -> int:
        """Owners of `block`, 0 if it has none. Raises ValueError for an id outside the pool."""
        if not 0 <= block < self.num_blocks:
            raise self._outside("ref_count", block)
        return self.owners[block]

    def is_cached(self, block: int) -> bool:
        """Whether `block` has no owner but contents that are kept."""
        return block in self._cached

    def allocate(self, n: int = 1) -> list[int]:
        """Takes `n` blocks, each with one owner: free ones, then evicted ones.

        Raises OutOfBlocksError if there are fewer.
        """
        if type(n) is not int or n < 0:
            n = check_count("BlockPool.allocate: n", n, 0)
        if n > len(self._free):
            self._evict(n)
        keep = len(self._free) - n
        blocks = self._free[keep:]
        del self._free[keep:]
        blocks.reverse()
        for block in blocks:
            self.owners[block] = 1
        if self.events is not None:
            self.events += [BlockEvent("alloc", block) for block in blocks]
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds an owner to each of `blocks`, cached ones included; ValueError if one is free."""
        owners = self.owners
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise self._outside("share", block)
            if owners[block] == 0 and block not in self._cached:
                raise ValueError(f"BlockPool.share: block {block} is free, it has no owner yet")
        for block in blocks:
            owners[block] += 1
            if owners[block] == 2:
                self._num_shared += 1
            elif owners[block] == 1:
                del self._cached[block]
        if self.events is not None:
            self.events += [BlockEvent("share", block) for block in blocks]

    def free(self, blocks: Sequence[int]) -> None:
        """Takes one owner from each of `blocks`; one that loses its last becomes free or cached.

        A block may be named as often as it has owners; once more is a ValueError. Of the blocks of
        one call, those named first are evicted first.
        """
        owners = self.owners
        num_free = len(self._free)
        for i, block in enumerate(blocks):
            if not 0 <= block < self.num_blocks or owners[block] == 0:
                self._undo_free(blocks[:i], num_free)
                if not 0 <= block < self.num_blocks:
                    raise self._outside("free", block)
                raise ValueError(
                    f"BlockPool.free: block {block} has {owners[block]} owners, cannot lose "
                    f"{1 + sum(other == block for other in blocks[:i])}"
                )
            owners[block] -= 1
            if owners[block] == 0:
                if block in self._kept:
                    self._cached[block] = None
                else:
                    self._free.append(block)
            elif owners[block] == 1:
                self._num_shared -= 1
        if self.events is not None:
            self.events += [BlockEvent("free", block) for block in blocks]

    def keep(self, block: int) -> None:
        """Makes an owned block become cached, not free, when it loses its last owner."""
        if self.ref_count(block) == 0:
            raise ValueError(f"BlockPool.keep: block {block} has no owner")
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """Undoes keep(): a cached block becomes free, an owned one will."""
        self._kept.discard(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def cached_blocks(self) -> list[int]:
        """The cached blocks in the order in which they are evicted."""
        return list(self._cached)

    def check_invariants(self) -> None:
        """Raises AssertionError unless every block is free, or cached, or owned. O(n)."""
        require(len(set(self._free)) == len(self._free), "a block is twice in the free list")
        without_owner = {block for block, count in enumerate(self.owners) if count == 0}
        require(
            set(self._free) | set(self._cached) == without_owner,
            "the free list and the cached blocks are not the blocks with no owner",
        )
        require(not set(self._free) & self._kept, "a block whose contents are kept is free")
        require(set(self._cached) <= self._kept, "a block is cached but not kept")
        require(min(self.owners, default=0) >= 0, "a block has a negative count of owners")
        shared = sum(count > 1 for count in self.owners)
        require(self._num_shared == shared, f"{shared} blocks are shared, not {self._num_shared}")
        owned = sum(count > 0 for count in self.owners)
        require(
            self.num_free + owned + self.num_cached == self.num_blocks and owned == self.num_used,
            "free + referenced + cached blocks are not all blocks",
        )

    def _evict(self, n: int) -> None:
        """Makes `n` blocks free, or raises."""
        if n > self.num_available:
            raise OutOfBlocksError("BlockPool.allocate", n, self.num_available, self.num_blocks)
        while len(self._free) < n:
            block, _ = self._cached.popitem(last=False)
            self._kept.discard(block)
            self._free.append(block)
            if self.events is not None:
                self.events.append(BlockEvent("evict", block))
            if self.on_evict is not None:
                self.on_evict(block)

    def _undo_free(self, freed: Sequence[int], num_free: int) -> None:
        del self._free[num_free:]
        for block in freed:
            self.owners[block] += 1
            self._num_shared += self.owners[block] == 2
            self._cached.pop(block, None)

    def _outside(self, method: str, block: int) -> ValueError:
        return ValueError(
            f"BlockPool.{method}: block must be in [0, {self.num_blocks}), got {block}"
        )
