"""Builds the release wheel, names it after the oldest systems that can load it, and checks it.

`python csrc/build_wheel.py` compiles for every architecture of a release, or for CPU alone with
PAGED_ATTN_CUDA=0. MAX_JOBS bounds its processes. Objects are kept in build/wheel, apart from those
of an installation, which has other architectures. auditwheel reads from the libraries' symbol
versions which platform tag they may have; torch's libraries are left to torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import build_native as native

ROOT = native.CSRC.parent
RELEASE_ARCHS = "75;80;86;89;90;100;120"
TORCH_LIBRARIES = ("libtorch*.so", "libc10*.so")
MAX_MB = 25.0


class WheelError(native.BuildError):
    """There is no wheel, or one that must not be released."""


def build(folder: Path) -> Path:
    """Returns a wheel for the machine at hand, of what is in the tree now and of no older build."""
    command = [sys.executable, "-W", "ignore", "setup.py", "-q"]
    command += ["egg_info", "--egg-base", str(folder)]
    command += ["build", "--build-lib", str(folder / "lib"), "--build-temp", "build/wheel"]
    command += ["bdist_wheel", "--bdist-dir", str(folder / "bdist"), "--dist-dir", str(folder)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise WheelError("the build failed")
    return next(folder.glob("*.whl"))


def tag(wheel: Path, out: Path, platform: str) -> Path:
    """Returns the wheel under the platform's tag; "auto" is the oldest that its symbols allow."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", platform, "--only-plat"]
    # Without a patcher nothing can be grafted.
    command += ["--patcher", "none", "--wheel-dir", str(out)]
    for name in TORCH_LIBRARIES:
        command += ["--exclude", name]
    result = subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=False)
    tagged = list(out.glob("*.whl"))
    if result.returncode != 0 or not tagged:
        raise WheelError(f"auditwheel refuses {wheel.name}:\n{result.stdout}{result.stderr}")
    return tagged[0]


def check(wheel: Path, *, archs: list[int], max_mb: float) -> None:
    """Raises WheelError unless an index takes the wheel and it holds what a release has."""
    # For any Python: the libraries use its stable interfaces through torch alone.
    if not re.search(r"-py3-none-manylinux_2_\d+_[a-z0-9_]+\.whl$", wheel.name):
        raise WheelError(f"{wheel.name}: the tag must be py3-none-manylinux_2_N_ARCH")
    expected = "-".join(wheel.stem.split("-")[-3:])
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (\S+)\s*$", archive.read(info).decode(), re.MULTILINE)
        built = json.loads(archive.read("paged_attn/_build.json"))
    if tags != [expected]:
        raise WheelError(f"{wheel.name}: its metadata has the tags {tags}")
    if built["cuda_archs"] != archs:
        raise WheelError(f"{wheel.name}: built for {built['cuda_archs']} instead of {archs}")
    size = megabytes(wheel)
    if size > max_mb:
        raise WheelError(f"{wheel.name}: {size:.1f} MB, and {max_mb:g} MB are allowed")


def megabytes(path: Path) -> float:
    """Returns a file's size."""
    return path.stat().st_size / 1e6


def make(options: argparse.Namespace) -> Path:
    """Returns the wheel in options.out; nothing is put there that fails a check."""
    if importlib.util.find_spec("auditwheel") is None:
        raise WheelError("a release needs auditwheel: pip install 'auditwheel>=6.8'")
    cpu_alone = os.environ.get("PAGED_ATTN_CUDA") == "0"
    if not cpu_alone and native.find_nvcc() is None:
        raise WheelError("a release needs nvcc; PAGED_ATTN_CUDA=0 builds for CPU alone")
    os.environ.setdefault("PAGED_ATTN_CUDA", "1")
    os.environ["PAGED_ATTN_CUDA_ARCHS"] = options.archs
    archs = [] if cpu_alone else native.cuda_archs()
    with tempfile.TemporaryDirectory() as folder:
        wheel = tag(build(Path(folder)), Path(folder) / "tagged", options.platform)
        check(wheel, archs=archs, max_mb=options.max_mb)
        options.out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, options.out / wheel.name))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--archs", default=RELEASE_ARCHS, help="architectures; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument(
        "--platform", default="auto", help="demand this tag, like manylinux_2_34_x86_64"
    )
    parser.add_argument("--max-mb", type=float, default=MAX_MB, help="default: %(default)g")
    options = parser.parse_args()
    start = time.monotonic()
    try:
        wheel = make(options)
    except native.BuildError as error:
        sys.exit(f"paged-attn: {error}")
    print(f"{wheel}: {megabytes(wheel):.1f} MB in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
