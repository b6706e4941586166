"""The GPU report, run small on the CPU backend; and its byte model by hand."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import correctness
import gpu_report
import pytest
import report
import torch
import workload
from bytes import DecodeShape, traffic
from grid import CPU_GRID, GPU_GRID
from peers import ADAPTERS
from timing import time_device, time_host

CPU = torch.device("cpu")
H200_L2 = 50 << 20
SHAPE = DecodeShape(8, 2, 3, 100, torch.int8, 16, head_dim=64, dtype=torch.float16)


@dataclasses.dataclass(frozen=True)
class Written:
    """What a run left in its folder."""

    status: int
    folder: Path
    data: dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("bench") / "out"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that a busy machine does not make it slow
    try:
        status = gpu_report.main(["--device", "cpu", "--minutes", "0.15", "--out", str(folder)])
    finally:
        torch.set_num_threads(threads)
    return Written(status, folder, json.loads((folder / "report.json").read_text()))


def test_every_section_is_there(written: Written) -> None:
    data = written.data
    assert written.status == 0
    assert data["problems"] == []
    assert data["machine"]["torch"] == torch.__version__
    assert len(data["checks"]) >= 39
    assert [check["name"] for check in data["checks"] if check["problem"]] == []
    assert [row["kernel"] for row in data["copies"]] == ["torch copy_"]
    assert len(data["reads"]) == 3
    assert len(data["decode"]) + len(data["skipped"]) == len(CPU_GRID.shapes())
    assert data["decode"], "no decode row was measured"
    whats = [row["what"] for row in data["overheads"]]
    for what in ("plan_decode", "paged_attention with a plan", "reshape_and_cache"):
        assert any(row.startswith(what) for row in whats)


def test_numbers_are_plausible(written: Written) -> None:
    data = written.data
    read = max(row["gb_per_s"] for row in data["reads"])
    assert 0.001 < read < 10_000
    for row in data["decode"]:
        timing, num_bytes = row["timing"], row["shape"]["bytes"]
        assert 0 < timing["min_us"] <= timing["median_us"] <= timing["max_us"]
        moved = (num_bytes["kv"] + num_bytes["rows"]) / timing["median_us"] / 1e3
        assert row["gb_per_s"] == pytest.approx(moved)
        assert row["share"] == pytest.approx(moved / read)
        assert row["num_pools"] >= 3
        assert row["num_pools"] * num_bytes["kv"] > 3 * gpu_report.CPU_L2_BYTES
    for row in data["overheads"]:
        assert 0 < row["timing"]["median_us"] < 1e7


def test_peers_agree_or_say_why_not(written: Written) -> None:
    rows = written.data["peers"]
    assert {row["peer"] for row in rows} == set(ADAPTERS)
    measured = {row["peer"] for row in rows if row["problem"] is None}
    assert {"paged_attn", "SDPA, gathered before", "gather_cache + SDPA"} <= measured
    for row in rows:
        if row["problem"] is None:
            assert row["difference"] < 0.03
        else:
            assert row["timing"] is None


def test_the_table_is_written(written: Written) -> None:
    text = (written.folder / "report.md").read_text()
    count = len(written.data["checks"])
    assert f"{count} of {count} right." in text
    first = written.data["decode"][0]
    row = next(line for line in text.splitlines() if line.startswith("| 4/2 b2 x 64 bfloat16 bs16"))
    assert f" {first['timing']['median_us']:.1f} " in row
    for line in text.splitlines():
        assert line.startswith("|") == line.endswith("|")


def test_plots(written: Written) -> None:
    pytest.importorskip("matplotlib")
    names = {row["shape"]["kv_dtype"] for row in written.data["decode"]}
    for name in names:
        assert (written.folder / f"decode_{name}.png").stat().st_size > 10_000


def test_byte_model_by_hand() -> None:
    moved = traffic(SHAPE)
    assert moved.kv == 3 * 100 * 2 * 64 * 2  # sequences, tokens, heads, one byte each, K and V
    assert moved.rows == 3 * 8 * 64 * 2 * 2  # sequences, heads, two bytes each, query and output
    assert moved.tables == 3 * (7 + 1) * 4  # seven blocks and a length
    assert moved.needed == moved.kv + moved.rows
    assert traffic(dataclasses.replace(SHAPE, block_size=1)).tables == 3 * 101 * 4
    wide = DecodeShape(32, 4, 64, 8192, torch.bfloat16, 16)
    assert traffic(wide).kv == 1 << 30


def test_pools_are_disjoint_and_tables_reach_every_block() -> None:
    l2_bytes = 10_000
    arena = workload.Arena(1 << 20, CPU)
    steps = workload.make_steps(SHAPE, arena, l2_bytes)
    assert len(steps) == workload.num_pools(SHAPE, l2_bytes) == 3
    spans = sorted(
        (pool.data_ptr(), pool.data_ptr() + pool.numel())
        for step in steps
        for pool in (step.key_cache, step.value_cache)
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= workload.arena_bytes(SHAPE, l2_bytes)
    for step in steps:
        assert sorted(step.block_tables.flatten().tolist()) == list(range(21))
        assert step.key_cache.float().std() == pytest.approx(64, rel=0.1)


def test_the_gpu_grid() -> None:
    shapes = GPU_GRID.shapes()
    assert shapes[: len(GPU_GRID.goals)] == list(GPU_GRID.goals)
    assert len(shapes) == len(set(shapes)) == 5 * 4 * 4 * 3 * 3 + 1  # and 2k tokens, a goal
    assert set(GPU_GRID.peers) <= set(shapes)
    for shape in shapes:
        pools = workload.num_pools(shape, H200_L2)
        assert pools >= 3
        assert pools * traffic(shape).kv > 3 * H200_L2


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda out, lse: out[3, 0, 5].mul_(1.1), "inexact"),
        (lambda out, lse: out[1, 0].copy_(out[1, 1]), "inexact"),
        (lambda out, lse: lse[4, 2].add_(0.01), "inexact"),
        (lambda out, lse: out[0, 0, 0].fill_(torch.nan), "not finite"),
        (lambda out, lse: lse[2, 0].fill_(0.0), "LSE of rows that see no key"),
    ],
)
def test_a_wrong_result_is_seen(spoil: Callable[..., object], problem: str) -> None:
    case = correctness.CheckCase("spoilt", seq_lens=(1, 17, 0, 40, 80))
    inputs = correctness.make_inputs(case, case.seq_lens, seed=0)
    out, lse = correctness.attend(case, inputs)
    assert correctness.compare("right", (out, lse), inputs).passed
    out[3, 0, 5] = out[3, 0].abs().max()  # a small one would not show
    spoil(out, lse)
    assert correctness.compare("spoilt", (out, lse), inputs).problem == problem


def test_a_failing_section_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_run: gpu_report.Run) -> None:
        raise RuntimeError("the GPU is gone")

    for section in ("check", "measure_bandwidth", "measure_overheads", "measure_peers"):
        monkeypatch.setattr(gpu_report, section, fail)
    monkeypatch.setattr(gpu_report, "measure_decode", lambda _run, _shapes: None)
    assert gpu_report.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "- correctness: RuntimeError: the GPU is gone" in (tmp_path / "report.md").read_text()
    assert len(json.loads((tmp_path / "report.json").read_text())["problems"]) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        gpu_report.main(["--out", str(tmp_path / "out")])
    assert "cannot measure on CUDA: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_timers_measure() -> None:
    calls = []
    timing = time_device([lambda: calls.append("a"), lambda: calls.append("b")], CPU, 0.001)
    assert timing.samples >= 5
    assert calls[:4] == ["a", "b", "a", "b"]
    assert 0 < timing.min_us <= timing.median_us <= timing.max_us
    assert time_host(lambda: None, CPU).median_us < 1000


def test_without_matplotlib_there_are_no_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert report.plot(report.Results(machine={}), tmp_path) == []
