"""Checks and measures paged_attn on this machine: `python bench/gpu_report.py --minutes 5`.

It needs torch and an installed paged_attn, nothing else; other implementations are measured where
they are installed, plots drawn where matplotlib is. The report is written anew after every section.
`--device cpu` runs the same code, small, on the CPU backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import correctness
import report
import torch
from bytes import DecodeShape, traffic
from grid import CPU_GRID, GPU_GRID, Grid
from peers import ADAPTERS, Adapter, UnavailableError
from report import Bandwidth, DecodeRow, Overhead, PeerRow, Results, Skipped
from timing import Call, time_device, time_host
from torch import Tensor
from tqdm import tqdm
from workload import Arena, Step, arena_bytes, make_plan, make_steps, num_pools

import paged_attn

CPU_L2_BYTES = 1 << 17
# The part of the time after which decode is over. Peers come last: some compile for minutes.
DECODE_UNTIL = 0.7
ROW_SECONDS = {"cuda": 0.1, "cpu": 0.002}


@dataclass
class Run:
    """What every section works with."""

    device: torch.device
    grid: Grid
    arena: Arena
    l2_bytes: int
    results: Results
    start: float
    seconds: float

    @property
    def row_seconds(self) -> float:
        """How long one measurement takes."""
        return ROW_SECONDS[self.device.type]

    def spent(self) -> float:
        """The part of the time that is gone."""
        return (time.monotonic() - self.start) / self.seconds


def describe(device: torch.device) -> dict[str, Any]:
    """Names the machine and what was built."""
    machine: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine = {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "SMs": properties.multi_processor_count,
            "memory GiB": round(properties.total_memory / (1 << 30), 1),
            "L2 MiB": round(properties.L2_cache_size / (1 << 20), 1),
            "driver": _driver(),
            "CUDA of torch": torch.version.cuda,
        }
    return machine | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{f"paged_attn {name}": value for name, value in paged_attn.build_info().items()},
    }


def _driver() -> str:
    """The driver's version and the clocks now, as nvidia-smi tells them."""
    if shutil.which("nvidia-smi") is None:
        return "unknown: no nvidia-smi"
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


def check(run: Run) -> None:
    """Compares calls, and graph replays with other lengths, with the reference."""
    longest = run.grid.longest_check
    for case in tqdm(correctness.cases(), desc="correctness"):
        run.results.checks.append(correctness.check_call(case.within(longest), run.device))
    for case in tqdm(correctness.replay_cases(), desc="graph replay"):
        run.results.checks.extend(correctness.check_replays(case.within(longest), run.device))


