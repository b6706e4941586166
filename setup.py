"""Builds the native libraries with ninja: CPU always, CUDA wherever nvcc is found.

PAGED_ATTN_CUDA=0 or 1 forbids or demands CUDA; PAGED_ATTN_CUDA_ARCHS ("80;90") names its
architectures; PAGED_ATTN_STRICT=1 turns warnings and register spills into errors; MAX_JOBS bounds
the processes.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
import build_native as native  # noqa: E402

WANT_CUDA = os.environ.get("PAGED_ATTN_CUDA", "")
if WANT_CUDA not in ("", "0", "1"):
    sys.exit(f"paged-attn: PAGED_ATTN_CUDA must be 0, 1 or unset, got {WANT_CUDA!r}")


class BuildNative(build_ext):
    def run(self) -> None:
        try:
            self.build_native()
        except native.BuildError as error:
            sys.exit(f"paged-attn: {error}")

    def build_native(self) -> None:
        in_place = self.inplace or self.editable_mode
        out = (ROOT if in_place else Path(self.build_lib).resolve()) / "paged_attn"
        work = Path(self.build_temp).resolve()
        nvcc = None if WANT_CUDA == "0" else native.find_nvcc()
        if nvcc is None and WANT_CUDA == "1":
            raise native.BuildError(
                "PAGED_ATTN_CUDA=1, but there is no nvcc in CUDA_HOME, on PATH or among the "
                "installed wheels. Install the CUDA toolkit, or run: pip install "
                + " ".join(native.NVCC_WHEELS)
            )
        for folder in (out, work):
            folder.mkdir(parents=True, exist_ok=True)
        strict = os.environ.get("PAGED_ATTN_STRICT") == "1"
        (work / "build.ninja").write_text(native.ninja_file(out, nvcc, strict=strict))
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run([sys.executable, "-m", "ninja", "-C", str(work), "-j", jobs], check=True)
        reason = "PAGED_ATTN_CUDA=0" if WANT_CUDA == "0" else "nvcc was not found"
        info = {
            "torch": importlib.metadata.version("torch"),
            "cuda_archs": native.cuda_archs() if nvcc else [],
            "cuda_missing_because": None if nvcc else reason,
        }
        (out / "_build.json").write_text(json.dumps(info) + "\n")
        print(f"paged-attn: built for CPU{' and CUDA' if nvcc else ''}: {info}")

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("paged_attn.native", sources=[])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel},
    # Under build isolation pip installs these: a CUDA build then needs nothing but pip.
    setup_requires=list(native.NVCC_WHEELS) if WANT_CUDA == "1" and not native.find_nvcc() else [],
)
