"""Host-side bookkeeping of a paged KV cache: which block holds which tokens of which sequence.

`BlockPool` hands out physical block ids and counts their owners; `BlockManager` maps sequences to
block tables on top of it. Nothing here holds data or touches a device: the manager says which slots
new tokens go to and which blocks must be copied first, and the ops do it. The scheme is that of
Kwon et al. 2023, arXiv 2309.06180, sections 4.2 to 4.4.

A *slot* is `block * block_size + offset`. Every operation either succeeds or raises and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paged_attn.block_pool import BlockPool, OutOfBlocksError, check_count, require

__all__ = [
    "Append",
    "BlockManager",
    "BlockPool",
    "BlockStats",
    "OutOfBlocksError",
    "expand_block_table",
]


class Append(NamedTuple):
    """What an append asks of the device: do `copies`, then write the new tokens to `slots`."""

    slots: list[int]  # one a new token, in order
    copies: list[tuple[int, int]]  # (source block, destination block)


@dataclass(frozen=True)
class BlockStats:
    """Counts of a BlockManager at one moment.

    `tokens` counts each sequence's tokens, shared or not, so it can exceed
    `blocks_used * block_size`. `waste` counts the slots of used blocks that hold no token.
    """

    blocks_total: int
    blocks_used: int
    blocks_shared: int  # of the used: with more than one owner
    blocks_free: int
    sequences: int
    tokens: int
    waste: int
    copies: int  # copy-on-write copies asked for since the manager was made


def expand_block_table(block_table: Iterable[int], ratio: int) -> list[int]:
    """A manager's block table as seen by kernels whose blocks are `ratio` times smaller.

    A block of 32 tokens over kernel blocks of 16 is `ratio` 2: id i becomes 2i, 2i + 1, so that the
    slots stay the same. Raises ValueError for a ratio below 1.
    """
    check_count("expand_block_table: ratio", ratio, 1)
    return [block * ratio + part for block in block_table for part in range(ratio)]


@dataclass(slots=True)
class _Sequence:
    blocks: list[int]  # ceil(length / block_size) of them
    length: int


class BlockManager:
    """Block tables of many sequences over one pool of `num_blocks` blocks of `block_size` tokens.

    Sequences share full blocks and, until one of them writes to it, a partial last block. Memory
    that a device reads or writes is reused as soon as it is freed here, so issue the copies and
    writes of one call before what later calls ask for (one stream does).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        check_count("BlockManager: block_size", block_size, 1)
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._seqs: dict[int, _Sequence] = {}
        self._next_id = 0
        self._num_copies = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, free and used."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence uses."""
        return self.pool.num_free

    def seq_ids(self) -> list[int]:
        """The sequences there are, oldest first."""
        return list(self._seqs)

    def seq_len(self, seq_id: int) -> int:
        """Tokens of the sequence. Raises KeyError if there is no such sequence."""
        return self._seq(seq_id).length

    def block_table(self, seq_id: int) -> list[int]:
        """A copy of the sequence's physical block ids, ceil(seq_len / block_size) of them."""
        return self._seq(seq_id).blocks.copy()

    def slots(self, seq_id: int, start: int, end: int) -> list[int]:
        """The slots of tokens `start` to `end` - 1 of the sequence, which must have them all."""
        seq = self._seq(seq_id)
        if not 0 <= start <= end <= seq.length:
            raise ValueError(
                f"BlockManager.slots: need 0 <= start <= end <= {seq.length} (the length of "
                f"sequence {seq_id}), got start {start} and end {end}"
            )
        return self._slots(seq.blocks, start, end)

    def can_add(self, num_tokens: int) -> bool:
        """Whether add(num_tokens) would succeed now."""
        check_count("BlockManager.can_add: num_tokens", num_tokens, 0)
        return self._num_blocks_of(num_tokens) <= self.pool.num_free

    def add(self, num_tokens: int = 0) -> int:
        """A new sequence of `num_tokens` tokens (a prompt); returns its id, never used before.

        Raises OutOfBlocksError if the pool has too few free blocks.
        """
        check_count("BlockManager.add: num_tokens", num_tokens, 0)
        needed = self._num_blocks_of(num_tokens)
        self._check_free("add", needed)
        return self._insert(_Sequence(self.pool.allocate(needed), num_tokens))

    def can_append(self, seq_id: int, num_tokens: int = 1) -> bool:
        """Whether append(seq_id, num_tokens) would succeed now."""
        seq = self._seq(seq_id)
        check_count("BlockManager.can_append: num_tokens", num_tokens, 0)
        needed = self._growth(seq, num_tokens) + self._must_copy(seq, num_tokens)
        return needed <= self.pool.num_free

    def append(self, seq_id: int, num_tokens: int = 1) -> Append:
        """Makes the sequence `num_tokens` longer (a decode step; several: drafts).

        If the first new token falls into a partial last block that another sequence shares, this
        sequence gets a block of its own for it and the pair is in `copies`; the last owner of
        such a block writes in place. No other block is ever copied. Raises OutOfBlocksError.
        """
        seq = self._seq(seq_id)
        check_count("BlockManager.append: num_tokens", num_tokens, 0)
        growth, copy = self._growth(seq, num_tokens), self._must_copy(seq, num_tokens)
        self._check_free("append", growth + copy)
        return self._append(seq, num_tokens, growth, copy)

    def can_append_many(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> bool:
        """Whether append_many(seq_ids, num_tokens) would succeed now."""
        seqs = self._seqs_to_append("can_append_many", seq_ids, num_tokens)
        return self._num_blocks_to_append_many(seqs, num_tokens) <= self.pool.num_free

    def append_many(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> list[Append]:
        """append() for several different sequences: for all of them or, if it raises, for none.

        All copies can be done in one batch, before the writes of any of the sequences: no block is
        both source and destination.
        """
        seqs = self._seqs_to_append("append_many", seq_ids, num_tokens)
        self._check_free("append_many", self._num_blocks_to_append_many(seqs, num_tokens))
        return [
            self._append(seq, n, self._growth(seq, n), self._must_copy(seq, n))
            for seq, n in zip(seqs, num_tokens, strict=True)
        ]

    def fork(self, seq_id: int) -> int:
        """A new sequence with the same tokens, sharing all blocks; returns its id. Takes no block.

        Parallel sampling forks the prompt; beam search forks the survivors and frees the parents.
        """
        seq = self._seq(seq_id)
        self.pool.share(seq.blocks)
        return self._insert(_Sequence(seq.blocks.copy(), seq.length))

    def truncate(self, seq_id: int, new_len: int) -> None:
        """Drops the tokens from `new_len` on (rejected drafts) and the blocks left empty.

        Raises ValueError if `new_len` is more than the sequence has.
        """
        seq = self._seq(seq_id)
        check_count("BlockManager.truncate: new_len", new_len, 0)
        if new_len > seq.length:
            raise ValueError(
                f"BlockManager.truncate: new_len must be at most {seq.length} (the length of "
                f"sequence {seq_id}), got {new_len}"
            )
        keep = self._num_blocks_of(new_len)
        self.pool.free(seq.blocks[keep:][::-1])
        del seq.blocks[keep:]
        seq.length = new_len

    def free(self, seq_id: int) -> None:
        """Forgets the sequence; blocks that it shared stay with the others."""
        seq = self._seq(seq_id)
        self.pool.free(seq.blocks[::-1])
        del self._seqs[seq_id]

    def stats(self) -> BlockStats:
        """Counts of blocks, tokens and copies now. O(sequences)."""
        sequences_ending_in: dict[int, int] = {}
        tokens_in: dict[int, int] = {}
        for seq in self._seqs.values():
            if seq.blocks:
                last = seq.blocks[-1]
                fill = seq.length - (len(seq.blocks) - 1) * self.block_size
                sequences_ending_in[last] = sequences_ending_in.get(last, 0) + 1
                tokens_in[last] = max(tokens_in.get(last, 0), fill)
        return BlockStats(
            blocks_total=self.num_blocks,
            blocks_used=self.num_blocks - self.num_free_blocks,
            blocks_shared=self.pool.num_shared,
            blocks_free=self.num_free_blocks,
            sequences=len(self._seqs),
            tokens=sum(seq.length for seq in self._seqs.values()),
            # An owner that does not end in the block goes past it, so it has filled the block.
            waste=sum(
                self.block_size - tokens_in[block]
                for block, count in sequences_ending_in.items()
                if count == self.pool.ref_count(block)
            ),
            copies=self._num_copies,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError unless tables and owner counts agree. O(blocks), for tests."""
        self.pool.check_invariants()
        owners = [0] * self.num_blocks
        for seq_id, seq in self._seqs.items():
            require(
                len(seq.blocks) == self._num_blocks_of(seq.length),
                f"sequence {seq_id} has {seq.length} tokens in {len(seq.blocks)} blocks",
            )
            require(len(set(seq.blocks)) == len(seq.blocks), f"sequence {seq_id} has a block twice")
            for block in seq.blocks:
                owners[block] += 1
        for block, count in enumerate(owners):
            require(
                count == self.pool.ref_count(block),
                f"block {block} is in {count} tables but has {self.pool.ref_count(block)} owners",
            )

    def _seq(self, seq_id: int) -> _Sequence:
        try:
            return self._seqs[seq_id]
        except KeyError:
            raise KeyError(f"BlockManager: there is no sequence {seq_id!r}") from None

    def _insert(self, seq: _Sequence) -> int:
        seq_id = self._next_id
        self._next_id += 1
        self._seqs[seq_id] = seq
        return seq_id

    def _num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _check_free(self, method: str, needed: int) -> None:
        if needed > self.pool.num_free:
            raise OutOfBlocksError(
                f"BlockManager.{method}", needed, self.pool.num_free, self.num_blocks
            )

    def _growth(self, seq: _Sequence, num_tokens: int) -> int:
        """Blocks that the table gets longer by."""
        spare = len(seq.blocks) * self.block_size - seq.length
        return 0 if num_tokens <= spare else self._num_blocks_of(num_tokens - spare)

    def _writes_partial_block(self, seq: _Sequence, num_tokens: int) -> bool:
        return num_tokens > 0 and seq.length % self.block_size != 0

    def _must_copy(self, seq: _Sequence, num_tokens: int) -> bool:
        return (
            self._writes_partial_block(seq, num_tokens) and self.pool.ref_count(seq.blocks[-1]) > 1
        )

    def _num_blocks_to_append_many(
        self, seqs: Sequence[_Sequence], num_tokens: Sequence[int]
    ) -> int:
        needed = 0
        writers: dict[int, int] = {}  # of each partial last block
        for seq, n in zip(seqs, num_tokens, strict=True):
            needed += self._growth(seq, n)
            if self._writes_partial_block(seq, n):
                writers[seq.blocks[-1]] = writers.get(seq.blocks[-1], 0) + 1
        # If all owners of a block write to it, the last of them does so in place.
        return needed + sum(
            min(count, self.pool.ref_count(block) - 1) for block, count in writers.items()
        )

    def _seqs_to_append(
        self, method: str, seq_ids: Sequence[int], num_tokens: Sequence[int]
    ) -> list[_Sequence]:
        seqs = [self._seq(seq_id) for seq_id in seq_ids]
        if len(set(seq_ids)) != len(seqs):
            raise ValueError(
                f"BlockManager.{method}: seq_ids must be different, got {list(seq_ids)}"
            )
        if len(num_tokens) != len(seqs):
            raise ValueError(
                f"BlockManager.{method}: num_tokens must have one entry for each of {len(seqs)} "
                f"sequences, got {len(num_tokens)}"
            )
        for n in num_tokens:
            check_count("BlockManager: num_tokens", n, 0)
        return seqs

    def _append(self, seq: _Sequence, num_tokens: int, growth: int, copy: bool) -> Append:
        copies: list[tuple[int, int]] = []
        if copy:
            source = seq.blocks[-1]
            seq.blocks[-1:] = self.pool.allocate(1)
            self.pool.free([source])
            copies.append((source, seq.blocks[-1]))
            self._num_copies += 1
        if growth:
            seq.blocks.extend(self.pool.allocate(growth))
        start = seq.length
        seq.length += num_tokens
        return Append(self._slots(seq.blocks, start, seq.length), copies)

    def _slots(self, blocks: list[int], start: int, end: int) -> list[int]:
        slots: list[int] = []
        while start < end:
            index, offset = divmod(start, self.block_size)
            count = min(self.block_size - offset, end - start)
            first = blocks[index] * self.block_size + offset
            slots.extend(range(first, first + count))
            start += count
        return slots
