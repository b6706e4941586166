"""The emulator's C functions, and tensors in its guarded memory."""

import ctypes
import functools
import weakref
from pathlib import Path
from typing import Any

import torch

from .build import build_lock, compile_target, product_target, selftest_target

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
        max_shared_memory: int | None = None,
    ) -> None:
        """Sets what is given for the launches that follow; the rest stays."""
        if seed is not None:
            self.library.emu_set_seed(seed)
        if schedule is not None:
            self._check(self.library.emu_set_schedule(schedule.encode()))
        if sms is not None:
            self._check(self.library.emu_set_multiprocessors(sms))
        if compute_capability is not None:
            self._check(self.library.emu_set_compute_capability(*compute_capability))
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

    def place(
        self, tensor: torch.Tensor, name: str | None = None, *, read_only: bool = False
    ) -> torch.Tensor:
        """A copy of `tensor` in guarded memory.

        Shape, dtype and strides are the same. The storage extends from the tensor's storage offset
        to its last reachable element, and not a byte further; elements that strides skip are copied
        too. With `read_only` every write faults: a launch reports it, elsewhere it ends the
        process. The memory is freed with the last tensor that shares the storage.
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
        return raw.view(tensor.dtype).as_strided(tensor.shape, strides)


@functools.cache
def product() -> Runtime:
    """The product's kernels on the emulator, built if needed, registered with torch."""
    with build_lock():
        path = compile_target(product_target())
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        return Runtime(path)


@functools.cache
def selftest() -> Runtime:
    """The emulator with its own small kernels, built if needed."""
    with build_lock():
        return Runtime(compile_target(selftest_target()))


def load() -> Any:
    """The namespace torch.ops.paged_attn_emulator."""
    product()
    return torch.ops.paged_attn_emulator


def place(
    tensor: torch.Tensor, name: str | None = None, *, read_only: bool = False
) -> torch.Tensor:
    """See Runtime.place: a copy that the product's kernels find in guarded memory."""
    return product().place(tensor, name, read_only=read_only)


def configure(
    *, seed: int | None = None, schedule: str | None = None, sms: int | None = None
) -> None:
    """See Runtime.configure, of the product's emulator."""
    product().configure(seed=seed, schedule=schedule, sms=sms)
