"""The emulator's memory: bounds, alignment, permissions, and tensors in it."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from emulator.harness import Selftest, assert_message, line_of

PAGE = 4096


def test_shared_memory_starts_uninitialised(selftest: Selftest) -> None:
    values = selftest.zeros(9)
    error = selftest.error("uninitialised_shared_memory", values, ctas=9, threads=1, smem=4)
    assert error is None
    assert values.isnan().all()


@pytest.mark.parametrize(
    ("index", "where"),
    [
        (12, "write 8 bytes past the end of 'shared memory' (40 bytes), code at libemulator"),
        (10, "write out of bounds, 0 bytes past the end of 'shared memory' (40 bytes)"),
        (-1, "write out of bounds, 4 bytes before the start of 'shared memory' (40 bytes)"),
        (-2000, "write 8000 bytes before the start of 'shared memory' (40 bytes)"),
    ],
)
@pytest.mark.usefixtures("each_schedule")
def test_shared_memory_out_of_bounds(selftest: Selftest, index: int, where: str) -> None:
    assert_message(
        selftest.error("shared_memory_index", option=index, ctas=3, threads=32, smem=40),
        where,
        "CTA (",
    )
    assert selftest.error("shared_memory_index", option=9, threads=32, smem=40) is None


def test_shared_memory_smaller_than_the_struct(selftest: Selftest) -> None:
    assert_message(
        selftest.error("shared_memory_index", threads=32, smem=36),
        "the kernel's shared memory is 40 bytes, the launch gave it 36",
    )


@pytest.mark.parametrize("kernel", ["plain_read", "plain_write"])
@pytest.mark.parametrize(
    ("offset", "where"),
    [
        (PAGE, " 0 bytes past the end of 'data' (4096 bytes)"),
        (PAGE + 12, " 12 bytes past the end of 'data' (4096 bytes)"),
        (PAGE + 200000, " 200000 bytes past the end of 'data' (4096 bytes)"),
        (-4, " 4 bytes before the start of 'data' (4096 bytes)"),
    ],
)
def test_plain_access_out_of_bounds(
    selftest: Selftest, kernel: str, offset: int, where: str
) -> None:
    assert_message(
        selftest.error(kernel, selftest.zeros(PAGE // 4), option=offset, ctas=3),
        kernel.removeprefix("plain_") + where,
        "thread (5, 0, 0) (warp 0, lane 5) of CTA (",
        ", 0, 0)\n  launched in tests/emulator/kernels/selftest.cpp:",
        "EMU_SEED=0 EMU_SCHEDULE=random",
    )
    assert selftest.error(kernel, selftest.zeros(PAGE // 4), option=PAGE - 4) is None


@pytest.mark.parametrize(
    ("offset", "where"), [(20, "0 bytes past the end"), (-8, "8 bytes before")]
)
def test_write_beside_an_odd_sized_buffer_is_found_later(
    selftest: Selftest, offset: int, where: str
) -> None:
    data = selftest.zeros(5)
    assert_message(
        selftest.error("plain_write", data, option=offset),
        f"write out of bounds, {where}",
        "of 'data' (20 bytes), found after the fact",
    )
    # Once is enough.
    assert selftest.error("plain_write", data, option=16) is None


def test_damage_is_found_when_a_buffer_is_freed(selftest: Selftest) -> None:
    address = selftest.runtime.allocate(20, "odd")
    assert selftest.runtime.describe(address + 4) == "at byte 4 of 'odd' (20 bytes)"
    ctypes.memset(address + 20, 0, 1)
    with pytest.raises(RuntimeError, match=r"0 bytes past the end of 'odd'.* when it was freed"):
        selftest.runtime.free(address)
    with pytest.raises(RuntimeError, match="not the address of a device buffer"):
        selftest.runtime.free(address)


@pytest.mark.parametrize("kernel", ["vector_read", "vector_write"])
@pytest.mark.parametrize(
    ("offset", "what"),
    [
        (4, "misaligned: address 0x"),
        (992, "out of bounds, at byte 992 of 'data' (1000 bytes)"),
        (1008, "out of bounds, 8 bytes past the end of 'data' (1000 bytes)"),
        (-16, "out of bounds, 16 bytes before the start of 'data' (1000 bytes)"),
    ],
)
def test_vector_access(selftest: Selftest, kernel: str, offset: int, what: str) -> None:
    data = selftest.zeros(250)
    assert_message(
        selftest.error(kernel, data, option=offset),
        f"{kernel.removeprefix('vector_')} of 16 bytes {what}",
        f"in tests/emulator/kernels/{line_of(kernel)}",
        ") of CTA (0, 0, 0)",
    )
    assert selftest.error(kernel, data, option=976) is None


def test_vector_access_outside_of_the_map(selftest: Selftest) -> None:
    ordinary = torch.zeros(8)
    assert selftest.error("vector_write", ordinary, threads=1) is None


def test_read_only_buffers(selftest: Selftest) -> None:
    data = selftest.runtime.place(torch.zeros(64), "input", read_only=True)
    assert selftest.error("vector_read", data) is None
    assert selftest.error("plain_read", data) is None
    where = "to a read-only buffer, at byte 0 of 'input' (256 bytes)"
    assert_message(
        selftest.error("vector_write", data), f"write of 16 bytes {where}", line_of("vector_write")
    )
    assert_message(selftest.error("plain_write", data), f"write {where}")


def test_null_and_wild_pointers(selftest: Selftest) -> None:
    assert_message(selftest.error("plain_read", option=8), "read at null pointer + 8 bytes")
    data = selftest.zeros(1)
    assert_message(
        selftest.error("plain_read", data, option=1 << 62), "misaligned vector access or wild"
    )
    # Null too, but not near: no buffer of the map is at the first 4 GiB.
    assert_message(
        selftest.error("plain_write", option=1 << 30), "write at 0x40000000, in no buffer"
    )


# ---- Tensors ----


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.int64,
        torch.bool,
    ],
)
def test_place(selftest: Selftest, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (7, 5, 6)).to(dtype)
    before = values.clone().float()
    # Strides with holes, a storage offset, and not in the order of memory.
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: t[2:5, 1:, ::2],
        lambda t: t.permute(2, 0, 1),
        lambda t: t[0, :, :1].expand(5, 4),
        lambda t: t[0, 0, 0],
    ]
    for view in views:
        tensor = view(values)
        placed = selftest.runtime.place(tensor, "placed")
        assert placed.shape == tensor.shape
        assert placed.stride() == tensor.stride()
        assert placed.dtype == dtype
        assert torch.equal(placed.float(), tensor.float())
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        size = extent * tensor.element_size()
        assert selftest.runtime.describe(placed.data_ptr() + size) == (
            f"0 bytes past the end of 'placed' ({size} bytes)"
            if size != 1
            else "0 bytes past the end of 'placed' (1 byte)"
        )
        assert placed.data_ptr() % 16 == 0
    assert before.any()
    # A placed tensor is a copy.
    selftest.runtime.place(values).zero_()
    assert torch.equal(values.float(), before)
    assert selftest.runtime.place(values[:0]).shape == (0, 5, 6)


def test_placed_tensors_are_freed(selftest: Selftest) -> None:
    placed = selftest.runtime.place(torch.zeros(8), "short-lived")
    view, address = placed[4:], placed.data_ptr()
    del placed
    assert "short-lived" in selftest.runtime.describe(address)
    view.fill_(1)
    del view
    assert "short-lived" not in selftest.runtime.describe(address)
