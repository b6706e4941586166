"""Caches of 8 bits: rounding, saturation, scales, on the way in and on the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import EMULATED, Backend
from cases import FP8, attend, make_pools, quantise
from support import EIGHT_BIT_DTYPES, FLOAT_DTYPES, dtype_id, one_sequence, raw, same_bits
from torch import Tensor

from paged_attn import gather_cache, reshape_and_cache

kv_dtypes = pytest.mark.parametrize("kv_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def write(
    backend: Backend, rows: Tensor, kv_dtype: torch.dtype, layout: str = "nhd", **scales: Any
) -> tuple[Tensor, Tensor]:
    """Writes rows `[n, heads, d]` as keys and as values into slots 1, 2, ... of blocks of 4."""
    count, num_heads, head_dim = rows.shape
    num_blocks = -(-(count + 1) // 4)
    pools = backend.place_pair(make_pools(layout, num_blocks, 4, num_heads, head_dim, kv_dtype))
    placed, slots = backend.place(rows), backend.place(torch.arange(1, count + 1))
    reshape_and_cache(placed, placed, pools[0], pools[1], slots, **scales)
    return pools[0], pools[1]


def stored(pool: Tensor, count: int) -> Tensor:
    flat = pool.view(torch.uint8).reshape(-1, *pool.shape[2:])[1 : count + 1]
    return flat.view(pool.dtype).cpu()


def every_value(dtype: torch.dtype) -> Tensor:
    """All 16-bit numbers, or for fp32 what lies at and around every rounding edge of 8 bits."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    codes = torch.arange(256, dtype=torch.uint8)
    grids = [codes.view(fp8).float() for fp8 in FP8] + [codes.view(torch.int8).float()]
    points = []
    for grid in grids:
        finite = torch.tensor(sorted(set(grid[grid.isfinite()].tolist())))
        points += [finite, (finite[1:] + finite[:-1]) / 2]
    centre = torch.cat(points)
    around = [torch.nextafter(centre, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-40, -0.0])
    return torch.cat([centre, *around, special])


@kv_dtypes
@dtypes
def test_rounding_is_torchs_own(
    backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    # Nearest, ties to even, saturating, infinities too; NaN stays NaN and becomes 0 in int8.
    numbers = every_value(dtype)
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % 128)).reshape(-1, 2, 64)
    if backend.name in EMULATED and dtype != torch.float32:
        rows = rows[::8]
    pools = write(backend, rows, kv_dtype, k_scale=1.0, v_scale=1.0)
    numbers = rows.float()
    want = quantise(numbers.nan_to_num(0.0, torch.inf, -torch.inf), kv_dtype)
    for pool in pools:
        got = stored(pool, len(rows))
        is_nan = numbers.isnan()
        if kv_dtype != torch.int8:
            assert bool(got.float()[is_nan].isnan().all())
            is_nan = is_nan | (numbers == 0)  # the sign of a zero is compared below
            assert torch.equal(got.float()[numbers == 0], numbers[numbers == 0])
        same = got.view(torch.uint8) == want.view(torch.uint8)
        wrong = (~same & ~is_nan).nonzero()
        assert len(wrong) == 0, numbers[tuple(wrong[0])].item()


@kv_dtypes
def test_scale_divides_on_the_way_in(backend: Backend, kv_dtype: torch.dtype) -> None:
    # 3 with scale 0.75 is stored as 4; multiplied, it would be 2.25.
    rows = torch.full((2, 1, 8), 3.0)
    for scale in (0.75, torch.tensor(0.75), torch.tensor([0.75])):
        placed = backend.place(scale) if isinstance(scale, Tensor) else scale
        key, value = write(backend, rows, kv_dtype, k_scale=placed, v_scale=placed)
        assert bool((stored(key, 2).float() == 4).all())
        assert bool((stored(value, 2).float() == 4).all())


@pytest.mark.parametrize("kv_dtype", FP8, ids=dtype_id)
def test_without_a_scale_fp8_means_one(backend: Backend, kv_dtype: torch.dtype) -> None:
    rows = torch.tensor([1.0, -1.5, 3.0, 0.0, 0.5, 2.0, -4.0, 6.0]).reshape(1, 1, 8)
    key, _ = write(backend, rows, kv_dtype)
    assert torch.equal(stored(key, 1).float(), rows)


