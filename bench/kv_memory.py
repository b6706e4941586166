"""Ways to give out the memory of a KV cache: reserved contiguously, or in blocks.

Each counts slots: room for the keys and values of one token in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from traces import MAX_LEN, Request

from paged_attn import BlockManager

Reservation = Literal["max", "pow2", "oracle"]
Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True)
class Usage:
    """What the slots of a cache are at one moment; the rest is free or lost between requests."""

    tokens: int  # hold a token
    reserved: int  # will hold one before their request is done
    internal: int  # belong to a request and will never hold one


@dataclass
class Pressure:
    """What a pool that is too small costs."""

    preemptions: int = 0
    tokens_recomputed: int = 0
    blocks_swapped: int = 0  # out and in


class Memory(Protocol):
    """What the simulation needs."""

    total: int  # slots
    pressure: Pressure

    def admit(self, number: int, request: Request) -> bool:
        """Makes room for the prompt of request `number`, if there is."""

    def grow(self, numbers: list[int]) -> list[int]:
        """One more token for each; returns those that had to go, newest first."""

    def resume(self, number: int) -> int | None:
        """Room for one that had to go: tokens to compute again; None if there is none."""

    def release(self, number: int) -> None:
        """The request is done."""

    def usage(self) -> Usage:
        """What the slots are now."""


class BuddyAllocator:
    """Contiguous ranges by buddies (Knuth, The Art of Computer Programming 1, section 2.5).

    `total` slots are cut into powers of two, each its own tree.
    """

    def __init__(self, total: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(total.bit_length())]
        self._tree_of: list[tuple[int, int]] = []  # (start, order) of each tree
        start = 0
        for order in reversed(range(total.bit_length())):
            if total >> order & 1:
                self._free[order].add(start)
                self._tree_of.append((start, order))
                start += 1 << order

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(start, order) of a range of at least `size` slots, or None."""
        order = (size - 1).bit_length()
        found = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > order:
            found -= 1
            self._free[found].add(start + (1 << found))
        return start, order

    def release(self, start: int, order: int) -> None:
        """Gives a range back, joined with its buddy if that is free."""
        tree, top = next((s, o) for s, o in reversed(self._tree_of) if s <= start)
        while order < top:
            buddy = tree + ((start - tree) ^ (1 << order))
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)


class ContiguousMemory:
    """Each request's whole room is reserved when it is admitted.

    * max: the model's longest sequence. pow2: the prompt, and the output rounded up to a power of
      two, as if its length were known to a factor of 2. oracle: exactly what it will need.
    """

    def __init__(self, total: int, reservation: Reservation) -> None:
        self.total = total
        self.pressure = Pressure()
        self._reservation = reservation
        self._buddies = BuddyAllocator(total)
        self._ranges: dict[int, tuple[int, int]] = {}
        self._requests: dict[int, Request] = {}
        self._tokens = self._will_hold = self._asked_for = 0

    def _size(self, request: Request) -> int:
        if self._reservation == "max":
            return MAX_LEN
        if self._reservation == "oracle":
            return request.total_len
        return min(MAX_LEN, request.prompt_len + (1 << (request.output_len - 1).bit_length()))

    def admit(self, number: int, request: Request) -> bool:
        """See Memory."""
        found = self._buddies.allocate(self._size(request))
        if found is None:
            return False
        self._ranges[number], self._requests[number] = found, request
        self._tokens += request.prompt_len
        self._will_hold += request.total_len
        self._asked_for += self._size(request)
        return True

    def grow(self, numbers: list[int]) -> list[int]:
        """See Memory: there is always room."""
        self._tokens += len(numbers)
        return []

    def resume(self, number: int) -> int | None:
        """See Memory: none ever has to go."""
        raise RuntimeError(f"request {number} was not preempted")

    def release(self, number: int) -> None:
        """See Memory."""
        request = self._requests.pop(number)
        self._buddies.release(*self._ranges.pop(number))
        self._tokens -= request.total_len
        self._will_hold -= request.total_len
        self._asked_for -= self._size(request)

    def usage(self) -> Usage:
        """See Memory. What buddies round up by counts as lost between requests."""
        return Usage(
            self._tokens, self._will_hold - self._tokens, self._asked_for - self._will_hold
        )


class PagedMemory:
    """Blocks on demand from the real BlockManager; the newest request gives way under pressure."""

    def __init__(
        self,
        total: int,
        block_size: int,
        preemption: Preemption = "recompute",
        watermark: float = 0.01,
    ) -> None:
        self.total = total
        self.pressure = Pressure()
        self._preemption = preemption
        blocks = total // block_size
        self.manager = BlockManager(
            blocks, block_size, num_host_blocks=4 * blocks, watermark=int(blocks * watermark)
        )
        self._seqs: dict[int, int] = {}
        self._tokens = 0

    def admit(self, number: int, request: Request) -> bool:
        """See Memory."""
        if not self.manager.can_add(request.prompt_len):
            return False
        self._seqs[number] = self.manager.add(request.prompt_len)
        self._tokens += request.prompt_len
        return True

    def grow(self, numbers: list[int]) -> list[int]:
        """See Memory."""
        gone: list[int] = []
        seqs = [self._seqs[number] for number in numbers]
        while not self.manager.can_append_many(seqs, [1] * len(seqs)):
            gone.append(numbers[len(seqs) - 1])
            self._preempt(seqs.pop())
        self.manager.append_batch(seqs, [1] * len(seqs))
        self._tokens += len(seqs)
        return gone

    def _preempt(self, seq: int) -> None:
        self.pressure.preemptions += 1
        self._tokens -= self.manager.seq_len(seq)
        if self._preemption == "swap":
            self.pressure.blocks_swapped += len(self.manager.swap_out([seq]).pairs)
        else:
            self.manager.preempt(seq)

    def resume(self, number: int) -> int | None:
        """See Memory."""
        seq = self._seqs[number]
        length = self.manager.seq_len(seq)
        if self._preemption == "swap":
            if not self.manager.can_swap_in([seq]):
                return None
            self.pressure.blocks_swapped += len(self.manager.swap_in([seq]).pairs)
            again = 0
        else:
            if not self.manager.can_resume(seq):
                return None
            again = length - self.manager.resume(seq)
            self.pressure.tokens_recomputed += again
        self._tokens += length
        return again

    def release(self, number: int) -> None:
        """See Memory."""
        seq = self._seqs.pop(number)
        self._tokens -= self.manager.seq_len(seq)
        self.manager.free(seq)

    def usage(self) -> Usage:
        """See Memory. What a last block has left will be used, but may not be."""
        used = self.manager.pool.num_used * self.manager.block_size
        return Usage(self._tokens, 0, used - self._tokens)
