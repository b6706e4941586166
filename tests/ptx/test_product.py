"""Every kernel instance, from nvcc's output, against the oracle or exact bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import CASES, DEAD_BLOCK, Case, attend, build, make_pools, quantise, strided
from support import DTYPE_PAIRS, EIGHT_BIT_DTYPES, FLOAT_DTYPES, dtype_id, raw, same_bits
from torch import Tensor

from paged_attn import copy_blocks, gather_cache, merge_states, reference, reshape_and_cache
from paged_attn.flash_attn import flash_attn_with_kvcache

from . import runtime
from .build import ARCHS
from .machine import ORDERS

ALL_DTYPES = (*FLOAT_DTYPES, *EIGHT_BIT_DTYPES)  # in the order of DType
HEAD_DIMS = {1: 72, 2: 512}  # vectors a lane, and a head_dim that takes them
MMA_PAIRS = [pair for pair in DTYPE_PAIRS if pair[0] != torch.float32]
MMA_SHAPES = list(itertools.product((64, 128, 256), (8, 16, 128)))  # head_dim, rows
QUERY_LENS: dict[int, int | tuple[int, ...]] = {8: 1, 16: (1, 1, 2, 0, 14), 128: (1, 1, 2, 0, 45)}
# Of these there is one instance each.
ONES = ("plan_kernel", "append_slots_kernel", "combine_chunks_kernel", "merge_states_kernel",
        "cache_write_kernel", "gather_kernel", "block_copy_kernel")  # fmt: skip
GATHERS = list(itertools.product(ALL_DTYPES, FLOAT_DTYPES))
EIGHT = ("token", "head", "tensor")


def instance(kernel: str, *arguments: torch.dtype | int | None) -> str:
    """The part of the mangled name that tells instances apart; None is any dtype."""
    parts = []
    for argument in arguments:
        if isinstance(argument, int):
            parts.append(f"Li{argument}E")
        else:
            number = len(ALL_DTYPES) if argument is None else ALL_DTYPES.index(argument)
            parts.append(f"LNS_5DTypeE{number}E")
    return f"{len(kernel)}{kernel}" + (f"I{''.join(parts)}E" if parts else "")


def simt_instance(kv_dtype: torch.dtype, vectors: int) -> str:
    return instance("decode_simt_kernel", kv_dtype if vectors == 1 else None, vectors)


def mma_instance(kv_dtype: torch.dtype, head_dim: int, rows: int) -> str:
    """The same of the tensor-core kernel, whose argument is a type."""
    arguments = f"LNS_5DTypeE{ALL_DTYPES.index(kv_dtype)}ELi{head_dim}ELi{rows}E"
    return f"17decode_mma_kernelINS_9DecodeMmaI{arguments}"


def assert_ran(*instances: str) -> None:
    """Exactly these kernels ran, in this order."""
    names = [launch.kernel for launch in runtime.load().launches]
    assert len(names) == len(instances), names
    for name, part in zip(names, instances, strict=True):
        assert part in name, f"{name} is not {part}"
    runtime.load().launches.clear()


@pytest.mark.parametrize("arch", ARCHS)
def test_the_instances_below_are_all_there_are(nvcc: None, arch: int) -> None:
    expected = [
        *(simt_instance(kv_dtype, 1) for kv_dtype in ALL_DTYPES),
        simt_instance(torch.float16, 2),
        *(mma_instance(kv_dtype, *shape) for kv_dtype in ALL_DTYPES[1:] for shape in MMA_SHAPES),
        *map(instance, ONES),
    ]
    texts = runtime.load().files(arch)
    names = [name for name, path in texts.items() if path.parent.name != "wrappers"]
    assert len(names) == len(expected)
    for part in expected:
        assert sum(part in name for name in names) == 1, part


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_named_cases(ptx: Backend, case: Case) -> None:
    # Case by case another order of the warps, on each architecture another than on the other.
    library = runtime.load()
    library.order = ORDERS[(CASES.index(case) + ARCHS.index(library.arch)) % len(ORDERS)]
    inputs = build(case)
    out, lse = attend(inputs.on(ptx))
    assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("vectors", HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPE_PAIRS, ids=dtype_id)
def test_decode(ptx: Backend, dtype: Any, kv_dtype: Any, vectors: int) -> None:
    # Lengths around a block, more rows than a tile takes, and every feature at once.
    small = kv_dtype in EIGHT_BIT_DTYPES
    case = Case(
        "instance",
        seq_lens=(0, 1, 7, 8, 9, 40),
        query_lens=(1, 1, 2, 0, 3, 1),
        padding=1,
        block_size=8,
        num_q_heads=5 * 2,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim=HEAD_DIMS[vectors],
        layout="padded",
        scale_kind=EIGHT[DTYPE_PAIRS.index((dtype, kv_dtype)) % 3] if small else "none",
        sliding_window=19,
        softcap=4.0,
        alibi=True,
        sinks=True,
        chunk_size=16 if vectors == 2 else None,
    )
    runtime.load().library.ptx_set_device(1, 75)  # for which the host takes this kernel
    inputs = build(case)
    out, lse = attend(inputs.on(ptx))
    assert_accurate(out, inputs, lse)
    decode = simt_instance(kv_dtype, vectors)
    combine = [instance("combine_chunks_kernel")] if vectors == 2 else []
    assert_ran(decode, *combine)


@pytest.mark.parametrize(("head_dim", "rows"), MMA_SHAPES)
@pytest.mark.parametrize(
    ("ptx", "dtype", "kv_dtype"),
    [pytest.param(80 if pair[0] == torch.bfloat16 else 90, *pair) for pair in MMA_PAIRS],
    indirect=["ptx"],
    ids=lambda value: f"sm_{value}" if isinstance(value, int) else dtype_id(value),
)
def test_tensor_core_decode(
    ptx: Backend, dtype: Any, kv_dtype: Any, head_dim: int, rows: int
) -> None:
    # Ragged rows, lengths around a tile and beyond a CTA's share; planned, or in chunks.
    index = MMA_PAIRS.index((dtype, kv_dtype)) + MMA_SHAPES.index((head_dim, rows))
    chunked = index % 3 == 0 and rows != 8  # in chunks, row tiles have 16 rows or 128
    runtime.load().late_copies = bool(index % 2)
    case = Case(
        "instance",
        seq_lens=(0, 1, 31, 33, 150),
        query_lens=QUERY_LENS[rows],
        block_size=8,
        num_q_heads=3 * 2,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim=head_dim if index % 2 else head_dim - 16,
        scale_kind="head" if kv_dtype in EIGHT_BIT_DTYPES else "none",
        sliding_window=100,
        softcap=4.0 if index % 2 else None,
        sinks=True,
        chunk_size=48 if chunked else None,
    )
    inputs = build(case)
    out, lse = attend(inputs.on(ptx))
    assert_accurate(out, inputs, lse)
    if chunked:  # each ragged call has sequences for both
        decode = [mma_instance(kv_dtype, head_dim, size) for size in (16, 128)]
        assert_ran(*decode, instance("combine_chunks_kernel"))
    else:
        assert_ran(instance("plan_kernel"), mma_instance(kv_dtype, head_dim, rows))


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_the_block_size_costs_no_instructions(ptx: Backend, kv_dtype: torch.dtype) -> None:
    executed = {}
    for block_size in (1, 7, 16, 256):
        case = Case("block_size", seq_lens=(300, 90), block_size=block_size, kv_dtype=kv_dtype)
        attend(build(case).on(ptx))
        executed[block_size] = runtime.load().launches[-1].instructions
        runtime.load().launches.clear()
    assert max(executed.values()) <= 1.02 * min(executed.values()), executed


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_merge_states(ptx: Backend, dtype: torch.dtype) -> None:
    states = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(5, 3, 40, generator=generator).to(dtype)
        lse = torch.randn(5, 3, generator=generator) * 4
        states.append((rows, lse))
    (out_a, lse_a), (out_b, lse_b) = states
    lse_a[0], out_a[0] = -torch.inf, torch.nan  # a side without weight may hold anything
    lse_b[0, 1] = -torch.inf
    out_b[0, 1] = torch.nan
    placed = ptx.place_all([out_a, lse_a, out_b, lse_b])
    out, lse = merge_states(*placed)
    weights = torch.stack([lse_a.double(), lse_b.double()])
    want_lse = weights.logsumexp(0)
    share = (weights - want_lse).exp().nan_to_num(0)[..., None]
    parts = torch.stack([out_a.double(), out_b.double()])
    want = torch.where(share > 0, parts * share, 0).sum(0)
    allowed = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert torch.allclose(out.double(), want, rtol=allowed, atol=allowed)
    assert torch.allclose(lse.double(), want_lse, rtol=0, atol=1e-5)
    assert_ran(instance("merge_states_kernel"))


def rows_of(count: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    rows = strided((count,), 3, head_dim, dtype)
    rows.copy_(torch.randn(rows.shape, generator=generator) * 4)
    return rows


WRITES = [(*pair, kind) for pair in DTYPE_PAIRS for kind in ("head", "token")
          if kind == "head" or pair[1] in EIGHT_BIT_DTYPES]  # fmt: skip


@pytest.mark.parametrize(("dtype", "kv_dtype", "scale_kind"), WRITES, ids=dtype_id)
def test_cache_write(ptx: Backend, dtype: Any, kv_dtype: Any, scale_kind: str) -> None:
    """Compared byte for byte with the whole storage, padding and other slots included."""
    small = kv_dtype in EIGHT_BIT_DTYPES
    head_dim = 80 if scale_kind == "head" else 512
    slots = [34, 7, -1, 0, 20]
    key, value = (rows_of(n, head_dim, dtype)[:5] for n in (5, 6))
    key[0, 1] = 0.0
    pools = make_pools("padded", 7, 5, 3, head_dim, kv_dtype)
    mine = ptx.place_all(pools)
    scales: list[Tensor] = []
    if small:
        shape = (3,) if scale_kind == "head" else (7, 5, 3)
        scales = [torch.full(shape, 0.3), torch.full(shape, 0.7)]
    new_key, new_value, mapping = (ptx.place(t) for t in (key, value, torch.tensor(slots)))
    given = [ptx.place(scale) for scale in scales]
    reshape_and_cache(
        new_key,
        new_value,
        mine[0],
        mine[1],
        mapping,
        k_scale=given[0] if small else None,
        v_scale=given[1] if small else None,
    )
    largest = 127 if kv_dtype == torch.int8 else torch.finfo(kv_dtype).max
    for which, rows in enumerate((key, value)):
        for i, slot in enumerate(slots):
            if slot < 0:
                continue
            place, row = (slot // 5, slot % 5), rows[i].float()
            if small and scale_kind == "token":
                scales[which][place] = row.abs().amax(1) / largest
            if small:
                scale = scales[which] if scale_kind == "head" else scales[which][place]
                row = row / torch.where(scale == 0, 1, scale)[:, None]
            stored = quantise(row, kv_dtype) if small else row.to(kv_dtype)
            pools[which].view(stored.dtype)[place] = stored
        assert torch.equal(raw(mine[which]), raw(pools[which]))
        if small:
            assert same_bits(given[which], scales[which])
    assert_ran(instance("cache_write_kernel"))


@pytest.mark.parametrize(("kv_dtype", "dtype"), GATHERS, ids=dtype_id)
def test_gather(ptx: Backend, kv_dtype: Any, dtype: Any) -> None:
    small = kv_dtype in EIGHT_BIT_DTYPES
    head_dim, lens = 512, [5, 0, 1, 4]
    tables = torch.full((4, 3), DEAD_BLOCK, dtype=torch.int32)
    tables[0, :2], tables[2, 0], tables[3, 0] = torch.tensor([6, 0]), 3, 4
    pools = make_pools("interleaved", 7, 4, 2, head_dim, kv_dtype)
    scale = torch.full((7, 4, 2), torch.nan)
    want = []
    for which, pool in enumerate(pools):
        one = []
        for seq, token in ((s, t) for s, n in enumerate(lens) for t in range(n)):
            place = (int(tables[seq, token // 4]), token % 4)
            generator = torch.Generator().manual_seed(100 * seq + 10 * token + which)
            row = torch.randn(2, head_dim, generator=generator)
            stored = quantise(row * 20, kv_dtype) if small else row.to(kv_dtype)
            pool.view(stored.dtype)[place] = stored
            scale[place] = 0.1 * (token + 1)
            wide = stored.float() * (scale[place][:, None] if small else 1)
            one.append(wide.to(dtype))
        want.append(torch.stack(one))
    keys, values = ptx.place_all(pools)
    got = gather_cache(
        keys,
        values,
        ptx.place(tables),
        ptx.place(torch.tensor(lens, dtype=torch.int32)),
        k_scale=ptx.place(scale) if small else None,
        v_scale=ptx.place(scale) if small else None,
        dtype=dtype,
        total_tokens=12,
    )
    for mine, rows in zip(got, want, strict=True):
        assert same_bits(mine[:10], rows)
        assert not mine[10:].any()
    assert_ran(instance("gather_kernel"))


@pytest.mark.parametrize("layout", ["nhd", "hnd", "last_dim", "padded", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=dtype_id)
@pytest.mark.parametrize("head_dim", [8, 12, 64])
def test_copy_blocks(ptx: Backend, layout: str, dtype: torch.dtype, head_dim: int) -> None:
    pools = make_pools(layout, 6, 3, 2, head_dim, dtype)
    for i, pool in enumerate(pools):
        generator = torch.Generator().manual_seed(i)
        pool.copy_(torch.randint(-99, 99, pool.shape, generator=generator))
    mine = ptx.place_all(pools)
    pairs = [(0, 3), (5, 1), (2, 4)]
    copy_blocks(mine[0], mine[1], pairs)
    for pool, (source, destination) in itertools.product(pools, pairs):
        pool[destination] = pool[source].clone()
    for got, want in zip(mine, pools, strict=True):
        assert torch.equal(raw(got), raw(want))
    assert_ran(instance("block_copy_kernel"))


def test_append_slots(ptx: Backend) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 4, 8, generator=generator)
    k, v = torch.randn(2, 3, 2, 2, 8, generator=generator)
    caches = torch.randn(2, 8, 4, 2, 8, generator=generator)
    table = torch.tensor([[7, 2], [5, 1], [0, 3]], dtype=torch.int32)
    lens = torch.tensor([0, 3, 6], dtype=torch.int32)
    query, k_cache, v_cache, new_k, new_v = ptx.place_all([q, *caches, k, v])
    out = flash_attn_with_kvcache(
        query, k_cache, v_cache, new_k, new_v, cache_seqlens=lens, block_table=table, causal=True
    )
    for seq, slots in enumerate([(28, 29), (23, 4), (14, 15)]):
        for cache, new in zip(caches, (k, v), strict=True):
            cache.view(32, 2, 8)[list(slots)] = new[seq]
    assert torch.equal(k_cache, caches[0])
    assert torch.equal(v_cache, caches[1])
    want = reference.paged_attention(q, caches[0], caches[1], table, lens + 2)
    assert isinstance(want, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert_ran(
        instance("append_slots_kernel"),
        instance("cache_write_kernel"),
        simt_instance(torch.float32, 1),
    )
