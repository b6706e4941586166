"""`flash_attn_with_kvcache` as flash-attn has it, over the ops of this package.

In code that uses the paged mode of flash-attn, replace

    from flash_attn import flash_attn_with_kvcache

by

    from paged_attn.flash_attn import flash_attn_with_kvcache
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from paged_attn import _ops
from paged_attn._checks import check_count
from paged_attn.decode import paged_attention

__all__ = ["flash_attn_with_kvcache"]

_NAME = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes new keys and values to a paged cache and attends over it.

    Args:
        q: [batch, query_len, num_q_heads, head_dim] float16, bfloat16 or float32.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim] as q, or an 8-bit float. Any block
            size. Written in place where k is given.
        v_cache: as k_cache.
        k: [batch, new_len, num_kv_heads, head_dim]: keys to write at positions cache_seqlens[b] on.
            The blocks for them must be in block_table.
        v: as k; both or neither.
        rotary_cos: must be None: rotate q and k before the call.
        rotary_sin: must be None.
        cache_seqlens: [batch] int32 (int64 is converted), or one int for all: tokens in the cache,
            those in k not included. Not changed.
        cache_batch_idx: must be None: it belongs to caches without pages.
        cache_leftpad: must be None.
        block_table: [batch, max_blocks] int32 (int64 is converted). Must be given.
        softmax_scale: factor of q . k; default head_dim ** -0.5.
        causal: whether a query sees no key after its position; queries are the last positions.
        window_size: (left, right): a query sees `left` keys before its own position and `right`
            after; -1 for all. right must be -1 or 0.
        softcap: 0, or cap: a score becomes cap * tanh(score / cap).
        rotary_interleaved: of no effect without rotary_cos.
        alibi_slopes: [num_q_heads] float32, with causal=True or one query: adds
            -slope * (query position - key position).
        num_splits: a hint that is not needed: work is always split, in an order that gives the
            same bits for the same inputs.
        return_softmax_lse: whether to return the log-sum-exp of the scores, too.

    Returns:
        out, of q's shape and dtype, or (out, lse) with lse float32 [batch, num_q_heads, query_len],
        natural logarithm. A row that sees no key is 0, its lse -inf.

    Raises:
        NotImplementedError: an argument of flash-attn's function that is not supported here; the
            message says what to do instead.
        ValueError: an argument is missing, or no such number is possible.
        RuntimeError: a tensor does not fit, or requires a gradient; see `paged_attention` and
            `reshape_and_cache`. On CPU lengths and table entries are checked always, on CUDA in
            debug mode (`paged_attn.set_debug`); outside of it a sequence of negative length gets
            no tokens and sees none, and tokens past the end of its row of block_table are not
            written.

    Nothing is written before one of these. Runs on the current stream and never waits for the
    device.
    """
    if rotary_cos is not None or rotary_sin is not None:
        _refuse("rotary_cos", "rotate q and k before")
    if cache_batch_idx is not None:
        _refuse("cache_batch_idx", "choose rows of block_table instead")
    if cache_leftpad is not None:
        _refuse("cache_leftpad", "leave padding out of the cache")
    if block_table is None:
        _refuse("block_table=None", "the cache must be paged")
    if cache_seqlens is None:
        raise ValueError(f"{_NAME}: cache_seqlens must be given, got None")
    if (k is None) != (v is None):
        raise ValueError(f"{_NAME}: k and v must both be given, or neither")
    if q.dim() != 4:
        raise ValueError(
            f"{_NAME}: q must be [batch, query_len, num_q_heads, head_dim], got {tuple(q.shape)}"
        )
    if softcap < 0:
        raise ValueError(f"{_NAME}: softcap must be at least 0, got {softcap}")
    num_seqs, query_len = q.shape[:2]
    causal, sliding_window = _mask(causal, window_size, query_len)
    if alibi_slopes is not None:
        if alibi_slopes.dim() != 1:
            _refuse("alibi_slopes of a batch", "give one slope a head")
        if not causal and query_len > 1:
            _refuse("alibi_slopes without causal", "pass causal=True")
    if not isinstance(cache_seqlens, Tensor):
        length = check_count(f"{_NAME}: cache_seqlens, unless a tensor,", cache_seqlens, 0)
        cache_seqlens = torch.full((num_seqs,), length, dtype=torch.int32, device=q.device)
    if k is None or v is None:
        result = paged_attention(
            q,
            k_cache,
            v_cache,
            block_table,
            cache_seqlens,
            scale=softmax_scale,
            causal=causal,
            sliding_window=sliding_window,
            softcap=softcap or None,
            alibi_slopes=alibi_slopes,
            return_lse=return_softmax_lse,
        )
        return (result[0], _by_head(result[1])) if isinstance(result, tuple) else result
    if torch.is_grad_enabled():
        _ops.refuse_gradients(
            _NAME,
            "q k_cache v_cache k v alibi_slopes",
            (q, k_cache, v_cache, k, v, alibi_slopes),
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = None
    if return_softmax_lse:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    _ops.lib.flash_attn_with_kvcache(
        out,
        lse,
        q,
        k,
        v,
        k_cache,
        v_cache,
        block_table,
        cache_seqlens,
        softmax_scale,
        causal,
        sliding_window,
        softcap or None,
        alibi_slopes,
    )
    return out if lse is None else (out, _by_head(lse))


def _by_head(lse: Tensor) -> Tensor:
    """[batch, query_len, heads] as flash-attn has it."""
    return lse.transpose(1, 2).contiguous()


def _refuse(what: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{_NAME}: {what} is not supported: {instead}")


def _mask(causal: bool, window_size: tuple[int, int], query_len: int) -> tuple[bool, int | None]:
    """Causal and sliding_window of paged_attention."""
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(
            f"{_NAME}: window_size must be -1 or more on both sides, got {window_size}"
        )
    # The last position sees no later key in any case.
    if right > 0 and query_len > 1 and not causal:
        _refuse(f"window_size={window_size}", "right must be -1 or 0")
    return causal or (right == 0 and query_len > 1), None if left == -1 else left + 1