@kv_dtypes
def test_key_and_value_have_their_own_scales(backend: Backend, kv_dtype: torch.dtype) -> None:
    rows = torch.full((1, 2, 8), 6.0)
    k_scale = backend.place(torch.tensor([1.0, 3.0]))
    key, value = write(backend, rows, kv_dtype, k_scale=k_scale, v_scale=1.5)
    assert stored(key, 1).float()[0, :, 0].tolist() == [6.0, 2.0]
    assert stored(value, 1).float()[0, :, 0].tolist() == [4.0, 4.0]


@kv_dtypes
@dtypes
@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved", "unaligned"])
def test_scale_per_token_is_computed(
    backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype, layout: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, 2, 24, generator=generator).to(dtype)
    rows *= torch.logspace(-3, 3, 6)[:, None, None].to(dtype)
    rows[4, 1] = 0
    # Scales live in a wider tensor of another order; slots that are not written keep their NaN.
    wide = backend.place(torch.full((2, 2, 2, 5), torch.nan))
    k_scale, v_scale = (wide[i].transpose(1, 2)[:, :4] for i in range(2))
    key, value = write(backend, rows, kv_dtype, layout, k_scale=k_scale, v_scale=v_scale)
    want = rows.float().abs().amax(dim=2) / LARGEST[kv_dtype]
    for pool, scale in ((key, k_scale), (value, v_scale)):
        got = scale.reshape(-1, 2).cpu()
        torch.testing.assert_close(got[1:7], want, rtol=1e-6, atol=0)
        assert bool(got[0].isnan().all())
        assert bool(got[7].isnan().all())
        divisor = torch.where(got[1:7] == 0, 1.0, got[1:7])[..., None]
        assert same_bits(stored(pool, 6), quantise(rows.float() / divisor, kv_dtype))
    assert bool(wide[..., 4].isnan().all()), "written between the scales"


@kv_dtypes
def test_a_row_of_zeros(backend: Backend, kv_dtype: torch.dtype) -> None:
    # Its scale is 0, and reading it gives 0, not 0 / 0.
    scales = [backend.place(torch.full((1, 4, 1), torch.nan)) for _ in range(2)]
    zeros = torch.zeros(1, 1, 8)
    pools = write(backend, zeros, kv_dtype, k_scale=scales[0], v_scale=scales[1])
    assert scales[0][0, 1, 0].item() == 0.0
    inputs = one_sequence([1.0, 1.0], kv_dtype=kv_dtype, k_scale=scales[0], v_scale=scales[1])
    for scale in scales:
        scale[0, 0] = 1.0
    placed = inputs.on(backend)
    tables = placed.block_tables
    tables[0, 0] = 0
    for pool in pools:  # token 0 is a live row of ones, token 1 the row of zeros
        pool[0, 0] = torch.ones(1, 8, device=pool.device).to(kv_dtype)
    out, lse = attend(placed.replace(key_cache=pools[0], value_cache=pools[1]))
    assert out[0, 0].tolist() == pytest.approx([0.5] * 8)
    assert bool(lse.isfinite().all())
    key, _ = gather_cache(
        pools[0], pools[1], tables, placed.seq_lens, k_scale=scales[0], v_scale=scales[1]
    )
    assert bool((key[1] == 0).all())


@kv_dtypes
def test_infinity_and_nan_do_not_set_the_scale(backend: Backend, kv_dtype: torch.dtype) -> None:
    rows = torch.tensor([1.0, -2.0, torch.inf, -torch.inf, torch.nan, 0.5, 0.0, 2.0])
    scale = backend.place(torch.full((1, 4, 1), torch.nan))
    key, _ = write(backend, rows.reshape(1, 1, 8), kv_dtype, k_scale=scale, v_scale=scale.clone())
    largest = LARGEST[kv_dtype]
    assert scale[0, 1, 0].item() == pytest.approx(2 / largest)
    got = stored(key, 1).float()[0, 0]
    lowest = -128.0 if kv_dtype == torch.int8 else -largest
    assert got[[1, 2, 3, 7]].tolist() == [-largest, largest, lowest, largest]
    assert bool(got[4] == 0) if kv_dtype == torch.int8 else bool(got[4].isnan())


