"""Integer, logical and floating-point arithmetic, comparison and selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import values
from .instructions import Decoder, Operation, handles
from .memory import KernelError
from .values import RAW, Array, bits_of, is_float, is_signed

Function = Callable[..., Array]


def _flush(x: Array) -> Array:
    """Subnormal float32 numbers as zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _float_modifiers(d: Decoder, function: Function, type_name: str) -> Function:
    """Rounds to nearest, flushes and saturates as the modifiers say."""
    d.take("rn")
    if d.take("ftz"):
        if type_name != "f32":
            raise d.error()
        plain = function

        def function(*args: Array) -> Array:
            return _flush(plain(*[_flush(a) for a in args]))

    if d.take("sat"):
        inner = function
        # NaN saturates to 0.
        return lambda *args: np.fmin(np.fmax(inner(*args), 0), 1)
    return function


def _minimum(a: Array, b: Array) -> Array:
    return np.where((a == 0) & (b == 0), -(-a - b), np.fmin(a, b))


def _maximum(a: Array, b: Array) -> Array:
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


@handles("add", "sub")
def _add(d: Decoder) -> Operation:
    type_name = d.type()
    function: Function = np.add if d.instruction.name == "add" else np.subtract
    if is_float(type_name):
        function = _float_modifiers(d, function, type_name)
    return d.elementwise(function, [type_name] * 2, type_name)


@handles("min", "max")
def _min_max(d: Decoder) -> Operation:
    type_name = d.type()
    smaller = d.instruction.name == "min"
    function: Function = np.minimum if smaller else np.maximum
    if is_float(type_name) and not d.take("NaN"):
        function = _minimum if smaller else _maximum
    if is_float(type_name):
        function = _float_modifiers(d, function, type_name)
    return d.elementwise(function, [type_name] * 2, type_name)


def _high(a: Array, b: Array) -> Array:
    """The upper half of a product of 64-bit numbers."""
    product = a.astype(object) * b.astype(object) >> 64
    return (product & 0xFFFFFFFFFFFFFFFF).astype(np.uint64).view(a.dtype)


