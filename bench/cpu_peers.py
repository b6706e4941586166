"""What else computes paged decode attention on a CPU, each where it is installed and can.

An adapter gets one step of bench/cpu_decode.py and returns a call that computes it and returns
its output `[batch, num_q_heads, head_dim]`; layouts are converted beforehand, which is not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peers import UnavailableError
from torch import Tensor

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class CpuStep:
    """The tensors of one decode step; pools as `[num_blocks, block_size, num_kv_heads, d]`."""

    query: Tensor  # [batch, num_q_heads, d]
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    scale: float | None  # of the cache; None: as it is stored

    @property
    def length(self) -> int:
        """Tokens of every sequence, whole blocks."""
        return int(self.block_tables.shape[1]) * int(self.key_cache.shape[1])

    def gathered(self, pool: Tensor) -> Tensor:
        """A pool as `[batch, num_kv_heads, length, d]`, read through the table."""
        rows = pool[self.block_tables.long()].flatten(1, 2)
        return rows.transpose(1, 2)


def _require_plain(step: CpuStep) -> None:
    if step.scale is not None:
        raise UnavailableError("takes no 8-bit cache")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that is installed, but broken, is not there either
        raise UnavailableError(f"{type(error).__name__}: {error}") from error


def gather_and_sdpa(step: CpuStep) -> Call:
    """Of torch: index_select of the blocks, then scaled_dot_product_attention."""
    _require_plain(step)

    def attend() -> Tensor:
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(
            step.query.unsqueeze(2),
            step.gathered(step.key_cache),
            step.gathered(step.value_cache),
            enable_gqa=True,
        )
        return out.squeeze(2)

    return attend


def flex_attention(step: CpuStep) -> Call:
    """Of torch: FlexAttention, compiled, over keys and values that were gathered before."""
    _require_plain(step)
    module = _module("torch.nn.attention.flex_attention")
    compiled: Any = torch.compile(module.flex_attention, dynamic=False)
    key = step.gathered(step.key_cache).contiguous()
    value = step.gathered(step.value_cache).contiguous()
    query = step.query.unsqueeze(2)

    def attend() -> Tensor:
        with torch.no_grad():
            out: Tensor = compiled(query, key, value, enable_gqa=True)
        return out.squeeze(2)

    return attend


def vllm(step: CpuStep) -> Call:
    """The CPU kernel of vLLM's first generation, keys in pieces of 16 bytes as it wants them."""
    _require_plain(step)
    _module("vllm._custom_ops")
    ops: Any = torch.ops._C
    if not hasattr(ops, "paged_attention_v1"):
        raise UnavailableError("this vllm has no paged_attention_v1 for CPUs")
    num_blocks, block_size, num_kv_heads, head_dim = step.key_cache.shape
    piece = 16 // step.key_cache.element_size()
    key = step.key_cache.view(num_blocks, block_size, num_kv_heads, head_dim // piece, piece)
    key = key.permute(0, 2, 3, 1, 4).contiguous()
    value = step.value_cache.permute(0, 2, 3, 1).contiguous()
    out = torch.empty_like(step.query)
    one = torch.ones(())

    def attend() -> Tensor:
        shape = (num_kv_heads, head_dim**-0.5, step.block_tables, step.seq_lens)
        lengths = (block_size, step.length, None, "auto")
        ops.paged_attention_v1(
            out, step.query, key, value, *shape, *lengths, one, one, 0, 0, 0, 64, 0
        )
        return out

    return attend


def ipex(step: CpuStep) -> Call:
    """The kernel of Intel's extension for PyTorch, its cache in HND order."""
    _require_plain(step)
    module = _module("intel_extension_for_pytorch.llm.modules")
    num_kv_heads = step.key_cache.shape[2]
    key = step.key_cache.transpose(1, 2).contiguous()
    value = step.value_cache.transpose(1, 2).contiguous()
    group = step.query.shape[1] // num_kv_heads
    head_mapping = torch.arange(num_kv_heads, dtype=torch.int32).repeat_interleave(group)
    out = torch.empty_like(step.query)

    def attend() -> Tensor:
        module.PagedAttention.single_query_cached_kv_attention(
            out,
            step.query,
            key,
            value,
            head_mapping,
            step.query.shape[-1] ** -0.5,
            step.block_tables,
            step.seq_lens,
            step.key_cache.shape[1],
            step.length,
            None,
        )
        return out

    return attend


ADAPTERS: dict[str, Callable[[CpuStep], Call]] = {
    "gather + SDPA": gather_and_sdpa,
    "FlexAttention, gathered before": flex_attention,
    "vLLM": vllm,
    "IPEX": ipex,
}
