"""Registers as numpy arrays of raw bits, and IEEE arithmetic on what they mean.

Two stand-ins are more exact than the hardware: ex2, lg2, rcp and the like of kind .approx are
correctly rounded here, and the sums of mma are exact up to a rounding in float64.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np

# A numpy array. Its dtype is known at run time only, where numpy's types say Any at every step.
Array: TypeAlias = Any

RAW: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_NUMPY: dict[str, Any] = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    **{f"{kind}{bits}": RAW[bits] for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (8, 16, 32, 64)},
}
TYPES = frozenset(_NUMPY) | {"bf16", "f16x2", "bf16x2"}


@functools.cache
def bits_of(type_name: str) -> int:
    """The width of a type."""
    if type_name.endswith("x2"):
        return 2 * bits_of(type_name[:-2])
    return 1 if type_name == "pred" else int("".join(c for c in type_name if c.isdigit()))


def is_float(type_name: str) -> bool:
    return "f" in type_name


def is_signed(type_name: str) -> bool:
    return type_name.startswith("s")


def read(raw: Array, type_name: str) -> Array:
    """What raw bits mean. bf16 comes as float32; a packed pair as two neighbouring elements."""
    if type_name.endswith("x2"):
        return read(np.ascontiguousarray(raw).view(np.uint16), type_name[:-2])
    bits = bits_of(type_name)
    if type_name != "pred" and raw.dtype.itemsize * 8 > bits:
        raw = raw.astype(RAW[bits])
    if type_name == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(_NUMPY[type_name])


def write(value: Array, type_name: str) -> Array:
    """The raw bits of a value that was computed exactly enough: rounds to the nearest even."""
    kind = _NUMPY.get(type_name)
    if kind is not None and value.dtype == kind and type_name != "f16":
        return value.view(RAW[bits_of(type_name)])
    if type_name.endswith("x2"):
        return write(value, type_name[:-2]).view(np.uint32)
    if type_name == "bf16":
        return to_bf16(value)
    if type_name == "f16":
        half = value.astype(np.float16)
        return np.where(np.isnan(half), np.uint16(0x7FFF), half.view(np.uint16))
    return value.astype(kind).view(RAW[bits_of(type_name)])


def resize(raw: Array, type_name: str, bits: int) -> Array:
    """Bits of a type in a register at least as wide: extended by sign or by zero."""
    if raw.dtype == RAW[bits]:
        return raw
    if raw.dtype.itemsize * 8 > bits:
        raise TypeError(f"{type_name} does not fit a register of {bits} bits")
    if is_signed(type_name):
        return raw.view(_NUMPY[type_name]).astype(f"i{bits // 8}").view(RAW[bits])
    return raw.astype(RAW[bits])


def to_odd(exact: Array, error: Array) -> Array:
    """Makes a rounded float64 sum odd where it is inexact: a later rounding is then not double.

    `error` is what the rounding lost. Boldo and Melquiond 2008, "Emulation of FMA and correctly
    rounded sums: proved algorithms using rounding to odd".
    """
    inexact = np.isfinite(exact) & (error != 0) & ((exact.view(np.uint64) & np.uint64(1)) == 0)
    if not inexact.any():
        return exact
    return np.where(inexact, np.nextafter(exact, np.copysign(np.inf, error)), exact)


def fma_wide(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded to odd in float64: rounds once more, correctly, to float32 or narrower.

    The product of two float32 is exact in float64; Knuth's two-sum tells what the sum lost.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    return to_odd(total, error)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32, rounded once."""
    total = a.astype(np.float64) * b + c
    # Rounding twice errs only where the first rounding ends on a tie of the second, or where the
    # result is subnormal and the ties are elsewhere.
    low = total.view(np.uint64) & np.uint64(0x1FFFFFFF)
    risky = (low == 0x10000000) | (np.abs(total) < 2.0**-125)
    if risky.any():
        return fma_wide(a, b, c).astype(np.float32)
    return total.astype(np.float32)


def to_bf16(value: Array) -> Array:
    """Round to nearest even, from float32 or from float64 rounded to odd."""
    if value.dtype == np.float64:
        narrow = value.astype(np.float32)
        value = _odd_float32(value, narrow)
    raw = value.astype(np.float32).view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _odd_float32(wide: Array, narrow: Array) -> Array:
    error = wide - narrow
    inexact = np.isfinite(narrow) & (error != 0) & ((narrow.view(np.uint32) & np.uint32(1)) == 0)
    away = np.copysign(np.float32(np.inf), error.astype(np.float32))
    return np.where(inexact, np.nextafter(narrow, away), narrow)


@functools.cache
def fp8_table(name: str) -> Array:
    """The 256 values of e4m3 or e5m2."""
    exponent_bits, mantissa_bits = (4, 3) if name == "e4m3" else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    significand = np.where(exponent == 0, 0, 2**mantissa_bits) + mantissa
    value = np.ldexp(significand.astype(float), np.maximum(exponent, 1) - bias - mantissa_bits)
    if name == "e4m3":
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        value[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    value[128:] = -value[128:]
    return value


def from_fp8(code: Array, name: str) -> Array:
    return fp8_table(name)[code & 0xFF]


def to_fp8(value: Array, name: str) -> Array:
    """Round to nearest even, saturating at the largest finite value; NaN becomes 0x7f."""
    finite = fp8_table(name)[: 0x7F if name == "e4m3" else 0x7C]
    mantissa_bits, least = (3, -6) if name == "e4m3" else (2, -14)
    magnitude = np.minimum(np.abs(value.astype(np.float64)), finite[-1])
    magnitude = np.where(np.isnan(value), 0, magnitude)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, least) - mantissa_bits
    rounded = np.ldexp(np.rint(np.ldexp(magnitude, -exponent)), exponent)
    code = np.searchsorted(finite, np.minimum(rounded, finite[-1])).astype(np.uint32)
    code |= np.signbit(value).astype(np.uint32) << np.uint32(7)
    return np.where(np.isnan(value), np.uint32(0x7F), code)
