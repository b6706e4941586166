"""Loads, stores, atomics, fences and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .instructions import Decoder, Operation, Source, handles
from .memory import SHARED_WINDOW, GlobalMemory, KernelError
from .state import Context
from .values import RAW, Array, bits_of, read, resize, write

# Hints, and orders that hold here anyway: an instruction ends before the next one begins.
_HINTS = (
    *("weak", "relaxed", "acquire", "release", "acq_rel", "volatile"),
    *("cta", "cluster", "gpu", "sys", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"),
    *(f"L1::{x}" for x in ("no_allocate", "evict_first", "evict_last", "evict_normal")),
    *("L2::64B", "L2::128B", "L2::256B"),
)
_SHARED = ("shared", "shared::cta")


def _skip_hints(d: Decoder) -> None:
    while d.take(*_HINTS):
        pass


def _space(d: Decoder) -> str:
    space = d.take("global", "param", "const", *_SHARED)
    return "generic" if space is None else "shared" if space in _SHARED else space


class _Place:
    """Checked places of one access of each lane: in shared memory or in a buffer."""

    def __init__(
        self, d: Decoder, c: Context, space: str, addresses: Array, size: int, write: bool
    ) -> None:
        memory, self.where = c.machine.memory, d.instruction.location
        if space == "generic":
            inside = (addresses >= SHARED_WINDOW) & (addresses < 2 * SHARED_WINDOW)
            if inside.any() and not inside.all():
                raise KernelError(f"one access goes to shared and to global memory; {self.where}")
            if inside.any():
                space, addresses = "shared", addresses - np.uint64(SHARED_WINDOW)
        self.shared = c.machine.shared if space == "shared" else None
        if self.shared is not None:
            self.shared.check(addresses, size, self.where, write=write)
            self.addresses = self.shared.offsets(c.ctas, addresses)
            return
        memory.check(addresses, size, self.where, write=write)
        if space != "param":
            memory.count(addresses, size, c.warps, self.where, write=write)
        self.addresses = addresses.astype(np.int64)

    def load(self, offset: int, bits: int) -> Array:
        if self.shared is not None:
            return self.shared.load(self.addresses + offset, bits, self.where)
        return GlobalMemory.load(self.addresses + offset, bits)

    def store(self, offset: int, raw: Array) -> None:
        if self.shared is not None:
            self.shared.store(self.addresses + offset, raw)
        else:
            GlobalMemory.store(self.addresses + offset, raw)


@handles("ld")
def _load(d: Decoder) -> Operation:
    type_name = d.type()
    _skip_hints(d)
    space = _space(d)
    names = d.vector(0)
    count = int((d.take("v2", "v4", "v8") or "v1")[1:])
    d.finish(2)
    if count != len(names):
        raise d.error()
    address, bits = d.address(1), bits_of(type_name)

    def run(c: Context) -> None:
        place = _Place(d, c, space, address(c), count * bits // 8, write=False)
        for i, name in enumerate(names):
            if name != "_":
                raw = place.load(i * bits // 8, bits)
                c.put(name, resize(raw, type_name, d.kernel.registers[name]))

    return run


@handles("st")
def _store(d: Decoder) -> Operation:
    type_name = d.type()
    _skip_hints(d)
    space = _space(d)
    names = d.vector(1)
    count = int((d.take("v2", "v4", "v8") or "v1")[1:])
    d.finish(2)
    if count != len(names):
        raise d.error()
    address, bits = d.address(0), bits_of(type_name)

    def run(c: Context) -> None:
        place = _Place(d, c, space, address(c), count * bits // 8, write=True)
        for i, name in enumerate(names):
            place.store(i * bits // 8, c.operand(name, f"b{bits}"))

    return run


_ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b,
    "min": min,
    "max": max,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda _old, b: b,
    "cas": lambda old, b, c: c if old == b else old,
    "inc": lambda old, b: old * 0 if old >= b else old + old.dtype.type(1),
    "dec": lambda old, b: b if old == 0 or old > b else old - old.dtype.type(1),
}


@handles("atom", "red")
def _atomic(d: Decoder) -> Operation:
    """One lane after the other, in order."""
    returns = d.instruction.name == "atom"
    type_name = d.type()
    _skip_hints(d)
    space = _space(d)
    name = d.need(*_ATOMICS)
    function = _ATOMICS[name]
    first = 1 if returns else 0
    num_sources = 2 if name == "cas" else 1
    d.finish(first + 1 + num_sources)
    address, bits = d.address(first), bits_of(type_name)
    get: list[Source] = [d.source(first + 1 + i, type_name) for i in range(num_sources)]

    def run(c: Context) -> None:
        before = np.zeros(c.count, dtype=RAW[bits])
        addresses, sources = address(c), [source(c) for source in get]
        _Place(d, c, space, addresses, bits // 8, write=True)
        for lane in range(c.count):
            part = c.part(np.array([lane]))
            place = _Place(d, part, space, addresses[lane : lane + 1], bits // 8, write=True)
            raw = place.load(0, bits)
            new = function(read(raw, type_name)[0], *[source[lane] for source in sources])
            place.store(0, write(np.array([new]), type_name))
            before[lane] = raw[0]
        if returns and d.operands[0] != "_":
            c.put(d.operands[0], before)

    return run


@handles("membar", "fence", "griddepcontrol", "prefetch")
def _nothing(d: Decoder) -> Operation:
    d.left = [m for m in d.left if m not in ("gl", "sc", "wait", "launch_dependents", "L1", "L2")]
    _skip_hints(d)
    d.take("global")
    return lambda c: None


@handles("trap")
def _trap(d: Decoder) -> Operation:
    def run(c: Context) -> None:
        raise KernelError(f"trap at {d.instruction.location}")

    return run


@handles("cp")
def _copy(d: Decoder) -> Operation:
    d.need("async")
    if d.take("commit_group"):
        return lambda c: c.machine.copies.commit(c.lanes)
    if d.take("wait_all"):
        return lambda c: c.machine.copies.wait(c.lanes, -1, c.machine.shared)
    if d.take("wait_group"):
        newest = int(d.operands[0], 0)
        return lambda c: c.machine.copies.wait(c.lanes, newest, c.machine.shared)
    level = d.need("ca", "cg")
    d.need(*_SHARED)
    d.need("global")
    _skip_hints(d)
    d.finish(3, 4)
    size = int(d.operands[2], 0)
    if size not in ((16,) if level == "cg" else (4, 8, 16)):
        raise d.error()
    to, source, where = d.address(0), d.address(1), d.instruction.location

    def run(c: Context) -> None:
        # The fourth operand is the bytes to read; the rest becomes zero.
        length = c.operand(d.operands[3], "u32") if len(d.operands) > 3 else np.full(c.count, size)
        if (length > size).any():
            raise KernelError(f"cp.async reads more than it writes; {where}")
        sources, targets = source(c), to(c)
        memory, shared = c.machine.memory, c.machine.shared
        for bytes_read in np.unique(length[length > 0]):
            chosen = length == bytes_read
            memory.check(sources[chosen], int(bytes_read), where, write=False, align=size)
            memory.count(sources[chosen], int(bytes_read), c.warps[chosen], where, write=False)
        shared.check(targets, size, where, write=True)
        offsets = shared.offsets(c.ctas, targets)
        c.machine.copies.issue(c.lanes, sources, offsets, size, length, where, shared)

    return run
