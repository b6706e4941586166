"""What a run measured, as JSON, as a Markdown table, and as plots."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytes import DecodeShape, dtype_name, traffic
from timing import Timing


@dataclass(frozen=True)
class Check:
    """One comparison with paged_attn.reference."""

    name: str
    error: float | None  # largest, of the output; None where the call failed
    allowed: float
    lse_error: float | None
    lse_allowed: float
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the result is right."""
        return self.problem is None


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of one kernel that does nothing but move them."""

    kernel: str
    gb_per_s: float


@dataclass(frozen=True)
class DecodeRow:
    """One decode shape, measured."""

    shape: DecodeShape
    num_pools: int
    timing: Timing
    gb_per_s: float  # of the bytes that attention needs: keys, values, query, output
    share: float  # of the measured read bandwidth
    goal: float | None


@dataclass(frozen=True)
class PeerRow:
    """Another implementation on one shape."""

    shape: DecodeShape
    peer: str
    timing: Timing | None
    share: float | None
    difference: float | None  # largest, from our result on the same tensors
    problem: str | None = None


@dataclass(frozen=True)
class Overhead:
    """What a call costs beside its bytes."""

    what: str
    clock: str  # "device" or "host"
    timing: Timing


@dataclass(frozen=True)
class Skipped:
    """A row that was not measured."""

    shape: DecodeShape
    reason: str


@dataclass
class Results:
    """All of a run; sections are filled one after another."""

    machine: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    copies: list[Bandwidth] = field(default_factory=list)
    reads: list[Bandwidth] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    peers: list[PeerRow] = field(default_factory=list)
    overheads: list[Overhead] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def read_gb_per_s(self) -> float:
        """The read bandwidth that shares are of: that of the fastest kernel."""
        return max(read.gb_per_s for read in self.reads)

    @property
    def passed(self) -> bool:
        """Whether every check passed and every section ran."""
        return not self.problems and all(check.passed for check in self.checks)


def write(results: Results, folder: Path) -> None:
    """Writes report.json and report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_plain(results), indent=1, default=str)
    (folder / "report.json").write_text(text + "\n")
    (folder / "report.md").write_text(markdown(results))


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, dtypes as names; a shape's bytes are written beside it."""
    if isinstance(value, DecodeShape):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        dtypes = {name: dtype_name(fields[name]) for name in ("kv_dtype", "dtype")}
        return fields | dtypes | {"bytes": dataclasses.asdict(traffic(value))}
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _microseconds(timing: Timing | None) -> str:
    return "" if timing is None else f"{timing.median_us:.1f}"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "/")


def markdown(results: Results) -> str:
    """The report that people read."""
    lines = ["# paged_attn on this machine", ""]
    lines += _table(
        ("machine", ""), [(name, _cell(str(value))) for name, value in results.machine.items()]
    )
    if results.problems:
        lines += ["## Problems", "", *(f"- {_cell(problem)}" for problem in results.problems), ""]
    lines += _checks(results.checks)
    if results.reads:
        lines += ["## Bandwidth", "", "Shares below are of the fastest read.", ""]
        rows = [("copy", row.kernel, f"{row.gb_per_s:.1f}") for row in results.copies]
        rows += [("read", row.kernel, f"{row.gb_per_s:.1f}") for row in results.reads]
        lines += _table(("what", "kernel", "GB/s"), rows)
    lines += _decode(results)
    if results.peers:
        lines += ["## Peers", "", "The difference is from our result on the same tensors.", ""]
        head = ("shape", "peer", "us", "share %", "difference", "problem")
        lines += _table(
            head,
            (
                (
                    row.shape.name,
                    row.peer,
                    _microseconds(row.timing),
                    _percent(row.share),
                    _number(row.difference),
                    _cell(row.problem),
                )
                for row in results.peers
            ),
        )
    if results.overheads:
        lines += ["## Costs beside the bytes", ""]
        lines += _table(
            ("what", "clock", "us"),
            ((row.what, row.clock, _microseconds(row.timing)) for row in results.overheads),
        )
    return "\n".join(lines)


def _checks(checks: Sequence[Check]) -> list[str]:
    failed = sum(not check.passed for check in checks)
    lines = ["## Correctness", "", f"{len(checks) - failed} of {len(checks)} right.", ""]
    rows = [
        (
            check.name,
            _number(check.error),
            _number(check.allowed),
            _number(check.lse_error),
            "yes" if check.passed else f"**NO**: {_cell(check.problem)}",
        )
        for check in checks
    ]
    return lines + _table(("case", "error", "allowed", "LSE error", "right"), rows)


def _decode(results: Results) -> list[str]:
    lines = ["## Decode", ""]
    if results.decode:
        lines += [
            "Query heads / KV heads, batch x tokens, cache dtype, block size. One graph replay "
            "rotates through the pools; the plan was made before.",
            "",
        ]
    head = ("shape", "pools", "us", "GB/s", "share %", "goal %")
    lines += _table(
        head,
        (
            (
                row.shape.name,
                str(row.num_pools),
                _microseconds(row.timing),
                f"{row.gb_per_s:.1f}",
                _percent(row.share),
                _percent(row.goal),
            )
            for row in results.decode
        ),
    )
    counts = Counter(row.reason for row in results.skipped)
    lines += [f"- {count} rows skipped: {reason}" for reason, count in counts.items()]
    return [*lines, ""] if counts else lines


def plot(results: Results, folder: Path) -> list[Path]:
    """Draws share over length, a picture for each cache dtype; none without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        plt: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return []
    paths = []
    for kv_dtype in dict.fromkeys(row.shape.kv_dtype for row in results.decode):
        figure = _draw(plt, [row for row in results.decode if row.shape.kv_dtype == kv_dtype])
        name = dtype_name(kv_dtype)
        figure.suptitle(f"cache {name}\n{_machine(results.machine)}", fontsize=8)
        path = folder / f"decode_{name}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        paths.append(path)
    return paths


def _machine(machine: dict[str, Any]) -> str:
    """The machine in a line, for pictures."""
    names = ("device", "driver", "torch", "paged_attn version", "paged_attn cuda_archs")
    return ", ".join(f"{name} {machine[name]}" for name in names if name in machine)


def _draw(plt: Any, rows: Sequence[DecodeRow]) -> Any:
    """One panel for each ratio of heads, one line for each batch and block size."""
    heads = list(dict.fromkeys((r.shape.num_q_heads, r.shape.num_kv_heads) for r in rows))
    figure, axes = plt.subplots(
        1, len(heads), figsize=(4 * len(heads), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (num_q_heads, num_kv_heads) in zip(axes[0], heads, strict=True):
        mine = [
            r
            for r in rows
            if (r.shape.num_q_heads, r.shape.num_kv_heads) == (num_q_heads, num_kv_heads)
        ]
        lines = dict.fromkeys((r.shape.batch, r.shape.block_size) for r in mine)
        for batch, block_size in sorted(lines):
            points = sorted(
                (r.shape.length, 100 * r.share)
                for r in mine
                if (r.shape.batch, r.shape.block_size) == (batch, block_size)
            )
            style = {1: ":", 16: "-"}.get(block_size, "--")
            label = f"batch {batch}, block size {block_size}"
            axis.plot(*zip(*points, strict=True), style, marker=".", label=label)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{num_q_heads} query heads, {num_kv_heads} KV heads")
        axis.set_xlabel("tokens of each sequence")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("% of measured read bandwidth")
    return figure
