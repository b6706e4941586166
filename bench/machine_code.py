"""The compiled kernels, and what ptxas, the machine code and the headers say of each.

Compiles the units of csrc/kernels with the flags of the build, one architecture at a time.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import occupancy
import sass

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"
sys.path.append(str(CSRC))
import build_native  # noqa: E402
from build_native import Unit  # noqa: E402

_SYMBOL = re.compile(r"decode_mma_kernelI.*DTypeE(\d)ELi(\d+)ELi(\d+)E")
_ESSENTIAL = ("HMMA", "LDSM", "LDGSTS")
# A copy with a predicate after its operands writes zeroes where that is false: a tail's.
_ZERO_FILL = re.compile(r",\s*!?P\d\s*$")

Key = tuple[int, int, int]  # KV dtype, kDim, kRows


class ReportError(Exception):
    """The report cannot be made; the message says why."""


@dataclass(frozen=True)
class Facts:
    """What the headers say of an instance. Bytes are of a CTA, but for tile_bytes."""

    threads: int
    shared_memory: int
    tile_bytes: int
    ring_bytes: int


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel."""

    registers: int
    stack: int
    spills: int


@dataclass(frozen=True)
class Trip:
    """A trip around the main loop, and what is wrong anywhere in the kernel."""

    opcodes: Counter[str]
    narrow_copies: int  # LDGSTS of less than 16 bytes
    local_accesses: int  # LDL and STL, of the whole kernel

    @property
    def instructions(self) -> int:
        """Of a warp, all of them."""
        return self.opcodes.total()

    @property
    def kv_bytes(self) -> int:
        """Bytes that its LDGSTS copy."""
        return self.opcodes["LDGSTS"] * occupancy.WARP_SIZE * 16


@dataclass(frozen=True)
class Compiled:
    """A unit of kernels as an object for one architecture."""

    unit: str
    seconds: float  # of a processor
    object_bytes: int
    resources: dict[str, Resources]  # by symbol
    trips: dict[str, Trip]


def find_cuobjdump() -> Path | None:
    """Returns the cuobjdump beside nvcc, of PATH, or of NVIDIA's wheels."""
    nvcc, on_path = build_native.find_nvcc(), shutil.which("cuobjdump")
    candidates = [nvcc.with_name("cuobjdump")] if nvcc else []
    candidates += [Path(on_path)] if on_path else []
    wheels = [found for entry in sys.path for found in sorted(Path(entry).glob("nvidia/cu*"))]
    candidates += [wheel / "bin" / "cuobjdump" for wheel in reversed(wheels)]
    return next((tool for tool in candidates if tool.is_file()), None)


def missing() -> str | None:
    """Returns why nothing can be compiled and read here."""
    if build_native.find_nvcc() is None:
        return "the static report needs nvcc, in CUDA_HOME, on PATH or from a wheel"
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        return "the static report needs cuobjdump: pip install nvidia-cuda-cuobjdump"
    if not cuobjdump.with_name("nvdisasm").is_file() and shutil.which("nvdisasm") is None:
        return "cuobjdump needs nvdisasm beside it: pip install nvidia-cuda-nvdisasm"
    return None


def tools() -> tuple[Path, Path]:
    """Returns nvcc and cuobjdump."""
    nvcc, cuobjdump = build_native.find_nvcc(), find_cuobjdump()
    if nvcc is None or cuobjdump is None:
        raise ReportError(missing())
    return nvcc, cuobjdump


def units(only: str = "") -> list[Unit]:
    """Returns the units of kernels whose names contain `only`."""
    found = [unit for unit in build_native.units() if only in unit.name]
    if not found:
        raise ReportError(f"no unit of kernels has {only!r} in its name")
    return found


def run(command: Sequence[str | Path]) -> tuple[str, float]:
    """Runs a command; returns what it prints and its processor seconds, children included."""
    with subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise ReportError(f"{command[0]} failed:\n{printed}")
    return printed, usage.ru_utime + usage.ru_stime


def instance_key(symbol: str) -> Key | None:
    """Returns which instance of the tensor-core kernel a symbol is; None for other kernels."""
    match = _SYMBOL.search(symbol)
    if match is None:
        return None
    kv, dim, rows = map(int, match.groups())
    return kv, dim, rows


def read_facts(chosen: Sequence[Unit], out: Path) -> dict[Key, Facts]:
    """Asks the kernel's headers about every instance of the tensor-core kernel in the units."""
    nvcc, _ = tools()
    calls = "".join(
        f"  paged_attn::print_facts<{', '.join(instance.arguments)}>();\n"
        for unit in chosen
        for instance in unit.instances
        if instance.kernel == "decode_mma"
    )
    program = out / "facts.cu"
    program.write_text(
        f'#include "kernel_facts.cuh"\nusing paged_attn::DType;\nint main() {{\n{calls}}}\n'
    )
    flags = ["-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_90", f"-I{CSRC}", f"-I{HERE}"]
    run([nvcc, *flags, "-o", out / "facts", program])
    printed, _ = run([out / "facts"])
    facts = {}
    for line in printed.splitlines():
        kv, dim, rows, *numbers = map(int, line.split())
        facts[kv, dim, rows] = Facts(*numbers)
    return facts


def parse_resources(printed: str) -> dict[str, Resources]:
    """Reads what ptxas -v prints."""
    blocks = re.split(r"Compiling entry function '", printed)[1:]
    found = {}
    for block in blocks:
        stack, stores, loads = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
        )[0]
        registers = re.findall(r"Used (\d+) registers", block)[0]
        name = block.partition("'")[0]
        found[name] = Resources(int(registers), int(stack), int(stores) + int(loads))
    return found


def main_loop(function: sass.Function) -> Trip | None:
    """Counts a trip around a kernel's main loop; None where it has none."""
    loop = function.innermost_loop(("HMMA", "LDGSTS"))
    if loop is None:
        return None
    trip = function.trip(
        loop, lambda ins: ins.opcode in _ESSENTIAL and not _ZERO_FILL.search(ins.operands)
    )
    everywhere = function.instructions
    return Trip(
        opcodes=Counter(ins.opcode for ins in trip),
        narrow_copies=sum(ins.opcode == "LDGSTS" and ".128" not in ins.name for ins in everywhere),
        local_accesses=sum(ins.opcode in ("LDL", "STL") for ins in everywhere),
    )


def compile_unit(unit: Unit, arch: int, out: Path) -> Compiled:
    """Compiles a unit for one architecture, as the build does, and reads its machine code."""
    nvcc, cuobjdump = tools()
    target = out / f"{unit.name}.sm_{arch}.o"
    options = f"{build_native.nvcc_flags([arch], strict=False)} {unit.define(build_native.COMMA)}"
    flags = [*shlex.split(options), f"-I{CSRC}", "-Xptxas", "-v"]
    printed, seconds = run([nvcc, *flags, "-c", CSRC / unit.source, "-o", target])
    listing, _ = run([cuobjdump, "-sass", target])
    trips = {f.name: trip for f in sass.parse(listing) if (trip := main_loop(f)) is not None}
    return Compiled(unit.name, seconds, target.stat().st_size, parse_resources(printed), trips)
