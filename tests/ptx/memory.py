"""What addresses mean: named buffers of global memory, and each CTA's shared memory."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .parser import Location
from .values import RAW, Array

_BASE = 4096
# The whole address space of the process: an access that passed the bounds check indexes this.
_bytes: Any = (ctypes.c_uint8 * ((1 << 47) - _BASE)).from_address(_BASE)
_PROCESS: Array = np.frombuffer(_bytes, dtype=np.uint8)
_VIEWS = {bits: _PROCESS.view(RAW[bits]) for bits in (8, 16, 32, 64)}
# Generic addresses of shared memory: far below any buffer.
SHARED_WINDOW = 1 << 24
POISON = 0xFF


class KernelError(Exception):
    """A kernel did what it must not do; the message names the place."""


def _all_written(bits: int) -> Any:
    """What `bits` / 8 bytes of True are as one integer."""
    return RAW[bits](int.from_bytes(b"\x01" * (bits // 8), "little"))


@dataclass
class Buffer:
    """Bytes that a launch may touch."""

    base: int
    size: int
    name: str
    read_only: bool = False


@dataclass
class Count:
    """What one place moved: bytes, and the 32-byte sectors that each warp's request touched."""

    requests: int = 0
    num_bytes: int = 0
    sectors: int = 0


@dataclass
class Traffic:
    """The global memory traffic of a launch by the size of an access and where it stands: the
    source line, or the PTX line where there is none."""

    reads: dict[str, Count] = field(default_factory=dict)
    writes: dict[str, Count] = field(default_factory=dict)

    def total(self, *, write: bool, size: int | None = None) -> Count:
        """The sum, of the accesses of `size` bytes if that is given."""
        places = self.writes if write else self.reads
        counts = [c for place, c in places.items() if size in (None, int(place.split()[0]))]
        return Count(
            sum(c.requests for c in counts),
            sum(c.num_bytes for c in counts),
            sum(c.sectors for c in counts),
        )

    def table(self) -> str:
        """A line for each place."""
        rows = [f"{'requests':>9} {'bytes':>9} {'sectors':>9} {'ideal':>9}"]
        for verb, counts in (("read", self.reads), ("write", self.writes)):
            for place, c in counts.items():
                ideal = -(-c.num_bytes // 32)
                rows.append(
                    f"{c.requests:9} {c.num_bytes:9} {c.sectors:9} {ideal:9} {verb} {place}"
                )
        return "\n".join(rows)


@dataclass
class GlobalMemory:
    """The buffers, at the addresses that they have in this process."""

    buffers: list[Buffer] = field(default_factory=list)
    traffic: Traffic | None = None
    _tables: tuple[Array, Array, Array] | None = None

    def add(self, buffer: Buffer) -> None:
        """Adds a buffer; those that it overlaps are gone."""
        end = buffer.base + buffer.size
        for old in [b for b in self.buffers if b.base < end and buffer.base < b.base + b.size]:
            self.remove(old)
        bisect.insort(self.buffers, buffer, key=lambda b: b.base)
        self._tables = None

    def remove(self, buffer: Buffer) -> None:
        if buffer in self.buffers:
            self.buffers.remove(buffer)
        self._tables = None

    def clear(self) -> None:
        self.buffers.clear()
        self._tables = None

    def tables(self) -> tuple[Array, Array, Array]:
        """Of the buffers in order: where they begin, where they end, which are read-only."""
        if self._tables is None:
            bases = np.array([b.base for b in self.buffers], dtype=np.uint64)
            ends = np.array([b.base + b.size for b in self.buffers], dtype=np.uint64)
            self._tables = bases, ends, np.array([b.read_only for b in self.buffers])
        return self._tables

    def describe(self, address: int) -> str:
        """Where an address lies, or lies next to."""
        index = bisect.bisect(self.buffers, address, key=lambda b: b.base) - 1
        if index < 0:
            return f"{address:#x}, in front of every buffer"
        buffer = self.buffers[index]
        return f"byte {address - buffer.base} of {buffer.name}, which has {buffer.size}"

    def check(
        self, addresses: Array, size: int, where: Location, *, write: bool, align: int | None = None
    ) -> None:
        """Raises KernelError unless every access is aligned, to its size, and within one buffer."""
        verb = "write" if write else "read"
        wrong = addresses % np.uint64(align or size) != 0
        if wrong.any():
            address = int(addresses[wrong][0])
            raise KernelError(f"misaligned {size}-byte {verb} at {self.describe(address)}; {where}")
        bases, ends, locked = self.tables()
        index = np.searchsorted(bases, addresses, "right") - 1
        wrong = (index < 0) | (addresses + np.uint64(size) > ends[index])
        if wrong.any():
            address = int(addresses[wrong][0])
            raise KernelError(f"{size}-byte {verb} outside: {self.describe(address)}; {where}")
        if write:
            wrong = locked[index]
            if wrong.any():
                address = int(addresses[wrong][0])
                raise KernelError(f"write to read-only {self.describe(address)}; {where}")

    def count(
        self, addresses: Array, size: int, warps: Array, where: Location, *, write: bool
    ) -> None:
        """Adds one instruction's accesses to the traffic."""
        if self.traffic is None:
            return
        places = self.traffic.writes if write else self.traffic.reads
        line = where.source or f"PTX line {where.line}"
        count = places.setdefault(f"{size:2} bytes at {line}", Count())
        warp = warps.astype(np.int64)
        first, last = addresses.astype(np.int64) >> 5, (addresses.astype(np.int64) + size - 1) >> 5
        count.requests += len(np.unique(warp))
        count.num_bytes += size * len(addresses)
        count.sectors += len(np.unique(np.concatenate([(warp << 43) + first, (warp << 43) + last])))

    @staticmethod
    def load(addresses: Array, bits: int) -> Array:
        return _VIEWS[bits][(addresses.astype(np.int64) - _BASE) // (bits // 8)]

    @staticmethod
    def store(addresses: Array, raw: Array) -> None:
        bits = raw.dtype.itemsize * 8
        _VIEWS[bits][(addresses.astype(np.int64) - _BASE) // (bits // 8)] = raw


class SharedMemory:
    """The shared memory of all CTAs, one after another. Reading what nobody wrote is a fault."""

    def __init__(self, num_ctas: int, size: int) -> None:
        self.size = size
        self.stride = -(-max(size, 1) // 16) * 16
        self.data: Array = np.full(num_ctas * self.stride, POISON, dtype=np.uint8)
        self.written: Array = np.zeros(num_ctas * self.stride, dtype=np.bool_)

    def check(self, addresses: Array, size: int, where: Location, *, write: bool) -> None:
        verb = "write" if write else "read"
        wrong = addresses % np.uint64(size) != 0
        if wrong.any():
            raise KernelError(f"misaligned {size}-byte {verb} of shared memory; {where}")
        wrong = addresses + np.uint64(size) > self.size
        if wrong.any():
            raise KernelError(
                f"{size}-byte {verb} at byte {int(addresses[wrong][0])} of shared memory, which "
                f"has {self.size}; {where}"
            )

    def offsets(self, ctas: Array, addresses: Array) -> Array:
        result: Array = ctas.astype(np.int64) * self.stride + addresses.astype(np.int64)
        return result

    def load(self, offsets: Array, bits: int, where: Location) -> Array:
        index = offsets // (bits // 8)
        unknown = self.written.view(RAW[bits])[index] != _all_written(bits)
        if unknown.any():
            byte = int(offsets[unknown][0])
            raise KernelError(
                f"read of uninitialised shared memory, byte {byte % self.stride} of CTA "
                f"{byte // self.stride}; {where}"
            )
        return self.data.view(RAW[bits])[index]

    def store(self, offsets: Array, raw: Array) -> None:
        bits = raw.dtype.itemsize * 8
        self.data.view(RAW[bits])[offsets // (bits // 8)] = raw
        self.written.view(RAW[bits])[offsets // (bits // 8)] = _all_written(bits)

    def forget(self, offsets: Array, size: int) -> None:
        """What a copy in flight will overwrite is not there to be read."""
        for byte in range(size):
            self.data[offsets + byte] = POISON
            self.written[offsets + byte] = False
