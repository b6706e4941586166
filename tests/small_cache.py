"""A PagedKVCache that fits on a hand, and rows to write to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_attn import PagedKVCache

HEAD_DIM = 8


def make_cache(**options: Any) -> PagedKVCache:
    settings: dict[str, Any] = {
        "num_layers": 2,
        "num_blocks": 8,
        "block_size": 4,
        "num_kv_heads": 2,
        "head_dim": HEAD_DIM,
        "dtype": torch.float32,
    }
    return PagedKVCache(**settings | options)


def rows(num_tokens: int, heads: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, heads, HEAD_DIM, generator=generator)


def pools(num_blocks: int = 4, block_size: int = 4) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, block_size, 2, HEAD_DIM)
    return torch.arange(float(np.prod(shape))).reshape(shape), torch.zeros(shape)


def attention_inputs() -> dict[str, Any]:
    key, value = pools()
    return {
        "query": rows(2, 4),
        "key_cache": key,
        "value_cache": value,
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 7], dtype=torch.int32),
    }
