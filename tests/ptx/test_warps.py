"""What threads do together: shuffles, barriers, matrices, copies in flight, atomics."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from .harness import evaluate, execute, kernel_text, program
from .memory import KernelError
from .values import Array

rng = np.random.default_rng(1)
LANES = np.arange(64, dtype=np.uint32)


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("shfl.sync.bfly.b32 %d, %a, 5, 31, -1;", lambda i: i ^ 5),
        ("shfl.sync.idx.b32 %d, %a, 37, 31, -1;", lambda i: 5),
        ("shfl.sync.up.b32 %d, %a, 3, 0, -1;", lambda i: i - 3 if i >= 3 else i),
        ("shfl.sync.down.b32 %d, %a, 3, 31, -1;", lambda i: i + 3 if i + 3 < 32 else i),
        # Segments of 8 lanes.
        ("shfl.sync.up.b32 %d, %a, 3, 0x1800, -1;", lambda i: i - 3 if i % 8 >= 3 else i),
        ("shfl.sync.down.b32 %d, %a, 3, 0x181f, -1;", lambda i: i + 3 if i % 8 < 5 else i),
        ("shfl.sync.idx.b32 %d, %a, 2, 0x181f, -1;", lambda i: i // 8 * 8 + 2),
    ],
)
def test_shuffles(line: str, source: object) -> None:
    assert callable(source)
    values = rng.integers(0, 2**32, 64, dtype=np.uint32)
    got = evaluate(line, [values], np.uint32)
    assert got.tolist() == [int(values[i // 32 * 32 + source(i % 32)]) for i in range(64)]


def test_votes_and_reductions() -> None:
    x = rng.integers(0, 1000, 64, dtype=np.uint32)
    line = "setp.gt.u32 %q0, %a, 500; vote.sync.ballot.b32 %d, %q0, -1;"
    ballots = [sum(int(x[w + i] > 500) << i for i in range(32)) for w in (0, 32)]
    assert evaluate(line, [x], np.uint32).tolist() == [b for b in ballots for _ in range(32)]
    for name, function in (("add", np.sum), ("min", np.min), ("max", np.max)):
        got = evaluate(f"redux.sync.{name}.s32 %d, %a, -1;", [x], np.uint32)
        assert got[[0, 31, 32, 63]].tolist() == [
            int(function(x[w : w + 32])) for w in (0, 0, 32, 32)
        ]
    line = "setp.lt.u32 %q0, %a, 32; vote.sync.any.pred %q1, %q0, -1; selp.b32 %d, 1, 0, %q1;"
    assert evaluate(line, [LANES], np.uint32).tolist() == [1] * 32 + [0] * 32


DIVERGENT_SHUFFLE = """
setp.lt.u32 %q0, %tid, 16;
mov.u32 %r0, 7;
@%q0 bra MEET;
mul.lo.u32 %r0, %tid, 3;
MEET:
shfl.sync.bfly.b32 %r1, %r0, 16, 31, -1;
mul.wide.u32 %rd0, %tid, 4;
add.s64 %rd1, %p0, %rd0;
st.global.u32 [%rd1], %r1;
"""


def test_lanes_that_parted_meet_at_a_shuffle() -> None:
    out = np.zeros(32, dtype=np.uint32)
    execute(program(kernel_text(DIVERGENT_SHUFFLE, 1)), [out])
    assert out.tolist() == [3 * (i + 16) for i in range(16)] + [7] * 16


def test_halves_of_a_warp_with_masks_of_their_own() -> None:
    line = "setp.lt.u32 %q0, %tid, 16; selp.b32 %r0, 0xffff, 0xffff0000, %q0;"
    values = np.arange(32, dtype=np.uint32)
    got = evaluate(f"{line} redux.sync.add.u32 %d, %a, %r0;", [values], np.uint32)
    assert got.tolist() == [120] * 16 + [376] * 16


@pytest.mark.parametrize(
    "line",
    [
        "@%q0 ret; shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1;",
        "@%q0 bra A; bar.warp.sync -1; ret; A: bar.warp.sync -1;",
        "@%q0 bra A; bar.sync 0; ret; A: bar.sync 1;",
    ],
)
def test_deadlock_is_told(line: str) -> None:
    body = f"setp.eq.u32 %q0, %tid, 3; {line}"
    with pytest.raises(KernelError, match=r"deadlock(.|\n)*PTX line"):
        execute(program(kernel_text(body, 1)), [np.zeros(1)], threads=64)


# Each thread stores its number, and loads that of its opposite.
REVERSE = """
mov.u32 %r0, buffer;
shl.b32 %r1, %tid, 2;
add.s32 %r2, %r0, %r1;
setp.ge.u32 %q0, %tid, 100;
@%q0 ret;
st.shared.u32 [%r2], %tid;
bar.sync 0;
mov.u32 %r3, 99;
sub.u32 %r3, %r3, %tid;
shl.b32 %r3, %r3, 2;
add.s32 %r3, %r3, %r0;
ld.shared.u32 %r4, [%r3];
mov.u32 %r5, %ctaid.x;
mad.lo.u32 %r5, %r5, 100, %tid;
mul.wide.u32 %rd0, %r5, 4;
add.s64 %rd1, %p0, %rd0;
st.global.u32 [%rd1], %r4;
"""
REVERSE_SHARED = ".shared .align 4 .b8 buffer[400];"


def test_barrier_counts_threads_that_have_not_exited() -> None:
    out = np.zeros(300, dtype=np.uint32)
    execute(program(kernel_text(REVERSE, 1, REVERSE_SHARED)), [out], ctas=3, threads=128)
    assert out.tolist() == list(range(99, -1, -1)) * 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "setp.ge.u32 %q0, %tid, 100",
            "setp.ge.u32 %q0, %tid, 101",
            "shared memory, which has 400",
        ),
        ("[%r3]", "[%r3+2]", "misaligned"),
        ("[%rd1]", "[%rd1+4]", "outside: byte 1200 of array 0"),
        ("st.shared.u32 [%r2], %tid;", "@%q0 st.shared.u32 [%r2], %tid;", "uninitialised"),
        ("st.global.u32 [%rd1]", "st.global.u32 [%r2]", "outside"),
    ],
)
def test_bad_accesses_are_told(old: str, new: str, message: str) -> None:
    text = kernel_text(REVERSE.replace(old, new), 1, REVERSE_SHARED)
    with pytest.raises(KernelError, match=message):
        execute(program(text), [np.zeros(300, dtype=np.uint32)], ctas=3, threads=128)


def test_inputs_are_read_only() -> None:
    body = "st.global.u32 [%p0], %tid;"
    with pytest.raises(KernelError, match="write to read-only byte 0 of array 0"):
        execute(program(kernel_text(body, 1)), [np.zeros(4, dtype=np.uint32)], read_only=1)


def test_atomics_see_each_other() -> None:
    data = np.zeros(64 + 1, dtype=np.uint32)
    body = """
    atom.acq_rel.gpu.global.inc.u32 %r0, [%p0], 63;
    mul.wide.u32 %rd0, %r0, 4;
    add.s64 %rd1, %p0, %rd0;
    red.global.add.u32 [%rd1+4], 1;
    """
    execute(program(kernel_text(body, 1)), [data], ctas=2)
    assert data.tolist() == [0] + [1] * 64


# ---- cp.async ----

COPY = """
mov.u32 %r0, stage;
mul.lo.u32 %r1, %tid, 32;
add.s32 %r2, %r0, %r1;
mul.wide.u32 %rd0, %tid, 32;
add.s64 %rd1, %p0, %rd0;
cp.async.cg.shared.global [%r2], [%rd1], 16;
cp.async.commit_group;
cp.async.cg.shared.global [%r2+16], [%rd1+16], 16, 6;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2];
cp.async.wait_group 0;
ld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [%r2+16];
add.s64 %rd2, %p1, %rd0;
st.global.v4.u32 [%rd2], {%r3, %r4, %r5, %r6};
st.global.v4.u32 [%rd2+16], {%r7, %r8, %r9, %r10};
"""
STAGE = ".shared .align 16 .b8 stage[1024];"


def copied(text: str, *, late: bool) -> tuple[Array, Array]:
    source = rng.integers(1, 255, 1024, dtype=np.uint8)
    out = np.zeros(1024, dtype=np.uint8)
    kernel = program(kernel_text(text, 2, STAGE))
    execute(kernel, [source, out], read_only=1, late_copies=late)
    return source.reshape(32, 32), out.reshape(32, 32)


@pytest.mark.parametrize("late", [False, True])
def test_copies_land_and_fill_with_zeros(late: bool) -> None:
    source, out = copied(COPY, late=late)
    assert np.array_equal(out[:, :22], source[:, :22])
    assert not out[:, 22:].any()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cp.async.wait_group 1;", "", "uninitialised"),
        ("cp.async.wait_group 0;", "cp.async.wait_group 1;", "uninitialised"),
        ("cp.async.wait_group 0;\nld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [%r2+16];", "", "flight"),
    ],
)
def test_late_copies_show_a_missing_wait(old: str, new: str, message: str) -> None:
    assert old in COPY
    copied(COPY.replace(old, new), late=False)
    with pytest.raises(KernelError, match=message):
        copied(COPY.replace(old, new), late=True)


# ---- Matrices: each test spells out the tables of the PTX ISA, element by element. ----

GATHER_ROWS = """
mov.u32 %r0, stage;
shl.b32 %r1, %tid, 4;
add.s32 %r2, %r0, %r1;
mul.wide.u32 %rd0, %tid, 16;
add.s64 %rd1, %p0, %rd0;
ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd1];
st.shared.v4.u32 [%r2], {%r3, %r4, %r5, %r6};
bar.warp.sync -1;
"""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(count: int, trans: bool) -> None:
    matrices = rng.integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    names = [f"%r{10 + i}" for i in range(count)]
    suffix = ".trans" if trans else ""
    body = GATHER_ROWS + (
        f"ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {{{', '.join(names)}}}, [%r2];\n"
        "add.s64 %rd2, %p1, %rd0;\n"
    )
    body += "\n".join(f"st.global.u32 [%rd2+{4 * i}], {name};" for i, name in enumerate(names))
    out = np.zeros((32, 4), dtype=np.uint32)
    execute(program(kernel_text(body, 2, STAGE)), [matrices, out], read_only=1)
    for lane, m in itertools.product(range(32), range(count)):
        row, column = lane // 4, 2 * (lane % 4)
        pair = [
            matrices[m, column + i, row] if trans else matrices[m, row, column + i] for i in (0, 1)
        ]
        assert out[lane, m] == int(pair[0]) | int(pair[1]) << 16


def test_movmatrix() -> None:
    matrix = rng.integers(0, 2**16, (8, 8), dtype=np.uint16)
    line = "movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;"
    got = evaluate(line, [matrix.view(np.uint32).ravel()], np.uint32)
    assert np.array_equal(got.view(np.uint16).reshape(8, 8), matrix.T)


def bf16(x: Array) -> Array:
    """Small integers are exact: their upper halves."""
    return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@pytest.mark.parametrize(("kind", "depth"), [("f16", 16), ("bf16", 16), ("f16", 8), ("bf16", 8)])
def test_mma(kind: str, depth: int) -> None:
    a, b = rng.integers(-8, 8, (16, depth)), rng.integers(-8, 8, (depth, 8))
    c = rng.integers(-100, 100, (16, 8)).astype(np.float32)
    encode = bf16 if kind == "bf16" else lambda x: x.astype(np.float16).view(np.uint16)
    left, right = encode(a), encode(b)
    words = np.zeros((32, 16), dtype=np.uint32)
    for lane in range(32):
        group, t = lane // 4, lane % 4
        # a_i: row groupID for i in {0, 1, 4, 5}, else groupID + 8; column 2 t + (i & 1), and 8 more
        # for i >= 4.
        for i in range(depth // 2):
            row = group + (8 if i % 4 >= 2 else 0)
            element = int(left[row, 2 * t + (i & 1) + (8 if i >= 4 else 0)])
            words[lane, i // 2] |= np.uint32(element << 16 * (i & 1))
        # b_i: row 2 t + (i & 1), + 8 for i >= 2; column groupID.
        for i in range(depth // 4):
            element = int(right[2 * t + (i & 1) + (8 if i >= 2 else 0), group])
            words[lane, 4 + i // 2] |= np.uint32(element << 16 * (i & 1))
        # c_i: row groupID, + 8 for i >= 2; column 2 t + (i & 1).
        for i in range(4):
            words[lane, 8 + i] = c[group + 8 * (i // 2), 2 * t + (i & 1)].view(np.uint32)
    registers = [f"%r{i}" for i in range(12)]
    loads = "".join(f"ld.global.u32 {r}, [%rd1+{4 * i}];\n" for i, r in enumerate(registers))
    stores = "".join(f"st.global.u32 [%rd1+{48 + 4 * i}], %r{12 + i};\n" for i in range(4))
    body = f"""
    mul.wide.u32 %rd0, %tid, 64;
    add.s64 %rd1, %p0, %rd0;
    {loads}
    mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{%r12, %r13, %r14, %r15}},
      {{{", ".join(registers[: depth // 4])}}}, {{{", ".join(registers[4 : 4 + depth // 8])}}},
      {{%r8, %r9, %r10, %r11}};
    {stores}
    """
    execute(program(kernel_text(body, 1)), [words])
    want = a @ b + c
    for lane, i in itertools.product(range(32), range(4)):
        row, column = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + (i & 1)
        assert words[lane, 12 + i].view(np.float32) == want[row, column]
