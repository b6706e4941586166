"""python bench/host.py: what the host side costs. No GPU is needed; --device cuda times uploads.

Block operations are counted as a server makes them: sequences come, grow a token at a time, go.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from timing import synchronize

from paged_attn import BlockManager, PagedKVCache

_SEQUENCES, _PROMPT, _NEW_TOKENS, _BLOCK_SIZE = 256, 100, 240, 16
_REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One number of the table."""

    what: str
    value: float
    unit: str


def append_and_free(manager: BlockManager) -> int:
    """One call a token; returns the operations."""
    append = manager.append
    seqs = [manager.add(_PROMPT) for _ in range(_SEQUENCES)]
    for _ in range(_NEW_TOKENS):
        for seq in seqs:
            append(seq)
    for seq in seqs:
        manager.free(seq)
    return _SEQUENCES * (_NEW_TOKENS + 2)


def append_batch_and_free(manager: BlockManager) -> int:
    """The same with one call a step."""
    seqs, ones = [manager.add(_PROMPT) for _ in range(_SEQUENCES)], [1] * _SEQUENCES
    for _ in range(_NEW_TOKENS):
        manager.append_batch(seqs, ones)
    for seq in seqs:
        manager.free(seq)
    return _SEQUENCES * (_NEW_TOKENS + 2)


def prompts(manager: BlockManager) -> int:
    """Prompts of 1,024 tokens, half of them shared; returns the tokens looked up."""
    shared = list(range(512))
    for number in range(64):
        seq = manager.add_prompt(shared + [10_000 + number] * 512).seq_id
        manager.mark_written(seq)
        manager.free(seq)
    return 64 * 1024


def seconds_per(work: Callable[[BlockManager], int], manager: BlockManager) -> float:
    """CPU seconds of one operation, which other processes do not add to as they do to time.

    The least of several runs.
    """
    samples = []
    for _ in range(_REPEATS):
        start = time.process_time()
        count = work(manager)
        samples.append((time.process_time() - start) / count)
    return min(samples)


def step_seconds(device: torch.device, num_seqs: int, steps: int) -> list[float]:
    """Host time of each decode step for `num_seqs` sequences of 200 to 1,500 tokens, sorted."""
    blocks = num_seqs * (1500 + 2 * steps) // _BLOCK_SIZE + num_seqs
    cache = PagedKVCache(1, blocks, _BLOCK_SIZE, 1, 8, dtype=torch.float16, device=device)
    rng = random.Random(0)
    seqs = [cache.add() for _ in range(num_seqs)]
    cache.step(seqs, [rng.randint(200, 1500) for _ in seqs])
    samples = []
    for number in range(2 * steps):
        start = time.perf_counter()
        cache.step(seqs)
        if number >= steps:  # the first half warms up
            samples.append(time.perf_counter() - start)
    synchronize(device)
    return sorted(samples)


def measure(device: torch.device, steps: int) -> list[Row]:
    """All rows."""
    plain = BlockManager(8192, _BLOCK_SIZE)
    caching = BlockManager(8192, _BLOCK_SIZE, enable_prefix_caching=True)
    rows = [
        Row(f"1 M append/free, {name}", 1e6 * seconds_per(work, manager), "CPU s")
        for name, work, manager in (
            ("one call each", append_and_free, plain),
            ("one call a step of 256", append_batch_and_free, plain),
            ("one call each, prefix cache on", append_and_free, caching),
        )
    ]
    rows.append(
        Row("prompt token looked up and kept", 1e9 * seconds_per(prompts, caching), "CPU ns")
    )
    for num_seqs in (64, 256, 1024):
        samples = step_seconds(device, num_seqs, steps)
        for name, value in (
            ("least", samples[0]),
            ("median", statistics.median(samples)),
            ("95 %", samples[len(samples) * 95 // 100]),
        ):
            rows.append(Row(f"PagedKVCache.step, {num_seqs} sequences, {name}", 1e3 * value, "ms"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Times the host side.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=300, help="decode steps timed")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}\n")
    print("| what | |\n| --- | ---: |")
    for row in measure(torch.device(args.device), args.steps):
        print(f"| {row.what} | {row.value:.2f} {row.unit} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
