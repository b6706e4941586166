"""What the lanes of a warp do together. The machine has brought the lanes of a mask together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .instructions import Decoder, Operation, handles
from .memory import KernelError
from .state import WARP, Context
from .values import Array, read, write


@handles("bar", "barrier")
def _bar(d: Decoder) -> Operation:
    """bar.warp.sync; barriers of the CTA are the machine's."""
    d.need("warp")
    d.need("sync")
    d.finish(1)
    return lambda c: None


@handles("shfl")
def _shuffle(d: Decoder) -> Operation:
    d.need("sync")
    mode = d.need("up", "down", "bfly", "idx")
    d.need("b32")
    d.finish(5)
    destinations = d.operands[0].split("|")

    def run(c: Context) -> None:
        value, b, control = (c.operand(d.operands[i], "b32") for i in (1, 2, 3))
        mask = c.operand(d.operands[4], "b32")
        lane = c.machine.tid[c.lanes] % WARP
        step, clamp = b.astype(np.int64) & 31, control.astype(np.int64) & 31
        segment = (control.astype(np.int64) >> 8) & 31
        least = lane & segment
        most = least | (clamp & ~segment)
        source = {
            "up": lane - step,
            "down": lane + step,
            "bfly": lane ^ step,
            "idx": least | (step & ~segment),
        }[mode]
        valid = source >= most if mode == "up" else source <= most
        source = np.where(valid, source, lane)
        index = c.position(np.clip(c.lanes - lane + source, 0, c.machine.num_threads - 1))
        if (((mask.astype(np.int64) >> source) & 1 == 0) | (index < 0)).any():
            raise KernelError(f"a shuffle from a lane that is not in its mask: {d.instruction}")
        c.set(destinations[0], value[index], "b32")
        if len(destinations) > 1:
            c.set(destinations[1], valid, "pred")

    return run


def _per_mask(c: Context, mask: Array, function: Callable[[Array], Any]) -> Array:
    """function(lane indices) for each warp and mask, given to all of its lanes."""
    result: list[Any] = [None] * c.count
    key = (c.warps.astype(np.int64) << 32) | mask.astype(np.int64)
    for one in np.unique(key):
        index = np.flatnonzero(key == one)
        value = function(index)
        for i in index:
            result[i] = value
    return np.array(result)


@handles("vote")
def _vote(d: Decoder) -> Operation:
    d.need("sync")
    mode = d.need("all", "any", "uni", "ballot")
    d.need("b32" if mode == "ballot" else "pred")
    d.finish(3)

    def run(c: Context) -> None:
        predicate = c.operand(d.operands[1], "pred")
        lane = c.machine.tid[c.lanes] % WARP

        def vote(index: Array) -> Any:
            votes = predicate[index]
            if mode == "ballot":
                return np.uint32(sum(1 << int(i) for i in lane[index][votes]))
            if mode == "uni":
                return votes.all() or not votes.any()
            return votes.all() if mode == "all" else votes.any()

        mask = c.operand(d.operands[2], "b32")
        c.set(d.operands[0], _per_mask(c, mask, vote), "b32" if mode == "ballot" else "pred")

    return run


_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@handles("redux")
def _redux(d: Decoder) -> Operation:
    d.need("sync")
    reduction = _REDUCTIONS[d.need(*_REDUCTIONS)]
    type_name = d.type()
    if type_name not in ("u32", "s32", "b32"):
        raise d.error()
    d.finish(3)
    source = d.source(1, type_name)

    def run(c: Context) -> None:
        value = source(c)
        mask = c.operand(d.operands[2], "b32")
        result = _per_mask(c, mask, lambda index: reduction.reduce(value[index], dtype=value.dtype))
        c.set(d.operands[0], result.astype(value.dtype), type_name)

    return run


def _whole(d: Decoder, c: Context) -> None:
    if not c.whole_warps():
        raise KernelError(f"not all lanes of a warp are there: {d.instruction}")


