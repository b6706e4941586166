"""The oracle: paged attention written from its formula, in float64, one query token at a time.

It shares no code with the ops and is as slow as it looks. Sources: Vaswani et al. 2017,
"Attention Is All You Need", section 3.2.1, for attention; Kwon et al. 2023, arXiv 2309.06180,
section 4, for keys and values that are read through a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["paged_attention"]


@dataclass(frozen=True)
class _Score:
    """All that turns query . key into a logit, and which keys a query sees."""

    scale: float
    causal: bool
    sliding_window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None  # [num_q_heads]
    sinks: Tensor | None  # [num_q_heads]


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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(Q K^T) V over the keys and values that each sequence's block table names.

    With s = scale * query . key, the logit of key t for a query at position p is
    softcap * tanh(s / softcap) + slope * (t - p).

    Args:
        query: [num_seqs, num_q_heads, head_dim] (one token each), [num_seqs, query_len,
            num_q_heads, head_dim], or [num_tokens, num_q_heads, head_dim] with cu_query_lens; any
            floating dtype and device.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], any dtype.
        value_cache: as key_cache.
        block_tables: integers [num_seqs, max_blocks]. Entries past ceil(seq_len / block_size), and
            slots past the length, may hold anything.
        seq_lens: integers [num_seqs], tokens, those of this call included: query token i of n is
            at position p = seq_len - n + i, which is negative where n > seq_len.
        cu_query_lens: integers [num_seqs + 1], where each sequence's query tokens start and end.
        scale: factor of query . key; default head_dim ** -0.5.
        causal: only keys t <= p are visible, else all.
        sliding_window: of these, only keys t > p - sliding_window.
        softcap: cap of the score, before ALiBi and the mask.
        alibi_slopes: [num_q_heads].
        sinks: [num_q_heads], one more logit in the denominator, as it is.
        k_scale: value = stored * scale: None, a float, or a tensor of shape [], [num_kv_heads] or
            [num_blocks, block_size, num_kv_heads].
        v_scale: as k_scale.
        return_lse: whether to return the natural logarithm of the denominator, too.

    Returns:
        out, float64 of query's shape, or (out, lse) with lse float64 of query's shape without
        head_dim. A row that sees no key, as do tokens past cu_query_lens[-1], is 0, and its lse is
        -inf or, with a sink, the sink; so is a row whose scores are all -inf. NaN and Inf in keys
        and values that a row sees act as in IEEE arithmetic; in others they have no effect.

    Raises:
        ValueError: shapes do not fit, a length is beyond its table, an id outside the pool, or an
            int8 cache has no scale.

    Runs on query's device and reads lengths and tables on the host.
    """
    _check(query, key_cache, value_cache, block_tables, seq_lens, cu_query_lens)
    score = _Score(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.double(),
        sinks=None if sinks is None else sinks.double(),
    )
    tokens = query.reshape(-1, *query.shape[-2:]).double()
    out = torch.zeros_like(tokens)
    # What a row that sees no key has, padding too: the sink is a logit that is always visible.
    lse = torch.full_like(tokens[..., 0], -torch.inf)
    if score.sinks is not None:
        lse = lse.copy_(score.sinks)

    if cu_query_lens is not None:
        starts = cu_query_lens.tolist()
    else:
        query_len = query.shape[1] if query.dim() == 4 else 1
        starts = [seq * query_len for seq in range(seq_lens.shape[0] + 1)]
    for seq, seq_len in enumerate(seq_lens.tolist()):
        key = _gather(key_cache, k_scale, block_tables[seq], seq_len)
        value = _gather(value_cache, v_scale, block_tables[seq], seq_len)
        for token in range(starts[seq], starts[seq + 1]):
            position = seq_len - starts[seq + 1] + token
            out[token], lse[token] = _attend(tokens[token], key, value, position, score)

    out, lse = out.reshape(query.shape), lse.reshape(query.shape[:-1])
    return (out, lse) if return_lse else out


