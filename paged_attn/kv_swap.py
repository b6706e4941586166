"""Swapping sequences between a device's pools and the host's, beside the work that goes on."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from paged_attn.blocks import BlockManager, Transfer
from paged_attn.kv_pools import KVPools, Pairs
from paged_attn.staging import CudaEvent, Event

__all__ = ["Swapper"]

# torch's annotations fall short of strict checking.
_cuda: Any = torch.cuda


class Swapper:
    """Carries out the manager's transfers.

    In order (the default), copies run on the current stream. What reuses a block comes later on
    that stream, so nothing has to be held once they are issued.

    Overlapped, they run on a stream of their own. Then the blocks that are read belong to the
    transfer until the event behind its copies has happened; `poll()` looks, and gives them back.
    Until then they are missing from the pool: swap out a step before the blocks are needed.

    * make_event: makes events; tests give their own. Default: CUDA events where the device is one,
      none on a CPU, where copies are done when they return.
    """

    def __init__(
        self,
        manager: BlockManager,
        pools: KVPools,
        device: torch.device,
        *,
        overlap: bool = False,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        self._manager = manager
        self._pools = pools
        self._device = device
        self._make_event = make_event
        if overlap and device.type == "cuda" and make_event is None:
            self._make_event = functools.partial(CudaEvent, device)
        self._stream: Any = _cuda.Stream(device) if overlap and device.type == "cuda" else None
        self._pending: deque[tuple[Event, int]] = deque()  # (end of the copies, transfer)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have a stream of their own."""
        if self.poll():
            raise RuntimeError(
                "PagedKVCache: cannot be copied or pickled while swaps are under way: call "
                "poll_swaps() until it returns 0"
            )
        return self.__dict__ | {"_stream": self._stream is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stream = _cuda.Stream(self._device) if state["_stream"] else None

    @property
    def num_pending(self) -> int:
        """Transfers whose source blocks are held."""
        return len(self._pending)

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        """Moves sequences to the host; raises OutOfBlocksError if it has no room."""
        self.poll()
        self._carry_out(self._manager.swap_out(seq_ids, hold=True), self._pools.copy_out)

    def swap_in(self, seq_ids: Sequence[int]) -> None:
        """Moves sequences back; later work on the current stream finds them there."""
        self.poll()
        self._carry_out(self._manager.swap_in(seq_ids, hold=True), self._pools.copy_in)
        if self._stream is not None:
            # The device waits, the host does not.
            _cuda.current_stream(self._device).wait_stream(self._stream)

    def poll(self) -> int:
        """Gives back the blocks of transfers that are done; returns how many are not. Never waits.

        Transfers run in order, so that the first one under way ends the search.
        """
        while self._pending and self._pending[0][0].query():
            self._manager.finish_transfer(self._pending.popleft()[1])
        return len(self._pending)

    def _copying(self) -> AbstractContextManager[Any]:
        """The stream for copies, behind all that was issued so far.

        Copies out read what earlier kernels wrote; copies in write over what they still read.
        """
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(_cuda.current_stream(self._device))
        stream: AbstractContextManager[Any] = _cuda.stream(self._stream)
        return stream

    def _carry_out(self, transfer: Transfer, copy: Callable[[Pairs], None]) -> None:
        """Copies; if that fails, the transfer has not taken place."""
        event: Event | None = None
        try:
            with self._copying():
                copy(transfer.pairs)
                if self._make_event is not None:
                    event = self._make_event()
                    event.record()
        except BaseException:
            self._manager.cancel_transfer(transfer.transfer_id)
            raise
        if event is None:
            self._manager.finish_transfer(transfer.transfer_id)
        else:
            self._pending.append((event, transfer.transfer_id))
