"""Offsets beyond 32 bits and counts beyond 16: what wraps must not.

The large tensors are address space alone: pages that nothing touches are never there. On CUDA they
would have to be real, so tests that need more than a few GiB of them are skipped.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import emulator
import pytest
import torch
from backends import EMULATED, Backend
from cases import make_pools
from support import raw
from torch import Tensor

import paged_attn
from paged_attn import (
    copy_blocks,
    gather_cache,
    merge_states,
    reshape_and_cache,
    swap_blocks,
)

GIB = 1 << 30
MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on
FP8 = torch.float8_e4m3fn


def address_space(backend: Backend, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """That many bytes of zeros, one dimension; not copied into the emulator's memory."""
    if backend.name == "cuda":
        if num_bytes > 9 * GIB or torch.cuda.mem_get_info()[0] < 4 * num_bytes:
            pytest.skip(f"needs {num_bytes / GIB:.0f} GiB")
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cuda").view(dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=dtype)


def spread(
    backend: Backend, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A tensor of zeros with these strides, however far they reach."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    size = extent * torch.empty(0, dtype=dtype).element_size()
    return address_space(backend, size + -size % 8, dtype).as_strided(shape, stride)


def attention(*args: Tensor, **kwargs: Any) -> Tensor:
    """paged_attention without an LSE."""
    call: Any = paged_attn.paged_attention
    result: Tensor = call(*args, **kwargs)
    return result


def index(backend: Backend, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return backend.place(torch.tensor(values, dtype=dtype))


def check_block(backend: Backend, key_cache: Tensor, value_cache: Tensor, block: int) -> None:
    """Writes, reads, gathers and copies `block`; block 0, where a wrapped offset ends, is left."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    rows = torch.full((1, num_kv_heads, head_dim), 3.0, dtype=torch.float16)
    rows[:, -1] = 5.0
    placed = backend.place(rows)
    slot = index(backend, [block * block_size], torch.int64)
    zero = [cache[0].clone() for cache in (key_cache, value_cache)]
    reshape_and_cache(placed, placed, key_cache, value_cache, slot)
    query = backend.place(torch.zeros(1, num_kv_heads, head_dim, dtype=torch.float16))
    tables, lens = index(backend, [[block]]), index(backend, [1])
    out = attention(query, key_cache, value_cache, tables, lens)
    assert torch.equal(out, placed)
    for gathered in gather_cache(key_cache, value_cache, tables, lens, total_tokens=1):
        assert torch.equal(gathered.to(rows.dtype), placed)
    copy_blocks(key_cache, value_cache, [(block, 1)])
    for cache, before in zip((key_cache, value_cache), zero, strict=True):
        for written in (block, 1):
            assert torch.equal(cache[written, 0].to(rows.dtype), placed[0])
        assert torch.equal(cache[0].view(torch.uint8), before.view(torch.uint8)), "offset wrapped"


@pytest.mark.parametrize("block", [32768, 65536])
def test_many_blocks(backend: Backend, block: int) -> None:
    # 65,536 elements a block: block 65,536 starts at element 2^32, block 32,768 at 2^31.
    shape = (65537, 16, 32, 128)
    key_cache, value_cache = (
        address_space(backend, 65537 << 16, FP8).view(shape) for _ in range(2)
    )
    check_block(backend, key_cache, value_cache, block)


@pytest.mark.parametrize(
    ("block_stride", "block"),
    [(1 << 20, 4096), (1 << 20, 2048), (276480, 7768), (1039680, 2066), (1 << 30, 4)],
)
@pytest.mark.parametrize("dtype", [FP8, torch.float16])
def test_large_block_stride(
    backend: Backend, block_stride: int, block: int, dtype: torch.dtype
) -> None:
    # Few blocks, far apart, as where all layers share a page.
    shape, stride = (block + 1, 4, 2, 16), (block_stride, 32, 16, 1)
    key_cache, value_cache = (spread(backend, shape, stride, dtype) for _ in range(2))
    check_block(backend, key_cache, value_cache, block)


def test_large_token_and_head_strides(backend: Backend) -> None:
    for stride in ((16, 1 << 30, 48, 1), (16, 48, 1 << 31, 1)):
        shape = (3, 5, 3, 16) if stride[1] > stride[2] else (3, 2, 3, 16)
        pools = spread(backend, shape, stride, FP8), spread(backend, shape, stride, FP8)
        rows = torch.arange(1.0, 16.0).reshape(5, 3, 1).expand(5, 3, 16)[: shape[1]].half()
        slots = index(backend, [shape[1] + t for t in range(shape[1])], torch.int64)
        placed = backend.place(rows.contiguous())
        reshape_and_cache(placed, placed, *pools, slots)
        key, value = gather_cache(
            *pools, index(backend, [[1]]), index(backend, [shape[1]]), dtype=torch.float16
        )
        assert torch.equal(key.cpu(), rows)
        assert torch.equal(value.cpu(), rows)
        query = backend.place(torch.zeros(1, 3, 16, dtype=torch.float16))
        out = attention(query, *pools, index(backend, [[1]]), index(backend, [shape[1]]))
        torch.testing.assert_close(out[0].cpu(), rows.float().mean(0).half())


def test_large_scale_stride(backend: Backend) -> None:
    pools = backend.place_pair(make_pools("nhd", 5, 4, 1, 16, FP8))
    scales = [spread(backend, (5, 4, 1), (1 << 29, 1, 1), torch.float32) for _ in range(2)]
    rows = backend.place(torch.full((1, 1, 16), 7.0))
    reshape_and_cache(
        rows, rows, *pools, index(backend, [16]), k_scale=scales[0], v_scale=scales[1]
    )
    assert scales[0][4, 0, 0].item() == pytest.approx(7 / 448)
    assert scales[0][:4].count_nonzero().item() == 0
    query = backend.place(torch.zeros(1, 1, 16))
    out = attention(
        query,
        *pools,
        index(backend, [[4]]),
        index(backend, [1]),
        k_scale=scales[0],
        v_scale=scales[1],
    )
    assert torch.equal(out, rows)


def test_large_query_and_out_strides(backend: Backend) -> None:
    # 4 * 2^30 elements from row 0 to row 4.
    for shape, stride in (
        ((5, 1, 16), (1 << 30, 16, 1)),
        ((1, 5, 16), (16, 1 << 30, 1)),
        ((5, 1, 1, 16), (1 << 30, 16, 16, 1)),
        ((1, 5, 1, 16), (16, 1 << 30, 16, 1)),
    ):
        num_seqs, num_heads = shape[0], shape[-2]
        query = spread(backend, shape, stride, torch.float16)
        out = spread(backend, shape, stride, torch.float16)
        value = torch.arange(1.0, 6.0)[:num_seqs].reshape(-1, 1, 1, 1).expand(-1, 8, 1, 16).half()
        pool = backend.place(value.contiguous())
        attention(
            query,
            torch.zeros_like(pool),
            pool,
            index(backend, [[seq] for seq in range(num_seqs)]),
            index(backend, [8] * num_seqs),
            out=out,
        )
        want = torch.arange(1.0, num_seqs + 1).reshape(-1, *[1] * (len(shape) - 1))
        assert torch.equal(out.cpu().float(), want.expand(shape).contiguous()), (shape, num_heads)


def test_large_input_strides_of_a_write(backend: Backend) -> None:
    rows = spread(backend, (5, 1, 16), (1 << 30, 16, 1), torch.float16)
    rows[4] = 9.0
    pools = backend.place_pair([torch.zeros(2, 4, 1, 16, dtype=torch.float16) for _ in range(2)])
    reshape_and_cache(rows, rows, *pools, index(backend, list(range(5)), torch.int64))
    for pool in pools:
        assert pool.flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 0, 0, 9, 0, 0, 0]


def test_large_table_stride(backend: Backend) -> None:
    tables = spread(backend, (5, 1), (1 << 30, 1), torch.int32)
    tables[4] = 1
    pool = backend.place(torch.arange(2.0)[:, None].expand(2, 8).reshape(2, 1, 1, 8).contiguous())
    query = backend.place(torch.zeros(5, 1, 8))
    out = attention(query, pool, pool, tables, index(backend, [1] * 5))
    assert out[:, 0, 0].tolist() == [0, 0, 0, 0, 1]


def too_many(backend: Backend) -> int:
    """More than the y and z dimensions of a CUDA grid take, 65,535.

    Where a thread is a fiber, a number that a grid of two multiprocessors must walk over.
    """
    if backend.name in EMULATED:
        hooks = backend.name == "hooks"
        emulator.configure(sms=1 if hooks else 2, hooks=hooks)
        return 300 if hooks else 1000
    return 65536


def test_many_sequences(backend: Backend) -> None:
    count = too_many(backend)
    pool = backend.place(torch.full((1, 1, 1, 8), 2.0))
    query = backend.place(torch.zeros(count, 1, 8))
    out = torch.full_like(query, torch.nan)
    tables = backend.place(torch.zeros(1, 1, dtype=torch.int32)).expand(count, 1)
    lens = backend.place(torch.ones(count, dtype=torch.int32))
    attention(query, pool, pool, tables, lens, out=out)
    assert bool((out == 2).all())


def test_many_heads(backend: Backend) -> None:
    count = too_many(backend)
    heads = torch.arange(float(count))[:, None].expand(-1, 8).contiguous()
    pool = backend.place(heads.view(1, 1, count, 8))
    query = backend.place(torch.zeros(1, count, 8))
    out = attention(query, pool, pool, index(backend, [[0]]), index(backend, [1]))
    assert torch.equal(out, pool[0])


def test_many_tokens_written_and_gathered(backend: Backend) -> None:
    count = too_many(backend)
    rows = torch.arange(float(count))[:, None].expand(-1, 8).reshape(count, 1, 8).contiguous()
    pools = backend.place_pair([torch.zeros(count, 1, 1, 8) for _ in range(2)])
    slots = backend.place(torch.arange(count - 1, -1, -1))
    placed = backend.place(rows)
    reshape_and_cache(placed, placed, *pools, slots)
    for pool in pools:
        assert torch.equal(pool[:, 0].flip(0).cpu(), rows)
    tables = backend.place(torch.arange(count - 1, -1, -1, dtype=torch.int32)[:, None])
    lens = backend.place(torch.ones(count, dtype=torch.int32))
    for gathered in gather_cache(*pools, tables, lens, total_tokens=count):
        assert torch.equal(gathered.cpu(), rows)


def test_many_rows_merged(backend: Backend) -> None:
    count = too_many(backend)
    # On the GPU, the offset of the last element of 2^32 is not tested here: it takes 8 GiB a side.
    a, b = (backend.place(torch.full((count, 2, 8), value)) for value in (1.0, 3.0))
    lse = backend.place(torch.zeros(count, 2))
    out, _ = merge_states(a, lse, b, lse)
    assert bool((out == 2).all())


def test_many_blocks_copied(backend: Backend) -> None:
    count = too_many(backend)
    pools = backend.place_pair(
        [torch.arange(16.0 * count).view(-1, 1, 1, 8) // 8 for _ in range(2)]
    )
    source = torch.arange(count)
    copy_blocks(pools[0], pools[1], torch.stack([source, source + count], dim=1))
    for pool in pools:
        assert torch.equal(pool[count:].cpu(), pool[:count].cpu())
        assert torch.equal(pool[:count, 0, 0, 3].cpu(), source.float())


@pytest.mark.backends("cpu")
def test_swap_beyond_32_bits(backend: Backend) -> None:
    # The copies are torch's own: one backend tells all.
    src = spread(backend, (5, 4, 8), (1 << 30, 8, 1), torch.float16)
    src[4] = 5.0
    dst = torch.zeros(2, 4, 8, dtype=torch.float16)
    before = raw(dst[0:1].clone())
    swap_blocks(src, dst, [(4, 1)])
    assert bool((dst[1] == 5).all())
    assert torch.equal(raw(dst[0:1].clone()), before)
