"""The prefix cache: what is found, what is not, what is evicted."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from manager_state import manager_state, unchanged

from paged_attn.blocks import BlockManager, OutOfBlocksError


def caching(num_blocks: int = 8, block_size: int = 4, **kwargs: Any) -> BlockManager:
    return BlockManager(num_blocks, block_size, enable_prefix_caching=True, **kwargs)


def run(manager: BlockManager, tokens: list[int], salt: str = "") -> int:
    """A prompt that is written and gone again: its full blocks are cached. What it found."""
    seq, num_cached = manager.add_prompt(tokens, salt=salt)
    manager.mark_written(seq)
    manager.free(seq)
    manager.check_invariants()
    return num_cached


def cached(manager: BlockManager, tokens: list[int], salt: str = "") -> int:
    """Tokens of a prompt that would be found; leaves no trace but the order of eviction."""
    seq, num_cached = manager.add_prompt(tokens, salt=salt)
    manager.free(seq)
    return num_cached


def found(manager: BlockManager, tokens: list[int]) -> int:
    """The same, and leaves no trace at all."""
    assert manager._prefix is not None
    return manager.block_size * len(manager._prefix.find(array("q", tokens), ""))


PROMPT = list(range(100, 112))  # three blocks of four


# What is found.


def test_a_prompt_finds_the_blocks_of_an_earlier_one() -> None:
    manager = caching()
    first = manager.add_prompt(PROMPT)
    assert first.num_cached == 0
    manager.mark_written(first.seq_id)
    second = manager.add_prompt([*PROMPT[:8], 1, 2])
    assert second.num_cached == 8
    assert manager.block_table(second.seq_id)[:2] == manager.block_table(first.seq_id)[:2]
    stats = manager.stats()
    assert (stats.hits, stats.misses) == (2, 2)  # 2 of the first: one token is left to run
    assert (stats.blocks_used, stats.blocks_shared) == (4, 2)
    manager.check_invariants()


def test_contents_stay_after_the_last_owner_is_gone() -> None:
    manager = caching()
    run(manager, PROMPT)
    stats = manager.stats()
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_free) == (0, 3, 5)
    assert manager.num_available_blocks == 8
    assert cached(manager, [*PROMPT, 1]) == 12


def test_never_the_whole_prompt() -> None:
    manager = caching()
    run(manager, PROMPT[:8])
    assert cached(manager, PROMPT[:8]) == 4  # not 8, or nothing would be left to run
    assert cached(manager, PROMPT[:9]) == 8
    assert cached(manager, PROMPT[:4]) == 0
    assert cached(manager, []) == 0


def test_only_what_is_declared_written_is_found() -> None:
    manager = caching()
    first = manager.add_prompt(PROMPT).seq_id
    # A second sequence of the same step must not read what the first has not written yet.
    assert cached(manager, PROMPT) == 0
    manager.mark_written(first, end=7)
    assert cached(manager, PROMPT) == 4
    manager.mark_written(first)
    assert cached(manager, [*PROMPT, 1]) == 12


def test_a_middle_that_differs_ends_the_prefix() -> None:
    manager = caching()
    run(manager, PROMPT)
    changed = PROMPT.copy()
    changed[5] = 0
    assert cached(manager, changed) == 4
    assert cached(manager, PROMPT[4:]) == 0  # the same tokens at another place


@pytest.mark.parametrize(
    ("one", "other"),
    [([65], [321]), ([-1], [-2]), ([0], [1 << 32]), ([1 << 40], [1 << 41]), ([1, 2], [2, 1])],
)
def test_ids_are_compared_whole(one: list[int], other: list[int]) -> None:
    manager = caching(block_size=len(one))
    run(manager, one)
    assert cached(manager, [*other, 7]) == 0
    assert cached(manager, [*one, 7]) == len(one)


def test_a_constant_hash_never_finds_other_tokens() -> None:
    manager = caching(hash_function=lambda parent, content: b"same")
    run(manager, PROMPT[:4])
    assert cached(manager, [1, 2, 3, 4, 5]) == 0
    assert cached(manager, [*PROMPT[:4], 5]) == 4
    assert cached(manager, [*PROMPT[:4], 5], salt="other") == 0
    run(manager, [1, 2, 3, 4])  # finds its place taken: is not kept
    assert manager.stats().blocks_cached == 1


def test_a_hash_without_the_parent_never_finds_another_place() -> None:
    manager = caching(hash_function=lambda parent, content: content)
    run(manager, [*PROMPT[:4], 1, 2, 3, 4])
    assert cached(manager, [1, 2, 3, 4, 5]) == 0


def test_salts_share_nothing() -> None:
    manager = caching()
    run(manager, PROMPT, salt="one")
    assert cached(manager, PROMPT, salt="other") == 0
    assert cached(manager, PROMPT) == 0
    assert cached(manager, PROMPT, salt="one") == 8


def test_ids_of_other_types() -> None:
    manager = caching()
    run(manager, PROMPT)
    assert cached(manager, np.array(PROMPT)) == 8  # type: ignore[arg-type]
    assert cached(manager, iter(PROMPT)) == 8  # type: ignore[arg-type]
    with unchanged(manager, TypeError, "got a bool"):
        manager.add_prompt([True, 2])
    with unchanged(manager, TypeError, "must be integers"):
        manager.add_prompt([1.0])  # type: ignore[list-item]
    with unchanged(manager, ValueError, "64 bits"):
        manager.add_prompt([1 << 63])


def test_generated_tokens_are_found_once_they_are_named() -> None:
    manager = caching()
    seq = manager.add_prompt(PROMPT[:6]).seq_id
    manager.append(seq, 3)
    manager.mark_written(seq)
    assert cached(manager, PROMPT) == 4
    with unchanged(manager, ValueError, "has 9 tokens, but tokens names 10"):
        manager.mark_written(seq, PROMPT[6:10])
    with unchanged(manager, ValueError, r"end must be in \[0, 9\]"):
        manager.mark_written(seq, PROMPT[6:9], end=10)
    manager.mark_written(seq, PROMPT[6:9])
    assert cached(manager, PROMPT) == 8


def test_prefill_in_chunks() -> None:
    manager = caching()
    seq, num_cached = manager.add_prompt(PROMPT, num_tokens=5)
    assert (num_cached, manager.seq_len(seq), manager.stats().blocks_used) == (0, 5, 2)
    manager.mark_written(seq)
    manager.append(seq, 7)
    assert cached(manager, PROMPT) == 4
    manager.mark_written(seq)
    # What is cached is there at once, even if it is more than was asked for.
    other, num_cached = manager.add_prompt([*PROMPT, 1], num_tokens=0)
    assert (num_cached, manager.seq_len(other)) == (12, 12)
    with unchanged(manager, ValueError, "at most 12"):
        manager.add_prompt(PROMPT, num_tokens=13)


def test_equal_prompts_of_one_step_end_up_apart() -> None:
    manager = caching()
    first, second = (manager.add_prompt(PROMPT).seq_id for _ in range(2))
    manager.mark_written(first)
    manager.mark_written(second)
    manager.check_invariants()
    assert manager.stats().blocks_shared == 0
    manager.free(first)
    manager.free(second)  # its blocks are not in the cache: they are free
    assert (manager.stats().blocks_cached, manager.stats().blocks_free) == (3, 5)


def test_without_a_cache_nothing_is_found() -> None:
    manager = BlockManager(8, 4)
    run(manager, PROMPT)
    assert cached(manager, PROMPT) == 0
    assert manager.num_free_blocks == 8
    assert (manager.stats().hits, manager.stats().misses) == (0, 0)


# What is evicted.


def test_an_evicted_block_is_not_found() -> None:
    manager = caching(num_blocks=2)
    run(manager, PROMPT[:8])
    other = manager.add_prompt([1, 2, 3, 4, 5]).seq_id  # takes both blocks
    assert manager.stats().evictions == 2
    assert not manager.can_add_prompt(PROMPT[:8])
    manager.free(other)
    assert cached(manager, [*PROMPT[:4], 9]) == 0
    assert cached(manager, [1, 2, 3, 4, 5]) == 0  # never declared written


def test_leaves_go_first_and_least_recently_used_first() -> None:
    manager = caching(num_blocks=6)
    second = [1, 2, 3, 4, 5, 6, 7, 8]
    run(manager, PROMPT)  # three blocks
    run(manager, second)  # two
    assert cached(manager, PROMPT) == 8  # the first two of three are used again
    for evicted, left in enumerate([(8, 8), (8, 4), (8, 0), (4, 0), (0, 0)], 1):
        manager.free(manager.add((1 + evicted) * 4))  # the free blocks, and one more
        assert manager.stats().evictions == evicted
        before = manager_state(manager)
        assert (found(manager, [*PROMPT, 0]), found(manager, [*second, 0])) == left
        assert manager_state(manager) == before  # looking is not using


def test_free_blocks_are_taken_before_cached_ones() -> None:
    manager = caching(num_blocks=4)
    run(manager, PROMPT[:8])
    manager.add(8)
    assert manager.stats().evictions == 0
    manager.add(1)
    assert manager.stats().evictions == 1


def test_a_prompt_does_not_evict_what_it_shares() -> None:
    manager = caching(num_blocks=3)
    run(manager, PROMPT[:8])
    assert manager.can_add_prompt([*PROMPT[:8], 1])
    assert not manager.can_add_prompt([*PROMPT[:8], 1, 2, 3, 4, 5])
    with unchanged(manager, OutOfBlocksError, "needs 2 blocks, 1 of 3 are free"):
        manager.add_prompt([*PROMPT[:8], 1, 2, 3, 4, 5])
    assert manager.add_prompt([*PROMPT[:8], 1]).num_cached == 8
    assert manager.stats().evictions == 0


def test_a_retry_after_eviction_counts_anew() -> None:
    manager = caching(num_blocks=4)
    run(manager, PROMPT[:8])
    hog = manager.add(8)
    with unchanged(manager, OutOfBlocksError):
        manager.add_prompt([*PROMPT[:8], 1, 2, 3, 4, 5])
    manager.append(hog, 4)  # evicts the second block of the prompt
    manager.truncate(hog, 0)
    assert manager.add_prompt([*PROMPT[:8], 1, 2, 3, 4, 5]).num_cached == 4
    manager.check_invariants()


def test_a_pin_keeps_blocks_from_eviction() -> None:
    manager = caching(num_blocks=4)
    seq = manager.add_prompt(PROMPT[:10]).seq_id
    manager.mark_written(seq)
    pin = manager.pin(seq)
    manager.free(seq)
    assert (manager.stats().blocks_used, manager.stats().blocks_cached) == (2, 0)
    with unchanged(manager, OutOfBlocksError, "needs 3 blocks, 2 of 4"):
        manager.add(12)
    assert cached(manager, PROMPT) == 8
    manager.unpin(pin)
    manager.check_invariants()
    manager.add(16)
    with unchanged(manager, KeyError, "no pin"):
        manager.unpin(pin)


# Blocks that can be found are not written to.


@pytest.mark.parametrize("method", ["append", "append_many", "append_batch"])
def test_the_only_owner_that_writes_to_a_findable_block_makes_it_unfindable(method: str) -> None:
    manager = caching()
    seq = manager.add_prompt(PROMPT).seq_id
    manager.mark_written(seq)
    manager.truncate(seq, 6)  # into the second block
    assert cached(manager, [*PROMPT, 1]) == 12  # nothing is overwritten yet
    if method == "append":
        assert manager.append(seq).copies == []
    else:
        getattr(manager, method)([seq], [1])
    assert cached(manager, [*PROMPT, 1]) == 4
    assert manager.stats().blocks_cached == 0  # the third block hung from the second
    manager.mark_written(seq, [7])
    manager.append(seq, 2)
    manager.mark_written(seq, [8, 9])
    assert cached(manager, [*PROMPT[:6], 7, 8, 9]) == 8
    manager.check_invariants()


def test_an_owner_among_several_copies_a_findable_block() -> None:
    manager = caching()
    seq = manager.add_prompt(PROMPT).seq_id
    manager.mark_written(seq)
    child = manager.fork(seq)
    manager.truncate(child, 6)
    assert manager.append(child).copies == [(1, 3)]
    assert cached(manager, [*PROMPT, 1]) == 12
    manager.free(seq)
    assert cached(manager, [*PROMPT, 1]) == 12
    manager.check_invariants()


def test_a_pinned_block_is_copied() -> None:
    manager = caching()
    seq = manager.add_prompt(PROMPT).seq_id
    manager.mark_written(seq)
    manager.pin(seq)
    manager.truncate(seq, 6)
    assert manager.append(seq).copies == [(1, 3)]


def test_forks_may_both_declare_what_they_share() -> None:
    manager = caching()
    seq = manager.add_prompt(PROMPT[:8]).seq_id
    child = manager.fork(seq)
    manager.mark_written(seq)
    manager.append(child, 4)
    manager.mark_written(child, PROMPT[8:])
    assert cached(manager, [*PROMPT, 1]) == 12
    manager.check_invariants()


def test_damage_is_seen() -> None:
    manager = caching()
    run(manager, PROMPT)
    manager.pool._cached.move_to_end(manager.pool.cached_blocks()[0])
    with pytest.raises(AssertionError, match="before what continues it"):
        manager.check_invariants()
    manager = caching()
    run(manager, PROMPT)
    assert manager._prefix is not None
    manager._prefix._blocks.popitem()
    with pytest.raises(AssertionError, match="hash table"):
        manager.check_invariants()