def _attend(
    query: Tensor, key: Tensor, value: Tensor, position: int, score: _Score
) -> tuple[Tensor, Tensor]:
    """One query token `[num_q_heads, head_dim]` over one sequence `[len, num_kv_heads, head_dim]`.

    Returns `[num_q_heads, head_dim]` and `[num_q_heads]`.
    """
    num_q_heads, num_kv_heads = query.shape[0], key.shape[1]
    group = num_q_heads // num_kv_heads  # query heads that share a KV head
    end = min(position + 1, key.shape[0]) if score.causal else key.shape[0]
    start = 0 if score.sliding_window is None else max(0, position + 1 - score.sliding_window)
    if start >= end:
        empty = torch.full_like(query[:, 0], -torch.inf)
        return torch.zeros_like(query), empty if score.sinks is None else score.sinks

    seen_key = key[start:end].repeat_interleave(group, dim=1)  # [keys, num_q_heads, head_dim]
    seen_value = value[start:end].repeat_interleave(group, dim=1)
    logits = score.scale * torch.einsum("hd,thd->ht", query, seen_key)
    if score.softcap is not None:
        logits = score.softcap * torch.tanh(logits / score.softcap)
    if score.alibi_slopes is not None:
        distance = torch.arange(start, end, device=query.device) - position
        logits = logits + score.alibi_slopes[:, None] * distance
    if score.sinks is not None:  # one more key, whose value is 0
        logits = torch.cat([logits, score.sinks[:, None]], dim=1)
        seen_value = torch.cat([seen_value, torch.zeros_like(seen_value[:1])])

    maximum = logits.amax(dim=1)
    weights = torch.exp(logits - maximum[:, None])
    denominator = weights.sum(dim=1)
    out = torch.einsum("ht,thd->hd", weights / denominator[:, None], seen_value)
    lse = maximum + torch.log(denominator)
    nothing = maximum == -torch.inf  # a key of score -inf is as good as none
    return out.masked_fill(nothing[:, None], 0), lse.masked_fill(nothing, -torch.inf)


def _gather(
    cache: Tensor, scale: float | Tensor | None, block_table: Tensor, seq_len: int
) -> Tensor:
    """The first `seq_len` tokens of a block table, float64 `[seq_len, num_kv_heads, head_dim]`."""
    num_blocks, block_size = cache.shape[:2]
    blocks = block_table[: -(-seq_len // block_size)].long()
    if len(blocks) * block_size < seq_len:
        raise ValueError(
            f"reference.paged_attention: a length of {seq_len} needs "
            f"{-(-seq_len // block_size)} block table entries, got {len(blocks)}"
        )
    if len(blocks) > 0 and (blocks.min() < 0 or blocks.max() >= num_blocks):
        raise ValueError(
            f"reference.paged_attention: block_tables must hold ids in [0, {num_blocks}), "
            f"got {blocks.tolist()}"
        )
    token = torch.arange(seq_len, device=cache.device)
    block, offset = blocks.to(cache.device)[token // block_size], token % block_size
    stored = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    rows = stored[block, offset].view(cache.dtype).double()
    if scale is None:
        if cache.dtype == torch.int8:
            raise ValueError("reference.paged_attention: an int8 cache needs k_scale and v_scale")
        return rows
    if isinstance(scale, Tensor):
        if scale.dim() == 3:
            scale = scale[block, offset]  # [seq_len, num_kv_heads]
        return rows * (scale.double()[..., None] if scale.dim() > 0 else scale.double())
    return rows * scale


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_query_lens: Tensor | None,
) -> None:
    name = "reference.paged_attention"
    num_seqs = seq_lens.shape[0]
    if query.dim() not in (3, 4) or (query.dim() == 4 and cu_query_lens is not None):
        raise ValueError(
            f"{name}: query must be [num_seqs, num_q_heads, head_dim], [num_seqs, query_len, "
            f"num_q_heads, head_dim], or [num_tokens, num_q_heads, head_dim] with cu_query_lens, "
            f"got {tuple(query.shape)}"
        )
    if cu_query_lens is None and query.shape[0] != num_seqs:
        raise ValueError(f"{name}: query must have {num_seqs} sequences, got {query.shape[0]}")
    if cu_query_lens is not None and cu_query_lens.shape != (num_seqs + 1,):
        raise ValueError(
            f"{name}: cu_query_lens must be [{num_seqs + 1}], got {tuple(cu_query_lens.shape)}"
        )
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"{name}: key_cache and value_cache must be [num_blocks, block_size, num_kv_heads, "
            f"head_dim], got {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if query.shape[-1] != key_cache.shape[3] or query.shape[-2] % key_cache.shape[2] != 0:
        raise ValueError(
            f"{name}: query must have head_dim {key_cache.shape[3]} and a multiple of "
            f"{key_cache.shape[2]} heads, got {tuple(query.shape)}"
        )
    if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs:
        raise ValueError(
            f"{name}: block_tables must be [{num_seqs}, max_blocks], "
            f"got {tuple(block_tables.shape)}"
        )
