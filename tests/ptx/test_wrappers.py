"""The asm of device/ptx.cuh, as nvcc emits it: kernels/wrappers.cu."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from . import runtime
from .build import ARCHS
from .harness import execute
from .memory import Buffer, GlobalMemory
from .values import Array

pytestmark = pytest.mark.usefixtures("nvcc")
rng = np.random.default_rng(2)
SMEM_BYTES = 2 * (16 + 8) * 24 * 2


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def library(request: pytest.FixtureRequest) -> runtime.Runtime:
    runtime.backend(request.param)
    return runtime.load()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["matmul_f16", "matmul_f16_trans", "matmul_bf16"])
@pytest.mark.parametrize(("num_tiles", "live"), [(0, 16), (1, 16), (2, 5), (5, 16)])
def test_matmul(library: runtime.Runtime, name: str, late: bool, num_tiles: int, live: int) -> None:
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    a = torch.randint(-4, 5, (num_tiles, 16, 16)).to(dtype)
    b = torch.randint(-4, 5, (num_tiles, 8, 16)).to(dtype)
    raw = [x.contiguous().view(torch.int16).numpy() for x in (a, b)]
    out = np.full((16, 8), np.nan, dtype=np.float32)
    memory = GlobalMemory()
    for array, what in ((raw[0], "a"), (raw[1], "b"), (out, "c")):
        memory.add(Buffer(array.ctypes.data, array.nbytes, what, read_only=what != "c"))
    addresses = [array.ctypes.data for array in (*raw, out)]
    params = struct.pack("<QQQii", *addresses, num_tiles, live)
    program = library.program(name)
    runtime.run_kernel(
        program, [params], memory, ctas=1, threads=32, shared_bytes=SMEM_BYTES, late_copies=late
    )
    seen = a.double().clone()
    seen[:, live:] = 0
    left = seen.transpose(1, 2) if name.endswith("trans") else seen
    want = (left @ b.double().transpose(1, 2)).sum(0)
    assert np.array_equal(out, want.numpy().astype(np.float32))


def halves(words: Array) -> Array:
    return np.ascontiguousarray(words).view(np.float16).reshape(32, 2)


def test_wrappers(library: runtime.Runtime) -> None:
    x = (rng.standard_normal((32, 2)) * 3).astype(np.float32)
    x[0], x[1] = [1e6, -3e-8], [-1e-6, 5e4]
    out = np.zeros((32, 24), dtype=np.uint32)
    counter = np.zeros(1, dtype=np.uint32)
    execute(library.program("wrappers"), [x, out, counter], read_only=1)
    bits = x[:, 0].copy().view(np.uint32)
    lane = np.arange(32)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        results = {
            0: half,
            3: half + half,
            4: half * half,
            5: (half.astype(float) * half + half).astype(np.float16),
        }
    for i, want in results.items():
        assert np.array_equal(halves(out[:, i]), want), i
    brain = torch.from_numpy(x).bfloat16().view(torch.int16).numpy()
    assert np.array_equal(out[:, 1].copy().view(np.int16).reshape(32, 2), brain)
    assert np.array_equal(out[:, 2], (bits & 0xFFFF) | (lane << 16))

    e4m3 = torch.from_numpy(x[:, 0]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = np.stack([e4m3.numpy(), lane.astype(np.uint8)], axis=1)
    for i, dtype in ((6, torch.float8_e4m3fn), (7, torch.float8_e5m2)):
        want = torch.from_numpy(codes).view(dtype).half().numpy()
        assert np.array_equal(halves(out[:, i]), want, equal_nan=True), i
    e5m2 = torch.from_numpy(x[:, 1]).clamp(-57344, 57344).to(torch.float8_e5m2)
    assert np.array_equal(out[:, 8], e5m2.view(torch.uint8).numpy())

    every = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(every).view(torch.float8_e4m3fn).half().numpy().reshape(128, 2)
    assert np.array_equal(out[:, 20:].copy().view(np.float16).reshape(128, 2), want, equal_nan=True)

    assert np.all(out[:, 9] == bits.sum(dtype=np.uint32))
    assert np.all(out[:, 10] == bits.view(np.int32).min().view(np.uint32))
    assert np.all(out[:, 11] == bits.max())
    assert np.all(out[:, 12] == sum(1 << int(i) for i in lane[x[:, 0] > x[:, 1]]))
    assert np.all(out[:, 13] == 3)
    assert np.array_equal(out[:, 14], bits[np.where(lane >= 3, lane - 3, lane)])
    assert np.array_equal(out[:, 15], bits[np.where(lane < 29, lane + 3, lane)])
    assert np.array_equal(out[:, 16], bits[(lane + 1) % 32])
    turned = half.reshape(8, 8).T
    assert np.array_equal(out[:, 17].copy().view(np.float16).reshape(8, 8), turned)

    with np.errstate(over="ignore"):
        for i, exact in ((18, np.exp2(x[:, 0].astype(float))), (19, 1 / x[:, 1].astype(float))):
            assert np.array_equal(out[:, i].copy().view(np.float32), exact.astype(np.float32))
    assert counter[0] == 5
