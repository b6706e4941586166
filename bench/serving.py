"""A server, simulated: iteration by iteration, with the real allocator and a modelled GPU.

Scheduling is that of Yu et al. 2022 (Orca, OSDI) and Kwon et al. 2023: first come first served,
requests join and leave between iterations, each iteration makes one token for every request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kv_memory import Memory
from traces import Request


@dataclass(frozen=True)
class Machine:
    """OPT-13B in float16 on an A100 of 40 GB, as in table 1 of Kwon et al. 2023.

    An iteration takes the time to read the weights or to multiply with them, whichever is longer,
    and the time to read the keys and values. Only ratios of the results mean something.
    """

    bytes_per_token: int = 2 * 2 * 40 * 5120  # K and V, 2 bytes, 40 layers, hidden size 5,120
    kv_bytes: int = 12 << 30
    weight_bytes: float = 26e9
    bytes_per_second: float = 1.555e12  # of HBM
    flops: float = 0.5 * 312e12  # half of the peak
    host_bytes_per_second: float = 25e9  # PCIe 4.0 x16
    host_copy_seconds: float = 5e-6  # to start one copy
    num_pools: int = 80  # copies that a block is swapped with: K and V of each layer

    @property
    def total_slots(self) -> int:
        """Tokens whose keys and values fit."""
        return self.kv_bytes // self.bytes_per_token

    def iteration_seconds(self, new_tokens: int, cached_tokens: int) -> float:
        """Time of an iteration that computes `new_tokens` and reads `cached_tokens`."""
        weights = max(self.weight_bytes / self.bytes_per_second, self.token_seconds(new_tokens))
        return weights + cached_tokens * self.bytes_per_token / self.bytes_per_second

    def token_seconds(self, tokens: int) -> float:
        """Time to compute so many tokens: two operations for each of the weights."""
        return tokens * self.weight_bytes / self.flops

    def swap_seconds(self, blocks: int, block_size: int) -> float:
        """Time to move so many blocks."""
        per_block = block_size * self.bytes_per_token / self.host_bytes_per_second
        return blocks * (per_block + self.num_pools * self.host_copy_seconds)


@dataclass(frozen=True)
class Outcome:
    """What a simulation showed. Shares are of all slots, averaged over time while some wait."""

    finished: int
    seconds: float
    seconds_per_token: float  # mean over requests of (end - arrival) / output tokens
    requests_per_second: float  # done while some wait
    running: float  # requests at a time, while some wait
    tokens: float  # share that holds a token
    reserved: float
    internal: float
    external: float
    preemptions: int
    tokens_recomputed: int
    blocks_swapped: int


@dataclass
class _Running:
    number: int
    request: Request
    made: int = 0  # output tokens


class _Averages:
    """Time averages while requests wait: a server with nothing to do wastes nothing."""

    def __init__(self) -> None:
        self.seconds = self.running = self.tokens = self.reserved = self.internal = 0.0
        self.finished = 0

    def add(self, seconds: float, running: int, memory: Memory) -> None:
        usage = memory.usage()
        self.seconds += seconds
        self.running += seconds * running
        self.tokens += seconds * usage.tokens / memory.total
        self.reserved += seconds * usage.reserved / memory.total
        self.internal += seconds * usage.internal / memory.total

    def mean(self, total: float) -> float:
        return total / self.seconds if self.seconds else 0.0


def simulate(requests: list[Request], memory: Memory, machine: Machine) -> Outcome:
    """Serves all requests; they are sorted by arrival."""
    waiting = deque(enumerate(requests))
    preempted: deque[_Running] = deque()
    running: list[_Running] = []
    averages = _Averages()
    now = latency = 0.0
    finished = 0
    while waiting or running or preempted:
        if not running and not preempted:
            now = max(now, waiting[0][1].arrival)
        new_tokens = _resume(preempted, running, memory)
        while not preempted and waiting and waiting[0][1].arrival <= now:
            number, request = waiting[0]
            if not memory.admit(number, request):
                if not running:
                    raise RuntimeError(f"request {number} does not fit into an empty cache")
                break
            waiting.popleft()
            running.append(_Running(number, request))
            new_tokens += request.prompt_len - 1
        # The token made in this iteration is written in the next, so a request grows from its
        # second iteration on.
        growing = [one.number for one in running if one.made]
        gone = set(memory.grow(growing))
        if gone:
            preempted.extendleft(one for one in reversed(running) if one.number in gone)
            running = [one for one in running if one.number not in gone]
            if not running:
                raise RuntimeError("a request that runs alone does not fit into the cache")
        usage = memory.usage()
        seconds = machine.iteration_seconds(new_tokens + len(running), usage.tokens)
        now += seconds
        busy = bool(preempted) or (bool(waiting) and waiting[0][1].arrival <= now)
        if busy:
            averages.add(seconds, len(running), memory)
        still: list[_Running] = []
        for one in running:
            one.made += 1
            if one.made < one.request.output_len:
                still.append(one)
                continue
            memory.release(one.number)
            latency += (now - one.request.arrival) / one.request.output_len
            finished += 1
            averages.finished += busy
        running = still
    tokens = averages.mean(averages.tokens)
    reserved, internal = averages.mean(averages.reserved), averages.mean(averages.internal)
    return Outcome(
        finished=finished,
        seconds=now,
        seconds_per_token=latency / max(finished, 1),
        requests_per_second=averages.mean(averages.finished),
        running=averages.mean(averages.running),
        tokens=tokens,
        reserved=reserved,
        internal=internal,
        external=1 - tokens - reserved - internal if averages.seconds else 0.0,
        preemptions=memory.pressure.preemptions,
        tokens_recomputed=memory.pressure.tokens_recomputed,
        blocks_swapped=memory.pressure.blocks_swapped,
    )


def _resume(preempted: deque[_Running], running: list[_Running], memory: Memory) -> int:
    """Brings back those that had to go, oldest first; returns the tokens to compute again."""
    again = 0
    while preempted:
        tokens = memory.resume(preempted[0].number)
        if tokens is None:
            if not running:
                raise RuntimeError("a preempted request does not fit into an empty cache")
            break
        again += tokens
        running.append(preempted.popleft())
    return again
