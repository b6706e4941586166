"""merge_states: the attention of two sets of keys from the attention of each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import Case, Inputs, attend, build
from support import FLOAT_DTYPES, attend_one, dtype_id, same_bits
from torch import Tensor

from paged_attn import merge_states

INF = math.inf
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)


def state(
    backend: Backend, rows: list[float], lse: list[float], dtype: Any
) -> tuple[Tensor, Tensor]:
    """One row of eight equal numbers for each entry."""
    out = torch.tensor(rows)[:, None].expand(-1, 8).to(dtype).contiguous()
    return backend.place_pair([out, torch.tensor(lse)])


def halves(inputs: Inputs, cut: int) -> tuple[Inputs, Inputs]:
    """One sequence's call, cut after block `cut`; what both see together is what it saw."""
    block_size = inputs.key_cache.shape[1]
    first = inputs.replace(seq_lens=torch.full_like(inputs.seq_lens, cut * block_size))
    second = inputs.replace(
        block_tables=inputs.block_tables[:, cut:], seq_lens=inputs.seq_lens - cut * block_size
    )
    return first, second


@dtypes
@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_two_halves_make_the_whole(backend: Backend, dtype: torch.dtype, cut: int) -> None:
    case = Case("halves", seq_lens=(36,), block_size=4, dtype=dtype, softcap=5.0)
    inputs = build(case)
    first, second = halves(inputs, cut)
    out, lse = merge_states(*attend(first.on(backend)), *attend(second.on(backend)))
    if dtype == torch.float32:
        assert_accurate(out, inputs, lse)
    else:  # both halves were rounded before
        whole, whole_lse = attend(inputs.on(backend))
        tolerance = 3 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, whole, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_sum_of_many_parts(backend: Backend) -> None:
    inputs = build(Case("parts", seq_lens=(36,), block_size=4, dtype=torch.float32))
    merged: tuple[Tensor, Tensor] | None = None
    for block in range(9):
        part = inputs.replace(
            block_tables=inputs.block_tables[:, block:],
            seq_lens=torch.full_like(inputs.seq_lens, 4),
        )
        state = attend(part.on(backend))
        merged = state if merged is None else merge_states(*merged, *state)
    assert merged is not None
    assert_accurate(merged[0], inputs, merged[1])


@dtypes
def test_lse_is_a_natural_logarithm(backend: Backend, dtype: torch.dtype) -> None:
    # One key with V = 0, three with V = 1; with a base of 2 it would be 0.83.
    parts = []
    for values in ([0.0], [1.0, 1.0, 1.0]):
        out, lse = attend_one(backend, values, dtype=dtype)
        assert lse == pytest.approx([math.log(len(values))])
        parts.append(state(backend, out, lse, dtype))
    merged, lse_of_all = merge_states(*parts[0], *parts[1])
    assert merged.flatten().tolist() == pytest.approx([0.75] * 8)
    assert lse_of_all.tolist() == pytest.approx([math.log(4)])


@dtypes
def test_two_empty_states(backend: Backend, dtype: torch.dtype) -> None:
    # -inf minus -inf is NaN; and what an empty side's out holds must not matter.
    for junk in (0.0, math.nan, INF):
        empty = state(backend, [junk, junk], [-INF, -INF], dtype)
        out, lse = merge_states(*empty, *empty)
        assert bool((out == 0).all())
        assert bool((lse == -INF).all())


@dtypes
def test_an_empty_state_changes_nothing(backend: Backend, dtype: torch.dtype) -> None:
    for junk in (0.0, math.nan, -INF):
        empty = state(backend, [junk] * 3, [-INF] * 3, dtype)
        full = state(backend, [0.1, -7.3, 1e-5], [0.3, -80.0, 77.0], dtype)
        for merged in (merge_states(*empty, *full), merge_states(*full, *empty)):
            assert same_bits(merged[0], full[0])
            assert same_bits(merged[1], full[1])


def test_rows_are_merged_one_by_one(backend: Backend) -> None:
    a = state(backend, [1.0, 2.0, 3.0], [-INF, 0.0, 1.0], torch.float32)
    b = state(backend, [5.0, 6.0, 7.0], [2.0, -INF, 1.0], torch.float32)
    out, lse = merge_states(*a, *b)
    assert out[:, 0].tolist() == pytest.approx([5.0, 2.0, 5.0])
    assert lse.tolist() == pytest.approx([2.0, 0.0, 1 + math.log(2)])


def test_lse_far_apart_and_large(backend: Backend) -> None:
    a = state(backend, [1.0, 1.0, 1.0], [1e4, -1e4, 3e38], torch.float32)
    b = state(backend, [3.0, 3.0, 3.0], [-1e4, 1e4, 3e38], torch.float32)
    out, lse = merge_states(*a, *b)
    assert out[:, 0].tolist() == pytest.approx([1.0, 3.0, 2.0])
    assert lse.tolist() == pytest.approx([1e4, 1e4, 3e38])


def test_sinks_go_with_one_part(backend: Backend) -> None:
    # A sink in the first part counts once in the whole.
    inputs = build(
        Case("sink_parts", seq_lens=(20,), block_size=4, dtype=torch.float32, sinks=True)
    )
    first, second = halves(inputs, 2)
    without = second.replace(options=second.options | {"sinks": None})
    out, lse = merge_states(*attend(first.on(backend)), *attend(without.on(backend)))
    assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (5, 8), (8,), (2, 3, 4, 24), (3, 5)])
def test_any_shape(backend: Backend, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape[:-1] if i % 2 else shape, generator=generator) for i in range(4)]
    out, lse = merge_states(*backend.place_all(tensors))
    a, lse_a, b, lse_b = (tensor.double() for tensor in tensors)
    want = torch.logaddexp(lse_a, lse_b)
    weighted = a * (lse_a - want).exp()[..., None] + b * (lse_b - want).exp()[..., None]
    torch.testing.assert_close(out.cpu().double(), weighted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.cpu().double(), want, rtol=1e-5, atol=1e-6)


def test_strided_states(backend: Backend) -> None:
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(2, 3, 4, 16, generator=generator)
    lse = torch.randn(2, 4, 3, generator=generator).transpose(1, 2)
    dense = merge_states(
        *(
            backend.place(t.contiguous())
            for t in (wide[0, ..., :8], lse[0], wide[1, ..., 8:], lse[1])
        )
    )
    a, b, placed_lse = backend.place_all([wide[0, ..., :8], wide[1, ..., 8:], lse])
    spread = merge_states(a, placed_lse[0], b, placed_lse[1])
    assert all(map(same_bits, spread, dense))
