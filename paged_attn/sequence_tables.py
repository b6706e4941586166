"""Sequences as block tables over one pool: append, fork, truncate, reorder, copy-on-write.

The part of `paged_attn.blocks.BlockManager` that turns tokens into slots. A *slot* is
`block * block_size + offset`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paged_attn._checks import check_count, refuse_shallow_copy, require
from paged_attn.block_events import BlockEvent
from paged_attn.block_pool import BlockPool, OutOfBlocksError

__all__ = ["Append", "SequenceTables", "TableChange", "expand_block_table"]

_UNCHANGED = 1 << 62
_new = tuple.__new__  # makes an Append in half the time of Append()


class Append(NamedTuple):
    """What an append asks of the device: do `copies`, then write the new tokens to `slots`."""

    slots: list[int]  # one a new token, in order
    copies: list[tuple[int, int]]  # (source block, destination block)


class TableChange(NamedTuple):
    """What a mirror of the block tables has not seen yet of one of them."""

    number: int  # of the sequence in the list that was asked for
    start: int  # entries before this one are as they were
    blocks: list[int]  # the entries from `start` to the table's new end


@dataclass(slots=True)
class SequenceState:
    """One sequence. `blocks` are ceil(length / block_size) blocks of the pool."""

    blocks: list[int]
    length: int
    salt: str = ""
    tokens: array[int] = field(default_factory=lambda: array("q"))  # ids, as far as they are known
    num_indexed: int = 0  # leading blocks that the prefix cache can find
    stale_from: int = 0  # first table entry that a mirror has not seen


def expand_block_table(block_table: Iterable[int], ratio: int) -> list[int]:
    """A manager's block table as seen by kernels whose blocks are `ratio` times smaller.

    A block of 32 tokens over kernel blocks of 16 is `ratio` 2: id i becomes 2i, 2i + 1, so that the
    slots stay the same. Raises ValueError for a ratio below 1.
    """
    ratio = check_count("expand_block_table: ratio", ratio, 1)
    return [block * ratio + part for block in block_table for part in range(ratio)]


class SequenceTables:
    """Block tables of many sequences over one pool of `num_blocks` blocks of `block_size` tokens.

    Sequences share full blocks and, until one of them writes to it, a partial last block. Every
    operation either succeeds or raises and changes nothing. Memory that a device reads or writes
    is reused as soon as it is freed here, so issue the copies and writes of one call before what
    later calls ask for (one stream does).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = check_count(f"{type(self).__name__}: block_size", block_size, 1)
        self.pool = BlockPool(num_blocks)
        self._seqs: dict[int, SequenceState] = {}
        self._next_id = 0
        self._num_copies = 0
        # Blocks that a prefix cache can find, and what makes it forget one before it is written.
        self._indexed: Container[int] = ()
        self._forget: Callable[[int], None] | None = None

    __copy__ = refuse_shallow_copy

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, free and used."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.num_free

    @property
    def num_available_blocks(self) -> int:
        """Blocks that a sequence can get: those that hold nothing, and cached ones."""
        return self.pool.num_available

    def seq_ids(self) -> list[int]:
        """The sequences that have their blocks here, oldest first."""
        return list(self._seqs)

    def seq_len(self, seq_id: int) -> int:
        """Tokens of the sequence. Raises KeyError if there is no such sequence."""
        return self._seq(seq_id).length

    def seq_lens(self, seq_ids: Sequence[int]) -> list[int]:
        """Tokens of each of several sequences."""
        return [self._seq(seq_id).length for seq_id in seq_ids]

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
        slots: list[int] = []
        self._extend_slots(slots, seq.blocks, start, end)
        return slots

    def can_append(self, seq_id: int, num_tokens: int = 1) -> bool:
        """Whether append(seq_id, num_tokens) would succeed now."""
        seq = self._seq(seq_id)
        num_tokens = check_count("BlockManager.can_append: num_tokens", num_tokens, 0)
        return self._num_blocks_to_append([seq], [num_tokens]) <= self.pool.num_available

    def append(self, seq_id: int, num_tokens: int = 1) -> Append:
        """Makes the sequence `num_tokens` longer (a decode step; several: drafts).

        If the first new token falls into a partial last block that another sequence shares, this
        sequence gets a block of its own for it and the pair is in `copies`; the last owner of
        such a block writes in place. No other block is ever copied. Raises OutOfBlocksError.
        """
        seq = self._seqs.get(seq_id) or self._seq(seq_id)
        if num_tokens == 1 and type(num_tokens) is int:  # the usual step, in a few bytecodes
            offset = seq.length % self.block_size
            if offset:
                last = seq.blocks[-1]
                if self.pool.owners[last] == 1 and last not in self._indexed:
                    seq.length += 1
                    return _new(Append, ([last * self.block_size + offset], []))
        else:
            num_tokens = check_count("BlockManager.append: num_tokens", num_tokens, 0)
        self._check_available("append", self._num_blocks_to_append([seq], [num_tokens]))
        grown = Append([], [])
        self._append(seq, num_tokens, grown)
        return grown

    def can_append_many(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> bool:
        """Whether append_many(seq_ids, num_tokens) would succeed now."""
        seqs, num_tokens = self._seqs_to_append("can_append_many", seq_ids, num_tokens)
        return self._num_blocks_to_append(seqs, num_tokens) <= self.pool.num_available

    def append_many(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> list[Append]:
        """append() for several different sequences: for all of them or, if it raises, for none.

        All copies can be done in one batch, before the writes of any of the sequences: no block is
        both source and destination.
        """
        seqs, num_tokens = self._seqs_to_append("append_many", seq_ids, num_tokens)
        self._check_available("append_many", self._num_blocks_to_append(seqs, num_tokens))
        grown = [Append([], []) for _ in seqs]
        for seq, n, one in zip(seqs, num_tokens, grown, strict=True):
            self._append(seq, n, one)
        return grown

    def append_batch(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> Append:
        """append_many() with one list of all slots, in order, and one of all copies."""
        seqs, num_tokens = self._seqs_to_append("append_batch", seq_ids, num_tokens)
        self._check_available("append_batch", self._num_blocks_to_append(seqs, num_tokens))
        grown = Append([], [])
        add_slot, size = grown.slots.append, self.block_size
        owners, indexed = self.pool.owners, self._indexed
        for seq, n in zip(seqs, num_tokens, strict=True):
            offset = seq.length % size
            if n == 1 and offset:
                last = seq.blocks[-1]
                if owners[last] == 1 and last not in indexed:
                    seq.length += 1
                    add_slot(last * size + offset)
                    continue
            self._append(seq, n, grown)
        return grown

    def undo_append(
        self, seq_ids: Sequence[int], old_lens: Sequence[int], copies: Sequence[tuple[int, int]]
    ) -> None:
        """Takes back the append just made: what it asked of the device could not be done.

        Args:
            seq_ids: its sequences.
            old_lens: their lengths before it.
            copies: the copies it asked for. Their sequences share the source block again.
        """
        sources = {target: source for source, target in copies}
        for seq_id, old_len in zip(reversed(seq_ids), reversed(old_lens), strict=True):
            seq = self._seq(seq_id)
            keep = self._num_blocks_of(old_len)
            self.pool.free(seq.blocks[keep:][::-1])
            del seq.blocks[keep:]
            source = sources.get(seq.blocks[-1]) if seq.blocks else None
            if source is not None:
                self.pool.share([source])
                self.pool.free([seq.blocks[-1]])
                seq.blocks[-1] = source
                self._num_copies -= 1
            seq.stale_from = min(seq.stale_from, max(keep - 1, 0))
            seq.length = old_len

    def fork(self, seq_id: int) -> int:
        """A new sequence with the same tokens, sharing all blocks; returns its id. Takes no block.

        Parallel sampling forks the prompt; beam search forks the survivors and frees the parents,
        or calls reorder().
        """
        seq = self._seq(seq_id)
        self.pool.share(seq.blocks)
        return self._insert(
            SequenceState(
                seq.blocks.copy(), seq.length, seq.salt, seq.tokens[:], seq.num_indexed, 0
            )
        )

    def reorder(self, seq_ids: Sequence[int], parents: Sequence[int]) -> None:
        """Beam search: sequence seq_ids[i] becomes what sequence parents[i] was before the call.

        Changes tables and counts of owners, and takes no block. A partial last block that several
        survivors share is copied when they write to it, but not for the last of them.

        Raises:
            ValueError: seq_ids are not different, or parents are more or fewer.
            KeyError: there is no such sequence.
        """
        if len(parents) != len(seq_ids):
            raise ValueError(
                f"BlockManager.reorder: parents must have one entry for each of {len(seq_ids)} "
                f"sequences, got {len(parents)}"
            )
        beams = self._distinct_seqs("reorder", seq_ids)
        sources = [self._seq(parent) for parent in parents]
        new = [(s.blocks.copy(), s.length, s.salt, s.tokens[:], s.num_indexed) for s in sources]
        # Owners are added before any is taken away: no block is free in between.
        for blocks, *_ in new:
            self.pool.share(blocks)
        for seq, state in zip(beams, new, strict=True):
            old = seq.blocks
            seq.blocks, seq.length, seq.salt, seq.tokens, seq.num_indexed = state
            same = next(
                (i for i, (a, b) in enumerate(zip(old, seq.blocks, strict=False)) if a != b),
                min(len(old), len(seq.blocks)),
            )
            if same < max(len(old), len(seq.blocks)):
                seq.stale_from = min(seq.stale_from, same)
            self.pool.free(old[::-1])

    def truncate(self, seq_id: int, new_len: int) -> None:
        """Drops the tokens from `new_len` on (rejected drafts) and the blocks left empty.

        Raises ValueError if `new_len` is more than the sequence has.
        """
        seq = self._seq(seq_id)
        new_len = check_count("BlockManager.truncate: new_len", new_len, 0)
        if new_len > seq.length:
            raise ValueError(
                f"BlockManager.truncate: new_len must be at most {seq.length} (the length of "
                f"sequence {seq_id}), got {new_len}"
            )
        if new_len == seq.length:
            return
        keep = self._num_blocks_of(new_len)
        if keep < len(seq.blocks):
            self.pool.free(seq.blocks[keep:][::-1])
            del seq.blocks[keep:]
            seq.stale_from = min(seq.stale_from, keep)
        seq.length = new_len
        del seq.tokens[new_len:]
        seq.num_indexed = min(seq.num_indexed, new_len // self.block_size)

    def free(self, seq_id: int) -> None:
        """Forgets the sequence; blocks that it shared stay with the others."""
        seq = self._seqs.get(seq_id) or self._seq(seq_id)
        self.pool.free(seq.blocks[::-1])
        del self._seqs[seq_id]

    def take_table_changes(self, seq_ids: Sequence[int]) -> list[TableChange]:
        """What changed in these tables since the last call that named them: for one mirror.

        A sequence that is new to the mirror is reported whole, an unchanged one not at all. Raises
        KeyError, and then reports the same next time.
        """
        changes: list[TableChange] = []
        try:
            for i, seq in enumerate([self._seqs[seq_id] for seq_id in seq_ids]):
                if seq.stale_from != _UNCHANGED:
                    start = min(seq.stale_from, len(seq.blocks))
                    changes.append(TableChange(i, start, seq.blocks[start:]))
                    seq.stale_from = _UNCHANGED
        except KeyError as error:
            raise self._missing(error.args[0]) from None
        return changes

    def restart_table_changes(self) -> None:
        """Makes take_table_changes() report every table whole again: the mirror was lost."""
        for seq in self._seqs.values():
            seq.stale_from = 0

    def _missing(self, seq_id: int) -> Exception:
        return KeyError(f"BlockManager: there is no sequence {seq_id!r}")

    def _seq(self, seq_id: int) -> SequenceState:
        try:
            return self._seqs[seq_id]
        except KeyError:
            raise self._missing(seq_id) from None

    def _insert(self, seq: SequenceState) -> int:
        seq_id = self._next_id
        self._next_id += 1
        self._seqs[seq_id] = seq
        return seq_id

    def _num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _check_available(self, method: str, needed: int, reserved: int = 0) -> None:
        available = self.pool.num_available
        if needed and needed + reserved > available:
            raise OutOfBlocksError(
                f"BlockManager.{method}", needed, available, self.num_blocks, reserved
            )

    def _num_blocks_to_append(
        self, seqs: Sequence[SequenceState], num_tokens: Sequence[int]
    ) -> int:
        """Blocks that the tables get longer by, and copies of partial blocks that are shared."""
        size, owners = self.block_size, self.pool.owners
        needed = 0
        writers: dict[int, int] = {}  # of each partial last block with several owners
        for seq, n in zip(seqs, num_tokens, strict=True):
            offset = seq.length % size
            if offset and n:
                last = seq.blocks[-1]
                if owners[last] > 1:
                    writers[last] = writers.get(last, 0) + 1
                needed += (offset + n - 1) // size
            else:
                needed += (n + size - 1) // size
        # If all owners of a block write to it, the last of them does so in place.
        for block, count in writers.items():
            needed += min(count, owners[block] - 1)
        return needed

    def _distinct_seqs(self, method: str, seq_ids: Sequence[int]) -> list[SequenceState]:
        try:
            seqs = [self._seqs[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise self._missing(error.args[0]) from None
        if len(set(seq_ids)) != len(seqs):
            raise ValueError(
                f"BlockManager.{method}: seq_ids must be different, got {list(seq_ids)}"
            )
        return seqs

    def _seqs_to_append(
        self, method: str, seq_ids: Sequence[int], num_tokens: Sequence[int]
    ) -> tuple[list[SequenceState], Sequence[int]]:
        seqs = self._distinct_seqs(method, seq_ids)
        if len(num_tokens) != len(seqs):
            raise ValueError(
                f"BlockManager.{method}: num_tokens must have one entry for each of {len(seqs)} "
                f"sequences, got {len(num_tokens)}"
            )
        if set(map(type, num_tokens)) - {int} or min(num_tokens, default=0) < 0:
            what = f"BlockManager.{method}: num_tokens"
            num_tokens = [check_count(what, n, 0) for n in num_tokens]
        return seqs, num_tokens

    def _append(self, seq: SequenceState, num_tokens: int, grown: Append) -> None:
        """Appends; there are blocks enough."""
        start, blocks, pool = seq.length, seq.blocks, self.pool
        if num_tokens and start % self.block_size:
            last = blocks[-1]
            if pool.owners[last] > 1:
                (copy,) = pool.allocate(1)
                blocks[-1] = copy
                pool.free([last])
                grown.copies.append((last, copy))
                self._num_copies += 1
                seq.stale_from = min(seq.stale_from, len(blocks) - 1)
                if pool.events is not None:
                    pool.events.append(BlockEvent("copy", last, copy))
            elif last in self._indexed and self._forget is not None:
                self._forget(last)  # else it would be found for what it held before
        end = start + num_tokens
        growth = self._num_blocks_of(end) - len(blocks)
        if growth:
            seq.stale_from = min(seq.stale_from, len(blocks))
            blocks += pool.allocate(growth)
        seq.length = end
        if num_tokens == 1:
            grown.slots.append(blocks[-1] * self.block_size + start % self.block_size)
        else:
            self._extend_slots(grown.slots, blocks, start, end)

    def _extend_slots(self, slots: list[int], blocks: list[int], start: int, end: int) -> None:
        size = self.block_size
        while start < end:
            index, offset = divmod(start, size)
            count = min(size - offset, end - start)
            first = blocks[index] * size + offset
            slots.extend(range(first, first + count))
            start += count

    def _check_tables(self, owners: list[int]) -> None:
        """Adds the tables' claims to `owners`, one count a block; raises AssertionError."""
        for seq_id, seq in self._seqs.items():
            require(
                len(seq.blocks) == self._num_blocks_of(seq.length),
                f"sequence {seq_id} has {seq.length} tokens in {len(seq.blocks)} blocks",
            )
            require(len(set(seq.blocks)) == len(seq.blocks), f"sequence {seq_id} has a block twice")
            for block in seq.blocks:
                owners[block] += 1
