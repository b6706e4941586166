"""The block pool and the block manager: worked examples, sharing, failures."""

from __future__ import annotations

import pytest
from manager_state import unchanged

from paged_attn.blocks import (
    BlockManager,
    BlockPool,
    OutOfBlocksError,
    expand_block_table,
)


def manager_with_next_blocks(
    next_blocks: list[int], *, block_size: int = 4, num_blocks: int = 12
) -> BlockManager:
    """A manager that hands out `next_blocks` first: what was freed last is reused first."""
    manager = BlockManager(num_blocks, block_size)
    owner = {}
    for _ in range(num_blocks):
        seq = manager.add(1)
        owner[manager.block_table(seq)[0]] = seq
    others = [block for block in range(num_blocks) if block not in next_blocks]
    for block in others + next_blocks[::-1]:
        manager.free(owner[block])
    manager.check_invariants()
    return manager


# Worked examples of the literature.


def test_ten_tokens_in_three_scattered_blocks() -> None:
    manager = manager_with_next_blocks([7, 2, 11])
    seq = manager.add(10)
    assert manager.block_table(seq) == [7, 2, 11]
    assert manager.slots(seq, 6, 7) == [2 * 4 + 2]  # token 6: block 2, offset 2
    assert manager.stats().waste == 2


def test_seven_tokens_grow_to_a_third_block_at_the_ninth() -> None:
    manager = manager_with_next_blocks([3, 0, 5])
    seq = manager.add(7)
    assert manager.block_table(seq) == [3, 0]
    assert manager.append(seq) == ([3], [])  # block 0, offset 3
    assert manager.block_table(seq) == [3, 0]
    assert manager.append(seq) == ([5 * 4], [])
    assert manager.block_table(seq) == [3, 0, 5]


def test_six_token_prompt_with_two_responses_takes_three_blocks() -> None:
    manager = BlockManager(8, 4)
    first = manager.add(6)
    second = manager.fork(first)
    assert manager.append(first) == ([2 * 4 + 2], [(1, 2)])
    assert manager.append(second) == ([1 * 4 + 2], [])
    assert (manager.block_table(first), manager.block_table(second)) == ([0, 2], [0, 1])
    stats = manager.stats()
    assert (stats.blocks_used, stats.blocks_shared, stats.copies) == (3, 1, 1)
    assert (stats.sequences, stats.tokens, stats.waste) == (2, 14, 2)


def test_slots_of_drafts_follow_the_table() -> None:
    manager = manager_with_next_blocks([7, 2])
    seq = manager.add(3)
    assert manager.append(seq, 3) == ([31, 8, 9], [])
    assert manager.slots(seq, 3, 6) == [31, 8, 9]


