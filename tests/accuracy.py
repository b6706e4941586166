"""What counts as right: an error of at most twice that of plain PyTorch in the same dtype."""

from __future__ import annotations

from typing import Any

import torch
from cases import Inputs, oracle
from torch import Tensor


def naive_attention(inputs: Inputs) -> Tensor:
    """Gather, matmul, softmax, matmul, all in query's dtype: how one writes it without kernels."""
    query, options = inputs.query, inputs.options
    dtype, num_q_heads = query.dtype, query.shape[-2]
    tokens = query.reshape(-1, num_q_heads, query.shape[-1])
    out = torch.zeros_like(tokens)
    scale = query.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    for seq, (start, end) in enumerate(inputs.query_spans()):
        length, table = int(inputs.seq_lens[seq]), inputs.block_tables[seq]
        key = _rows(inputs.key_cache, options.get("k_scale"), table, length, num_q_heads, dtype)
        value = _rows(inputs.value_cache, options.get("v_scale"), table, length, num_q_heads, dtype)
        score = (tokens[start:end].transpose(0, 1) @ key.transpose(1, 2)) * scale
        if options.get("softcap") is not None:
            score = options["softcap"] * torch.tanh(score / options["softcap"])
        position = torch.arange(start, end)[:, None] - end + length
        distance = torch.arange(length)[None, :] - position
        if options.get("alibi_slopes") is not None:
            score = score + (options["alibi_slopes"][:, None, None] * distance).to(dtype)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if options.get("causal", True):
            hidden |= distance > 0
        if options.get("sliding_window") is not None:
            hidden |= distance <= -options["sliding_window"]
        score = score.masked_fill(hidden, -torch.inf)
        if options.get("sinks") is not None:
            sinks = options["sinks"].to(dtype)[:, None, None].expand(-1, end - start, 1)
            score = torch.cat([score, sinks], dim=2)
        weights = torch.softmax(score, dim=2)[..., :length]
        weights = weights.masked_fill(hidden.all(dim=1, keepdim=True), 0)
        out[start:end] = (weights @ value).transpose(0, 1)
    return out.reshape(query.shape)


def _rows(
    pool: Tensor, scale: Any, table: Tensor, length: int, num_q_heads: int, dtype: torch.dtype
) -> Tensor:
    """One sequence's keys or values, `[num_q_heads, length, head_dim]`."""
    token = torch.arange(length)
    block, offset = table.long()[token // pool.shape[1]], token % pool.shape[1]
    stored = pool.view(torch.uint8) if pool.element_size() == 1 else pool
    rows = stored[block, offset].view(pool.dtype).float()
    if isinstance(scale, Tensor):
        rows = rows * (scale[block, offset] if scale.dim() == 3 else scale)[..., None]
    elif scale is not None:
        rows = rows * scale
    rows = rows.to(dtype).repeat_interleave(num_q_heads // pool.shape[2], dim=1)
    return rows.transpose(0, 1)


def assert_same_non_finite(got: Tensor, want: Tensor) -> None:
    """NaN and infinities are where they should be: a maximum of errors would not see them."""
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = (kind(got) != kind(want)).nonzero()
        assert len(wrong) == 0, f"{kind.__name__} differs at {wrong[:5].tolist()}"


def max_error(got: Tensor, want: Tensor) -> float:
    """The largest difference where both are finite."""
    finite = torch.isfinite(want)
    return float((got.double() - want)[finite].abs().max()) if finite.any() else 0.0


def assert_accurate(got: Tensor, inputs: Inputs, lse: Tensor | None = None) -> None:
    """Holds the results of paged_attention, called with `inputs`, to the acceptance rule.

    `inputs` are on the CPU; the results may be anywhere.
    """
    want, want_lse = oracle(inputs)
    assert got.shape == inputs.query.shape
    assert got.dtype == inputs.query.dtype
    got = got.cpu()
    assert_same_non_finite(got, want)
    largest = float(want.abs().max()) if want.numel() else 0.0
    ulp = 1e-6 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    allowed = 2 * max_error(naive_attention(inputs), want) + ulp * largest
    error = max_error(got, want)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    if lse is not None:
        assert lse.dtype == torch.float32
        assert lse.shape == want_lse.shape
        assert_same_non_finite(lse.cpu(), want_lse)
        finite = want_lse[torch.isfinite(want_lse)]
        magnitude = max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
        assert max_error(lse.cpu(), want_lse) <= 2e-5 * magnitude
