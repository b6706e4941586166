"""Slopes of attention with linear biases (ALiBi)."""

from __future__ import annotations

import torch

from paged_attn._checks import check_count

__all__ = ["alibi_slopes"]


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """The slopes of `num_heads` query heads, fp32 `[num_heads]` on the CPU.

    For n a power of two, head i (from 0) has 2 ** (-8 (i + 1) / n). Otherwise those of the largest
    power of two m below n come first, then every other slope of 2 m heads, from its first on: 12
    heads have 2 ** -1 ... 2 ** -8, then 2 ** -0.5, 2 ** -1.5, 2 ** -2.5, 2 ** -3.5.

    Source: Press et al. 2022, "Train Short, Test Long", arXiv 2108.12409, section 3, and the
    authors' code for head counts that are not powers of two. Raises ValueError below one head.
    """
    num_heads = check_count("alibi_slopes: num_heads", num_heads, 1)
    power = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(power) + _geometric(2 * power)[::2][: num_heads - power]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def _geometric(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)]
