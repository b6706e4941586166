"""The emulator's conversions against torch's."""

import ctypes
import math

import numpy as np
import torch

from emulator.harness import Selftest


def test_conversions_from_bits(selftest: Selftest) -> None:
    every = np.arange(65536, dtype=np.uint16)
    half, bfloat16 = np.empty(65536, np.float32), np.empty(65536, np.float32)
    e4m3, e5m2 = np.empty((65536, 2), np.float32), np.empty((65536, 2), np.float32)
    outputs = [array.ctypes.data_as(ctypes.c_void_p) for array in (half, bfloat16, e4m3, e5m2)]
    selftest.runtime.library.selftest_to_float(*outputs)

    def expect(values: np.ndarray, dtype: torch.dtype, bits: np.ndarray) -> None:
        expected = torch.from_numpy(bits).view(dtype).float().numpy().reshape(values.shape)
        np.testing.assert_array_equal(values, expected)
        # Zeros have a sign too.
        ordered = ~np.isnan(values)
        assert (np.signbit(values) == np.signbit(expected))[ordered].all()

    expect(half, torch.float16, every)
    expect(bfloat16, torch.bfloat16, every)
    expect(e4m3, torch.float8_e4m3fn, every.view(np.uint8))
    expect(e5m2, torch.float8_e5m2, every.view(np.uint8))


def from_float(selftest: Selftest, values: np.ndarray) -> list[np.ndarray]:
    count = values.size
    outputs = [np.empty(count, dtype) for dtype in (np.uint16, np.uint16, np.uint8, np.uint8)]
    selftest.runtime.library.selftest_from_float(
        values.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(count),
        *[output.ctypes.data_as(ctypes.c_void_p) for output in outputs],
    )
    return outputs


def test_conversions_from_float(selftest: Selftest) -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 1 << 18, dtype=np.uint32)
    # Every fp16 and fp8 value, the midpoints between neighbours, and what lies next to them.
    halves = np.arange(65535, dtype=np.uint16).view(np.float16).astype(np.float32)
    quarters = torch.arange(127).byte().view(torch.float8_e4m3fn).float().numpy()
    exact = [halves, quarters, -quarters]
    with np.errstate(invalid="ignore"):
        midpoints = [(values[1:] + values[:-1]) / 2 for values in exact]
    edges = np.concatenate([*exact, *midpoints]).view(np.uint32)
    near = np.concatenate([edges + np.uint32(delta % 2**32) for delta in (-1, 0, 1)])
    values = np.concatenate([bits, near]).view(np.float32)
    tensor = torch.from_numpy(values)
    half, bfloat16, e4m3, e5m2 = from_float(selftest, values)

    number = ~np.isnan(values)
    for output, dtype in ((half, torch.float16), (bfloat16, torch.bfloat16)):
        expected = tensor.to(dtype).view(torch.uint16).numpy()
        np.testing.assert_array_equal(output[number], expected[number])
        assert (output[~number] == 0x7FFF).all()
    for output, dtype in ((e4m3, torch.float8_e4m3fn), (e5m2, torch.float8_e5m2)):
        largest = torch.finfo(dtype).max
        # torch does not saturate.
        expected = tensor.clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()
        np.testing.assert_array_equal(output[number], expected[number])
        assert (output[~number] == 0x7F).all()


def test_round_to_int(selftest: Selftest) -> None:
    cases = {
        0.5: 0,
        1.5: 2,
        2.5: 2,
        -0.5: 0,
        -1.5: -2,
        127.49: 127,
        math.inf: 2**31 - 1,
        -math.inf: -(2**31),
        3e9: 2**31 - 1,
        -3e9: -(2**31),
        math.nan: 0,
    }
    values = np.array(list(cases), np.float32)
    output = np.empty(values.size, np.int32)
    selftest.runtime.library.selftest_round_to_int(
        values.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(values.size),
        output.ctypes.data_as(ctypes.c_void_p),
    )
    assert output.tolist() == list(cases.values())
