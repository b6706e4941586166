"""mov, cvt and what moves bytes between registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import values
from .instructions import Decoder, Operation, handles
from .memory import SHARED_WINDOW
from .values import RAW, Array, bits_of, is_float, is_signed

_FP8 = ("e4m3x2", "e5m2x2")
_TO_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@handles("mov")
def _mov(d: Decoder) -> Operation:
    type_name = d.type()
    d.finish(2)
    bits = bits_of(type_name)
    into, parts = d.vector(0), d.vector(1)
    if len(into) == len(parts) == 1:
        raw = type_name if type_name == "pred" else f"b{bits}"
        return d.elementwise(lambda x: x, [raw], raw)
    part = f"b{bits // max(len(into), len(parts))}"
    kind: Any = RAW[bits]
    width = bits // max(len(into), len(parts))

    def pack(c: Any) -> None:
        result = np.zeros(c.count, dtype=kind)
        for i, name in enumerate(parts):
            result |= c.operand(name, part).astype(kind) << kind(i * width)
        c.set(into[0], result, type_name)

    def unpack(c: Any) -> None:
        whole = c.operand(parts[0], f"b{bits}")
        for i, name in enumerate(into):
            c.set(name, (whole >> kind(i * width)).astype(RAW[width]), part)

    return pack if len(parts) > 1 else unpack


@handles("cvta")
def _cvta(d: Decoder) -> Operation:
    to_space = d.take("to") is not None
    space = d.need("global", "shared", "param", "const")
    type_name = d.type()
    # Only shared memory has addresses of its own here.
    delta = np.uint64(SHARED_WINDOW if space == "shared" else 0)
    return d.elementwise(lambda x: x - delta if to_space else x + delta, [type_name], type_name)


def _fp8_conversion(d: Decoder) -> Operation:
    names = [m for m in d.left if m in _FP8]
    if len(names) != 1 or d.left[-1] == d.left[-2]:
        raise d.error()
    name = names[0]
    kind = name.removesuffix("x2")
    other = d.need("f16x2", "f32")
    d.need(name)
    d.need("rn")
    if d.instruction.modifiers[-1] == name:
        if other != "f16x2":
            raise d.error()
        d.finish(2)
        source = d.source(1, "b16")

        def widen(c: Any) -> None:
            raw = source(c)
            pair = np.stack([raw & np.uint16(0xFF), raw >> np.uint16(8)], axis=1)
            c.set(d.operands[0], values.from_fp8(pair.ravel(), kind), "f16x2")

        return widen
    d.need("satfinite")
    d.finish(3 if other == "f32" else 2)
    get = [d.source(i, other) for i in range(1, len(d.operands))]

    def narrow(c: Any) -> None:
        inputs = [source(c) for source in get]
        if other == "f16x2":
            low, high = inputs[0][::2], inputs[0][1::2]
        else:
            high, low = inputs  # the first operand is the upper half
        code = values.to_fp8(low, kind) | (values.to_fp8(high, kind) << np.uint32(8))
        c.set(d.operands[0], code, "b16")

    return narrow


def _saturate(x: Array, type_name: str) -> Array:
    """A float64 or an integer within the range of an integer type; NaN becomes 0."""
    info = np.iinfo(values.read(np.zeros(1, RAW[bits_of(type_name)]), type_name).dtype)
    kind = info.dtype
    if x.dtype.kind != "f":
        return np.clip(x.astype(object), info.min, info.max).astype(kind)
    inside = (x > info.min) & (x < info.max)
    result = np.where(inside, x, 0).astype(kind)
    result = np.where(x >= info.max, info.max, np.where(x <= info.min, info.min, result))
    nan = info.min if bits_of(type_name) == 64 and is_signed(type_name) else 0
    return np.where(np.isnan(x), nan, result).astype(kind)


@handles("cvt")
def _cvt(d: Decoder) -> Operation:
    if any(name in d.left for name in _FP8):
        return _fp8_conversion(d)
    source = d.type()
    result = d.type()
    if result in ("f16x2", "bf16x2"):
        return _pack_floats(d, source, result)
    integral = d.take(*_TO_INTEGER)
    rounding = d.take("rn", "rz")
    saturate = d.take("sat") is not None
    flush = d.take("ftz") is not None
    if rounding == "rz" or (flush and (source != "f32" or is_float(result))):
        raise d.error()
    if is_float(source) and not is_float(result):
        if integral is None:
            raise d.error()
        return d.elementwise(
            lambda x: _saturate(_TO_INTEGER[integral](x.astype(np.float64)), result),
            [source],
            result,
        )
    if is_float(result):
        return d.elementwise(_to_float(source, result, integral, saturate), [source], result)
    if integral is not None:
        raise d.error()
    if saturate:
        return d.elementwise(lambda x: _saturate(x, result), [source], result)
    # An integer that is narrowed keeps its low bits, one that is widened its value.
    kind: Any = values.read(np.zeros(1, RAW[bits_of(result)]), result).dtype
    return d.elementwise(lambda x: x.astype(kind), [source], result)


def _to_float(
    source: str, result: str, integral: str | None, saturate: bool
) -> Callable[[Array], Array]:
    def convert(x: Array) -> Array:
        if integral is not None:
            x = _TO_INTEGER[integral](x)
        if not is_float(source) and result in ("f16", "bf16"):
            # Exact for 32 bits, and rounded to odd where a second rounding could be wrong.
            wide = x.astype(np.float64)
            if bits_of(source) == 64:
                lost = x.astype(np.int64) - wide.astype(np.int64)
                wide = values.to_odd(wide, lost.astype(np.float64))
            x = wide
        elif result == "f32":
            x = x.astype(np.float32)
        return np.fmin(np.fmax(x, 0), 1) if saturate else x

    return convert


def _pack_floats(d: Decoder, source: str, result: str) -> Operation:
    """Two float32, the first to the upper half."""
    if source != "f32":
        raise d.error()
    d.need("rn")
    relu = d.take("relu") is not None
    d.finish(3)
    high, low = d.source(1, "f32"), d.source(2, "f32")

    def run(c: Any) -> None:
        pair = np.stack([low(c), high(c)], axis=1).ravel()
        c.set(d.operands[0], np.where(pair < 0, 0, pair) if relu else pair, result)

    return run


@handles("prmt")
def _prmt(d: Decoder) -> Operation:
    type_name = d.type()
    if type_name != "b32":
        raise d.error()

    def permute(a: Array, b: Array, selector: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros_like(a)
        for i in range(4):
            choice = (selector >> np.uint32(4 * i)).astype(np.uint64)
            byte = (both >> (np.uint64(8) * (choice & np.uint64(7)))) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            byte = np.where(choice & np.uint64(8), sign, byte)
            result |= byte.astype(np.uint32) << np.uint32(8 * i)
        return result

    return d.elementwise(permute, ["b32", "b32", "b32"], "b32")
