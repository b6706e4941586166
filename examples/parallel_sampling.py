"""Several samples of one prompt share its blocks; a block is copied when two samples part ways."""

import torch

from paged_attn import PagedKVCache
from paged_attn.tiny_lm import PagedCache, Sampling, TinyConfig, TinyLM, generate

config = TinyConfig()
pool = PagedKVCache(
    config.num_layers,
    num_blocks=64,
    block_size=16,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    dtype=torch.float32,
)
prompt = torch.tensor(list(b"Paging lets many sequences share one memory. " * 4))
cache = PagedCache(pool)
samples = generate(TinyLM(config), cache, prompt, Sampling(num_samples=4, max_new_tokens=20))

for seq_id, sample in zip(cache.seq_ids, samples.tolist(), strict=True):
    print(pool.manager.block_table(seq_id), bytes(sample))
stats = pool.manager.stats()
unshared = sum(len(pool.manager.block_table(seq_id)) for seq_id in cache.seq_ids)
print(f"{stats.blocks_used} blocks in use, {unshared} without sharing, {stats.copies} copies")
