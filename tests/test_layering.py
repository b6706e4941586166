"""Who may include whom, and what only one file may know. A violation names its file and line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
STD = r"c?[a-z_]+"  # <vector>, <cstdint>: no folder, no extension
CUDA = r"cuda_\w+\.h"
STABLE_TORCH = r"torch/(csrc/stable|headeronly)/.*"
MAX_LINES = 550
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


@dataclass(frozen=True)
class Layer:
    """Files and what they may include: regular expressions of whole names."""

    files: str  # glob under csrc/
    quoted: str  # of our headers
    angled: str  # of others'


LAYERS = (
    Layer("params.h", r"(?!)", STD),
    Layer("mma_params.h", r"params\.h", STD),
    Layer("dispatch.h", r"(?!)", STD),
    Layer("backend.h", r"params\.h", STD),
    Layer("device/ptx.cuh", r"(?!)", f"{STD}|{CUDA}"),
    Layer("device/[!p]*.cuh", r"(mma_)?params\.h|device/\w+\.cuh", f"{STD}|{CUDA}"),
    Layer("device/p[!t]*.cuh", r"(mma_)?params\.h|device/\w+\.cuh", f"{STD}|{CUDA}"),
    Layer("kernels/*.cuh", r"(mma_)?params\.h|device/\w+\.cuh", STD),
    Layer("kernels/*.cu", r"kernels/\w+\.cuh", r"(?!)"),
    Layer(
        "cuda/*",
        r"(params|mma_params|backend)\.h|cuda/\w+\.h|kernels/instances\.def",
        rf"{STD}|cuda_runtime_api\.h",
    ),
    Layer("cpu/*", r"(params|dispatch|backend)\.h|cpu/\w+\.h", rf"{STD}|immintrin\.h"),
    Layer(
        "bindings/*",
        r"(params|dispatch|backend)\.h|bindings/\w+\.h|cpu/parallel\.h",
        rf"{STD}|dlfcn\.h|{STABLE_TORCH}",
    ),
)

# What only device/ptx.cuh may say, as it alone has a twin that runs on a CPU.
COMPILER_WORDS = re.compile(
    r"\basm\b|__CUDA_ARCH__|<<<|extern\s+__shared__|\b__(syncthreads|syncwarp|shfl|ballot|ldg)\w*"
)
# What one paged_attn module may import of the others; torch is named like them.
PYTHON_LAYERS = {
    # The host side never touches a device.
    "block_events": set[str](),
    "_checks": set[str](),
    "block_pool": {"_checks", "block_events"},
    "prefix_cache": {"_checks"},
    "sequence_tables": {"_checks", "block_events", "block_pool"},
    "prefix_tables": {"_checks", "block_pool", "prefix_cache", "sequence_tables"},
    "block_stats": {"block_pool", "sequence_tables"},
    "blocks": {
        "_checks",
        "block_events",
        "block_pool",
        "block_stats",
        "prefix_cache",
        "prefix_tables",
        "sequence_tables",
    },
    "alibi": {"torch", "_checks"},
    "reference": {"torch"},
    "_ops": {"torch"},
    "_memory": {"torch"},
    "decode": {"torch", "_checks", "_ops"},
    "cache": {"torch", "_ops"},
    "staging": {"torch"},
    "device_tables": {"torch", "blocks", "staging"},
    "kv_batch": {"torch", "decode", "device_tables"},
    "kv_pools": {"torch", "_checks", "cache", "_memory"},
    "kv_swap": {"torch", "blocks", "kv_pools", "staging"},
    "kv_cache": {
        "torch",
        "_checks",
        "blocks",
        "cache",
        "decode",
        "device_tables",
        "kv_batch",
        "kv_pools",
        "kv_swap",
        "staging",
    },
    "flash_attn": {"torch", "_checks", "_ops", "decode"},
}


def sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())


def numbered(path: Path) -> Iterator[tuple[str, str]]:
    """Lines with their place, `csrc/params.h:12`; without // comments."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield f"{path.relative_to(ROOT)}:{number}", line.split("//")[0]