@kv_dtypes
def test_smallest_rows_do_not_overflow(backend: Backend, kv_dtype: torch.dtype) -> None:
    rows = torch.full((1, 1, 8), 1e-42)  # divided by the largest value it would be 0
    scale = backend.place(torch.full((1, 4, 1), torch.nan))
    key, _ = write(backend, rows, kv_dtype, k_scale=scale, v_scale=scale.clone())
    assert 0 < scale[0, 1, 0].item() < 2e-38
    assert bool(stored(key, 1).float().isfinite().all())


@kv_dtypes
@pytest.mark.parametrize("kind", ["float", "tensor", "head", "token"])
@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_gather_dequantises(
    backend: Backend, kv_dtype: torch.dtype, kind: str, out_dtype: torch.dtype | None
) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(kv_dtype).float().isfinite()]
    rows = torch.nn.functional.pad(codes, (0, 256 - len(codes))).reshape(8, 2, 16)
    pool = rows.reshape(2, 4, 2, 16).view(kv_dtype)
    factor = torch.full((8, 2), 0.3)
    scale: float | Tensor = 0.3
    if kind == "tensor":
        scale = torch.tensor(0.3)
    elif kind == "head":
        scale = torch.tensor([0.3, 0.7])
        factor = scale.expand(8, 2)
    elif kind == "token":
        factor = torch.rand(8, 2, generator=torch.Generator().manual_seed(1)) + 0.1
        scale = factor.reshape(2, 4, 2)
    key_cache, value_cache = backend.place_pair([pool, pool.clone()])
    tables = backend.place(torch.tensor([[0, 1]], dtype=torch.int32))
    lens = backend.place(torch.tensor([8], dtype=torch.int32))
    placed = backend.place(scale) if isinstance(scale, Tensor) else scale
    key, value = gather_cache(
        key_cache, value_cache, tables, lens, k_scale=placed, v_scale=placed, dtype=out_dtype
    )
    want = (rows.view(kv_dtype).float() * factor[..., None]).to(out_dtype or torch.float32)
    assert key.dtype == want.dtype
    assert torch.equal(key.cpu(), want)
    assert torch.equal(value.cpu(), want)


@kv_dtypes
def test_every_scale_changes_the_result(backend: Backend, kv_dtype: torch.dtype) -> None:
    # An entry point that loses a scale gives the same with another.
    base = one_sequence([1.0, 2.0], logits=[0.0, 1.0], kv_dtype=kv_dtype)
    plain = base.options | {"k_scale": 1.0, "v_scale": 1.0}
    results = [
        attend(base.replace(options=plain | changed).on(backend), chunk_size=chunk_size)[0][0, 0, 0]
        for changed in ({}, {"k_scale": 2.0}, {"v_scale": 2.0})
        for chunk_size in (None, 1)
    ]
    assert len({round(result.item(), 4) for result in results}) == 3


@kv_dtypes
@pytest.mark.parametrize("per_token", [False, True])
def test_rewriting_a_used_block_leaves_no_trace(
    backend: Backend, kv_dtype: torch.dtype, per_token: bool
) -> None:
    # A block that held other tokens ends with the same bytes as a fresh one.
    generator = torch.Generator().manual_seed(5)
    old, new = (torch.randn(4, 2, 16, generator=generator) * 5 for _ in range(2))
    images = []
    for history in ([new], [old, new]):
        pools = backend.place_pair(
            [torch.zeros(1, 4, 2, 16, dtype=torch.uint8).view(kv_dtype) for _ in range(2)]
        )
        scales = [backend.place(torch.zeros(1, 4, 2)) for _ in range(2)]
        for rows in history:
            reshape_and_cache(
                backend.place(rows),
                backend.place(rows),
                *pools,
                backend.place(torch.arange(4)),
                k_scale=scales[0] if per_token else 0.1,
                v_scale=scales[1] if per_token else 0.1,
            )
        images.append(torch.cat([raw(t) for t in (*pools, *scales)]))
    assert torch.equal(*images)
