"""What the other ops refuse: by name, before anything is written."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from torch import Tensor
from wrong_calls import (
    FP8,
    INT8,
    OPS,
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

_, RC, GC, MS, CB, SB = OPS

WRONG = [
    # Cache writes.
    Wrong(
        RC,
        r"key must be \[num_tokens, num_kv_heads, head_dim\], got \(3, 32\)",
        put(key=lambda t: t.flatten(1)),
    ),
    Wrong(
        RC,
        r"value must have the shape of key, \(3, 2, 16\), got \(2, 2, 16\)",
        put(value=lambda t: t[:2]),
    ),
    Wrong(
        RC, "value must have the dtype of key, float16, got bfloat16", put(value=to(torch.bfloat16))
    ),
    Wrong(
        RC,
        "key must be float16, bfloat16 or float32, got int8",
        put(key=to(torch.int8), value=to(torch.int8)),
    ),
    Wrong(RC, "key must have stride 1 in its last", put(key=sparse_rows)),
    Wrong(RC, "value must have stride 1 in its last", put(value=sparse_rows)),
    Wrong(
        RC,
        r"key must have key_cache's 2 KV heads, got \(3, 1, 16\)",
        put(key=lambda t: t[:, :1], value=lambda t: t[:, :1]),
    ),
    Wrong(
        RC,
        "key_cache must be .*head_dim 8 as key, got",
        put(key=lambda t: t[..., :8], value=lambda t: t[..., :8]),
    ),
    Wrong(
        RC,
        "key_cache must have the dtype of key, float16, .*got float32",
        put(key_cache=to(torch.float32), value_cache=to(torch.float32)),
    ),
    Wrong(
        RC, "key_cache must not overlap itself", put(key_cache=lambda t: t[:1].expand(6, 4, 2, 16))
    ),
    Wrong(
        RC,
        r"slot_mapping must be \[n\] with n at most key's 3 tokens, got \(4,\)",
        put(slot_mapping=torch.arange(4)),
    ),
    Wrong(RC, r"slot_mapping must be \[n\].*got \(3, 1\)", put(slot_mapping=lambda t: t[:, None])),
    Wrong(
        RC, "slot_mapping must be int32 or int64, got float32", put(slot_mapping=to(torch.float32))
    ),
    Wrong(
        RC,
        r"slot_mapping must name slots of a pool of 24 .*got 24 at 2",
        put(slot_mapping=with_entry((2,), 24)),
    ),
    Wrong(RC, "k_scale must be given, as an int8", put(**INT8, v_scale=1.0)),
    Wrong(RC, "v_scale must be given, as an int8", put(**INT8, k_scale=1.0)),
    Wrong(RC, "k_scale must be positive and finite in float32, got -1", put(**FP8, k_scale=-1.0)),
    Wrong(
        RC,
        "k_scale must be positive and finite, got inf at 0",
        put(**FP8, k_scale=torch.tensor(torch.inf)),
    ),
    Wrong(
        RC,
        "k_scale must not be one per token, as a float16 cache needs none",
        put(k_scale=torch.ones(6, 4, 2)),
    ),
    Wrong(
        RC,
        "v_scale must not overlap itself",
        put(**FP8, v_scale=torch.ones(1, 1, 1).expand(6, 4, 2)),
    ),
    # Gathering.
    Wrong(
        GC,
        r"key_cache must be \[num_blocks, .*got \(6, 4, 32\)",
        put(key_cache=lambda t: t.flatten(2), value_cache=lambda t: t.flatten(2)),
    ),
    Wrong(
        GC,
        "key_cache must be float16, bfloat16, float32, float8_e4m3fn.*got float64",
        put(key_cache=to(torch.float64), value_cache=to(torch.float64)),
    ),
    Wrong(
        GC,
        "dtype must be float16, bfloat16 or float32, got float8_e4m3fn",
        put(dtype=torch.float8_e4m3fn),
    ),
    Wrong(GC, "value_cache must have the shape of key_cache", put(value_cache=lambda t: t[:5])),
    Wrong(
        GC, r"block_tables must be .*num_seqs 2, got \(1, 2\)", put(block_tables=lambda t: t[:1])
    ),
    Wrong(GC, r"seq_lens must be \[num_seqs\], got \(2, 1\)", put(seq_lens=lambda t: t[:, None])),
    Wrong(GC, "seq_lens must be int32 or int64, got float32", put(seq_lens=to(torch.float32))),
    Wrong(GC, "total_tokens must be at least .*13.*got 12", put(total_tokens=12)),
    Wrong(GC, "total_tokens must .*got -1", put(total_tokens=-1)),
    Wrong(GC, "seq_lens must fit block_tables", put(seq_lens=with_entry((0,), 9))),
    Wrong(
        GC,
        "seq_lens must not be negative, got -3 for sequence 0",
        put(seq_lens=with_entry((0,), -3), total_tokens=None),
    ),
    Wrong(
        GC,
        "seq_lens must not be negative, got -30 for sequence 0",
        put(seq_lens=with_entry((0,), -30), total_tokens=None),
    ),
    Wrong(GC, "block_tables must name blocks", put(block_tables=with_entry((0, 0), 6))),
    Wrong(GC, "v_scale must be given, as an int8", put(**INT8, k_scale=1.0)),
    # Merging.
    Wrong(
        MS, "out_a must be float16, bfloat16 or float32, got float64", put(out_a=to(torch.float64))
    ),
    Wrong(
        MS,
        r"out_b must have the shape of out_a, \(3, 4, 16\), got \(3, 4, 8\)",
        put(out_b=lambda t: t[..., :8]),
    ),
    Wrong(
        MS, "out_b must have the dtype of out_a, float32, got float16", put(out_b=to(torch.float16))
    ),
    Wrong(
        MS,
        r"lse_a must have the shape of out_a without head_dim.*got \(3,\)",
        put(lse_a=lambda t: t[:, 0]),
    ),
    Wrong(MS, "lse_b must have the shape of out_a without", put(lse_b=lambda t: t[:2])),
    Wrong(MS, "lse_b must be float32, got float64", put(lse_b=to(torch.float64))),
    # Copying.
    Wrong(
        CB,
        "value_caches must have as many layers as key_caches, 2, got 1",
        put(value_caches=lambda pools: pools[:1]),
    ),
    Wrong(
        CB,
        r"value_caches must have one shape, \(6, 4, 2, 16\), got \(5, 4, 2, 16\)",
        put(value_caches=lambda pools: [pools[0], pools[1][:5]]),
    ),
    Wrong(
        CB,
        "key_caches must have one dtype, float32, got float16",
        put(key_caches=lambda pools: [pools[0], pools[1].half()]),
    ),
    Wrong(
        CB,
        r"key_caches must be \[num_blocks, .*got \(6, 4, 32\)",
        put(key_caches=lambda pools: [pool.flatten(2) for pool in pools]),
    ),
    Wrong(
        CB,
        "key_caches must have stride 1",
        put(key_caches=lambda pools: [pools[0], sparse_rows(pools[1])]),
    ),
    Wrong(
        CB,
        "value_caches must not overlap itself",
        put(value_caches=lambda pools: [pools[0], pools[1][:1].expand(6, 4, 2, 16)]),
    ),
    Wrong(
        CB, r"block_mapping must be \[n, 2\].*got \(4,\)", put(block_mapping=lambda t: t.flatten())
    ),
    Wrong(
        CB,
        "block_mapping must be int32 or int64, got float32",
        put(block_mapping=to(torch.float32)),
    ),
    Wrong(
        CB,
        "block_mapping must name sources of a pool of 6 blocks, got -1 in pair 1",
        put(block_mapping=with_entry((1, 0), -1)),
    ),
    Wrong(
        CB,
        "block_mapping must name destinations .*6 blocks, got 6 in pair 0",
        put(block_mapping=with_entry((0, 1), 6)),
    ),
    Wrong(
        SB,
        r"dst must have blocks of src's shape, \(6, 4, 2, 16\), got \(5, 4, 1, 16\)",
        put(dst=lambda t: t[:, :, :1]),
    ),
    Wrong(SB, "dst must have the dtype of src, float32, got float16", put(dst=to(torch.float16))),
    Wrong(SB, "dst must not overlap itself", put(dst=lambda t: t[:1].expand(5, 4, 2, 16))),
    Wrong(
        SB,
        r"block_mapping must be \[n, 2\].*got \(1, 3\)",
        put(block_mapping=torch.ones(1, 3, dtype=torch.int64)),
    ),
    Wrong(
        SB,
        "block_mapping must name destinations .*5 blocks, got 5 in pair 0",
        put(block_mapping=with_entry((0, 1), 5)),
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=name_of)
def test_refused_and_nothing_written(backend: Backend, wrong: Wrong) -> None:
    check_refused(backend, wrong)


@pytest.mark.parametrize("op", OPS)
def test_good_arguments_are_taken(backend: Backend, op: str) -> None:
    with backend.checks():
        OPS[op](**place(backend, good(op)))


@pytest.mark.backends("cpu", "cuda")  # the emulator's ops have no fakes
@pytest.mark.parametrize("op", OPS)
def test_tensors_of_another_device_are_refused(backend: Backend, op: str) -> None:
    # Whatever argument it is, a tensor from elsewhere must not silently make the call do nothing.
    names = [name for name, value in good(op).items() if isinstance(value, (Tensor, list))]
    for name in names:
        args = place(backend, good(op))
        old = args[name]
        args[name] = [t.to("meta") for t in old] if isinstance(old, list) else old.to("meta")
        with pytest.raises((RuntimeError, ValueError), match=rf"^{op}: \w+ must be "):
            OPS[op](**args)


def test_float_scale_per_token_for_int8_is_given_for_both(backend: Backend) -> None:
    # A scale a token is as good as a float: nothing more is asked for.
    args = place(backend, put(**INT8)(good("reshape_and_cache")))
    scales = {name: backend.place(torch.zeros(6, 4, 2)) for name in ("k_scale", "v_scale")}
    paged_attn.reshape_and_cache(**args, **scales)
    assert scales["k_scale"].count_nonzero().item() == 3 * 2
