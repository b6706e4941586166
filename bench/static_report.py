"""What is known of the decode kernels without a GPU: a table for each architecture.

    python bench/static_report.py [--archs 80 89 90 100] [--only TEXT] [--out DIR]

Compiles the units of csrc/kernels with the flags of the build, one architecture at a time, and
reads the machine code. Needs nvcc, and cuobjdump, which comes with a CUDA toolkit or by
`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`.

How the numbers come about:

* Registers, stack and spills are ptxas' own report; threads, shared memory and the bytes of a tile
  and of a ring are printed by a host program that is compiled from the kernel's headers.
* CTAs per SM: see occupancy.py. In flight: K and V bytes of the rings of all resident CTAs.
* The main loop is the innermost loop that contains both HMMA and LDGSTS. A trip is the shortest way
  around it that executes as many HMMA, LDSM and LDGSTS as any way does: a whole tile without
  masks, after which another tile is fetched. KV bytes of a trip are its LDGSTS, each 32 x 16 bytes.
* Share: of the issue slots that there are while the board reads at its full memory bandwidth. For
  instances of many rows, which divide rows among warps, it says nothing: of 8 warps each counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import occupancy
from build_native import Unit
from machine_code import (
    Compiled,
    Facts,
    Key,
    ReportError,
    Resources,
    Trip,
    compile_unit,
    instance_key,
    read_facts,
    units,
)

KIB = 1024
OUT = Path(__file__).resolve().parents[1] / "build" / "static_report"
DTYPES = ("f32", "f16", "bf16", "e4m3", "e5m2", "int8")  # as enum DType
GOAL_IN_FLIGHT = {80: 96 * KIB, 89: 64 * KIB, 90: 128 * KIB}
GOAL_ARCH_OF_SHARE = 90


@dataclass(frozen=True)
class Row:
    """An instance on one architecture."""

    key: Key
    arch: int
    facts: Facts
    resources: Resources
    trip: Trip

    @property
    def ctas(self) -> int:
        """Resident on an SM."""
        return occupancy.ctas_per_sm(
            occupancy.ARCHS[self.arch],
            registers=self.resources.registers,
            shared_memory=self.facts.shared_memory,
            threads=self.facts.threads,
        )

    @property
    def in_flight(self) -> int:
        """KV bytes that an SM has asked for while all its CTAs stream."""
        return self.ctas * self.facts.ring_bytes

    @property
    def many_rows(self) -> bool:
        """Whether arithmetic, not memory, is its limit: no goal but the clean code."""
        return self.key[2] > 16

    @property
    def share(self) -> float:
        """Of the issue slots of the architecture's board."""
        board = occupancy.ARCHS[self.arch].board
        return board.issue_share(self.trip.instructions / self.trip.kv_bytes)

    @property
    def share_goal(self) -> float | None:
        """The most that the share is to be."""
        if self.arch != GOAL_ARCH_OF_SHARE or self.many_rows:
            return None
        kv, dim = DTYPES[self.key[0]], self.key[1]
        if kv in ("f16", "bf16"):
            return 0.12
        return 0.35 if kv == "int8" and dim == 64 else 0.30

    def misses(self) -> list[str]:
        """Returns what falls short of a goal, in words."""
        found = []
        if self.resources.spills or self.resources.stack:
            found.append(f"{self.resources.spills} B spilled, {self.resources.stack} B stack")
        if self.trip.local_accesses:
            found.append(f"{self.trip.local_accesses} LDL/STL")
        if self.trip.narrow_copies:
            found.append(f"{self.trip.narrow_copies} LDGSTS below 16 B")
        if not self.trip.opcodes["HMMA"] or not self.trip.opcodes["LDSM"]:
            found.append("no HMMA or no LDSM")
        if not self.many_rows and self.trip.kv_bytes != self.facts.tile_bytes:
            found.append(f"a trip of {self.trip.kv_bytes} B is not a tile")
        goal = 0 if self.many_rows else GOAL_IN_FLIGHT.get(self.arch, 0)
        if self.in_flight < goal:
            found.append(f"in flight < {goal // KIB} KiB")
        if self.share_goal is not None and self.share > self.share_goal:
            found.append(f"share > {self.share_goal:.0%}")
        return found

    def cells(self) -> list[str]:
        """Returns its cells of the table, as HEADER names them."""
        kv, dim, tile_rows = self.key
        opcodes = self.trip.opcodes
        return [
            DTYPES[kv],
            str(dim),
            str(tile_rows),
            str(self.resources.registers),
            f"{self.facts.shared_memory / KIB:.1f}",
            str(self.ctas),
            str(self.in_flight // KIB),
            f"{self.resources.spills}/{self.resources.stack}/{self.trip.local_accesses}",
            f"{opcodes['LDGSTS']}/{opcodes['LDSM']}/{opcodes['HMMA']}",
            str(self.trip.instructions),
            str(self.trip.kv_bytes),
            f"{self.trip.instructions / self.trip.kv_bytes:.4f}",
            f"{self.share:.1%}",
            "; ".join(self.misses()) or "-",
        ]


HEADER = [
    "KV",
    "kDim",
    "kRows",
    "registers",
    "smem KiB",
    "CTAs/SM",
    "in flight KiB",
    "spill/stack/local",
    "LDGSTS/LDSM/HMMA",
    "instructions a trip",
    "KV bytes a trip",
    "instructions a KV byte",
    "issue share",
    "misses",
]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, its columns aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def rows_of(compiled: Sequence[Compiled], facts: dict[Key, Facts], arch: int) -> list[Row]:
    """Returns the instances of the tensor-core kernel, in the order of their keys."""
    rows = []
    for unit in compiled:
        for symbol, resources in unit.resources.items():
            if (key := instance_key(symbol)) is None:
                continue
            if symbol not in unit.trips:
                raise ReportError(f"{symbol} has no loop with HMMA and LDGSTS")
            rows.append(Row(key, arch, facts[key], resources, unit.trips[symbol]))
    return sorted(rows, key=lambda row: row.key)


def arch_report(compiled: Sequence[Compiled], facts: dict[Key, Facts], arch: int) -> str:
    """Returns an architecture's section of the report."""
    board = occupancy.ARCHS[arch].board
    rows = rows_of(compiled, facts, arch)
    missed = sum(bool(row.misses()) for row in rows)
    seconds = sum(unit.seconds for unit in compiled)
    size = sum(unit.object_bytes for unit in compiled) / 1e6
    others = [
        [
            unit.unit,
            str(len(unit.resources)),
            f"{min(registers)}-{max(registers)}",
            str(sum(r.spills + r.stack for r in unit.resources.values())),
            f"{unit.seconds:.1f}",
            f"{unit.object_bytes / 1e6:.2f}",
        ]
        for unit in compiled
        if (registers := [r.registers for r in unit.resources.values()])
    ]
    return "\n".join(
        [
            f"## sm_{arch}",
            "",
            f"Issue share on {board.name}: {board.bytes_per_second / 1e12:.2f} TB/s, "
            f"{board.num_sms} SMs, {board.hertz / 1e9:.2f} GHz.",
            "",
            table(HEADER, [row.cells() for row in rows]),
            "",
            f"{missed} of {len(rows)} instances miss a goal.",
            "",
            table(
                ["unit", "kernels", "registers", "spill + stack B", "seconds", "object MB"], others
            ),
            "",
            f"{sum(len(unit.resources) for unit in compiled)} kernels in {len(compiled)} units: "
            f"{seconds:.0f} processor seconds, {size:.1f} MB of objects.",
        ]
    )


def make_report(
    archs: Sequence[int], chosen: Sequence[Unit], out: Path, jobs: int, say: Callable[[str], None]
) -> None:
    """Compiles, and says the report section by section."""
    out.mkdir(parents=True, exist_ok=True)
    facts = read_facts(chosen, out)
    for arch in archs:
        with ThreadPoolExecutor(jobs) as pool:
            compiled = list(pool.map(partial(compile_unit, arch=arch, out=out), chosen))
        say(arch_report(compiled, facts, arch) + "\n")


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(description="Prints what is known of the kernels statically.")
    parser.add_argument("--archs", type=int, nargs="+", default=[80, 89, 90, 100])
    parser.add_argument("--only", default="", help="only units whose names contain this")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.archs) - set(occupancy.ARCHS))
    if unknown:
        parser.error(f"--archs must be of {sorted(occupancy.ARCHS)}, got {unknown}")
    said: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        said.append(text)

    try:
        make_report(arguments.archs, units(arguments.only), arguments.out, arguments.jobs, say)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    (arguments.out / "report.md").write_text("\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
