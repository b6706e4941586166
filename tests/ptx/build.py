"""The product's own objects, linked to a CUDA runtime of ours (cudart.cpp), and their PTX.

The build of the product keeps the PTX on its way to machine code. Where it was built from this tree
for the architectures below, nothing of it is compiled again; else it is compiled here.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import build_native as native
import torch.utils.cpp_extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "ptx"
ARCHS = (80, 90)
JOBS = 2


@dataclass(frozen=True)
class Built:
    """What a build leaves: a library to load, and the PTX files of each architecture."""

    library: Path
    ptx: dict[int, list[Path]]


def missing() -> str | None:
    """Why nothing can be built here."""
    return None if native.find_nvcc() else "tests/ptx needs nvcc, and there is none here"


def _ninja(folder: Path, target: str) -> str | None:
    """Brings a target up to date; returns what ninja printed if it failed."""
    command = [sys.executable, "-m", "ninja", "-C", str(folder), f"-j{JOBS}", target]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr if result.returncode else None


def _write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "build.ninja"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def _fits(text: str) -> bool:
    """Whether a build.ninja of the product is of this tree, and has the PTX that is run here."""
    archs = {int(arch) for arch in re.findall(r"arch=compute_(\d+)", text)}
    compiled = {(f"cuda/{unit.name}.o", str(native.CSRC / unit.source)) for unit in native.units()}
    return archs >= set(ARCHS) and compiled == set(
        re.findall(r"^build (\S+): device (\S+)$", text, re.M)
    )


def _product() -> Path:
    """The folder of a build of the product that is up to date."""
    for file in ROOT.glob("build/temp.*/build.ninja"):
        if _fits(file.read_text()) and _ninja(file.parent, native.CUDA_OBJECTS) is None:
            return file.parent
    folder = BUILD / "product"
    nvcc = native.find_nvcc()
    _write(folder, native.ninja_file(folder, nvcc, strict=False, archs=ARCHS))
    problem = _ninja(folder, native.CUDA_OBJECTS)
    if problem is not None:
        raise RuntimeError(f"building the product for tests/ptx failed\n{problem}")
    return folder


def _ptx(folder: Path, unit: str, arch: int) -> Path:
    (path,) = (folder / native.KEPT_PTX / unit).glob(f"*.compute_{arch}.ptx")
    return path


def _ninja_file(product: Path) -> tuple[str, Built]:
    """What is compiled and linked here: the runtime, the device, and kernels of the tests' own."""
    torch_include = " ".join(
        f"-isystem {path}" for path in torch.utils.cpp_extension.include_paths()
    )
    torch_libs = torch.utils.cpp_extension.library_paths()
    compiler = os.environ.get("CXX", "g++")
    targets = " ".join(f"-gencode arch=compute_{a},code=compute_{a}" for a in ARCHS)
    wrappers = BUILD / "wrappers"
    lines = [
        f"builddir = {BUILD}",
        "rule cxx",
        f"  command = {compiler} -std=c++20 -O1 -fPIC -fvisibility=hidden -fno-gnu-unique "
        f"-I{native.CSRC} -DTORCH_TARGET_VERSION=0x020a000000000000 {torch_include} "
        "-MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule nvcc",  # -lineinfo, for source lines in messages
        f"  command = mkdir -p {wrappers} && {native.find_nvcc()} -std=c++20 -O3 -lineinfo "
        f"--expt-relaxed-constexpr -Xcompiler -fPIC,-fvisibility=hidden -I{native.CSRC} {targets} "
        f"--keep --keep-dir {wrappers} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler} -shared -Wl,-z,defs -Wl,--wrap=torch_call_dispatcher $in -o $out "
        "$flags",
    ]
    # The other device and registration are those of CUDA.
    (all_objects,) = re.findall(
        rf"^build {native.CUDA_OBJECTS}: phony (.*)$", (product / "build.ninja").read_text(), re.M
    )
    objects = [
        str(product / name)
        for name in all_objects.split()
        if not name.endswith(("_device_cuda.o", "_register_cuda.o"))
    ]
    # What runs here is a device like the emulator's: CPU tensors, no streams.
    own = [*sorted(HERE.glob("*.cpp")), ROOT / "tests/emulator/device.cpp"]
    for rule, path in [*(("cxx", path) for path in own), ("nvcc", HERE / "kernels/wrappers.cu")]:
        objects.append(f"{BUILD}/{path.stem}.o")
        lines.append(f"build {objects[-1]}: {rule} {path}")
    library = BUILD / "libpaged_attn_ptx.so"
    folders = " ".join(f"-L{path} -Wl,-rpath,{path}" for path in torch_libs)
    lines.append(f"build {library}: link {' '.join(objects)}")
    lines.append(f"  flags = {folders} -ltorch_cpu")
    ptx = {
        arch: [
            *(_ptx(product, unit.name, arch) for unit in native.units()),
            wrappers / f"wrappers.compute_{arch}.ptx",
        ]
        for arch in ARCHS
    }
    return "\n".join(lines) + "\n", Built(library, ptx)


def build() -> Built:
    """Brings library and PTX up to date. Other processes wait, and find the work done."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text, built = _ninja_file(_product())
        _write(BUILD, text)
        problem = _ninja(BUILD, str(built.library))
        if problem is not None:
            raise RuntimeError(f"building tests/ptx failed\n{problem}")
        return built


if __name__ == "__main__":
    print(build().library)