def test_expand_block_table_keeps_the_slots() -> None:
    assert expand_block_table([3, 0], 2) == [6, 7, 0, 1]
    assert expand_block_table([3, 0], 1) == [3, 0]
    with pytest.raises(ValueError, match="ratio"):
        expand_block_table([3], 0)
    manager = manager_with_next_blocks([3, 0], block_size=32)
    seq = manager.add(50)
    table = expand_block_table(manager.block_table(seq), 2)
    assert [table[t // 16] * 16 + t % 16 for t in range(50)] == manager.slots(seq, 0, 50)


def test_what_is_reserved_for_b_leaves_room_for_c_only_in_blocks() -> None:
    # 24 slots: B has 6 tokens and may grow to 20, C has 6. Reserved whole, B leaves 4 slots.
    manager = BlockManager(num_blocks=6, block_size=4)
    assert 24 - 20 < 6
    b, c = manager.add(6), manager.add(6)
    assert (manager.block_table(b), manager.block_table(c)) == ([0, 1], [2, 3])
    assert (manager.num_free_blocks, manager.stats().waste) == (2, 4)
    manager.append(b, 10)  # 16 tokens, in blocks that are not neighbours
    assert manager.block_table(b) == [0, 1, 4, 5]
    assert manager.slots(b, 7, 9) == [7, 16]
    assert not manager.can_append(b)
    manager.append(c, 2)  # C has room in its own block
    assert not manager.can_append(c)
    manager.free(c)
    manager.append(b, 4)  # all 20
    assert manager.num_free_blocks == 1
    manager.check_invariants()


# Sharing and copy-on-write.


def test_fork_at_five_tokens_shares_block_0_and_copies_block_1() -> None:
    manager = BlockManager(4, 4)
    parent = manager.add(5)
    child = manager.fork(parent)
    assert manager.append(child).copies == [(1, 2)]
    assert manager.block_table(parent) == [0, 1]
    assert manager.block_table(child) == [0, 2]
    assert manager.append(parent).copies == []


def test_three_writers_of_a_shared_partial_block_copy_it_twice() -> None:
    manager = BlockManager(4, 4)
    seqs = [manager.add(2)]
    seqs += [manager.fork(seqs[0]) for _ in range(2)]
    appends = manager.append_many(seqs, [1, 1, 1])
    assert [append.copies for append in appends] == [[(0, 1)], [(0, 2)], []]
    assert len({append.slots[0] for append in appends}) == 3


def test_a_full_shared_block_is_never_copied() -> None:
    manager = BlockManager(4, 4)
    parent = manager.add(4)
    child = manager.fork(parent)
    assert manager.append(child) == ([4], [])
    assert manager.append(parent) == ([8], [])
    assert manager.pool.ref_count(0) == 2


def test_appending_nothing_copies_nothing() -> None:
    manager = BlockManager(2, 4)
    seq = manager.add(2)
    manager.fork(seq)
    assert manager.append(seq, 0) == ([], [])
    assert manager.stats().copies == 0


@pytest.mark.parametrize("prefix", range(1, 9))
def test_drafts_past_a_block_edge_never_land_in_shared_blocks(prefix: int) -> None:
    manager = BlockManager(16, 4)
    seq = manager.add(prefix)
    other = manager.fork(seq)
    slots, _ = manager.append(seq, 5)
    shared = set(manager.block_table(other))
    assert not shared.intersection(slot // 4 for slot in slots)
    assert all(manager.pool.ref_count(slot // 4) == 1 for slot in slots)


def test_rejected_drafts_give_their_blocks_back() -> None:
    manager = BlockManager(4, 4)
    seq = manager.add(3)
    manager.append(seq, 9)
    manager.truncate(seq, 4)
    assert manager.block_table(seq) == [0]
    assert manager.seq_len(seq) == 4
    assert manager.num_free_blocks == 3
    manager.truncate(seq, 0)
    assert manager.num_free_blocks == 4
    assert manager.append(seq, 1).slots == [0]


def test_truncating_into_a_shared_block_makes_the_next_write_copy_it() -> None:
    manager = BlockManager(4, 4)
    seq = manager.add(8)
    other = manager.fork(seq)
    manager.truncate(seq, 6)
    assert manager.stats().waste == 0  # the other sequence fills the block
    assert manager.append(seq) == ([2 * 4 + 2], [(1, 2)])
    assert manager.block_table(other) == [0, 1]


def test_beams_share_until_they_write() -> None:
    manager = BlockManager(8, 4)
    beams = [manager.add(6)]
    beams.append(manager.fork(beams[0]))
    manager.append_many(beams, [1, 1])
    survivors = [manager.fork(beams[1]), manager.fork(beams[1])]
    for beam in beams:
        manager.free(beam)
    assert manager.stats().blocks_used == 2
    assert sum(len(a.copies) for a in manager.append_many(survivors, [1, 1])) == 1
    manager.check_invariants()


def test_reordered_beams_share_what_they_have_in_common() -> None:
    manager = BlockManager(8, 4)
    beams = [manager.add(6)]
    beams += [manager.fork(beams[0]) for _ in range(2)]
    manager.append_many(beams, [1, 1, 1])
    assert manager.stats().blocks_used == 1 + 3
    tables = [manager.block_table(beam) for beam in beams]
    manager.reorder(beams, [beams[1], beams[1], beams[2]])
    assert [manager.block_table(beam) for beam in beams] == [tables[1], tables[1], tables[2]]
    assert (manager.stats().blocks_used, manager.stats().copies) == (3, 2)
    # Of the two that share a partial block, the first writer copies it; the third beam does not.
    appends = manager.append_many(beams, [1, 1, 1])
    assert [len(append.copies) for append in appends] == [1, 0, 0]
    manager.check_invariants()


def test_reordered_beams_at_a_block_edge_copy_nothing() -> None:
    manager = BlockManager(8, 4)
    beams = [manager.add(8)]
    beams.append(manager.fork(beams[0]))
    manager.reorder(beams, beams[::-1])
    assert [append.copies for append in manager.append_many(beams, [1, 1])] == [[], []]


def test_beams_that_swap_places_lose_no_block() -> None:
    manager = BlockManager(2, 4)
    beams = [manager.add(3), manager.add(4)]
    manager.reorder(beams, beams[::-1])
    assert [manager.block_table(beam) for beam in beams] == [[1], [0]]
    assert manager.seq_lens(beams) == [4, 3]
    manager.reorder(beams, [beams[0], beams[0]])
    assert manager.num_free_blocks == 1
    manager.check_invariants()


def test_reorder_refuses_what_does_not_fit() -> None:
    manager = BlockManager(4, 4)
    beams = [manager.add(3), manager.add(5)]
    with unchanged(manager, ValueError, "parents must have one entry for each of 2"):
        manager.reorder(beams, beams[:1])
    with unchanged(manager, ValueError, "must be different"):
        manager.reorder([beams[0], beams[0]], beams)
    with unchanged(manager, KeyError, "no sequence 9"):
        manager.reorder(beams, [beams[0], 9])


def test_waste_is_counted_once_for_a_shared_tail() -> None:
    manager = BlockManager(4, 4)
    seq = manager.add(7)
    shorter = manager.fork(seq)
    manager.truncate(shorter, 5)
    assert manager.stats().waste == 1
    manager.free(seq)
    assert manager.stats().waste == 3


# A failed operation changes nothing.


def snapshot(manager: BlockManager) -> object:
    return (
        [(seq, manager.seq_len(seq), manager.block_table(seq)) for seq in manager.seq_ids()],
        manager.stats(),
    )


def test_can_add_is_exact() -> None:
    manager = BlockManager(3, 4)
    assert manager.can_add(12)
    assert not manager.can_add(13)
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError, match="add: needs 4 blocks, 3 of 3 are free") as info:
        manager.add(13)
    assert (info.value.needed, info.value.free) == (4, 3)
    assert snapshot(manager) == before
    manager.add(12)


def test_can_append_counts_the_copy() -> None:
    manager = BlockManager(2, 4)
    seq = manager.add(3)
    assert manager.can_append(seq, 5)
    manager.fork(seq)
    assert manager.can_append(seq, 1)
    assert not manager.can_append(seq, 2)  # a copy and a new block
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError, match=r"append: needs 2 blocks, 1 of 2 are free"):
        manager.append(seq, 2)
    assert snapshot(manager) == before
    manager.append(seq, 1)


def test_append_many_needs_no_copy_for_the_last_writer() -> None:
    manager = BlockManager(2, 4)
    seqs = [manager.add(3)]
    seqs.append(manager.fork(seqs[0]))
    assert manager.can_append_many(seqs, [1, 1])
    assert not manager.can_append_many(seqs, [1, 2])
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError, match="append_many"):
        manager.append_many(seqs, [1, 2])
    assert snapshot(manager) == before
    manager.append_many(seqs, [1, 1])
    assert manager.num_free_blocks == 0


def test_arguments_that_do_not_fit() -> None:
    manager = BlockManager(4, 4)
    seq = manager.add(2)
    before = snapshot(manager)
    with pytest.raises(KeyError, match="no sequence 99"):
        manager.append(99)
    with pytest.raises(KeyError, match="no sequence 99"):
        manager.append_many([seq, 99], [1, 1])
    with pytest.raises(ValueError, match="different"):
        manager.append_many([seq, seq], [1, 1])
    with pytest.raises(ValueError, match="one entry for each of 1"):
        manager.append_many([seq], [1, 1])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        manager.append(seq, -1)
    with pytest.raises(TypeError, match="must be an int, got float"):
        manager.add(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an int, got bool"):
        manager.append(seq, True)
    with pytest.raises(ValueError, match="at most 2"):
        manager.truncate(seq, 3)
    with pytest.raises(ValueError, match="end 3"):
        manager.slots(seq, 0, 3)
    with pytest.raises(ValueError, match="block_size"):
        BlockManager(4, 0)
    assert snapshot(manager) == before
    manager.free(seq)
    with pytest.raises(KeyError):
        manager.free(seq)


# The pool.


def test_free_twice_in_one_call_needs_two_owners() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate()
    pool.share([block])
    assert (pool.num_shared, pool.num_free) == (1, 2)
    pool.free([block, block])
    assert (pool.num_shared, pool.num_free) == (0, 3)
    pool.check_invariants()

    (block,) = pool.allocate()
    with pytest.raises(ValueError, match=f"block {block} has 1 owners, cannot lose 2"):
        pool.free([block, block])
    assert (pool.ref_count(block), pool.num_free) == (1, 2)
    pool.check_invariants()


def test_a_failed_free_restores_owners_and_the_count_of_shared() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.share([a])
    for bad in ([a, a, b, a], [a, b, 4], [b, a, -1]):
        with pytest.raises(ValueError, match=r"BlockPool\.free"):
            pool.free(bad)
        assert [pool.ref_count(block) for block in (a, b)] == [2, 1]
        assert (pool.num_shared, pool.num_free) == (1, 2)
        pool.check_invariants()


def test_pool_refuses_what_it_cannot_do() -> None:
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocksError, match="needs 3 blocks, 2 of 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="block 0 is free"):
        pool.share([0])
    for block in (-1, 2):
        with pytest.raises(ValueError, match=r"must be in \[0, 2\)"):
            pool.share([block])
        with pytest.raises(ValueError, match=r"must be in \[0, 2\)"):
            pool.ref_count(block)
    assert pool.allocate(0) == []
    assert BlockPool(0).num_free == 0
    pool.check_invariants()


def test_invariant_checks_see_damage() -> None:
    pool = BlockPool(2)
    pool.allocate()
    pool.owners[0] = 0
    with pytest.raises(AssertionError, match="free list"):
        pool.check_invariants()
    manager = BlockManager(4, 4)
    seq = manager.add(8)
    manager._seqs[seq].blocks[1] = 0
    with pytest.raises(AssertionError, match="block twice"):
        manager.check_invariants()
