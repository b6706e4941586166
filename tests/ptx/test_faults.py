"""Faults planted in the shipping PTX are caught, and what is counted is what must be moved."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import Case, attend, build, make_pools
from support import same_bits

from paged_attn import copy_blocks, reshape_and_cache

from . import runtime
from .machine import ORDERS

# Rows of 72 elements leave the warps of a CTA unequally far in the loop that writes them, and with
# one SM each CTA has several items.
CASE = Case(
    "planted",
    seq_lens=(33, 1, 17, 9) * 2,
    num_kv_heads=4,
    head_dim=72,
    num_q_heads=12,
)
SMS = 1
BEFORE_MMA = 75  # a device for which the host takes decode_simt_kernel


KERNEL = "decode_simt_kernelILNS_5DTypeE1ELi1E"  # which runs the case


def nth(old: str, new: str, n: int) -> Callable[[str], str]:
    """Replaces the n-th occurrence in the kernel."""

    def edit(text: str) -> str:
        name = re.search(rf"\.entry \w*{KERNEL}", text)
        if name is None:
            return text
        before, kernel = text[: name.end()], text[name.end() :]
        parts = kernel.split(old)
        assert len(parts) > n
        return before + old.join(parts[:n]) + new + old.join(parts[n:])

    return edit


FAULTS = {
    "no barrier before the rows are merged": nth("bar.sync \t0;", "", 1),
    "no barrier before the next item": nth("bar.sync \t0;", "", 2),
    "a result beside its place": nth("+16], {", "+32], {", 1),
    "one step of a reduction is left out": nth("shfl.sync.bfly", "shfl.sync.idx", 3),
    "the other maximum": nth("max.f32", "min.f32", 1),
    "an instruction that nobody models": nth("cvt.rn.f16.f32", "cvt.rz.f16.f32", 1),
}


def check_case(ptx: Backend) -> None:
    inputs = build(CASE)
    out, lse = attend(inputs.on(ptx))
    assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(ptx: Backend, fault: str) -> None:
    library = runtime.load()
    library.library.ptx_set_device(SMS, BEFORE_MMA)
    library.order = "first_warp_first"
    library.edit = FAULTS[fault]
    with pytest.raises((RuntimeError, AssertionError)):
        check_case(ptx)


@pytest.mark.parametrize("order", ORDERS)
def test_without_a_fault_the_same_case_is_right(ptx: Backend, order: str) -> None:
    library = runtime.load()
    library.order = order
    library.library.ptx_set_device(SMS, BEFORE_MMA)
    check_case(ptx)


def test_a_fault_names_kernel_buffer_and_line(ptx: Backend) -> None:
    inputs = build(Case("far_block", seq_lens=(5,)))
    inputs.block_tables[0, 0] = 1000
    with pytest.raises(RuntimeError) as caught:
        attend(inputs.on(ptx))
    for part in ("16-byte read outside: byte ", ", which has", "PTX line"):
        assert part in str(caught.value)


def test_copies_move_each_byte_once_in_whole_sectors(ptx: Backend) -> None:
    library = runtime.load()
    library.count_traffic = True
    pools = make_pools("nhd", 6, 4, 2, 64, torch.float16)
    mine = ptx.place_all([pool.zero_() for pool in pools])
    copy_blocks(mine[0], mine[1], [(0, 3), (5, 1)])
    (launch,) = library.launches
    moved = 2 * 2 * pools[0][0].nbytes
    assert_moved(launch, moved, write=True)
    assert launch.traffic is not None
    # The tables that say what to copy are read in smaller pieces.
    blocks = launch.traffic.total(write=False, size=16)
    assert (blocks.num_bytes, blocks.sectors) == (moved, moved // 32), launch.traffic.table()


def assert_moved(launch: runtime.LaunchRecord, num_bytes: int, *, write: bool) -> None:
    assert launch.traffic is not None
    total = launch.traffic.total(write=write)
    assert (total.num_bytes, total.sectors) == (num_bytes, num_bytes // 32), launch.traffic.table()


def test_cache_write_moves_each_row_once(ptx: Backend) -> None:
    library = runtime.load()
    library.count_traffic = True
    rows = torch.randn(5, 2, 64, dtype=torch.float16)
    pools = ptx.place_all(make_pools("nhd", 4, 4, 2, 64, torch.float16))
    key = ptx.place(rows)
    slots = ptx.place(torch.tensor([3, 9, -1, 0, 15]))
    reshape_and_cache(key, key, pools[0], pools[1], slots)
    (launch,) = library.launches
    assert same_bits(pools[0][0, 3], rows[0])
    assert_moved(launch, 2 * 4 * rows[0].nbytes, write=True)
