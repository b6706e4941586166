"""Breaks the product's kernels in one place at a time and tells which breaks the tests notice.

`python -m emulator.mutate`, with tests/ on the path. One build has all mutants (mutants.py), and
each runs in a process of its own. A mutant is killed by an error of the emulator, by a result
that differs from the reference, or by taking too long. What became of it is written down at once
(fates.py), and is not run again while it stands.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from tqdm import tqdm

import emulator

from . import fates, runtime
from .build import ROOT, build_lock, compile_target, product_target
from .fates import Fate, Record
from .mutants import CODE, HEADER, Mutant, write_mutants

SECONDS = 20  # that an endless mutant gets beside the time of its checks
ORDERS = (("random", 0), ("reverse", 1))
Runs = Generator[tuple[Mutant, Fate]]


def _run_checks(names: Sequence[str], starts: Callable[[str], object] = lambda _: None) -> None:
    from .checks import CHECKS, calls_go_to, hooks_backend

    with calls_go_to(hooks_backend()):
        for name in names:
            starts(name)
            for schedule, seed in ORDERS:
                # Few CTAs, so that each has several pieces of work.
                emulator.configure(schedule=schedule, seed=seed, sms=1, hooks=True)
                CHECKS[name](hooks_backend())


class Child:
    """A process in which one mutant has to pass its checks."""

    def __init__(
        self,
        mutant: Mutant,
        names: Sequence[str],
        seconds: float,
        choose: Callable[[int], object],
    ) -> None:
        self.mutant = mutant
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.reader)
                # Who interrupts the command means the parent, and it kills.
                for interruption in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(interruption, signal.SIG_IGN)
                signal.alarm(math.ceil(seconds))
                # Its output is of no interest: it is meant to fail.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                self._pass_checks(names, choose, writer)
            finally:
                os._exit(0)
        os.close(writer)

    def _pass_checks(
        self, names: Sequence[str], choose: Callable[[int], object], writer: int
    ) -> None:
        """Tells the parent each check that starts, and then the error or that there was none."""

        def tell(*words: str) -> None:
            os.write(writer, (json.dumps(words) + "\n").encode())

        try:
            choose(self.mutant.number)
            _run_checks(names, tell)
            tell(fates.SURVIVED, "")
        except BaseException as error:
            text = str(error) or traceback.format_exc(limit=-1)
            tell(fates.KILLED, f"{type(error).__name__}: {text}".splitlines()[0])

    def fate(self) -> Fate:
        """What became of the mutant; waits for it."""
        with os.fdopen(self.reader, "rb") as stream:
            told = [json.loads(line) for line in stream]
        _, code = os.waitpid(self.pid, 0)
        check = next((words[0] for words in reversed(told) if len(words) == 1), "")
        if not told or len(told[-1]) == 1:
            ended = code & 0x7F
            state = fates.TIMED_OUT if ended == signal.SIGALRM else fates.KILLED
            return Fate(state, check, f"the process ended with signal {ended}")
        state, why = told[-1]
        if state == fates.SURVIVED:
            return fates.of_survivor(self.mutant)
        return Fate(state, check, why)


def _run_mutants(
    mutants: Sequence[Mutant],
    checks: dict[int, list[str]],
    costs: dict[str, float],
    choose: Callable[[int], object],
) -> Runs:
    """The fate of each mutant, as they end; several run at a time."""
    running: dict[int, Child] = {}
    jobs = os.cpu_count() or 1
    try:
        for mutant in [*mutants, *[None] * jobs]:
            while running and (mutant is None or len(running) == jobs):
                for reader in select.select(list(running), [], [])[0]:
                    child = running.pop(reader)
                    yield child.mutant, child.fate()
            if mutant is not None:
                names = checks[mutant.number]
                # A mutant that lives takes as long as the original; only an endless one is killed.
                seconds = SECONDS + 4 * jobs * sum(costs[name] for name in names)
                child = Child(mutant, names, seconds, choose)
                running[child.reader] = child
    finally:
        for child in running.values():
            os.kill(child.pid, signal.SIGKILL)
            child.fate()


def _build_and_run(mutants: Sequence[Mutant], names: Sequence[str]) -> Runs:
    """Builds, and runs each check without a mutant; then the fates of the mutants, as they end."""
    print(f"building, to run {len(mutants)} mutants", flush=True)
    with build_lock(CODE.parent):
        path = compile_target(product_target(hooks=True, code=CODE))
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    mutated = runtime.Runtime(path)
    runtime.use_product(mutated)
    # A forked child has none of its parent's threads.
    torch.set_num_threads(1)

    mutated.library.seen_mutants.restype = ctypes.POINTER(ctypes.c_ubyte)
    seen = mutated.library.seen_mutants()
    numbers = [mutant.number for mutant in mutants]
    # What each mutant has to pass: the checks that run its place, the quick ones first, for most
    # mutants fall at once.
    costs: dict[str, float] = {}
    checks: dict[int, list[str]] = {number: [] for number in numbers}
    none: set[int] = set()
    for name in names:
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
    for chosen in checks.values():
        chosen.sort(key=lambda name: costs[name])
    print(f"{len(costs)} checks take {sum(costs.values()):.1f} s without a mutant")

    def runs() -> Runs:
        for mutant in mutants:
            if not checks[mutant.number]:
                state = fates.NO_MUTANT if mutant.number in none else fates.NOT_RUN
                yield mutant, Fate(state)
        tested = [mutant for mutant in mutants if checks[mutant.number]]
        yield from _run_mutants(tested, checks, costs, mutated.library.set_mutant)

    return runs()


def judge(
    mutants: Sequence[Mutant], record: Record, run: Callable[[Sequence[Mutant]], Runs]
) -> dict[Mutant, Fate]:
    """The fate of each mutant: what is on record stands, and `run` yields the others."""
    known = record.known()
    left = [mutant for mutant in mutants if mutant not in known]
    if known:
        print(f"{len(known)} of {len(mutants)} mutants are on record: {record.path}")
    if left:
        with contextlib.closing(run(left)) as runs:
            for mutant, fate in tqdm(
                runs, initial=len(known), total=len(mutants), unit="mutant", file=sys.stdout
            ):
                record.add(mutant, fate)
                known[mutant] = fate
    return {mutant: known[mutant] for mutant in mutants}


def _report(found: dict[Mutant, Fate], *, killed: bool) -> None:
    counted = {mutant: fate for mutant, fate in found.items() if fate.state != fates.NO_MUTANT}
    dead = {mutant: fate for mutant, fate in counted.items() if fate.dead}
    if killed:
        for mutant, fate in dead.items():
            print(f"killed: {mutant}\n    {fate}")
    left = [mutant for mutant in counted if mutant not in dead]
    for mutant in left:
        print(f"{counted[mutant].state}: {mutant}\n    {mutant.equivalent or 'not explained'}")
    equivalent = sum(mutant.equivalent is not None for mutant in left)
    different = len(counted) - equivalent
    share = 100 * len(dead) / max(1, different)
    print(
        f"{len(dead)} killed of {different} that differ, {share:.1f} %; "
        f"{equivalent} more do the same as the original"
    )


def _selected(
    mutants: Sequence[Mutant], pattern: str | None, files: set[str] | None
) -> Iterator[Mutant]:
    for mutant in mutants:
        if (pattern is None or re.search(pattern, str(mutant))) and (
            files is None or mutant.file in files
        ):
            yield mutant


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m emulator.mutate", description=__doc__)
    parser.add_argument("--only", help="pattern of mutants, as they are listed")
    parser.add_argument(
        "--changed",
        nargs="?",
        const="",
        metavar="BASE",
        help="only mutants of files that differ from this revision; default: where main was left",
    )
    parser.add_argument("--checks", default="", help="pattern of the checks to run; default: all")
    parser.add_argument("--fresh", action="store_true", help="forget what these mutants did before")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--killed", action="store_true", help="tell what killed each, too")
    options = parser.parse_args()
    files = None
    if options.changed is not None:
        try:
            files = fates.changed_files(options.changed or None)
        except ValueError as error:
            parser.error(str(error))
    mutants = list(_selected(write_mutants(), options.only, files))
    if options.list:
        print(*mutants, sep="\n")
        return 0

    # As an interruption by hand: the children are killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))

    from .checks import CHECKS

    names = [name for name in CHECKS if re.search(options.checks, name)]
    settings = [*fates.compiler_settings(), HEADER, str(ORDERS), *names]
    context = fates.context(settings)
    record = Record(ROOT / CODE.parent / "fates.jsonl", mutants, context, ROOT / "csrc")
    if options.fresh:
        record.forget()
    _report(judge(mutants, record, lambda left: _build_and_run(left, names)), killed=options.killed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
