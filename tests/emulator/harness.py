"""Launches of the emulator's own kernels, for its tests."""

import ctypes
from pathlib import Path

import torch

import emulator

KERNELS = Path(__file__).parent / "kernels"


class Selftest:
    """Launches of the kernels in kernels/."""

    def __init__(self, *, hooks: bool = False) -> None:
        self.runtime = emulator.selftest(hooks=hooks)
        self._run = self.runtime.library.selftest_run
        self._run.restype = ctypes.c_char_p
        self._run.argtypes = [
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_size_t,
        ]

    def error(
        self,
        kernel: str,
        data: torch.Tensor | None = None,
        *,
        option: int = 0,
        ctas: int = 1,
        threads: int = 64,
        smem: int = 0,
    ) -> str | None:
        """Launches the kernel; the message of what went wrong, or None."""
        address, size = (None, 0) if data is None else (data.data_ptr(), data.nbytes)
        message: bytes | None = self._run(
            kernel.encode(), address, size, option, ctas, threads, smem
        )
        return None if message is None else message.decode()

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.runtime.place(torch.zeros(*shape, dtype=dtype), "data")


def line_of(marker: str, file: str = "faulty.cpp") -> str:
    """ "faulty.cpp:12", of the line that carries the marker."""
    for number, line in enumerate((KERNELS / file).read_text().splitlines(), 1):
        if line.endswith(f"// site: {marker}"):
            return f"{file}:{number}"
    raise AssertionError(f"no line is marked {marker}")


def assert_message(message: str | None, *parts: str) -> None:
    assert message is not None
    for part in parts:
        assert part in message, f"{part!r} is missing in: {message}"
