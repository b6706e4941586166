"""How csrc/ becomes native libraries: finds the tools and writes build.ninja. Used by setup.py."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent
NVCC_WHEELS = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-cuda-cccl",
    "nvidia-cuda-runtime",
    "nvidia-nvvm",
)
# The bindings that every library links; the others are named for the library they belong to.
SHARED_BINDINGS = (
    "arg",
    "block_ops",
    "cache_ops",
    "merge_states",
    "ops",
    "paged",
    "paged_attention",
    "plan_decode",
)
# In the build's folder: the PTX of each unit of kernels, in a folder of its own.
KEPT_PTX = "cuda/ptx"
COMMA = "\\,"  # of nvcc in an option: it splits them at others
# Ninja's name for all that the CUDA library is linked of.
CUDA_OBJECTS = "cuda_objects"
ISA_FLAGS = {"portable": ""}
if platform.machine() in ("x86_64", "AMD64"):
    # g++ 12 takes what its own AVX-512 intrinsics leave undefined for a mistake of ours.
    AVX512 = "-march=x86-64-v4 -Wno-uninitialized -Wno-maybe-uninitialized"
    ISA_FLAGS |= {"avx2": "-mavx2 -mfma -mf16c", "avx512": AVX512}
    ISA_FLAGS["avx512bf16"] = f"{AVX512} -mavx512bf16"


class BuildError(Exception):
    """The build cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class Instance:
    """A kernel with its template arguments, as kernels/instances.def has them."""

    kernel: str  # of kernels/KERNEL.cu
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel.upper()}({', '.join(self.arguments)})"


@dataclass(frozen=True)
class Unit:
    """Instances of one kernel that are compiled together."""

    instances: tuple[Instance, ...]

    @property
    def source(self) -> str:
        """Returns its file, within csrc."""
        return f"kernels/{self.instances[0].kernel}.cu"

    @property
    def name(self) -> str:
        """Returns the kernel and the arguments that are the same for all, decode_mma_f16_128."""
        columns = zip(*(instance.arguments for instance in self.instances), strict=True)
        common = [column[0] for column in columns if len(set(column)) == 1]
        words = "_".join([self.instances[0].kernel, *common])
        return words.replace("DType::k", "").lower()

    def define(self, comma: str = ",") -> str:
        """Returns the compiler's option for its instances; nvcc wants commas with a backslash."""
        if not self.instances[0].arguments:
            return ""
        text = " ".join(map(str, self.instances)).replace(",", comma)
        return f"'-DPAGED_ATTN_INSTANCES={text}'"


def instances(csrc: Path = CSRC) -> list[Instance]:
    """Returns every kernel instance that there is, slow to compile first."""
    text = (csrc / "kernels/instances.def").read_text()
    found = re.findall(r"^([A-Z_]+)\((.*)\)$", text, re.M)
    return [
        Instance(kernel.lower(), tuple(filter(None, arguments.split(", "))))
        for kernel, arguments in found
    ]


def units(csrc: Path = CSRC) -> list[Unit]:
    """Returns what is compiled in one go: instances that differ in their middle argument alone.

    More would leave processors without work, fewer would read the headers more often.
    """
    groups: dict[tuple[str, ...], list[Instance]] = {}
    for instance in instances(csrc):
        first, *middle = instance.arguments or ("",)
        key = (instance.kernel, first if len(middle) > 1 else "", *middle[-1:])
        groups.setdefault(key, []).append(instance)
    return [Unit(tuple(group)) for group in groups.values()]


def find_nvcc() -> Path | None:
    """Returns the nvcc of CUDA_HOME, of PATH, or of NVIDIA's wheels."""
    home = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    wheels = [found for entry in sys.path for found in sorted(Path(entry).glob("nvidia/cu*"))]
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    candidates += [Path(on_path).resolve()] if on_path else []
    candidates += [wheel / "bin" / "nvcc" for wheel in reversed(wheels)]
    return next((nvcc for nvcc in candidates if nvcc.is_file()), None)


def cuda_archs() -> list[int]:
    """Returns the architectures to compile for: those asked for, the GPUs', or 80 and 90."""
    asked = os.environ.get("PAGED_ATTN_CUDA_ARCHS", "")
    archs = [arch.strip() for arch in asked.replace(",", ";").replace(".", "").split(";")]
    archs = [arch for arch in archs if arch]
    if any(not arch.isdigit() for arch in archs):
        raise BuildError(f"PAGED_ATTN_CUDA_ARCHS must be like '80;90', got {asked!r}")
    if not archs and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        printed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        # Without a driver that answers, what it prints is a sentence.
        archs = [major + minor for major, minor in re.findall(r"^(\d+)\.(\d)\s*$", printed, re.M)]
    return sorted({int(arch) for arch in archs}) or [80, 90]


def torch_home() -> Path:
    """Returns torch's folder: its headers and libtorch_cpu are all that the build needs of it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "building needs torch >= 2.10, and there is none in this environment. Install it "
            "first, or let pip bring it: leave out --no-build-isolation."
        )
    return Path(spec.submodule_search_locations[0])


def compile_steps(
    sources: Sequence[Path], rule: str, prefix: str, flags: str = ""
) -> tuple[list[str], list[str]]:
    """Returns object names, and the ninja lines that compile `sources` into them."""
    objects = [f"{prefix}/{source.parent.name}_{source.stem}.o" for source in sources]
    lines = [
        f"build {target}: {rule} {source}\n  flags = {flags}"
        for target, source in zip(objects, sources, strict=True)
    ]
    return objects, lines


def nvcc_flags(archs: Sequence[int], *, strict: bool) -> str:
    """Returns nvcc's flags: machine code for each architecture, PTX for the newest."""
    targets = [f"-gencode arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"-gencode arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    flags = ["-std=c++20 -O3 --expt-relaxed-constexpr -Xcompiler -fPIC,-fvisibility=hidden"]
    if strict:
        flags.append("-Werror all-warnings -Xptxas --warn-on-spills,--warning-as-error")
    return " ".join(flags + targets)


def compression(nvcc: Path) -> str:
    """Returns the flag that makes the machine code a quarter of its size.

    Every driver of CUDA 13 can read that; an nvcc before 13 makes code for older ones, too.
    """
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)", text)
    return " --compress-mode=size" if release and int(release[1]) >= 13 else ""


