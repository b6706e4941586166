"""The memory of a paged KV cache: pools of all layers, their scales, and a twin in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paged_attn._checks import check_count, refuse_shallow_copy
from paged_attn._memory import zeros_in_huge_pages
from paged_attn.cache import copy_blocks, swap_blocks

__all__ = ["KVPools", "KVShape", "Scale"]

Scale = float | Literal["per_token"] | None
Pairs = Sequence[tuple[int, int]]

_ROW_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Of float32, which is what kernels multiply by.
_SMALLEST, _LARGEST = 2.0**-149, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class KVShape:
    """What a pool holds: see PagedKVCache."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the rows that are written
    kv_dtype: torch.dtype
    layout: Literal["NHD", "HND"] = "NHD"
    k_scale: Scale = None
    v_scale: Scale = None

    def check(self) -> None:
        """Raises TypeError or ValueError for what no pool can have, and what the ops cannot use."""
        for name in ("num_layers", "block_size", "num_kv_heads", "head_dim"):
            check_count(f"PagedKVCache: {name}", getattr(self, name), 1)
        check_count("PagedKVCache: num_blocks", self.num_blocks, 0)
        if self.head_dim != 512 and (self.head_dim % 8 or self.head_dim > 256):
            raise ValueError(
                "PagedKVCache: head_dim must be a multiple of 8 up to 256, or 512, got "
                f"{self.head_dim}"
            )
        if self.dtype not in _ROW_DTYPES:
            raise ValueError(
                f"PagedKVCache: dtype must be float16, bfloat16 or float32, got {self.dtype}"
            )
        if self.kv_dtype not in (self.dtype, *_EIGHT_BIT):
            raise ValueError(
                f"PagedKVCache: kv_dtype must be dtype, {self.dtype}, or float8_e4m3fn, "
                f"float8_e5m2 or int8, got {self.kv_dtype}"
            )
        if self.layout not in ("NHD", "HND"):
            raise ValueError(f'PagedKVCache: layout must be "NHD" or "HND", got {self.layout!r}')
        _check_scales(self.kv_dtype, self.k_scale, self.v_scale)

    @property
    def scales_per_token(self) -> bool:
        """Whether the pools have a scale for each token and head."""
        return self.k_scale == "per_token"

    @property
    def bytes_per_token(self) -> int:
        """Keys, values and scales of one token in all layers."""
        element = self.kv_dtype.itemsize * self.head_dim + 4 * self.scales_per_token
        return 2 * self.num_layers * self.num_kv_heads * element


