"""The one timer: CUDA graphs and events on a GPU, the host's clock on a CPU; medians of both."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

# A replay is made at least this long, so that what lies between two replays does not count.
_GRAPH_US = 1000.0
_MAX_LAUNCHES = 1200
_MIN_SAMPLES, _MAX_SAMPLES = 5, 100
_HOST_CALLS = 100  # of one sample: less than a stream holds before the host must wait
# Where torch's annotations fall short of strict checking.
_cuda: Any = torch.cuda


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median_us: float
    min_us: float
    max_us: float
    samples: int


def _timing(samples_us: Sequence[float]) -> Timing:
    return Timing(
        median_us=statistics.median(samples_us),
        min_us=min(samples_us),
        max_us=max(samples_us),
        samples=len(samples_us),
    )


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(calls: Sequence[Call], device: torch.device) -> Call:
    """Returns what runs the calls in order: a CUDA graph's replay, on a CPU a loop.

    Each call has run once before it is captured, so that kernels are loaded by then.
    """
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    side = _cuda.Stream(device)
    side.wait_stream(_cuda.current_stream(device))
    with _cuda.stream(side):
        for call in dict.fromkeys(calls):
            call()
    _cuda.current_stream(device).wait_stream(side)
    graph = _cuda.CUDAGraph()
    with _cuda.graph(graph):
        for call in calls:
            call()
    replay: Call = graph.replay
    return replay


def time_device(calls: Sequence[Call], device: torch.device, seconds: float = 0.1) -> Timing:
    """Times one call of several that are run in turn, each on its own data.

    Args:
        calls: what to run, in this order, over and over. L2 holds nothing useful for a call if
            the data of all of them is several times as large; it is never flushed by writing,
            which would leave it full of dirty lines that the next kernel must wait for.
        device: where they run. On a GPU they are captured in one CUDA graph.
        seconds: about how long to measure.

    Returns:
        The median over replays, each divided by its number of calls.
    """
    replay = capture(calls, device)
    once_us = min(_replay_us(replay, device, 3))
    repeat = max(1, min(int(_GRAPH_US / once_us), _MAX_LAUNCHES // len(calls)))
    if repeat > 1:
        replay = capture([*calls] * repeat, device)
    count = max(_MIN_SAMPLES, min(int(seconds * 1e6 / (once_us * repeat)), _MAX_SAMPLES))
    per_call = len(calls) * repeat
    return _timing([us / per_call for us in _replay_us(replay, device, count)])


def _replay_us(replay: Call, device: torch.device, count: int) -> list[float]:
    """Microseconds of each of `count` replays, after one that is not counted.

    On a GPU all are queued before the first is read, so that the host is never waited for.
    """
    if device.type != "cuda":
        samples = []
        for _ in range(count + 1):
            start = time.perf_counter()
            replay()
            samples.append((time.perf_counter() - start) * 1e6)
        return samples[1:]
    events = [_cuda.Event(enable_timing=True) for _ in range(count + 2)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    synchronize(device)
    return [float(begin.elapsed_time(end)) * 1e3 for begin, end in itertools.pairwise(events[1:])]


def time_host(call: Call, device: torch.device, samples: int = 9) -> Timing:
    """Times what a call costs the host: the GPU is not waited for within a sample."""
    call()
    times = []
    for _ in range(samples):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        times.append((time.perf_counter() - start) * 1e6 / _HOST_CALLS)
    synchronize(device)
    return _timing(times)
