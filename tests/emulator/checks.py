"""Small ragged calls of every op of the product, checked against the reference.

What test_product.py runs through the hook build, and mutate.py through every mutant of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accuracy import assert_accurate
from backends import Backend
from cases import CASES, FP8, Case, Inputs, attend, build, make_pools, strided
from torch import Tensor

import emulator
from paged_attn import _ops, copy_blocks, gather_cache, merge_states, reshape_and_cache, swap_blocks
from paged_attn.flash_attn import flash_attn_with_kvcache


def hooks_backend() -> Backend:
    """The hook build; every tensor that is not placed goes unseen."""
    library = emulator.product(hooks=True).library
    return Backend(
        "emulator",
        emulator.load(hooks=True),
        partial(emulator.place, hooks=True),
        lambda on: library.paged_attn_set_debug(int(on)),
    )


@contextmanager
def calls_go_to(backend: Backend) -> Iterator[None]:
    """The functions of paged_attn call the backend's ops; what torch allocates is seen too."""
    before = _ops.lib
    _ops.lib = backend.namespace
    try:
        with emulator.product(hooks=True).captured_tensors():
            yield
    finally:
        _ops.lib = before


def names_of(*tensors: Tensor) -> set[str]:
    """The names of the buffers that tensors lie in."""
    runtime = emulator.product(hooks=True)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return {runtime.describe(address).split("'")[1] for address in addresses}


def mark_around(tensor: Tensor) -> None:
    """Marks undefined what a placed tensor's storage holds beside its elements."""
    whole = torch.empty(0, dtype=tensor.dtype)
    whole.set_(tensor.untyped_storage())
    beside = torch.ones(whole.shape, dtype=torch.bool)
    beside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    emulator.mark_undefined(whole, beside)


