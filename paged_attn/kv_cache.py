"""A paged KV cache in one object: the pools of all layers, the block manager and the ops.

cache = PagedKVCache(num_layers=32, num_blocks=4096, block_size=16, num_kv_heads=8,
                     head_dim=128, dtype=torch.bfloat16, device="cuda")
seq = cache.add()
batch = cache.step([seq], [len(prompt)])        # once a step
for layer in range(32):
    cache.write(layer, key, value, batch)       # [num_tokens, num_kv_heads, head_dim]
    out = cache.attend(layer, query, batch)     # [num_tokens, num_q_heads, head_dim]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paged_attn.blocks import BlockManager
from paged_attn.cache import copy_blocks, reshape_and_cache
from paged_attn.decode import DecodePlan, paged_attention

__all__ = ["Batch", "PagedKVCache"]

Scale = float | Literal["per_token"] | None

_EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@dataclass(frozen=True)
class Batch:
    """One step's tokens, as the ops take them: tensors on the cache's device.

    The tokens are those of the first sequence, then those of the second, and so on.
    """

    slot_mapping: Tensor  # int64 [num_tokens]
    block_tables: Tensor  # int32 [num_seqs, max_blocks], -1 past a sequence's blocks
    seq_lens: Tensor  # int32 [num_seqs], the tokens of this step included
    cu_query_lens: Tensor | None  # int32 [num_seqs + 1]; None: one token each
    plan: DecodePlan | None = None  # None: attend() makes its own


class PagedKVCache:
    """Keys and values of many sequences in blocks of `block_size` tokens, for all layers.

    * dtype: of the keys and values given to write(); kv_dtype: of the pools, by default the same,
      else float8_e4m3fn, float8_e5m2 or int8.
    * layout: order in memory of a block, "NHD" (token, head, dim) or "HND" (head, token, dim); the
      tensors are `[num_blocks, block_size, num_kv_heads, head_dim]` views for both.
    * k_scale, v_scale: value = stored * scale. A float, the same for all layers; or "per_token" for
      both and an 8-bit kv_dtype: one scale a token and head, computed by write(). None means 1; an
      int8 cache needs scales.

    Memory is taken once: `bytes_total`, zeroed. Work on a CUDA device is put on the current stream;
    nothing waits for the device. Raises ValueError for arguments that do not fit.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        layout: Literal["NHD", "HND"] = "NHD",
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        for name, value in (
            ("num_layers", num_layers),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
        ):
            if value < 1:
                raise ValueError(f"PagedKVCache: {name} must be at least 1, got {value}")
        if layout not in ("NHD", "HND"):
            raise ValueError(f'PagedKVCache: layout must be "NHD" or "HND", got {layout!r}')
        self.manager = BlockManager(num_blocks, block_size)
        self.dtype = dtype
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.device = torch.device(device)
        _check_scales(self.kv_dtype, k_scale, v_scale)

        block = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
        # K and V of all layers: one allocation, so that all pools have the same strides.
        storage = torch.zeros(
            (num_layers, 2, num_blocks, *block, head_dim), dtype=self.kv_dtype, device=self.device
        )
        pools = storage if layout == "NHD" else storage.transpose(3, 4)
        self._storages = [storage]
        self.key_caches = list(pools[:, 0].unbind())  # a pool a layer
        self.value_caches = list(pools[:, 1].unbind())
        self.k_scales: list[float | Tensor | None] = [_static(k_scale)] * num_layers
        self.v_scales: list[float | Tensor | None] = [_static(v_scale)] * num_layers
        self._scale_pools: tuple[list[Tensor], list[Tensor]] | None = None
        self._bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * storage.element_size()
        if k_scale == "per_token":
            scales = storage.new_zeros(
                (num_layers, 2, num_blocks, block_size, num_kv_heads), dtype=torch.float32
            )
            self._storages.append(scales)
            self._bytes_per_token += 2 * num_layers * num_kv_heads * scales.element_size()
            self.k_scales = list(scales[:, 0].unbind())
            self.v_scales = list(scales[:, 1].unbind())
            # To copy_blocks a scale is a row of one element.
            rows = scales.unsqueeze(-1)
            self._scale_pools = list(rows[:, 0].unbind()), list(rows[:, 1].unbind())

    @property
    def num_layers(self) -> int:
        """Layers, each with a pool of keys and a pool of values."""
        return len(self.key_caches)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.manager.block_size

    @property
    def bytes_total(self) -> int:
        """Bytes of all pools, scales included."""
        return sum(storage.nbytes for storage in self._storages)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes: keys, values and scales of all layers."""
        return self._bytes_per_token

    @property
    def bytes_used(self) -> int:
        """Bytes of the blocks that sequences use now, each block counted once."""
        used = self.manager.num_blocks - self.manager.num_free_blocks
        return used * self.block_size * self.bytes_per_token

    def add(self, num_tokens: int = 0) -> int:
        """A new sequence; with `num_tokens`, its blocks are taken now and batch() gives its slots.

        Raises OutOfBlocksError.
        """
        return self.manager.add(num_tokens)

    def append(self, seq_id: int, num_tokens: int = 1) -> list[int]:
        """Makes a sequence longer, copies its shared last block if it must, returns the slots.

        Raises OutOfBlocksError.
        """
        slots, copies = self.manager.append(seq_id, num_tokens)
        self._copy(copies)
        return slots

    def fork(self, seq_id: int) -> int:
        """A new sequence with the same tokens, in the same blocks. Copies nothing now."""
        return self.manager.fork(seq_id)

    def truncate(self, seq_id: int, new_len: int) -> None:
        """Drops the tokens from `new_len` on: rejected drafts."""
        self.manager.truncate(seq_id, new_len)

    def free(self, seq_id: int) -> None:
        """Forgets a sequence; its blocks are reused."""
        self.manager.free(seq_id)

    def step(self, seq_ids: Sequence[int], query_lens: int | Sequence[int] = 1) -> Batch:
        """Makes each sequence `query_lens` tokens longer and returns where and how to run them.

        Shared last blocks that are about to be written are copied, in all layers. An int is the
        number of tokens for each sequence. Raises OutOfBlocksError, for all sequences or none.
        """
        lens = self._query_lens("step", seq_ids, query_lens)
        appends = self.manager.append_many(seq_ids, lens)
        self._copy([pair for append in appends for pair in append.copies])
        return self._batch(seq_ids, lens, [slot for append in appends for slot in append.slots])

    def batch(self, seq_ids: Sequence[int], query_lens: int | Sequence[int] = 1) -> Batch:
        """As step(), for the last `query_lens` tokens that the sequences already have."""
        lens = self._query_lens("batch", seq_ids, query_lens)
        slots: list[int] = []
        for seq_id, query_len in zip(seq_ids, lens, strict=True):
            seq_len = self.manager.seq_len(seq_id)
            slots += self.manager.slots(seq_id, seq_len - query_len, seq_len)
        return self._batch(seq_ids, lens, slots)

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        """Stores the batch's keys and values, `[num_tokens, num_kv_heads, head_dim]` of `dtype`.

        `[num_seqs, query_len, num_kv_heads, head_dim]` is taken too.
        """
        reshape_and_cache(
            key.flatten(0, -3),
            value.flatten(0, -3),
            self.key_caches[layer],
            self.value_caches[layer],
            batch.slot_mapping,
            k_scale=self.k_scales[layer],
            v_scale=self.v_scales[layer],
        )

    def attend(self, layer: int, query: Tensor, batch: Batch, **kwargs: Any) -> Any:
        """Attention of the batch's queries over their sequences, as decode.paged_attention.

        query: `[num_tokens, num_q_heads, head_dim]` or, where all sequences have the same number of
        tokens, `[num_seqs, query_len, num_q_heads, head_dim]`. kwargs: any other argument of
        paged_attention (scale, causal, sliding_window, softcap, alibi_slopes, sinks, out,
        return_lse). Returns out of query's shape, or (out, lse) with return_lse=True.
        """
        return paged_attention(
            query,
            self.key_caches[layer],
            self.value_caches[layer],
            batch.block_tables,
            batch.seq_lens,
            cu_query_lens=batch.cu_query_lens if query.dim() == 3 else None,
            k_scale=self.k_scales[layer],
            v_scale=self.v_scales[layer],
            plan=batch.plan,
            **kwargs,
        )

    def _query_lens(
        self, method: str, seq_ids: Sequence[int], query_lens: int | Sequence[int]
    ) -> list[int]:
        lens = [query_lens] * len(seq_ids) if isinstance(query_lens, int) else list(query_lens)
        if len(lens) != len(seq_ids):
            raise ValueError(
                f"PagedKVCache.{method}: query_lens must be an int or have one entry for each of "
                f"{len(seq_ids)} sequences, got {len(lens)}"
            )
        return lens

    def _batch(self, seq_ids: Sequence[int], query_lens: list[int], slots: list[int]) -> Batch:
        tables = [self.manager.block_table(seq_id) for seq_id in seq_ids]
        max_blocks = max(map(len, tables), default=0)
        for table in tables:
            table += [-1] * (max_blocks - len(table))
        block_tables = self._upload(tables, torch.int32).reshape(len(tables), max_blocks)
        cu_query_lens = None
        if any(query_len != 1 for query_len in query_lens):
            ends = [0]
            for query_len in query_lens:
                ends.append(ends[-1] + query_len)
            cu_query_lens = self._upload(ends, torch.int32)
        return Batch(
            slot_mapping=self._upload(slots, torch.int64),
            block_tables=block_tables,
            seq_lens=self._upload([self.manager.seq_len(seq) for seq in seq_ids], torch.int32),
            cu_query_lens=cu_query_lens,
        )

    def _upload(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        host = torch.tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return host.to(self.device)
        # Torch keeps pinned memory from reuse until the copy, which the host does not wait for.
        return host.pin_memory().to(self.device, non_blocking=True)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            copy_blocks(self.key_caches, self.value_caches, copies)
            if self._scale_pools is not None:
                copy_blocks(*self._scale_pools, copies)


def _static(scale: Scale) -> float | None:
    return None if scale is None or scale == "per_token" else float(scale)


def _check_scales(kv_dtype: torch.dtype, k_scale: Scale, v_scale: Scale) -> None:
    if (k_scale == "per_token") != (v_scale == "per_token"):
        raise ValueError(
            'PagedKVCache: k_scale and v_scale must both be "per_token" or neither, '
            f"got {k_scale!r} and {v_scale!r}"
        )
    if k_scale == "per_token" and kv_dtype not in _EIGHT_BIT:
        raise ValueError(
            "PagedKVCache: kv_dtype must be float8_e4m3fn, float8_e5m2 or int8 for scales per "
            f"token, got {kv_dtype}"
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None and kv_dtype == torch.int8:
            raise ValueError(f"PagedKVCache: {name} must be given for an int8 cache")
        if isinstance(scale, (int, float)) and not 0 < scale < float("inf"):
            raise ValueError(f"PagedKVCache: {name} must be positive and finite, got {scale}")
        if isinstance(scale, str) and scale != "per_token":
            raise ValueError(f'PagedKVCache: {name} must be a float or "per_token", got {scale!r}')
