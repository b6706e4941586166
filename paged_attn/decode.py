"""Attention of the newest tokens over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paged_attn import _ops
from paged_attn._checks import check_count
from paged_attn._ops import Scale, split_scale

# int32 words of a plan, for any device and any batch: kPlanWords of csrc/backend.h.
_PLAN_WORDS = 8192
# kAutoChunk of csrc/backend.h.
_AUTO_CHUNK = -1
# Of plan_decode: tokens, by the sequence's length, or cut freely.
ChunkSize = int | Literal["auto"] | None


@dataclass(frozen=True)
class DecodePlan:
    """How a step's work is cut into equal pieces: made by `plan_decode`, used by all layers.

    Attributes:
        num_seqs: sequences it was made for.
        num_query_tokens: query tokens it was made for, of all sequences; 0 where not known.
        num_q_heads: query heads it was made for.
        num_kv_heads: KV heads it was made for.
        head_dim: head dimension it was made for.
        query_len: query tokens of a sequence; 0 where lengths differ.
        causal: whether queries see no later key.
        sliding_window: keys that a query sees, or None for all.
        chunk_size: tokens in one chunk of a sequence, "auto" where its length decides, or None
            where work is cut freely.
        kv_dtype: dtype of the pools it was made for, or None for any of 16 bits.
        tensor: the plan on the device; None with a chunk_size, which leaves nothing to plan.
    """

    num_seqs: int
    num_query_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    query_len: int
    causal: bool
    sliding_window: int | None
    chunk_size: ChunkSize
    kv_dtype: torch.dtype | None
    tensor: Tensor | None


def plan_decode(
    seq_lens: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query_len: int = 1,
    cu_query_lens: Tensor | None = None,
    num_query_tokens: int | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    chunk_size: ChunkSize = None,
    kv_dtype: torch.dtype | None = None,
) -> DecodePlan:
    """Plans the decode kernel's work for one step, for all layers of one shape and window.

    One small kernel turns the lengths into a cut line: the CTAs of the decode kernel get equal
    numbers of tokens, wherever sequences begin and end. Without a plan `paged_attention` makes its
    own at each call. On a CPU there is nothing to plan.

    Args:
        seq_lens: [num_seqs] int32 (int64 is converted), lengths in tokens, those of this step
            included. Read on the device only.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: head dimension.
        query_len: query tokens of each sequence.
        cu_query_lens: [num_seqs + 1] int32 (int64 is converted), where the query is ragged;
            query_len is ignored then.
        num_query_tokens: tokens of the ragged query, padding included; not needed with a
            chunk_size.
        causal: as for `paged_attention`.
        sliding_window: as for `paged_attention`.
        chunk_size: cut every sequence at multiples of this many tokens instead. A sequence's result
            then has the same bits in any batch, ragged or not, with its query tokens. "auto": of
            512 tokens, or the power of two beyond that makes at most 64 chunks of the sequence. It
            costs partial results in memory, the balance of the work and, ragged, a launch more.
        kv_dtype: dtype of the pools; None for 16 bits. A plan can be used with other pools, but
            fits these: it knows how many CTAs are resident.

    Returns:
        The plan to give to `paged_attention`. It does not hold the tensors. Of two calls on
        different streams each needs its own.

    Raises:
        TypeError, ValueError: a number is no int, or not positive, num_q_heads is no multiple of
            num_kv_heads, or cu_query_lens comes without num_query_tokens.
        RuntimeError: seq_lens or cu_query_lens does not fit; the message names it.

    Runs on the current stream of seq_lens' device and never waits for it. Captured in a CUDA graph,
    it plans anew at each replay.
    """
    counts: dict[str, Any] = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "query_len": query_len,
        "sliding_window": sliding_window,
        "chunk_size": None if chunk_size == "auto" else chunk_size,
    }
    for name, count in counts.items():
        if count is not None or name not in ("sliding_window", "chunk_size"):
            check_count(f"plan_decode: {name}", count, 1)
    if num_q_heads % num_kv_heads != 0:
        raise ValueError(
            f"plan_decode: num_q_heads must be a multiple of num_kv_heads ({num_kv_heads}), "
            f"got {num_q_heads}"
        )
    if seq_lens.dim() != 1:
        raise ValueError(f"plan_decode: seq_lens must be [num_seqs], got {tuple(seq_lens.shape)}")
    if cu_query_lens is not None and num_query_tokens is None and chunk_size is None:
        raise ValueError("plan_decode: num_query_tokens must be given with cu_query_lens")
    tensor = None
    if chunk_size is None:
        tensor = torch.empty(_PLAN_WORDS, dtype=torch.int32, device=seq_lens.device)
        _ops.lib.plan_decode(
            tensor,
            seq_lens,
            cu_query_lens,
            num_query_tokens or 0,
            num_q_heads,
            num_kv_heads,
            head_dim,
            query_len,
            causal,
            sliding_window,
            _kv_bytes(kv_dtype),
        )
    num_seqs = seq_lens.shape[0]
    return DecodePlan(
        num_seqs=num_seqs,
        num_query_tokens=(num_query_tokens or 0)
        if cu_query_lens is not None
        else num_seqs * query_len,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        query_len=0 if cu_query_lens is not None else query_len,
        causal=causal,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        kv_dtype=kv_dtype,
        tensor=tensor,
    )


def _kv_bytes(kv_dtype: torch.dtype | None) -> int:
    return 2 if kv_dtype is None else kv_dtype.itemsize


def _check_plan(
    plan: DecodePlan,
    query: Tensor,
    key_cache: Tensor,
    seq_lens: Tensor,
    ragged: bool,
    mask: tuple[bool, int | None],
) -> None:
    if query.dim() not in (3, 4) or key_cache.dim() != 4 or seq_lens.dim() != 1:
        return  # the op says what is wrong
    query_len = 0 if ragged else query.shape[1] if query.dim() == 4 else 1
    num_tokens = query.shape[:-2].numel()
    got: tuple[object, ...] = (query.shape[-2], key_cache.shape[2], query.shape[-1], query_len)
    planned: tuple[object, ...] = (
        plan.num_q_heads,
        plan.num_kv_heads,
        plan.head_dim,
        plan.query_len,
    )
    if plan.chunk_size is None:  # chunks are the same in any batch and under any mask
        got += (seq_lens.shape[0], num_tokens, *mask)
        planned += (plan.num_seqs, plan.num_query_tokens, plan.causal, plan.sliding_window)
    if got != planned:
        raise ValueError(
            "paged_attention: plan must be made for this call's (num_q_heads, num_kv_heads, "
            "head_dim, query_len, and without chunk_size num_seqs, num_query_tokens, causal, "
            f"sliding_window) {got}, got one for {planned}"
        )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_query_lens: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    plan: DecodePlan | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of query tokens over keys and values found through block tables.

    Row by row, softmax(score) V over the visible keys of the row's sequence, with
    score = softcap(scale * q . k) + alibi (Vaswani et al. 2017, section 3.2.1; Kwon et al. 2023,
    arXiv 2309.06180, section 4). The new tokens' own keys and values must be in the cache.

    A query token i of n in a sequence of length L has position L - n + i: queries are the last
    positions of their sequence. Causal, it sees the keys at and before its position; not causal,
    all L.

    Args:
        query: [num_seqs, num_q_heads, head_dim], or [num_seqs, query_len, num_q_heads, head_dim],
            or with cu_query_lens [num_tokens, num_q_heads, head_dim]. float16, bfloat16 or float32;
            any strides but the last, which is 1. head_dim is a multiple of 8 up to 256, or 512.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], query's dtype, float8_e4m3fn,
            float8_e5m2 or int8; any strides but the last. num_kv_heads divides num_q_heads; query
            head h reads KV head h // (num_q_heads // num_kv_heads).
        value_cache: as key_cache; its strides may differ.
        block_tables: [num_seqs, max_blocks] int32 (int64 is converted), any strides. Entries past
            ceil(seq_len / block_size), and those of blocks below the window of the sequence's first
            query token, are never read: they may be -1.
        seq_lens: [num_seqs] int32 (int64 is converted), tokens, those of this call included.
            0 gives rows of 0.
        cu_query_lens: [num_seqs + 1] int32 (int64 is converted): sequence s has the query tokens
            [cu_query_lens[s], cu_query_lens[s + 1]). Tokens past the last are padding: rows of 0.
        scale: factor of q . k; default head_dim ** -0.5.
        causal: whether a query sees no key after its position.
        sliding_window: number of visible keys up to the query's position, its own included; None
            for all. Later keys, if not causal, are not bounded by it.
        softcap: cap > 0: a score becomes cap * tanh(score / cap), before ALiBi and the mask.
        alibi_slopes: [num_q_heads] float32: adds slope * (key position - query position).
        sinks: [num_q_heads] float32: one more logit in the denominator, with no value; neither
            scaled nor capped. It is part of the LSE.
        k_scale: value = stored * scale: None (1; an error for int8), a float, or a float32 tensor
            of shape [] or [num_kv_heads] or [num_blocks, block_size, num_kv_heads].
        v_scale: as k_scale.
        plan: from `plan_decode`, for calls of one step.
        out: where to write the result: query's shape and dtype, any strides but the last. It may be
            query itself, and shares no memory with another argument else.
        return_lse: whether to return the log-sum-exp of the scores, too.

    Returns:
        out, or (out, lse) with lse float32 of query's shape without head_dim, natural logarithm.
        A row that sees no key is 0, its lse -inf (or the sink, where there is one).

    Raises:
        RuntimeError: an argument does not fit, or requires a gradient while gradients are recorded;
            the message names it, and nothing was written. On CPU lengths and used table entries
            are checked always, on CUDA in debug mode (`paged_attn.set_debug`), else they are
            trusted.
        ValueError: the plan was made for another shape or mask.

    Runs on the current stream of query's device and never waits for it; can be captured in a CUDA
    graph and replayed with other lengths and tables. Same inputs give the same bits.
    """
    if torch.is_grad_enabled():
        _ops.refuse_gradients(
            "paged_attention",
            "query key_cache value_cache alibi_slopes sinks k_scale v_scale out",
            (query, key_cache, value_cache, alibi_slopes, sinks, k_scale, v_scale, out),
        )
    if plan is not None:
        if not isinstance(plan, DecodePlan):
            raise TypeError(
                f"paged_attention: plan must come from plan_decode, got {type(plan).__name__}"
            )
        ragged, mask = cu_query_lens is not None, (causal, sliding_window)
        _check_plan(plan, query, key_cache, seq_lens, ragged, mask)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = None
    if return_lse:
        lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    k_tensor, k_float = split_scale(k_scale)
    v_tensor, v_float = split_scale(v_scale)
    _ops.lib.paged_attention(
        out,
        lse,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_query_lens,
        scale,
        causal,
        sliding_window,
        softcap,
        alibi_slopes,
        sinks,
        k_tensor,
        v_tensor,
        k_float,
        v_float,
        None if plan is None else _AUTO_CHUNK if plan.chunk_size == "auto" else plan.chunk_size,
        None if plan is None else plan.tensor,
        _kv_bytes(None if plan is None else plan.kv_dtype),
    )
    return out if lse is None else (out, lse)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merges the attention of the same queries over two disjoint sets of keys.

    out = (out_a e^lse_a + out_b e^lse_b) / (e^lse_a + e^lse_b) and lse = ln(e^lse_a + e^lse_b)
    (Dao et al. 2022, arXiv 2205.14135, section 3.1). A side with lse -inf counts for nothing and
    its out is not read; two such sides give 0 and -inf.

    Args:
        out_a: [..., head_dim] float16, bfloat16 or float32.
        lse_a: [...] float32, natural logarithm, as `paged_attention` returns it.
        out_b: as out_a.
        lse_b: as lse_a.

    Returns:
        (out, lse) of the same shapes and dtypes.

    Raises:
        RuntimeError: an argument does not fit; the message names it.

    Runs on the current stream of out_a's device and never waits for it.
    """
    if torch.is_grad_enabled():
        _ops.refuse_gradients(
            "merge_states",
            "out_a lse_a out_b lse_b",
            (out_a, lse_a, out_b, lse_b),
        )
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=lse_a.device)
    _ops.lib.merge_states(out, lse, out_a, lse_a, out_b, lse_b)
    return out, lse
