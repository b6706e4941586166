"""Tables on the device: what is uploaded, and that no upload disturbs another."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from late import LateStream
from torch import Tensor

from paged_attn import PagedKVCache, decode, kv_batch
from paged_attn.blocks import BlockManager
from paged_attn.device_tables import DeviceTables, StepLists
from paged_attn.staging import StagingRing

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def make(num_blocks: int = 64, **kwargs: Any) -> PagedKVCache:
    return PagedKVCache(1, num_blocks, 4, 1, 8, dtype=torch.float32, **kwargs)


def assert_tables(cache: PagedKVCache, ids: list[int], tables: Tensor) -> None:
    for seq, row in zip(ids, tables.tolist(), strict=True):
        table = cache.manager.block_table(seq)
        assert row == table + [-1] * (len(row) - len(table))


# The ring of buffers.


def test_a_buffer_is_not_filled_again_while_a_copy_may_read_it() -> None:
    stream = LateStream()
    ring = StagingRing(CPU, stream.make_event, stream.copy)
    uploads = [ring.upload([(torch.int64, [i, i + 1]), (torch.int32, [10 * i])]) for i in range(5)]
    assert ring.num_buffers == 5
    stream.run()
    for i, (pair, single) in enumerate(uploads):
        assert (pair.tolist(), single.tolist()) == ([i, i + 1], [10 * i])


def test_buffers_are_used_again_when_their_copies_have_run() -> None:
    stream = LateStream()
    ring = StagingRing(CPU, stream.make_event, stream.copy)
    for i in range(20):
        (numbers,) = ring.upload([(torch.int64, [i])])
        stream.run()
        assert numbers.tolist() == [i]
    assert ring.num_buffers == 1
    first, second = (ring.upload([(torch.int64, [i])])[0] for i in (1, 2))
    stream.run(2)  # the copy of the first, and its event
    third = ring.upload([(torch.int64, [3])])[0]
    stream.run()
    assert [int(t) for t in (first, second, third)] == [1, 2, 3]
    assert ring.num_buffers == 2


def test_a_ring_on_a_cpu_needs_one_buffer_and_grows_it() -> None:
    ring = StagingRing(CPU)
    uploads = [ring.upload([(torch.int32, list(range(n)))])[0] for n in (1, 5000, 3, 0)]
    assert [len(numbers) for numbers in uploads] == [1, 5000, 3, 0]
    assert uploads[1].tolist() == list(range(5000))
    assert ring.num_buffers == 1


@CUDA
def test_steps_behind_a_busy_stream_keep_their_numbers() -> None:
    cache = make(device="cuda")
    ids = [cache.add() for _ in range(3)]
    cuda: Any = torch.cuda
    cuda._sleep(100_000_000)
    batches, expected = [], []
    for _ in range(12):
        batches.append(cache.step(ids))
        expected.append(
            (
                [cache.manager.block_table(seq) for seq in ids],
                [cache.manager.seq_len(seq) for seq in ids],
            )
        )
    for batch, (tables, lens) in zip(batches, expected, strict=True):
        width = batch.block_tables.shape[1]
        assert batch.block_tables.tolist() == [t + [-1] * (width - len(t)) for t in tables]
        assert batch.seq_lens.tolist() == lens


# What is uploaded.


def test_a_decode_step_uploads_the_new_blocks_alone() -> None:
    cache = make()
    ids = [cache.add() for _ in range(8)]
    cache.step(ids, [4 + i % 4 for i in range(8)])
    uploaded = cache._tables.entries_uploaded
    assert uploaded == 2 * 8 - 2  # two sequences have one block, the others two
    batch = cache.step(ids)  # those two cross into a second block
    assert cache._tables.entries_uploaded == uploaded + 2
    assert_tables(cache, ids, batch.block_tables)
    assert_tables(cache, ids, cache.batch(ids).block_tables)
    assert cache._tables.entries_uploaded == uploaded + 2


def test_a_copied_block_and_dropped_blocks_are_uploaded() -> None:
    cache = make()
    seq = cache.add()
    cache.step([seq], 10)
    child = cache.fork(seq)
    assert_tables(cache, [child], cache.batch([child]).block_tables)
    uploaded = cache._tables.entries_uploaded
    assert_tables(cache, [child, seq], cache.step([child, seq]).block_tables)
    assert cache._tables.entries_uploaded == uploaded + 1  # the child's last block
    cache.truncate(child, 3)
    assert_tables(cache, [child, seq], cache.batch([child, seq]).block_tables)
    assert cache._tables.entries_uploaded == uploaded + 3  # two became -1


def test_beams_upload_what_differs() -> None:
    cache = make()
    beams = [cache.add()]
    cache.step(beams, 8)
    beams.append(cache.fork(beams[0]))
    cache.step(beams)  # a third block each
    uploaded = cache._tables.entries_uploaded
    cache.reorder(beams, beams[::-1])
    assert_tables(cache, beams, cache.batch(beams).block_tables)
    assert cache._tables.entries_uploaded == uploaded + 2
    cache.reorder(beams, beams)
    cache.batch(beams)
    assert cache._tables.entries_uploaded == uploaded + 2


@pytest.mark.parametrize("way", ["swap", "preempt"])
def test_new_blocks_of_a_sequence_that_was_away_are_uploaded(way: str) -> None:
    cache = make(num_host_blocks=8)
    seq, other = cache.add(), cache.add()
    cache.step([seq, other], [9, 2])
    if way == "swap":
        cache.swap_out([seq])
    else:
        cache.manager.preempt(seq)
    cache.step([other], 7)  # takes what was the sequence's first block
    if way == "swap":
        cache.swap_in([seq])
    else:
        cache.manager.resume(seq)
    assert_tables(cache, [seq, other], cache.batch([seq, other]).block_tables)


def test_a_batch_keeps_its_tables_when_later_steps_change_them() -> None:
    cache = make()
    ids = [cache.add(), cache.add()]
    first = cache.step(ids, [5, 2])
    kept = [t.clone() for t in (first.block_tables, first.seq_lens, first.slot_mapping)]
    cache.truncate(ids[0], 1)
    cache.step(ids[::-1], [7, 3])
    cache.free(ids[0])
    cache.step([cache.add()], 9)
    for tensor, before in zip(
        (first.block_tables, first.seq_lens, first.slot_mapping), kept, strict=True
    ):
        assert torch.equal(tensor, before)


def test_random_batches_in_any_order() -> None:
    rng = random.Random(0)
    cache = make(num_blocks=600)
    ids: list[int] = []
    for _ in range(300):
        if rng.random() < 0.3:
            ids.append(cache.add(rng.randrange(60)))
        elif ids and rng.random() < 0.3:
            gone = ids.pop(rng.randrange(len(ids)))
            (cache if rng.random() < 0.5 else cache.manager).free(gone)
        elif ids and rng.random() < 0.3:
            seq = rng.choice(ids)
            cache.truncate(seq, rng.randrange(cache.manager.seq_len(seq) + 1))
        chosen = rng.sample(ids, rng.randrange(len(ids) + 1))
        lens = [rng.randrange(3) for _ in chosen]
        if cache.manager.can_append_many(chosen, lens):
            batch = cache.step(chosen, lens)
            assert_tables(cache, chosen, batch.block_tables)
            assert batch.seq_lens.tolist() == [cache.manager.seq_len(seq) for seq in chosen]


def test_rows_of_freed_sequences_are_used_again() -> None:
    cache = make()
    for i in range(200):
        seq = cache.add()
        cache.step([seq], 9)
        (cache if i % 2 else cache.manager).free(seq)
        assert (seq in cache._tables._rows) == (i % 2 == 0)
    assert cache._tables._table.shape[0] <= 16


def test_after_a_failed_upload_everything_is_sent_again() -> None:
    manager = BlockManager(16, 4)
    failures = [True, False]

    def copy(target: Tensor, source: Tensor) -> None:
        if failures.pop():
            raise RuntimeError("out of memory")
        target.copy_(source)

    tables = DeviceTables(manager, StagingRing(CPU, None, copy))
    ids = [manager.add(5), manager.add(9)]

    def upload() -> Tensor:
        lens = manager.seq_lens(ids)
        return tables.upload(StepLists(ids, [], lens, None, 3)).block_tables

    assert upload().tolist() == [[0, 1, -1], [2, 3, 4]]
    manager.append(ids[0], 4)
    with pytest.raises(RuntimeError, match="out of memory"):
        upload()
    failures.append(False)
    assert upload().tolist() == [[0, 1, 5], [2, 3, 4]]


# Batches of a fixed size.


def test_a_step_into_an_earlier_batch() -> None:
    cache = make()
    ids = [cache.add() for _ in range(4)]
    static = cache.step(ids, max_blocks=5)
    tensors = (static.slot_mapping, static.block_tables, static.seq_lens)
    places = [tensor.data_ptr() for tensor in tensors]
    cache.free(ids.pop(1))
    assert cache.step(ids, out=static) is static
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert static.seq_lens.tolist() == [2, 2, 2, 0]
    assert static.slot_mapping.tolist() == [1, 9, 13, -1]
    assert static.block_tables.tolist() == [[b, -1, -1, -1, -1] for b in (0, 2, 3, -1)]


def test_a_ragged_step_into_an_earlier_batch() -> None:
    cache = make()
    ids = [cache.add() for _ in range(3)]
    static = cache.step(ids, [3, 1, 4], max_blocks=4)
    cache.step(ids[:2], [1, 5], out=static)
    assert static.cu_query_lens is not None
    assert static.cu_query_lens.tolist() == [0, 1, 6, 6]
    assert static.slot_mapping.tolist()[6:] == [-1, -1]
    cache.step(ids[2:], out=static)
    assert static.cu_query_lens.tolist() == [0, 1, 1, 1]


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    cache = make()
    ids = [cache.add() for _ in range(3)]
    static = cache.step(ids[:2], max_blocks=1)
    refused: list[tuple[list[int], int, dict[str, Any], str]] = [
        (ids, 1, {"out": static}, "room for 3 sequences, has 2"),
        (ids[:1], 4, {"out": static}, "room for 4 tokens, has 2"),
        (ids[:1], 2, {"out": static}, "one token a sequence"),
        (ids[:2], 5, {"max_blocks": 1}, "max_blocks must be at least 2, got 1"),
    ]
    for seqs, query_len, kwargs, message in refused:
        with pytest.raises(ValueError, match=message):
            cache.step(seqs, query_len, **kwargs)
    for _ in range(3):
        cache.step(ids[:2], out=static)
    with pytest.raises(ValueError, match="room for 2 blocks a sequence, has 1"):
        cache.step(ids[:2], out=static)
    assert cache.manager.seq_lens(ids) == [4, 4, 0]


def test_padding_attends_to_nothing() -> None:
    cache = make()
    ids = [cache.add() for _ in range(3)]
    static = cache.step(ids)
    rows = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(0))
    cache.write(0, rows, rows, static)
    cache.attend(0, rows, static)
    assert static.plan is not None
    plan = static.plan
    cache.step(ids[:2], out=static)
    cache.write(0, rows, rows, static)
    out = cache.attend(0, rows, static)
    assert static.plan is plan
    assert torch.equal(out[2], torch.zeros(1, 8))
    assert torch.allclose(out[:2], rows[:2], atol=1e-6)


def test_plans_are_made_once_for_each_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def plan_decode(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return decode.plan_decode(*args, **kwargs)

    monkeypatch.setattr(kv_batch, "plan_decode", plan_decode)
    cache = make(chunk_size=16)
    seq = cache.add()
    batch = cache.step([seq], 3)
    rows = torch.randn(3, 1, 8)
    cache.write(0, rows, rows, batch)
    for _ in range(3):
        cache.attend(0, rows, batch)
    cache.attend(0, rows, batch, sliding_window=2)
    cache.attend(0, rows[None], batch)
    cache.attend(0, torch.randn(3, 4, 8), batch)
    assert [(plan["num_q_heads"], plan["query_len"], plan["sliding_window"]) for plan in made] == [
        (1, 1, None),
        (1, 1, 2),
        (1, 3, None),
        (4, 1, None),
    ]
    assert all(plan["chunk_size"] == 16 for plan in made)
    with pytest.raises(RuntimeError, match="head_dim"):
        cache.attend(0, torch.randn(3, 1, 16), batch)


def test_plans_of_a_static_batch_are_made_anew_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_decode(seq_lens: Tensor, **kwargs: Any) -> Any:
        plan = decode.plan_decode(seq_lens, **kwargs)
        assert plan.tensor is not None
        plan.tensor[: len(seq_lens)] = seq_lens  # stands for what a GPU writes
        return plan

    monkeypatch.setattr(kv_batch, "plan_decode", plan_decode)
    cache = make(num_q_heads=2)
    ids = [cache.add(5), cache.add(7)]
    static = cache.step(ids, max_blocks=4)
    assert static.plan is not None
    tensor = static.plan.tensor
    assert tensor is not None
    cache.step(ids[1:], out=static)
    assert static.plan.tensor is tensor
    assert tensor[:2].tolist() == [9, 0]


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 1]])
def test_a_step_makes_the_plan_where_it_knows_the_heads(query_lens: list[int]) -> None:
    cache = make(num_q_heads=4)
    batch = cache.step([cache.add(), cache.add()], query_lens)
    plan = batch.plan
    assert plan is not None
    num_tokens = sum(query_lens)
    cache.write(0, torch.zeros(num_tokens, 1, 8), torch.ones(num_tokens, 1, 8), batch)
    out = cache.attend(0, torch.randn(num_tokens, 4, 8), batch)
    assert list(batch.plans.values()) == [plan]
    assert torch.equal(out, torch.ones(num_tokens, 4, 8))
    assert make().step([]).plan is None
