"""One sequence in a paged KV cache: a prompt of seven tokens, then one decode step."""

import torch

from paged_attn import PagedKVCache

device = "cuda" if torch.cuda.is_available() else "cpu"
cache = PagedKVCache(
    num_layers=1,
    num_blocks=64,
    block_size=16,
    num_kv_heads=2,
    head_dim=64,
    dtype=torch.bfloat16,
    device=device,
)


def rows(num_tokens: int, num_heads: int) -> torch.Tensor:
    """Stands for what a model's projections give."""
    return torch.randn(num_tokens, num_heads, 64, dtype=torch.bfloat16, device=device)


seq = cache.add()
for num_tokens in (7, 1):
    batch = cache.step([seq], [num_tokens])  # where the new tokens go; once for all layers
    cache.write(0, rows(num_tokens, 2), rows(num_tokens, 2), batch)
    out = cache.attend(0, rows(num_tokens, 8), batch)
    print(tuple(out.shape), cache.manager.block_table(seq), cache.manager.stats())
