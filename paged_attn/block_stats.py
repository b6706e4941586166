"""Counts of a block manager at one moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_attn.block_pool import BlockPool
from paged_attn.sequence_tables import SequenceState

__all__ = ["BlockStats"]


@dataclass(frozen=True)
class BlockStats:
    """Counts of a BlockManager at one moment: used + cached + free = total.

    `tokens` counts each sequence's tokens, shared or not, so it can exceed
    `blocks_used * block_size`. `waste` counts the slots of used blocks that hold no token.
    Sequences that are swapped out or preempted count in their own fields only.
    """

    blocks_total: int
    blocks_used: int  # with an owner: a sequence, a pin, or a swap that is not finished
    blocks_shared: int  # of the used: with more than one owner
    blocks_free: int  # that hold nothing
    sequences: int
    tokens: int
    waste: int
    copies: int  # copy-on-write copies asked for since the manager was made
    blocks_cached: int = 0  # without an owner, kept for prompts that begin with their tokens
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    sequences_swapped: int = 0
    sequences_preempted: int = 0
    # Since the manager was made, in blocks:
    hits: int = 0  # found by prompts
    misses: int = 0  # looked for by prompts and not found
    evictions: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    recomputes: int = 0  # sequences that were preempted


def count_waste(seqs: Iterable[SequenceState], pool: BlockPool, block_size: int) -> int:
    """Slots without a token in blocks that sequences use. O(sequences)."""
    sequences_ending_in: dict[int, int] = {}
    tokens_in: dict[int, int] = {}
    for seq in seqs:
        if seq.blocks:
            last = seq.blocks[-1]
            fill = seq.length - (len(seq.blocks) - 1) * block_size
            sequences_ending_in[last] = sequences_ending_in.get(last, 0) + 1
            tokens_in[last] = max(tokens_in.get(last, 0), fill)
    # An owner that does not end in the block goes past it, so it has filled the block.
    return sum(
        block_size - tokens_in[block]
        for block, count in sequences_ending_in.items()
        if count == pool.ref_count(block)
    )
