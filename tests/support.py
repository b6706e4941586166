"""Small experiments whose right answer can be worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from backends import Backend
from cases import DEAD_BLOCK, Inputs, attend, poison, store_rows
from cases import Case as Case
from torch import Tensor

BLOCKS = (7, 2, 11, 0, 5, 9)  # where a sequence's blocks are, cyclically more if it needs more
NUM_BLOCKS = 12
HEAD_DIM = 8

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EIGHT_BIT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Every pair of query dtype and cache dtype that the kernels are built for.
DTYPE_PAIRS = [(row, kv) for row in FLOAT_DTYPES for kv in (row, *EIGHT_BIT_DTYPES)]


def dtype_id(value: object) -> str | None:
    """A short test id for dtypes."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def raw(tensor: Tensor) -> Tensor:
    """A copy of a tensor's whole storage as bytes, NaN and padding included."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage()).clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, as a comparison of NaN or -0 cannot tell."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def one_sequence(
    values: list[float],
    *,
    logits: list[float] | None = None,
    query_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 4,
    num_q_heads: int = 1,
    **options: Any,
) -> Inputs:
    """One sequence of one KV head: token t has V = values[t] and the logit logits[t], or 0.

    With all logits 0 the output is the mean of the values of the visible keys.
    """
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    needed = -(-len(values) // block_size)
    blocks = [BLOCKS[i] if i < len(BLOCKS) else NUM_BLOCKS + i for i in range(needed)]
    num_blocks = max([NUM_BLOCKS, *(block + 1 for block in blocks)])
    pools = []
    for rows in (logits, values):
        pool = poison(torch.empty(num_blocks, block_size, 1, HEAD_DIM, dtype=kv_dtype))
        wide = torch.zeros(len(values), 1, HEAD_DIM)
        if rows is values:
            wide[:, 0] = torch.tensor(rows)[:, None]
        elif rows is not None:
            wide[:, 0, 0] = torch.tensor(rows)
        t = torch.arange(len(values))
        slots = torch.tensor(blocks, dtype=torch.int64)[t // block_size] * block_size
        store_rows(pool, slots + t % block_size, wide.to(kv_dtype))
        pools.append(pool)
    lead = (1,) if query_len is None else (1, query_len)
    query = torch.zeros(*lead, num_q_heads, HEAD_DIM, dtype=dtype)
    query[..., 0] = 0.0 if logits is None else 1.0
    if kv_dtype == torch.int8:
        options = {"k_scale": 1.0, "v_scale": 1.0} | options
    return Inputs(
        case=Case("one_sequence"),
        query=query,
        key_cache=pools[0],
        value_cache=pools[1],
        block_tables=torch.tensor([[*blocks, DEAD_BLOCK, DEAD_BLOCK]], dtype=torch.int32),
        seq_lens=torch.tensor([len(values)], dtype=torch.int32),
        options={"scale": 1.0} | options,
    )


def attend_one(
    backend: Backend, values: list[float], *, chunk_size: int | None = None, **kwargs: Any
) -> tuple[list[float], list[float]]:
    """Output and LSE of `one_sequence`: a number for each query token and head."""
    out, lse = attend(one_sequence(values, **kwargs).on(backend), chunk_size=chunk_size)
    flat = out.cpu().float().flatten(0, -2)
    assert torch.equal(flat, flat[:, :1].expand_as(flat)), "elements of one row differ"
    return flat[:, 0].tolist(), lse.cpu().flatten().tolist()


def ramp(length: int) -> list[float]:
    """V[t] = t: a mean of them tells which were read."""
    return [float(t) for t in range(length)]
