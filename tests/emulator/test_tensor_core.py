"""ldmatrix, movmatrix and mma against the fragment tables of the PTX ISA, written out here."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import emulator
from emulator.harness import Selftest, assert_message, line_of

LANES = range(32)
ROWS_BYTES = 512
Place = tuple[int, int]

# From the PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type" and the same of
# m16n8k8: the row and column of element i of a thread's fragment, by its %laneid.


def a_k16(lane: int, i: int) -> Place:
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    column = thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8
    return row, column


def b_k16(lane: int, i: int) -> Place:
    group, thread = lane >> 2, lane % 4
    row = thread * 2 + (i & 1) if i < 2 else thread * 2 + (i & 1) + 8
    return row, group


def a_k8(lane: int, i: int) -> Place:
    group, thread = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def b_k8(lane: int, i: int) -> Place:
    group, thread = lane >> 2, lane % 4
    return thread * 2 + i, group


def c_any(lane: int, i: int) -> Place:
    group, thread = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def scatter(matrix: torch.Tensor, place: Callable[[int, int], Place], count: int) -> torch.Tensor:
    """The fragments of all lanes, [32, count]."""
    places = [[place(lane, i) for i in range(count)] for lane in LANES]
    return torch.stack([torch.stack([matrix[p] for p in row]) for row in places])


def padded(fragments: torch.Tensor) -> torch.Tensor:
    """Fragments as 16 bytes for each lane."""
    raw = fragments.contiguous().view(torch.uint8).view(32, -1)
    return torch.cat([raw, torch.full((32, 16 - raw.shape[1]), 0x7E, dtype=torch.uint8)], 1)


def multiply(selftest: Selftest, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    depth = a.shape[1]
    place_a, place_b = (a_k16, b_k16) if depth == 16 else (a_k8, b_k8)
    fragments = [
        scatter(a, place_a, depth // 2),
        scatter(b, place_b, depth // 4),
        scatter(c, c_any, 4),
    ]
    data = selftest.runtime.place(torch.stack([padded(f) for f in fragments], 1), "fragments")
    option = -depth if a.dtype == torch.bfloat16 else depth
    assert selftest.error("multiply_matrices", data, option=option, threads=32) is None
    result = torch.empty(16, 8)
    for lane, values in enumerate(data[:, 2].contiguous().view(torch.float32)):
        for i in range(4):
            result[c_any(lane, i)] = values[i]
    return result


KINDS = [(torch.float16, 16), (torch.bfloat16, 16), (torch.float16, 8)]
each_kind = pytest.mark.parametrize(("dtype", "depth"), KINDS, ids=lambda v: str(v)[-8:])


@each_kind
def test_products_of_random_matrices(selftest: Selftest, dtype: torch.dtype, depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    for _ in range(3):
        a = torch.randn(16, depth, generator=generator).to(dtype)
        b = torch.randn(depth, 8, generator=generator).to(dtype)
        c = torch.randn(16, 8, generator=generator)
        exact = c.numpy().astype(np.float64) + a.double().numpy() @ b.double().numpy()
        result = multiply(selftest, a, b, c).numpy()
        np.testing.assert_array_equal(result, exact.astype(np.float32))


@each_kind
def test_products_of_one_element(selftest: Selftest, dtype: torch.dtype, depth: int) -> None:
    """A one in each place of A, then of B, against a matrix whose elements all differ."""
    numbered_b = torch.arange(1.0, depth * 8 + 1).view(depth, 8).to(dtype)
    numbered_a = torch.arange(1.0, depth * 16 + 1).view(16, depth).to(dtype)
    zero = torch.zeros(16, 8)
    for k in range(depth):
        one_in_a, one_in_b = torch.zeros_like(numbered_a), torch.zeros_like(numbered_b)
        one_in_a[(3 * k + 1) % 16, k] = 1
        one_in_b[k, (5 * k + 2) % 8] = 1
        result = multiply(selftest, one_in_a, numbered_b, zero)
        assert torch.equal(result, one_in_a.float() @ numbered_b.float())
        result = multiply(selftest, numbered_a, one_in_b, zero)
        assert torch.equal(result, numbered_a.float() @ one_in_b.float())


@each_kind
def test_products_of_special_values(selftest: Selftest, dtype: torch.dtype, depth: int) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 4
    a, b = torch.zeros(16, depth, dtype=dtype), torch.zeros(depth, 8, dtype=dtype)
    a[0, 0], a[1, 1], a[2, 2], a[3, 3] = torch.inf, torch.nan, tiny, -torch.inf
    b[:4, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0])
    b[0, 1] = -1
    b[3, 2] = 1
    result = multiply(selftest, a, b, torch.full((16, 8), 0.0))
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(a.float().numpy() @ b.float().numpy())
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert result[2, 0] == tiny, "subnormals count"
    nan_bits = result[1, 0].view(torch.int32).item()
    assert nan_bits == 0x7FFFFFFF


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.usefixtures("each_schedule")
def test_ldmatrix(selftest: Selftest, count: int, transpose: bool) -> None:
    """Thread l gets of each matrix row l / 4 and the two columns from l % 4 * 2; transposed, of
    column l / 4 the two rows. The rows of the matrices lie in any order."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(-(2**15), 2**15, (32, 8), generator=generator).to(torch.int16)
    order = torch.randperm(32, generator=generator)
    indices = order.clone()
    indices[8 * count :] = 2**20  # of lanes whose addresses do not matter
    raw = torch.cat([indices.int().view(torch.uint8), rows.view(torch.uint8).view(-1)])
    data = selftest.runtime.place(raw, "rows")
    option = -count if transpose else count
    error = selftest.error("load_matrices", data, option=option, threads=32, smem=ROWS_BYTES)
    assert error is None
    result = data[128:].view(torch.int16).view(32, 4, 2)
    for lane in LANES:
        for m in range(count):
            matrix = rows[order[8 * m : 8 * m + 8]]
            if transpose:
                matrix = matrix.T
            pair = matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
            assert torch.equal(result[lane, m], pair), (lane, m)


