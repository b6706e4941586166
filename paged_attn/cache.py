"""Writing, copying, moving and reading the blocks of a paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from paged_attn import _ops
from paged_attn._ops import Scale, split_scale

BlockMapping = Tensor | Iterable[Sequence[int]] | Mapping[int, int | Sequence[int]]


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Writes the keys and values of new tokens to their slots, quantising on the way.

    Args:
        key: [num_tokens, num_kv_heads, head_dim] float16, bfloat16 or float32; any strides but the
            last, which is 1.
        value: as key; its strides may differ.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], key's dtype, float8_e4m3fn,
            float8_e5m2 or int8; written in place; any strides but the last.
        value_cache: as key_cache.
        slot_mapping: [n] int64 (int32 is converted), n <= num_tokens: token i goes to slot
            slot_mapping[i] = block * block_size + offset. Negative: the token is skipped. Tokens
            from n on are not read. No slot may be named twice.
        k_scale: stored = value / scale. None (1; an error for int8), a float, or a float32 tensor
            of shape [] or [num_kv_heads], which is read; or of shape [num_blocks, block_size,
            num_kv_heads], which is computed and written: the largest finite magnitude of a row
            becomes the largest value of the format, and an all-zero row has scale 0.
        v_scale: as k_scale.

    float8 and int8 round to nearest, ties to even, and saturate, infinities too; NaN stays NaN in
    float8 and becomes 0 in int8.

    Raises:
        RuntimeError: an argument does not fit, or requires a gradient while gradients are recorded;
            the message names it, and nothing was written. On CPU slots are checked always, on CUDA
            in debug mode (`paged_attn.set_debug`).

    Runs on the current stream of key's device and never waits for it; can be captured in a CUDA
    graph.
    """
    if torch.is_grad_enabled():
        _ops.refuse_gradients(
            "reshape_and_cache",
            "key value key_cache value_cache k_scale v_scale",
            (key, value, key_cache, value_cache, k_scale, v_scale),
        )
    k_tensor, k_float = split_scale(k_scale)
    v_tensor, v_float = split_scale(v_scale)
    _ops.lib.reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping, k_tensor, v_tensor, k_float, v_float
    )


def gather_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
    dtype: torch.dtype | None = None,
    total_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Reads whole sequences out of the cache, packed one after another and dequantised.

    Args:
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], as for `paged_attention`.
        value_cache: as key_cache.
        block_tables: [num_seqs, max_blocks] int32 (int64 is converted), any strides.
        seq_lens: [num_seqs] int32 (int64 is converted), tokens.
        k_scale: as for `paged_attention`.
        v_scale: as for `paged_attention`.
        dtype: of the result: float16, bfloat16 or float32. Default: the cache's own, or float32
            for an 8-bit cache.
        total_tokens: rows of the result, at least sum(seq_lens); further rows are 0. Default:
            sum(seq_lens), which for a CUDA tensor waits for the device.

    Returns:
        (key, value), each [total_tokens, num_kv_heads, head_dim] and contiguous: sequence s has the
        rows [sum(seq_lens[:s]), sum(seq_lens[:s + 1])).

    Raises:
        RuntimeError: an argument does not fit; the message names it.

    Runs on the current stream of key_cache's device; waits only as said at total_tokens.
    """
    if torch.is_grad_enabled():
        _ops.refuse_gradients(
            "gather_cache",
            "key_cache value_cache k_scale v_scale",
            (key_cache, value_cache, k_scale, v_scale),
        )
    if total_tokens is None:
        total_tokens = int(seq_lens.sum())
    k_tensor, k_float = split_scale(k_scale)
    v_tensor, v_float = split_scale(v_scale)
    key, value = _ops.lib.gather_cache(
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        k_tensor,
        v_tensor,
        k_float,
        v_float,
        dtype,
        total_tokens,
    )
    return key, value


def _pairs(block_mapping: Mapping[int, int | Sequence[int]]) -> Iterator[tuple[object, object]]:
    for source, targets in block_mapping.items():
        if isinstance(targets, (list, tuple, set, frozenset)):
            yield from ((source, target) for target in targets)
        else:
            yield source, targets


def _as_mapping(op: str, block_mapping: BlockMapping) -> Tensor:
    """Pairs as an int64 CPU tensor [n, 2]; a tensor as it is, for the op to check."""
    if isinstance(block_mapping, Tensor):
        return block_mapping
    pairs: list[tuple[int, int]] = []
    item: Any = block_mapping
    try:
        items = _pairs(block_mapping) if isinstance(block_mapping, Mapping) else block_mapping
        for item in items:
            source, target = item
            if isinstance(source, bool) or isinstance(target, bool):
                raise TypeError
            pairs.append((index(source), index(target)))
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: block_mapping must be pairs of ints (source, destination), a mapping of source "
            f"to destination or to a list of them, or an int64 tensor [n, 2], got {item!r}"
        ) from None
    return torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)


def copy_blocks(
    key_caches: Tensor | Sequence[Tensor],
    value_caches: Tensor | Sequence[Tensor],
    block_mapping: BlockMapping,
) -> None:
    """Copies blocks within the caches, for all layers and all pairs in one launch.

    Args:
        key_caches: a cache [num_blocks, block_size, num_kv_heads, head_dim] for each layer, or one
            alone; any dtype, one shape for all; any strides but the last.
        value_caches: as key_caches, as many.
        block_mapping: pairs (source, destination): a list of them, or a mapping of each source to
            its destination or a list of its destinations; or an int64 tensor [n, 2] (int32 is
            converted) on the CPU or on the caches' device. All pairs are one simultaneous copy: no
            block may be a destination twice, or both source and destination.

    Raises:
        TypeError: block_mapping is none of these.
        RuntimeError: an argument does not fit; the message names it, and nothing was copied. The
            pairs are checked where the mapping is on the CPU, and in debug mode
            (`paged_attn.set_debug`); a mapping on a CUDA device is trusted else.

    Runs on the current stream of the caches' device and never waits for it. A mapping on the CPU
    may be changed as soon as the call returns.
    """
    keys = [key_caches] if isinstance(key_caches, Tensor) else list(key_caches)
    values = [value_caches] if isinstance(value_caches, Tensor) else list(value_caches)
    _ops.lib.copy_blocks(keys, values, _as_mapping("copy_blocks", block_mapping))


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: BlockMapping) -> None:
    """Copies blocks from one pool to another, between devices or on one.

    Args:
        src: [num_blocks, ...], any dtype and strides.
        dst: [num_blocks, ...], src's dtype and block shape; its number of blocks may differ.
        block_mapping: pairs (block of src, block of dst), as for `copy_blocks`; a tensor must be on
            the CPU. No block of dst may be named twice.

    Raises:
        TypeError: block_mapping is neither pairs nor a mapping nor a tensor.
        RuntimeError: an argument does not fit; the message names it, and nothing was copied.

    Between a CUDA device and pinned host memory the copies run on the device's current stream, and
    the call returns at once: synchronise with that stream before the host reads dst or reuses src.
    Host memory that is not pinned makes the call wait.
    """
    _ops.lib.swap_blocks(src, dst, _as_mapping("swap_blocks", block_mapping))
