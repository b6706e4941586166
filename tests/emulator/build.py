"""Compiles the CUDA kernels for the emulator, and everything else of the product with them."""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.utils.cpp_extension

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "csrc"))
import build_native  # noqa: E402

EMULATOR = Path(__file__).resolve().parent.relative_to(ROOT)
BUILD = Path("build/emulator")
CODE = Path("csrc")
JOBS = 2
NAMESPACE = "paged_attn_emulator"
_BINDINGS = ("device.cpp", "register.cpp")

# Messages name files as they are in the repository, wherever that lies.
COMMON_FLAGS = (
    "-std=c++20 -fPIC -fvisibility=hidden -fno-gnu-unique -g -Wall -Wextra "
    f"-fdebug-prefix-map={ROOT}=. -I{EMULATOR}/include -I{EMULATOR}"
)
# Contraction would give results that neither the CPU nor the GPU path gives; kernels read vectors
# through pointers to other types; pragmas are nvcc's.
KERNEL_FLAGS = "-O1 -fno-strict-aliasing -ffp-contract=off -Wno-unknown-pragmas"
# A call before each access (core/hooks.cpp) and a check of what the language leaves undefined
# (core/undefined.cpp); no sanitizer's runtime is linked. Alignment is left to the former, which
# knows the buffers. The other flags keep accesses as they are written: a vector's in one piece,
# those of a loop in the loop.
HOOK_FLAGS = (
    "-fsanitize=thread -fsanitize=undefined -fno-sanitize=vptr,alignment "
    "-fno-sanitize-recover=undefined --param tsan-instrument-func-entry-exit=0 "
    "-fno-tree-sra -fno-move-loop-stores -fno-tree-vectorize -fno-tree-loop-distribute-patterns"
)
HOST_FLAGS = "-O2"
TORCH_FLAGS = "-O1 -DTORCH_TARGET_VERSION=0x020a000000000000"


class Source(NamedTuple):
    """A file to compile, and how."""

    path: Path
    flags: str
    name: str = ""  # of the object, where a file is compiled several times


@dataclass(frozen=True)
class Target:
    """A shared library: its name, what it is compiled of, and flags for the linker."""

    name: str
    sources: Sequence[Source]
    link_flags: str
    code: Path = CODE  # of the product: mutate.py has another

    @property
    def folder(self) -> Path:
        """Where it is built: what has code of its own shares no log of ninja's with the others."""
        return BUILD if self.code == CODE else self.code.parent


def _kernel_flags(hooks: bool) -> str:
    return f"{KERNEL_FLAGS} {HOOK_FLAGS}" if hooks else KERNEL_FLAGS


def _suffix(hooks: bool) -> str:
    return "_hooks" if hooks else ""


def _sources(pattern: str, flags: str) -> list[Source]:
    return [Source(path.relative_to(ROOT), flags) for path in sorted(ROOT.glob(pattern))]


def _units(code: Path, flags: str) -> list[Source]:
    return [
        Source(code / unit.source, f"{flags} {unit.define()}", f"{code}/kernels/{unit.name}")
        for unit in build_native.units(ROOT / code)
    ]


def _core() -> list[Source]:
    return _sources(f"{EMULATOR}/core/*.cpp", HOST_FLAGS)


def selftest_target(hooks: bool = False) -> Target:
    """The emulator with the small kernels that test it; needs no torch."""
    kernels = _sources(f"{EMULATOR}/kernels/*.cpp", _kernel_flags(hooks))
    return Target(f"libemulator_selftest{_suffix(hooks)}.so", [*kernels, *_core()], "")


def product_target(hooks: bool = False, code: Path = CODE) -> Target:
    """The emulator with every kernel, launcher and op of the product.

    With `hooks` the kernels report each access, and the ops have a namespace of their own.
    """
    includes = " ".join(f"-isystem {path}" for path in torch.utils.cpp_extension.include_paths())
    library_paths = torch.utils.cpp_extension.library_paths()
    link_flags = " ".join(f"-L{path} -Wl,-rpath,{path}" for path in library_paths)
    torch_flags = f"{TORCH_FLAGS} {includes}"
    namespace = f"-DEMULATOR_NAMESPACE={NAMESPACE}{_suffix(hooks)}"
    # The other backends' devices and registrations.
    bindings = [
        source
        for source in _sources(f"{code}/bindings/*.cpp", torch_flags)
        if not source.path.name.startswith(("register_", "device_c"))
    ]
    return Target(
        f"lib{NAMESPACE}{_suffix(hooks)}.so",
        [
            # First: of a function that is in several object files the linker takes the first, and
            # the kernels' have the hooks.
            *_units(code, _kernel_flags(hooks)),
            *_core(),
            # It is no part of the stable interface of torch that the ops keep to.
            Source(EMULATOR / "allocator.cpp", f"-O1 {includes}"),
            *(Source(EMULATOR / name, f"{torch_flags} {namespace}") for name in _BINDINGS),
            *_sources(f"{code}/cuda/*.cpp", KERNEL_FLAGS),
            *bindings,
        ],
        f"{link_flags} -ltorch_cpu -lc10",
        code,
    )


def _ninja_file(target: Target) -> str:
    compiler = os.environ.get("CXX", "g++")
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {target.folder}",
        "rule compile",
        # -x c++: the compiler does not know .cu. Paths are relative to the repository's root, so
        # that messages and debug information name files as the repository does.
        f"  command = {compiler} -x c++ {COMMON_FLAGS} -I{target.code} $flags"
        " -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        f"  command = {compiler} -shared -Wl,-z,defs -o $out $in $flags -ldl",
        "  description = $out",
    ]
    objects = []
    for path, flags, name in target.sources:
        # A directory for each library: two ninja files must not claim one object.
        output = target.folder / Path(target.name).stem / f"{name or path}.o"
        objects.append(str(output))
        lines += [f"build {output}: compile {path}", f"  flags = {flags}"]
    library = target.folder / target.name
    lines += [f"build {library}: link {' '.join(objects)}", f"  flags = {target.link_flags}"]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def build_lock(folder: Path = BUILD) -> Iterator[None]:
    """Excludes other processes that build or load the libraries in a folder."""
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    with open(ROOT / folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_target(target: Target) -> Path:
    """Brings the library up to date; the caller holds build_lock(). Raises with ninja's output."""
    ninja_file = ROOT / target.folder / f"{Path(target.name).stem}.ninja"
    text = _ninja_file(target)
    if not ninja_file.exists() or ninja_file.read_text() != text:
        ninja_file.write_text(text)
    command = [sys.executable, "-m", "ninja", "-f", str(ninja_file.relative_to(ROOT))]
    result = subprocess.run(
        [*command, f"-j{JOBS}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"building {target.name} failed\n{result.stdout}{result.stderr}")
    return ROOT / target.folder / target.name


def build(*, hooks: bool = False) -> Path:
    """Builds the product for the emulator; returns the library to give torch.ops.load_library."""
    with build_lock():
        return compile_target(product_target(hooks))


if __name__ == "__main__":
    print(build())
    print(build(hooks=True))
