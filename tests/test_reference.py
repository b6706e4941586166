"""The oracle against values worked out by hand and against PyTorch's own attention in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_attn import alibi_slopes, reference

NAN = float("nan")
INF = float("inf")
DEAD_ID = 2147480000  # a table entry that must not be followed


def paged_attention(*args: Any, **kwargs: Any) -> Any:
    return reference.paged_attention(*args, **kwargs)


def paged(rows: Tensor, block_size: int, blocks: list[int], num_blocks: int) -> Tensor:
    """A pool that holds `rows` [len, num_kv_heads, head_dim] in `blocks` and NaN elsewhere."""
    pool = torch.full((num_blocks, block_size, *rows.shape[1:]), NAN, dtype=rows.dtype)
    for t, row in enumerate(rows):
        pool[blocks[t // block_size], t % block_size] = row
    return pool


def attend_one(
    values: list[float],
    *,
    logits: list[float] | None = None,
    query_len: int = 1,
    ragged: bool = False,
    **kwargs: Any,
) -> tuple[list[float], list[float]]:
    """One sequence, one head of size 1, scale 1, block size 4; logit t is logits[t] or 0."""
    value = torch.tensor(values, dtype=torch.float64)[:, None, None]
    key = torch.zeros_like(value)
    if logits is not None:
        key[:, 0, 0] = torch.tensor(logits, dtype=torch.float64)
    needed = -(-len(values) // 4)
    blocks = [7, 2, 11, 0][:needed]
    table = torch.tensor([[*blocks, DEAD_ID]])
    query = torch.full((1, query_len, 1, 1), 0.0 if logits is None else 1.0, dtype=torch.float64)
    if ragged:
        query = query[0]
        kwargs["cu_query_lens"] = torch.tensor([0, query_len], dtype=torch.int32)
    out, lse = paged_attention(
        query,
        paged(key, 4, blocks, 12),
        paged(value, 4, blocks, 12),
        table,
        torch.tensor([len(values)], dtype=torch.int32),
        scale=1.0,
        return_lse=True,
        **kwargs,
    )
    assert out.dtype == lse.dtype == torch.float64
    assert out.shape == query.shape
    assert lse.shape == query.shape[:-1]
    return out.flatten().tolist(), lse.flatten().tolist()


def ramp(length: int) -> list[float]:
    """V[t] = t: the mean of the visible rows names them."""
    return [float(t) for t in range(length)]


@pytest.mark.parametrize("length", range(1, 14))
def test_zero_query_gives_the_mean_and_log_of_the_count(length: int) -> None:
    out, lse = attend_one(ramp(length))
    assert out == pytest.approx([(length - 1) / 2])
    assert lse == pytest.approx([math.log(length)])


def test_dead_slots_and_entries_are_not_read() -> None:
    out, _ = attend_one([1.0, 2.0, 3.0, 4.0, 5.0])  # the rest of both blocks is NaN
    assert out == pytest.approx([3.0])


def test_softmax_of_two_logits() -> None:
    out, lse = attend_one([1.0, 3.0], logits=[0.0, math.log(3.0)])
    assert out == pytest.approx([(1 * 1 + 3 * 3) / 4])
    assert lse == pytest.approx([math.log(4.0)])


def test_logits_beyond_the_range_of_exp() -> None:
    out, lse = attend_one([1.0, 3.0], logits=[5000.0, 5000.0 + math.log(3.0)])
    assert out == pytest.approx([2.5])
    assert lse == pytest.approx([5000.0 + math.log(4.0)])


@pytest.mark.parametrize("ragged", [False, True])
class TestQueryTokens:
    def test_causal_is_bottom_right_aligned(self, ragged: bool) -> None:
        out, lse = attend_one(ramp(10), query_len=3, ragged=ragged)
        assert out == pytest.approx([3.5, 4.0, 4.5])
        assert lse == pytest.approx([math.log(n) for n in (8, 9, 10)])

    def test_not_causal(self, ragged: bool) -> None:
        out, _ = attend_one(ramp(10), query_len=3, ragged=ragged, causal=False)
        assert out == pytest.approx([4.5] * 3)

    def test_more_queries_than_keys(self, ragged: bool) -> None:
        out, lse = attend_one([5.0, 7.0], query_len=4, ragged=ragged)
        assert out == pytest.approx([0.0, 0.0, 5.0, 6.0])
        assert lse == pytest.approx([-INF, -INF, 0.0, math.log(2)])

    def test_window_is_of_each_row(self, ragged: bool) -> None:
        out, _ = attend_one(ramp(10), query_len=3, ragged=ragged, sliding_window=4)
        assert out == pytest.approx([5.5, 6.5, 7.5])

    def test_window_bounds_the_past_only(self, ragged: bool) -> None:
        out, _ = attend_one(ramp(10), query_len=3, ragged=ragged, sliding_window=4, causal=False)
        # Positions 7, 8, 9 see keys from 4, 5, 6 on.
        assert out == pytest.approx([6.5, 7.0, 7.5])


@pytest.mark.parametrize(
    ("window", "mean"), [(4, 7.5), (1, 9.0), (2, 8.5), (8, 5.5), (10, 4.5), (11, 4.5), (99, 4.5)]
)
def test_window_includes_the_query(window: int, mean: float) -> None:
    assert attend_one(ramp(10), sliding_window=window)[0] == pytest.approx([mean])


def test_softcap_before_the_mask() -> None:
    out, _ = attend_one([1.0, 100.0, 100.0, 100.0], query_len=4, softcap=2.0)
    assert out[0] == pytest.approx(1.0)  # a revived mask of -cap would give 29.59


def test_softcap_of_large_logits() -> None:
    out, _ = attend_one([0.0, 1.0], logits=[0.0, 6.0], softcap=2.0)
    assert out == pytest.approx([1 / (1 + math.exp(-2 * math.tanh(3)))])
    assert out == pytest.approx([0.8798], abs=5e-5)
    out, _ = attend_one([0.0, 1.0], logits=[0.0, 6.0])
    assert out == pytest.approx([0.9975], abs=5e-5)


def test_scale_comes_before_softcap() -> None:
    key = paged(torch.tensor([0.0, 3.0]).reshape(2, 1, 1), 4, [0], 1)
    value = paged(torch.tensor([0.0, 1.0]).reshape(2, 1, 1), 4, [0], 1)
    out = paged_attention(
        torch.ones(1, 1, 1), key, value, torch.zeros(1, 1), torch.tensor([2]), scale=2.0, softcap=2
    )
    assert out.item() == pytest.approx(1 / (1 + math.exp(-2 * math.tanh(3))))


class TestSinks:
    def test_in_the_denominator_alone_and_once(self) -> None:
        out, lse = attend_one([1.0], sinks=torch.zeros(1))
        assert out == pytest.approx([0.5])
        assert lse == pytest.approx([math.log(2)])

    def test_not_capped_and_not_scaled(self) -> None:
        out, _ = attend_one([1.0], sinks=torch.tensor([3.0]), softcap=0.5)
        assert out == pytest.approx([1 / (1 + math.exp(3.0))], rel=1e-6)

    def test_always_visible(self) -> None:
        out, lse = attend_one([5.0], query_len=2, sinks=torch.tensor([0.25]))
        assert out == pytest.approx([0.0, 5 / (1 + math.exp(0.25))])
        assert lse == pytest.approx([0.25, math.log(1 + math.exp(0.25))])

    def test_minus_infinity_is_none(self) -> None:
        out, lse = attend_one([5.0], query_len=2, sinks=torch.tensor([-INF]))
        assert out == pytest.approx([0.0, 5.0])
        assert lse == pytest.approx([-INF, 0.0])


def test_alibi_adds_slope_times_distance() -> None:
    out, lse = attend_one([0.0, 1.0], alibi_slopes=torch.tensor([math.log(3.0)]))
    assert out == pytest.approx([0.75])  # weights 1/3 and 1
    assert lse == pytest.approx([math.log(4 / 3)])
    out, _ = attend_one(
        [0.0, 1.0], query_len=2, causal=False, alibi_slopes=torch.tensor([math.log(3.0)])
    )
    assert out == pytest.approx([0.75, 0.75])  # a key ahead of the query gains


def test_alibi_is_not_capped() -> None:
    out, _ = attend_one([0.0, 1.0], softcap=0.01, alibi_slopes=torch.tensor([math.log(3.0)]))
    assert out == pytest.approx([0.75])


def test_alibi_slopes() -> None:
    powers = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8).tolist() == powers
    between = torch.tensor([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5])
    assert torch.equal(alibi_slopes(12), torch.cat([torch.tensor(powers), between]))
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]
    assert alibi_slopes(16).dtype == torch.float32
    for num_heads in range(1, 70):
        slopes = alibi_slopes(num_heads)
        assert slopes.shape == (num_heads,)
        assert len(set(slopes.tolist())) == num_heads
    with pytest.raises(ValueError, match="num_heads"):
        alibi_slopes(0)


def test_empty_and_padding_rows() -> None:
    value = torch.ones(3, 1, 1)
    pool = paged(value, 4, [1], 2)
    tables = torch.tensor([[DEAD_ID], [1]], dtype=torch.int32)
    lens = torch.tensor([0, 3], dtype=torch.int32)
    out, lse = paged_attention(torch.zeros(2, 1, 1), pool, pool, tables, lens, return_lse=True)
    assert out.flatten().tolist() == [0.0, 1.0]
    assert lse.flatten().tolist() == pytest.approx([-INF, math.log(3)])
    out, lse = paged_attention(
        torch.full((5, 1, 1), NAN),
        pool,
        pool,
        tables,
        lens,
        cu_query_lens=torch.tensor([0, 2, 2], dtype=torch.int32),
        return_lse=True,
    )
    assert out.flatten().tolist() == [0.0] * 5
    assert lse.flatten().tolist() == [-INF] * 5
    none = paged_attention(torch.zeros(0, 1, 1), pool, pool, tables[:0], lens[:0])
    assert none.shape == (0, 1, 1)


@pytest.mark.parametrize("group", [1, 2, 3, 24])
def test_query_heads_read_their_kv_head(group: int) -> None:
    value = torch.tensor([[[0.0], [1.0], [2.0]]])  # one token, V of head h is h
    pool = paged(value, 2, [0], 1)
    out = paged_attention(
        torch.zeros(1, 3 * group, 1), pool, pool, torch.zeros(1, 1), torch.tensor([1])
    )
    assert out.flatten().tolist() == [h // group for h in range(3 * group)]


class TestScales:
    def attend(self, cache: Tensor, k_scale: Any, v_scale: Any) -> list[float]:
        """Two tokens of one KV head, keys and values alike, query 1."""
        out = paged_attention(
            torch.ones(1, 1, 1),
            cache,
            cache,
            torch.zeros(1, 1),
            torch.tensor([2]),
            k_scale=k_scale,
            v_scale=v_scale,
        )
        values: list[float] = out.flatten().tolist()
        return values

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
    def test_all_kinds_of_scale(self, dtype: torch.dtype) -> None:
        cache = torch.tensor([0.0, 4.0, 77.0]).reshape(1, 3, 1, 1).to(dtype)
        right = 3.0 / (1 + math.exp(-2.0))  # k = 0, 2 and v = 0, 3
        assert self.attend(cache, 0.5, 0.75) == pytest.approx([right])
        assert self.attend(cache, torch.tensor(0.5), torch.tensor(0.75)) == pytest.approx([right])
        assert self.attend(cache, torch.tensor([0.5]), torch.tensor([0.75])) == pytest.approx(
            [right]
        )
        per_token = torch.tensor([9.0, 1.0, NAN]).reshape(1, 3, 1)
        per_token[0, 1] = 0.5
        assert self.attend(cache, per_token, per_token * 1.5) == pytest.approx([right])

    def test_per_head(self) -> None:
        pool = torch.tensor([[[[4.0], [4.0]]]])  # one token, two heads
        out = paged_attention(
            torch.zeros(1, 2, 1),
            pool,
            pool,
            torch.zeros(1, 1),
            torch.tensor([1]),
            v_scale=torch.tensor([0.5, 0.25]),
        )
        assert out.flatten().tolist() == [2.0, 1.0]

    def test_fp8_without_scales_means_1_and_int8_is_refused(self) -> None:
        cache = torch.zeros(1, 2, 1, 1)
        assert self.attend(cache.to(torch.float8_e5m2), None, None) == [0.0]
        with pytest.raises(ValueError, match="int8 cache needs"):
            self.attend(cache.to(torch.int8), None, 1.0)
        with pytest.raises(ValueError, match="int8 cache needs"):
            self.attend(cache.to(torch.int8), 1.0, None)


def test_non_finite_inputs_act_as_in_softmax_where_visible() -> None:
    assert math.isnan(attend_one([1.0, NAN, 1.0])[0][0])
    assert attend_one([1.0, INF, 1.0])[0] == [INF]
    assert math.isnan(attend_one([1.0, -INF, INF])[0][0])
    out, lse = attend_one([1.0, 2.0], logits=[NAN, 0.0])
    assert math.isnan(out[0])
    assert math.isnan(lse[0])
    assert attend_one([1.0, 2.0], logits=[-INF, 0.0])[0] == [2.0]
    # The last key is not visible to the first query token.
    out, _ = attend_one([1.0, NAN], query_len=2)
    assert out[0] == 1.0
    assert math.isnan(out[1])
    assert attend_one([NAN, 1.0], sliding_window=1)[0] == [1.0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("query_len", [1, 5])
@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("hnd", [False, True])
def test_agrees_with_pytorch(
    causal: bool, query_len: int, block_size: int, heads: tuple[int, int], hnd: bool
) -> None:
    num_q_heads, num_kv_heads = heads
    lens = [17, 5, 8]
    generator = torch.Generator().manual_seed(query_len * 100 + block_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    max_blocks = -(-max(lens) // block_size)
    num_blocks = 4 * max_blocks
    ids = torch.randperm(num_blocks, generator=generator)[: 3 * max_blocks].reshape(3, -1)
    pools = [
        torch.full((num_blocks, block_size, num_kv_heads, 16), NAN, dtype=torch.float64)
        for _ in range(2)
    ]
    query = normal(3, query_len, num_q_heads, 16)
    expected = torch.empty_like(query)
    for seq, length in enumerate(lens):
        rows = normal(2, length, num_kv_heads, 16)
        for t in range(length):
            for pool, row in zip(pools, rows, strict=True):
                pool[ids[seq, t // block_size], t % block_size] = row[t]
        key, value = rows.transpose(1, 2)
        visible = torch.ones(query_len, length, dtype=torch.bool)
        if causal:
            visible = visible.tril(length - query_len)
        expected[seq] = scaled_dot_product_attention(
            query[seq].transpose(0, 1), key, value, attn_mask=visible, enable_gqa=True
        ).transpose(0, 1)
        ids[seq, -(-length // block_size) :] = DEAD_ID
    if hnd:
        pools = [pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in pools]
    got = paged_attention(query, *pools, ids, torch.tensor(lens), causal=causal)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    ragged = paged_attention(
        query.flatten(0, 1),
        *pools,
        ids,
        torch.tensor(lens),
        cu_query_lens=torch.arange(4) * query_len,
        causal=causal,
    )
    assert torch.equal(ragged.reshape(query.shape), got)


def test_shapes_that_do_not_fit() -> None:
    pool = torch.zeros(2, 4, 2, 8)
    query = torch.zeros(1, 2, 8)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3])
    cases: list[tuple[str, tuple[Tensor, ...], dict[str, Tensor]]] = [
        ("query must be", (query[0], pool, pool, table, lens), {}),
        ("1 sequences, got 2", (torch.zeros(2, 2, 8), pool, pool, table, lens), {}),
        ("head_dim 8", (torch.zeros(1, 2, 16), pool, pool, table, lens), {}),
        ("multiple of 2 heads", (torch.zeros(1, 3, 8), pool, pool, table, lens), {}),
        ("value_cache", (query, pool, pool[:1], table, lens), {}),
        ("block_tables must be", (query, pool, pool, table[0], lens), {}),
        ("needs 2 block table entries, got 1", (query, pool, pool, table, lens + 2), {}),
        (r"ids in \[0, 2\)", (query, pool, pool, table + 2, lens), {}),
        (r"ids in \[0, 2\)", (query, pool, pool, table - 1, lens), {}),
        (
            r"cu_query_lens must be \[2\]",
            (query, pool, pool, table, lens),
            {"cu_query_lens": torch.tensor([0])},
        ),
    ]
    for message, args, kwargs in cases:
        with pytest.raises(ValueError, match=message):
            paged_attention(*args, **kwargs)
