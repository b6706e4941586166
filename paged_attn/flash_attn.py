"""`flash_attn_with_kvcache` as flash-attn has it, over the ops of this package.

In code that uses the paged mode of flash-attn, replace

    from flash_attn import flash_attn_with_kvcache

by

    from paged_attn.flash_attn import flash_attn_with_kvcache
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from paged_attn._checks import check_count
from paged_attn.cache import reshape_and_cache
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
        ValueError: k, v, cache_seqlens and block_table do not go together.
        RuntimeError: a tensor does not fit; see `paged_attention` and `reshape_and_cache`.

    Nothing is written before one of these. Runs on the current stream and never waits for the
    device.
    """
    _refuse(rotary_cos is not None or rotary_sin is not None, "rotary_cos", "rotate q and k before")
    _refuse(cache_batch_idx is not None, "cache_batch_idx", "choose rows of block_table instead")
    _refuse(cache_leftpad is not None, "cache_leftpad", "leave padding out of the cache")
    _refuse(block_table is None, "block_table=None", "the cache must be paged")
    if block_table is None or cache_seqlens is None:
        raise ValueError(f"{_NAME}: cache_seqlens must be given, got None")
    if (k is None) != (v is None):
        raise ValueError(f"{_NAME}: k and v must both be given, or neither")
    if q.dim() != 4:
        raise ValueError(
            f"{_NAME}: q must be [batch, query_len, num_q_heads, head_dim], got {tuple(q.shape)}"
        )
    if softcap < 0:
        raise ValueError(f"{_NAME}: softcap must be at least 0, got {softcap}")
    causal, sliding_window = _mask(causal, window_size, q.shape[1])
    if alibi_slopes is not None:
        _refuse(alibi_slopes.dim() != 1, "alibi_slopes of a batch", "give one slope a head")
        _refuse(not causal and q.shape[1] > 1, "alibi_slopes without causal", "pass causal=True")

    seq_lens = _seq_lens(cache_seqlens, q)
    attend = functools.partial(
        paged_attention,
        scale=softmax_scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )
    if k is not None and v is not None:
        slots = _slots(k, q, seq_lens, block_table, k_cache.shape[1])
        seq_lens = seq_lens + k.shape[1]
        _check_lens(seq_lens, block_table, k_cache.shape[1])
        # Attention over no sequences launches nothing, but checks what could be wrong with it.
        attend(q[:0], k_cache, v_cache, block_table[:0], seq_lens[:0])
        reshape_and_cache(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots)
    result = attend(q, k_cache, v_cache, block_table, seq_lens)
    if isinstance(result, tuple):
        out, lse = result
        return out, lse.transpose(1, 2).contiguous()
    return result


def _refuse(bad: bool, what: str, instead: str) -> None:
    if bad:
        raise NotImplementedError(f"{_NAME}: {what} is not supported: {instead}")


def _mask(causal: bool, window_size: tuple[int, int], query_len: int) -> tuple[bool, int | None]:
    """Causal and sliding_window of paged_attention."""
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(
            f"{_NAME}: window_size must be -1 or more on both sides, got {window_size}"
        )
    # The last position sees no later key in any case.
    right = -1 if query_len == 1 else right
    _refuse(right > 0 and not causal, f"window_size={window_size}", "right must be -1 or 0")
    return causal or right == 0, None if left == -1 else left + 1


def _seq_lens(cache_seqlens: int | Tensor, q: Tensor) -> Tensor:
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = check_count(f"{_NAME}: cache_seqlens, unless a tensor,", cache_seqlens, 0)
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_seqlens.shape != (q.shape[0],):
        raise ValueError(
            f"{_NAME}: cache_seqlens must be [{q.shape[0]}] as q has sequences, "
            f"got {tuple(cache_seqlens.shape)}"
        )
    return cache_seqlens


def _slots(k: Tensor, q: Tensor, seq_lens: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Where positions seq_lens[b], seq_lens[b] + 1, ... of each sequence are: int64 [tokens]."""
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"{_NAME}: block_table must be [{q.shape[0]}, max_blocks], "
            f"got {tuple(block_table.shape)}"
        )
    if k.dim() != 4 or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{_NAME}: k must be [{q.shape[0]}, new_len, num_kv_heads, head_dim], "
            f"got {tuple(k.shape)}"
        )
    positions = seq_lens.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    # On a GPU a position past the table cannot be refused without waiting: it is not written.
    number = positions // block_size
    inside = number < block_table.shape[1]
    if block_table.shape[1] == 0:
        return torch.full_like(positions, -1).flatten()
    block = block_table.long().gather(1, number.clamp(0, block_table.shape[1] - 1))
    return torch.where(inside, block * block_size + positions % block_size, -1).flatten()


def _check_lens(seq_lens: Tensor, block_table: Tensor, block_size: int) -> None:
    """On a CPU, where looking costs nothing."""
    room = block_table.shape[1] * block_size
    if seq_lens.device.type == "cpu" and bool((seq_lens > room).any()):
        raise ValueError(
            f"{_NAME}: cache_seqlens with the new tokens must be at most {room} (the blocks of "
            f"block_table), got {seq_lens.tolist()}"
        )
