"""flash_attn_with_kvcache: the arguments of flash-attn's function, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from torch import Tensor

from paged_attn import reference
from paged_attn.flash_attn import flash_attn_with_kvcache

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 16
TABLE = torch.tensor([[7, 2, 5, 1], [3, 0, 6, 4]], dtype=torch.int32)


def inputs(
    query_len: int = 1, new_len: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """q, k_cache, v_cache, k, v; every slot of the caches is NaN."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    caches = torch.full((2, 8, BLOCK, KV_HEADS, DIM), torch.nan).to(dtype)
    return (
        randn(2, query_len, HEADS, DIM),
        caches[0],
        caches[1],
        randn(2, new_len, KV_HEADS, DIM),
        randn(2, new_len, KV_HEADS, DIM),
    )


def fill(k_cache: Tensor, v_cache: Tensor, lens: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    for row, length in zip(TABLE, lens, strict=True):
        for t in range(length):
            for cache in (k_cache, v_cache):
                cache[row[t // BLOCK], t % BLOCK] = torch.randn(KV_HEADS, DIM, generator=generator)


def call(backend: Backend, *tensors: Tensor, **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
    """The result and the caches, on the CPU."""
    q, k_cache, v_cache, k, v = backend.place_all(tensors)
    placed: dict[str, Any] = {
        name: backend.place(value) if isinstance(value, Tensor) else value
        for name, value in {"block_table": TABLE, **kwargs}.items()
    }
    result = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **placed)
    if isinstance(result, tuple):
        return tuple(part.cpu() for part in result), k_cache.cpu(), v_cache.cpu()
    return result.cpu(), k_cache.cpu(), v_cache.cpu()


@pytest.mark.parametrize(
    ("query_len", "kwargs", "expected"),
    [
        (1, {}, {"causal": False}),
        (3, {"causal": True}, {"causal": True}),
        (3, {}, {"causal": False}),
        (3, {"window_size": (2, 0)}, {"causal": True, "sliding_window": 3}),
        (3, {"causal": True, "window_size": (2, 2)}, {"causal": True, "sliding_window": 3}),
        (1, {"window_size": (4, 4)}, {"sliding_window": 5}),
        (2, {"causal": True, "softmax_scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}),
        (1, {"num_splits": 7}, {"causal": False}),
    ],
)
def test_agrees_with_the_reference(
    backend: Backend, query_len: int, kwargs: dict[str, Any], expected: dict[str, Any]
) -> None:
    q, k_cache, v_cache, k, v = inputs(query_len, new_len=query_len)
    lens = [5, 9]
    fill(k_cache, v_cache, lens)
    seqlens = torch.tensor(lens, dtype=torch.int32)
    (out, lse), new_k, new_v = call(
        backend, q, k_cache, v_cache, k, v, cache_seqlens=seqlens, return_softmax_lse=True, **kwargs
    )
    right, right_lse = reference.paged_attention(
        q, new_k, new_v, TABLE, seqlens + query_len, return_lse=True, **expected
    )
    assert out.shape == q.shape
    assert lse.shape == (2, HEADS, query_len)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_new_tokens_follow_the_table_and_nothing_else_is_written() -> None:
    q, k_cache, v_cache, k, v = inputs(new_len=3)
    fill(k_cache, v_cache, [3, 0])
    before = k_cache.clone()
    flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor([3, 0]), block_table=TABLE
    )
    slots = [31, 8, 9, 12, 13, 14]  # blocks 7 and 2, then block 3
    flat = k_cache.flatten(0, 1)
    assert torch.equal(flat[slots], k.flatten(0, 1))
    others = [slot for slot in range(32) if slot not in slots]
    torch.testing.assert_close(
        flat[others], before.flatten(0, 1)[others], rtol=0, atol=0, equal_nan=True
    )
    assert torch.equal(v_cache.flatten(0, 1)[slots], v.flatten(0, 1))


def test_one_length_for_all_and_no_new_tokens() -> None:
    q, k_cache, v_cache, _, _ = inputs()
    fill(k_cache, v_cache, [6, 6])
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=6, block_table=TABLE)
    right = reference.paged_attention(q, k_cache, v_cache, TABLE, torch.tensor([6, 6]))
    assert isinstance(right, Tensor)
    torch.testing.assert_close(out, right.float(), rtol=1e-5, atol=1e-5)


def test_alibi_has_the_sign_of_flash_attn() -> None:
    q, k_cache, v_cache, _, _ = inputs()
    fill(k_cache, v_cache, [4, 4])
    slopes = torch.full((HEADS,), 50.0)  # the newest key outweighs all others
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=4, block_table=TABLE, alibi_slopes=slopes, causal=True
    )
    assert isinstance(out, Tensor)
    newest = v_cache[TABLE[:, 0].long(), 3].repeat_interleave(HEADS // KV_HEADS, dim=1)
    torch.testing.assert_close(out[:, 0], newest, rtol=1e-4, atol=1e-4)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "rotary": ({"rotary_cos": torch.ones(8, 8)}, "rotate q and k before"),
    "rotary_sin": ({"rotary_sin": torch.ones(8, 8)}, "rotate q and k before"),
    "batch_idx": ({"cache_batch_idx": torch.zeros(2)}, "choose rows of block_table"),
    "leftpad": ({"cache_leftpad": torch.zeros(2)}, "cache_leftpad is not supported"),
    "contiguous": ({"block_table": None}, "the cache must be paged"),
    "right window": ({"window_size": (-1, 2)}, r"window_size=\(-1, 2\) is not supported"),
    "slopes of a batch": ({"alibi_slopes": torch.ones(2, HEADS)}, "one slope a head"),
    "alibi not causal": ({"alibi_slopes": torch.ones(HEADS)}, "pass causal=True"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_said(name: str) -> None:
    kwargs, message = UNSUPPORTED[name]
    refused(NotImplementedError, message, kwargs)


@pytest.mark.parametrize(
    ("message", "kwargs"),
    [
        ("cache_seqlens must be given", {"cache_seqlens": None}),
        ("k and v must both", {"v": None}),
        ("q must be", {"q": torch.ones(2, HEADS, DIM)}),
        ("softcap", {"softcap": -1.0}),
        ("window_size", {"window_size": (-2, 0)}),
        ("cache_seqlens, unless a tensor, must be at least 0", {"cache_seqlens": -1}),
    ],
)
def test_arguments_that_do_not_fit(message: str, kwargs: dict[str, Any]) -> None:
    refused(ValueError, message, kwargs)


@pytest.mark.parametrize(
    ("message", "kwargs"),
    [
        ("alibi_slopes", {"alibi_slopes": torch.ones(HEADS + 1), "causal": True}),
        ("query", {"q": torch.ones(2, 2, HEADS, DIM + 8)}),
        ("v must have the shape of k", {"k": torch.ones(2, 2, KV_HEADS + 1, DIM)}),
        ("k must have key_cache's", dict.fromkeys("kv", torch.ones(2, 2, KV_HEADS + 1, DIM))),
        ("k must be", {"k": torch.ones(3, 2, KV_HEADS, DIM)}),
        ("v must be", {"v": torch.ones(2, 2, DIM)}),
        ("cache_seqlens must be \\[2\\]", {"cache_seqlens": torch.tensor([1])}),
        ("cache_seqlens must be int32", {"cache_seqlens": torch.ones(2)}),
        ("cache_seqlens must be at most 16", {"cache_seqlens": torch.tensor([15, 2])}),
        ("cache_seqlens must not be negative", {"cache_seqlens": torch.tensor([0, -1])}),
        ("cache_seqlens must not be negative", {"cache_seqlens": torch.tensor([0, -4])}),
        ("block_table must be", {"block_table": TABLE[:1]}),
        ("block_tables must name blocks", {"block_table": TABLE + torch.tensor([[0], [99]])}),
        ("block_tables must name blocks", {"block_table": TABLE - torch.tensor([[0], [99]])}),
    ],
)
def test_what_attention_refuses_is_refused_before_the_write(
    message: str, kwargs: dict[str, Any]
) -> None:
    refused(RuntimeError, message, kwargs)


def refused(error: type[Exception], message: str, kwargs: dict[str, Any]) -> None:
    names = ("q", "k_cache", "v_cache", "k", "v")
    call_with: dict[str, Any] = dict(zip(names, inputs(2, new_len=2), strict=True))
    call_with |= {"cache_seqlens": torch.tensor([1, 2]), "block_table": TABLE, **kwargs}
    before = call_with["k_cache"].clone()
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**call_with)
    torch.testing.assert_close(call_with["k_cache"], before, rtol=0, atol=0, equal_nan=True)
