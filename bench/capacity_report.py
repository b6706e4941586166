"""What bench/capacity.py found, as Markdown, JSON and plots."""

from __future__ import annotations

import dataclasses
import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import Machine, Outcome
from sharing import Sharing


@dataclass(frozen=True)
class Rate:
    """One arrival rate that was tried."""

    requests_per_second: float
    seconds_per_token: float  # mean over requests of latency / output tokens


@dataclass(frozen=True)
class SystemRow:
    """One way to give out memory on one trace."""

    trace: str
    system: str
    backlog: Outcome  # all requests there from the start
    rates: list[Rate]

    @property
    def sustained(self) -> float:
        """The largest rate that was borne, requests a second; see capacity.LATENCY_LIMIT."""
        borne = [
            rate.requests_per_second
            for rate in self.rates
            if rate.seconds_per_token <= LATENCY_LIMIT
        ]
        return max(borne, default=0.0)


@dataclass(frozen=True)
class PressureRow:
    """One way out of pressure."""

    trace: str
    block_size: int
    way: str
    preemptions: int
    tokens_recomputed: int
    bytes_swapped: int
    seconds_lost: float  # to swapping or recomputing alone
    seconds: float  # for all requests


@dataclass
class Report:
    """All of a run."""

    machine: Machine
    requests: int
    systems: list[SystemRow] = field(default_factory=list)
    sharing: list[tuple[str, Sharing]] = field(default_factory=list)
    pressure: list[PressureRow] = field(default_factory=list)

    def traces(self) -> list[str]:
        """Names, in order."""
        return list(dict.fromkeys(row.trace for row in self.systems))


# Mean seconds a request takes for each token of its output, waiting included, that are borne.
LATENCY_LIMIT = 0.1