@pytest.mark.usefixtures("each_schedule")
def test_movmatrix(selftest: Selftest) -> None:
    """Thread l gives row l / 4, two columns; it gets column l / 4, two rows."""
    matrix = torch.arange(64, dtype=torch.int16).view(8, 8)
    data = selftest.runtime.place(matrix.clone(), "matrix")
    assert selftest.error("transpose_matrix", data, threads=32) is None
    for lane in LANES:
        got = data.view(32, 2)[lane]
        assert torch.equal(got, matrix[lane % 4 * 2 : lane % 4 * 2 + 2, lane // 4])


# ---- A whole kernel ----


def check_warp_product(selftest: Selftest, dtype: torch.dtype, depth: int) -> None:
    num_ctas, pitch = 3, -(-depth // 8) * 8
    generator = torch.Generator().manual_seed(depth)
    padded_rows = torch.full((num_ctas, 24, pitch), torch.nan, dtype=dtype)
    rows = torch.randn(num_ctas, 24, depth, generator=generator).to(dtype)
    padded_rows[:, :, :depth] = rows
    inputs = padded_rows.view(torch.uint8).reshape(num_ctas, 24 * pitch * 2)
    results = torch.zeros(num_ctas, 16 * 8 * 4, dtype=torch.uint8)
    data = selftest.runtime.place(torch.cat([inputs, results], 1), "data")
    name = "warp_product_f16" if dtype == torch.float16 else "warp_product_bf16"
    smem = 3 * 24 * 24 * 2  # stages, rows, padded elements
    assert selftest.error(name, data, option=depth, ctas=num_ctas, threads=32, smem=smem) is None
    result = data[:, inputs.shape[1] :].contiguous().view(torch.float32).view(num_ctas, 16, 8)
    expected = rows[:, :16].double() @ rows[:, 16:].double().mT
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("depth", [0, 1, 7, 8, 16, 24, 40, 48, 49, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_warp_product(selftest: Selftest, dtype: torch.dtype, depth: int) -> None:
    check_warp_product(selftest, dtype, depth)


@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
def test_warp_product_raises_no_alarm(hooked: Selftest, schedule: str) -> None:
    for seed in range(5):
        hooked.runtime.configure(seed=seed, schedule=schedule)
        check_warp_product(hooked, torch.float16, 16 * seed + 9)


def test_traffic_of_a_warp_product(hooked: Selftest) -> None:
    """4 tiles of 24 rows of 32 bytes in each CTA, each byte moved once and in the ideal manner."""
    with hooked.runtime.counted() as counters:
        check_warp_product(hooked, torch.float16, 64)
    (launch,) = counters.launches
    assert launch.instructions == {
        "cp.async": 3 * 4 * 24 * 2,  # of threads
        "ldmatrix.x4": 3 * 4,
        "ldmatrix.x2": 3 * 4,
        "mma.m16n8k16.f16": 3 * 4,
        "sync_warp": 3 * 4 * 2,
    }
    assert launch.read.bytes == 3 * 24 * 64 * 2
    assert launch.read.transactions == launch.read.ideal
    assert launch.written.bytes == 3 * 16 * 8 * 4
    assert launch.shared.bytes == 2 * launch.read.bytes, "written and read once"
    assert launch.shared.transactions == launch.shared.ideal, "no bank conflict"


# ---- Faults ----


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (8, "read of 16 bytes misaligned"),
        (2, "read of 16 bytes misaligned"),
        (464, "read of 16 bytes out of bounds, at byte 512 of 'shared memory' (512 bytes)"),
        (-64, "read of 16 bytes out of bounds, 16 bytes before the start of 'shared memory'"),
    ],
)
@pytest.mark.usefixtures("each_schedule")
def test_rows_of_matrices(selftest: Selftest, offset: int, message: str) -> None:
    assert selftest.error("matrix_row", option=16, threads=32, smem=512) is None
    assert_message(
        selftest.error("matrix_row", option=offset, threads=32, smem=512),
        message,
        line_of("matrix_row", "faulty_instructions.cpp"),
        "in thread (3, 0, 0)",
    )


@pytest.mark.usefixtures("each_schedule")
def test_lanes_that_do_not_meet(selftest: Selftest) -> None:
    assert_message(
        selftest.error("matrices_of_two_kinds", threads=32, smem=512), "mismatched collective"
    )
    assert_message(
        selftest.error("lane_without_mma", threads=32),
        "collective with an exited lane",
        "mma.m16n8k8.f16",
        line_of("lane_without_mma", "faulty_instructions.cpp"),
    )
