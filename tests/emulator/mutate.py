"""Breaks the product's kernels in one place at a time and tells which breaks the tests notice.

`python -m emulator.mutate`, with tests/ on the path. One build has all mutants (mutants.py), and
each runs in a process of its own. A mutant is killed by an error of the emulator, by a result
that differs from the reference, or by taking too long.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm

import emulator

from . import runtime
from .build import build_lock, compile_target, product_target
from .mutants import CODE, Mutant, write_mutants

SECONDS = 20  # that an endless mutant gets beside the time of its checks
# Of a mutant that nothing killed. One that no check ran, and one that is like the original because
# it compares what has no next number, and does not count.
NOT_RUN, NO_MUTANT, SURVIVED = "not run", "no mutant", "survived"
STATES = (NOT_RUN, NO_MUTANT, SURVIVED)
ORDERS = (("random", 0), ("reverse", 1))


def _run_checks(names: Sequence[str]) -> None:
    from .checks import CHECKS, calls_go_to, hooks_backend

    with calls_go_to(hooks_backend()):
        for name in names:
            for schedule, seed in ORDERS:
                # Few CTAs, so that each has several pieces of work.
                emulator.configure(schedule=schedule, seed=seed, sms=1, hooks=True)
                CHECKS[name](hooks_backend())


class Child:
    """A process in which one mutant has to pass its checks."""

    def __init__(self, mutant: Mutant, names: Sequence[str], seconds: float, library: ctypes.CDLL):
        self.mutant = mutant
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            signal.alarm(math.ceil(seconds))
            # Its output is of no interest: it is meant to fail.
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 2)
            try:
                library.set_mutant(mutant.number)
                _run_checks(names)
                status = SURVIVED
            except BaseException as error:
                text = str(error) or traceback.format_exc(limit=-1)
                status = f"{type(error).__name__}: {text}".splitlines()[0]
            os.write(writer, status.encode())
            os._exit(0)
        os.close(writer)

    def fate(self) -> str:
        """SURVIVED, or what killed the mutant; waits for it."""
        with os.fdopen(self.reader, "rb") as stream:
            status = stream.read().decode()
        _, code = os.waitpid(self.pid, 0)
        return status or f"the process ended with signal {code & 0x7F}"


def _run_mutants(
    mutants: Sequence[Mutant],
    checks: dict[int, list[str]],
    costs: dict[str, float],
    library: ctypes.CDLL,
) -> Iterator[tuple[Mutant, str]]:
    """The fate of each mutant, as they end; several run at a time."""
    running: dict[int, Child] = {}
    jobs = os.cpu_count() or 1
    for mutant in [*mutants, *[None] * jobs]:
        while running and (mutant is None or len(running) == jobs):
            for reader in select.select(list(running), [], [])[0]:
                child = running.pop(reader)
                yield child.mutant, child.fate()
        if mutant is not None:
            names = checks[mutant.number]
            # A mutant that lives takes as long as the original; only an endless one is killed.
            seconds = SECONDS + 4 * jobs * sum(costs[name] for name in names)
            child = Child(mutant, names, seconds, library)
            running[child.reader] = child


def _selected(mutants: Sequence[Mutant], pattern: str | None) -> Iterator[Mutant]:
    for mutant in mutants:
        if pattern is None or re.search(pattern, str(mutant)):
            yield mutant


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m emulator.mutate", description=__doc__)
    parser.add_argument("--only", help="pattern of mutants, as they are listed")
    parser.add_argument("--checks", default="", help="pattern of the checks to run; default: all")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--killed", action="store_true", help="tell what killed each, too")
    options = parser.parse_args()
    mutants = list(_selected(write_mutants(), options.only))
    if options.list:
        print(*mutants, sep="\n")
        return 0

    print(f"building {len(mutants)} mutants", flush=True)
    with build_lock(CODE.parent):
        path = compile_target(product_target(hooks=True, code=CODE))
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    mutated = runtime.Runtime(path)
    runtime.use_product(mutated)
    # A forked child has none of its parent's threads.
    torch.set_num_threads(1)

    from .checks import CHECKS

    mutated.library.seen_mutants.restype = ctypes.POINTER(ctypes.c_ubyte)
    seen = mutated.library.seen_mutants()
    numbers = [mutant.number for mutant in mutants]
    # What each mutant has to pass: the checks that run its place, the quick ones first, for most
    # mutants fall at once.
    costs: dict[str, float] = {}
    checks: dict[int, list[str]] = {number: [] for number in numbers}
    none: set[int] = set()
    for name in CHECKS:
        if not re.search(options.checks, name):
            continue
        for number in numbers:
            seen[number] = 0
        start = time.perf_counter()
        _run_checks([name])
        costs[name] = time.perf_counter() - start
        for number in numbers:
            if seen[number] == 2:
                checks[number].append(name)
            elif seen[number] == 1:
                none.add(number)
    for names in checks.values():
        names.sort(key=lambda name: costs[name])
    print(f"{len(costs)} checks take {sum(costs.values()):.1f} s without a mutant")

    fates = {
        mutant: NO_MUTANT if mutant.number in none else NOT_RUN
        for mutant in mutants
        if not checks[mutant.number]
    }
    tested = [mutant for mutant in mutants if mutant not in fates]
    runs = _run_mutants(tested, checks, costs, mutated.library)
    fates |= dict(tqdm(runs, total=len(tested), unit="mutant", file=sys.stdout))
    fates = {mutant: fates[mutant] for mutant in mutants}
    counted = {mutant: fate for mutant, fate in fates.items() if fate != NO_MUTANT}
    killed = {mutant: fate for mutant, fate in counted.items() if fate not in STATES}
    if options.killed:
        for mutant, fate in killed.items():
            print(f"killed: {mutant}\n    {fate}")
    left = [mutant for mutant in counted if mutant not in killed]
    for mutant in left:
        print(f"{fates[mutant]}: {mutant}\n    {mutant.equivalent or 'not explained'}")
    equivalent = sum(mutant.equivalent is not None for mutant in left)
    different = len(counted) - equivalent
    share = 100 * len(killed) / max(1, different)
    print(
        f"{len(killed)} killed of {different} that differ, {share:.1f} %; "
        f"{equivalent} more do the same as the original"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