def write(report: Report, folder: Path) -> str:
    """Writes capacity.json and capacity.md; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": dataclasses.asdict(report.machine),
        "requests": report.requests,
        "systems": [
            {**dataclasses.asdict(row), "sustained": row.sustained} for row in report.systems
        ],
        "sharing": [
            {"trace": trace, **dataclasses.asdict(row), "saved": row.saved}
            for trace, row in report.sharing
        ],
        "pressure": [dataclasses.asdict(row) for row in report.pressure],
    }
    (folder / "capacity.json").write_text(json.dumps(data, indent=1) + "\n")
    text = markdown(report)
    (folder / "capacity.md").write_text(text)
    return text


def markdown(report: Report) -> str:
    """The tables."""
    parts = [
        f"{report.requests} requests a simulation, more where they are shorter; "
        f"{report.machine.total_slots:,} slots of "
        f"{report.machine.bytes_per_token:,} bytes.\n"
    ]
    for trace in report.traces():
        parts.append(_systems(report, trace))
    parts.append(_sharing(report))
    parts.append(_pressure(report))
    return "\n".join(parts)


def _table(title: str, heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"## {title}\n", _line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    return "\n".join([*lines, *map(_line, rows), ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _systems(report: Report, trace: str) -> str:
    heads = ["memory", "tokens", "reserved", "never used", "between", "waste in blocks or ranges"]
    heads += ["requests at once", "done a second", "sustained a second", "preempted"]
    rows = []
    for row in report.systems:
        if row.trace != trace:
            continue
        o = row.backlog
        shares = (o.tokens, o.reserved, o.internal, o.external, waste(o))
        numbers = (f"{o.running:.1f}", f"{o.requests_per_second:.2f}", f"{row.sustained:.2f}")
        rows.append([row.system, *map(_percent, shares), *numbers, str(o.preemptions)])
    return _table(f"{trace}: what the slots hold while requests wait", heads, rows)


def waste(outcome: Outcome) -> float:
    """Share of what was given out that holds no token."""
    given = outcome.tokens + outcome.reserved + outcome.internal
    return 1 - outcome.tokens / given if given else 0.0


def _sharing(report: Report) -> str:
    rows = [
        [
            f"{trace}, {row.method}, {row.width}",
            _percent(row.saved),
            _gigabytes(row.tokens_copied * report.machine.bytes_per_token),
            _gigabytes(row.contiguous_tokens_copied * report.machine.bytes_per_token),
            _percent(row.tokens_copied / max(row.contiguous_tokens_copied, 1)),
        ]
        for trace, row in report.sharing
    ]
    heads = ["outputs of one prompt", "blocks saved", "copied", "copied if contiguous", "ratio"]
    return _table("Sharing, block size 16", heads, rows)


def _pressure(report: Report) -> str:
    rows = [
        [
            f"{row.trace}, {row.block_size}, {row.way}",
            str(row.preemptions),
            f"{row.tokens_recomputed:,}",
            _gigabytes(row.bytes_swapped),
            f"{row.seconds_lost:.1f} s",
            f"{row.seconds:.0f} s",
        ]
        for row in report.pressure
    ]
    heads = ["trace, block size, way out", "preempted", "tokens again", "swapped", "cost", "in all"]
    return _table("Preemption, with half the memory", heads, rows)


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def plot(report: Report, folder: Path) -> list[Path]:
    """Draws the shares and the latencies of each trace, if there is matplotlib."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return []
    paths = []
    for trace in report.traces():
        rows = [row for row in report.systems if row.trace == trace]
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 4.5))
        _plot_shares(left, rows)
        _plot_latency(right, rows)
        figure.suptitle(f"{trace}, OPT-13B, 12 GiB of keys and values (simulated)")
        figure.tight_layout()
        paths.append(folder / f"capacity_{trace.lower()}.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 4.5))
    _plot_sharing(left, report)
    _plot_pressure(right, report)
    figure.tight_layout()
    paths.append(folder / "capacity_sharing.png")
    figure.savefig(paths[-1], dpi=120)
    pyplot.close(figure)
    return paths


def _plot_sharing(axes: Any, report: Report) -> None:
    lines: dict[str, list[Sharing]] = {}
    for trace, row in report.sharing:
        lines.setdefault(f"{trace}, {row.method}", []).append(row)
    for name, rows in lines.items():
        axes.plot(
            [row.width for row in rows], [100 * row.saved for row in rows], marker=".", label=name
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("samples or beams of one prompt")
    axes.set_ylabel("% of the blocks saved by sharing")
    axes.legend()


def _plot_pressure(axes: Any, report: Report) -> None:
    lines: dict[str, list[PressureRow]] = {}
    for row in report.pressure:
        lines.setdefault(f"{row.trace}, {row.way}", []).append(row)
    for name, rows in lines.items():
        shares = [100 * row.seconds_lost / row.seconds for row in rows]
        axes.plot([row.block_size for row in rows], shares, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size")
    axes.set_ylabel("% of the time lost to preemption, half the memory")
    axes.legend()


def _plot_shares(axes: Any, rows: list[SystemRow]) -> None:
    names = [row.system for row in rows]
    bottom = [0.0] * len(rows)
    for part, label in (
        ("tokens", "tokens"),
        ("reserved", "reserved"),
        ("internal", "never used"),
        ("external", "between requests"),
    ):
        heights = [100 * getattr(row.backlog, part) for row in rows]
        axes.bar(names, heights, bottom=bottom, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("% of the slots, while requests wait")
    axes.tick_params(axis="x", rotation=40)
    axes.legend(loc="lower right")


def _plot_latency(axes: Any, rows: list[SystemRow]) -> None:
    for row in rows:
        axes.plot(
            [rate.requests_per_second for rate in row.rates],
            [rate.seconds_per_token for rate in row.rates],
            marker=".",
            label=row.system,
        )
    axes.axhline(LATENCY_LIMIT, color="grey", linewidth=0.5)
    axes.set_ylim(0, 5 * LATENCY_LIMIT)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("latency / output tokens, s")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
