"""The build's choices and what it says when it cannot; what the library says of itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import build_native
import pytest
import torch

import paged_attn
from paged_attn import _ops

ROOT = Path(__file__).resolve().parents[1]
ISA_LEVELS = ("portable", "avx2", "avx512", "avx512bf16")


@pytest.fixture
def native() -> ModuleType:
    """csrc/build_native.py as a module."""
    return build_native


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No tool on PATH but those that a test puts there; no CUDA_HOME, nothing on sys.path."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CUDA_HOME", "PAGED_ATTN_CUDA_ARCHS", "PAGED_ATTN_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return folder


def make_tool(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_nvcc_is_looked_for_in_order(
    native: ModuleType, empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.find_nvcc() is None
    older = make_tool(tmp_path / "site/nvidia/cu12/bin/nvcc")
    assert native.find_nvcc() == older
    wheel = make_tool(tmp_path / "site/nvidia/cu13/bin/nvcc")
    assert native.find_nvcc() == wheel
    on_path = make_tool(tmp_path / "toolkit/bin/nvcc")
    (empty_path / "nvcc").symlink_to(on_path)
    assert native.find_nvcc() == on_path, "a link leads to the toolkit's headers"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert native.find_nvcc() == on_path
    home = make_tool(tmp_path / "cuda/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert native.find_nvcc() == home


@pytest.mark.parametrize(
    ("asked", "archs"),
    [
        ("80;90", [80, 90]),
        ("9.0, 8.0", [80, 90]),
        (" 120 ;75;75; ", [75, 120]),
        ("", [80, 90]),
        (" ; ", [80, 90]),
    ],
)
def test_archs_that_are_asked_for(
    native: ModuleType,
    empty_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    archs: list[int],
) -> None:
    monkeypatch.setenv("PAGED_ATTN_CUDA_ARCHS", asked)
    assert native.cuda_archs() == archs


@pytest.mark.parametrize("asked", ["sm_80", "all", "80;nine"])
def test_archs_that_are_none(
    native: ModuleType, empty_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("PAGED_ATTN_CUDA_ARCHS", asked)
    with pytest.raises(native.BuildError, match=f"PAGED_ATTN_CUDA_ARCHS must be .*got '{asked}'"):
        native.cuda_archs()


def test_archs_of_this_machines_gpus(native: ModuleType, empty_path: Path) -> None:
    make_tool(empty_path / "nvidia-smi", "echo 9.0; echo 8.9; echo 9.0")
    assert native.cuda_archs() == [89, 90]


def test_archs_where_the_driver_does_not_answer(native: ModuleType, empty_path: Path) -> None:
    # As in a container without a GPU: nvidia-smi is there, and complains on its standard output.
    make_tool(empty_path / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert native.cuda_archs() == [80, 90]


def test_code_is_built_for_each_arch_and_ptx_for_the_newest(native: ModuleType) -> None:
    flags = native.nvcc_flags([80, 90], strict=False)
    for target in ("sm_80", "sm_90"):
        assert f"arch=compute_{target[3:]},code={target}" in flags
    assert "arch=compute_90,code=compute_90" in flags
    assert "code=compute_80" not in flags


def test_without_nvcc_there_is_a_cpu_library_alone(
    native: ModuleType, empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "torch_home", lambda: tmp_path)
    without = native.ninja_file(tmp_path, None, strict=False)
    assert f"{tmp_path}/libpaged_attn_cpu.so" in without
    assert "libpaged_attn_cuda.so" not in without
    nvcc = tmp_path / "nvcc"
    for release, small in (("12.9", False), ("13.0", True)):
        nvcc.write_text(
            f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n"
        )
        nvcc.chmod(0o755)
        with_nvcc = native.ninja_file(tmp_path, nvcc, strict=False)
        assert ("--compress-mode=size" in with_nvcc) == small
    assert f"{tmp_path}/libpaged_attn_cuda.so" in with_nvcc
    kernels = {path.stem for path in (ROOT / "csrc/kernels").glob("*.cu")}
    assert kernels == {instance.kernel for instance in native.instances()}
    for unit in native.units():
        assert f"build cuda/{unit.name}.o: device {ROOT}/csrc/{unit.source}" in with_nvcc
        assert unit.define(native.COMMA) in with_nvcc


def test_a_build_without_torch_says_what_to_do(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(native.BuildError, match=r"needs torch >= 2\.10.*--no-build-isolation"):
        native.torch_home()


# Runs setup.py up to its build, without the downloads that setup_requires would start.
SETUP = """
import runpy, setuptools, subprocess, sys
sys.path.insert(0, "csrc")
import build_native
build_native.find_nvcc = lambda: None
subprocess.run = lambda *_args, **_kwargs: sys.exit("the build was started")
given = {}
setuptools.setup = lambda **arguments: given.update(arguments)
setup_globals = runpy.run_path("setup.py")
print("requires:", *given["setup_requires"])
command = given["cmdclass"]["build_ext"](setuptools.Distribution({"name": "paged-attn"}))
command.inplace = command.editable_mode = False
command.build_lib = command.build_temp = sys.argv[1]
command.run()
"""


def run_setup(folder: Path, cuda: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PAGED_ATTN_CUDA": cuda}
    return subprocess.run(
        [sys.executable, "-c", SETUP, folder],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_cuda_demanded_without_nvcc(tmp_path: Path) -> None:
    result = run_setup(tmp_path, "1")
    assert result.returncode == 1
    assert "requires: nvidia-cuda-nvcc" in result.stdout, "pip brings a compiler"
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("paged-attn: PAGED_ATTN_CUDA=1, but there is no nvcc")
    assert "pip install nvidia-cuda-nvcc" in last
    assert not list(tmp_path.iterdir()), "something was built before the error"


def test_a_wrong_wish_for_cuda(tmp_path: Path) -> None:
    result = run_setup(tmp_path, "yes")
    assert result.returncode == 1
    assert "PAGED_ATTN_CUDA must be 0, 1 or unset, got 'yes'" in result.stderr


def test_build_info() -> None:
    info = paged_attn.build_info()
    assert set(info) == {
        "version",
        "torch",
        "torch_at_build",
        "cpu_isa",
        "cuda",
        "cuda_archs",
        "cuda_problem",
    }
    assert info["torch"] == torch.__version__
    assert info["cpu_isa"] in ISA_LEVELS
    assert info["cuda"] or info["cuda_problem"], "no reason given"


@pytest.mark.skipif(_ops._CUDA is not None, reason="the CUDA library is loaded")
def test_without_the_cuda_library_an_op_says_why() -> None:
    assert paged_attn.build_info()["cuda_problem"] == _ops._CUDA_MISSING
    for name in _ops._OP_NAMES:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"paged_attn::{name}", "CUDA")
    paged_attn.set_debug(True)  # harmless where there is no CUDA
    paged_attn.set_debug(False)


@pytest.mark.parametrize(
    ("capability", "archs", "fits"),
    [
        ((8, 0), [80, 90], True),
        ((8, 6), [80, 90], True),  # same major, newer minor
        ((8, 9), [80], True),
        ((9, 0), [80, 90], True),
        ((12, 0), [80, 90], True),  # from PTX
        ((10, 0), [80], True),
        ((7, 5), [75, 90], True),
        ((9, 0), [75, 80], True),
        ((10, 0), [75], False),  # it runs, without the tensor-core kernel
        ((8, 0), [75], False),
        ((7, 5), [80, 90], False),
        ((8, 0), [86], False),  # older minor
        ((7, 0), [75, 80], False),
        ((8, 0), [], False),
        ((8, 0), [75, 90], False),  # PTX is there for the newest alone
    ],
)
def test_which_gpus_a_build_fits(capability: tuple[int, int], archs: list[int], fits: bool) -> None:
    reason = _ops.arch_misfit(*capability, archs)
    if fits:
        assert reason is None
    else:
        assert reason is not None
        major, minor = capability
        assert f"{major}.{minor}" in reason
        assert f"PAGED_ATTN_CUDA_ARCHS={major}{minor}" in reason
        assert all(str(arch) in reason for arch in archs)


def test_a_library_for_another_torch_names_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libpaged_attn_cpu.so"
    broken.write_text("not a library")
    monkeypatch.setattr(_ops, "_library_path", lambda _kind: broken)
    monkeypatch.setattr(_ops, "_BUILD", {"torch": "2.99.1"})
    with pytest.raises(ImportError, match=r"built against torch 2\.99\.1") as error:
        _ops._load("cpu")
    assert torch.__version__ in str(error.value)


def run_python(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PAGED_ATTN_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


CHECK_LEVEL = """
import os, sys, pytest
from paged_attn import _ops
assert _ops._CPU.paged_attn_cpu_isa().decode() == os.environ["PAGED_ATTN_CPU_ISA"]
tests = ["test_decode.py", "test_features.py", "test_dead_slots.py", "test_shapes.py",
         "test_cpu.py", "test_quantised.py::test_rounding_is_torchs_own",
         "test_merge.py::test_any_shape"]
arguments = ["-q", "-n0", "-p", "no:cacheprovider", "--backend", "cpu"]
sys.exit(pytest.main(arguments + ["tests/" + test for test in tests]))
"""


@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_every_instruction_set_level(isa: str) -> None:
    best = paged_attn.build_info()["cpu_isa"]
    if ISA_LEVELS.index(isa) > ISA_LEVELS.index(best):
        pytest.skip(f"this machine has no {isa}")
    result = run_python(isa, CHECK_LEVEL)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_instruction_set_level_that_is_none() -> None:
    code = "import torch, paged_attn; a = torch.ones(1, 8); b = a[:, 0]\n"
    result = run_python("sse9", code + "paged_attn.merge_states(a, b, a, b)")
    assert result.returncode == 1
    message = result.stderr.strip().splitlines()[-1]
    assert "PAGED_ATTN_CPU_ISA must be one of " in message
    assert "portable on this machine, got sse9" in message
