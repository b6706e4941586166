"""Paged attention kernels for PyTorch, on CUDA and on CPU."""

from paged_attn._ops import build_info, set_debug
from paged_attn.alibi import alibi_slopes
from paged_attn.blocks import BlockManager, BlockPool, OutOfBlocksError
from paged_attn.cache import copy_blocks, gather_cache, reshape_and_cache, swap_blocks
from paged_attn.decode import DecodePlan, merge_states, paged_attention, plan_decode
from paged_attn.kv_cache import PagedKVCache

__all__ = [
    "BlockManager",
    "BlockPool",
    "DecodePlan",
    "OutOfBlocksError",
    "PagedKVCache",
    "alibi_slopes",
    "build_info",
    "copy_blocks",
    "gather_cache",
    "merge_states",
    "paged_attention",
    "plan_decode",
    "reshape_and_cache",
    "set_debug",
    "swap_blocks",
]
