"""The emulator's C functions, and tensors in its guarded memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .build import NAMESPACE, build_lock, compile_target, product_target, selftest_target
from .counters import Counters

SCHEDULES = ("in_order", "random", "priorities", "reverse")


class Runtime:
    """One loaded library with the emulator in it; each library has an emulator of its own."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        library = self.library
        library.emu_last_error.restype = ctypes.c_char_p
        library.emu_allocate.restype = ctypes.c_void_p
        library.emu_allocate.argtypes = [ctypes.c_size_t, ctypes.c_char_p]
        library.emu_free.argtypes = [ctypes.c_void_p]
        library.emu_set_read_only.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.emu_describe.restype = ctypes.c_char_p
        library.emu_describe.argtypes = [ctypes.c_void_p]
        for name in ("undefined", "uninitialised"):
            mark = getattr(library, f"emu_mark_{name}")
            mark.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        library.emu_start_counting.restype = None
        library.emu_stop_counting.restype = None
        library.emu_counters.restype = ctypes.c_char_p
        library.emu_set_seed.argtypes = [ctypes.c_uint64]
        library.emu_set_seed.restype = None
        library.emu_set_schedule.argtypes = [ctypes.c_char_p]
        library.emu_set_max_shared_memory.argtypes = [ctypes.c_size_t]
        library.emu_seed.restype = ctypes.c_uint64
        library.emu_schedule.restype = ctypes.c_char_p

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self.last_error())

    def last_error(self) -> str:
        message: bytes = self.library.emu_last_error()
        return message.decode()

    def configure(
        self,
        *,
        seed: int | None = None,
        schedule: str | None = None,
        sms: int | None = None,
        compute_capability: tuple[int, int] | None = None,
        code_arch: int | None = None,
        max_shared_memory: int | None = None,
    ) -> None:
        """Sets what is given for the launches that follow; the rest stays.

        `code_arch` is what the kernels are said to be compiled for: 75, 80, ...
        """
        if seed is not None:
            self.library.emu_set_seed(seed)
        if schedule is not None:
            self._check(self.library.emu_set_schedule(schedule.encode()))
        if sms is not None:
            self._check(self.library.emu_set_multiprocessors(sms))
        if compute_capability is not None:
            self._check(self.library.emu_set_compute_capability(*compute_capability))
        if code_arch is not None:
            self._check(self.library.emu_set_code_arch(code_arch))
        if max_shared_memory is not None:
            self._check(self.library.emu_set_max_shared_memory(max_shared_memory))

    @property
    def seed(self) -> int:
        return int(self.library.emu_seed())

    @property
    def schedule(self) -> str:
        name: bytes = self.library.emu_schedule()
        return name.decode()

    def allocate(self, size: int, name: str) -> int:
        """Address of `size` bytes between guard pages, filled with 0xff."""
        address: int | None = self.library.emu_allocate(size, name.encode())
        if address is None:
            raise RuntimeError(self.last_error())
        return address

    def free(self, address: int) -> None:
        """Raises RuntimeError if something was written around the buffer."""
        self._check(self.library.emu_free(address))

    def set_read_only(self, address: int, read_only: bool) -> None:
        self._check(self.library.emu_set_read_only(address, int(read_only)))

    def check_canaries(self) -> None:
        """Raises RuntimeError if something was written around any buffer."""
        self._check(self.library.emu_check_canaries())

    def describe(self, address: int) -> str:
        """Which buffer an address belongs to, and where in it."""
        text: bytes = self.library.emu_describe(address)
        return text.decode()

    @property
    def hooked(self) -> bool:
        """Whether the kernels report their accesses; else what needs it does nothing."""
        return bool(self.library.emu_hooked())

    def mark_undefined(self, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Makes launches fail that read elements of a placed tensor, until one writes them.

        `mask`, of a shape that broadcasts to the tensor's, says which; without it all.
        """
        self._mark(self.library.emu_mark_undefined, tensor, mask)

    def mark_uninitialised(self, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Like mark_undefined; the message says that nothing was ever written there."""
        self._mark(self.library.emu_mark_uninitialised, tensor, mask)

    def _mark(self, mark: Any, tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
        if not self.hooked or tensor.numel() == 0:
            return
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        marked = torch.zeros(extent, dtype=torch.bool)
        chosen = marked.as_strided(tensor.shape, tensor.stride())
        chosen.masked_fill_(torch.ones((), dtype=torch.bool) if mask is None else mask, True)
        self._check(mark(tensor.data_ptr(), marked.data_ptr(), extent, tensor.element_size()))

    @contextlib.contextmanager
    def captured_tensors(self) -> Iterator[None]:
        """CPU tensors that torch makes inside are in guarded memory, uninitialised.

        Whatever torch or anybody but a kernel writes to such a tensor initialises it as a whole.
        Only of a library of the product.
        """
        self.library.emu_capture_tensors(1)
        try:
            yield
        finally:
            self.library.emu_capture_tensors(0)

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counters]:
        """Counts launches inside; the counts are there at once, and stay."""

        def read() -> str:
            text: bytes = self.library.emu_counters()
            return text.decode()

        counters = Counters(read)
        self.library.emu_start_counting()
        try:
            yield counters
        finally:
            self.library.emu_stop_counting()
            counters.freeze()

    def place(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        *,
        read_only: bool = False,
        undefined: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A copy of `tensor` in guarded memory.

        Shape, dtype and strides are the same. The storage extends from the tensor's storage offset
        to its last reachable element, and not a byte further; elements that strides skip are copied
        too. With `read_only` every write faults: a launch reports it, elsewhere it ends the
        process. `undefined` is a mask for mark_undefined. The memory is freed with the last tensor
        that shares the storage.
        """
        strides = tensor.stride()
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)
        )
        source = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
        size = extent * tensor.element_size()
        address = self.allocate(size, name or f"{tensor.dtype}{list(tensor.shape)}")
        buffer: Any = (ctypes.c_ubyte * size).from_address(address)
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        raw.copy_(source.view(torch.uint8))
        finalizer = weakref.finalize(buffer, self.free, address)
        # Other tensors may outlive the buffer at exit.
        finalizer.atexit = False
        if read_only:
            self.set_read_only(address, True)
        placed = raw.view(tensor.dtype).as_strided(tensor.shape, strides)
        if undefined is not None:
            self.mark_undefined(placed, undefined)
        return placed


_products: dict[bool, Runtime] = {}


def product(*, hooks: bool = False) -> Runtime:
    """The product's kernels on the emulator, built if needed, registered with torch.

    With `hooks`, the ones that report each access: see docs/emulator.md.
    """
    if hooks not in _products:
        with build_lock():
            path = compile_target(product_target(hooks))
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
            _products[hooks] = Runtime(path)
    return _products[hooks]


def use_product(library: Runtime) -> None:
    """Makes another library that was loaded the product with hooks."""
    _products[True] = library


@functools.cache
def selftest(*, hooks: bool = False) -> Runtime:
    """The emulator with its own small kernels, built if needed."""
    with build_lock():
        return Runtime(compile_target(selftest_target(hooks)))


def load(*, hooks: bool = False) -> Any:
    """The namespace torch.ops.paged_attn_emulator, or torch.ops.paged_attn_emulator_hooks."""
    product(hooks=hooks)
    return getattr(torch.ops, NAMESPACE + ("_hooks" if hooks else ""))


def place(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    read_only: bool = False,
    undefined: torch.Tensor | None = None,
    hooks: bool = False,
) -> torch.Tensor:
    """See Runtime.place: a copy that the product's kernels find in guarded memory."""
    runtime = product(hooks=hooks)
    return runtime.place(tensor, name, read_only=read_only, undefined=undefined)


def mark_undefined(tensor: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """See Runtime.mark_undefined: of a tensor placed with hooks."""
    product(hooks=True).mark_undefined(tensor, mask)


def configure(
    *,
    seed: int | None = None,
    schedule: str | None = None,
    sms: int | None = None,
    hooks: bool = False,
) -> None:
    """See Runtime.configure, of the product's emulator."""
    product(hooks=hooks).configure(seed=seed, schedule=schedule, sms=sms)
