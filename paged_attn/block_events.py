"""What a block pool can be asked to record: one event for each change of a block's state."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["BlockEvent", "EventKind"]

EventKind = Literal["alloc", "share", "free", "evict", "copy", "swap_out", "swap_in"]


class BlockEvent(NamedTuple):
    """One change.

    * alloc: a free block got its first owner.
    * share: a block got one more owner; a cached block, its first one again.
    * free: a block lost an owner.
    * evict: a cached block was forgotten, so that it can be allocated.
    * copy: copy-on-write, `block` to `other`.
    * swap_out, swap_in: `block` of one pool to `other` of the other pool.
    """

    kind: EventKind
    block: int
    other: int = -1  # destination of a copy or swap
