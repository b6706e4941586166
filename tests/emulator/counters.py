"""What launches did to memory, line by line, as the hook build counted it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """All accesses of one launch by one place in the code to one buffer."""

    place: tuple[str, ...]  # "file:line" and those it is inlined into, innermost first
    buffer: str
    shared: bool
    write: bool
    requests: int  # of warps
    bytes: int  # of all lanes
    transactions: int  # sectors of 32 bytes, or waves of 128 where `shared`
    ideal: int  # the fewest that hold the bytes of each request


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    site: str  # where it was launched
    grid: tuple[int, ...]
    block: tuple[int, ...]
    instructions: dict[str, int]  # of a CTA for barriers, of a warp for collectives
    lines: tuple[Line, ...]

    def select(self, condition: Callable[[Line], bool]) -> Totals:
        """The sums over the lines that meet the condition."""
        return Totals.of(line for line in self.lines if condition(line))

    @property
    def read(self) -> Totals:
        """All reads of buffers."""
        return self.select(lambda line: not line.write and not line.shared)

    @property
    def written(self) -> Totals:
        """All writes to buffers."""
        return self.select(lambda line: line.write and not line.shared)

    @property
    def shared(self) -> Totals:
        """All accesses to shared memory."""
        return self.select(lambda line: line.shared)


@dataclass(frozen=True)
class Totals:
    """Sums over lines."""

    requests: int = 0
    bytes: int = 0
    transactions: int = 0
    ideal: int = 0

    @staticmethod
    def of(lines: Iterable[Line]) -> Totals:
        """The sums."""
        chosen = list(lines)
        return Totals(
            sum(line.requests for line in chosen),
            sum(line.bytes for line in chosen),
            sum(line.transactions for line in chosen),
            sum(line.ideal for line in chosen),
        )


class Counters:
    """The launches since counting started, in order."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._final: list[Launch] | None = None

    @property
    def launches(self) -> list[Launch]:
        """Those that have ended; after counting has stopped, all."""
        if self._final is not None:
            return self._final
        launches = []
        for launch in json.loads(self._read()):
            lines = tuple(
                Line(**{**line, "place": tuple(line["place"])}) for line in launch["lines"]
            )
            grid, block = tuple(launch["grid"]), tuple(launch["block"])
            launches.append(Launch(launch["site"], grid, block, launch["instructions"], lines))
        return launches

    def freeze(self) -> None:
        """Keeps what there is: the emulator is about to forget it."""
        self._final = self.launches

    def table(self) -> str:
        """All of it, to read."""
        rows = []
        for launch in self.launches:
            rows.append(f"launched in {launch.site}: grid {launch.grid}, block {launch.block}")
            counts = [f"{name} {count}" for name, count in launch.instructions.items()]
            rows.append(f"  instructions: {', '.join(counts) or 'none counted'}")
            for line in sorted(launch.lines, key=lambda line: -line.bytes):
                unit = "waves" if line.shared else "sectors"
                rows.append(
                    f"  {'write' if line.write else 'read ':5} {line.bytes:10} bytes, "
                    f"{line.requests:7} requests, {line.transactions:8} {unit} "
                    f"(ideal {line.ideal}), {line.buffer}\n      {' < '.join(line.place)}"
                )
        return "\n".join(rows)
