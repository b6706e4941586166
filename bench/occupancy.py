"""How many CTAs of a kernel an SM holds at once, and how fast the boards are that we plan for.

Rules and limits: CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications per
compute capability), and the occupancy calculator's allocation units.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
WARP_SIZE = 32
REGISTERS_PER_SM = 64 * KIB
REGISTER_UNIT = 256  # registers are allocated to a warp in this unit
SHARED_MEMORY_UNIT = 128  # bytes
RESERVED_SHARED_MEMORY = KIB  # of each CTA, for the system
SCHEDULERS_PER_SM = 4  # each issues at most one warp instruction a cycle


@dataclass(frozen=True)
class Board:
    """What one GPU of an architecture does at its best, by its data sheet."""

    name: str
    bytes_per_second: float
    num_sms: int
    hertz: float

    def issue_share(self, instructions_per_byte: float) -> float:
        """The share of the issue slots that are left at full memory bandwidth and are used."""
        slots = self.num_sms * SCHEDULERS_PER_SM * self.hertz
        return instructions_per_byte * self.bytes_per_second / slots


@dataclass(frozen=True)
class Arch:
    """An SM's limits. Shared memory in bytes."""

    shared_memory: int
    shared_memory_per_cta: int
    threads: int
    ctas: int
    board: Board


ARCHS = {
    80: Arch(164 * KIB, 163 * KIB, 2048, 32, Board("A100 80 GB", 2.039e12, 108, 1.41e9)),
    86: Arch(100 * KIB, 99 * KIB, 1536, 16, Board("RTX A6000", 0.768e12, 84, 1.80e9)),
    89: Arch(100 * KIB, 99 * KIB, 1536, 24, Board("L40S", 0.864e12, 142, 2.52e9)),
    90: Arch(228 * KIB, 227 * KIB, 2048, 32, Board("H200", 4.8e12, 132, 1.98e9)),
    100: Arch(228 * KIB, 227 * KIB, 2048, 32, Board("B200", 8.0e12, 148, 1.965e9)),
    120: Arch(100 * KIB, 99 * KIB, 1536, 24, Board("RTX PRO 6000", 1.792e12, 188, 2.6e9)),
}


def _round_up(x: int, unit: int) -> int:
    return (x + unit - 1) // unit * unit


def ctas_per_sm(arch: Arch, *, registers: int, shared_memory: int, threads: int) -> int:
    """Returns how many CTAs are resident; 0 where the kernel cannot be launched.

    Args:
        arch: the SM's limits.
        registers: of a thread.
        shared_memory: bytes of a CTA, static and dynamic.
        threads: of a CTA.
    """
    if shared_memory > arch.shared_memory_per_cta:
        return 0
    warps = _round_up(threads, WARP_SIZE) // WARP_SIZE
    # Each of the four sub-partitions has a quarter of the registers, for the warps it is given.
    warp_registers = max(REGISTER_UNIT, _round_up(registers * WARP_SIZE, REGISTER_UNIT))
    warps_each = REGISTERS_PER_SM // SCHEDULERS_PER_SM // warp_registers
    by_registers = warps_each * SCHEDULERS_PER_SM // warps
    cta_memory = _round_up(shared_memory + RESERVED_SHARED_MEMORY, SHARED_MEMORY_UNIT)
    by_shared_memory = arch.shared_memory // cta_memory
    by_threads = arch.threads // (warps * WARP_SIZE)
    return min(by_registers, by_shared_memory, by_threads, arch.ctas)
