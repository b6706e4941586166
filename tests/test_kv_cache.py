"""PagedKVCache: what is written through it is what attention over it sees, shared or not."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from paged_attn import OutOfBlocksError, PagedKVCache, gather_cache, reference
from paged_attn.kv_cache import Batch

LAYERS, HEADS, DIM = 2, 2, 16

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "hnd": {"layout": "HND"},
    "bf16": {"dtype": torch.bfloat16},
    "fp8": {"kv_dtype": torch.float8_e4m3fn},
    "fp8 scaled": {"kv_dtype": torch.float8_e5m2, "k_scale": 0.5, "v_scale": 0.25},
    "int8 per token": {"kv_dtype": torch.int8, "k_scale": "per_token", "v_scale": "per_token"},
    "fp8 per token, hnd": {
        "kv_dtype": torch.float8_e4m3fn,
        "k_scale": "per_token",
        "v_scale": "per_token",
        "layout": "HND",
    },
}


def make(num_blocks: int = 8, block_size: int = 4, **kwargs: Any) -> PagedKVCache:
    kwargs = {"dtype": torch.float32, **kwargs}
    return PagedKVCache(LAYERS, num_blocks, block_size, HEADS, DIM, **kwargs)


def rows_of(tokens: list[int], layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values that name their token: each [len(tokens), HEADS, DIM]."""
    token = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
    pattern = torch.arange(HEADS * DIM).reshape(HEADS, DIM) % 5 - 2 + layer
    return (pattern + 8 * token).to(dtype), (pattern - 8 * token).to(dtype)


def write(cache: PagedKVCache, batch: Batch, tokens: list[int]) -> None:
    for layer in range(LAYERS):
        key, value = rows_of(tokens, layer, cache.dtype)
        cache.write(layer, key, value, batch)


def read(cache: PagedKVCache, seq: int, layer: int) -> tuple[Tensor, Tensor]:
    table = torch.tensor([cache.manager.block_table(seq)], dtype=torch.int32)
    return gather_cache(
        cache.key_caches[layer],
        cache.value_caches[layer],
        table,
        torch.tensor([cache.manager.seq_len(seq)], dtype=torch.int32),
        k_scale=cache.k_scales[layer],
        v_scale=cache.v_scales[layer],
    )


def assert_reads(cache: PagedKVCache, seq: int, tokens: list[int]) -> None:
    exact = cache.kv_dtype == cache.dtype
    for layer in range(LAYERS):
        for got, expected in zip(
            read(cache, seq, layer), rows_of(tokens, layer, cache.dtype), strict=True
        ):
            torch.testing.assert_close(
                got.to(cache.dtype),
                expected,
                rtol=0 if exact else 0.125,
                atol=0 if exact else 0.5,
            )


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest) -> PagedKVCache:
    return make(**KINDS[request.param])


def test_what_is_written_is_read(cache: PagedKVCache) -> None:
    first, second = cache.add(), cache.add()
    write(cache, cache.step([first, second], [5, 2]), [1, 2, 3, 4, 5, 11, 12])
    write(cache, cache.step([second, first]), [13, 6])
    assert_reads(cache, first, [1, 2, 3, 4, 5, 6])
    assert_reads(cache, second, [11, 12, 13])


def test_forks_are_isolated_in_all_layers(cache: PagedKVCache) -> None:
    parent = cache.add()
    write(cache, cache.step([parent], [5]), [1, 2, 3, 4, 5])
    children = [cache.fork(parent) for _ in range(2)]
    write(cache, cache.step([parent, *children]), [6, 7, 8])
    for seq, last in zip([parent, *children], [6, 7, 8], strict=True):
        assert_reads(cache, seq, [1, 2, 3, 4, 5, last])
    stats = cache.manager.stats()
    assert (stats.blocks_used, stats.blocks_shared, stats.copies) == (4, 1, 2)


def test_append_copies_too(cache: PagedKVCache) -> None:
    parent = cache.add()
    write(cache, cache.step([parent], [2]), [1, 2])
    child = cache.fork(parent)
    assert cache.append(child) == [4 + 2]
    write(cache, cache.batch([child]), [3])
    assert_reads(cache, child, [1, 2, 3])
    assert_reads(cache, parent, [1, 2])


def test_rejected_drafts_do_not_touch_the_other_owner(cache: PagedKVCache) -> None:
    seq = cache.add()
    write(cache, cache.step([seq], [4]), [1, 2, 3, 4])
    other = cache.fork(seq)
    write(cache, cache.step([seq], [5]), [5, 6, 7, 8, 9])
    cache.truncate(seq, 2)
    write(cache, cache.step([seq]), [10])
    assert_reads(cache, seq, [1, 2, 10])
    assert_reads(cache, other, [1, 2, 3, 4])


