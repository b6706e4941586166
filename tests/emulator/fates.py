"""What became of each mutant, kept in a file, and which mutants a change of the code concerns."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .build import COMMON_FLAGS, EMULATOR, HOOK_FLAGS, KERNEL_FLAGS, ROOT
from .mutants import Mutant

# A mutant that nothing killed: one that no check ran, one that is like the original because it
# compares what has no next number, and does not count, one that no check saw, and one that does
# the same as the original.
NOT_RUN, NO_MUTANT, SURVIVED, EQUAL = "not run", "no mutant", "survived", "equal"
KILLED, TIMED_OUT = "killed", "timed out"

# What decides a fate beside the mutated file: the checks, what they hold results to, and what sees
# errors of the kernels.
_DECISIVE = (
    "paged_attn/reference.py",
    "tests/accuracy.py",
    "tests/backends.py",
    "tests/case_list.py",
    "tests/cases.py",
    f"{EMULATOR}/allocator.cpp",
    f"{EMULATOR}/checks.py",
    f"{EMULATOR}/core/*",
    f"{EMULATOR}/include/**/*",
)


@dataclass(frozen=True)
class Fate:
    """What became of a mutant, the check in which it did, and how it was noticed."""

    state: str
    check: str = ""
    why: str = ""

    @property
    def dead(self) -> bool:
        """Whether a check noticed the mutant."""
        return self.state in (KILLED, TIMED_OUT)

    def __str__(self) -> str:
        place = f" in {self.check}" if self.check else ""
        return f"{self.state}{place}{self.why and ': '}{self.why}"


def of_survivor(mutant: Mutant) -> Fate:
    """The fate of one that passed its checks."""
    return Fate(SURVIVED if mutant.equivalent is None else EQUAL, why=mutant.equivalent or "")


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:32]


def context(settings: Sequence[str], root: Path = ROOT) -> str:
    """A digest of what decides every fate: settings, like the compiler's flags, and files."""
    files = {path for pattern in _DECISIVE for path in root.glob(pattern) if path.is_file()}
    texts = (part for path in sorted(files) for part in (path.name, path.read_bytes()))
    return _digest([*settings, *texts])


class Record:
    """The fates of some mutants on file: a line of JSON each, written as it is known.

    One found there counts if the mutated file and the context are as they were.
    """

    def __init__(self, path: Path, mutants: Sequence[Mutant], context: str, code: Path) -> None:
        self.path = path
        # Now: whoever edits a file meanwhile does not change what was run.
        texts = {file: (code / file).read_bytes() for file in {m.file for m in mutants}}
        self._digests = {m: _digest([context, texts[m.file]]) for m in mutants}

    def _lines(self) -> list[dict[str, str]]:
        """What is on file; a line that an interruption cut short is not."""
        lines = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return lines

    def known(self) -> dict[Mutant, Fate]:
        """The mutants whose fate is on file."""
        found = {
            (line["mutant"], line["digest"]): Fate(line["state"], line["check"], line["why"])
            for line in self._lines()
        }
        fates = {
            mutant: found[str(mutant), digest]
            for mutant, digest in self._digests.items()
            if (str(mutant), digest) in found
        }
        # The table of equal ones may be another by now.
        return {
            mutant: of_survivor(mutant) if fate.state in (SURVIVED, EQUAL) else fate
            for mutant, fate in fates.items()
        }

    def add(self, mutant: Mutant, fate: Fate) -> None:
        """Writes a fate to the file."""
        line = {"mutant": str(mutant), "digest": self._digests[mutant], **asdict(fate)}
        self._write([line], "a")

    def forget(self) -> None:
        """Removes these mutants from the file, whatever decided their fates."""
        names = {str(mutant) for mutant in self._digests}
        self._write([line for line in self._lines() if line["mutant"] not in names], "w")

    def _write(self, lines: Sequence[dict[str, str]], mode: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open(mode) as file:
            cut = mode == "a" and self.path.read_bytes()[-1:] not in (b"", b"\n")
            file.write("\n" * cut + "".join(json.dumps(line) + "\n" for line in lines))


def compiler_settings() -> list[str]:
    """Which compiler builds the mutants, and its flags, wherever the repository lies."""
    command = [os.environ.get("CXX", "g++"), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [version, COMMON_FLAGS.replace(str(ROOT), ""), KERNEL_FLAGS, HOOK_FLAGS]


def changed_files(base: str | None, root: Path = ROOT) -> set[str]:
    """Files of csrc/, named as mutants name them, that differ from a revision of git.

    Without a revision it is where the branch left main, or HEAD where there is no main. Raises
    ValueError with what git says.
    """

    def git(*arguments: str) -> list[str]:
        result = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise ValueError(result.stderr.strip())
        return result.stdout.splitlines()

    if base is None:
        try:
            base = git("merge-base", "main", "HEAD")[0]
        except ValueError:
            base = "HEAD"
    paths = git("diff", "--name-only", "--relative", base, "--", "csrc")
    paths += git("ls-files", "--others", "--exclude-standard", "--", "csrc")
    return {path.removeprefix("csrc/") for path in paths}
