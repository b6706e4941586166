"""The device-side plan: every token of every row once, and CTAs that get equal shares."""

from __future__ import annotations

from dataclasses import dataclass

import emulator
import numpy as np
import predict
import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import Case, attend, build
from support import same_bits

from paged_attn import plan_decode

pytestmark = pytest.mark.backends("emulator")
OVERHEAD = 40  # tokens that a row tile costs beside its keys: csrc/cuda/decode.cpp
STEP = 16


@dataclass(frozen=True)
class Shape:
    """What a plan is made for."""

    num_kv_heads: int
    group: int
    query_len: int = 1
    sliding_window: int | None = None


def make_plan(backend: Backend, lens: list[int], shape: Shape, sms: int) -> tuple[np.ndarray, int]:
    """Returns the cuts [num_ctas + 1, 5] and the number of CTAs."""
    hooks = backend.name == "hooks"
    emulator.configure(sms=sms, hooks=hooks)
    try:
        plan = plan_decode(
            backend.place(torch.tensor(lens, dtype=torch.int32)),
            num_q_heads=shape.num_kv_heads * shape.group,
            num_kv_heads=shape.num_kv_heads,
            head_dim=128,
            query_len=shape.query_len,
            sliding_window=shape.sliding_window,
        )
    finally:
        emulator.configure(sms=4, hooks=hooks)
    assert plan.tensor is not None
    num_ctas = min(1023, (1 if tile_rows(shape) > 16 else 3) * sms)  # of 75 KiB, in 228
    words = plan.tensor.cpu().numpy()
    cuts = words[: 5 * (num_ctas + 1)].reshape(-1, 5)
    assert not words[5 * (num_ctas + 1) :][:num_ctas].any(), "semaphores start at 0"
    return cuts, num_ctas


def tile_rows(shape: Shape) -> int:
    """Query rows of a row tile."""
    rows = shape.query_len * shape.group
    return 8 if rows <= 8 else 16 if rows <= 16 else 128


