"""What instructions act on: the lanes of a group with their registers, and copies in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .memory import GlobalMemory, KernelError, SharedMemory
from .parser import Location
from .values import RAW, Array, bits_of, read, resize, write

if TYPE_CHECKING:
    from .machine import Machine

WARP = 32


@dataclass(frozen=True)
class Launch:
    """A one-dimensional grid, the address of its parameters, and the bytes of dynamic shared."""

    ctas: int
    threads: int
    shared_bytes: int
    params: int

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return -(-self.threads // WARP)


class Context:
    """Lanes that run together. Values are kept here until the lanes part."""

    def __init__(self, machine: Machine, lanes: Array, parent: Context | None = None) -> None:
        self.machine = machine
        self.lanes = lanes
        self.count = len(lanes)
        self.values: dict[str, Array] = {}
        self.dirty: set[str] = set()
        self.parent = parent
        self.index: Array | None = None  # within the parent
        self._whole: bool | None = None

    # ---- Registers ----

    def get(self, name: str) -> Array:
        """The raw bits of a register."""
        raw = self.values.get(name)
        if raw is None:
            if self.parent is not None:
                raw = self.parent.get(name)[self.index]
            else:
                raw = self.machine.register(name)[self.lanes]
            self.values[name] = raw
        return raw

    def put(self, name: str, raw: Array) -> None:
        self.values[name] = raw
        self.dirty.add(name)

    def guard(self, name: str) -> Array:
        return ~self.get(name[1:]) if name.startswith("!") else self.get(name)

    def part(self, index: Array) -> Context:
        """Some of the lanes, on their own until `merge`."""
        part = Context(self.machine, self.lanes[index], self)
        part.index = index
        return part

    def merge(self) -> None:
        assert self.parent is not None
        for name in self.dirty:
            whole = self.parent.get(name).copy()
            whole[self.index] = self.values[name]
            self.parent.put(name, whole)

    def flush(self, live: frozenset[str]) -> None:
        """Puts what is still needed where a later group finds it."""
        for name in self.dirty & live:
            self.machine.register(name)[self.lanes] = self.values[name]

    def set(self, name: str, value: Array, type_name: str) -> None:
        """Writes a register; `_` is nowhere."""
        if name == "_":
            return
        raw = write(np.ascontiguousarray(value), type_name)
        bits = self.machine.kernel.registers[name]
        self.put(name, resize(raw, type_name, bits))

    # ---- Operands ----

    def operand(self, text: str, type_name: str) -> Array:
        """The value of a register, a constant, a special register or an address."""
        if text in self.machine.kernel.registers:
            return read(self.get(text), type_name)
        if text.startswith("!"):
            return ~self.get(text[1:])
        special = self.special(text)
        bits = bits_of(type_name)
        if special is None:
            return read(np.full(self.count, constant(text, type_name), RAW[bits]), type_name)
        return read(special.astype(RAW[bits]), type_name)

    def special(self, text: str) -> Array | None:
        machine = self.machine
        tid = machine.tid[self.lanes]
        if text == "%tid.x":
            return tid
        if text == "%ctaid.x":
            return machine.cta[self.lanes]
        if text == "%laneid":
            return tid % WARP
        if text == "%warpid":
            return tid // WARP
        fixed = machine.fixed.get(text)
        return None if fixed is None else np.full(self.count, fixed)

    # ---- Who is here ----

    @property
    def ctas(self) -> Array:
        return self.machine.cta[self.lanes]

    @property
    def warps(self) -> Array:
        """The number of each lane's warp in the grid."""
        return self.ctas * self.machine.launch.warps + self.machine.tid[self.lanes] // WARP

    def whole_warps(self) -> bool:
        """Whether the lanes are whole warps, in order."""
        if self._whole is None:
            whole = self.count % WARP == 0 and self.machine.launch.threads % WARP == 0
            if whole:
                rows = self.lanes.reshape(-1, WARP)
                first = rows[:, 0]
                whole = bool(np.all((first % WARP == 0) & (rows[:, -1] == first + WARP - 1)))
            self._whole = whole
        return self._whole

    def position(self, threads: Array) -> Array:
        """Where threads of the grid are among the lanes; -1 for those that are not."""
        where = np.full(self.machine.num_threads, -1)
        where[self.lanes] = np.arange(self.count)
        result: Array = where[threads]
        return result


def constant(text: str, type_name: str) -> int:
    """The bits of `0fXXXXXXXX`, `0dXXXXXXXXXXXXXXXX` or an integer."""
    bits = bits_of(type_name)
    if text[:2] in ("0f", "0F", "0d", "0D"):
        width = 32 if text[1] in "fF" else 64
        if width != bits:
            raise ValueError(f"{text} is no {type_name}")
        return int(text[2:], 16)
    if type_name == "pred":
        return int(text) & 1
    return int(text.rstrip("U"), 0) & ((1 << bits) - 1)


@dataclass
class _Copy:
    lanes: Array
    groups: Array
    sources: Array
    offsets: Array  # in shared memory
    size: int
    source_sizes: Array
    where: Location


@dataclass
class CopyQueue:
    """cp.async: a copy lands at once, or as late as its thread's wait allows."""

    num_threads: int
    late: bool
    pending: list[_Copy] = field(default_factory=list)
    committed: Array = field(init=False)

    def __post_init__(self) -> None:
        self.committed = np.zeros(self.num_threads, dtype=np.int64)

    def issue(
        self,
        lanes: Array,
        sources: Array,
        offsets: Array,
        size: int,
        source_sizes: Array,
        where: Location,
        shared: SharedMemory,
    ) -> None:
        copy = _Copy(lanes, self.committed[lanes], sources, offsets, size, source_sizes, where)
        if self.late:
            shared.forget(offsets, size)
            self.pending.append(copy)
        else:
            self.land(copy, np.ones(len(lanes), dtype=np.bool_), shared)

    def commit(self, lanes: Array) -> None:
        self.committed[lanes] += 1

    def wait(self, lanes: Array, newest: int, shared: SharedMemory) -> None:
        """Lands all groups of these threads but the newest ones; all copies for -1."""
        chosen = np.zeros(self.num_threads, dtype=np.bool_)
        chosen[lanes] = True
        for copy in self.pending:
            now = chosen[copy.lanes]
            if newest >= 0:
                now &= copy.groups < self.committed[copy.lanes] - newest
            self.land(copy, now, shared)
        self.pending = [copy for copy in self.pending if len(copy.lanes)]

    @staticmethod
    def land(copy: _Copy, now: Array, shared: SharedMemory) -> None:
        for byte in range(copy.size):
            real = byte < copy.source_sizes[now]
            value = np.zeros(len(real), dtype=np.uint8)
            value[real] = GlobalMemory.load(copy.sources[now][real] + np.uint64(byte), 8)
            shared.store(copy.offsets[now] + byte, value)
        for name in ("lanes", "groups", "sources", "offsets", "source_sizes"):
            setattr(copy, name, getattr(copy, name)[~now])

    def check_exit(self, lanes: Array, kernel: str) -> None:
        for copy in self.pending:
            if np.isin(copy.lanes, lanes).any():
                raise KernelError(f"{kernel}: exit with a copy in flight, issued at {copy.where}")
