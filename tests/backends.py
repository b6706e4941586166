"""Where a test runs: the CPU library, the CUDA kernels in the emulator, or a GPU.

The emulator has two builds: "hooks" sees every access of a kernel, "emulator" is faster.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import emulator
import torch
from torch import Tensor

import paged_attn
from paged_attn import _ops

BACKENDS = ("cpu", "emulator", "hooks", "cuda")
EMULATED = ("emulator", "hooks")
# What runs unless --backend chooses: whatever the fast build sees, the hook build sees too.
DEFAULT = ("cpu", "hooks", "cuda")


@dataclass(frozen=True)
class Backend:
    """One library: its ops, its memory, and its value checks."""

    name: str
    namespace: Any  # of torch.ops
    place_storage: Callable[[Tensor], Tensor]  # a copy of a contiguous tensor in its memory
    set_checks: Callable[[bool], None]

    def place_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of whole storages; views that shared one still do, with the same strides."""
        storages: dict[int, Tensor] = {}
        placed = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                placed.append(self.place_storage(tensor))
                continue
            if storage.data_ptr() not in storages:
                whole = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
                storages[storage.data_ptr()] = self.place_storage(whole)
            copy = storages[storage.data_ptr()]
            placed.append(copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        return placed

    def place_pair(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, each copied with what lies around it."""
        first, second = self.place_all(tensors)
        return first, second

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of one tensor and of what lies around it."""
        return self.place_all([tensor])[0]

    @contextmanager
    def checks(self) -> Iterator[None]:
        """Lengths, table entries and slots are checked inside, as the CPU always does."""
        self.set_checks(True)
        try:
            yield
        finally:
            self.set_checks(False)


def available(name: str) -> bool:
    """Whether this machine has the backend."""
    return name != "cuda" or (torch.cuda.is_available() and bool(paged_attn.build_info()["cuda"]))


def get_backend(name: str) -> Backend:
    """The backend; builds the emulator where it is not up to date."""
    if name == "cpu":
        return Backend(name, torch.ops.paged_attn, torch.clone, lambda _on: None)
    if name == "cuda":
        return Backend(name, torch.ops.paged_attn, lambda t: t.cuda(), _ops.set_debug)
    hooks = name == "hooks"
    library: ctypes.CDLL = emulator.product(hooks=hooks).library

    def set_checks(on: bool) -> None:
        library.paged_attn_set_debug(int(on))

    place = functools.partial(emulator.place, hooks=hooks)
    return Backend(name, emulator.load(hooks=hooks), place, set_checks)
