"""Uploads that the host does not wait for: a ring of pinned buffers, guarded by events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["CudaEvent", "Event", "Field", "StagingRing"]

_ALIGNMENT = 16  # bytes: every field can be read with the widest loads

# What is packed: numbers of one dtype.
Field = tuple[torch.dtype, "list[int]"]

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> None:
        """Marks the present end of the device's current stream."""

    def query(self) -> bool:
        """Whether the stream has got that far; does not wait."""


class CudaEvent:
    """An event of one device, whichever device is the current one."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # torch's annotations fall short of strict checking
        self._device = device
        self._event = cuda.Event()

    def record(self) -> None:
        """See Event."""
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """See Event."""
        return bool(self._event.query())


class _Buffer:
    """Host memory, and the event after the last copy from it."""

    def __init__(self, num_bytes: int, pinned: bool, event: Event | None) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.bytes: NDArray[np.uint8] = self.tensor.numpy()
        self.event = event
        self.in_flight = False


class StagingRing:
    """Copies small numbers from the host to a device, all of one step in one copy.

    An asynchronous copy reads its host buffer when the stream gets to it, which may be steps later.
    A buffer that were filled again before would hand the later numbers to the earlier step. So each
    has an event, recorded behind its copy, and is used again only when that has happened. If the
    oldest is still in flight a new one is made instead of waiting, so there are as many buffers as
    there are steps under way. On a CPU copies are done when they return, and one buffer is enough.
    """

    def __init__(
        self,
        device: torch.device,
        make_event: Callable[[], Event] | None = None,
        copy: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        self.device = device
        self._make_event = make_event
        # Replaced in tests by one that copies late, as a busy stream does.
        self._copy = copy or _copy_async
        self._ring: deque[_Buffer] = deque()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which begin with no buffer: what one holds is on its way."""
        return self.__dict__ | {"_ring": deque()}

    @property
    def num_buffers(self) -> int:
        """Buffers made so far."""
        return len(self._ring)

    def upload(self, fields: list[Field]) -> list[Tensor]:
        """New tensors on the device with these numbers, each [len(numbers)]; does not wait.

        They are ready for work on the current stream. The lists may be changed at once.
        """
        offsets, total = [], 0
        for dtype, numbers in fields:
            offsets.append(total)
            total += -(-len(numbers) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        buffer = self._acquire(total)
        for (dtype, numbers), offset in zip(fields, offsets, strict=True):
            end = offset + len(numbers) * dtype.itemsize
            buffer.bytes[offset:end].view(_NUMPY[dtype])[:] = numbers
        uploaded = torch.empty(total, dtype=torch.uint8, device=self.device)
        self._copy(uploaded, buffer.tensor[:total])
        if buffer.event is not None:
            buffer.event.record()
            buffer.in_flight = True
        return [
            uploaded[offset : offset + len(numbers) * dtype.itemsize].view(dtype)
            for (dtype, numbers), offset in zip(fields, offsets, strict=True)
        ]

    def _acquire(self, num_bytes: int) -> _Buffer:
        """A buffer that no copy reads from; the most recently used is last in the ring."""
        if self._ring:
            oldest = self._ring[0]
            done = not oldest.in_flight or oldest.event is None or oldest.event.query()
            if done:
                self._ring.popleft()
                if len(oldest.bytes) >= num_bytes:
                    self._ring.append(oldest)
                    return oldest
        event = None if self._make_event is None else self._make_event()
        buffer = _Buffer(max(4096, 2 * num_bytes), self.device.type == "cuda", event)
        self._ring.append(buffer)
        return buffer


def _copy_async(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
