"""The pool's third state: blocks without an owner whose contents are kept."""

from __future__ import annotations

import pytest
from manager_state import pool_state

from paged_attn.blocks import BlockEvent, BlockPool, OutOfBlocksError


def test_kept_blocks_are_cached_and_evicted_in_the_order_of_release() -> None:
    pool = BlockPool(3)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    a, b, c = pool.allocate(3)
    pool.keep(a)
    pool.keep(b)
    pool.free([b, a, c])
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (1, 2, 0, 3)
    assert (pool.cached_blocks(), pool.is_cached(a), pool.is_cached(c)) == ([b, a], True, False)
    pool.check_invariants()
    assert pool.allocate(2) == [b, c]
    assert evicted == [b]
    pool.free([b])
    assert pool.num_free == 1  # what it held is forgotten: it is not kept any more
    with pytest.raises(OutOfBlocksError, match="needs 3 blocks, 2 of 3 are free"):
        pool.allocate(3)
    assert evicted == [b]


def test_sharing_a_cached_block_gives_it_an_owner() -> None:
    pool = BlockPool(2)
    (a,) = pool.allocate()
    pool.keep(a)
    pool.free([a])
    pool.share([a, a])
    assert (pool.ref_count(a), pool.num_shared, pool.num_cached) == (2, 1, 0)
    pool.check_invariants()
    pool.free([a, a])
    assert pool.cached_blocks() == [a]


def test_a_failed_free_leaves_no_block_cached() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.keep(a)
    before = pool_state(pool)
    with pytest.raises(ValueError, match="cannot lose 2"):
        pool.free([b, a, a])
    assert pool_state(pool) == before
    pool.check_invariants()


def test_forgotten_blocks_become_free() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.keep(a)
    pool.keep(b)
    pool.free([a])
    pool.forget(a)
    pool.forget(b)
    pool.free([b])
    assert (pool.num_free, pool.num_cached) == (2, 0)
    with pytest.raises(ValueError, match="has no owner"):
        pool.keep(a)
    pool.check_invariants()


def test_events_are_recorded_only_where_somebody_listens() -> None:
    pool = BlockPool(1)
    pool.free(pool.allocate())
    pool.events = []
    (block,) = pool.allocate()
    pool.keep(block)
    pool.free([block])
    pool.allocate()
    assert pool.events == [
        BlockEvent("alloc", 0),
        BlockEvent("free", 0),
        BlockEvent("evict", 0),
        BlockEvent("alloc", 0),
    ]


def test_damage_is_seen() -> None:
    pool = BlockPool(2)
    pool.keep(pool.allocate()[0])
    pool.free([0])
    pool._free.append(0)
    with pytest.raises(AssertionError, match="kept is free"):
        pool.check_invariants()