def mark_dead(inputs: Inputs) -> Inputs:
    """Marks undefined what paged_attention must not look at, in inputs that are placed.

    These are slots that hold no token, their scales, the padding of the block tables, and what
    lies between the rows of query.
    """
    mark_around(inputs.query)
    block_size = inputs.key_cache.shape[1]
    dead_slot = torch.ones(inputs.key_cache.shape[:2], dtype=torch.bool)
    dead_entry = torch.ones(inputs.block_tables.shape, dtype=torch.bool)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        for token in range(length):
            block = int(inputs.block_tables[seq, token // block_size])
            dead_slot[block, token % block_size] = False
            dead_entry[seq, token // block_size] = False
    emulator.mark_undefined(inputs.block_tables, dead_entry)
    emulator.mark_undefined(inputs.key_cache, dead_slot[:, :, None, None])
    emulator.mark_undefined(inputs.value_cache, dead_slot[:, :, None, None])
    for name in ("k_scale", "v_scale"):
        scale = inputs.options.get(name)
        if isinstance(scale, Tensor) and scale.dim() == 3:
            emulator.mark_undefined(scale, dead_slot[:, :, None])
    return inputs


def check_decode(backend: Backend, case: Case) -> None:
    """paged_attention of one case, its result held to the oracle."""
    inputs = build(case)
    out, lse = attend(mark_dead(inputs.on(backend)))
    assert_accurate(out, inputs, lse)


def check_fragments(backend: Backend) -> None:
    """Sequences that several CTAs share, one in more fragments than a CTA merges at once."""
    emulator.configure(sms=12, hooks=True)
    lens = (150, 6000, 700)
    case = Case("fragments", seq_lens=lens, num_q_heads=3, num_kv_heads=1, sinks=True)
    for _ in range(2):  # the semaphores must have been reset
        check_decode(backend, case)


def _on_cpu(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    before = _ops.lib
    _ops.lib = torch.ops.paged_attn
    try:
        return function(*args, **options)
    finally:
        _ops.lib = before


def _bytes(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(tensor.untyped_storage()).clone()


def _assert_same_bytes(got: Tensor, want: Tensor, what: str) -> None:
    assert torch.equal(_bytes(got), _bytes(want)), f"{what} differs from the CPU's"


def check_cache(
    backend: Backend,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    layout: str = "nhd",
    head_dim: int = 24,
    per_token: bool = False,
) -> None:
    """reshape_and_cache, then gather_cache with padding, byte for byte as the CPU does them."""
    generator = torch.Generator().manual_seed(head_dim)
    num_blocks, block_size, heads = 6, 5, 3
    # One sequence over blocks 4, 0, 2 and one in block 5; a token in between is not stored.
    slots = torch.tensor([20, 21, 22, 23, 24, 0, 1, 2, -1, 3, 4, 10, 25, 26])
    tables = torch.tensor([[4, 0, 2, 1], [5, 3, 3, 3]], dtype=torch.int32)
    lens = torch.tensor([11, 2], dtype=torch.int32)
    rows = []
    for _ in range(2):
        wide = strided((len(slots),), heads, head_dim, dtype)
        wide.copy_(torch.randn(wide.shape, generator=generator) * 3)
        rows.append(wide)
    # A row of zeros, an infinity, and the largest value in the last vector.
    rows[0][3, 1] = 0.0
    rows[1][5, 0, 3] = torch.inf
    rows[0][6, 2, -1] = 100.0
    rows[0][9, 0, 1], rows[0][9, 0, 2] = 2.56, -2.58  # saturate int8 by 1, with the scale below
    scales: list[Any] = [None, None]
    if kv_dtype.itemsize == 1:
        # Small enough that values saturate, some by 1 only.
        scales = [0.02, torch.tensor([0.02, 0.75, 0.3])]
        if per_token:
            scales = [torch.full((num_blocks, block_size, heads), -1.0) for _ in range(2)]
    pools = make_pools(layout, num_blocks, block_size, heads, head_dim, kv_dtype)
    placed_pools = backend.place_all(pools)
    placed_scales = [backend.place(s) if isinstance(s, Tensor) else s for s in scales]
    placed_rows = [backend.place(row) for row in rows]
    for row in placed_rows:
        mark_around(row)
    placed_tables = backend.place(tables)
    emulator.mark_undefined(
        placed_tables, torch.tensor([[False] * 3 + [True], [False] + [True] * 3])
    )

    mine: dict[str, Any] = {"k_scale": placed_scales[0], "v_scale": placed_scales[1]}
    theirs: dict[str, Any] = {"k_scale": scales[0], "v_scale": scales[1]}
    key, value = placed_rows
    key_cache, value_cache = placed_pools
    reshape_and_cache(key, value, key_cache, value_cache, backend.place(slots), **mine)
    _on_cpu(reshape_and_cache, *rows, *pools, slots, **theirs)
    for name, got, want in zip(("keys", "values"), placed_pools, pools, strict=True):
        _assert_same_bytes(got, want, name)
    for got_scale, want_scale in zip(placed_scales, scales, strict=True):
        if per_token:
            _assert_same_bytes(got_scale, want_scale, "scale")

    options: dict[str, Any] = {"dtype": dtype, "total_tokens": 15}
    got_rows = gather_cache(
        key_cache, value_cache, placed_tables, backend.place(lens), **mine, **options
    )
    want_rows = _on_cpu(gather_cache, *pools, tables, lens, **theirs, **options)
    for got, want in zip(got_rows, want_rows, strict=True):
        assert torch.equal(got, want), "gathered rows differ from the CPU's"


def check_copy(backend: Backend, layout: str, dtype: torch.dtype) -> None:
    """copy_blocks of two layers, and swap_blocks, byte for byte."""
    layers = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        pools = make_pools(layout, 7, 3, 2, 24, dtype)
        for pool in pools:
            ints = pool.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[pool.element_size()])
            ints.copy_(torch.randint(0, 100, ints.shape, generator=generator).to(ints.dtype))
        layers.append(pools)
    placed = [backend.place_all(pools) for pools in layers]
    pairs = [(5, 0), (2, 6), (2, 3)]
    for function, target in ((copy_blocks, placed), (partial(_on_cpu, copy_blocks), layers)):
        function([p[0] for p in target], [p[1] for p in target], pairs)
    swap_blocks(placed[0][0], placed[1][0], torch.tensor([[1, 4], [0, 5]]))
    _on_cpu(swap_blocks, layers[0][0], layers[1][0], torch.tensor([[1, 4], [0, 5]]))
    for got_pools, want_pools in zip(placed, layers, strict=True):
        for got, want in zip(got_pools, want_pools, strict=True):
            _assert_same_bytes(got, want, "pool")


def check_merge(backend: Backend, dtype: torch.dtype) -> None:
    """merge_states of rows with and without weight, and in place."""
    generator = torch.Generator().manual_seed(0)
    states: list[Tensor] = []
    for _ in range(2):
        states += [
            torch.randn(9, 3, 40, generator=generator).to(dtype),
            torch.randn(9, 3, generator=generator) * 3,
        ]
    states[1][2] = states[3][4] = states[1][5] = states[3][5] = -torch.inf
    states[0][2] = states[2][4] = torch.nan  # without weight: not read
    placed = [backend.place(state) for state in states]
    emulator.mark_undefined(placed[0], (torch.arange(9) == 2)[:, None, None])
    emulator.mark_undefined(placed[2], (torch.arange(9) == 4)[:, None, None])
    want = _on_cpu(merge_states, *states)
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    in_place = [backend.place(state) for state in states]
    backend.namespace.merge_states(*in_place[:2], *in_place)
    for got in (merge_states(*placed), in_place[:2]):
        torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=1e-5)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


def check_append(backend: Backend) -> None:
    """New tokens of more sequences than threads, with and without room, and of negative length."""
    generator = torch.Generator().manual_seed(0)
    num_seqs, new_len, room = 700, 3, 4
    query = torch.randn(num_seqs, 1, 2, 8, generator=generator)
    new = torch.randn(2, num_seqs, new_len, 1, 8, generator=generator)
    caches = torch.randn(2, 2 * num_seqs, 2, 1, 8, generator=generator)
    table = torch.randperm(2 * num_seqs, generator=generator).view(num_seqs, 2).int()
    lens = torch.randint(-1, room + 1, (num_seqs,), generator=generator).int()
    q, k_cache, v_cache, k, v, block_table, cache_seqlens = backend.place_all(
        [query, *caches, *new, table, lens]
    )
    flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table
    )
    for seq, length in enumerate(lens.tolist()):
        for i in range(min(new_len, room - length) if length >= 0 else 0):
            block, offset = table[seq, (length + i) // 2], (length + i) % 2
            caches[:, block, offset] = new[:, seq, i]
    for got, want in zip((k_cache, v_cache), caches, strict=True):
        _assert_same_bytes(got, want, "cache")


F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
E4M3, E5M2 = FP8
Check = Callable[[Backend], None]

# Between them every path of the decode kernels, and few threads' worth of work. Groups of 3 heads.
_SMALL: dict[str, Any] = {
    "seq_lens": (0, 3, 18),
    "num_q_heads": 6,
    "head_dim": 24,
    "block_size": 4,
}
# Of several tiles for each warp, the later ones with larger scales.
_TILES = Case("tiles", seq_lens=(300, 520), kv_dtype=E4M3, scale_kind="token", num_q_heads=8)
TINY = (
    Case("tiny_chunked", **_SMALL, chunk_size=8, sinks=True, query_lens=2, sliding_window=9),
    Case("tiny_e4m3", **_SMALL, kv_dtype=E4M3, scale_kind="token", layout="hnd"),
    Case("tiny_wide", seq_lens=(6,), num_q_heads=1, num_kv_heads=1, head_dim=512),
    Case("tiny_key", seq_lens=(1, 1), num_q_heads=2, head_dim=8, chunk_size=4, block_size=2),
)
DECODE_CHECKS: dict[str, Check] = {
    f"decode_{case.name}": partial(check_decode, case=case) for case in (*CASES, *TINY, _TILES)
}
OTHER_CHECKS: dict[str, Check] = {
    "fragments": check_fragments,
    "append": check_append,
    "cache_f16": partial(check_cache, dtype=F16, kv_dtype=F16),
    "cache_f16_unaligned": partial(check_cache, dtype=F16, kv_dtype=F16, layout="unaligned"),
    "cache_f32_widest": partial(check_cache, dtype=F32, kv_dtype=F32, head_dim=512),
    "cache_bf16_wide": partial(check_cache, dtype=BF16, kv_dtype=BF16, head_dim=256),
    "cache_f16_e4m3": partial(check_cache, dtype=F16, kv_dtype=E4M3, per_token=True, layout="hnd"),
    "cache_bf16_e5m2": partial(check_cache, dtype=BF16, kv_dtype=E5M2),
    "cache_f32_int8": partial(check_cache, dtype=F32, kv_dtype=torch.int8, per_token=True),
    "cache_f16_e4m3_widest": partial(
        check_cache, dtype=F16, kv_dtype=E4M3, per_token=True, head_dim=512
    ),
    "cache_f16_int8": partial(check_cache, dtype=F16, kv_dtype=torch.int8),
    "copy_f16": partial(check_copy, layout="nhd", dtype=F16),
    "copy_e4m3_padded": partial(check_copy, layout="padded", dtype=E4M3),
    "copy_f16_unaligned": partial(check_copy, layout="unaligned", dtype=F16),
    "copy_f32_interleaved": partial(check_copy, layout="interleaved", dtype=F32),
    "merge_f32": partial(check_merge, dtype=F32),
    "merge_f16": partial(check_merge, dtype=F16),
    "merge_bf16": partial(check_merge, dtype=BF16),
}
CHECKS: dict[str, Check] = DECODE_CHECKS | OTHER_CHECKS
