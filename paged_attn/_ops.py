"""Loads the native libraries and tells torch.compile what their ops do."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

Scale = float | torch.Tensor | None

# Where torch's annotations fall short of strict checking.
_torch: Any = torch
_forward_ad: Any = forward_ad
_OP_NAMES = (
    "paged_attention",
    "flash_attn_with_kvcache",
    "plan_decode",
    "merge_states",
    "reshape_and_cache",
    "gather_cache",
    "copy_blocks",
    "swap_blocks",
)
_DEBUG_VARIABLE = "PAGED_ATTN_DEBUG"
# kMmaArch of csrc/cuda/decode.cpp.
_TENSOR_CORE_ARCH = 80


def _native_folder() -> Path:
    """Returns the folder of the native libraries.

    It is this package's. In a source tree that was installed, but not in place, Python finds the
    tree's package first; the libraries are then where pip put them.
    """
    here = Path(__file__).parent
    folders = [Path(str(found.locate_file("paged_attn"))) for found in _distributions()]
    return next((f for f in [here, *folders] if (f / "libpaged_attn_cpu.so").is_file()), here)


def _distributions() -> list[metadata.Distribution]:
    """Returns the installed copies, which in a source tree are behind the tree's own record."""
    return list(metadata.distributions(name="paged-attn"))


def _library_path(kind: str) -> Path:
    return _FOLDER / f"libpaged_attn_{kind}.so"


def _read_build() -> dict[str, Any]:
    path = _FOLDER / "_build.json"
    built: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return built


def _load(kind: str) -> ctypes.CDLL:
    """Loads one library; its ops are registered when this returns."""
    path = _library_path(kind)
    try:
        _torch.ops.load_library(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"paged_attn: {path.name}, built against torch {_BUILD.get('torch', 'unknown')}, does "
            f"not load under torch {torch.__version__}: {error}"
        ) from error


def _load_cuda() -> tuple[ctypes.CDLL | None, str | None]:
    """Returns the CUDA library, or None and the reason why there is none."""
    if not _library_path("cuda").is_file():
        return None, _BUILD.get("cuda_missing_because") or "it was not built"
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} has no CUDA"
    try:
        return _load("cuda"), None
    except ImportError as error:
        return None, str(error)


def register_fakes(namespace: str) -> None:
    """Registers the fake of every op of a namespace.

    All but gather_cache write into their arguments and return nothing.
    """
    for name in _OP_NAMES:
        packet = getattr(getattr(_torch.ops, namespace), name)
        check = _device_check(packet.default._schema)

        def fake(*args: Any, check: Any = check) -> None:
            check(args)

        def fake_gather(*args: Any, check: Any = check) -> tuple[torch.Tensor, torch.Tensor]:
            check(args)
            key_cache, dtype, total_tokens = args[0], args[-2], args[-1]
            if dtype is None:
                dtype = key_cache.dtype if key_cache.element_size() > 1 else torch.float32
            shape = (total_tokens, *key_cache.shape[2:])
            return key_cache.new_empty(shape, dtype=dtype), key_cache.new_empty(shape, dtype=dtype)

        torch.library.register_fake(
            f"{namespace}::{name}", fake_gather if name == "gather_cache" else fake
        )


def _device_check(schema: Any) -> Callable[[Sequence[Any]], None]:
    """Returns what makes a fake refuse tensors of several devices.

    A real meta tensor among others dispatches to the fake, too: it must not pass for a run. Only
    block_mapping and the two pools of swap_blocks may be elsewhere.
    """
    free = {"block_mapping", "src", "dst"}
    names = [argument.name for argument in schema.arguments]

    def check(args: Sequence[Any]) -> None:
        leader = None
        for name, value in zip(names, args, strict=True):
            for tensor in value if isinstance(value, list) else [value]:
                if not isinstance(tensor, torch.Tensor):
                    continue
                if leader is None:
                    leader = (name, tensor.device)
                on_meta = "meta" in (tensor.device.type, leader[1].type)
                if tensor.device != leader[1] and (on_meta or name not in free):
                    raise RuntimeError(
                        f"{schema.name.split('::')[1]}: {name} must be on the same device as "
                        f"{leader[0]} ({leader[1]}), got {tensor.device}"
                    )

    return check


def _explain_missing_cuda(reason: str) -> torch.library.Library:
    """Makes each op say, for CUDA tensors, why it cannot run."""
    library: torch.library.Library = _torch.library.Library("paged_attn", "IMPL")
    for name in _OP_NAMES:

        def missing(*_args: object, name: str = name) -> None:
            raise RuntimeError(f"{name}: the CUDA library of paged_attn is not loaded: {reason}")

        _torch.library.Library.impl(library, name, missing, "CUDA")
    return library


_FOLDER = _native_folder()
_BUILD = _read_build()
if not _library_path("cpu").is_file():
    raise ImportError(
        f"paged_attn: {_library_path('cpu')} is missing. Build it with `pip install .` in "
        "the source folder."
    )
