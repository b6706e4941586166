"""What paged_attention and its plan refuse: by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from backends import Backend
from torch import Tensor
from wrong_calls import (
    CU_QUERY_LENS,
    INT8,
    Args,
    Wrong,
    check_refused,
    good,
    name_of,
    place,
    put,
    sparse_rows,
    to,
    with_entry,
)

import paged_attn


def attention(message: str, change: Callable[[Args], Args]) -> Wrong:
    return Wrong("paged_attention", message, change)


WRONG = [
    # Shapes.
    attention(r"query must be \[num_seqs, .*got \(2, 64\)$", put(query=lambda t: t.flatten(1))),
    attention(
        r"query must be \[num_tokens, .*got \(1, 2, 4, 16\)$",
        put(query=lambda t: t[None], out=lambda t: t[None], cu_query_lens=CU_QUERY_LENS),
    ),
    attention(
        r"key_cache must be \[num_blocks, .* head_dim 16 as query, got \(6, 4, 2, 8\)$",
        put(key_cache=lambda t: t[..., :8]),
    ),
    attention(
        r"key_cache must be \[num_blocks, .*got \(6, 4, 32\)$",
        put(key_cache=lambda t: t.flatten(2)),
    ),
    attention(
        r"value_cache must have the shape of key_cache, \(6, 4, 2, 16\), got \(6, 2, 2, 16\)",
        put(value_cache=lambda t: t[:, :2]),
    ),
    attention(
        r"query must have a multiple of key_cache's 2 KV heads, got 3 heads",
        put(query=lambda t: t[:, :3], out=lambda t: t[:, :3]),
    ),
    attention(
        r"block_tables must be \[num_seqs, max_blocks\] with num_seqs 2, got \(1, 2\)",
        put(block_tables=lambda t: t[:1]),
    ),
    attention(
        r"block_tables must be \[num_seqs, max_blocks\].*got \(4,\)",
        put(block_tables=lambda t: t.flatten()),
    ),
    attention(
        r"seq_lens must be \[num_seqs\] with num_seqs 2, got \(3,\)",
        put(seq_lens=torch.ones(3, dtype=torch.int32)),
    ),
    attention(
        r"cu_query_lens must be \[num_seqs \+ 1\], got \(1, 3\)",
        put(cu_query_lens=CU_QUERY_LENS[None]),
    ),
    attention(
        r"block_tables must .*num_seqs 3, got \(2, 2\)",
        put(cu_query_lens=torch.tensor([0, 1, 1, 2])),
    ),
    attention(
        r"out must have the shape of query, \(2, 4, 16\), got \(4, 2, 16\)",
        put(out=lambda t: t.view(4, 2, 16)),
    ),
    attention(
        r"alibi_slopes must be \[num_q_heads\], \(4,\), got \(2,\)",
        put(alibi_slopes=torch.ones(2)),
    ),
    attention(r"sinks must be \[num_q_heads\], \(4,\), got \(4, 1\)", put(sinks=torch.ones(4, 1))),
    attention(
        r"k_scale must be a float, or a tensor of shape \(\), \(2,\) or \(6, 4, 2\), got \(4,\)",
        put(k_scale=torch.ones(4)),
    ),
    attention(r"v_scale must be a float, .* got \(6, 4, 1\)", put(v_scale=torch.ones(6, 4, 1))),
    # Dtypes.
    attention(
        "query must be float16, bfloat16 or float32, got float64", put(query=to(torch.float64))
    ),
    attention(
        "key_cache must have the dtype of query, float16, .*got float32",
        put(key_cache=to(torch.float32), value_cache=to(torch.float32)),
    ),
    attention("key_cache must be float16, .*got uint8", put(key_cache=to(torch.uint8))),
    attention(
        "value_cache must have the dtype of key_cache, int8, got float16",
        put(key_cache=to(torch.int8), k_scale=1.0),
    ),
    attention(
        "block_tables must be int32 or int64, got float32", put(block_tables=to(torch.float32))
    ),
    attention("seq_lens must be int32 or int64, got bool", put(seq_lens=to(torch.bool))),
    attention(
        "cu_query_lens must be int32 or int64, got float32",
        put(cu_query_lens=CU_QUERY_LENS.float()),
    ),
    attention("out must have the dtype of query, float16, got float32", put(out=to(torch.float32))),
    attention(
        "alibi_slopes must be float32, got float16",
        put(alibi_slopes=torch.ones(4, dtype=torch.float16)),
    ),
    attention("sinks must be float32, got float64", put(sinks=torch.ones(4, dtype=torch.float64))),
    attention(
        "k_scale must be float32, got float16",
        put(k_scale=torch.tensor(1.0, dtype=torch.float16)),
    ),
    # Strides.
    attention("query must have stride 1 in its last dimension, got 2", put(query=sparse_rows)),
    attention("key_cache must have stride 1 in its last", put(key_cache=sparse_rows)),
    attention("value_cache must have stride 1 in its last", put(value_cache=sparse_rows)),
    attention("out must have stride 1 in its last", put(out=sparse_rows)),
    attention(
        "out must not overlap itself.* dimension 1",
        put(out=lambda t: t[:, :1].expand(2, 4, 16)),
    ),
    # Numbers.
    attention("scale must be finite in float32, got nan", put(scale=float("nan"))),
    attention("scale must be finite in float32, got inf", put(scale=float("inf"))),
    attention("softcap must be positive and finite.*got 0$", put(softcap=0.0)),
    attention("softcap must be positive and finite.*got -1$", put(softcap=-1.0)),
    attention("softcap must be positive and finite.*got nan", put(softcap=float("nan"))),
    attention("sliding_window must be at least 1.*got 0$", put(sliding_window=0)),
    attention("sliding_window must be at least 1.*got -1$", put(sliding_window=-1)),
    attention("k_scale must be given, as an int8", put(**INT8, v_scale=1.0)),
    attention("v_scale must be given, as an int8", put(**INT8, k_scale=1.0)),
    attention("k_scale must be positive and finite in float32, got 0", put(k_scale=0.0)),
    attention("v_scale must be positive and finite in float32, got -2", put(v_scale=-2.0)),
    attention("v_scale must be positive and finite in float32, got nan", put(v_scale=float("nan"))),
    # Contents.
    attention(
        "seq_lens must not be negative, got -1 for sequence 1",
        put(seq_lens=with_entry((1,), -1)),
    ),
    attention(
        "seq_lens must fit block_tables, .*2 blocks of 4 tokens, got 9 for sequence 0",
        put(seq_lens=with_entry((0,), 9)),
    ),
    attention(
        r"block_tables must name blocks of a pool of 6, got -1 at \(0, 1\)",
        put(block_tables=with_entry((0, 1), -1)),
    ),
    attention(
        r"block_tables must name blocks of a pool of 6, got 6 at \(1, 0\)",
        put(block_tables=with_entry((1, 0), 6)),
    ),
    attention(
        r"block_tables must name .*got 2147483647 at \(1, 1\)",
        put(block_tables=with_entry((1, 1), 2**31 - 1)),
    ),
    attention(
        r"block_tables must name .*got 4294967297 at \(0, 0\)",
        put(block_tables=lambda t: with_entry((0, 0), 2**32 + 1)(t.long())),
    ),
    attention(
        "seq_lens must fit .*got 4294967297 for sequence 0",
        put(seq_lens=lambda t: with_entry((0,), 2**32 + 1)(t.long())),
    ),
    attention("cu_query_lens must start with 0, got 1", put(cu_query_lens=CU_QUERY_LENS + 1)),
    attention(
        "cu_query_lens must never decrease, got 2 then 1 at 2",
        put(cu_query_lens=torch.tensor([0, 2, 1])),
    ),
    attention(
        "cu_query_lens must end within query's 2 tokens, got 3",
        put(cu_query_lens=torch.tensor([0, 1, 3])),
    ),
    attention("k_scale must be positive and finite, got 0 at 0", put(k_scale=torch.tensor(0.0))),
    attention(
        "v_scale must be positive and finite, got nan at 1",
        put(v_scale=torch.tensor([1.0, float("nan")])),
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=name_of)
def test_refused_and_nothing_written(backend: Backend, wrong: Wrong) -> None:
    check_refused(backend, wrong)


@pytest.mark.backends("emulator", "cuda")
def test_without_checks_lengths_stay_within_the_table(backend: Backend) -> None:
    # Trusted, not checked: yet a length beyond the table must not read beyond it.
    args = place(backend, put(seq_lens=with_entry((0,), 9))(good("paged_attention")))
    out = paged_attn.paged_attention(**args)
    assert isinstance(out, Tensor)
    assert bool(out.isfinite().all())


PLAN: Args = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_q_heads": 0}, "num_q_heads must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"num_q_heads": 3}, r"num_q_heads must be a multiple of num_kv_heads \(2\), got 3"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"query_len": 0}, "query_len must be at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"seq_lens": torch.ones(2, 1)}, r"seq_lens must be \[num_seqs\], got \(2, 1\)"),
        ({"cu_query_lens": CU_QUERY_LENS}, "num_query_tokens must be given with cu_query_lens"),
    ],
)
def test_plan_refuses(change: Args, message: str) -> None:
    args: Args = {"seq_lens": torch.ones(2, dtype=torch.int32)} | PLAN | change
    with pytest.raises(ValueError, match=f"^plan_decode: {message}"):
        paged_attn.plan_decode(**args)


@pytest.mark.parametrize(
    "change",
    [
        {"num_q_heads": 8},
        {"num_kv_heads": 1},
        {"head_dim": 8},
        {"query_len": 2},
        {"sliding_window": 3},
        {"causal": False},
        {"cu_query_lens": CU_QUERY_LENS, "num_query_tokens": 2},
    ],
    ids=str,
)
def test_plan_for_another_call_is_refused(backend: Backend, change: Args) -> None:
    args = place(backend, good("paged_attention"))
    plan = paged_attn.plan_decode(args["seq_lens"], **(PLAN | change))
    with pytest.raises(ValueError, match=r"^paged_attention: plan must be made for this call"):
        paged_attn.paged_attention(**args, plan=plan)
    assert bool((args["out"] == 7).all())


def test_plan_for_another_batch_is_refused(backend: Backend) -> None:
    args = place(backend, good("paged_attention"))
    plan = paged_attn.plan_decode(args["seq_lens"][:1], **PLAN)
    with pytest.raises(ValueError, match=r"num_seqs, num_query_tokens.*got one for"):
        paged_attn.paged_attention(**args, plan=plan)
    # Chunks are the same in any batch.
    plan = paged_attn.plan_decode(args["seq_lens"][:1], **PLAN, chunk_size=4)
    paged_attn.paged_attention(**args, plan=plan)
