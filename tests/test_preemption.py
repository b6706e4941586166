"""Ways out of pressure: swap, recompute, the watermark; and the record of events."""

from __future__ import annotations

import pytest
from manager_state import unchanged

from paged_attn.blocks import BlockEvent, BlockManager, OutOfBlocksError


def test_swap_out_and_in_moves_every_block_once() -> None:
    manager = BlockManager(6, 4, num_host_blocks=4)
    seq = manager.add(10)
    assert manager.can_swap_out([seq])
    out = manager.swap_out([seq])
    assert out.pairs == [(0, 0), (1, 1), (2, 2)]
    assert manager.num_free_blocks == 6
    assert (manager.swapped_ids(), manager.seq_ids(), manager.seq_len(seq)) == ([seq], [], 10)
    manager.check_invariants()
    other = manager.add(4)  # has block 2 now
    assert manager.can_swap_in([seq])
    back = manager.swap_in([seq])
    assert [source for source, _ in back.pairs] == [0, 1, 2]
    assert manager.block_table(seq) == [target for _, target in back.pairs]
    assert not set(manager.block_table(seq)) & set(manager.block_table(other))
    stats = manager.stats()
    assert (stats.swapped_out, stats.swapped_in, stats.host_blocks_used) == (3, 3, 0)
    manager.check_invariants()


def test_what_is_shared_stays_shared() -> None:
    manager = BlockManager(6, 4, num_host_blocks=4)
    seq = manager.add(6)
    child = manager.fork(seq)
    manager.append(child)  # copies the second block
    assert len(manager.swap_out([seq, child]).pairs) == 3
    assert manager.stats().host_blocks_used == 3
    assert len(manager.swap_in([child, seq]).pairs) == 3
    manager.check_invariants()
    assert manager.block_table(seq)[0] == manager.block_table(child)[0]
    assert manager.stats().blocks_used == 3


def test_a_block_shared_with_one_who_stays_is_copied_and_stays() -> None:
    manager = BlockManager(6, 4, num_host_blocks=4)
    seq = manager.add(6)
    child = manager.fork(seq)
    manager.swap_out([child])
    assert (manager.stats().blocks_used, manager.stats().host_blocks_used) == (2, 2)
    manager.swap_in([child])
    assert manager.stats().blocks_used == 4
    manager.check_invariants()


def test_swapped_blocks_are_found_where_they_were_and_not_where_they_are() -> None:
    manager = BlockManager(8, 4, enable_prefix_caching=True, num_host_blocks=4)
    tokens = list(range(9))
    seq = manager.add_prompt(tokens).seq_id
    manager.mark_written(seq)
    before = manager.block_table(seq)
    manager.swap_out([seq])
    manager.swap_in([seq])
    manager.check_invariants()
    other = manager.add_prompt(tokens)
    assert manager.block_table(other.seq_id)[:2] == before[:2]
    assert not set(manager.block_table(seq)) & set(before[:2])
    pin = manager.pin(seq)  # nothing of it can be found
    assert manager.pool.ref_count(manager.block_table(seq)[0]) == 1
    manager.unpin(pin)
    manager.mark_written(seq)
    manager.check_invariants()


def test_too_small_a_host_pool_is_refused_before_anything_moves() -> None:
    manager = BlockManager(4, 4, num_host_blocks=1)
    seq = manager.add(8)
    assert not manager.can_swap_out([seq])
    with unchanged(manager, OutOfBlocksError, "swap_out: needs 2 blocks, 1 of 1 are free"):
        manager.swap_out([seq])
    with unchanged(BlockManager(2, 2), KeyError, "no sequence"):
        BlockManager(2, 2).swap_out([0])


def test_a_full_device_pool_keeps_the_sequence_on_the_host() -> None:
    manager = BlockManager(3, 4, num_host_blocks=3)
    seq = manager.add(8)
    manager.swap_out([seq])
    hog = manager.add(8)
    assert not manager.can_swap_in([seq])
    with unchanged(manager, OutOfBlocksError, "swap_in: needs 2 blocks, 1 of 3"):
        manager.swap_in([seq])
    manager.free(hog)
    manager.swap_in([seq])


def test_swapped_and_preempted_sequences_do_not_run() -> None:
    manager = BlockManager(6, 4, num_host_blocks=6)
    swapped, preempted, running = manager.add(5), manager.add(5), manager.add(1)
    manager.swap_out([swapped])
    manager.preempt(preempted)
    for seq, message in ((swapped, "is swapped out"), (preempted, "is preempted")):
        for call in (manager.append, manager.fork, manager.block_table, manager.preempt):
            with unchanged(manager, ValueError, message):
                call(seq)
        with unchanged(manager, ValueError, message):
            manager.append_batch([running, seq], [1, 1])
        with unchanged(manager, ValueError, message):
            manager.reorder([running], [seq])
        with unchanged(manager, ValueError, message):
            manager.take_table_changes([seq])
    with unchanged(manager, ValueError, "is not swapped out"):
        manager.swap_in([running])
    with unchanged(manager, ValueError, "is preempted"):
        manager.swap_in([preempted])
    with unchanged(manager, ValueError, "must be different"):
        manager.swap_in([swapped, swapped])
    with unchanged(manager, ValueError, "is not preempted"):
        manager.resume(running)
    with unchanged(manager, ValueError, "is swapped out"):
        manager.resume(swapped)
    for seq in (swapped, preempted, running):
        manager.free(seq)
        with unchanged(manager, KeyError, "no sequence"):
            manager.free(seq)
    assert manager.num_free_blocks == manager.host_pool.num_free == 6


