"""Compiles the CUDA kernels for the emulator, and everything else of the product with them."""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils.cpp_extension

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).resolve().parent.relative_to(ROOT)
BUILD = Path("build/emulator")
JOBS = 2

COMMON_FLAGS = (
    "-std=c++20 -fPIC -fvisibility=hidden -fno-gnu-unique -g -Wall -Wextra "
    f"-I{EMULATOR}/include -I{EMULATOR} -Icsrc"
)
# Contraction would give results that neither the CPU nor the GPU path gives; kernels read vectors
# through pointers to other types; pragmas are nvcc's.
KERNEL_FLAGS = "-O1 -fno-strict-aliasing -ffp-contract=off -Wno-unknown-pragmas"
HOST_FLAGS = "-O2"
TORCH_FLAGS = "-O1 -DTORCH_TARGET_VERSION=0x020a000000000000"


@dataclass(frozen=True)
class Target:
    """A shared library: its name, sources with their flags, and flags for the linker."""

    name: str
    sources: Sequence[tuple[Path, str]]
    link_flags: str


def _sources(pattern: str, flags: str) -> list[tuple[Path, str]]:
    return [(path.relative_to(ROOT), flags) for path in sorted(ROOT.glob(pattern))]


def _core() -> list[tuple[Path, str]]:
    return _sources(f"{EMULATOR}/core/*.cpp", HOST_FLAGS)


def selftest_target() -> Target:
    """The emulator with the small kernels that test it; needs no torch."""
    kernels = _sources(f"{EMULATOR}/kernels/*.cpp", KERNEL_FLAGS)
    return Target("libemulator_selftest.so", [*_core(), *kernels], "")


def product_target() -> Target:
    """The emulator with every kernel, launcher and op of the product."""
    includes = " ".join(f"-isystem {path}" for path in torch.utils.cpp_extension.include_paths())
    library_paths = torch.utils.cpp_extension.library_paths()
    link_flags = " ".join(f"-L{path} -Wl,-rpath,{path}" for path in library_paths)
    torch_flags = f"{TORCH_FLAGS} {includes}"
    # The other backends' devices and registrations.
    bindings = [
        (path, flags)
        for path, flags in _sources("csrc/bindings/*.cpp", torch_flags)
        if not path.name.startswith(("register_", "device_c"))
    ]
    return Target(
        "libpaged_attn_emulator.so",
        [
            *_core(),
            *_sources(f"{EMULATOR}/*.cpp", torch_flags),
            *_sources("csrc/kernels/inst/*.cu", KERNEL_FLAGS),
            *_sources("csrc/cuda/*.cpp", KERNEL_FLAGS),
            *bindings,
        ],
        f"{link_flags} -ltorch_cpu",
    )


def _ninja_file(target: Target) -> str:
    compiler = os.environ.get("CXX", "g++")
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {BUILD}",
        "rule compile",
        # -x c++: the compiler does not know .cu. Paths are relative to the repository's root, so
        # that messages and debug information name files as the repository does.
        f"  command = {compiler} -x c++ {COMMON_FLAGS} $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        f"  command = {compiler} -shared -Wl,-z,defs -o $out $in $flags -ldl",
        "  description = $out",
    ]
    objects = []
    for source, flags in target.sources:
        # A directory for each library: two ninja files must not claim one object.
        output = BUILD / Path(target.name).stem / f"{source}.o"
        objects.append(str(output))
        lines += [f"build {output}: compile {source}", f"  flags = {flags}"]
    library = BUILD / target.name
    lines += [f"build {library}: link {' '.join(objects)}", f"  flags = {target.link_flags}"]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def build_lock() -> Iterator[None]:
    """Excludes other processes that build or load the libraries."""
    (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
    with open(ROOT / BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_target(target: Target) -> Path:
    """Brings the library up to date; the caller holds build_lock(). Raises with ninja's output."""
    ninja_file = ROOT / BUILD / f"{Path(target.name).stem}.ninja"
    text = _ninja_file(target)
    if not ninja_file.exists() or ninja_file.read_text() != text:
        ninja_file.write_text(text)
    command = [sys.executable, "-m", "ninja", "-f", str(ninja_file.relative_to(ROOT))]
    result = subprocess.run(
        [*command, f"-j{JOBS}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"building {target.name} failed\n{result.stdout}{result.stderr}")
    return ROOT / BUILD / target.name


def build() -> Path:
    """Builds the product for the emulator; returns the library to give torch.ops.load_library."""
    with build_lock():
        return compile_target(product_target())


if __name__ == "__main__":
    print(build())
