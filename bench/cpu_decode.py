"""The CPU backend against the memory's own speed: `python bench/cpu_decode.py --threads 1`.

Prints, for each dtype of the cache, the rate at which this machine reads memory in order (READ) and
the share of it at which keys and values are read by paged_attention and by its peers. All are
measured in turns, over and over; figures are medians. Rounds in which other processes took the
cores (less CPU time than wall time) are dropped. Needs a C++ compiler for READ.

A share below 0.8 of the one in bench/cpu_figures.json for the same processor is flagged, and the
exit status is 1; --save writes the figures there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_peers import ADAPTERS, Call, CpuStep
from peers import UnavailableError
from torch import Tensor

from paged_attn import build_info, paged_attention
from paged_attn._memory import zeros_in_huge_pages

FIGURES = Path(__file__).with_name("cpu_figures.json")
FLAG_BELOW = 0.8  # of the committed figure
BUSY = 0.93  # of the wall time of all threads, that a round must have had
FLUSH_BYTES = 128 << 20  # more than any last-level cache that the pools could stay in
PIECE_BYTES = 32 << 10
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


class Reader:
    """Reads memory as fast as it goes, on several threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        source = Path(__file__).with_name("cpu_read.cpp")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "read.so"
            flags = ["-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
            compiler = os.environ.get("CXX", "g++")
            subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
            self._read: Any = ctypes.CDLL(str(library)).read_pieces
        self._read.restype = ctypes.c_uint64

    def read(self, memory: Tensor, order: Tensor) -> None:
        """Reads the pieces of `memory`, each thread its part of `order`."""
        parts = [part for part in order.chunk(self.threads) if len(part)]
        threads = [
            threading.Thread(target=self._read_part, args=(memory, part)) for part in parts[1:]
        ]
        for thread in threads:
            thread.start()
        self._read_part(memory, parts[0])
        for thread in threads:
            thread.join()

    def _read_part(self, memory: Tensor, part: Tensor) -> None:
        self._read(
            ctypes.c_void_p(memory.data_ptr()),
            ctypes.c_int64(PIECE_BYTES),
            ctypes.c_void_p(part.data_ptr()),
            ctypes.c_int64(len(part)),
        )


@dataclass(frozen=True)
class Rate:
    """What one contender moved."""

    name: str
    gb_per_s: float
    microseconds: float
    dropped: int


def make_step(options: argparse.Namespace, dtype: torch.dtype) -> tuple[CpuStep, Tensor]:
    """The tensors of a step, and the memory of its pools, in huge pages."""
    blocks_per_seq = options.length // options.block_size
    num_blocks = options.batch * blocks_per_seq
    block = (options.block_size, options.num_kv_heads)
    if options.layout == "hnd":
        block = block[::-1]
    pools = zeros_in_huge_pages((2, num_blocks, *block, options.head_dim), dtype)
    eight_bit = dtype.itemsize == 1
    flat = pools.flatten()
    for begin in range(0, flat.numel(), 1 << 22):
        stretch = flat[begin : begin + (1 << 22)]
        numbers = torch.randn(stretch.shape)
        stretch.copy_((numbers * 40).round().clamp(-127, 127) if dtype == torch.int8 else numbers)
    views = pools.transpose(2, 3) if options.layout == "hnd" else pools
    query = torch.randn(options.batch, options.num_q_heads, options.head_dim)
    tables = torch.randperm(num_blocks).to(torch.int32).view(options.batch, blocks_per_seq)
    step = CpuStep(
        query=query.to(torch.bfloat16 if eight_bit else dtype),
        key_cache=views[0],
        value_cache=views[1],
        block_tables=tables,
        seq_lens=torch.full((options.batch,), options.length, dtype=torch.int32),
        scale=0.025 if eight_bit else None,
    )
    return step, flat.view(torch.uint8)


def ours(step: CpuStep) -> Call:
    """paged_attn itself."""
    out = torch.empty_like(step.query)

    def attend() -> Tensor:
        paged_attention(
            step.query,
            step.key_cache,
            step.value_cache,
            step.block_tables,
            step.seq_lens,
            k_scale=step.scale,
            v_scale=step.scale,
            out=out,
        )
        return out

    return attend


def measure(
    calls: dict[str, Callable[[], Any]], num_bytes: int, options: argparse.Namespace
) -> list[Rate]:
    """Runs all calls in turns, each on cold caches; medians of the undisturbed rounds."""
    flush = zeros_in_huge_pages((FLUSH_BYTES // 8,), torch.int64)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(options.rounds):
        for name, call in calls.items():
            flush += 1
            cpu, start = time.process_time(), time.perf_counter()
            call()
            wall = time.perf_counter() - start
            # Of several threads some wait for the last one, in READ and in ours alike.
            busy = BUSY if options.threads == 1 else BUSY * BUSY * options.threads
            if time.process_time() - cpu >= busy * wall:
                times[name].append(wall)
    rates = []
    for name, good in times.items():
        if not good:
            print(f"  {name}: every round was disturbed by other processes")
            continue
        median = statistics.median(good)
        dropped = options.rounds - len(good)
        rates.append(Rate(name, num_bytes / median / 1e9, median * 1e6, dropped))
    return rates


def run_dtype(name: str, options: argparse.Namespace, reader: Reader) -> dict[str, float]:
    """Measures and prints one dtype; returns the shares."""
    step, memory = make_step(options, DTYPES[name])
    num_bytes = memory.numel()
    in_order = torch.arange(num_bytes // PIECE_BYTES)
    shuffled = torch.randperm(len(in_order))
    calls: dict[str, Callable[[], Any]] = {
        "READ": lambda: reader.read(memory, in_order),
        "READ, random 32 KiB": lambda: reader.read(memory, shuffled),
        "paged_attn": ours(step),
    }
    want = calls["paged_attn"]()
    print(f"{name}, {num_bytes / 2**20:.1f} MiB of keys and values")
    for peer, adapter in {} if options.no_peers else ADAPTERS.items():
        try:
            call = adapter(step)
            difference = float((call().float() - want.float()).abs().max())
        except (UnavailableError, RuntimeError, TypeError) as error:
            print(f"  {peer}: not measured: {str(error).splitlines()[0][:90]}")
            continue
        if difference > 0.05:
            print(f"  {peer}: not measured: differs by {difference:.3g}")
            continue
        calls[peer] = call
    rates = measure(calls, num_bytes, options)
    read = next((rate.gb_per_s for rate in rates if rate.name == "READ"), None)
    if read is None:
        return {}
    for rate in rates:
        print(
            f"  {rate.name:31} {rate.gb_per_s:7.2f} GB/s {100 * rate.gb_per_s / read:6.1f} % of"
            f" READ {rate.microseconds:10.0f} us, {rate.dropped} rounds dropped"
        )
    return {rate.name: rate.gb_per_s / read for rate in rates}


def cpu_model() -> str:
    """The processor's name, as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown"


def check_figures(shares: dict[str, float], key: str, *, save: bool) -> bool:
    """Compares with the committed shares of this processor, or writes them; False if one fell."""
    figures: dict[str, dict[str, dict[str, float]]] = json.loads(FIGURES.read_text())
    known = figures.setdefault(cpu_model(), {}).setdefault(key, {})
    good = True
    for name, share in shares.items():
        if name in known and share < FLAG_BELOW * known[name]:
            good = False
            print(f"FLAG: {name} at {share:.3f} of READ, {known[name]:.3f} is committed ({key})")
    if save:
        known.update({name: round(share, 3) for name, share in shares.items()})
        FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    return good


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--length", type=int, default=4096, help="tokens; a multiple of --block-size"
    )
    parser.add_argument("--num-q-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layout", choices=("nhd", "hnd"), default="nhd")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--save", action="store_true", help="write the shares to cpu_figures.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    reader = Reader(options.threads)
    print(
        f"{cpu_model()}, {options.threads} threads, {build_info()['cpu_isa']}; "
        f"{options.batch} x {options.length} tokens, {options.num_q_heads}/{options.num_kv_heads} "
        f"heads, d {options.head_dim}, blocks of {options.block_size}, {options.layout}"
    )
    good = True
    for name in options.dtypes:
        shares = run_dtype(name, options, reader)
        mine = {name: shares["paged_attn"]} if "paged_attn" in shares else {}
        key = (
            f"{options.threads}t {options.batch}x{options.length} {options.num_q_heads}/"
            f"{options.num_kv_heads} d{options.head_dim} b{options.block_size} {options.layout}"
        )
        good = check_figures(mine, key, save=options.save) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