def ninja_file(
    out: Path, nvcc: Path | None, *, strict: bool, archs: Sequence[int] | None = None
) -> str:
    """Returns the text of build.ninja, which builds the libraries into `out`.

    Architectures are those of cuda_archs() unless given.
    """
    return "\n".join(_ninja_lines(out, nvcc, archs or cuda_archs(), strict=strict)) + "\n"


def _ninja_lines(
    out: Path, nvcc: Path | None, archs: Sequence[int], *, strict: bool
) -> Iterator[str]:
    torch = torch_home()
    warnings = "-Wall -Wextra -Wno-missing-field-initializers" + (" -Werror" if strict else "")
    yield f"cxx = {os.environ.get('CXX', 'g++')} -std=c++20 -I{CSRC} -fPIC -fvisibility=hidden $"
    yield f"  -fmacro-prefix-map={CSRC.parent}/= {warnings}"
    yield f"torch = -isystem {torch}/include -fmacro-prefix-map={torch}/include/= $"
    yield "  -DTORCH_TARGET_VERSION=0x020a000000000000"
    yield from _rule("bindings", "$cxx -O2 $torch -MMD -MF $out.d -c $in -o $out $flags")
    fast_math = "-fno-math-errno -fno-trapping-math"
    yield from _rule("kernels", f"$cxx -O3 {fast_math} -MMD -MF $out.d -c $in -o $out $flags")
    yield "rule link\n  command = $cxx -shared -Wl,--no-undefined -s $in -o $out $flags"

    bindings = CSRC / "bindings"
    shared, lines = compile_steps(
        [bindings / f"{name}.cpp" for name in SHARED_BINDINGS], "bindings", "shared"
    )
    yield from lines
    own = [
        bindings / "device_cpu.cpp",
        bindings / "register_cpu.cpp",
        CSRC / "cpu/backend.cpp",
        CSRC / "cpu/plan.cpp",
    ]
    objects, lines = compile_steps(own, "bindings", "cpu")
    yield from lines
    for isa, flags in ISA_FLAGS.items():
        level, lines = compile_steps(
            [CSRC / "cpu/kernels.cpp"], "kernels", f"cpu/{isa}", f"{flags} -DPAGED_ATTN_ISA={isa}"
        )
        objects += level
        yield from lines
    libtorch = f"-L{torch}/lib -ltorch_cpu"
    yield f"build {out}/libpaged_attn_cpu.so: link {' '.join(shared + objects)}"
    yield f"  flags = {libtorch}"
    if nvcc is None:
        return

    # nvcc knows where its headers and libraries are: it compiles the host side, and links.
    flags = nvcc_flags(archs, strict=strict) + compression(nvcc)
    command = f"{nvcc} {flags} -I{CSRC} --keep --keep-dir $keep"
    # Of what nvcc makes on the way the PTX stays: the tests execute it.
    tidy = "find $keep -type f ! -name '*.ptx' -delete"
    yield from _rule(
        "device",
        f"mkdir -p $keep && {command} -MD -MF $out.d -c $in -o $out $flags && {tidy}",
    )
    host = f"{nvcc} -std=c++20 -O2 -I{CSRC} -Xcompiler -fPIC,-fvisibility=hidden"
    yield from _rule("host", f"{host} -MD -MF $out.d -c $in -o $out $flags")
    link = f"{nvcc} -shared -cudart static -Xlinker -s,--no-undefined"
    yield f"rule cudalink\n  command = {link} $in -o $out $flags"
    own = [bindings / "device_cuda.cpp", bindings / "register_cuda.cpp"]
    objects, lines = compile_steps(own, "bindings", "cuda")
    yield from lines
    for unit in units():
        objects.append(f"cuda/{unit.name}.o")
        define = unit.define(COMMA)
        yield f"build {objects[-1]}: device {CSRC / unit.source}"
        yield f"  flags = {define}\n  keep = {KEPT_PTX}/{unit.name}"
    more, lines = compile_steps(sorted((CSRC / "cuda").glob("*.cpp")), "host", "cuda")
    objects += more
    yield from lines
    yield f"build {CUDA_OBJECTS}: phony {' '.join(shared + objects)}"
    yield f"build {out}/libpaged_attn_cuda.so: cudalink {' '.join(shared + objects)}"
    yield f"  flags = {libtorch}"


def _rule(name: str, command: str) -> Iterator[str]:
    yield f"rule {name}\n  command = {command}\n  depfile = $out.d\n  deps = gcc"


def main() -> int:
    """Answers what .ci/run asks: whether there is an nvcc, and which wheels bring one."""
    if sys.argv[1:] == ["--nvcc-wheels"]:
        print(" ".join(NVCC_WHEELS))
        return 0
    if sys.argv[1:] == ["--has-nvcc"]:
        return 0 if find_nvcc() else 1
    print("usage: build_native.py --has-nvcc | --nvcc-wheels", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
