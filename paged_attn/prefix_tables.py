"""Sequences that begin with a prompt: admission, and sharing the blocks of prompts seen before.

The middle layer of `paged_attn.blocks.BlockManager`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paged_attn._checks import check_count, check_salt, require
from paged_attn.block_pool import OutOfBlocksError
from paged_attn.prefix_cache import HashFunction, PrefixCache, pack_tokens
from paged_attn.sequence_tables import SequenceState, SequenceTables

__all__ = ["PrefixTables", "Prompt"]


class Prompt(NamedTuple):
    """A sequence that was made of a prompt."""

    seq_id: int
    num_cached: int  # its first tokens, whose keys and values are there already


class PrefixTables(SequenceTables):
    """Block tables with a prefix cache and a watermark; see BlockManager for the arguments."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        hash_function: HashFunction | None,
        watermark: int,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.watermark = check_count("BlockManager: watermark", watermark, 0)
        self._pins: dict[int, list[int]] = {}
        self._next_ticket = 0  # of pins and transfers
        self._prefix: PrefixCache | None = None
        if enable_prefix_caching:
            self._prefix = PrefixCache(block_size, hash_function)
            self._indexed = self._prefix.entries
            self._forget = self._forget_contents
            self.pool.on_evict = self._evicted

    # Admission.

    def can_add(self, num_tokens: int) -> bool:
        """Whether add(num_tokens) would succeed now."""
        num_tokens = check_count("BlockManager.can_add: num_tokens", num_tokens, 0)
        return self._can_admit(self._num_blocks_of(num_tokens))

    def add(self, num_tokens: int = 0) -> int:
        """A new sequence of `num_tokens` tokens; returns its id, never used before.

        Raises OutOfBlocksError if there are too few free blocks above the watermark.
        """
        num_tokens = check_count("BlockManager.add: num_tokens", num_tokens, 0)
        needed = self._num_blocks_of(num_tokens)
        self._check_available("add", needed, self.watermark)
        return self._insert(SequenceState(self.pool.allocate(needed), num_tokens))

    def can_add_prompt(
        self, tokens: Iterable[int], *, salt: str = "", num_tokens: int | None = None
    ) -> bool:
        """Whether add_prompt() with these arguments would succeed now."""
        ids, length = self._prompt("can_add_prompt", tokens, salt, num_tokens)
        found = self._find(ids, salt)
        return self._can_admit(self._num_blocks_of(length) - len(found), found)

    def add_prompt(
        self, tokens: Iterable[int], *, salt: str = "", num_tokens: int | None = None
    ) -> Prompt:
        """A new sequence of a prompt; its first blocks are shared if they are cached.

        Args:
            tokens: ids of the prompt's tokens.
            salt: prompts of different salts share nothing.
            num_tokens: how many the sequence has at first, if not all: prefill in chunks appends
                the others. It has those that are cached in any case.

        Returns:
            The sequence, and how many of its tokens need not run: full blocks, and never all
            tokens of the prompt.

        Raises:
            OutOfBlocksError: there are too few free blocks above the watermark.
            TypeError, ValueError: a token is no integer of 64 bits, salt is no str, or num_tokens
                does not fit.
        """
        ids, length = self._prompt("add_prompt", tokens, salt, num_tokens)
        found = self._find(ids, salt)
        length = max(length, len(found) * self.block_size)
        blocks = self._admit("add_prompt", self._num_blocks_of(length), found, ids)
        seq_id = self._insert(SequenceState(blocks, length, salt, ids, len(found)))
        return Prompt(seq_id, len(found) * self.block_size)

    # The prefix cache.

    def mark_written(
        self, seq_id: int, tokens: Iterable[int] = (), *, end: int | None = None
    ) -> None:
        """Declares keys and values written, so that other prompts may find full blocks of them.

        Call it when the writes are issued on the stream that all later work runs on.

        Args:
            seq_id: the sequence.
            tokens: ids of tokens that were appended, following those already known (the prompt's,
                and those of earlier calls).
            end: tokens written, counted from the sequence's first; default: all with known ids.

        Raises:
            ValueError: more ids than tokens, or end is past what is known.
        """
        seq = self._seq(seq_id)
        named = pack_tokens("BlockManager.mark_written: tokens", tokens)
        known = len(seq.tokens) + len(named)
        if named and known > seq.length:
            raise ValueError(
                f"BlockManager.mark_written: sequence {seq_id} has {seq.length} tokens, but tokens "
                f"names {known} with those known before"
            )
        limit = min(known, seq.length)
        if end is None:
            end = limit
        elif (end := check_count("BlockManager.mark_written: end", end, 0)) > limit:
            raise ValueError(
                f"BlockManager.mark_written: end must be in [0, {limit}] (tokens of sequence "
                f"{seq_id} with known ids), got {end}"
            )
        seq.tokens += named
        num_full = end // self.block_size
        if self._prefix is not None and num_full > seq.num_indexed:
            before, blocks = seq.num_indexed, seq.blocks[:num_full]
            seq.num_indexed = self._prefix.insert(blocks, before, seq.tokens, seq.salt)
            for block in blocks[before : seq.num_indexed]:
                self.pool.keep(block)

    def pin(self, seq_id: int) -> int:
        """Keeps the sequence's findable blocks from being evicted, whatever becomes of it.

        Returns:
            A ticket for unpin().
        """
        seq = self._seq(seq_id)
        blocks = seq.blocks[: seq.num_indexed]
        self.pool.share(blocks)
        pin_id = self._ticket()
        self._pins[pin_id] = blocks
        return pin_id

    def unpin(self, pin_id: int) -> None:
        """Lets go of what pin() kept. Raises KeyError for a ticket that is not in use."""
        if pin_id not in self._pins:
            raise KeyError(f"BlockManager: there is no pin {pin_id!r}")
        self.pool.free(self._pins.pop(pin_id)[::-1])

    def _prompt(
        self, method: str, tokens: Iterable[int], salt: str, num_tokens: int | None
    ) -> tuple[array[int], int]:
        """The ids of a prompt, and the length that its sequence is to have at first."""
        check_salt(f"BlockManager.{method}", salt)
        ids = pack_tokens(f"BlockManager.{method}: tokens", tokens)
        if num_tokens is None:
            return ids, len(ids)
        num_tokens = check_count(f"BlockManager.{method}: num_tokens", num_tokens, 0)
        if num_tokens > len(ids):
            raise ValueError(
                f"BlockManager.{method}: num_tokens must be at most {len(ids)} (the tokens given), "
                f"got {num_tokens}"
            )
        return ids, num_tokens

    def _find(self, ids: array[int], salt: str) -> list[int]:
        return [] if self._prefix is None else self._prefix.find(ids, salt)

    def _available_beside(self, found: Sequence[int]) -> int:
        """Blocks to be had if `found` are shared first, which are then not evicted."""
        return self.pool.num_available - sum(map(self.pool.is_cached, found))

    def _can_admit(self, needed: int, found: Sequence[int] = ()) -> bool:
        return needed <= 0 or needed + self.watermark <= self._available_beside(found)

    def _admit(self, method: str, num_blocks: int, found: list[int], ids: array[int]) -> list[int]:
        """`num_blocks` blocks that begin with the blocks found, which are shared; or raises."""
        needed = max(0, num_blocks - len(found))
        if not self._can_admit(needed, found):
            raise OutOfBlocksError(
                f"BlockManager.{method}",
                needed,
                self._available_beside(found),
                self.num_blocks,
                self.watermark,
            )
        self.pool.share(found)
        if self._prefix is not None:
            self._prefix.hits += len(found)
            self._prefix.misses += max(0, len(ids) - 1) // self.block_size - len(found)
        return found + self.pool.allocate(needed)

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket - 1

    def _evicted(self, block: int) -> None:
        """The pool gives a cached block away: a leaf of the tree, see check_prefixes()."""
        if self._prefix is not None:
            self._prefix.remove(block)
            self._prefix.evictions += 1

    def _forget_contents(self, block: int) -> None:
        """Makes a block writable that prompts may find; what continues it has no owner."""
        if self._prefix is not None:
            for gone in reversed(self._prefix.remove(block)):
                self.pool.forget(gone)

    def _check_prefixes(self, owners: list[int]) -> None:
        """Adds the pins' claims to `owners`; raises AssertionError unless the cache is sound."""
        for blocks in self._pins.values():
            for block in blocks:
                owners[block] += 1
        prefix, pool = self._prefix, self.pool
        if prefix is None:
            require(pool.num_cached == 0, "blocks are cached without a prefix cache")
            return
        prefix.check_invariants()
        evicted: set[int] = set()
        for block in pool.cached_blocks():
            require(block in prefix.entries, f"block {block} is cached but cannot be found")
            # So the first cached block is always a leaf, and eviction is O(1).
            require(
                prefix.children(block) <= evicted,
                f"block {block} would be evicted before what continues it",
            )
            evicted.add(block)
        for seq_id, seq in self._seqs.items():
            require(
                all(block in prefix.entries for block in seq.blocks[: seq.num_indexed]),
                f"sequence {seq_id} has fewer than {seq.num_indexed} blocks that can be found",
            )
