"""Memory for pools on a CPU: in 2 MiB pages where the system has them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HUGE_PAGE_BYTES", "zeros_in_huge_pages"]

HUGE_PAGE_BYTES = 2 << 20


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns zeros on the CPU whose memory asks for huge pages, aligned to one.

    Decoding reads blocks in random order: in pages of 4 KiB every block costs several misses of the
    TLB, in pages of 2 MiB hardly any. It is advice: where transparent huge pages are switched off
    ("never"), or the system knows none, the memory is as any other. Pages are taken when first
    touched. Less than a huge page is taken from torch.

    Args:
        shape: of the tensor.
        dtype: of the tensor.

    Returns:
        A contiguous tensor; its memory is freed with the last tensor that views it.
    """
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    try:
        # Private and anonymous: shared memory has a switch of its own, which is off by default.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # no transparent huge pages, or no memory, which torch puts into words
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[begin : begin + num_bytes].view(dtype).view(tuple(shape))
