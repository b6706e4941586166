"""reshape_and_cache and gather_cache without quantisation: what goes where, and nothing else."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from cases import DEAD_BLOCK, LAYOUTS, make_pools, strided
from support import FLOAT_DTYPES, dtype_id, raw, same_bits
from torch import Tensor

from paged_attn import gather_cache, reshape_and_cache


def random_rows(count: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of a wider, poisoned tensor."""
    generator = torch.Generator().manual_seed(count)
    rows = strided((count,), num_heads, head_dim, dtype)
    rows.copy_(torch.randn(rows.shape, generator=generator))
    return rows


def write_by_hand(pool: Tensor, slots: list[int], rows: Tensor) -> None:
    for i, slot in enumerate(slots):
        if slot >= 0:
            pool[slot // pool.shape[1], slot % pool.shape[1]] = rows[i]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [8, 80])
def test_write(backend: Backend, layout: str, dtype: torch.dtype, head_dim: int) -> None:
    # Compared byte for byte with the whole storage, other half and padding included.
    slots = [34, 7, 0, 20, 5, 6]
    key, value = (random_rows(n, 3, head_dim, dtype)[:6] for n in (6, 7))
    pools = make_pools(layout, 7, 5, 3, head_dim, dtype)
    mine = backend.place_pair(pools)
    placed = [backend.place(t) for t in (key, value, torch.tensor(slots))]
    reshape_and_cache(placed[0], placed[1], mine[0], mine[1], placed[2])
    write_by_hand(pools[0], slots, key)
    write_by_hand(pools[1], slots, value)
    for got, want in zip(mine, pools, strict=True):
        assert torch.equal(raw(got).cpu(), raw(want))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_returns_what_was_written(backend: Backend, layout: str, dtype: torch.dtype) -> None:
    lens = [5, 0, 11, 4]
    tables = torch.full((4, 5), DEAD_BLOCK, dtype=torch.int32)
    tables[0, :2], tables[2, :3] = torch.tensor([6, 0]), torch.tensor([3, 9, 1])
    tables[3, 0] = 4
    slots = [int(tables[s, t // 4]) * 4 + t % 4 for s, n in enumerate(lens) for t in range(n)]
    key, value = (random_rows(n, 2, 16, dtype)[:20] for n in (20, 21))
    pools = make_pools(layout, 11, 4, 2, 16, dtype)
    key_cache, value_cache = backend.place_pair(pools)
    placed = [backend.place(t) for t in (key, value, torch.tensor(slots), tables)]
    reshape_and_cache(placed[0], placed[1], key_cache, value_cache, placed[2])
    seq_lens = backend.place(torch.tensor(lens, dtype=torch.int32))
    got_key, got_value = gather_cache(key_cache, value_cache, placed[3], seq_lens)
    assert same_bits(got_key.cpu(), key)
    assert same_bits(got_value.cpu(), value)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_special_values_keep_their_bits(backend: Backend, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, tiny, tiny / 4, torch.finfo(dtype).max]
    rows = backend.place(torch.tensor(special).to(dtype).reshape(1, 1, 8))
    pools = backend.place_pair(make_pools("nhd", 1, 1, 1, 8, dtype))
    reshape_and_cache(rows, rows, *pools, backend.place(torch.tensor([0])))
    tables = backend.place(torch.zeros(1, 1, dtype=torch.int32))
    lens = backend.place(torch.ones(1, dtype=torch.int32))
    for result in (*(pool[0] for pool in pools), *gather_cache(*pools, tables, lens)):
        assert bool(result[0, 0, 4].isnan())  # which of its many bit patterns does not matter
        for part in (slice(4), slice(5, 8)):
            assert same_bits(result[..., part], rows[..., part])


def test_negative_slots_are_skipped(backend: Backend) -> None:
    # Through index arithmetic, slot -1 would be the last slot of the last block.
    slots = torch.tensor([0, -1, 5, -1, -(2**63)])
    rows = random_rows(5, 1, 8, torch.float32)
    for dtype in (torch.int64, torch.int32):
        pools = [torch.zeros(3, 4, 1, 8) for _ in range(2)]
        mine = backend.place_pair(pools)
        kept = slots.clamp(min=-(2**31)).to(dtype)
        key, mapping = backend.place(rows), backend.place(kept)
        reshape_and_cache(key, key, mine[0], mine[1], mapping)
        write_by_hand(pools[0], slots.tolist(), rows)
        assert torch.equal(mine[0].cpu(), pools[0])
        assert torch.equal(mine[1].cpu(), pools[0])


def test_only_mapped_tokens_are_written(backend: Backend) -> None:
    # The mapping is shorter than key, as in a padded CUDA graph; the rest of key is not read.
    rows = random_rows(8, 2, 8, torch.float16)
    rows[5:] = torch.nan
    pools = [torch.zeros(3, 4, 2, 8, dtype=torch.float16) for _ in range(2)]
    mine = backend.place_pair(pools)
    slots = [4, 0, 11, 7, 2]
    key = backend.place(rows)
    reshape_and_cache(key, key, mine[0], mine[1], backend.place(torch.tensor(slots)))
    write_by_hand(pools[0], slots, rows)
    for pool in mine:
        assert torch.equal(pool.cpu(), pools[0])


def test_nothing_to_write(backend: Backend) -> None:
    pools = backend.place_pair(make_pools("nhd", 2, 4, 1, 8, torch.float32))
    before = raw(pools[0])
    none = backend.place(torch.empty(0, dtype=torch.int64))
    for count in (0, 3):
        rows = backend.place(torch.ones(count, 1, 8))
        reshape_and_cache(rows, rows, *pools, none)
    assert torch.equal(raw(pools[0]), before)


def test_strided_slot_mapping(backend: Backend) -> None:
    wide = torch.tensor([[3, DEAD_BLOCK], [1, DEAD_BLOCK]])
    rows = random_rows(2, 1, 8, torch.float32)
    pool = torch.zeros(1, 4, 1, 8)
    mine = backend.place_pair([pool, pool.clone()])
    key = backend.place(rows)
    reshape_and_cache(key, key, mine[0], mine[1], backend.place(wide)[:, 0])
    write_by_hand(pool, [3, 1], rows)
    assert torch.equal(mine[0].cpu(), pool)


def test_drafts_follow_the_table_not_the_last_slot(backend: Backend) -> None:
    # Three tokens from position 3 on, blocks [7, 2] of 4: slots 31, 8 and 9.
    table, block_size = [7, 2], 4
    slots = [table[t // block_size] * block_size + t % block_size for t in (3, 4, 5)]
    assert slots == [31, 8, 9]
    pools = backend.place_pair(make_pools("nhd", 8, 4, 1, 8, torch.float32))
    ones = torch.ones(6, 1, 8)
    rows = backend.place(ones * torch.arange(6.0)[:, None, None])
    first = backend.place(torch.tensor([28, 29, 30]))
    reshape_and_cache(rows[:3], rows[:3], *pools, first)
    reshape_and_cache(rows[3:], rows[3:], *pools, backend.place(torch.tensor(slots)))
    tables = backend.place(torch.tensor([table], dtype=torch.int32))
    lens = backend.place(torch.tensor([6], dtype=torch.int32))
    key, _ = gather_cache(*pools, tables, lens)
    assert key[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_growing_to_a_third_block(backend: Backend) -> None:
    # Seven tokens in blocks [3, 0] of 4; the eighth fills block 0, the ninth opens block 5.
    pools = backend.place_pair(make_pools("nhd", 6, 4, 1, 8, torch.float32))
    table = [3, 0]
    for t in range(9):
        if t == 8:
            table.append(5)
        slot = table[t // 4] * 4 + t % 4
        row = backend.place(torch.full((1, 1, 8), float(t)))
        reshape_and_cache(row, row, *pools, backend.place(torch.tensor([slot])))
    assert pools[0][0, 3, 0, 0].item() == 7.0
    assert pools[0][5, 0, 0, 0].item() == 8.0
    tables = backend.place(torch.tensor([[*table, DEAD_BLOCK]], dtype=torch.int32))
    lens = backend.place(torch.tensor([9], dtype=torch.int32))
    key, value = gather_cache(*pools, tables, lens)
    assert key[:, 0, 0].tolist() == value[:, 0, 7].tolist() == [float(t) for t in range(9)]


def test_gather_pads_with_zeros(backend: Backend) -> None:
    pools = backend.place_pair([torch.ones(2, 4, 1, 8), torch.full((2, 4, 1, 8), 2.0)])
    tables = backend.place(torch.tensor([[1], [0]], dtype=torch.int64))
    lens = backend.place(torch.tensor([2, 1], dtype=torch.int64))
    key, value = gather_cache(*pools, tables, lens, total_tokens=5)
    assert key[:, 0, 0].tolist() == [1, 1, 1, 0, 0]
    assert value[:, 0, 0].tolist() == [2, 2, 2, 0, 0]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("out_dtype", FLOAT_DTYPES, ids=dtype_id)
def test_gather_converts(backend: Backend, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    rows = random_rows(4, 1, 8, dtype) * 3
    pools = backend.place_pair([rows[None].contiguous(), rows[None].contiguous()])
    tables = backend.place(torch.zeros(1, 1, dtype=torch.int32))
    lens = backend.place(torch.tensor([4], dtype=torch.int32))
    key, value = gather_cache(*pools, tables, lens, dtype=out_dtype)
    assert same_bits(key.cpu(), rows.to(out_dtype))
    assert same_bits(value.cpu(), rows.to(out_dtype))


@pytest.mark.parametrize("total_tokens", [None, 0, 3])
def test_gather_of_nothing(backend: Backend, total_tokens: int | None) -> None:
    pools = backend.place_pair(make_pools("nhd", 2, 4, 1, 8, torch.float32))
    for num_seqs in (0, 2):
        tables = backend.place(torch.empty((num_seqs, 0), dtype=torch.int32))
        lens = backend.place(torch.zeros(num_seqs, dtype=torch.int32))
        key, _ = gather_cache(*pools, tables, lens, total_tokens=total_tokens)
        assert key.shape == (total_tokens or 0, 1, 8)
        assert bool((key == 0).all())