@pytest.mark.parametrize("direction", ["out", "in"])
def test_held_blocks_are_not_reused_until_the_transfer_is_finished(direction: str) -> None:
    manager = BlockManager(2, 4, num_host_blocks=2)
    seq = manager.add(8)
    transfer = manager.swap_out([seq], hold=direction == "out")
    pool = manager.pool
    if direction == "in":
        transfer, pool = manager.swap_in([seq], hold=True), manager.host_pool
    assert pool.num_available == 0
    manager.check_invariants()
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    manager.finish_transfer(transfer.transfer_id)
    assert pool.num_available == 2
    manager.check_invariants()
    with unchanged(manager, KeyError, "no transfer"):
        manager.finish_transfer(transfer.transfer_id)


def test_preempted_sequences_get_all_blocks_again() -> None:
    manager = BlockManager(4, 4)
    seq = manager.add(9)
    manager.preempt(seq)
    assert (manager.num_free_blocks, manager.preempted_ids()) == (4, [seq])
    hog = manager.add(8)
    assert not manager.can_resume(seq)
    with unchanged(manager, OutOfBlocksError, "resume: needs 3 blocks, 2 of 4"):
        manager.resume(seq)
    manager.free(hog)
    assert manager.can_resume(seq)
    assert manager.resume(seq) == 0
    assert (manager.seq_len(seq), len(manager.block_table(seq))) == (9, 3)
    assert manager.stats().recomputes == 1
    manager.check_invariants()


def test_recompute_finds_what_the_prefix_cache_kept() -> None:
    manager = BlockManager(4, 4, enable_prefix_caching=True)
    tokens = list(range(10))
    seq = manager.add_prompt(tokens).seq_id
    manager.append(seq, 2)
    manager.mark_written(seq, [10, 11])
    manager.preempt(seq)
    hog = manager.add(8)  # takes the free block, and evicts the last one
    assert manager.can_resume(seq) is False  # two found, of two that are left
    manager.free(hog)
    assert manager.resume(seq) == 8
    assert manager.append(seq).slots[0] // 4 == manager.block_table(seq)[-1]
    manager.check_invariants()


def test_the_watermark_is_for_those_that_run() -> None:
    manager = BlockManager(4, 4, watermark=1, num_host_blocks=4)
    assert not manager.can_add(16)
    with unchanged(manager, OutOfBlocksError, "needs 4 blocks, 4 of 4 .* 1 of them kept back"):
        manager.add(16)
    seq = manager.add(12)
    assert not manager.can_add_prompt([1])
    with unchanged(manager, OutOfBlocksError, "add_prompt"):
        manager.add_prompt([1])
    assert manager.can_add(0)
    manager.append(seq, 4)
    manager.swap_out([seq])
    assert not manager.can_swap_in([seq])
    with unchanged(manager, OutOfBlocksError, "swap_in"):
        manager.swap_in([seq])
    other = manager.add(12)
    manager.append(other, 1)
    manager.preempt(other)
    assert not manager.can_resume(other)
    with unchanged(manager, OutOfBlocksError, "resume"):
        manager.resume(other)


def test_events_tell_what_happened() -> None:
    manager = BlockManager(3, 2, enable_prefix_caching=True, num_host_blocks=1, record_events=True)
    seq = manager.add_prompt([1, 2, 3]).seq_id
    child = manager.fork(seq)
    manager.append(child)
    manager.mark_written(seq)
    manager.free(seq)
    assert manager.take_events() == [
        BlockEvent("alloc", 0),
        BlockEvent("alloc", 1),
        BlockEvent("share", 0),
        BlockEvent("share", 1),
        BlockEvent("alloc", 2),
        BlockEvent("free", 1),
        BlockEvent("copy", 1, 2),
        BlockEvent("free", 1),
        BlockEvent("free", 0),
    ]
    manager.free(child)  # block 0 is cached now
    assert [event.kind for event in manager.take_events()] == ["free", "free"]
    hog = manager.add(6)
    assert BlockEvent("evict", 0) in manager.take_events()
    manager.truncate(hog, 1)
    (source,) = manager.block_table(hog)
    manager.take_events()
    manager.swap_out([hog])
    assert BlockEvent("swap_out", source, 0) in manager.take_events()
    manager.swap_in([hog])
    assert "swap_in" in [event.kind for event in manager.take_events()]
    assert manager.take_events() == []
    assert BlockManager(1, 1).take_events() == []