def report(violations: list[str]) -> None:
    assert not violations, "\n" + "\n".join(violations)


def include_violations(layer: Layer, path: Path) -> list[str]:
    violations = []
    for place, line in numbered(path):
        match = INCLUDE.match(line)
        if match is None:
            continue
        allowed = layer.quoted if match[1] == '"' else layer.angled
        if not re.fullmatch(allowed, match[2]):
            violations.append(f"{place}: {layer.files} must not include {match[2]}")
        elif match[1] == '"' and not (CSRC / match[2]).is_file():
            violations.append(f"{place}: there is no csrc/{match[2]}")
    return violations


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.files)
def test_includes(layer: Layer) -> None:
    files = sorted(CSRC.glob(layer.files))
    assert files, f"no file matches csrc/{layer.files}"
    report([v for path in files for v in include_violations(layer, path)])


def test_every_source_has_a_layer() -> None:
    layered = {path for layer in LAYERS for path in CSRC.glob(layer.files)}
    found = {path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".cuh", ".cu"}}
    report([f"{path.relative_to(ROOT)}:1: in no layer" for path in sorted(found - layered)])


def test_a_violation_is_seen(tmp_path: Path) -> None:
    # The checks above are of use only if they can fail.
    bad = ROOT / "csrc" / "kernels" / "decode_simt.cuh"
    layer = Layer("kernels/*.cuh", r"params\.h", STD)
    seen = include_violations(layer, bad)
    assert seen
    assert re.match(r"csrc/kernels/decode_simt\.cuh:\d+: ", seen[0])


def test_one_kernel_an_instance_file() -> None:
    violations = []
    for path in sources("csrc/kernels/*.cu"):
        lines = path.read_text().splitlines()
        if sum(line.startswith("#include") for line in lines) != 1:
            violations.append(f"{path.relative_to(ROOT)}:1: must include one kernel header")
        if sum(bool(line.strip()) for line in lines) > 12:
            violations.append(f"{path.relative_to(ROOT)}:13: instances, and no more, in 12 lines")
    report(violations)


def test_compiler_words_stay_in_one_file() -> None:
    report(
        [
            f"{place}: {match[0]} belongs in device/ptx.cuh"
            for path in sources("csrc/**/*.h", "csrc/**/*.cuh", "csrc/**/*.cu", "csrc/**/*.cpp")
            if path != CSRC / "device/ptx.cuh"
            for place, line in numbered(path)
            if (match := COMPILER_WORDS.search(line))
        ]
    )


def test_kernels_are_named_so() -> None:
    violations = []
    for path in sources("csrc/kernels/*.cuh"):
        text = path.read_text()
        for match in re.finditer(
            r"__global__\s+void(?:\s+__launch_bounds__\(.*\))?\s+(\w+)\(", text
        ):
            if not match[1].endswith("_kernel"):
                line = text[: match.start()].count("\n") + 1
                violations.append(f"{path.relative_to(ROOT)}:{line}: {match[1]} is not *_kernel")
    report(violations)


def test_files_stay_short() -> None:
    files = sources("csrc/**/*.*", "paged_attn/*.py", "tests/*.py", "examples/*.py", "setup.py")
    texts = [path for path in files if path.suffix in {".h", ".cpp", ".cuh", ".cu", ".py"}]
    report(
        [
            f"{path.relative_to(ROOT)}:{MAX_LINES + 1}: has {count} lines"
            for path in texts
            if (count := len(path.read_text().splitlines())) > MAX_LINES
        ]
    )


@pytest.mark.parametrize("module", PYTHON_LAYERS)
def test_python_imports(module: str) -> None:
    path = ROOT / "paged_attn" / f"{module}.py"
    violations = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "paged_attn":
                names = [f"paged_attn.{alias.name}" for alias in node.names]
        for name in names:
            root, _, rest = name.partition(".")
            used = rest.split(".")[0] if root == "paged_attn" else root
            if root in {"paged_attn", "torch"} and used not in PYTHON_LAYERS[module]:
                line = getattr(node, "lineno", 0)
                violations.append(f"paged_attn/{module}.py:{line}: must not import {name}")
    report(violations)