def _product(d: Decoder, type_name: str) -> tuple[Function, str]:
    """An integer product by its part: lo, hi or wide; and the type of that."""
    part = d.need("lo", "hi", "wide")
    if part == "lo":
        return np.multiply, type_name
    bits = bits_of(type_name)
    if bits == 64:
        if part == "wide":
            raise d.error()
        return _high, type_name
    wide: Any = np.dtype(f"{'i' if is_signed(type_name) else 'u'}{bits // 4}")
    if part == "wide":
        return lambda a, b: a.astype(wide) * b.astype(wide), f"{type_name[0]}{2 * bits}"
    return lambda a, b: (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(
        a.dtype
    ), type_name


@handles("mul")
def _mul(d: Decoder) -> Operation:
    type_name = d.type()
    if is_float(type_name):
        function = _float_modifiers(d, np.multiply, type_name)
        return d.elementwise(function, [type_name] * 2, type_name)
    function, result = _product(d, type_name)
    return d.elementwise(function, [type_name] * 2, result)


def _fma(a: Array, b: Array, c: Array) -> Array:
    if a.dtype == np.float64:
        raise KernelError("fma.f64 is not modelled")
    return values.fma(a, b, c)


@handles("fma", "mad")
def _mad(d: Decoder) -> Operation:
    type_name = d.type()
    if not is_float(type_name):
        product, result = _product(d, type_name)
        return d.elementwise(
            lambda a, b, c: product(a, b) + c, [type_name, type_name, result], result
        )
    narrow = type_name.split("x")[0] in ("f16", "bf16")
    function = _float_modifiers(d, values.fma_wide if narrow else _fma, type_name)
    return d.elementwise(function, [type_name] * 3, type_name)


def _quotient(a: Array, b: Array) -> Array:
    """Truncated; by zero it is unspecified, so a kernel must not get there."""
    if np.any(b == 0):
        raise KernelError("integer division by zero")
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


@handles("div", "rem")
def _div(d: Decoder) -> Operation:
    type_name = d.type()
    if is_float(type_name):
        if d.instruction.name == "rem":
            raise d.error()
        d.take("approx", "full")
        function = _float_modifiers(d, np.divide, type_name)
    elif d.instruction.name == "div":
        function = _quotient
    else:

        def function(a: Array, b: Array) -> Array:
            return a - _quotient(a, b) * b

    return d.elementwise(function, [type_name] * 2, type_name)


_UNARY: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


@handles(*_UNARY)
def _unary(d: Decoder) -> Operation:
    """Through float64, which is right to far more than the bits that are kept."""
    type_name = d.type()
    d.take("approx")
    wide = _UNARY[d.instruction.name]

    def unary(x: Array) -> Array:
        return wide(x.astype(np.float64)).astype(np.float32)

    return d.elementwise(_float_modifiers(d, unary, type_name), [type_name], type_name)


@handles("abs", "neg")
def _abs(d: Decoder) -> Operation:
    type_name = d.type()
    function: Function = np.abs if d.instruction.name == "abs" else np.negative
    if is_float(type_name):
        function = _float_modifiers(d, function, type_name)
    return d.elementwise(function, [type_name], type_name)


@handles("copysign")
def _copysign(d: Decoder) -> Operation:
    type_name = d.type()
    return d.elementwise(lambda sign, x: np.copysign(x, sign), [type_name] * 2, type_name)


@handles("and", "or", "xor")
def _logic(d: Decoder) -> Operation:
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    type_name = d.type()
    return d.elementwise(functions[d.instruction.name], [type_name] * 2, type_name)


@handles("not")
def _not(d: Decoder) -> Operation:
    type_name = d.type()
    return d.elementwise(np.invert, [type_name], type_name)


@handles("lop3")
def _lop3(d: Decoder) -> Operation:
    type_name = d.type()
    d.finish(5)
    table = int(d.operands[4], 0)
    get = [d.source(i, type_name) for i in (1, 2, 3)]

    def run(c: Any) -> None:
        inputs = [source(c) for source in get]
        result = np.zeros_like(inputs[0])
        for row in range(8):
            if table >> row & 1:
                term = ~np.zeros_like(result)
                for i, x in enumerate(inputs):
                    term &= x if row >> (2 - i) & 1 else ~x
                result |= term
        c.set(d.operands[0], result, type_name)

    return run


@handles("shl", "shr")
def _shift(d: Decoder) -> Operation:
    type_name = d.type()
    bits = bits_of(type_name)
    kind: Any = RAW[bits]

    def shift(x: Array, amount: Array) -> Array:
        small = np.minimum(amount, bits - 1).astype(kind)
        if d.instruction.name == "shl":
            return np.where(amount < bits, x << small, kind(0))
        if is_signed(type_name):
            return x >> small.astype(x.dtype)
        return np.where(amount < bits, x >> small, kind(0))

    return d.elementwise(shift, [type_name, "u32"], type_name)


@handles("shf")
def _funnel(d: Decoder) -> Operation:
    left = d.need("l", "r") == "l"
    clamp = d.need("clamp", "wrap") == "clamp"
    type_name = d.type()

    def funnel(low: Array, high: Array, amount: Array) -> Array:
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        n = (np.minimum(amount, 32) if clamp else amount & np.uint32(31)).astype(np.uint64)
        return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return d.elementwise(funnel, [type_name, type_name, "u32"], type_name)


@handles("bfe", "bfi")
def _bit_field(d: Decoder) -> Operation:
    type_name = d.type()
    if type_name not in ("u32", "s32", "b32") and (d.instruction.name, type_name) != ("bfi", "b64"):
        raise d.error()

    def mask(length: Array) -> Array:
        return (np.uint64(1) << np.minimum(length & np.uint32(255), 32).astype(np.uint64)) - 1

    def extract(x: Array, start: Array, length: Array) -> Array:
        position = np.minimum(start & np.uint32(255), 63).astype(np.int64)
        field = (x.astype(np.int64) >> position) & mask(length).astype(np.int64)
        if is_signed(type_name):
            width = np.minimum(length & np.uint32(255), 32).astype(np.int64)
            field -= ((field << 1) & (np.int64(1) << width)) * (width > 0)
        return field.astype(np.uint32).view(x.dtype)

    def insert(field: Array, x: Array, start: Array, length: Array) -> Array:
        position = (start & np.uint32(255)).astype(np.uint64)
        inside = position < bits_of(type_name)  # numpy does not shift by 64 bits
        position = np.where(inside, position, np.uint64(0))
        where = np.where(inside, mask(length).astype(np.uint64) << position, np.uint64(0))
        moved = (field.astype(np.uint64) << position) & where
        return ((x.astype(np.uint64) & ~where) | moved).astype(x.dtype)

    if d.instruction.name == "bfe":
        return d.elementwise(extract, [type_name, "u32", "u32"], type_name)
    return d.elementwise(insert, [type_name, type_name, "u32", "u32"], type_name)


@handles("popc", "clz", "brev")
def _count_bits(d: Decoder) -> Operation:
    type_name = d.type()
    bits = bits_of(type_name)

    def count(x: Array) -> Array:
        return np.bitwise_count(x).astype(np.uint32)

    def leading(x: Array) -> Array:
        return np.array([bits - n.bit_length() for n in x.tolist()], dtype=np.uint32)

    def reverse(x: Array) -> Array:
        return np.array([int(f"{n:0{bits}b}"[::-1], 2) for n in x.tolist()], dtype=x.dtype)

    function, result = {
        "popc": (count, "u32"),
        "clz": (leading, "u32"),
        "brev": (reverse, type_name),
    }[d.instruction.name]
    return d.elementwise(function, [type_name], result)


_COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _comparison(d: Decoder, type_name: str) -> Function:
    options = [*_COMPARE, *_UNSIGNED]
    if not is_float(type_name):
        name = d.need(*options)
        return _COMPARE[_UNSIGNED.get(name, name)]
    name = d.need(*_COMPARE, *(f"{name}u" for name in _COMPARE), "num", "nan")

    def unordered(a: Array, b: Array) -> Array:
        return np.isnan(a) | np.isnan(b)

    if name == "nan":
        return unordered
    if name == "num":
        return lambda a, b: ~unordered(a, b)
    if name in _COMPARE:
        return lambda a, b: _COMPARE[name](a, b) & ~unordered(a, b)
    return lambda a, b: _COMPARE[name[:-1]](a, b) | unordered(a, b)


@handles("setp")
def _setp(d: Decoder) -> Operation:
    type_name = d.type()
    compare = _comparison(d, type_name)
    if is_float(type_name) and d.take("ftz"):
        exact = compare

        def compare(a: Array, b: Array) -> Array:
            return exact(_flush(a), _flush(b))

    combine = d.take("and", "or", "xor")
    functions = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    d.finish(4 if combine else 3)
    a, b = d.source(1, type_name), d.source(2, type_name)
    destinations = d.operands[0].split("|")

    def run(c: Any) -> None:
        result = compare(a(c), b(c))
        both = [result, ~result]
        if combine:
            both = [functions[combine](x, c.operand(d.operands[3], "pred")) for x in both]
        for name, value in zip(destinations, both, strict=False):
            c.set(name, value, "pred")

    return run


@handles("selp")
def _selp(d: Decoder) -> Operation:
    type_name = "b" + str(bits_of(d.type()))
    return d.elementwise(
        lambda a, b, p: np.where(p, a, b), [type_name, type_name, "pred"], type_name
    )
