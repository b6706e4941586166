"""Windows, softcap, ALiBi, sinks, scales, several query tokens: numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import Case, attend, build
from support import DTYPE_PAIRS, EIGHT_BIT_DTYPES, attend_one, dtype_id, one_sequence, ramp

import paged_attn

CHUNKS = (None, 3, 4)
chunks = pytest.mark.parametrize("chunk_size", CHUNKS)
dtype_pairs = pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPE_PAIRS, ids=dtype_id)


@chunks
@pytest.mark.parametrize(
    ("window", "mean"), [(4, 7.5), (1, 9.0), (2, 8.5), (10, 4.5), (11, 4.5), (1 << 40, 4.5)]
)
def test_window_counts_the_query(
    backend: Backend, window: int, mean: float, chunk_size: int | None
) -> None:
    out, lse = attend_one(backend, ramp(10), sliding_window=window, chunk_size=chunk_size)
    assert out == pytest.approx([mean])
    assert lse == pytest.approx([math.log(min(window, 10))], abs=1e-6)


@chunks
def test_window_starts_at_each_query(backend: Backend, chunk_size: int | None) -> None:
    out, _ = attend_one(backend, ramp(10), query_len=3, sliding_window=4, chunk_size=chunk_size)
    assert out == pytest.approx([5.5, 6.5, 7.5])


def test_window_edges_on_block_edges(backend: Backend) -> None:
    for length in range(1, 14):
        for window in (3, 4, 5, 8):
            out, _ = attend_one(backend, ramp(length), sliding_window=window)
            visible = range(max(0, length - window), length)
            assert out == pytest.approx([sum(visible) / len(visible)])


def test_window_without_causality_bounds_the_past_alone(backend: Backend) -> None:
    out, _ = attend_one(backend, ramp(6), query_len=3, sliding_window=2, causal=False)
    assert out == pytest.approx([3.5, 4.0, 4.5])  # from token 2, 3 and 4 to the last


@chunks
def test_each_query_sees_up_to_itself(backend: Backend, chunk_size: int | None) -> None:
    out, lse = attend_one(backend, ramp(10), query_len=3, chunk_size=chunk_size)
    assert out == pytest.approx([3.5, 4.0, 4.5])
    assert lse == pytest.approx([math.log(8), math.log(9), math.log(10)], abs=1e-6)
    out, _ = attend_one(backend, ramp(10), query_len=3, causal=False, chunk_size=chunk_size)
    assert out == pytest.approx([4.5, 4.5, 4.5])


def test_no_bound_on_query_tokens(backend: Backend) -> None:
    for query_len in (9, 17, 33):
        out, _ = attend_one(backend, ramp(40), query_len=query_len)
        assert out == pytest.approx([(40 - query_len + i) / 2 for i in range(query_len)])


@chunks
def test_softcap_comes_before_the_mask(backend: Backend, chunk_size: int | None) -> None:
    # Capped after the mask, a hidden key would come back with the logit -2.
    out, _ = attend_one(
        backend,
        [100.0, 100.0, 100.0, 1.0],
        softcap=2.0,
        sliding_window=1,
        chunk_size=chunk_size,
    )
    assert out == pytest.approx([1.0])


def test_softcap_bends_large_logits(backend: Backend) -> None:
    out, lse = attend_one(backend, [0.0, 1.0], logits=[0.0, 6.0], softcap=2.0)
    capped = 2 * math.tanh(3)
    assert out == pytest.approx([0.8798], abs=1e-4)  # without the cap 0.9975
    assert lse == pytest.approx([math.log(1 + math.exp(capped))], rel=1e-5)


def test_softcap_on_enormous_logits(backend: Backend) -> None:
    out, _ = attend_one(backend, [0.0, 1.0], logits=[-3e38, 3e38], softcap=1.0)
    assert out == pytest.approx([1 / (1 + math.exp(-2))], rel=1e-5)


def test_alibi_counts_from_the_query(backend: Backend) -> None:
    slopes = torch.tensor([0.5, 2.0])
    inputs = one_sequence([0.0, 0.0, 1.0], num_q_heads=2, alibi_slopes=slopes)
    out, lse = attend(inputs.on(backend))
    for head, slope in enumerate(slopes.tolist()):
        total = sum(math.exp(-slope * back) for back in range(3))
        assert out[0, head, 0].item() == pytest.approx(1 / total, rel=1e-5)
        assert lse[0, head].item() == pytest.approx(math.log(total), rel=1e-5)


def test_alibi_is_not_capped(backend: Backend) -> None:
    options: dict[str, Any] = {"alibi_slopes": torch.tensor([4.0]), "softcap": 1.0}
    inputs = one_sequence([0.0, 1.0], logits=[0.0, 0.0], **options)
    out, _ = attend(inputs.on(backend))
    assert out[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-4)), rel=1e-5)


def test_alibi_slopes_of_twelve_heads() -> None:
    want = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)]
    assert paged_attn.alibi_slopes(12).tolist() == pytest.approx(want)


@dtype_pairs
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_sink_counts_once(
    backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, softcap: float | None
) -> None:
    # One key with logit 0 and V = 1 beside a sink of 0: dropped 1, counted twice 1/3.
    for chunk_size in (None, 1, 2, 8):
        kwargs: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "softcap": softcap}
        kwargs |= {"sinks": torch.zeros(1), "chunk_size": chunk_size}
        out, lse = attend_one(backend, [1.0], **kwargs)
        assert out == pytest.approx([0.5])
        assert lse == pytest.approx([math.log(2)], rel=1e-6)
        # The live key in the last of eight chunks, the others' ranges empty.
        out, lse = attend_one(backend, [9.0] * 7 + [1.0], sliding_window=1, **kwargs)
        assert out == pytest.approx([0.5])
        assert lse == pytest.approx([math.log(2)], rel=1e-6)
        out, _ = attend_one(backend, [4.0] * 8, **kwargs)
        assert out == pytest.approx([32 / 9], rel=1e-2 if dtype == torch.bfloat16 else 1e-3)


def test_sink_is_neither_scaled_nor_capped(backend: Backend) -> None:
    kwargs: dict[str, Any] = {"scale": 0.1, "softcap": 1.0, "sinks": torch.tensor([2.0])}
    out, lse = attend_one(backend, [1.0], logits=[0.0], **kwargs)
    assert out == pytest.approx([1 / (1 + math.exp(2))], rel=1e-5)
    assert lse == pytest.approx([math.log(1 + math.exp(2))], rel=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_sink_without_a_key(backend: Backend, chunk_size: int | None) -> None:
    out, lse = attend_one(
        backend, [3.0], query_len=2, sinks=torch.tensor([-1.5]), chunk_size=chunk_size
    )
    assert out[0] == 0.0
    assert lse[0] == pytest.approx(-1.5)
    assert out[1] == pytest.approx(3 / (1 + math.exp(-1.5)), rel=1e-5)


def test_sink_of_its_own_for_each_head(backend: Backend) -> None:
    sinks = torch.tensor([0.0, -math.inf, 3.0])
    out, _ = attend(one_sequence([1.0], num_q_heads=3, sinks=sinks).on(backend))
    want = [0.5, 1.0, 1 / (1 + math.exp(3))]
    assert out[0, :, 0].tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
def test_padding_tokens_see_nothing(backend: Backend, sinks: bool) -> None:
    case = Case("padding", query_lens=(2, 1), seq_lens=(5, 3), padding=3, sinks=sinks)
    inputs = build(case)
    want = inputs.options["sinks"] if sinks else torch.full((4,), -math.inf)
    for chunk_size in (None, 2):
        out, lse = attend(inputs.on(backend), chunk_size=chunk_size)
        assert bool((out[3:] == 0).all())
        assert torch.equal(lse[3:].cpu(), want.expand(3, 4))


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_a_score_of_minus_infinity_is_no_key(backend: Backend, chunk_size: int | None) -> None:
    inf = math.inf
    for logits, mean, lse in (
        ([-inf, -inf, -inf], 0.0, -inf),
        ([-inf, 2.0, -inf], 3.0, 2.0),
        ([2.0, -inf, 2.0], 4.0, 2 + math.log(2)),
    ):
        got = attend_one(backend, [1.0, 3.0, 7.0], logits=logits, chunk_size=chunk_size)
        assert got[0] == pytest.approx([mean])
        assert got[1] == pytest.approx([lse])


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("kind", ["float", "tensor", "head", "token"])
@chunks
def test_both_scales_are_applied(
    backend: Backend, kv_dtype: torch.dtype, kind: str, chunk_size: int | None
) -> None:
    # Stored 4 with scale 0.75 is 3; a forgotten scale would give 4. Logits 2 * 0.5 and 4 * 0.5.
    def scale(value: float) -> float | torch.Tensor:
        if kind == "float":
            return value
        if kind == "tensor":
            return torch.tensor(value)
        if kind == "head":
            return torch.tensor([value])
        per_token = torch.full((12, 4, 1), math.nan)
        per_token[7] = value
        return per_token

    kwargs: dict[str, Any] = {"kv_dtype": kv_dtype, "chunk_size": chunk_size}
    kwargs |= {"k_scale": scale(0.5), "v_scale": scale(0.75)}
    out, _ = attend_one(backend, [4.0, 4.0, 4.0, 4.0], **kwargs)
    assert out == pytest.approx([3.0], rel=1e-6)
    out, lse = attend_one(backend, [0.0, 4.0], logits=[2.0, 4.0], **kwargs)
    assert out == pytest.approx([3 * math.e / (1 + math.e)], rel=1e-5)
    assert lse == pytest.approx([math.log(math.e + math.e**2)], rel=1e-5)


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
def test_scales_differ_from_token_to_token(backend: Backend, kv_dtype: torch.dtype) -> None:
    scales = torch.full((12, 4, 1), math.nan)
    for t in range(6):
        scales[(7, 2)[t // 4], t % 4, 0] = 1.5 * (t + 1)
    for chunk_size in CHUNKS:
        out, _ = attend_one(
            backend, [2.0] * 6, kv_dtype=kv_dtype, v_scale=scales, chunk_size=chunk_size
        )
        assert out == pytest.approx([2 * 1.5 * 3.5], rel=1e-6)


@dtype_pairs
@chunks
def test_features_together(
    backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, chunk_size: int | None
) -> None:
    # A feature that one dtype's or one split's kernel forgets shows only in combination.
    case = Case(
        "together",
        dtype=dtype,
        kv_dtype=kv_dtype,
        scale_kind="head" if kv_dtype != dtype else "none",
        seq_lens=(11, 2),
        query_lens=2,
        head_dim=32,
        block_size=4,
        sliding_window=7,
        softcap=2.0,
        alibi=True,
        sinks=True,
        scale=0.5,
    )
    inputs = build(case)
    out, lse = attend(inputs.on(backend), chunk_size=chunk_size)
    assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_scales_differ_over_many_tiles(
    backend: Backend, head_dim: int, kv_dtype: torch.dtype
) -> None:
    # Long enough that every warp sees several tiles, with larger scales in later ones.
    case = Case("many_tiles", seq_lens=(300, 520), kv_dtype=kv_dtype, scale_kind="token")
    inputs = build(case.replace(head_dim=head_dim, num_q_heads=8))
    out, lse = attend(inputs.on(backend))
    assert_accurate(out, inputs, lse)