def measure_bandwidth(run: Run) -> None:
    """Measures what copies and reductions reach over buffers that rotate."""
    numel = min(run.grid.copy_bytes, run.arena.num_bytes // 4) // 4
    count = max(4, 3 * run.l2_bytes // (4 * numel) + 1)
    buffers = run.arena.numbers(torch.float32, count * numel).view(count, numel).unbind()
    reduced = torch.empty((), device=run.device)
    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "torch.sum float32": lambda x: torch.sum(x, 0, out=reduced),
        "torch.amax float32": lambda x: torch.amax(x, 0, out=reduced),
        "torch.sum bfloat16": lambda x: torch.sum(x.view(torch.bfloat16), 0),
    }

    def gb_per_s(calls: Sequence[Call], num_bytes: int) -> float:
        return num_bytes / time_device(calls, run.device, run.row_seconds).median_us / 1e3

    copies = [
        functools.partial(target.copy_, source)
        for target, source in zip(buffers[::2], buffers[1::2], strict=False)
    ]
    run.results.copies.append(Bandwidth("torch copy_", gb_per_s(copies, 8 * numel)))
    for name, reduce in tqdm(reductions.items(), desc="bandwidth"):
        reads = [functools.partial(reduce, buffer) for buffer in buffers]
        run.results.reads.append(Bandwidth(name, gb_per_s(reads, 4 * numel)))


def _misfit(run: Run, shape: DecodeShape, until: float) -> str | None:
    """Says why a shape cannot be measured, if so."""
    if arena_bytes(shape, run.l2_bytes) > run.arena.num_bytes:
        return "its pools do not fit in memory"
    return "no time was left" if run.spent() > until else None


def measure_decode(run: Run, shapes: Sequence[DecodeShape]) -> None:
    """Measures shapes in this order until their time is over."""
    for shape in tqdm(shapes, desc="decode"):
        reason = _misfit(run, shape, DECODE_UNTIL)
        if reason is None:
            try:
                run.results.decode.append(_measure_shape(run, shape))
            except torch.OutOfMemoryError:
                reason = "no memory beside its pools"
        if reason is not None:
            run.results.skipped.append(Skipped(shape, reason))


def _measure_shape(run: Run, shape: DecodeShape) -> DecodeRow:
    steps = make_steps(shape, run.arena, run.l2_bytes)
    plan = make_plan(shape, steps[0].seq_lens)
    calls = [functools.partial(step.attend, plan) for step in steps]
    timing = time_device(calls, run.device, run.row_seconds)
    gb_per_s = traffic(shape).needed / timing.median_us / 1e3
    return DecodeRow(
        shape=shape,
        num_pools=num_pools(shape, run.l2_bytes),
        timing=timing,
        gb_per_s=gb_per_s,
        share=gb_per_s / run.results.read_gb_per_s,
        goal=run.grid.goals.get(shape),
    )


def measure_peers(run: Run) -> None:
    """Measures what is installed on a few shapes, and compares its results with ours."""
    for shape in tqdm(run.grid.peers, desc="peers"):
        reason = _misfit(run, shape, until=1)
        steps = [] if reason else make_steps(shape, run.arena, run.l2_bytes)
        for name, adapter in ADAPTERS.items():
            reason = reason or _misfit(run, shape, until=1)
            if reason is None:
                row = _measure_peer(run, shape, steps, name, adapter)
            else:
                row = PeerRow(shape, name, None, None, None, reason)
            run.results.peers.append(row)


def _measure_peer(
    run: Run, shape: DecodeShape, steps: Sequence[Step], name: str, adapter: Adapter
) -> PeerRow:
    try:
        peer = adapter(shape, steps)
        got = peer.calls[0]().clone()
        tables = peer.block_tables
        if tables is None:
            blocks = torch.arange(shape.pool_shape[0], dtype=torch.int32, device=run.device)
            tables = blocks.view(shape.batch, shape.blocks_per_seq)
        want = steps[0].attend(None, tables)
        difference = float((got.float() - want.float()).abs().max())
        timing = time_device(peer.calls, run.device, run.row_seconds)
    except UnavailableError as error:
        return PeerRow(shape, name, None, None, None, str(error))
    except Exception as error:  # other people's code must not end the report
        return PeerRow(shape, name, None, None, None, f"{type(error).__name__}: {error}")
    gb_per_s = traffic(shape).needed / timing.median_us / 1e3
    return PeerRow(shape, name, timing, gb_per_s / run.results.read_gb_per_s, difference)


def measure_overheads(run: Run) -> None:
    """Measures the plan kernel, and what each call costs the host."""
    shape = run.grid.peers[0]
    results = run.results.overheads
    for batch in run.grid.plan_batches:
        seq_lens = torch.full((batch,), shape.length, dtype=torch.int32, device=run.device)
        timing = time_device([functools.partial(make_plan, shape, seq_lens)], run.device)
        results.append(Overhead(f"plan_decode, batch {batch}", "device", timing))
    step = make_steps(shape, run.arena, run.l2_bytes)[0]
    plan = make_plan(shape, step.seq_lens)
    chunked = make_plan(shape, step.seq_lens, chunk_size=1024)
    tokens = torch.randn(shape.batch, *shape.pool_shape[2:], device=run.device).to(shape.dtype)
    slots = torch.arange(shape.batch, device=run.device)
    write = functools.partial(
        paged_attn.reshape_and_cache, tokens, tokens, step.key_cache, step.value_cache, slots
    )
    # Two tokens a sequence: the host's time must not wait for a queue of long kernels.
    short = dataclasses.replace(step, seq_lens=torch.full_like(step.seq_lens, 2))
    short_plan = make_plan(shape, short.seq_lens)
    host: dict[str, Call] = {
        "plan_decode": functools.partial(make_plan, shape, step.seq_lens),
        "paged_attention with a plan": functools.partial(short.attend, short_plan),
        "paged_attention without": functools.partial(short.attend, None),
        "reshape_and_cache": write,
    }
    for what, call in host.items():
        timing = time_host(call, run.device)
        results.append(Overhead(f"{what}, batch {shape.batch}", "host", timing))
    hot: dict[str, Call] = {
        f"paged_attention with a plan, {shape.name}": functools.partial(step.attend, plan),
        f"paged_attention without, {shape.name}": functools.partial(step.attend, None),
        f"paged_attention, chunk_size 1024, {shape.name}": functools.partial(step.attend, chunked),
        f"reshape_and_cache, {shape.batch} tokens": write,
    }
    for what, call in hot.items():
        timing = time_device([call], run.device, run.row_seconds)
        results.append(Overhead(f"{what}, one pool over and over", "device", timing))


def measure(run: Run, folder: Path) -> None:
    """Runs all sections; what fails is reported, and the rest still runs."""
    shapes, num_goals = run.grid.shapes(), max(1, len(run.grid.goals))
    sections: dict[str, Callable[[], None]] = {
        "correctness": lambda: check(run),
        "bandwidth": lambda: measure_bandwidth(run),
        "decode, goals": lambda: measure_decode(run, shapes[:num_goals]),
        "overheads": lambda: measure_overheads(run),
        "decode": lambda: measure_decode(run, shapes[num_goals:]),
        "peers": lambda: measure_peers(run),
    }
    for name, section in sections.items():
        try:
            section()
        except Exception as error:  # an hour on a GPU is dear: keep what was measured
            run.results.problems.append(f"{name}: {type(error).__name__}: {error}")
        report.write(run.results, folder)
    report.plot(run.results, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the report; returns 1 where something was wrong, or a section failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5, help="about how long to measure")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder to write to")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        problem = paged_attn.build_info()["cuda_problem"]
        if problem is None and not torch.cuda.is_available():
            problem = "torch finds no GPU"
        if problem is not None:
            parser.error(f"cannot measure on CUDA: {problem}")
    torch.manual_seed(0)
    start = time.monotonic()
    cuda = options.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    run = Run(
        device=device,
        grid=GPU_GRID if cuda else CPU_GRID,
        arena=Arena.for_device(device),
        l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size if cuda else CPU_L2_BYTES,
        results=Results(machine=describe(device)),
        start=start,
        seconds=60 * options.minutes,
    )
    measure(run, options.out)
    print(report.markdown(run.results))
    return 0 if run.results.passed else 1


if __name__ == "__main__":
    sys.exit(main())
