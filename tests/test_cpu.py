"""What only the CPU backend promises: bits without regard to threads, chunks, and its memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import LAYOUTS, Case, attend, build
from support import DTYPE_PAIRS, dtype_id, same_bits

from paged_attn import PagedKVCache, copy_blocks, reshape_and_cache
from paged_attn._memory import HUGE_PAGE_BYTES, zeros_in_huge_pages

pytestmark = pytest.mark.backends("cpu")
# Tokens of a tile and of a chunk: csrc/cpu/plan.h, csrc/cpu/plan.cpp.
TILE, CHUNK = 32, 256
EDGES = tuple(edge + step for edge in (TILE, CHUNK, 2 * CHUNK) for step in (-1, 0, 1))
THREADS = (1, 2, 3, 7)

LONG = (
    Case("long", seq_lens=EDGES),
    Case("one_sequence", seq_lens=(1000,), num_kv_heads=4),
    Case("one_head", seq_lens=(1000, 3), num_q_heads=8, num_kv_heads=1),
    Case("uneven", seq_lens=(1, 900, 0, 17, 600), sinks=True, dtype=torch.bfloat16),
    Case("long_windows", seq_lens=(900, 300), query_lens=5, sliding_window=260, alibi=True),
    Case("long_ragged", seq_lens=(700, 40, 0, 520), query_lens=(9, 0, 2, 1), padding=3),
    Case("many_rows", seq_lens=(600, 33), query_lens=40, num_q_heads=8, head_dim=128),
    Case("not_causal", seq_lens=(530, 70), query_lens=35, causal=False, softcap=5.0),
)
long_cases = pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Tests may set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@long_cases
def test_threads_do_not_change_bits(backend: Backend, case: Case) -> None:
    inputs = build(case)
    results = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        out, lse = attend(inputs.on(backend))
        assert_accurate(out, inputs, lse)
        results.append((out, lse))
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(lse, results[0][1])


@pytest.mark.parametrize("query_lens", [None, 3])
def test_the_batch_does_not_change_bits(backend: Backend, query_lens: int | None) -> None:
    torch.set_num_threads(2)
    case = Case("batch", seq_lens=(900, 3, 257, 512), query_lens=query_lens, sinks=True)
    inputs = build(case).on(backend)
    together, lse = attend(inputs)
    for seq in range(4):
        pick = slice(seq, seq + 1)
        one = inputs.replace(
            query=inputs.query[pick],
            block_tables=inputs.block_tables[pick],
            seq_lens=inputs.seq_lens[pick],
        )
        alone, alone_lse = attend(one)
        assert same_bits(alone, together[pick])
        assert same_bits(alone_lse, lse[pick])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPE_PAIRS, ids=dtype_id)
def test_every_dtype_in_every_layout(
    backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, layout: str
) -> None:
    case = Case(
        "dtype_and_layout",
        seq_lens=(290, 31, 65),
        dtype=dtype,
        kv_dtype=kv_dtype,
        layout=layout,
        scale_kind="token" if kv_dtype != dtype else "none",
        num_q_heads=10,
        head_dim=72,
        block_size=5,
    )
    inputs = build(case)
    out, lse = attend(inputs.on(backend))
    assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_row_does_not_see_does_not_reach_it(backend: Backend, bad: float) -> None:
    # Unlike on tensor cores: a hidden value is not multiplied by 0, it is not read.
    inputs = build(Case("hidden", seq_lens=(50,), query_lens=3, dtype=torch.float32))
    clean, _ = attend(inputs.on(backend))
    block = int(inputs.block_tables[0, 49 // 16])
    inputs.value_cache[block, 49 % 16] = bad
    out, _ = attend(inputs.on(backend))
    assert same_bits(out[:, :2], clean[:, :2])
    assert not bool(out[:, 2].isfinite().any())


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 50.0])
def test_softcap_of_small_and_large_scores(backend: Backend, softcap: float) -> None:
    for scale in (1e-4, 0.1, 3.0, 1e3):
        case = Case("softcaps", softcap=softcap, scale=scale, dtype=torch.float32)
        inputs = build(case)
        out, lse = attend(inputs.on(backend))
        assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_copied_byte_for_byte(backend: Backend, layout: str) -> None:
    case = Case("bytes", layout=layout, dtype=torch.bfloat16, num_kv_heads=3, head_dim=24)
    inputs = build(case)
    bits = torch.randint(-(2**15), 2**15, (20, 3, 24), dtype=torch.int16)
    rows = bits.view(torch.bfloat16)  # NaN of all kinds among them
    slots = torch.randperm(inputs.key_cache.shape[0] * 16)[:20]
    reshape_and_cache(rows, rows, inputs.key_cache, inputs.value_cache, slots)
    for pool in (inputs.key_cache, inputs.value_cache):
        stored = pool[slots // 16, slots % 16]
        assert torch.equal(stored.view(torch.int16), bits)


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_of_many_blocks(backend: Backend, threads: int) -> None:
    torch.set_num_threads(threads)
    pools = [torch.randn(64, 16, 4, 128) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    copy_blocks(pools[:1], pools[1:], [(i, i + 32) for i in range(32)])
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[32:], old[:32])
        assert torch.equal(pool[:32], old[:32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32], ids=dtype_id)
def test_memory_in_huge_pages(dtype: torch.dtype) -> None:
    pool = zeros_in_huge_pages((3, 2, 1000, 16, 4, 64), dtype)
    assert pool.shape == (3, 2, 1000, 16, 4, 64)
    assert pool.dtype == dtype
    assert pool.is_contiguous()
    assert pool.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not bool(pool.view(torch.uint8).any())
    pool.fill_(1)
    part = pool[2, 1]
    del pool  # the memory lives as long as a view of it
    assert bool((part == 1).all())


def test_pools_of_a_cache_are_in_huge_pages() -> None:
    cache = PagedKVCache(2, 64, 16, 4, 64, dtype=torch.float32, num_host_blocks=64)
    assert cache.key_caches[0].data_ptr() % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("shape", [(0,), (4, 0, 8), (3, 5)])
def test_little_memory_is_torchs(shape: tuple[int, ...]) -> None:
    tensor = zeros_in_huge_pages(shape, torch.float16)
    assert torch.equal(tensor, torch.zeros(shape, dtype=torch.float16))
