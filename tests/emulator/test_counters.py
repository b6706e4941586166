"""What the hook build counts, on kernels whose counts are known, and on the product's."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from cases import make_pools

import emulator
from emulator import Totals
from emulator.checks import names_of
from emulator.harness import Selftest, line_of
from paged_attn import copy_blocks, reshape_and_cache


@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
@pytest.mark.parametrize(
    ("stride", "sectors", "waves"), [(1, 4, 1), (2, 8, 2), (4, 16, 4), (8, 32, 8), (32, 32, 32)]
)
def test_strided_access(
    hooked: Selftest, schedule: str, stride: int, sectors: int, waves: int
) -> None:
    hooked.runtime.configure(schedule=schedule)
    with hooked.runtime.counted() as counters:
        data = hooked.zeros(1024)
        assert hooked.error("strided_copy", data, option=stride, threads=32, smem=4096) is None
    (launch,) = counters.launches
    assert launch.read == Totals(requests=1, bytes=128, transactions=sectors, ideal=4)
    assert launch.written == Totals()
    assert launch.shared == Totals(requests=1, bytes=128, transactions=waves, ideal=1)
    assert launch.instructions == {"cta_barrier": 1}
    place = f"tests/emulator/kernels/{line_of('strided_copy', 'planted.cpp')}"
    assert {line.place for line in launch.lines} == {(place,)}
    assert place in counters.table()


def test_broadcast_is_one_sector(hooked: Selftest) -> None:
    with hooked.runtime.counted() as counters:
        assert hooked.error("strided_copy", hooked.zeros(8), threads=1, smem=4096) is None
    assert counters.launches[0].read == Totals(1, 4, 1, 1)


def test_vectors(hooked: Selftest) -> None:
    with hooked.runtime.counted() as counters:
        for ctas in (1, 1):
            data = hooked.zeros(256)
            assert hooked.error("vector_copy", data, ctas=ctas, threads=32, smem=512) is None
    # Nothing is counted before or after.
    assert hooked.error("vector_copy", hooked.zeros(256), threads=32, smem=512) is None
    assert len(counters.launches) == 2
    for launch in counters.launches:
        assert launch.read == Totals(requests=1, bytes=512, transactions=16, ideal=16)
        assert launch.written == Totals(requests=1, bytes=512, transactions=16, ideal=16)
        # Written and read, four waves each: a quarter of the lanes at a time.
        assert launch.shared == Totals(requests=2, bytes=1024, transactions=8, ideal=8)
        assert launch.instructions == {"sync_warp": 1}


def test_reduction(hooked: Selftest) -> None:
    with hooked.runtime.counted() as counters:
        sums = hooked.zeros(5)
        assert hooked.error("block_reduction", sums, ctas=5, threads=128, smem=512) is None
    (launch,) = counters.launches
    assert launch.instructions == {"cta_barrier": 5 * 8}
    assert launch.written == Totals(requests=5, bytes=20, transactions=5, ideal=5)


# ---- The product ----


@pytest.mark.parametrize("layout", ["nhd", "hnd", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_copy_blocks_moves_each_byte_once(
    hooks: Backend, layout: str, dtype: torch.dtype, counters: emulator.Counters
) -> None:
    block_size, heads, head_dim = 16, 2, 64
    pools = make_pools(layout, 9, block_size, heads, head_dim, dtype)
    placed = [hooks.place_all(pools) for _ in range(2)]
    pairs = [(1, 5), (1, 0), (7, 8)]
    copy_blocks([pair[0] for pair in placed], [pair[1] for pair in placed], pairs)
    (launch,) = counters.launches
    moved = 4 * len(pairs) * block_size * heads * head_dim * dtype.itemsize
    into = launch.select(lambda line: line.write)
    out_of = launch.select(
        lambda line: not line.write and line.buffer in names_of(*placed[0], *placed[1])
    )
    for totals in (into, out_of):
        assert totals.bytes == moved
        assert totals.transactions == totals.ideal == moved // 32


@pytest.mark.parametrize("layout", ["nhd", "hnd", "stacked", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_reshape_and_cache_moves_each_byte_once(
    hooks: Backend, layout: str, dtype: torch.dtype, counters: emulator.Counters
) -> None:
    tokens, heads, head_dim = 7, 3, 64
    key_cache, value_cache = hooks.place_all(make_pools(layout, 4, 16, heads, head_dim, dtype))
    key, value = (hooks.place(torch.randn(tokens, heads, head_dim).to(dtype)) for _ in range(2))
    slots = torch.tensor([3, 60, 17, 18, 19, 20, 0])
    reshape_and_cache(key, value, key_cache, value_cache, hooks.place(slots))
    (launch,) = counters.launches
    moved = 2 * tokens * heads * head_dim * dtype.itemsize
    assert launch.written.bytes == moved
    # Rows of 128 bytes and more, each in one piece or two.
    assert launch.written.transactions == launch.written.ideal * (dtype.itemsize // 2)
    rows = launch.select(lambda line: not line.write and line.buffer in names_of(key, value))
    assert rows.bytes == moved
