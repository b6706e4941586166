"""The tensors of a decode benchmark: one arena of memory, and steps that rotate through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from bytes import DecodeShape, traffic
from torch import Tensor

from paged_attn import DecodePlan, paged_attention, plan_decode

MIN_POOLS = 3
L2_MULTIPLE = 3  # what all pools together exceed
_FILL_ELEMENTS = 1 << 24
_ALIGNMENT = 256
_MIB = 1 << 20
# Value of the stored number 1 in an 8-bit cache.
_SCALES = {torch.int8: 1 / 64, torch.float8_e4m3fn: 0.5, torch.float8_e5m2: 0.5}


class Arena:
    """Memory for the pools of all rows: allocated once, filled again where the dtype changes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._filled: tuple[torch.dtype, int] = (torch.uint8, 0)

    @classmethod
    def for_device(cls, device: torch.device) -> Arena:
        """Most of what a GPU has free; on a CPU, little."""
        if device.type != "cuda":
            return cls(64 * _MIB, device)
        free, _ = torch.cuda.mem_get_info(device)
        return cls(free * 4 // 5 // _MIB * _MIB, device)

    @property
    def num_bytes(self) -> int:
        """How much there is."""
        return self._memory.numel()

    def numbers(self, dtype: torch.dtype, numel: int) -> Tensor:
        """The first `numel` elements, filled with normal random numbers."""
        view = self._memory[: numel * dtype.itemsize].view(dtype)
        filled_dtype, filled = self._filled
        if filled_dtype != dtype or filled < numel:
            self._filled = (dtype, numel)
            _fill(view)
        return view


def _fill(view: Tensor) -> None:
    """Fills with normal random numbers, the same for each stretch; scaled for 8 bits."""
    numbers = torch.randn(min(view.numel(), _FILL_ELEMENTS), device=view.device)
    numbers /= _SCALES.get(view.dtype, 1.0)
    if view.dtype == torch.int8:
        numbers = numbers.round_().clamp_(-127, 127)
    numbers = numbers.to(view.dtype)
    for begin in range(0, view.numel(), _FILL_ELEMENTS):
        stretch = view[begin : begin + _FILL_ELEMENTS]
        stretch.copy_(numbers[: stretch.numel()])


@dataclass(frozen=True)
class Step:
    """The tensors of one decode call."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    out: Tensor
    scale: float | None  # of keys and values

    def attend(self, plan: DecodePlan | None, block_tables: Tensor | None = None) -> Any:
        """The call that is measured, into `out`; over other tables where given."""
        return paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables if block_tables is None else block_tables,
            self.seq_lens,
            k_scale=self.scale,
            v_scale=self.scale,
            plan=plan,
            out=self.out,
        )


def num_pools(shape: DecodeShape, l2_bytes: int) -> int:
    """Pools to rotate through: at least three, and more than three L2 caches in all."""
    return max(MIN_POOLS, L2_MULTIPLE * l2_bytes // traffic(shape).kv + 1)


def arena_bytes(shape: DecodeShape, l2_bytes: int) -> int:
    """What the pools of a shape need of an arena."""
    return num_pools(shape, l2_bytes) * _pool_stride(shape) * shape.kv_dtype.itemsize


def _pool_stride(shape: DecodeShape) -> int:
    """Elements from one pool of keys and values to the next."""
    return -(-2 * shape.pool_numel // _ALIGNMENT) * _ALIGNMENT


def make_steps(shape: DecodeShape, arena: Arena, l2_bytes: int) -> list[Step]:
    """One step for each pool, its blocks in random order; no two share what they read."""
    count, stride = num_pools(shape, l2_bytes), _pool_stride(shape)
    numbers = arena.numbers(shape.kv_dtype, count * stride)
    device = arena.device
    steps = []
    for index in range(count):
        pools = numbers[index * stride :][: 2 * shape.pool_numel].view(2, *shape.pool_shape)
        query = torch.randn(shape.batch, shape.num_q_heads, shape.head_dim, device=device)
        order = torch.randperm(shape.pool_shape[0], device=device)
        steps.append(
            Step(
                query=query.to(shape.dtype),
                key_cache=pools[0],
                value_cache=pools[1],
                block_tables=order.to(torch.int32).view(shape.batch, shape.blocks_per_seq),
                seq_lens=torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device),
                out=torch.empty_like(query, dtype=shape.dtype),
                scale=_SCALES.get(shape.kv_dtype),
            )
        )
    return steps


def make_plan(shape: DecodeShape, seq_lens: Tensor, chunk_size: int | None = None) -> DecodePlan:
    """The plan of a step, which all layers of a model share."""
    return plan_decode(
        seq_lens,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        chunk_size=chunk_size,
        kv_dtype=shape.kv_dtype,
    )