_CPU = _load("cpu")
_CPU.paged_attn_cpu_isa.restype = ctypes.c_char_p
_CUDA, _CUDA_MISSING = _load_cuda()
register_fakes("paged_attn")
_KEEP = _explain_missing_cuda(_CUDA_MISSING) if _CUDA_MISSING else None

# The ops that paged_attn's functions call. Tests put another backend's here.
lib: Any = torch.ops.paged_attn


def set_debug(on: bool) -> None:
    """Makes CUDA ops check table entries, slots and lengths, as CPU ops always do.

    Each checked call waits for the device, so it cannot be captured in a CUDA graph. The
    environment variable PAGED_ATTN_DEBUG=1 turns it on from the start.

    Args:
        on: True to check, False not to.
    """
    if _CUDA is not None:
        _CUDA.paged_attn_set_debug(int(on))


def split_scale(scale: Scale) -> tuple[torch.Tensor | None, float | None]:
    """Returns a scale as the ops take it: a tensor or a float."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale, None
    try:
        return None, float(scale)
    except (TypeError, ValueError):
        raise TypeError(
            "k_scale and v_scale must be None, a float or a float32 tensor, got "
            f"{type(scale).__name__}"
        ) from None


def refuse_gradients(op: str, names: str, values: tuple[object, ...]) -> None:
    """Raises RuntimeError if a gradient or a tangent would be lost: no op has a derivative.

    To be called where torch.is_grad_enabled(), which inference is not.

    Args:
        op: name of the function.
        names: of its arguments, with spaces between them.
        values: the arguments; those that are no tensors are passed over.
    """
    dual = _forward_ad._current_level >= 0
    for i, value in enumerate(values):
        if value is None or not isinstance(value, torch.Tensor):
            continue
        if value.requires_grad or (dual and _forward_ad.unpack_dual(value).tangent is not None):
            raise RuntimeError(
                f"{op}: {names.split()[i]} must not require a gradient, as there is no derivative: "
                "call it under torch.no_grad() or torch.inference_mode(), or give it a detached "
                "tensor"
            )


def _version() -> str | None:
    """Returns the installed version; None where the libraries were built in place only."""
    return next((found.version for found in _distributions()), None)


def _misfit() -> str | None:
    """Says why the CUDA library does not fit this machine's GPUs, if it does not."""
    if _CUDA is None or not torch.cuda.is_available():
        return None
    archs = [int(arch) for arch in _BUILD.get("cuda_archs", [])]
    for device in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(device)
        reason = arch_misfit(major, minor, archs)
        if reason is not None:
            return f"GPU {device}: {reason}"
    return None


def arch_misfit(major: int, minor: int, archs: list[int]) -> str | None:
    """Says why code built for `archs` (80, 90, ...) does not fit a GPU of this capability.

    Machine code runs on GPUs of the same major version and at least its minor version; PTX of the
    newest architecture is compiled by the driver for any later GPU. Code for less than 80 has no
    tensor-core kernel, whatever the GPU has.

    Args:
        major: compute capability, major version.
        minor: compute capability, minor version.
        archs: what was built, each major * 10 + minor; PTX is there for the largest.

    Returns:
        None where it fits, else a sentence.
    """
    capability = major * 10 + minor
    usable = [arch for arch in archs if arch // 10 == major and arch <= capability]
    newest = max(archs, default=capability + 1)
    if newest <= capability:
        usable.append(newest)
    if usable and max(usable) >= min(capability, _TENSOR_CORE_ARCH):
        return None
    missing = "tensor-core kernel" if usable else "kernels"
    built = ", ".join(str(arch) for arch in sorted(archs)) or "none"
    return (
        f"compute capability {major}.{minor} has no {missing}: built for {built}. Rebuild with "
        f"PAGED_ATTN_CUDA_ARCHS={capability}"
    )


def build_info() -> dict[str, Any]:
    """Tells what was built, what is loaded, and why a part is missing.

    Returns:
        A dictionary with the keys `version`, `torch` and `torch_at_build` (versions),
        `cpu_isa` (the instruction-set level in use: "avx512bf16", "avx512", "avx2" or
        "portable"), `cuda` (whether the CUDA library is loaded), `cuda_archs` (what it was built
        for, 90 for sm_90), and `cuda_problem` (why CUDA is missing or does not fit this machine's
        GPU, or None).
    """
    isa = _CPU.paged_attn_cpu_isa()
    return {
        "version": _version(),
        "torch": torch.__version__,
        "torch_at_build": _BUILD.get("torch"),
        "cpu_isa": isa.decode() if isa else None,
        "cuda": _CUDA is not None,
        "cuda_archs": _BUILD.get("cuda_archs", []),
        "cuda_problem": _CUDA_MISSING or _misfit(),
    }


if os.environ.get(_DEBUG_VARIABLE, "0") not in ("", "0"):
    set_debug(True)