def test_attend_agrees_with_the_reference(cache: PagedKVCache) -> None:
    seqs = [cache.add(), cache.add()]
    write(cache, cache.step(seqs, [6, 1]), [1, 2, 3, 4, 5, 6, 7])
    batch = cache.step(seqs, [2, 3])
    write(cache, batch, [8, 9, 10, 11, 12])
    generator = torch.Generator().manual_seed(0)
    query = (torch.randn(5, 2 * HEADS, DIM, generator=generator) / 32).to(cache.dtype)
    for layer in range(LAYERS):
        out, lse = cache.attend(layer, query, batch, softcap=3.0, return_lse=True)
        expected, expected_lse = reference.paged_attention(
            query,
            cache.key_caches[layer],
            cache.value_caches[layer],
            batch.block_tables,
            batch.seq_lens,
            cu_query_lens=batch.cu_query_lens,
            softcap=3.0,
            k_scale=cache.k_scales[layer],
            v_scale=cache.v_scales[layer],
            return_lse=True,
        )
        tolerance = 2**-7 if cache.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_uniform_query_lens_take_four_dimensions() -> None:
    cache = make()
    seqs = [cache.add(), cache.add()]
    batch = cache.step(seqs, 3)
    key, value = rows_of([1, 2, 3, 4, 5, 6], 0, torch.float32)
    cache.write(0, key.reshape(2, 3, HEADS, DIM), value.reshape(2, 3, HEADS, DIM), batch)
    query = torch.randn(6, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    flat = cache.attend(0, query, batch)
    assert torch.equal(cache.attend(0, query.reshape(2, 3, HEADS, DIM), batch).flatten(0, 1), flat)


def test_batch_describes_the_step() -> None:
    cache = make(num_blocks=8, block_size=4)
    first, second = cache.add(6), cache.add()
    batch = cache.step([first, second], [1, 3])
    assert batch.slot_mapping.tolist() == [6, 8, 9, 10]
    assert batch.block_tables.tolist() == [[0, 1], [2, -1]]
    assert batch.seq_lens.tolist() == [7, 3]
    assert batch.cu_query_lens is not None
    assert batch.cu_query_lens.tolist() == [0, 1, 4]
    assert batch.slot_mapping.dtype == torch.int64
    for tensor in (batch.block_tables, batch.seq_lens, batch.cu_query_lens):
        assert tensor.dtype == torch.int32
    assert cache.step([first, second]).cu_query_lens is None
    assert cache.batch([first], 8).slot_mapping.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    empty = cache.step([])
    assert empty.block_tables.shape == (0, 0)
    assert empty.slot_mapping.shape == empty.seq_lens.shape == (0,)


def test_a_step_is_for_all_sequences_or_none() -> None:
    cache = make(num_blocks=3)
    seqs = [cache.add(4), cache.add(4)]
    with pytest.raises(OutOfBlocksError, match="needs 2 blocks, 1 of 3 are free"):
        cache.step(seqs)
    assert [cache.manager.seq_len(seq) for seq in seqs] == [4, 4]
    cache.free(seqs[0])
    cache.step(seqs[1:], 8)
    with pytest.raises(KeyError, match="no sequence"):
        cache.step(seqs)
    with pytest.raises(ValueError, match="one entry for each of 1"):
        cache.step(seqs[1:], [1, 1])
    with pytest.raises(ValueError, match="query_lens must be at most 12 for sequence"):
        cache.batch(seqs[1:], 13)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_memory_numbers(layout: Literal["NHD", "HND"]) -> None:
    cache = make(num_blocks=8, layout=layout)
    assert cache.bytes_per_token == 2 * LAYERS * HEADS * DIM * 4
    assert cache.bytes_total == 8 * 4 * cache.bytes_per_token
    seq = cache.add(5)
    cache.fork(seq)
    assert cache.bytes_used == 2 * 4 * cache.bytes_per_token
    quantised = make(
        num_blocks=8, layout=layout, kv_dtype=torch.int8, k_scale="per_token", v_scale="per_token"
    )
    assert quantised.bytes_per_token == 2 * LAYERS * HEADS * (DIM + 4)
    assert quantised.bytes_total == 8 * 4 * quantised.bytes_per_token
    assert make(num_blocks=0).bytes_total == 0


def test_one_allocation_for_all_layers() -> None:
    for layout in ("NHD", "HND"):
        cache = make(layout=layout)
        pools = cache.key_caches + cache.value_caches
        assert cache.num_layers == LAYERS
        assert {pool.shape for pool in pools} == {(8, 4, HEADS, DIM)}
        assert len({pool.stride() for pool in pools}) == 1
        assert len({pool.untyped_storage().data_ptr() for pool in pools}) == 1


@pytest.mark.parametrize(
    ("message", "kwargs"),
    [
        ("both be", {"kv_dtype": torch.int8, "k_scale": "per_token", "v_scale": 1.0}),
        ("scales per token", {"k_scale": "per_token", "v_scale": "per_token"}),
        ("k_scale must be given for an int8", {"kv_dtype": torch.int8}),
        ("v_scale must be given for an int8", {"kv_dtype": torch.int8, "k_scale": 1.0}),
        ("k_scale must be positive", {"kv_dtype": torch.int8, "k_scale": 0.0, "v_scale": 1.0}),
        ("v_scale must be positive", {"v_scale": float("nan")}),
        ("k_scale must be a float", {"k_scale": "per_head"}),
        ("layout", {"layout": "DHN"}),
        ("num_q_heads must be a multiple", {"num_q_heads": 3}),
        ("block_size", {"block_size": 0}),
        ("num_blocks", {"num_blocks": -1}),
    ],
)
def test_arguments_that_do_not_fit(message: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


def test_head_counts_that_do_not_fit() -> None:
    for name, sizes in {
        "num_layers": (0, 1, 8),
        "num_kv_heads": (1, 0, 8),
        "head_dim": (1, 1, 0),
    }.items():
        layers, heads, dim = sizes
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            PagedKVCache(layers, 1, 1, heads, dim, dtype=torch.float32)
