"""The poisoned tensors that cases of paged attention are run on.

Whatever a kernel must not read is made to hurt: the pools, their padding and the dead slots are
NaN, dead table entries name no block, query and out are rows of wider tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from backends import Backend
from case_list import CASES as CASES
from case_list import Case as Case
from torch import Tensor

import paged_attn
from paged_attn import reference
from paged_attn.decode import ChunkSize

NAN = float("nan")
DEAD_BLOCK = 2147480000  # a table entry that must not be followed
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SPARE_BLOCKS = 3
LAYOUTS = ("nhd", "hnd", "stacked", "interleaved", "last_dim", "padded", "unaligned", "mixed")

# Stored value of a magnitude of 1: no powers of two, so that a forgotten scale shows.
_K_SCALES = {torch.float8_e4m3fn: 0.37, torch.float8_e5m2: 0.37, torch.int8: 0.029}
_V_SCALES = {torch.float8_e4m3fn: 0.75, torch.float8_e5m2: 0.75, torch.int8: 0.023}


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call. `options` are keyword arguments of paged_attention."""

    case: Case
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    options: dict[str, Any]

    def on(self, backend: Backend) -> Inputs:
        """The same in a backend's memory: whole storages, so that views stay views."""
        arguments = vars(self) | self.options
        tensors = {n: value for n, value in arguments.items() if isinstance(value, Tensor)}
        placed = backend.place_all(list(tensors.values()))
        moved: dict[str, Any] = dict(zip(tensors, placed, strict=True))
        own = {name: tensor for name, tensor in moved.items() if name not in self.options}
        options = {name: moved.get(name, value) for name, value in self.options.items()}
        return dataclasses.replace(self, **own, options=options)

    def replace(self, **changes: Any) -> Inputs:
        """The same call with other arguments."""
        return dataclasses.replace(self, **changes)

    def query_spans(self) -> list[tuple[int, int]]:
        """Where each sequence's query tokens start and end, the tokens counted through."""
        cu_query_lens = self.options.get("cu_query_lens")
        if cu_query_lens is not None:
            ends = cu_query_lens.tolist()
        else:
            query_len = self.query.shape[1] if self.query.dim() == 4 else 1
            ends = [seq * query_len for seq in range(self.query.shape[0] + 1)]
        return list(itertools.pairwise(ends))


def poison(tensor: Tensor) -> Tensor:
    """Fills a tensor with NaN, or with the largest byte where int8 has none."""
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in both fp8 formats, 127 in int8
        return tensor
    return tensor.fill_(NAN)


