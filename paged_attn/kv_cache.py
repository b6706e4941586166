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

import functools
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from paged_attn._checks import check_count, refuse_shallow_copy
from paged_attn.blocks import BlockManager, Prompt
from paged_attn.cache import gather_cache, reshape_and_cache
from paged_attn.decode import ChunkSize, paged_attention
from paged_attn.device_tables import DeviceTables, StepLists
from paged_attn.kv_batch import Batch
from paged_attn.kv_pools import KVPools, KVShape, Scale
from paged_attn.kv_swap import Swapper
from paged_attn.staging import CudaEvent, StagingRing

__all__ = ["Batch", "PagedKVCache"]


class PagedKVCache:
    """Keys and values of many sequences in blocks of `block_size` tokens, for all layers.

    * dtype: of the keys and values given to write(); kv_dtype: of the pools, by default the same,
      else float8_e4m3fn, float8_e5m2 or int8.
    * layout: order in memory of a block, "NHD" (token, head, dim) or "HND" (head, token, dim); the
      tensors are `[num_blocks, block_size, num_kv_heads, head_dim]` views for both.
    * k_scale, v_scale: value = stored * scale. A float, the same for all layers; or "per_token" for
      both and an 8-bit kv_dtype: one scale a token and head, computed by write(). None means 1; an
      int8 cache needs scales.
    * num_host_blocks: blocks of host memory (pinned for CUDA) to swap sequences out to.
    * overlap_swaps: swap on a stream of its own; see `paged_attn.kv_swap.Swapper`.
    * num_q_heads: query heads of the model, if step() is to make the plan; else attend() does.
    * chunk_size: of the plans: a sequence's bits do not depend on its batch; see plan_decode.
    * manager_options: enable_prefix_caching, hash_function, watermark, record_events of
      `paged_attn.blocks.BlockManager`.

    Memory is taken once: `bytes_total`, zeroed. Work on a CUDA device is put on the current stream;
    nothing waits for the device. Use one stream for all calls, or order the streams. Raises
    ValueError for arguments that do not fit, RuntimeError where there is not enough memory.

    copy.deepcopy() and pickle, torch.save() with it, copy the memory and the tables, in the state
    they are in; batches made before belong to the original. copy.copy() is refused.
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
        num_host_blocks: int = 0,
        overlap_swaps: bool = False,
        num_q_heads: int | None = None,
        chunk_size: ChunkSize = None,
        **manager_options: Any,
    ) -> None:
        self.dtype = dtype
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self.num_q_heads = num_q_heads
        self.chunk_size = chunk_size
        shape = KVShape(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=self.kv_dtype,
            layout=layout,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        shape.check()
        if num_q_heads is not None:
            check_count("PagedKVCache: num_q_heads", num_q_heads, 1)
            if num_q_heads % num_kv_heads:
                raise ValueError(
                    "PagedKVCache: num_q_heads must be a multiple of num_kv_heads "
                    f"({num_kv_heads}), got {num_q_heads}"
                )
        if chunk_size is not None and chunk_size != "auto":
            check_count('PagedKVCache: chunk_size, unless "auto",', chunk_size, 1)
        check_count("PagedKVCache: num_host_blocks", num_host_blocks, 0)
        # The memory first: where there is not enough, there is no need for tables of its blocks.
        self.pools = KVPools(shape, torch.device(device), num_host_blocks)
        self.manager = BlockManager(
            num_blocks, block_size, num_host_blocks=num_host_blocks, **manager_options
        )
        self.device = self.pools.device
        on_cuda = self.device.type == "cuda"
        make_event = functools.partial(CudaEvent, self.device) if on_cuda else None
        ring = StagingRing(self.device, make_event)
        self._tables = DeviceTables(self.manager, ring)
        self._swapper = Swapper(self.manager, self.pools, self.device, overlap=overlap_swaps)

    __copy__ = refuse_shallow_copy

    @property
    def key_caches(self) -> list[Tensor]:
        """A pool a layer, `[num_blocks, block_size, num_kv_heads, head_dim]` of kv_dtype."""
        return self.pools.key_caches

    @property
    def value_caches(self) -> list[Tensor]:
        """As key_caches."""
        return self.pools.value_caches

    @property
    def k_scales(self) -> list[float | Tensor | None]:
        """The scale of each layer, as the ops take it."""
        return self.pools.k_scales

    @property
    def v_scales(self) -> list[float | Tensor | None]:
        """As k_scales."""
        return self.pools.v_scales

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
        """Bytes of all pools on the device, scales included."""
        return self.pools.num_bytes

    @property
    def host_bytes_total(self) -> int:
        """Bytes of the host's pools."""
        return self.pools.num_host_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes: keys, values and scales of all layers."""
        return self.pools.shape.bytes_per_token

    @property
    def bytes_used(self) -> int:
        """Bytes of the blocks that sequences use now, each block counted once."""
        return self.manager.pool.num_used * self.block_size * self.bytes_per_token

    @property
    def bytes_cached(self) -> int:
        """Bytes of blocks that no sequence uses, kept for prompts that begin with their tokens."""
        return self.manager.pool.num_cached * self.block_size * self.bytes_per_token

    def add(self, num_tokens: int = 0) -> int:
        """A new sequence; with `num_tokens`, its blocks are taken now and batch() gives its slots.

        Raises OutOfBlocksError.
        """
        self._swapper.poll()
        return self.manager.add(num_tokens)

    def add_prompt(
        self, tokens: Iterable[int], *, salt: str = "", num_tokens: int | None = None
    ) -> Prompt:
        """A new sequence of a prompt: its id, and how many first tokens are cached already.

        Run the others, with batch() for those the sequence has and step() for further ones, then
        call mark_written(). Arguments and errors: see `BlockManager.add_prompt`.
        """
        self._swapper.poll()
        return self.manager.add_prompt(tokens, salt=salt, num_tokens=num_tokens)

    def mark_written(
        self, seq_id: int, tokens: Iterable[int] = (), *, end: int | None = None
    ) -> None:
        """Lets prompts find the sequence's full blocks; after write() was called for all layers.

        Arguments and errors: see `BlockManager.mark_written`.
        """
        self.manager.mark_written(seq_id, tokens, end=end)

    def append(self, seq_id: int, num_tokens: int = 1) -> list[int]:
        """Makes a sequence longer, copies its shared last block if it must, returns the slots.

        Raises OutOfBlocksError.
        """
        old_len = self.manager.seq_len(seq_id)
        slots, copies = self.manager.append(seq_id, num_tokens)
        try:
            self.pools.copy(copies)
        except BaseException:
            self.manager.undo_append([seq_id], [old_len], copies)
            raise
        return slots

    def fork(self, seq_id: int) -> int:
        """A new sequence with the same tokens, in the same blocks. Copies nothing now."""
        return self.manager.fork(seq_id)

    def reorder(self, seq_ids: Sequence[int], parents: Sequence[int]) -> None:
        """Beam search: seq_ids[i] becomes what parents[i] was. Copies nothing now."""
        self.manager.reorder(seq_ids, parents)

    def truncate(self, seq_id: int, new_len: int) -> None:
        """Drops the tokens from `new_len` on: rejected drafts."""
        self.manager.truncate(seq_id, new_len)

    def free(self, seq_id: int) -> None:
        """Forgets a sequence, wherever it is; its blocks are reused."""
        self.manager.free(seq_id)
        self._tables.forget(seq_id)

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        """Moves sequences to host memory; blocks that they share are moved once.

        Raises OutOfBlocksError, before anything is changed, if the host has too few blocks.
        """
        self._swapper.swap_out(seq_ids)

    def swap_in(self, seq_ids: Sequence[int]) -> None:
        """Moves sequences back to the device. Raises OutOfBlocksError."""
        self._swapper.swap_in(seq_ids)

    def poll_swaps(self) -> int:
        """Gives back blocks whose copies have run; returns how many swaps have not. Never waits.

        add(), add_prompt(), step() and the swaps do it, too.
        """
        return self._swapper.poll()

    def step(
        self,
        seq_ids: Sequence[int],
        query_lens: int | Sequence[int] = 1,
        *,
        max_blocks: int | None = None,
        out: Batch | None = None,
    ) -> Batch:
        """Makes each sequence `query_lens` tokens longer and returns where and how to run them.

        Shared last blocks that are about to be written are copied, in all layers.

        Args:
            seq_ids: the sequences, all different.
            query_lens: tokens for each sequence, or one number for all.
            max_blocks: width of the tables, if more than this step needs.
            out: a batch to write into, for CUDA graphs that read its tensors: at least as many
                sequences, tokens and blocks; the rest is padding. Its plans are made anew.

        Raises:
            OutOfBlocksError: for all sequences or none.
            ValueError: query_lens does not fit seq_ids, or the step is too large for max_blocks or
                out.

        Whatever it raises, the sequences are as long as before.
        """
        self._swapper.poll()
        lens = self._query_lens("step", seq_ids, query_lens)
        old_lens = self.manager.seq_lens(seq_ids)
        new_lens = [length + n for length, n in zip(old_lens, lens, strict=True)]
        width = self._width("step", lens, new_lens, max_blocks, out)
        slots, copies = self.manager.append_batch(seq_ids, lens)
        try:
            self.pools.copy(copies)
            return self._batch(StepLists(seq_ids, slots, new_lens, _ends(lens), width), lens, out)
        except BaseException:
            self.manager.undo_append(seq_ids, old_lens, copies)
            raise

    def batch(self, seq_ids: Sequence[int], query_lens: int | Sequence[int] = 1) -> Batch:
        """As step(), for the last `query_lens` tokens that the sequences already have."""
        lens = self._query_lens("batch", seq_ids, query_lens)
        seq_lens = self.manager.seq_lens(seq_ids)
        slots: list[int] = []
        for seq_id, seq_len, query_len in zip(seq_ids, seq_lens, lens, strict=True):
            if query_len > seq_len:
                raise ValueError(
                    f"PagedKVCache.batch: query_lens must be at most {seq_len} for sequence "
                    f"{seq_id}, the tokens it has, got {query_len}"
                )
        for seq_id, seq_len, query_len in zip(seq_ids, seq_lens, lens, strict=True):
            slots += self.manager.slots(seq_id, seq_len - query_len, seq_len)
        width = self._width("batch", lens, seq_lens, None, None)
        return self._batch(StepLists(seq_ids, slots, seq_lens, _ends(lens), width), lens, None)

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        """Stores the batch's keys and values, `[num_tokens, num_kv_heads, head_dim]` of `dtype`.

        `[num_seqs, query_len, num_kv_heads, head_dim]` is taken too. Raises IndexError for a layer
        that there is not, ValueError for another number of tokens; see `reshape_and_cache`.
        """
        layer = self._layer("write", layer)
        batch.check_rows("write", "key", key)
        batch.check_rows("write", "value", value)
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
        return_lse). Returns out of query's shape, or (out, lse) with return_lse=True. The plan is
        made by the first call of a step and used by all layers with the same heads and mask. Raises
        IndexError for a layer that there is not, ValueError for another number of tokens; see
        `paged_attention`.
        """
        layer = self._layer("attend", layer)
        batch.check_rows("attend", "query", query)
        key_cache = self.key_caches[layer]
        plan = batch.plan_for(
            query,
            key_cache,
            causal=kwargs.get("causal", True),
            sliding_window=kwargs.get("sliding_window"),
            chunk_size=self.chunk_size,
        )
        return paged_attention(
            query,
            key_cache,
            self.value_caches[layer],
            batch.block_tables,
            batch.seq_lens,
            cu_query_lens=batch.cu_query_lens if query.dim() == 3 else None,
            k_scale=self.k_scales[layer],
            v_scale=self.v_scales[layer],
            plan=plan,
            **kwargs,
        )

    def gather(self, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Reads the batch's whole sequences: keys and values, packed one after another.

        Each `[sum(seq_lens), num_kv_heads, head_dim]`, dequantised to `dtype`. On CUDA it waits for
        the device, which alone knows the lengths.
        """
        layer = self._layer("gather", layer)
        return gather_cache(
            self.key_caches[layer],
            self.value_caches[layer],
            batch.block_tables,
            batch.seq_lens,
            k_scale=self.k_scales[layer],
            v_scale=self.v_scales[layer],
            dtype=self.dtype,
        )

    def _layer(self, method: str, layer: int) -> int:
        try:
            number = index(layer)
        except TypeError:
            raise TypeError(
                f"PagedKVCache.{method}: layer must be an int, got {type(layer).__name__}"
            ) from None
        if not 0 <= number < self.num_layers:
            raise IndexError(
                f"PagedKVCache.{method}: layer must be in [0, {self.num_layers}), got {number}"
            )
        return number

    def _query_lens(
        self, method: str, seq_ids: Sequence[int], query_lens: int | Sequence[int]
    ) -> list[int]:
        what = f"PagedKVCache.{method}: query_lens"
        if isinstance(query_lens, Iterable):
            lens = [check_count(what, n, 0) for n in query_lens]
        else:
            lens = [check_count(what, query_lens, 0)] * len(seq_ids)
        if len(lens) != len(seq_ids):
            raise ValueError(
                f"PagedKVCache.{method}: query_lens must be an int or have one entry for each of "
                f"{len(seq_ids)} sequences, got {len(lens)}"
            )
        return lens

    def _width(
        self,
        method: str,
        query_lens: list[int],
        seq_lens: list[int],
        max_blocks: int | None,
        out: Batch | None,
    ) -> int:
        """Width of the tables; raises ValueError if the step does not fit."""
        needed = -(-max(seq_lens, default=0) // self.block_size)
        if out is not None:
            out.check_room(method, query_lens, needed)
            return out.block_tables.shape[1]
        if max_blocks is not None and max_blocks < needed:
            raise ValueError(
                f"PagedKVCache.{method}: max_blocks must be at least {needed}, got {max_blocks}"
            )
        return needed if max_blocks is None else max_blocks

    def _batch(self, step: StepLists, query_lens: list[int], out: Batch | None) -> Batch:
        if out is not None:
            step = out.pad(step)
        tensors = self._tables.upload(step)
        batch = Batch(
            slot_mapping=tensors.slot_mapping,
            block_tables=tensors.block_tables,
            seq_lens=tensors.seq_lens,
            cu_query_lens=tensors.cu_query_lens,
            query_len=_uniform(query_lens, len(step.seq_lens)),
        )
        if out is not None:
            return out.become(batch)
        if self.num_q_heads is not None:
            shape = self.pools.shape
            batch.plan_step(
                self.num_q_heads,
                shape.num_kv_heads,
                shape.head_dim,
                self.chunk_size,
                shape.kv_dtype,
            )
        return batch


def _uniform(query_lens: list[int], num_seqs: int) -> int:
    """The tokens of each of so many sequences; 0 if they differ."""
    first = query_lens[0] if query_lens else 1
    # A sequence that pads a batch of one token each has a token, too, which sees nothing.
    padded = len(query_lens) < num_seqs and first != 1
    return 0 if padded or query_lens.count(first) != len(query_lens) else first


def _ends(query_lens: list[int]) -> list[int] | None:
    """cu_query_lens, or None where each sequence has one token."""
    if query_lens.count(1) == len(query_lens):
        return None
    ends = [0]
    for query_len in query_lens:
        ends.append(ends[-1] + query_len)
    return ends
