"""python bench/capacity.py: how many requests fit, with contiguous sequences and with paged ones.

Replays the claims of Kwon et al. 2023 (arXiv 2309.06180) with the real allocator and a simulated
server: OPT-13B, 800 KiB a token, 12 GiB for keys and values. No GPU is needed. Writes capacity.md,
capacity.json and, where there is matplotlib, plots.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from capacity_report import LATENCY_LIMIT, PressureRow, Rate, Report, SystemRow, plot, write
from kv_memory import ContiguousMemory, Memory, PagedMemory, Preemption, Reservation
from serving import Machine, Outcome, simulate
from sharing import Sharing, beam, parallel
from tqdm import tqdm
from traces import SHAREGPT, TRACES, Trace

BLOCK_SIZES = (1, 8, 16, 32, 128)
RESERVATIONS: tuple[Reservation, ...] = ("max", "pow2", "oracle")
WIDTHS = (2, 4, 6)
SHARED_BLOCK_SIZE = 16
_BISECTIONS = 7
_SHORT = 0.5  # of the memory, where the pool is to be short

MakeMemory = Callable[[], Memory]


def systems(machine: Machine) -> Iterator[tuple[str, MakeMemory]]:
    """Every way to give out memory, by name."""
    slots = machine.total_slots
    for kind in RESERVATIONS:
        yield f"contiguous, {kind}", functools.partial(ContiguousMemory, slots, kind)
    for size in BLOCK_SIZES:
        yield f"paged, {size}", functools.partial(PagedMemory, slots, size)


def sustained(trace: Trace, count: int, make: MakeMemory, machine: Machine) -> list[Rate]:
    """Arrival rates tried, by bisection; the largest within LATENCY_LIMIT is what it sustains."""
    backlog = simulate(trace.requests(count), make(), machine)
    low, high = 0.0, 2 * count / backlog.seconds
    tried = []
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        latency = simulate(trace.requests(count, rate), make(), machine).seconds_per_token
        tried.append(Rate(rate, latency))
        low, high = (rate, high) if latency <= LATENCY_LIMIT else (low, rate)
    return sorted(tried, key=lambda point: point.requests_per_second)


def under_pressure(trace: Trace, count: int, machine: Machine) -> Iterator[PressureRow]:
    """Swap and recompute where the pool is short."""
    slots = int(machine.total_slots * _SHORT)
    ways: tuple[Preemption, ...] = ("recompute", "swap")
    for size in BLOCK_SIZES:
        for way in ways:
            memory = PagedMemory(slots, size, way)
            outcome: Outcome = simulate(trace.requests(count), memory, machine)
            swap = machine.swap_seconds(outcome.blocks_swapped, size)
            lost = swap if way == "swap" else machine.token_seconds(outcome.tokens_recomputed)
            yield PressureRow(
                trace=trace.name,
                block_size=size,
                way=way,
                preemptions=outcome.preemptions,
                tokens_recomputed=outcome.tokens_recomputed,
                bytes_swapped=outcome.blocks_swapped * size * machine.bytes_per_token,
                seconds_lost=lost,
                seconds=outcome.seconds + (swap if way == "swap" else 0.0),
            )


def measure(num_requests: int, machine: Machine, traces: Sequence[Trace]) -> Report:
    """Runs everything; `num_requests` a simulation, more where they are shorter."""
    report = Report(machine=machine, requests=num_requests)
    names = list(systems(machine))
    total = len(traces) * (len(names) + 2 * len(WIDTHS) + 1)
    with tqdm(total=total, disable=None, leave=False) as bar:
        for trace in traces:
            # As many tokens for each trace, so that the start and the end weigh the same.
            count = num_requests * round(SHAREGPT.output_mean / trace.output_mean)
            requests = trace.requests(count)
            for name, make in names:
                bar.set_description(f"{trace.name}, {name}")
                outcome = simulate(requests, make(), machine)
                rates = sustained(trace, count, make, machine)
                report.systems.append(SystemRow(trace.name, name, outcome, rates))
                bar.update()
            for share in (parallel, beam):
                for width in WIDTHS:
                    row: Sharing = share(trace, width, max(1, count // 10), SHARED_BLOCK_SIZE)
                    report.sharing.append((trace.name, row))
                    bar.update()
            report.pressure += under_pressure(trace, count, machine)
            bar.update()
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Capacity of contiguous and paged KV caches.")
    parser.add_argument(
        "--requests",
        type=int,
        default=1000,
        help="requests a simulation, of ShareGPT; more of shorter ones",
    )
    parser.add_argument("--out", type=Path, default=Path("capacity"), help="folder for results")
    args = parser.parse_args(argv)
    if args.requests < 1:
        parser.error("--requests must be at least 1")
    report = measure(args.requests, Machine(), TRACES)
    print(write(report, args.out))
    for path in plot(report, args.out):
        print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
