"""The product's ops with its kernels interpreted: torch.ops.paged_attn_ptx and what it stands on.

Bindings, host code and launches are the product's own; cudart.cpp brings each launch here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backends import Backend
from torch import Tensor

from .build import ARCHS, build
from .machine import ORDERS, Machine, Program
from .memory import Buffer, GlobalMemory, Traffic
from .parser import Kernel, PtxError, parse
from .state import Launch

NAMESPACE = "paged_attn_ptx"
_TEXT = ctypes.c_char_p
_ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, _TEXT, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
)
_ON_TENSOR = ctypes.CFUNCTYPE(None, _TEXT, ctypes.c_void_p, ctypes.c_int64)


def run_kernel(
    program: Program,
    arguments: list[bytes],
    memory: GlobalMemory,
    *,
    ctas: int,
    threads: int,
    shared_bytes: int = 0,
    **how: Any,
) -> int:
    """Runs one launch; the arguments are those of the kernel, as bytes; `how` is for Machine.

    Returns how many instructions its threads executed.
    """
    variables = list(program.kernel.params.values())
    if [len(a) for a in arguments] != [v.size for v in variables]:
        raise PtxError(f"{program.kernel.name} takes parameters of {[v.size for v in variables]}")
    size = max((v.offset + v.size for v in variables), default=0)
    params = np.zeros(-(-size // 16) * 16, dtype=np.uint8)
    for argument, variable in zip(arguments, variables, strict=True):
        end = variable.offset + variable.size
        params[variable.offset : end] = np.frombuffer(argument, dtype=np.uint8)
    buffer = Buffer(params.ctypes.data, size, "the parameters", read_only=True)
    memory.add(buffer)
    try:
        launch = Launch(ctas, threads, shared_bytes, buffer.base)
        machine = Machine(program, launch, memory, **how)
        machine.run()
        return machine.executed
    finally:
        memory.remove(buffer)


Edit = Callable[[str], str]


@functools.cache
def _files(paths: tuple[Path, ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            if ".entry " in line:
                found[line.split(".entry ")[1].split("(")[0].strip()] = path
    return found


@functools.cache
def _module(path: Path, edit: Edit | None) -> dict[str, Kernel]:
    text = path.read_text()
    return parse(edit(text) if edit else text)


@functools.cache
def _program(path: Path, kernel: str, edit: Edit | None) -> Program:
    return Program(_module(path, edit)[kernel])


@dataclass(frozen=True)
class LaunchRecord:
    """One launch that was run."""

    kernel: str
    ctas: int
    instructions: int  # of threads
    traffic: Traffic | None


@dataclass(eq=False)
class Runtime:
    """The library, and how launches are to be run."""

    library: ctypes.CDLL
    ptx: dict[int, list[Path]]
    arch: int = ARCHS[-1]
    late_copies: bool = False
    order: str = ORDERS[0]
    count_traffic: bool = False
    edit: Edit | None = None  # of the PTX text: for planted faults
    launches: list[LaunchRecord] = field(default_factory=list)
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    keep: list[Any] = field(default_factory=list)  # callbacks that C++ holds

    def attach(self) -> None:
        """Makes the library call this object."""
        self.keep = [_ON_LAUNCH(self.on_launch), _ON_TENSOR(self.on_tensor)]
        self.library.ptx_set_callbacks(*self.keep)

    def files(self, arch: int) -> dict[str, Path]:
        """The file that each kernel is in."""
        return _files(tuple(self.ptx[arch]))

    def program(self, kernel: str) -> Program:
        return _program(self.files(self.arch)[kernel], kernel, self.edit)

    def on_tensor(self, op: bytes, data: int | None, num_bytes: int) -> None:
        """A tensor that an op body made: kernels may touch it while the op runs."""
        known = any(b.base <= (data or 0) < b.base + b.size for b in self.memory.buffers)
        if data and num_bytes and not known:
            self.memory.add(Buffer(data, num_bytes, f"a temporary of {op.decode()}"))

    def on_launch(
        self, name: bytes, ctas: int, threads: int, shared_bytes: int, arguments: int
    ) -> int:
        """Runs a launch. An exception becomes the text of a CUDA error, which the ops raise."""
        try:
            program = self.program(name.decode())
            sizes = [v.size for v in program.kernel.params.values()]
            pointers = (ctypes.c_void_p * len(sizes)).from_address(arguments)
            values = [ctypes.string_at(pointers[i] or 0, size) for i, size in enumerate(sizes)]
            self.memory.traffic = Traffic() if self.count_traffic else None
            executed = run_kernel(
                program,
                values,
                self.memory,
                ctas=ctas,
                threads=threads,
                shared_bytes=shared_bytes,
                late_copies=self.late_copies,
                order=self.order,
            )
            self.launches.append(LaunchRecord(name.decode(), ctas, executed, self.memory.traffic))
        except Exception as error:
            self.library.ptx_set_error(f"{type(error).__name__}: {error}".encode())
            return 999
        return 0

    @contextmanager
    def arguments_of(self, op: Any, args: tuple[Any, ...]) -> Iterator[None]:
        """While an op runs, the memory of its arguments is there, and nothing else."""
        self.memory.clear()
        found: dict[int, Buffer] = {}
        for argument, value in zip(op._schema.arguments, args, strict=True):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(tensor, Tensor) or tensor.untyped_storage().nbytes() == 0:
                    continue
                storage = tensor.untyped_storage()
                base, size = storage.data_ptr(), storage.nbytes()
                buffer = found.setdefault(base, Buffer(base, size, argument.name, read_only=True))
                buffer.read_only &= not written
        for buffer in found.values():
            self.memory.add(buffer)
        try:
            yield
        finally:
            self.memory.clear()


class Namespace:
    """torch.ops.paged_attn_ptx; each call declares the memory of its arguments."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(getattr(torch.ops, NAMESPACE), name).default

        def call(*args: Any) -> Any:
            with self._runtime.arguments_of(op, args):
                return op(*args)

        return call


@functools.cache
def load() -> Runtime:
    """The library, built if needed, registered with torch."""
    built = build()
    torch.ops.load_library(built.library)  # type: ignore[no-untyped-call]
    runtime = Runtime(ctypes.CDLL(str(built.library)), built.ptx)
    runtime.attach()
    return runtime


def backend(arch: int, sms: int = 2) -> Backend:
    """The library under test, as tests/backends.py describes one."""
    runtime = load()
    runtime.arch = arch
    runtime.late_copies = runtime.count_traffic = False
    runtime.edit = None
    runtime.order = ORDERS[0]
    runtime.launches.clear()
    runtime.library.ptx_set_device(sms, arch)

    def set_checks(on: bool) -> None:
        runtime.library.paged_attn_set_debug(int(on))

    return Backend("ptx", Namespace(runtime), torch.clone, set_checks)