class KVPools:
    """Keys and values in one zeroed allocation `[num_layers, 2, num_blocks, ...]`.

    All pools have the same strides, so that one launch copies a block in all of them.

    Attributes:
        device: where they are.
        key_caches: a pool a layer, `[num_blocks, block_size, num_kv_heads, head_dim]`.
        value_caches: as key_caches.
        k_scales: a scale a layer, as the ops take it.
        v_scales: as k_scales.
    """

    def __init__(self, shape: KVShape, device: torch.device, num_host_blocks: int = 0) -> None:
        self.shape = shape
        self._storages = _storages(shape, shape.num_blocks, device, pinned=False)
        self._host_storages: list[Tensor] = []
        if num_host_blocks:
            pinned = device.type == "cuda"
            self._host_storages = _storages(shape, num_host_blocks, torch.device("cpu"), pinned)
        self._make_views()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the memory alone, each piece once."""
        # As bytes: not every dtype can be pickled.
        memory = [
            [(storage.view(torch.uint8), storage.dtype) for storage in storages]
            for storages in (self._storages, self._host_storages)
        ]
        return {"shape": self.shape, "memory": memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.shape = state["shape"]
        self._storages, self._host_storages = (
            [storage.view(dtype) for storage, dtype in storages] for storages in state["memory"]
        )
        self._make_views()
        if self.device.type == "cuda":
            self._host_storages = [storage.pin_memory() for storage in self._host_storages]

    __copy__ = refuse_shallow_copy

    def _make_views(self) -> None:
        shape, (blocks, *scales) = self.shape, self._storages
        self.device = blocks.device  # with an index, whichever device is the current one later
        pools = blocks if shape.layout == "NHD" else blocks.transpose(3, 4)
        self.key_caches = list(pools[:, 0].unbind())
        self.value_caches = list(pools[:, 1].unbind())
        self.k_scales: list[float | Tensor | None] = [_static(shape.k_scale)] * shape.num_layers
        self.v_scales: list[float | Tensor | None] = [_static(shape.v_scale)] * shape.num_layers
        self._scale_rows: tuple[list[Tensor], list[Tensor]] = [], []
        if scales:
            self.k_scales = list(scales[0][:, 0].unbind())
            self.v_scales = list(scales[0][:, 1].unbind())
            # To copy_blocks a scale is a row of one element.
            rows = scales[0].unsqueeze(-1)
            self._scale_rows = list(rows[:, 0].unbind()), list(rows[:, 1].unbind())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools on the device, scales included."""
        return sum(storage.nbytes for storage in self._storages)

    @property
    def num_host_bytes(self) -> int:
        """Bytes of the host's pools."""
        return sum(storage.nbytes for storage in self._host_storages)

    def copy(self, pairs: Pairs) -> None:
        """Copies blocks (source, destination) in all layers."""
        if pairs:
            copy_blocks(self.key_caches, self.value_caches, pairs)
            if self._scale_rows[0]:
                copy_blocks(*self._scale_rows, pairs)

    def copy_out(self, pairs: Pairs) -> None:
        """Copies (device block, host block) in all layers, on the current stream."""
        if pairs:
            for device, host in zip(self._storages, self._host_storages, strict=True):
                _swap(device, host, pairs)

    def copy_in(self, pairs: Pairs) -> None:
        """Copies (host block, device block) in all layers, on the current stream."""
        if pairs:
            for device, host in zip(self._storages, self._host_storages, strict=True):
                _swap(host, device, pairs)


def _storages(shape: KVShape, num_blocks: int, device: torch.device, pinned: bool) -> list[Tensor]:
    """Zeroed blocks, and after them scales, where there is one a token."""
    lead = (shape.num_layers, 2, num_blocks)
    heads, size = shape.num_kv_heads, shape.block_size
    block = (size, heads) if shape.layout == "NHD" else (heads, size)
    try:
        size_of_all = (*lead, *block, shape.head_dim)
        if device.type == "cpu" and not pinned:
            blocks = zeros_in_huge_pages(size_of_all, shape.kv_dtype)
        else:
            blocks = torch.zeros(
                size_of_all, dtype=shape.kv_dtype, device=device, pin_memory=pinned
            )
        if not shape.scales_per_token:
            return [blocks]
        scales = torch.zeros(
            (*lead, size, heads), dtype=torch.float32, device=device, pin_memory=pinned
        )
    except RuntimeError as error:
        wanted = num_blocks * size * shape.bytes_per_token
        where = "pinned host memory" if pinned else str(device)
        raise RuntimeError(
            f"PagedKVCache: cannot take {wanted:,} bytes of {where} for {num_blocks} blocks: "
            f"{error}"
        ) from error
    return [blocks, scales]


def _swap(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """Copies blocks of `[num_layers, 2, num_blocks, ...]` storages, each piece contiguous."""
    num_pools = source.shape[0] * source.shape[1]
    pools = torch.arange(num_pools, dtype=torch.int64, device="cpu")[:, None]
    ids = torch.tensor(pairs, dtype=torch.int64, device="cpu")
    sources = (pools * source.shape[2] + ids[:, 0]).flatten()
    targets = (pools * target.shape[2] + ids[:, 1]).flatten()
    swap_blocks(source.flatten(0, 2), target.flatten(0, 2), torch.stack([sources, targets], dim=1))


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
        if scale is None or scale == "per_token":
            continue
        if isinstance(scale, (str, bool, Tensor)) or not hasattr(scale, "__float__"):
            raise ValueError(f'PagedKVCache: {name} must be a float or "per_token", got {scale!r}')
        if not _SMALLEST <= float(scale) <= _LARGEST:
            raise ValueError(
                f"PagedKVCache: {name} must be positive and finite in float32, got {scale}"
            )
