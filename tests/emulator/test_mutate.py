"""The run of the mutants: what it writes down, what it runs again, and how a child tells its fate.

No kernel is compiled: the runs are made up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from emulator import fates, mutate
from emulator.build import ROOT
from emulator.fates import EQUAL, KILLED, SURVIVED, TIMED_OUT, Fate, Record
from emulator.mutants import FOLDERS, Mutant
from emulator.mutants import mutate as mutants_of

A, B, C = (
    Mutant(0, "kernels/a.cuh", 3, "dropped", "ptx::barrier_sync(0);"),
    Mutant(1, "kernels/a.cuh", 7, "< is <=", "i [<] size"),
    Mutant(2, "kernels/b.cuh", 5, "== is !=", "lane [==] 0"),
)
ALL = (A, B, C)
FATES = {
    A: Fate(KILLED, "merge_f32", "RuntimeError: race"),
    B: Fate(TIMED_OUT, "append", "the process ended with signal 14"),
    C: Fate(SURVIVED),
}


class FakeRun:
    """Runs mutants as mutate.py does, and is interrupted after some."""

    def __init__(self) -> None:
        self.ran: list[Mutant] = []

    def __call__(self, mutants: Sequence[Mutant], stop_after: int | None = None) -> mutate.Runs:
        for index, mutant in enumerate(mutants):
            if index == stop_after:
                raise KeyboardInterrupt
            self.ran.append(mutant)
            yield mutant, FATES[mutant]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    for name in ("kernels/a.cuh", "kernels/b.cuh"):
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}\n")
    return tmp_path / "csrc"


Recorded = Callable[..., Record]


@pytest.fixture
def recorded(tmp_path: Path, code: Path) -> Recorded:
    """The record of a new process."""

    def record(mutants: Sequence[Mutant] = ALL, context: str = "checks") -> Record:
        return Record(tmp_path / "build" / "fates.jsonl", mutants, context, code)

    return record


def ran_again(record: Record, mutants: Sequence[Mutant] = ALL) -> list[Mutant]:
    """Which mutants a run runs; each fate must be the one it was made to be."""
    run = FakeRun()
    assert mutate.judge(mutants, record, run) == {mutant: FATES[mutant] for mutant in mutants}
    return run.ran


def test_an_interrupted_run_goes_on(recorded: Recorded) -> None:
    run = FakeRun()
    with pytest.raises(KeyboardInterrupt):
        mutate.judge(ALL, recorded(), lambda left: run(left, stop_after=2))
    assert recorded().known() == {A: FATES[A], B: FATES[B]}
    assert ran_again(recorded()) == [C]
    assert ran_again(recorded()) == []


def test_what_decides_a_fate(recorded: Recorded, code: Path) -> None:
    assert ran_again(recorded()) == [A, B, C]
    before = (code / A.file).read_text()
    (code / A.file).write_text(before + "// changed\n")
    assert ran_again(recorded()) == [A, B]
    assert ran_again(recorded(context="more checks")) == [A, B, C]
    (code / A.file).write_text(before)
    assert ran_again(recorded()) == [], "what was found before still stands"


def test_a_file_that_is_edited_during_the_run(recorded: Recorded, code: Path) -> None:
    record = recorded()
    (code / C.file).write_text("// not what was run\n")
    assert ran_again(record) == [A, B, C]
    assert ran_again(recorded()) == [C]


def test_a_line_that_was_cut_short(recorded: Recorded) -> None:
    ran_again(recorded())
    path = recorded().path
    path.write_bytes(path.read_bytes()[:-10])
    assert ran_again(recorded()) == [C]
    assert ran_again(recorded()) == []


def test_fresh_forgets_the_mutants_of_this_run(recorded: Recorded) -> None:
    ran_again(recorded())
    recorded([A]).forget()
    assert ran_again(recorded()) == [A]


def test_a_survivor_is_equal_while_the_table_says_so(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_again(recorded())
    monkeypatch.setattr("emulator.mutants.EQUIVALENT", {("b.cuh", C.what, "[==] 0"): "one lane"})
    assert recorded().known()[C] == Fate(EQUAL, why="one lane")
    recorded().add(C, fates.of_survivor(C))
    monkeypatch.setattr("emulator.mutants.EQUIVALENT", {})
    assert recorded().known()[C] == Fate(SURVIVED)


def test_the_context_is_the_settings_and_the_files(tmp_path: Path) -> None:
    seen = set()
    for name in ("tests/cases.py", "tests/emulator/core/warp.cpp", "tests/emulator/include/x/y.h"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for text in ("one", "two"):
            path.write_text(text)
            seen.add(fates.context(["-O1", "merge"], tmp_path))
    seen.add(fates.context(["-O2", "merge"], tmp_path))
    seen.add(fates.context(["-O1", "merge", "append"], tmp_path))
    assert len(seen) == 8
    (tmp_path / "tests" / "test_cases.py").write_text("decides nothing")
    assert fates.context(["-O1", "merge"], tmp_path) in seen


def test_the_files_that_decide_are_there() -> None:
    assert all(list(ROOT.glob(pattern)) for pattern in fates._DECISIVE)
    assert str(ROOT) not in "".join(fates.compiler_settings())


def test_each_mutant_has_a_name_of_its_own() -> None:
    names = [
        str(mutant)
        for folder in FOLDERS
        for path in (ROOT / "csrc" / folder).glob("*.cuh")
        for mutant in mutants_of(path.read_text(), f"{folder}/{path.name}", 0)[1]
    ]
    assert len(names) > 100
    assert len(set(names)) == len(names)


@pytest.fixture
def git(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs git in a repository whose first commit has both files of the code."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@example.com")

    def run(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    run("init", "-b", "main")
    run("add", "csrc")
    run("commit", "-m", "first")
    return run


def test_changed_files(git: Callable[..., None], tmp_path: Path, code: Path) -> None:
    assert fates.changed_files(None, tmp_path) == set()
    git("checkout", "-b", "branch")
    (code / A.file).write_text("// on the branch\n")
    git("commit", "-am", "second")
    assert fates.changed_files(None, tmp_path) == {A.file}
    assert fates.changed_files("HEAD", tmp_path) == set()
    (code / C.file).write_text("// not committed\n")
    (code / "kernels/new.cuh").write_text("// not known to git\n")
    (tmp_path / "README.md").write_text("no code\n")
    assert fates.changed_files("HEAD", tmp_path) == {C.file, "kernels/new.cuh"}
    assert fates.changed_files(None, tmp_path) == {A.file, C.file, "kernels/new.cuh"}
    git("branch", "-D", "main")
    assert fates.changed_files(None, tmp_path) == {C.file, "kernels/new.cuh"}
    with pytest.raises(ValueError, match="nowhere"):
        fates.changed_files("nowhere", tmp_path)


def endless() -> None:
    time.sleep(60)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrong() -> None:
    raise AssertionError("differs from the reference\nby much")


CHECKS: dict[str, Callable[[], None]] = {
    "right": lambda: None,
    "wrong": wrong,
    "endless": endless,
    "crash": crash,
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], object]:
    """Chooses mutants of the checks above."""

    def run_checks(names: Sequence[str], starts: Callable[[str], object]) -> None:
        for name in names:
            starts(name)
            CHECKS[name]()

    monkeypatch.setattr(mutate, "_run_checks", run_checks)
    return lambda _number: None


# Python 3.12 warns of a fork beside threads; the child starts none.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@forks
@pytest.mark.parametrize(
    ("names", "fate"),
    [
        (["right"], Fate(SURVIVED)),
        (["right", "wrong"], Fate(KILLED, "wrong", "AssertionError: differs from the reference")),
        (["endless"], Fate(TIMED_OUT, "endless", "the process ended with signal 14")),
        (["right", "crash"], Fate(KILLED, "crash", "the process ended with signal 9")),
    ],
)
def test_what_a_child_tells(chosen: Callable[[int], object], names: list[str], fate: Fate) -> None:
    assert mutate.Child(C, names, 1, chosen).fate() == fate


@forks
def test_an_interrupted_run_leaves_no_process(
    chosen: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[int] = []

    class Child(mutate.Child):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            children.append(self.pid)

    monkeypatch.setattr(mutate, "Child", Child)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    checks = {A.number: ["wrong"], B.number: ["endless"], C.number: ["endless"]}
    runs = mutate._run_mutants(ALL, checks, dict.fromkeys(CHECKS, 0.0), chosen)
    assert next(runs)[0] == A
    start = time.monotonic()
    runs.close()
    assert time.monotonic() - start < mutate.SECONDS / 2, "it waited for them to end"
    assert len(children) >= 2
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
