"""Every instruction of device/ptx.cuh compiles for every generation of GPUs, without a warning.

From sm_80 on, that is: older ones have no tensor-core kernel, and what the others use is compiled
with the product.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import build_native
import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "tests" / "emulator" / "kernels"
# These kernels of the emulator's own tests use nothing but device/ptx.cuh.
SOURCES = ("instructions", "warp_product")
# The first with asynchronous copies; with conversions of fp8; the last two.
ARCHS = (80, 89, 90, 100)
# What an architecture must have of its own, and not by way of a substitute.
NATIVE = {
    80: ("cp.async.cg", "redux.sync", "mma.sync.aligned.m16n8k16", "cvt.rn.f16x2.f32"),
    89: ("cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e5m2x2"),
}


NVCC = build_native.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="compiling device code needs nvcc")


def compile_kernels(source: str, arch: int, kind: str, output: Path) -> None:
    command = [
        *(str(NVCC), "-x", "cu", "-std=c++20", "-O3", "--expt-relaxed-constexpr"),
        *("-Werror", "all-warnings", "-Xptxas", "--warn-on-spills,--warning-as-error"),
        *(f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}", kind),
        *(str(KERNELS / f"{source}.cpp"), "-o", str(output)),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles(tmp_path: Path, source: str, arch: int) -> None:
    compile_kernels(source, arch, "-cubin", tmp_path / "kernels.cubin")


@needs_nvcc
@pytest.mark.parametrize("arch", [80, 89])
def test_hardware_is_used_where_it_is(tmp_path: Path, arch: int) -> None:
    compile_kernels("instructions", arch, "-ptx", tmp_path / "first.ptx")
    compile_kernels("warp_product", arch, "-ptx", tmp_path / "second.ptx")
    ptx = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    for since, instructions in NATIVE.items():
        for instruction in instructions:
            assert (instruction in ptx) == (arch >= since), instruction


def test_no_instruction_is_left_out() -> None:
    header = (ROOT / "csrc" / "device" / "ptx.cuh").read_text()
    names = set(re.findall(r"^__device__ [^({]*?[ &](\w+)\(", header, re.MULTILINE))
    used = "".join((KERNELS / f"{source}.cpp").read_text() for source in SOURCES)
    assert len(names) > 50
    assert not {name for name in names if not re.search(rf"\bptx::{name}\b", used)}