@handles("ldmatrix")
def _ldmatrix(d: Decoder) -> Operation:
    """Lane 8 m + r has the address of row r of 8x8 matrix m; lane 4 r + i gets elements 2 i and
    2 i + 1 of row r, or of column r with .trans.
    """
    for word in ("sync", "aligned", "m8n8", "b16"):
        d.need(word)
    count = int(d.need("x1", "x2", "x4")[1:])
    transposed = d.take("trans") is not None
    d.need("shared", "shared::cta")
    d.finish(2)
    names, address, where = d.vector(0), d.address(1), d.instruction.location
    if len(names) != count:
        raise d.error()

    def run(c: Context) -> None:
        _whole(d, c)
        shared = c.machine.shared
        rows = address(c).reshape(-1, WARP)[:, : 8 * count]
        ctas = c.ctas.reshape(-1, WARP)[:, : 8 * count]
        shared.check(rows.ravel(), 16, where, write=False)
        start = shared.offsets(ctas, rows)
        offsets = start[..., None] + 2 * np.arange(8)
        loaded = shared.load(offsets.ravel(), 16, where).reshape(-1, count, 8, 8)
        if transposed:
            loaded = loaded.swapaxes(2, 3)
        for m, name in enumerate(names):
            c.set(name, np.ascontiguousarray(loaded[:, m]).view(np.uint32).ravel(), "b32")

    return run


@handles("movmatrix")
def _movmatrix(d: Decoder) -> Operation:
    for word in ("sync", "aligned", "m8n8", "trans", "b16"):
        d.need(word)
    d.finish(2)
    source = d.source(1, "b32")

    def run(c: Context) -> None:
        _whole(d, c)
        matrix = np.ascontiguousarray(source(c)).view(np.uint16).reshape(-1, 8, 8)
        turned = np.ascontiguousarray(matrix.swapaxes(1, 2)).view(np.uint32)
        c.set(d.operands[0], turned.ravel(), "b32")

    return run


def _from_quads(c: Context, names: list[str], kind: str) -> list[Array]:
    """Each register of a fragment as [warps, 8 groups, 4 threads of a group, elements]."""
    parts = [read(c.get(name), kind) for name in names]
    return [part.reshape(len(c.lanes) // WARP, 8, 4, -1).astype(np.float64) for part in parts]


def _join(rows: list[list[Array]]) -> Array:
    """A matrix from 8 x 8 (or 8 x 8-element) tiles that lane groups hold row by row."""
    tiles = [[tile.reshape(tile.shape[0], 8, -1) for tile in row] for row in rows]
    return np.concatenate([np.concatenate(row, axis=2) for row in tiles], axis=1)


@handles("mma")
def _mma(d: Decoder) -> Operation:
    """D = A B + C, as the fragments of the PTX ISA lay them out, summed in float64."""
    for word in ("sync", "aligned", "row", "col"):
        d.need(word)
    depth = int(d.need("m16n8k8", "m16n8k16").split("k")[1])
    types = [d.type() for _ in range(4)][::-1]
    result, kind, other, addend = types
    if kind not in ("f16", "bf16") or other != kind or result != addend:
        raise d.error()
    if result not in ("f32", "f16") or (kind == "bf16" and result != "f32"):
        raise d.error()
    d.finish(4)
    d_names, a_names, b_names, c_names = (d.vector(i) for i in range(4))
    held = result if result == "f32" else "f16x2"
    num_accumulators = 4 if result == "f32" else 2
    lengths = [num_accumulators, depth // 4, depth // 8, num_accumulators]
    if [len(v) for v in (d_names, a_names, b_names, c_names)] != lengths:
        raise d.error()

    def run(c: Context) -> None:
        _whole(d, c)
        a = _from_quads(c, a_names, f"{kind}x2")
        # Register 2 j + i: rows 8 i to 8 i + 7, columns 8 j to 8 j + 7.
        left = _join([a[0::2], a[1::2]])
        b = _from_quads(c, b_names, f"{kind}x2")
        right = np.concatenate([t.reshape(t.shape[0], 8, 8) for t in b], axis=2).swapaxes(1, 2)
        total = np.matmul(left, right)
        sums = _from_quads(c, c_names, held)
        if held == "f32":
            pairs = [np.concatenate(sums[2 * i : 2 * i + 2], axis=3) for i in range(2)]
        else:
            pairs = sums
        total += _join([[pairs[0]], [pairs[1]]])
        quads = total.reshape(-1, 2, 8, 4, 2)
        for i, name in enumerate(d_names):
            if held == "f32":
                value = quads[:, i // 2, :, :, i % 2].ravel()
                c.put(name, write(value.astype(np.float32), "f32"))
            else:
                c.put(name, write(quads[:, i].ravel(), held))

    return run