def make_pools(
    layout: str, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> tuple[Tensor, Tensor]:
    """Poisoned pools of keys and values, `[num_blocks, block_size, num_kv_heads, head_dim]`."""
    n, b, h, d = num_blocks, block_size, num_kv_heads, head_dim

    def empty(*shape: int) -> Tensor:
        return poison(torch.empty(shape, dtype=dtype))

    if layout == "nhd":
        return empty(n, b, h, d), empty(n, b, h, d)
    if layout == "hnd":
        return empty(n, h, b, d).transpose(1, 2), empty(n, h, b, d).transpose(1, 2)
    if layout == "mixed":
        return empty(n, b, h, d), empty(n, h, b, d).transpose(1, 2)
    if layout == "stacked":
        both = empty(2, n, b, h, d)
        return both[0], both[1]
    if layout == "interleaved":
        both = empty(n, 2, b, h, d)
        return both[:, 0], both[:, 1]
    if layout == "last_dim":
        both = empty(n, b, h, 2 * d)
        return both[..., :d], both[..., d:]
    if layout == "padded":
        key, value = empty(n, b + 1, h + 1, d + 16), empty(n + 1, b + 2, h, d + 8)
        return key[:, :b, :h, :d], value[1:, 1 : b + 1, :, 8:]
    if layout == "unaligned":  # no row starts where a vector may
        key, value = empty(n, b, h, d + 1), empty(n, b, h, d + 3)
        return key[..., 1:], value[..., 3:]
    raise ValueError(layout)


def store_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Puts rows `[n, num_kv_heads, head_dim]` of the pool's dtype into slots, byte for byte."""
    block, offset = slots // pool.shape[1], slots % pool.shape[1]
    if pool.element_size() == 1:
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    pool[block, offset] = rows


def quantise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest, ties to even, saturating: PyTorch's own conversion of what fits."""
    if dtype == torch.int8:
        return x.round().clamp(-128, 127).to(dtype)
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def _make_scale(
    case: Case, base: float, slots: Tensor, num_blocks: int, generator: torch.Generator
) -> tuple[float | Tensor | None, Tensor]:
    """A scale argument, and the factor of each slot's row, `[n, num_kv_heads]`."""
    heads = case.num_kv_heads
    ones = torch.ones(len(slots), heads)
    if case.scale_kind == "none":
        return None, ones
    if case.scale_kind == "float":
        return base, ones * base
    if case.scale_kind == "tensor":
        return torch.tensor(base), ones * base
    factor = base * (1 + torch.rand(len(slots), heads, generator=generator))
    if case.scale_kind == "head":
        wide = torch.full((heads, 2), NAN)
        wide[:, 0] = factor[0] if len(slots) else base
        return wide[:, 0], ones * wide[:, 0]
    assert case.scale_kind == "token"
    scale = torch.full((num_blocks, heads, case.block_size), NAN).transpose(1, 2)
    scale[slots // case.block_size, slots % case.block_size] = factor
    return scale, factor


def _make_tables(case: Case, tables: list[list[int]]) -> Tensor:
    width = max((len(table) for table in tables), default=0) + 2
    padded = [table + [DEAD_BLOCK] * (width - len(table)) for table in tables]
    dense = torch.tensor(padded, dtype=case.index_dtype).reshape(len(tables), width)
    if case.table_layout == "transposed":
        return dense.t().contiguous().t()
    if case.table_layout == "spread":
        wide = torch.full((len(tables) + 1, 3 * width), DEAD_BLOCK, dtype=case.index_dtype)
        view = wide[:-1, ::3]
        view.copy_(dense)
        return view
    return dense


def _make_query(case: Case, generator: torch.Generator) -> Tensor:
    if isinstance(case.query_lens, tuple):
        lead: tuple[int, ...] = (sum(case.query_lens) + case.padding,)
    elif case.query_lens is None:
        lead = (len(case.seq_lens),)
    else:
        lead = (len(case.seq_lens), case.query_lens)
    query = strided(lead, case.num_q_heads, case.head_dim, case.dtype)
    query.copy_(torch.randn(query.shape, generator=generator))
    return query


def strided(lead: tuple[int, ...], num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Poisoned rows `[*lead, num_heads, head_dim]` inside a wider tensor."""
    wide = poison(torch.empty((*lead, num_heads + 1, head_dim + 8), dtype=dtype))
    return wide[..., :num_heads, :head_dim]


def build(case: Case, seed: int = 0) -> Inputs:
    """The tensors of a case, on the CPU: blocks in random order, block 0 among them."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(case.name.encode()))
    needed = [-(-length // case.block_size) for length in case.seq_lens]
    num_blocks = sum(needed) + SPARE_BLOCKS
    order = torch.randperm(num_blocks, generator=generator).tolist()
    where_zero = order.index(0)
    if where_zero >= sum(needed) > 0:
        order[where_zero], order[0] = order[0], 0
    ids = iter(order)
    tables = [[next(ids) for _ in range(count)] for count in needed]
    slots = torch.tensor(
        [
            table[t // case.block_size] * case.block_size + t % case.block_size
            for table, length in zip(tables, case.seq_lens, strict=True)
            for t in range(length)
        ],
        dtype=torch.int64,
    )
    dtype = case.pool_dtype
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    key_cache, value_cache = make_pools(case.layout, *shape, dtype)
    options: dict[str, Any] = {}
    for pool, name, base in (
        (key_cache, "k_scale", _K_SCALES.get(dtype, 1.0)),
        (value_cache, "v_scale", _V_SCALES.get(dtype, 1.0)),
    ):
        rows = torch.randn(len(slots), case.num_kv_heads, case.head_dim, generator=generator)
        options[name], factor = _make_scale(case, base, slots, num_blocks, generator)
        small = dtype in FP8 or dtype == torch.int8
        store_rows(
            pool, slots, quantise(rows / factor[..., None], dtype) if small else rows.to(dtype)
        )
    if isinstance(case.query_lens, tuple):
        ends = torch.tensor((0, *case.query_lens)).cumsum(0)
        options["cu_query_lens"] = ends.to(case.index_dtype)
    if case.alibi:
        options["alibi_slopes"] = paged_attn.alibi_slopes(case.num_q_heads)
    if case.sinks:
        options["sinks"] = torch.randn(case.num_q_heads, generator=generator)
    for name in ("scale", "causal", "sliding_window", "softcap"):
        options[name] = getattr(case, name)
    return Inputs(
        case=case,
        query=_make_query(case, generator),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=_make_tables(case, tables),
        seq_lens=torch.tensor(case.seq_lens, dtype=case.index_dtype),
        options=options,
    )


def make_plan(inputs: Inputs, chunk_size: ChunkSize = None) -> paged_attn.DecodePlan:
    """The plan for a call of these inputs; without a chunk size it cuts sequences anywhere."""
    ragged = inputs.options.get("cu_query_lens")
    return paged_attn.plan_decode(
        inputs.seq_lens,
        num_q_heads=inputs.query.shape[-2],
        num_kv_heads=inputs.key_cache.shape[2],
        head_dim=inputs.query.shape[-1],
        query_len=inputs.query.shape[1] if inputs.query.dim() == 4 else 1,
        cu_query_lens=ragged,
        num_query_tokens=None if ragged is None else inputs.query.shape[0],
        causal=inputs.options.get("causal", True),
        sliding_window=inputs.options.get("sliding_window"),
        chunk_size=chunk_size,
        kv_dtype=inputs.key_cache.dtype,
    )


def attend(inputs: Inputs, *, chunk_size: ChunkSize = None, out: Any = None) -> tuple[Any, Any]:
    """paged_attention of the inputs, with its LSE; chunked as the case says or as is asked."""
    chunk_size = inputs.case.chunk_size if chunk_size is None else chunk_size
    result = paged_attn.paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.seq_lens,
        **inputs.options,
        plan=None if chunk_size is None else make_plan(inputs, chunk_size),
        out=out,
        return_lse=True,
    )
    assert isinstance(result, tuple)
    return result


def oracle(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What is right, in float64."""
    result = reference.paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.seq_lens,
        **inputs.options,
        return_lse=True,
    )
    assert isinstance(result, tuple)
    return result
