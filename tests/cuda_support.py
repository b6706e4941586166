"""CUDA graphs and busy streams for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from cases import poison
from torch import Tensor

cuda: Any = torch.cuda  # torch's own annotations of streams and graphs are not strict

BUSY_CYCLES = 500_000_000  # about a quarter of a second


@contextmanager
def behind_a_producer(stream: Any, may_wait: bool = False) -> Iterator[None]:
    """What is called inside is queued on a busy stream, and has run at the end.

    Unless they may wait, the calls must have returned while the stream was still busy. What they
    allocate must then have been allocated on the stream before: a new allocation may wait.
    """
    cuda.synchronize()
    produced = cuda.Event()
    with cuda.stream(stream):
        cuda._sleep(BUSY_CYCLES)
        produced.record()
        yield
        waited = produced.query()
    stream.synchronize()
    assert may_wait or not waited, "a call waited for the device"


@dataclass(frozen=True)
class Captured:
    """A CUDA graph and the tensors that its replay writes."""

    graph: Any
    results: Sequence[Tensor]

    def run(self) -> Sequence[Tensor]:
        """Replays; what the replay does not write is NaN."""
        for result in self.results:
            poison(result)
        self.graph.replay()
        cuda.synchronize()
        return self.results


def capture(call: Callable[[], Sequence[Tensor]]) -> Captured:
    """Captures a call that has run once."""
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        call()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        results = call()
    return Captured(graph, results)
