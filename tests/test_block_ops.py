"""copy_blocks and swap_blocks: whole blocks, every layer, nothing beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from cases import LAYOUTS, make_pools
from support import EIGHT_BIT_DTYPES, FLOAT_DTYPES, dtype_id, raw
from torch import Tensor

from paged_attn import BlockManager, copy_blocks, gather_cache, reshape_and_cache, swap_blocks
from paged_attn.blocks import expand_block_table

all_dtypes = pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *EIGHT_BIT_DTYPES], ids=dtype_id)


def as_bytes(pool: Tensor) -> Tensor:
    """The same memory, as integers of the element's size: comparable where there is NaN."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return pool.view(kinds[pool.element_size()])


def filled_pools(layout: str, num_blocks: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Random bytes in every element of both pools."""
    generator = torch.Generator().manual_seed(seed)
    pools = make_pools(layout, num_blocks, 3, 2, 8, dtype)
    for pool in pools:
        ints = as_bytes(pool)
        ints.copy_(torch.randint(-100, 100, ints.shape, generator=generator).to(ints.dtype))
    return list(pools)


@all_dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy(backend: Backend, layout: str, dtype: torch.dtype) -> None:
    layers = [filled_pools(layout, 8, dtype, seed) for seed in range(3)]
    pairs = [(5, 0), (2, 7), (2, 3), (6, 1)]
    placed = [backend.place_all(pools) for pools in layers]
    copy_blocks([pools[0] for pools in placed], [pools[1] for pools in placed], pairs)
    for got_pools, want_pools in zip(placed, layers, strict=True):
        for ints in map(as_bytes, want_pools):
            ints[[dst for _, dst in pairs]] = ints[[src for src, _ in pairs]].clone()
        for got, want in zip(got_pools, want_pools, strict=True):
            assert torch.equal(raw(got).cpu(), raw(want))


@pytest.mark.parametrize("form", ["list", "cpu", "device", "int32", "transposed", "empty"])
def test_forms_of_the_mapping(backend: Backend, form: str) -> None:
    pools = backend.place_pair(
        [torch.arange(4.0)[:, None, None, None].expand(4, 2, 1, 8).clone() for _ in range(2)]
    )
    pairs = [(3, 0), (2, 1)]
    forms: dict[str, Any] = {
        "list": pairs,
        "cpu": torch.tensor(pairs),
        "device": backend.place(torch.tensor(pairs)),
        "int32": torch.tensor(pairs, dtype=torch.int32),
        "transposed": torch.tensor([[3, 2], [0, 1]]).t(),
        "empty": torch.empty((0, 2), dtype=torch.int64),
    }
    copy_blocks(pools[0], pools[1], forms[form])
    want = [0.0, 1.0, 2.0, 3.0] if form == "empty" else [3.0, 2.0, 2.0, 3.0]
    assert pools[0][:, 0, 0, 0].tolist() == want
    assert pools[1][:, 1, 0, 7].tolist() == want


def test_nothing_to_copy(backend: Backend) -> None:
    copy_blocks([], [], [])
    empty = backend.place(torch.empty(0, 4, 1, 8))
    copy_blocks(empty, empty, [])
    pools = backend.place_pair([torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8)])
    before = raw(pools[0])
    copy_blocks(pools[0], pools[1], [])
    assert torch.equal(raw(pools[0]), before)


def test_a_source_may_be_read_twice(backend: Backend) -> None:
    pools = backend.place_pair(
        [torch.arange(4.0)[:, None, None, None].expand(4, 1, 1, 8).clone() for _ in range(2)]
    )
    copy_blocks(pools[0], pools[1], [(1, 0), (1, 2), (1, 3)])
    assert pools[0][:, 0, 0, 0].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1), (1, 2)], "not use a block as source and as destination, got block 1"),
        ([(0, 1), (1, 0)], "not use a block as source and as destination"),
        ([(1, 1)], "not use a block as source and as destination, got block 1"),
        ([(0, 2), (1, 2)], "name no destination twice, got block 2 again in pair 1"),
    ],
)
def test_all_pairs_are_one_copy(
    backend: Backend, pairs: list[tuple[int, int]], message: str
) -> None:
    # Pairs that would depend on their order are refused, not ordered.
    pools = backend.place_pair(filled_pools("nhd", 3, torch.float32, 0))
    before = raw(pools[0])
    with pytest.raises(RuntimeError, match=f"^copy_blocks: block_mapping must {message}"):
        copy_blocks(pools[0], pools[1], pairs)
    assert torch.equal(raw(pools[0]), before)


@pytest.mark.backends("cpu", "emulator")
@all_dtypes
def test_swap(backend: Backend, dtype: torch.dtype) -> None:
    src = filled_pools("hnd", 5, dtype, 1)[0]
    dst = filled_pools("nhd", 3, dtype, 2)[0]
    got, source = backend.place(dst), backend.place(src)
    swap_blocks(source, got, [(4, 0), (0, 2), (4, 1)])
    as_bytes(dst)[[0, 2, 1]] = as_bytes(src)[[4, 0, 4]]
    assert torch.equal(raw(got), raw(dst))
    assert torch.equal(raw(source), raw(src))


@pytest.mark.backends("cuda")
def test_swap_between_devices(backend: Backend) -> None:
    # There and back, from pinned memory and from ordinary, on two streams.
    for pinned in (True, False):
        streams: Any = torch.cuda  # torch's own annotations of streams are not strict
        for stream in (streams.current_stream(), streams.Stream()):
            with streams.stream(stream):
                src = filled_pools("nhd", 5, torch.float16, 1)[0]
                host = torch.zeros_like(src, pin_memory=pinned)
                device = src.cuda()
                swap_blocks(device, host, [(4, 0), (1, 3)])
                swap_blocks(host, device, [(0, 2)])
                stream.synchronize()
            assert torch.equal(host[[0, 3]], src[[4, 1]])
            assert torch.equal(device[2].cpu(), src[4])


def test_swap_within_a_pool(backend: Backend) -> None:
    pool = backend.place(torch.arange(4.0)[:, None].expand(4, 8).clone())
    swap_blocks(pool, pool, [(3, 0), (2, 1)])
    assert pool[:, 0].tolist() == [3.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(4, 0)], "name sources of a pool of 4 blocks, got 4 in pair 0"),
        ([(0, 0), (-1, 1)], "name sources of a pool of 4 blocks, got -1 in pair 1"),
        ([(3, 2)], "name destinations of a pool of 2 blocks, got 2 in pair 0"),
        ([(0, 1), (2, 1)], "name no destination twice"),
    ],
)
def test_swap_refuses_bad_pairs(
    backend: Backend, pairs: list[tuple[int, int]], message: str
) -> None:
    src = backend.place(torch.ones(4, 2, 1, 8))
    dst = backend.place(torch.zeros(2, 2, 1, 8))
    with pytest.raises(RuntimeError, match=f"^swap_blocks: block_mapping must {message}"):
        swap_blocks(src, dst, pairs)
    assert bool((dst == 0).all())


def test_copy_on_write_isolates_the_writers(backend: Backend) -> None:
    # Fork at five tokens in blocks of 4: block 0 stays shared, the half-full block is copied.
    manager = BlockManager(num_blocks=6, block_size=4)
    pools = backend.place_pair(make_pools("nhd", 6, 4, 1, 8, torch.float32))

    def write(slots: list[int], value: float) -> None:
        rows = backend.place(torch.full((len(slots), 1, 8), value))
        reshape_and_cache(rows, rows, pools[0], pools[1], backend.place(torch.tensor(slots)))

    parent = manager.add(5)
    write(manager.slots(parent, 0, 5), 1.0)
    child = manager.fork(parent)
    for seq, value in ((parent, 2.0), (child, 3.0)):
        slots, copies = manager.append(seq)
        copy_blocks(pools[0], pools[1], copies)
        write(slots, value)
    tables = [manager.block_table(seq) for seq in (parent, child)]
    assert tables[0][0] == tables[1][0]
    assert tables[0][1] != tables[1][1]
    for table, value in zip(tables, (2.0, 3.0), strict=True):
        assert pools[0][table[1], :2, 0, 0].tolist() == [1.0, value]
        assert pools[1][table[1], :2, 0, 0].tolist() == [1.0, value]


def test_manager_blocks_over_smaller_kernel_blocks(backend: Backend) -> None:
    # A manager's block of 32 tokens is two kernel blocks of 16: id i is 2 i and 2 i + 1.
    pool = torch.arange(4 * 32.0)[:, None].expand(-1, 8).reshape(4, 32, 1, 8).contiguous()
    coarse = backend.place(pool)
    fine = coarse.view(8, 16, 1, 8)
    lens = backend.place(torch.tensor([50], dtype=torch.int32))
    for table, cache in (([3, 0], coarse), (expand_block_table([3, 0], 2), fine)):
        tables = backend.place(torch.tensor([table], dtype=torch.int32))
        key, _ = gather_cache(cache, cache, tables, lens)
        assert key[:, 0, 0].tolist() == [*range(96, 128), *range(18)]
