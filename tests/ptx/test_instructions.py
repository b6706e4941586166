"""Instructions one by one, against arithmetic that shares nothing with the interpreter."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from .harness import evaluate, execute, kernel_text, program
from .parser import PtxError
from .values import Array

rng = np.random.default_rng(0)


def any_floats(count: int = 512) -> Array:
    """float32 of every exponent, specials among them."""
    floats = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    floats[:8] = [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 65520, -65504]
    return floats


def same(got: Array, want: Array) -> None:
    """Bits, but any NaN for a NaN."""
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    kind = f"u{got.dtype.itemsize}"
    assert np.array_equal(got[~nan].view(kind), want[~nan].view(kind))


def rounded_to_float32(x: Fraction) -> float:
    """Nearest float32, ties to even, by integer arithmetic."""
    if x == 0:
        return 0.0
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length() - 25, -149)
    while abs(x) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    scaled = x / Fraction(2) ** exponent
    return float(round(scaled) * Fraction(2) ** exponent)


def test_fma_rounds_once() -> None:
    a, b = (rng.standard_normal(600).astype(np.float32) for _ in range(2))
    c = (-(a.astype(np.float64) * b) * rng.choice([0, 1, 1 + 2**-20], 600)).astype(np.float32)
    # The sum lies just beside the middle of two float32: a rounding to float64 hits the middle.
    a[:4], b[:4] = 1 + 2.0**-12, 1 + 2.0**-12
    c[:2], c[2:4] = 2.0**30, -(2.0**30)
    a[4:200] = rng.choice([1 + 2.0**-23, 1 - 2.0**-24], 196)
    b[4:200] = rng.choice([2.0**-24 * (1 + 2.0**-23), 2.0**-25, 2.0**-60], 196)
    c[4:200] = rng.choice([1.0, 1 + 2.0**-23, -1.0], 196)
    a[200:260] *= np.float32(2.0**-100)
    b[200:260] *= np.float32(2.0**-40)
    c[200:260] *= np.float32(2.0**-135)
    got = evaluate("fma.rn.f32 %d, %a, %b, %c;", [a, b, c], np.float32)
    for i in range(600):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        assert float(got[i]) == rounded_to_float32(exact), i


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_fma_of_halves_rounds_once(kind: str) -> None:
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    inputs = [torch.randn(512).to(dtype) for _ in range(3)]
    inputs[2] *= 0.01
    raw = [x.view(torch.int16).numpy() for x in inputs]
    got = evaluate(f"fma.rn.{kind} %d, %a, %b, %c;", raw, np.int16)
    # Exact in float64: products have 22 bits, and the addends are no further than 2^-20 away.
    want = (inputs[0].double() * inputs[1].double() + inputs[2].double()).to(dtype)
    assert np.array_equal(got, want.view(torch.int16).numpy())


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("cvt.rn.f16.f32 %d, %a;", torch.float16),
        ("cvt.rn.bf16.f32 %d, %a;", torch.bfloat16),
    ],
)
def test_narrowing(line: str, dtype: torch.dtype) -> None:
    x = any_floats()
    got = evaluate(line, [x], np.uint16)
    result = torch.from_numpy(got.view(np.int16)).view(dtype).float().numpy()
    same(result, torch.from_numpy(x).to(dtype).float().numpy())


def test_widening_f16_and_bf16() -> None:
    codes = np.arange(0, 65536, 129, dtype=np.uint16)
    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        want = torch.from_numpy(codes.view(np.int16)).view(dtype).float().numpy()
        same(evaluate(f"cvt.f32.{kind} %d, %a;", [codes], np.float32), want)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8(kind: str) -> None:
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    codes = np.arange(256, dtype=np.uint16)
    pairs = codes | (codes[::-1] << np.uint16(8))
    halves = evaluate(f"cvt.rn.f16x2.{kind}x2 %d, %a;", [pairs], np.uint32).view(np.float16)
    table = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    same(halves[::2].astype(np.float32), table)
    same(halves[1::2].astype(np.float32), table[::-1])

    low, high = any_floats(), any_floats()[::-1].copy()
    line = f"cvt.rn.satfinite.{kind}x2.f32 %d, %b, %a;"
    got = evaluate(line, [low, high], np.uint16)
    limit = torch.finfo(dtype).max
    for x, code in ((low, got & 0xFF), (high, got >> 8)):
        want = torch.from_numpy(x).clamp(-limit, limit).to(dtype)
        same(table[code], want.float().numpy())
        nan = np.isnan(x)
        assert np.array_equal(code[~nan], want.view(torch.uint8).numpy()[~nan])


def test_to_integers() -> None:
    x = np.array([0.5, 1.5, -2.5, 1e20, -1e20, np.nan, np.inf, 2.7], dtype=np.float32)
    got = evaluate("cvt.rni.s32.f32 %d, %a;", [x], np.int32)
    assert got.tolist() == [0, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, 3]
    got = evaluate("cvt.rzi.u32.f32 %d, %a;", [x], np.uint32)
    assert got.tolist() == [0, 1, 0, 2**32 - 1, 0, 0, 2**32 - 1, 2]
    narrow = evaluate("cvt.sat.s8.s32 %d, %a;", [np.array([300, -300, 5], np.int32)], np.int32)
    assert narrow.tolist() == [127, -128, 5]
    bytes_ = np.array([0x1FF, 0x80, 0x7F], dtype=np.uint16)
    assert evaluate("cvt.s32.s8 %d, %a;", [bytes_], np.int32).tolist() == [-1, -128, 127]


A = rng.integers(0, 2**32, 64, dtype=np.uint32)
B = rng.integers(0, 2**32, 64, dtype=np.uint32)
C = rng.integers(0, 2**32, 64, dtype=np.uint32)
M = 2**32 - 1


def signed(x: int) -> int:
    return x - 2**32 if x & 2**31 else x


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def permuted(a: int, b: int, selector: int) -> int:
    data = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    out = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = data[nibble & 7]
        out.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


INTEGER_LINES: list[tuple[str, Any]] = [
    ("mul.hi.u32 %d, %a, %b;", lambda a, b, c: a * b >> 32),
    ("mul.hi.s32 %d, %a, %b;", lambda a, b, c: signed(a) * signed(b) >> 32),
    ("mad.lo.s32 %d, %a, %b, %c;", lambda a, b, c: a * b + c),
    ("div.s32 %d, %a, %b;", lambda a, b, c: truncated(signed(a), signed(b))),
    ("rem.u32 %d, %a, %b;", lambda a, b, c: a % b),
    ("shr.s32 %d, %a, 40;", lambda a, b, c: -1 if a & 2**31 else 0),
    ("shl.b32 %d, %a, 32;", lambda a, b, c: 0),
    ("shr.u32 %d, %a, 7;", lambda a, b, c: a >> 7),
    ("lop3.b32 %d, %a, %b, %c, 0x6a;", lambda a, b, c: (a & b) ^ c),
    ("prmt.b32 %d, %a, %b, %c;", permuted),
    ("prmt.b32 %d, %a, %b, 0x5410;", lambda a, b, c: (a & 0xFFFF) | (b & 0xFFFF) << 16),
    ("shf.l.wrap.b32 %d, %a, %b, 5;", lambda a, b, c: b << 5 | a >> 27),
    ("shf.r.wrap.b32 %d, %a, %b, %c;", lambda a, b, c: (b << 32 | a) >> (c & 31)),
    ("bfe.u32 %d, %a, 5, 9;", lambda a, b, c: a >> 5 & 511),
    ("bfe.s32 %d, %a, 4, 8;", lambda a, b, c: ((a >> 4 & 255) ^ 128) - 128),
    ("bfi.b32 %d, %a, %b, 8, 8;", lambda a, b, c: (b & ~0xFF00) | (a & 255) << 8),
    ("popc.b32 %d, %a;", lambda a, b, c: a.bit_count()),
    ("clz.b32 %d, %a;", lambda a, b, c: 32 - a.bit_length()),
    ("brev.b32 %d, %a;", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    ("min.s32 %d, %a, %b;", lambda a, b, c: min(signed(a), signed(b))),
    ("sub.s32 %d, %a, %b;", lambda a, b, c: a - b),
    ("xor.b32 %d, %a, -1;", lambda a, b, c: ~a),
]


@pytest.mark.parametrize(("line", "function"), INTEGER_LINES, ids=[x[0] for x in INTEGER_LINES])
def test_integers(line: str, function: Any) -> None:
    got = evaluate(line, [A, B, C], np.uint32)
    want = [function(int(a), int(b), int(c)) & M for a, b, c in zip(A, B, C, strict=True)]
    assert got.tolist() == want


def test_wide_products() -> None:
    got = evaluate("mad.wide.s32 %d, %a, %b, 7;", [A, B], np.int64)
    want = [signed(int(a)) * signed(int(b)) + 7 for a, b in zip(A, B, strict=True)]
    assert got.tolist() == want
    wide = A.astype(np.uint64) << np.uint64(31) | B
    high = evaluate("mul.hi.u64 %d, %a, %b;", [wide, wide], np.uint64)
    assert high.tolist() == [int(x) ** 2 >> 64 for x in wide]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("eq", [0, 0, 0, 1]), ("ne", [1, 1, 0, 0]), ("lt", [1, 0, 0, 0]), ("neu", [1, 1, 1, 0]),
        ("geu", [0, 1, 1, 1]), ("gtu", [0, 1, 1, 0]), ("num", [1, 1, 0, 1]), ("nan", [0, 0, 1, 0]),
    ],
)  # fmt: skip
def test_comparisons_know_nan(name: str, want: list[int]) -> None:
    a = np.array([1, 2, np.nan, -0.0], dtype=np.float32)
    b = np.array([2, 1, 1, 0.0], dtype=np.float32)
    line = f"setp.{name}.f32 %q0|%q1, %a, %b; selp.b32 %d, 1, 0, %q0; @%q1 add.s32 %d, %d, 2;"
    assert evaluate(line, [a, b], np.uint32).tolist() == [1 if x else 2 for x in want]


def test_minimum_and_maximum_drop_nan_and_order_zeros() -> None:
    a = np.array([np.nan, -0.0, 0.0, np.nan], dtype=np.float32)
    b = np.array([3, 0.0, -0.0, np.nan], dtype=np.float32)
    same(evaluate("max.f32 %d, %a, %b;", [a, b], np.float32), np.array([3, 0, 0, np.nan], "f4"))
    small = evaluate("min.f32 %d, %a, %b;", [a, b], np.float32)
    same(small, np.array([3, -0.0, -0.0, np.nan], "f4"))
    nan = evaluate("max.NaN.f32 %d, %a, %b;", [a, b], np.float32)
    assert np.isnan(nan).tolist() == [True, False, False, True]


def test_flushing_and_approximations() -> None:
    x = np.array([-127.5, -126, 0, 3.5, -np.inf, np.nan], dtype=np.float32)
    exact = np.exp2(x.astype(np.float64)).astype(np.float32)
    same(evaluate("ex2.approx.f32 %d, %a;", [x], np.float32), exact)
    flushed = np.where(exact < 2.0**-126, np.float32(0), exact)
    same(evaluate("ex2.approx.ftz.f32 %d, %a;", [x], np.float32), flushed)
    tiny = np.array([1e-40, -1e-40, 1.0], dtype=np.float32)
    got = evaluate("add.ftz.f32 %d, %a, %a;", [tiny], np.float32)
    same(got, np.array([0.0, -0.0, 2.0], dtype=np.float32))


def test_vector_moves() -> None:
    line = "{ .reg .b16 low, high; mov.b32 {low, high}, %a; mov.b32 %d, {high, low}; }"
    got = evaluate(line, [A], np.uint32)
    assert np.array_equal(got, (A >> 16) | (A << 16))


@pytest.mark.parametrize(
    "line",
    [
        "frobnicate.b32 %r0, %r1;",
        "add.rz.f32 %f0, %f1, %f2;",
        "add.s32.wide %r0, %r1, %r2;",
        "add.b33 %r0, %r1, %r2;",
        "add.s64 %rd0, %r1, %r2;",
        "cvt.rz.f16.f32 %h0, %f0;",
        "cvt.rn.e4m3x2.f32 %h0, %f0, %f1;",
        "ld.surf.u32 %r0, [%p0];",
        "ld.global.v2.u32 %r0, [%p0];",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r0}, {%r1}, {%r2}, {%r3};",
        "cp.async.bulk.commit_group;",
        "cp.async.cg.shared.global [%r0], [%p0], 8;",
        "call foo;",
        "@%q0 bar.sync 0;",
        "bar.arrive 0, 64;",
    ],
)
def test_what_is_not_known_is_an_error(line: str) -> None:
    with pytest.raises(PtxError, match="PTX line"):
        execute(program(kernel_text(line, 1)), [A])