def row_tokens(lens: list[int], shape: Shape) -> np.ndarray:
    """Visible tokens of each row tile, counted from a multiple of STEP."""
    rows = tile_rows(shape)
    tiles = []
    for length in lens:
        for first in range(0, shape.query_len * shape.group, rows):
            last = min(first + rows, shape.query_len * shape.group) - 1
            positions = [length - shape.query_len + row // shape.group for row in (first, last)]
            window = shape.sliding_window
            begin = max(0, positions[0] + 1 - window) if window else 0
            end = max(0, positions[1] + 1)
            tiles.append(max(0, end - begin // STEP * STEP) if end > begin else 0)
    return np.array(tiles, dtype=np.int64)


def check_coverage(cuts: np.ndarray, tokens: np.ndarray, heads: int) -> np.ndarray:
    """Every row's tokens once and in order; returns each CTA's load."""
    line = np.repeat(tokens, heads)  # heads fastest
    place = cuts[:, 0].astype(np.int64) * heads + cuts[:, 1]
    assert tuple(cuts[0, :3]) == (0, 0, 0)
    assert tuple(cuts[-1, :3]) == (len(tokens), 0, 0)
    order = place * (1 << 32) + cuts[:, 2]
    assert (np.diff(order) >= 0).all(), "cuts go forward"
    inside = cuts[:, 2] > 0
    assert (cuts[inside, 2] % STEP == 0).all()
    assert (cuts[inside, 2] < line[place[inside]]).all()
    for row in np.unique(place[inside]):
        mine = np.flatnonzero(inside & (place == row))
        assert len(np.unique(cuts[mine, 2])) == len(mine), "no empty fragment"
        assert (cuts[mine, 3] == mine[0]).all()
        assert (cuts[mine, 4] == len(mine) + 1).all()
    cost = np.where(line > 0, line + OVERHEAD, 16)
    before = np.concatenate([[0], np.cumsum(cost)])
    position = before[place] + np.where(inside, cuts[:, 2] + OVERHEAD, 0)
    loads: np.ndarray = np.diff(position) + OVERHEAD * inside[:-1]
    return loads


def length_laws(rng: np.random.Generator, n: int) -> dict[str, list[int]]:
    """The laws of lengths over which balance is promised."""

    def clipped(values: np.ndarray) -> list[int]:
        return [int(x) for x in np.clip(values, 1, 131072)]

    one_giant = [512] * n
    one_giant[-1] = 131072
    return {
        "equal_1k": [1024] * n,
        "equal_4k": [4096] * n,
        "log_normal_1": clipped(rng.lognormal(7, 1.0, n)),
        "log_normal_1.5": clipped(rng.lognormal(7, 1.5, n)),
        "uniform_8k": clipped(rng.integers(1, 8193, n)),
        "one_giant": one_giant,
        "half_empty": [0 if i % 2 else 2048 for i in range(n)],
        "few_long": [32768 if rng.random() < 0.06 else int(rng.integers(1, 65)) for _ in range(n)],
        "two_kinds": [8000 if rng.random() < 0.1 else 200 for _ in range(n)],
        "window_1k": clipped(rng.lognormal(8, 1.0, n)),
    }


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("num_seqs", [1, 3, 17, 64, 300, 1500])
def test_balance(backend: Backend, num_seqs: int, num_kv_heads: int) -> None:
    rng = np.random.default_rng(num_seqs)
    for name, lens in length_laws(rng, num_seqs).items():
        window = 1024 if name == "window_1k" else None
        shape = Shape(num_kv_heads=num_kv_heads, group=8, sliding_window=window)
        cuts, num_ctas = make_plan(backend, lens, shape, sms=132)
        loads = check_coverage(cuts, row_tokens(lens, shape), num_kv_heads)
        mean = loads.sum() / num_ctas
        limit = 1.06 if mean >= 1024 else 1.16 if mean >= 256 else None
        if limit is not None:
            assert loads.max() <= limit * mean, f"{name}: {loads.max() / mean:.3f} of the mean"


@pytest.mark.parametrize("query_len", [2, 5, 39])
@pytest.mark.parametrize("group", [1, 4, 7, 12])
def test_several_tokens(backend: Backend, query_len: int, group: int) -> None:
    rng = np.random.default_rng(query_len * group)
    for window in (None, 100):
        lens = [int(x) for x in rng.integers(0, 3000, 13)]
        shape = Shape(2, group, query_len, window)
        for sms in (1, 5, 66):
            cuts, _ = make_plan(backend, lens, shape, sms)
            check_coverage(cuts, row_tokens(lens, shape), 2)


@pytest.mark.parametrize("query_len", [1, 5])
def test_a_sequence_in_many_fragments(backend: Backend, query_len: int) -> None:
    """More than one CTA merges at once; twice, for the semaphores must have been reset."""
    hooks = backend.name == "hooks"
    case = Case(
        "fragments",
        seq_lens=(150, 6000, 700),
        query_lens=query_len,
        num_q_heads=3,
        num_kv_heads=1,
        sinks=True,
    )
    inputs = build(case)
    placed = inputs.on(backend)
    emulator.configure(sms=12, hooks=hooks)
    try:
        plan = plan_decode(
            placed.seq_lens, num_q_heads=3, num_kv_heads=1, head_dim=64, query_len=query_len
        )
        assert plan.tensor is not None
        cuts = plan.tensor.cpu().numpy()[: 5 * 37].reshape(-1, 5)
        assert cuts[:, 4].max() > 16
        out, lse = attend(placed)
        again, _ = attend(placed)
    finally:
        emulator.configure(sms=4, hooks=hooks)
    assert_accurate(out, inputs, lse)
    assert same_bits(out, again)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_seqs", "length"),
    [(4, 64, 1024), (4, 64, 8192), (32, 64, 1024), (32, 1, 65536), (4, 1, 65536), (1, 396, 500)],
)
def test_the_prediction_knows_the_rule(
    backend: Backend, num_kv_heads: int, num_seqs: int, length: int
) -> None:
    """bench/predict.py says of equal lengths what the kernel does."""
    cuts, num_ctas = make_plan(backend, [length] * num_seqs, Shape(num_kv_heads, 8), sms=132)
    place = cuts[:, 0].astype(np.int64) * num_kv_heads + cuts[:, 1]
    tokens = place * length + cuts[:, 2]
    inside = cuts[:, 2] > 0
    plan = predict.make_plan(num_seqs * num_kv_heads, length, num_ctas)
    mean = num_seqs * num_kv_heads * length / num_ctas
    assert plan.imbalance == pytest.approx(np.diff(tokens).max() / mean)
    assert plan.fragments == inside.sum() + len(np.unique(place[inside]))
    assert plan.fragments_each == max(1, cuts[:, 4].max())


def test_nothing_to_do(backend: Backend) -> None:
    for lens in ([0], [0, 0, 0], [1], [16, 0, 1]):
        shape = Shape(num_kv_heads=3, group=2)
        cuts, _ = make_plan(backend, lens, shape, sms=4)
        check_coverage(cuts, row_tokens(lens, shape), 3)
