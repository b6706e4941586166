"""The CPU backend on aarch64: cross-compiled, and run on small cases by qemu, where both are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("csrc/cpu/backend.cpp", "csrc/cpu/plan.cpp", "csrc/cpu/kernels.cpp")
MAIN = "tests/cross/decode_main.cpp"
FLAGS = "-std=c++20 -O2 -static -Wall -Wextra -Werror -Wno-missing-field-initializers"
FLAGS += " -fno-math-errno -fno-trapping-math -DPAGED_ATTN_ISA=portable"


def build_and_run(compiler: str, runner: list[str], folder: Path) -> str:
    """Returns what the cases print; fails where one is wrong."""
    program = folder / "decode"
    sources = [str(ROOT / name) for name in (*SOURCES, MAIN)]
    command = [compiler, *FLAGS.split(), f"-I{ROOT / 'csrc'}", *sources, "-o", str(program)]
    subprocess.run(command, check=True)
    ran = subprocess.run([*runner, str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_aarch64(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if compiler is None or qemu is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    assert build_and_run(compiler, [qemu], tmp_path).count("error") == 6
