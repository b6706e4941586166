"""What must not be read, or must not count: dead slots, dead table entries, neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from backends import Backend
from cases import attend, store_rows
from support import DTYPE_PAIRS, attend_one, dtype_id, one_sequence, ramp
from torch import Tensor

INF = math.inf
CHUNKS = (None, 1, 4, 6)


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPE_PAIRS, ids=dtype_id)
def test_nan_in_dead_slots(
    backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, chunk_size: int | None
) -> None:
    # A weight of 0 times NaN is NaN. Every remainder of the length by the block size.
    for length in range(1, 10):
        values = [1.0 + t % 4 for t in range(length)]
        out, lse = attend_one(
            backend, values, dtype=dtype, kv_dtype=kv_dtype, chunk_size=chunk_size
        )
        assert out == pytest.approx([sum(values) / length], rel=1e-2)
        assert lse == pytest.approx([math.log(length)], abs=1e-5)


@pytest.mark.parametrize("poisoned", [INF, -INF])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.float8_e5m2], ids=str)
def test_infinity_in_dead_slots(backend: Backend, kv_dtype: torch.dtype, poisoned: float) -> None:
    dtype = torch.float32 if kv_dtype == torch.float8_e5m2 else kv_dtype
    inputs = one_sequence([1.0, 2.0, 3.0, 4.0, 5.0], dtype=dtype, kv_dtype=kv_dtype)
    live = torch.zeros(12 * 4, dtype=torch.bool)
    live[[28, 29, 30, 31, 8]] = True  # blocks 7 and 2
    dead = (~live).nonzero().flatten()
    for pool in (inputs.key_cache, inputs.value_cache):
        store_rows(pool, dead, torch.full((len(dead), 1, 8), poisoned).to(kv_dtype))
    out, _ = attend(inputs.on(backend))
    assert out.flatten().tolist() == pytest.approx([3.0] * 8)


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_past_the_end_have_no_weight(
    backend: Backend, causal: bool, chunk_size: int | None
) -> None:
    # Zero-filled lanes up to a tile's edge would weigh e^0 each: 13 tokens would give 13/16.
    edges = {tile + step for tile in (8, 16, 32, 64, 128, 256) for step in (-1, 0, 1)}
    lengths = [13, *sorted(edges)] if chunk_size is None else [13, 15, 16, 17, 33]
    for length in lengths:
        out, lse = attend_one(backend, [1.0] * length, causal=causal, chunk_size=chunk_size)
        assert out == pytest.approx([1.0], rel=1e-6)
        assert lse == pytest.approx([math.log(length)], abs=1e-5)


def test_a_full_last_block_counts_in_full(backend: Backend) -> None:
    for length in (4, 8, 12):
        out, _ = attend_one(backend, ramp(length))
        assert out == pytest.approx([(length - 1) / 2])


def test_dead_table_entries_of_any_value(backend: Backend) -> None:
    inputs = one_sequence(ramp(5))
    for dead in (-1, 12, 2**31 - 1, -(2**31)):
        tables = inputs.block_tables.clone()
        tables[0, 2:] = dead
        out, _ = attend(inputs.replace(block_tables=tables).on(backend))
        assert out[0, 0, 0].item() == pytest.approx(2.0)


def test_empty_sequence_between_others(backend: Backend) -> None:
    # An early return that leaves the caller's out unwritten would keep its NaN.
    inputs = one_sequence([1.0, 2.0, 6.0], dtype=torch.float16)
    tables = inputs.block_tables.repeat(3, 1)
    tables[0] = tables[2] = 2147480000
    inputs = inputs.replace(
        query=inputs.query.repeat(3, 1, 1),
        block_tables=tables,
        seq_lens=torch.tensor([0, 3, 0], dtype=torch.int32),
    ).on(backend)
    for chunk_size in (None, 2):
        out = torch.full_like(inputs.query, math.nan)
        _, lse = attend(inputs, out=out, chunk_size=chunk_size)
        assert out[:, 0, 0].tolist() == [0.0, 3.0, 0.0]
        assert lse[:, 0].tolist() == [-INF, pytest.approx(math.log(3)), -INF]


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_queries_before_the_first_token_see_nothing(
    backend: Backend, chunk_size: int | None
) -> None:
    # Four queries on two tokens, aligned at the end: they see 0, 0, 1 and 2 keys.
    out, lse = attend_one(backend, [3.0, 5.0], query_len=4, chunk_size=chunk_size)
    assert out == pytest.approx([0.0, 0.0, 3.0, 4.0])
    assert lse == pytest.approx([-INF, -INF, 0.0, math.log(2)])


def test_no_sequence_reads_another(backend: Backend) -> None:
    # Table rows are wider than used; a row's dead part would lead into NaN blocks.
    inputs = one_sequence(ramp(9))
    wide = torch.full((2, 5), 3, dtype=torch.int32)  # block 3 holds NaN
    wide[0, :3], wide[1, :1] = inputs.block_tables[0, :3], inputs.block_tables[0, 0]
    two = inputs.replace(
        query=inputs.query.repeat(2, 1, 1),
        block_tables=wide,
        seq_lens=torch.tensor([9, 4], dtype=torch.int32),
    )
    out, _ = attend(two.on(backend))
    assert out[:, 0, 0].tolist() == pytest.approx([4.0, 1.5])


def test_visible_nan_is_not_hidden(backend: Backend) -> None:
    # What a row does see acts as it is: a NaN in a live slot must reach the output.
    inputs = one_sequence(ramp(5))
    block = int(inputs.block_tables[0, 1])
    inputs.value_cache[block, 0, 0, 3] = math.nan
    out, _ = attend(inputs.on(backend))
    assert out[0, 0].isnan().tolist() == [i == 3 for i in range(8)]
    inputs = one_sequence(ramp(5))
    inputs.key_cache[block, 0] = math.nan
    out, lse = attend(inputs.on(backend))
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


def test_where_the_literature_puts_a_token(backend: Backend) -> None:
    # Blocks of 4, ten tokens, table [7, 2, 11]: token 6 is at offset 2 of block 2.
    inputs = one_sequence(ramp(10))
    assert inputs.block_tables[0, :3].tolist() == [7, 2, 11]
    assert inputs.value_cache[2, 2, 0, 0].item() == 6.0
    logits = [0.0] * 10
    logits[6] = 100.0
    out, _ = attend_one(backend, ramp(10), logits=logits)
    assert out == pytest.approx([6.0])
    inputs.value_cache[2, 2] = 106.0
    moved: Tensor = attend(inputs.on(backend))[0]
    assert moved[0, 0, 0].item() == pytest.approx(4.5 + 10.0)
