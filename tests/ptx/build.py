"""Compiles the product with nvcc, for its PTX, and links it to a runtime of ours (cudart.cpp)."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch.utils.cpp_extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "ptx"
ARCHS = (80, 90)
JOBS = 2


def _build_native() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_native", ROOT / "csrc/build_native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = _build_native()


@dataclass(frozen=True)
class Built:
    """What a build leaves: a library to load, and the PTX files of each architecture."""

    library: Path
    ptx: dict[int, list[Path]]


def missing() -> str | None:
    """Why nothing can be built here."""
    return None if native.find_nvcc() else "tests/ptx needs nvcc, and there is none here"


def archs_of(name: str) -> tuple[int, ...]:
    """The architectures that a file of kernels is compiled and run for.

    The instances of the tensor-core kernel are many, and for each there is one.
    """
    if name.startswith("decode_mma_bf16"):
        return (80,)
    return (90,) if name.startswith("decode_mma_f16") else ARCHS


def _nvcc_flags() -> str:
    """The product's flags, without architectures; -lineinfo only adds .loc lines."""
    words = native.nvcc_flags(ARCHS, strict=False).split()
    kept = [w for i, w in enumerate(words) if "-gencode" not in (w, words[i - 1] if i else "")]
    return " ".join([*kept, "-lineinfo"])


def _ninja_file() -> tuple[str, Built]:
    torch_include = " ".join(
        f"-isystem {path}" for path in torch.utils.cpp_extension.include_paths()
    )
    torch_libs = torch.utils.cpp_extension.library_paths()
    lines = [
        f"builddir = {BUILD}",
        "rule cxx",
        f"  command = {os.environ.get('CXX', 'g++')} -std=c++20 -O1 -fPIC -fvisibility=hidden "
        f"-fno-gnu-unique -I{ROOT}/csrc $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule nvcc",
        f"  command = mkdir -p $keep && {native.find_nvcc()} {_nvcc_flags()} -I{ROOT}/csrc "
        "$targets --keep --keep-dir $keep -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        # As the product's build: nvcc knows where its headers are.
        "rule host",
        f"  command = {native.find_nvcc()} -std=c++20 -O1 -I{ROOT}/csrc "
        "-Xcompiler -fPIC,-fvisibility=hidden -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {os.environ.get('CXX', 'g++')} -shared -Wl,-z,defs "
        "-Wl,--wrap=torch_call_dispatcher $in -o $out $flags",
    ]
    torch_flags = f"-DTORCH_TARGET_VERSION=0x020a000000000000 {torch_include}"
    bindings = [
        (path, torch_flags)
        for path in sorted((ROOT / "csrc/bindings").glob("*.cpp"))
        # The other backends' devices and registrations.
        if not path.name.startswith(("register_", "device_"))
    ]
    # What runs here is a device like the emulator's: CPU tensors, no streams.
    device = ROOT / "tests/emulator/device.cpp"
    own = [(path, torch_flags) for path in [*sorted(HERE.glob("*.cpp")), device]]
    objects = []
    for path, flags in [*bindings, *own]:
        objects.append(f"{BUILD}/{path.relative_to(ROOT)}.o")
        lines += [f"build {objects[-1]}: cxx {path}", f"  flags = {flags}"]
    for path in sorted((ROOT / "csrc/cuda").glob("*.cpp")):
        objects.append(f"{BUILD}/{path.relative_to(ROOT)}.o")
        lines.append(f"build {objects[-1]}: host {path}")
    ptx: dict[int, list[Path]] = {arch: [] for arch in ARCHS}
    kernels = [*(ROOT / "csrc/kernels/inst").glob("*.cu"), *(HERE / "kernels").glob("*.cu")]
    for path in sorted(kernels):
        objects.append(f"{BUILD}/{path.relative_to(ROOT)}.o")
        keep = BUILD / "keep" / path.stem
        archs = archs_of(path.name)
        outputs = {arch: keep / f"{path.stem}.compute_{arch}.ptx" for arch in archs}
        if len(archs) == 1:  # nvcc names a single one after the file alone
            outputs = {archs[0]: keep / f"{path.stem}.ptx"}
        for arch, output in outputs.items():
            ptx[arch].append(output)
        names = " ".join(str(output) for output in outputs.values())
        targets = " ".join(f"-gencode arch=compute_{a},code=compute_{a}" for a in archs)
        lines += [f"build {objects[-1]} | {names}: nvcc {path}", f"  keep = {keep}"]
        lines.append(f"  targets = {targets}")
    library = BUILD / "libpaged_attn_ptx.so"
    folders = " ".join(f"-L{path} -Wl,-rpath,{path}" for path in torch_libs)
    lines.append(f"build {library}: link {' '.join(objects)}")
    lines.append(f"  flags = {folders} -ltorch_cpu")
    return "\n".join(lines) + "\n", Built(library, ptx)


def build() -> Built:
    """Brings library and PTX up to date. Other processes wait, and find the work done."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text, built = _ninja_file()
        file = BUILD / "build.ninja"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        command = [sys.executable, "-m", "ninja", "-f", str(file), f"-j{JOBS}"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"building tests/ptx failed\n{result.stdout}{result.stderr}")
        return built


if __name__ == "__main__":
    print(build().library)
