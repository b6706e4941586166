"""The release wheel: its tag, what is in it, and that it works where it is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import build_wheel
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "py3-none-manylinux_2_34_x86_64"
# Pythons of other environments that the wheel must work in, with the oldest torch for instance.
OTHERS = [path for path in os.environ.get("PAGED_ATTN_PYTHONS", "").split(os.pathsep) if path]

# That the wheel's package is the one imported, and an op of its library gives what it should.
USE = """
import sys, torch, paged_attn
assert paged_attn.__file__.startswith(sys.argv[1]), paged_attn.__file__
ones, zeros = torch.ones(1, 1, 8), torch.zeros(1, 1)
out, lse = paged_attn.merge_states(ones, zeros, 3 * ones, zeros)
assert torch.equal(out, 2 * ones), out
print(torch.__version__)
"""


def run(folder: Path, *command: str | Path, **environment: str) -> str:
    """Returns what a command in a folder prints; it must succeed."""
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def fake_wheel(folder: Path, tag: str = PLATFORM, *, inside: str = "", archs: str = "[]") -> Path:
    """A wheel of a thousand bytes and some, as far as the checks look."""
    wheel = folder / f"paged_attn-0.1.0-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("paged_attn-0.1.0.dist-info/WHEEL", f"Tag: {inside or tag}\n")
        archive.writestr("paged_attn/_build.json", f'{{"cuda_archs": {archs}}}')
        archive.writestr("paged_attn/libpaged_attn_cpu.so", bytes(1000))
    return wheel


def test_a_wheel_that_may_be_released(tmp_path: Path) -> None:
    build_wheel.check(fake_wheel(tmp_path, archs="[80, 90]"), archs=[80, 90], max_mb=0.01)


@pytest.mark.parametrize(
    ("tag", "inside", "archs", "problem"),
    [
        ("py3-none-linux_x86_64", "", "[80]", "the tag must be py3-none-manylinux_2_N_ARCH"),
        ("cp311-cp311-manylinux_2_34_x86_64", "", "[80]", "the tag must be py3-none"),
        (PLATFORM, "py3-none-linux_x86_64", "[80]", r"has the tags \['py3-none-linux_x86_64'\]"),
        (PLATFORM, "", "[]", r"built for \[\] instead of \[80\]"),
        (PLATFORM, "", "[80]", r"0\.0 MB, and 0\.001 MB are allowed"),
    ],
)
def test_a_wheel_that_must_not_be_released(
    tmp_path: Path, tag: str, inside: str, archs: str, problem: str
) -> None:
    wheel = fake_wheel(tmp_path, tag, inside=inside, archs=archs)
    with pytest.raises(build_wheel.WheelError, match=problem):
        build_wheel.check(wheel, archs=[80], max_mb=0.001)


def needed_glibc(library: Path) -> tuple[int, int]:
    """The newest version of glibc's symbols that a library names."""
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", run(library.parent, "readelf", "-V", library))
    return max((int(major), int(minor)) for major, minor in versions)


@pytest.mark.slow
def test_a_wheel_for_cpu_alone(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="the release's dependency, auditwheel, is missing")
    script = ROOT / "csrc" / "build_wheel.py"
    printed = run(ROOT, sys.executable, script, "--out", tmp_path, PAGED_ATTN_CUDA="0")
    (wheel,) = tmp_path.iterdir()
    assert re.search(rf"{re.escape(str(wheel))}: \d\.\d MB in \d+ s$", printed)
    tag = re.fullmatch(r"paged_attn-[\d.]+-py3-none-manylinux_(\d+)_(\d+)_\w+\.whl", wheel.name)
    assert tag

    site = tmp_path / "site"
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target")
    run(tmp_path, sys.executable, *pip, site, wheel)
    package, (info,) = site / "paged_attn", site.glob("*.dist-info")
    native = {path for path in site.rglob("*") if ".so" in path.suffixes}
    assert native == {package / "libpaged_attn_cpu.so"}
    # No sources of csrc, no tests, nothing of torch's.
    assert {path.name for path in site.iterdir()} == {"paged_attn", info.name}
    modules = {path.relative_to(ROOT) for path in ROOT.glob("paged_attn/**/*.py")}
    assert {path.relative_to(site) for path in package.rglob("*.py")} == modules
    others = {path.name for path in package.rglob("*") if path.suffix in {".typed", ".txt"}}
    assert others == {"py.typed", "sample.txt"}
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert json.loads((package / "_build.json").read_text())["cuda_archs"] == []

    library = package / "libpaged_attn_cpu.so"
    assert needed_glibc(library) <= (int(tag[1]), int(tag[2]))
    for builder in (ROOT, Path(torch.__file__).parent):
        assert str(builder).encode() not in library.read_bytes(), "a path of the builder's"
    for python in (sys.executable, *OTHERS):
        run(tmp_path, python, "-c", USE, site, PYTHONPATH=str(site))
