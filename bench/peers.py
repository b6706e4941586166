"""Other implementations of decode attention, each where it is installed and can do the shape.

Every adapter takes the steps of one shape and returns a call for each, on the same memory. What
reads no block table reads each pool as sequences one after another: the best case for gathered
keys and values.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bytes import DecodeShape
from timing import Call
from torch import Tensor
from workload import Step, make_plan

import paged_attn

FLASH_ATTN_PAGE = 256  # flash-attn 2 takes multiples of this
_FLASHINFER_WORKSPACE = 256 << 20


class UnavailableError(Exception):
    """Why a peer does not run here."""


@dataclass(frozen=True)
class Peer:
    """An implementation, ready to run."""

    calls: Sequence[Call]  # one for each step; returns its output
    block_tables: Tensor | None  # the order in which it reads a pool; None: blocks as they lie


Adapter = Callable[[DecodeShape, Sequence[Step]], Peer]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that is installed, but broken, is not there either
        raise UnavailableError(f"{type(error).__name__}: {error}") from error


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UnavailableError(what)


def _require_16_bit(shape: DecodeShape) -> None:
    _require(shape.kv_dtype == shape.dtype, "takes no 8-bit cache")


def _whole_blocks(shape: DecodeShape) -> None:
    _require(shape.length % shape.block_size == 0, "needs whole blocks")


def _contiguous(shape: DecodeShape, pool: Tensor) -> Tensor:
    """A pool as `[batch, num_kv_heads, length, head_dim]`."""
    rows = pool.view(shape.batch, shape.length, shape.num_kv_heads, shape.head_dim)
    return rows.transpose(1, 2)


def ours(shape: DecodeShape, steps: Sequence[Step]) -> Peer:
    """paged_attn itself, one table for all pools, as the paged peers."""
    plan, tables = make_plan(shape, steps[0].seq_lens), steps[0].block_tables
    calls = [functools.partial(step.attend, plan, tables) for step in steps]
    return Peer(calls, tables)


def sdpa(shape: DecodeShape, steps: Sequence[Step]) -> Peer:
    """PyTorch's scaled_dot_product_attention over keys and values that were gathered before."""
    _require_16_bit(shape)
    _whole_blocks(shape)
    return Peer([_sdpa_call(shape, step) for step in steps], None)


def _sdpa_call(shape: DecodeShape, step: Step) -> Call:
    key, value = _contiguous(shape, step.key_cache), _contiguous(shape, step.value_cache)
    query = step.query.unsqueeze(2)
    return lambda: _attend_contiguous(query, key, value)


def _attend_contiguous(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, enable_gqa=grouped
    )
    return out.squeeze(2)


def gather_and_sdpa(shape: DecodeShape, steps: Sequence[Step]) -> Peer:
    """gather_cache, then scaled_dot_product_attention: paging without a paged kernel."""
    _whole_blocks(shape)

    def attend(step: Step) -> Tensor:
        key, value = paged_attn.gather_cache(
            step.key_cache,
            step.value_cache,
            steps[0].block_tables,
            step.seq_lens,
            k_scale=step.scale,
            v_scale=step.scale,
            dtype=shape.dtype,
            total_tokens=shape.batch * shape.length,
        )
        rows = _contiguous(shape, key), _contiguous(shape, value)
        return _attend_contiguous(step.query.unsqueeze(2), *rows)

    return Peer([functools.partial(attend, step) for step in steps], steps[0].block_tables)


def flex_attention(shape: DecodeShape, steps: Sequence[Step]) -> Peer:
    """PyTorch's compiled FlexAttention over keys and values that were gathered before."""
    _require(steps[0].query.is_cuda, "is compiled for CUDA only")
    _require_16_bit(shape)
    _whole_blocks(shape)
    module = _module("torch.nn.attention.flex_attention")
    compiled: Any = torch.compile(module.flex_attention, dynamic=False)

    def attend(step: Step) -> Tensor:
        out: Tensor = compiled(
            step.query.unsqueeze(2),
            _contiguous(shape, step.key_cache),
            _contiguous(shape, step.value_cache),
            enable_gqa=True,
        )
        return out.squeeze(2)

    return Peer([functools.partial(attend, step) for step in steps], None)


def flashinfer(shape: DecodeShape, steps: Sequence[Step]) -> Peer:
    """FlashInfer's paged decode; its plan, made on the host, is not measured."""
    module = _module("flashinfer")
    _require(shape.kv_dtype != torch.int8, "takes no int8 cache")
    device = steps[0].query.device
    workspace = torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    group = shape.num_q_heads // shape.num_kv_heads
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=group >= 4
    )
    pages = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.blocks_per_seq
    last = shape.length - (shape.blocks_per_seq - 1) * shape.block_size
    scale = steps[0].scale or 1.0
    wrapper.plan(
        pages,
        steps[0].block_tables.flatten(),
        torch.full((shape.batch,), last, dtype=torch.int32, device=device),
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
        sm_scale=shape.head_dim**-0.5 * scale,
    )

    def attend(step: Step) -> Any:
        return wrapper.run(step.query, (step.key_cache, step.value_cache), v_scale=step.scale)

    return Peer([functools.partial(attend, step) for step in steps], steps[0].block_tables)


def flash_attn(shape: DecodeShape, steps: Sequence[Step]) -> Peer:
    """flash-attn 2, paged, with the block size that it needs."""
    return _flash_attn("flash_attn", "block_table", shape, steps)


def flash_attn_3(shape: DecodeShape, steps: Sequence[Step]) -> Peer:
    """flash-attn 3, paged, with the same block size."""
    return _flash_attn("flash_attn_interface", "page_table", shape, steps)


def _flash_attn(name: str, table: str, shape: DecodeShape, steps: Sequence[Step]) -> Peer:
    module = _module(name)
    _require_16_bit(shape)
    _require(shape.length % FLASH_ATTN_PAGE == 0, f"needs pages of {FLASH_ATTN_PAGE} tokens")
    num_pages = shape.batch * shape.length // FLASH_ATTN_PAGE
    pages = torch.arange(num_pages, dtype=torch.int32, device=steps[0].query.device)
    paged = (num_pages, FLASH_ATTN_PAGE, shape.num_kv_heads, shape.head_dim)

    def attend(step: Step) -> Any:
        out = module.flash_attn_with_kvcache(
            step.query.unsqueeze(1),
            step.key_cache.view(paged),
            step.value_cache.view(paged),
            cache_seqlens=step.seq_lens,
            causal=True,
            **{table: pages.view(shape.batch, -1)},
        )
        return (out[0] if isinstance(out, tuple) else out).squeeze(1)

    return Peer([functools.partial(attend, step) for step in steps], None)


ADAPTERS: dict[str, Adapter] = {
    "paged_attn": ours,
    "SDPA, gathered before": sdpa,
    "gather_cache + SDPA": gather_and_sdpa,
    "FlexAttention, gathered before": flex_attention,
    "FlashInfer": flashinfer,
    "flash-attn 2, pages of 256": flash_attn,
    "flash-attn 3, pages of 256": flash_attn_3,
}
