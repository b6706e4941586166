"""Two questions about one document: the second finds the document's blocks in the prefix cache.

Then the first conversation gives its memory to the host, and gets it back.
"""

import torch

from paged_attn import PagedKVCache

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 4, 64
cache = PagedKVCache(
    NUM_LAYERS,
    num_blocks=64,
    block_size=16,
    num_kv_heads=NUM_HEADS,
    head_dim=HEAD_DIM,
    dtype=torch.float32,
    num_host_blocks=32,
    enable_prefix_caching=True,
)


def prefill(tokens: list[int]) -> int:
    """Runs the part of a prompt that is not cached; the numbers stand for a model's."""
    seq_id, num_cached = cache.add_prompt(tokens)
    new = len(tokens) - num_cached
    batch = cache.batch([seq_id], new)
    for layer in range(NUM_LAYERS):
        key, value, query = torch.randn(3, new, NUM_HEADS, HEAD_DIM)
        cache.write(layer, key, value, batch)
        cache.attend(layer, query, batch)
    cache.mark_written(seq_id)  # from now on other prompts may find it
    print(f"sequence {seq_id}: {num_cached} of {len(tokens)} tokens were cached, {new} run")
    return seq_id


document = list(range(200))
first = prefill([*document, 1001, 1002])
second = prefill([*document, 2001, 2002, 2003])
stats = cache.manager.stats()
print(f"{stats.blocks_used} blocks in use, {stats.blocks_shared} of them by both")

cache.swap_out([first])
print(f"swapped out: {cache.manager.stats().host_blocks_used} blocks are on the host")
cache.swap_in([first])
cache.free(first)
cache.free(second)
stats = cache.manager.stats()
print(f"both gone: {stats.blocks_cached} blocks are kept for the next question")
