"""Which shapes are measured, the most important first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from bytes import DecodeShape

E4M3 = torch.float8_e4m3fn
_KV_DTYPES = (torch.bfloat16, E4M3, torch.int8)


@dataclass(frozen=True)
class Grid:
    """All shapes of a run: each list has its most important value first."""

    heads: tuple[tuple[int, int], ...]  # query heads, KV heads
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    block_sizes: tuple[int, ...]
    goals: dict[DecodeShape, float]  # share of the read bandwidth to reach
    peers: tuple[DecodeShape, ...]
    plan_batches: tuple[int, ...]
    longest_check: int  # tokens of a sequence in the correctness checks
    copy_bytes: int  # of each buffer of the bandwidth measurement

    def shapes(self) -> list[DecodeShape]:
        """Those with a goal, then all others, by how far they are from the heads of the lists."""
        lists = (self.heads, self.batches, self.lengths, self.kv_dtypes, self.block_sizes)
        ranks = itertools.product(*(range(len(values)) for values in lists))
        shapes = [self._at(*rank) for rank in sorted(ranks, key=sum)]
        return list(dict.fromkeys((*self.goals, *shapes)))

    def _at(
        self, heads: int, batch: int, length: int, kv_dtype: int, block_size: int
    ) -> DecodeShape:
        return _shape(
            self.heads[heads],
            self.batches[batch],
            self.lengths[length],
            self.kv_dtypes[kv_dtype],
            self.block_sizes[block_size],
        )


def _shape(
    heads: tuple[int, int],
    batch: int,
    length: int,
    kv_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
) -> DecodeShape:
    num_q_heads, num_kv_heads = heads
    return DecodeShape(num_q_heads, num_kv_heads, batch, length, kv_dtype, block_size)


_MHA, _GQA_4, _GQA_8 = (32, 32), (32, 4), (32, 8)

GPU_GRID = Grid(
    heads=(_GQA_4, _MHA, _GQA_8, (64, 8), (32, 1)),
    batches=(64, 1, 8, 256),
    lengths=(8192, 1024, 4096, 65536),
    kv_dtypes=_KV_DTYPES,
    block_sizes=(16, 1, 64),
    goals={
        _shape(_GQA_4, 64, 1024): 0.77,
        _shape(_GQA_4, 64, 2048): 0.85,
        _shape(_GQA_4, 64, 4096): 0.91,
        _shape(_GQA_4, 64, 8192): 0.93,
        _shape(_MHA, 64, 1024): 0.93,
        _shape(_MHA, 1, 65536): 0.93,
        _shape(_MHA, 64, 1024, E4M3): 0.89,
        _shape(_MHA, 1, 65536, E4M3): 0.89,
        _shape(_GQA_4, 1, 65536): 0.72,
    },
    peers=(
        _shape(_GQA_4, 64, 1024),
        _shape(_GQA_4, 64, 8192),
        _shape(_MHA, 64, 1024),
        _shape(_GQA_4, 1, 65536),
        _shape(_GQA_4, 64, 8192, E4M3),
    ),
    plan_batches=(1, 64, 256, 4096),
    longest_check=4096,
    copy_bytes=1 << 30,
)

CPU_GRID = Grid(
    heads=((4, 2), (2, 2)),
    batches=(2, 1),
    lengths=(64, 48),
    kv_dtypes=_KV_DTYPES,
    block_sizes=(16, 1),
    goals={},
    peers=(_shape((4, 2), 2, 64), _shape((4, 2), 2, 64, E4M3)),
    plan_batches=(1, 4),
    longest_check=200,
    copy_bytes=1 << 20,
)
