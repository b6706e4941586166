"""Host-side bookkeeping of a paged KV cache: which block holds which tokens of which sequence.

`BlockPool` hands out physical block ids and counts their owners; `BlockManager` maps sequences to
block tables on top of it. Nothing here holds data or touches a device: the manager says which slots
new tokens go to and which blocks must be copied or swapped first, and the ops do it. The scheme is
that of Kwon et al. 2023, arXiv 2309.06180, sections 4.2 to 4.5.

A *slot* is `block * block_size + offset`. Every operation either succeeds or raises and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paged_attn._checks import check_count, require
from paged_attn.block_events import BlockEvent
from paged_attn.block_pool import BlockPool, OutOfBlocksError
from paged_attn.block_stats import BlockStats, count_waste
from paged_attn.prefix_cache import HashFunction
from paged_attn.prefix_tables import PrefixTables, Prompt
from paged_attn.sequence_tables import (
    Append,
    SequenceState,
    TableChange,
    expand_block_table,
)

__all__ = [
    "Append",
    "BlockEvent",
    "BlockManager",
    "BlockPool",
    "BlockStats",
    "OutOfBlocksError",
    "Prompt",
    "TableChange",
    "Transfer",
    "expand_block_table",
]


class Transfer(NamedTuple):
    """Blocks to copy between the device's pool and the host's."""

    transfer_id: int
    pairs: list[tuple[int, int]]  # (source block, destination block), each block once


@dataclass(frozen=True)
class _Held:
    """A transfer whose source blocks are kept, and what undoes it."""

    pool: BlockPool  # of the sources
    sources: list[int]
    target_pool: BlockPool
    pairs: list[tuple[int, int]]
    moved: list[tuple[int, list[int], int, int]]  # sequence, its old blocks, length, num_indexed


class BlockManager(PrefixTables):
    """Block tables of many sequences, a prefix cache, and a host pool to swap out to.

    * enable_prefix_caching: whether full blocks stay findable by their tokens (`add_prompt`,
      `mark_written`), also after their last sequence is gone, until their memory is needed.
    * hash_function: (hash of what is before, tokens as 8-byte integers) -> hash, both bytes.
      Default: BLAKE2b with a random key. A hit is verified whatever the function.
    * num_host_blocks: blocks of the host's pool, for `swap_out`.
    * watermark: blocks that admitting a sequence (`add`, `add_prompt`, `swap_in`, `resume`) leaves
      available, so that those that run can grow.
    * record_events: whether `take_events` has something to tell.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = False,
        hash_function: HashFunction | None = None,
        num_host_blocks: int = 0,
        watermark: int = 0,
        record_events: bool = False,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            hash_function=hash_function,
            watermark=watermark,
        )
        self.host_pool = BlockPool(check_count("BlockManager: num_host_blocks", num_host_blocks, 0))
        if record_events:
            self.pool.events = []
        self._swapped: dict[int, SequenceState] = {}  # blocks are the host pool's
        self._preempted: dict[int, SequenceState] = {}  # no blocks
        self._transfers: dict[int, _Held] = {}  # those with `hold`
        self._num_swapped_out = self._num_swapped_in = self._num_recomputes = 0

    # The ways out of pressure.

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether swap_out(seq_ids) would succeed now."""
        blocks = _distinct(self._distinct_seqs("can_swap_out", seq_ids))
        return len(blocks) <= self.host_pool.num_available

    def swap_out(self, seq_ids: Sequence[int], *, hold: bool = False) -> Transfer:
        """Moves sequences to the host's pool; what they share among them stays shared.

        Args:
            seq_ids: sequences, all different. They can only be swapped in or freed then.
            hold: whether the device's blocks are kept from reuse until finish_transfer(), for
                copies that are not ordered with later work, and for cancel_transfer(). Without it
                the transfer needs neither.

        Returns:
            What to copy, from device blocks to host blocks.

        Raises:
            OutOfBlocksError: the host pool has too few free blocks.
        """
        seqs = self._distinct_seqs("swap_out", seq_ids)
        sources = _distinct(seqs)
        free = self.host_pool.num_available
        if len(sources) > free:
            raise OutOfBlocksError(
                "BlockManager.swap_out", len(sources), free, self.host_pool.num_blocks
            )
        transfer = self._move(seq_ids, seqs, sources, self.pool, self.host_pool, hold)
        for seq_id, seq in zip(seq_ids, seqs, strict=True):
            seq.num_indexed = 0
            self._swapped[seq_id] = self._seqs.pop(seq_id)
        self._num_swapped_out += len(sources)
        self._record("swap_out", transfer.pairs)
        return transfer

    def can_swap_in(self, seq_ids: Sequence[int]) -> bool:
        """Whether swap_in(seq_ids) would succeed now."""
        return self._can_admit(len(_distinct(self._seqs_swapped("can_swap_in", seq_ids))))

    def swap_in(self, seq_ids: Sequence[int], *, hold: bool = False) -> Transfer:
        """Moves sequences back; what to copy is from host blocks to device blocks.

        Arguments and errors as for swap_out(); here `hold` keeps the host's blocks.
        """
        seqs = self._seqs_swapped("swap_in", seq_ids)
        sources = _distinct(seqs)
        self._check_available("swap_in", len(sources), self.watermark)
        transfer = self._move(seq_ids, seqs, sources, self.host_pool, self.pool, hold)
        for seq_id, seq in zip(seq_ids, seqs, strict=True):
            seq.stale_from = 0
            self._seqs[seq_id] = self._swapped.pop(seq_id)
        self._num_swapped_in += len(sources)
        self._record("swap_in", transfer.pairs)
        return transfer

    def finish_transfer(self, transfer_id: int) -> None:
        """Gives back the source blocks of a transfer with `hold`. KeyError if there is none."""
        held = self._transfer(transfer_id)
        held.pool.free(held.sources[::-1])
        del self._transfers[transfer_id]

    def cancel_transfer(self, transfer_id: int) -> None:
        """Undoes a transfer with `hold` that could not be carried out.

        Its sequences are where they were, in the blocks they had; those freed since stay so. Raises
        KeyError if there is no such transfer, ValueError if one of its sequences has changed since.
        """
        held = self._transfer(transfer_id)
        outward = held.pool is self.pool
        now, before = (self._swapped, self._seqs) if outward else (self._seqs, self._swapped)
        moved = [entry for entry in held.moved if entry[0] in now]
        for seq_id, _, length, _ in moved:
            if now[seq_id].length != length:
                raise ValueError(
                    f"BlockManager.cancel_transfer: sequence {seq_id} had {length} tokens when it "
                    f"was moved, has {now[seq_id].length}"
                )
        for seq_id, blocks, _, num_indexed in moved:
            seq = now.pop(seq_id)
            held.pool.share(blocks)
            held.target_pool.free(seq.blocks[::-1])
            seq.blocks, seq.num_indexed, seq.stale_from = blocks, num_indexed, 0
            before[seq_id] = seq
        if outward:
            self._num_swapped_out -= len(held.pairs)
        else:
            self._num_swapped_in -= len(held.pairs)
        back = [(target, source) for source, target in held.pairs]
        self._record("swap_in" if outward else "swap_out", back)
        self.finish_transfer(transfer_id)

    def preempt(self, seq_id: int) -> None:
        """Takes all blocks from a sequence. It can only be resumed, or freed, then."""
        seq = self._seq(seq_id)
        self.pool.free(seq.blocks[::-1])
        seq.blocks, seq.num_indexed = [], 0
        self._preempted[seq_id] = self._seqs.pop(seq_id)
        self._num_recomputes += 1

    def can_resume(self, seq_id: int) -> bool:
        """Whether resume(seq_id) would succeed now."""
        seq = self._seq_preempted(seq_id)
        found = self._find(seq.tokens[: seq.length], seq.salt)
        return self._can_admit(self._num_blocks_of(seq.length) - len(found), found)

    def resume(self, seq_id: int) -> int:
        """Gives a preempted sequence blocks for all its tokens again.

        Returns:
            How many of its first tokens the prefix cache still had. The keys and values of the
            others are to be computed and written again.

        Raises:
            OutOfBlocksError: there are too few free blocks above the watermark.
        """
        seq = self._seq_preempted(seq_id)
        ids = seq.tokens[: seq.length]
        found = self._find(ids, seq.salt)
        seq.blocks = self._admit("resume", self._num_blocks_of(seq.length), found, ids)
        seq.num_indexed, seq.stale_from = len(found), 0
        self._seqs[seq_id] = self._preempted.pop(seq_id)
        return len(found) * self.block_size

    def free(self, seq_id: int) -> None:
        """Forgets the sequence, wherever it is; blocks that it shared stay with the others."""
        if seq_id in self._seqs:
            super().free(seq_id)
        elif seq_id in self._swapped:
            self.host_pool.free(self._swapped[seq_id].blocks[::-1])
            del self._swapped[seq_id]
        elif self._preempted.pop(seq_id, None) is None:
            raise self._missing(seq_id)

    def seq_len(self, seq_id: int) -> int:
        """Tokens of the sequence, wherever it is. KeyError if there is no such sequence."""
        seq = self._seqs.get(seq_id) or self._swapped.get(seq_id) or self._preempted.get(seq_id)
        return (seq or self._seq(seq_id)).length

    def swapped_ids(self) -> list[int]:
        """The sequences that are swapped out."""
        return list(self._swapped)

    def preempted_ids(self) -> list[int]:
        """The sequences that are preempted."""
        return list(self._preempted)

    # What happened.

    def take_events(self) -> list[BlockEvent]:
        """What happened to blocks since the last call; nothing without record_events."""
        events = self.pool.events
        if events is None:
            return []
        self.pool.events = []
        return events

    def stats(self) -> BlockStats:
        """Counts of blocks, tokens, hits, copies and swaps now. O(sequences)."""
        prefix = self._prefix
        return BlockStats(
            blocks_total=self.num_blocks,
            blocks_used=self.pool.num_used,
            blocks_shared=self.pool.num_shared,
            blocks_free=self.pool.num_free,
            sequences=len(self._seqs),
            tokens=sum(seq.length for seq in self._seqs.values()),
            waste=count_waste(self._seqs.values(), self.pool, self.block_size),
            copies=self._num_copies,
            blocks_cached=self.pool.num_cached,
            host_blocks_total=self.host_pool.num_blocks,
            host_blocks_used=self.host_pool.num_used,
            sequences_swapped=len(self._swapped),
            sequences_preempted=len(self._preempted),
            hits=0 if prefix is None else prefix.hits,
            misses=0 if prefix is None else prefix.misses,
            evictions=0 if prefix is None else prefix.evictions,
            swapped_out=self._num_swapped_out,
            swapped_in=self._num_swapped_in,
            recomputes=self._num_recomputes,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError unless tables, owners and contents agree. O(blocks), for tests."""
        self.pool.check_invariants()
        self.host_pool.check_invariants()
        owners, host_owners = [0] * self.num_blocks, [0] * self.host_pool.num_blocks
        self._check_tables(owners)
        self._check_prefixes(owners)
        for seq in self._swapped.values():
            for block in seq.blocks:
                host_owners[block] += 1
        for held in self._transfers.values():
            for block in held.sources:
                (owners if held.pool is self.pool else host_owners)[block] += 1
        for name, pool, counts in (
            ("block", self.pool, owners),
            ("host block", self.host_pool, host_owners),
        ):
            for block, count in enumerate(counts):
                require(
                    count == pool.ref_count(block),
                    f"{name} {block} is in {count} tables but has {pool.ref_count(block)} owners",
                )

    def _missing(self, seq_id: int) -> Exception:
        if seq_id in self._swapped:
            return ValueError(f"BlockManager: sequence {seq_id} is swapped out")
        if seq_id in self._preempted:
            return ValueError(f"BlockManager: sequence {seq_id} is preempted")
        return super()._missing(seq_id)

    def _seqs_swapped(self, method: str, seq_ids: Sequence[int]) -> list[SequenceState]:
        for seq_id in seq_ids:
            if seq_id not in self._swapped:
                if seq_id in self._seqs:
                    raise ValueError(f"BlockManager.{method}: sequence {seq_id} is not swapped out")
                raise self._missing(seq_id)
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError(
                f"BlockManager.{method}: seq_ids must be different, got {list(seq_ids)}"
            )
        return [self._swapped[seq_id] for seq_id in seq_ids]

    def _seq_preempted(self, seq_id: int) -> SequenceState:
        if seq_id in self._preempted:
            return self._preempted[seq_id]
        if seq_id in self._seqs:
            raise ValueError(f"BlockManager.resume: sequence {seq_id} is not preempted")
        raise self._missing(seq_id)

    def _transfer(self, transfer_id: int) -> _Held:
        try:
            return self._transfers[transfer_id]
        except KeyError:
            raise KeyError(f"BlockManager: there is no transfer {transfer_id!r}") from None

    def _move(
        self,
        seq_ids: Sequence[int],
        seqs: Sequence[SequenceState],
        sources: list[int],
        source_pool: BlockPool,
        pool: BlockPool,
        hold: bool,
    ) -> Transfer:
        """Gives the sequences blocks of `pool`; there are enough."""
        moved = dict(zip(sources, pool.allocate(len(sources)), strict=True))
        transfer_id = self._ticket()
        pairs = list(moved.items())
        if hold:
            source_pool.share(sources)
            old = [
                (seq_id, seq.blocks, seq.length, seq.num_indexed)
                for seq_id, seq in zip(seq_ids, seqs, strict=True)
            ]
            self._transfers[transfer_id] = _Held(source_pool, sources, pool, pairs, old)
        taken: set[int] = set()
        for seq in seqs:
            blocks = [moved[block] for block in seq.blocks]
            pool.share([block for block in blocks if block in taken])
            taken.update(blocks)
            source_pool.free(seq.blocks[::-1])
            seq.blocks = blocks
        return Transfer(transfer_id, pairs)

    def _record(self, kind: Literal["swap_out", "swap_in"], pairs: list[tuple[int, int]]) -> None:
        if self.pool.events is not None:
            self.pool.events += [BlockEvent(kind, source, target) for source, target in pairs]


def _distinct(seqs: Sequence[SequenceState]) -> list[int]:
    """The blocks of several sequences, each once."""
    return list(dict.fromkeys(block for seq in seqs for block in seq.blocks))
