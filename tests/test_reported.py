"""What users and engine authors met: each test is named by what they saw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from backends import Backend
from manager_state import manager_state, unchanged
from small_cache import HEAD_DIM, attention_inputs, make_cache, pools, rows
from torch import Tensor
from torch.autograd import forward_ad

from paged_attn import (
    BlockManager,
    OutOfBlocksError,
    alibi_slopes,
    copy_blocks,
    merge_states,
    paged_attention,
    plan_decode,
    reference,
    reshape_and_cache,
    swap_blocks,
)
from paged_attn.flash_attn import flash_attn_with_kvcache

make_dual: Any = forward_ad.make_dual


# Mappings.


@pytest.mark.parametrize(
    ("mapping", "want"),
    [
        ({0: 1, 2: 3}, {1: 0, 3: 2}),
        ({0: [1, 3]}, {1: 0, 3: 0}),
        ({0: (1,), 2: []}, {1: 0}),
        ([[0, 1], (2, 3)], {1: 0, 3: 2}),
        ({(0, 1): None}.keys(), {1: 0}),
        (np.array([[0, 1], [2, 3]]), {1: 0, 3: 2}),
        ([(np.int64(0), np.int32(1))], {1: 0}),
        ({}, {}),
        ([], {}),
    ],
    ids=str,
)
def test_mapping_means_what_it_says(mapping: Any, want: dict[int, int]) -> None:
    for copies in (False, True):
        key, value = pools()
        before = key.clone()
        if copies:
            copy_blocks(key, value, mapping)
        else:
            key = torch.zeros_like(key)
            swap_blocks(before, key, mapping)
        for block in range(4):
            source = want.get(block, block if copies else None)
            expected = torch.zeros_like(key[0]) if source is None else before[source]
            assert torch.equal(key[block], expected)


@pytest.mark.parametrize(
    "mapping",
    [
        [(0, 1, 2)],
        [(0, 1, 2), (3, 4, 5)],
        [(0.0, 1.0)],
        [(0, 1.5)],
        [0, 1],
        {0: 1.5},
        {0: "1"},
        {0: [(1, 2)]},
        ["01"],
        [(True, 2)],
        7,
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks"])
def test_mapping_that_is_not_pairs_is_refused(op: str, mapping: Any) -> None:
    key, value = pools()
    before = key.clone()
    with pytest.raises(TypeError, match=rf"{op}: block_mapping must be pairs of ints"):
        (copy_blocks if op == "copy_blocks" else swap_blocks)(key, value, mapping)
    assert torch.equal(key, before)


# Defaults of torch.


@contextlib.contextmanager
def other_default(kind: str) -> Iterator[None]:
    """Tensors that name no device and dtype land where the library has no use for them."""
    if kind == "mode":
        with torch.device("meta"):
            yield
        return
    try:
        if kind == "default":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("num_blocks", [8, 4096], ids=["small", "huge_pages"])
@pytest.mark.parametrize("kind", ["mode", "default", "dtype"])
def test_defaults_of_torch_change_nothing(kind: str, num_blocks: int) -> None:
    inputs = [rows(5, seed=1), rows(5, seed=2), rows(5, 4, seed=3)]
    with other_default(kind):
        use_everything(inputs, num_blocks)


def use_everything(inputs: list[Tensor], num_blocks: int) -> None:
    scaled = {"kv_dtype": torch.int8, "k_scale": "per_token", "v_scale": "per_token"}
    for options in ({"num_host_blocks": 4, "num_q_heads": 4}, scaled):
        cache = make_cache(num_blocks=num_blocks, **options)
        assert cache.key_caches[0].device.type == cache.device.type == "cpu"
        seq = cache.add()
        batch = cache.step([seq], 5, max_blocks=4)
        for layer in range(2):
            cache.write(layer, inputs[0], inputs[1], batch)
            out, lse = cache.attend(layer, inputs[2], batch, return_lse=True)
            assert (out.device.type, out.dtype, lse.dtype) == (
                "cpu",
                torch.float32,
                torch.float32,
            )
            merge_states(out, lse, out, lse)
        cache.fork(seq)
        cache.append(seq)
        key, value = cache.gather(0, cache.batch([seq]))
        assert key.device.type == value.device.type == "cpu"
        copy_blocks(cache.key_caches, cache.value_caches, [(5, 6)])
        if "num_host_blocks" in options:
            cache.swap_out([seq])
            cache.swap_in([seq])
            table = batch.block_tables
            flash_attn_with_kvcache(
                inputs[2][None],
                cache.key_caches[0],
                cache.value_caches[0],
                cache_seqlens=5,
                block_table=table,
            )
            plan_decode(batch.seq_lens, num_q_heads=4, num_kv_heads=2, head_dim=8)
    assert (alibi_slopes(6).device.type, alibi_slopes(6).dtype) == ("cpu", torch.float32)


@pytest.mark.parametrize("what", ["copy", "upload", "plan"])
def test_failed_step_changes_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(num_q_heads=4)
    first = cache.add(6)
    second = cache.fork(first)  # they share a partial block, which is copied
    third = cache.add(4)
    seqs, lens = [first, second, third], [1, 6, 5]
    state = manager_state(cache.manager)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        target = {
            "copy": "paged_attn.kv_pools.copy_blocks",
            "plan": "paged_attn.kv_batch.plan_decode",
        }
        patched.setattr(target.get(what, "paged_attn.staging.StagingRing.upload"), fail)
        with pytest.raises(MemoryError):
            cache.step(seqs, lens)
    cache.manager.check_invariants()
    after = manager_state(cache.manager)
    assert [s.length for s in after[0][0].values()] == [6, 6, 4]  # type: ignore[index]
    assert [s.blocks for s in after[0][0].values()] == [s.blocks for s in state[0][0].values()]  # type: ignore[index]
    assert after[1] == state[1]  # type: ignore[index]
    batch = cache.step(seqs, lens)
    for row, seq in zip(batch.block_tables.tolist(), seqs, strict=True):
        table = cache.manager.block_table(seq)
        assert row[: len(table)] == table


def test_failed_append_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    seq = cache.add(6)
    cache.fork(seq)
    table = cache.manager.block_table(seq)
    with monkeypatch.context() as patched:
        patched.setattr("paged_attn.kv_pools.copy_blocks", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.append(seq, 3)
    assert (cache.manager.seq_len(seq), cache.manager.block_table(seq)) == (6, table)
    cache.manager.check_invariants()


# Swaps.


def test_swap_without_host_blocks() -> None:
    cache = make_cache()
    empty, full = cache.add(), cache.add(3)
    manager = cache.manager
    assert not manager.can_swap_out([full])
    with unchanged(manager, OutOfBlocksError, match="0 of 0 are free"):
        cache.swap_out([full])
    # Nothing to move needs no memory.
    assert manager.can_swap_out([])
    cache.swap_out([])
    cache.swap_in([])
    assert manager.can_swap_out([empty])
    cache.swap_out([empty])
    assert manager.swapped_ids() == [empty]
    cache.swap_in([empty])
    assert set(manager.seq_ids()) == {empty, full}


@pytest.mark.parametrize("inward", [False, True], ids=["out", "in"])
def test_failed_swap_changes_nothing(inward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(num_host_blocks=4, enable_prefix_caching=True)
    seq, _ = cache.add_prompt(range(6))
    cache.mark_written(seq)
    other = cache.fork(seq)
    if inward:
        cache.swap_out([seq, other])
    move = cache.swap_in if inward else cache.swap_out
    before = manager_state(cache.manager)
    with monkeypatch.context() as patched:
        patched.setattr("paged_attn.kv_pools.swap_blocks", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            move([seq, other])
    cache.manager.check_invariants()
    after = manager_state(cache.manager)
    assert after[0] == before[0]  # type: ignore[index]
    assert after[1] == before[1]  # type: ignore[index]
    move([seq, other])
    cache.manager.check_invariants()


def test_transfer_is_not_cancelled_after_its_sequence_went_on() -> None:
    manager = BlockManager(4, 2, num_host_blocks=4)
    seq = manager.add(3)
    manager.swap_out([seq])
    transfer = manager.swap_in([seq], hold=True)
    manager.append(seq)
    with unchanged(manager, ValueError, match="had 3 tokens when it was moved, has 4"):
        manager.cancel_transfer(transfer.transfer_id)
    manager.finish_transfer(transfer.transfer_id)
    with unchanged(manager, KeyError, match="no transfer"):
        manager.cancel_transfer(transfer.transfer_id)


# Errors that pointed elsewhere.


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_kv_heads": [1, 2]}, TypeError, "num_kv_heads must be an int, got list"),
        ({"num_layers": 1.5}, TypeError, "num_layers must be an int, got float"),
        ({"num_blocks": "8"}, TypeError, "num_blocks must be an int"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1"),
        ({"head_dim": 59}, ValueError, "head_dim must be a multiple of 8 up to 256, or 512"),
        ({"head_dim": 264}, ValueError, "head_dim must be a multiple of 8"),
        ({"dtype": torch.float64}, ValueError, "dtype must be float16, bfloat16 or float32"),
        (
            {"dtype": torch.float16, "kv_dtype": torch.bfloat16},
            ValueError,
            "kv_dtype must be dtype, torch.float16, or float8",
        ),
        ({"num_q_heads": 3}, ValueError, "num_q_heads must be a multiple of num_kv_heads"),
        ({"num_q_heads": 4.0}, TypeError, "num_q_heads must be an int"),
        ({"chunk_size": "all"}, TypeError, "chunk_size"),
        ({"k_scale": 1e39}, ValueError, "k_scale must be positive and finite in float32"),
        ({"k_scale": 1e-60}, ValueError, "k_scale must be positive and finite in float32"),
        ({"v_scale": torch.ones(2)}, ValueError, 'v_scale must be a float or "per_token"'),
    ],
    ids=str,
)
def test_cache_that_no_op_could_use(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make_cache(**options)


def test_numbers_of_a_plan() -> None:
    lens = torch.tensor([3], dtype=torch.int32)
    numbers: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    for name, value in [("chunk_size", "all"), ("num_q_heads", 4.0), ("num_kv_heads", None)]:
        with pytest.raises(TypeError, match=f"plan_decode: {name} must be an int"):
            plan_decode(lens, **numbers | {name: value})
    plan: Any = plan_decode(lens, **numbers).tensor
    with pytest.raises(TypeError, match="plan must come from plan_decode, got Tensor"):
        paged_attention(**attention_inputs(), plan=plan)
    with pytest.raises(TypeError, match="k_scale and v_scale must be None, a float or a float32"):
        paged_attention(**attention_inputs() | {"k_scale": "per_token"})


def test_memory_that_there_is_not_is_asked_for_first() -> None:
    # Tables of so many blocks would fill the memory before an error.
    with pytest.raises(RuntimeError, match=r"cannot take .* bytes"):
        make_cache(num_blocks=10**12)


@pytest.mark.parametrize("salt", [None, 7, b"tenant"])
def test_salt_that_is_no_string(salt: Any) -> None:
    for caching in (False, True):
        manager = BlockManager(4, 4, enable_prefix_caching=caching)
        for method in (manager.add_prompt, manager.can_add_prompt):
            with unchanged(manager, TypeError, match="salt must be a str"):
                method([1, 2], salt=salt)


@pytest.mark.parametrize(
    ("layer", "error", "match"),
    [
        (5, IndexError, r"layer must be in \[0, 2\), got 5"),
        (-1, IndexError, r"layer must be in \[0, 2\), got -1"),
        ("0", TypeError, "layer must be an int, got str"),
    ],
    ids=str,
)
def test_layer_that_there_is_not(layer: Any, error: type[Exception], match: str) -> None:
    cache = make_cache()
    batch = cache.step([cache.add()], [2])
    with pytest.raises(error, match=rf"PagedKVCache\.write: {match}"):
        cache.write(layer, rows(2), rows(2), batch)
    with pytest.raises(error, match=rf"PagedKVCache\.attend: {match}"):
        cache.attend(layer, rows(2, 4), batch)
    with pytest.raises(error, match=rf"PagedKVCache\.gather: {match}"):
        cache.gather(layer, batch)
    cache.write(np.int64(1), rows(2), rows(2), batch)
    assert not cache.key_caches[0].any()


@pytest.mark.parametrize(
    "shape", [(3, 2, HEAD_DIM), (1, 2, HEAD_DIM), (2, HEAD_DIM), (1, 3, 2, HEAD_DIM), (HEAD_DIM,)]
)
def test_rows_that_are_not_the_batch(shape: tuple[int, ...]) -> None:
    cache = make_cache()
    batch = cache.step([cache.add()], [2])
    wrong, right = torch.ones(shape), rows(2)
    for key, value, name in ((wrong, wrong, "key"), (right, wrong, "value")):
        with pytest.raises(
            ValueError, match=rf"write: {name} must be \[2, num_heads, head_dim\], or"
        ):
            cache.write(0, key, value, batch)
    with pytest.raises(ValueError, match=r"attend: query must be \[2, num_heads, head_dim\], or"):
        cache.attend(0, wrong, batch)
    assert not cache.key_caches[0].any()


def test_rows_by_sequence_of_a_ragged_batch() -> None:
    cache = make_cache()
    batch = cache.step([cache.add(), cache.add()], [1, 3])
    with pytest.raises(ValueError, match="query must be"):  # two tokens each are no sequence's
        cache.attend(0, rows(4, 4).view(2, 2, 4, HEAD_DIM), batch)


def test_integers_of_numpy() -> None:
    one: Any = np.int64(1)
    two: Any = np.int32(2)
    three: Any = np.array([3])
    cache = make_cache(num_layers=two, num_blocks=np.int16(8), num_q_heads=np.int64(4))
    seq = cache.add(one)
    batch = cache.step([seq], two, max_blocks=np.int64(3))
    assert batch.seq_lens.tolist() == [3]
    cache.step([seq], three)
    assert torch.equal(alibi_slopes(two), alibi_slopes(2))
    cache.step([seq], [one])
    cache.truncate(seq, two)
    cache.append(seq, one)
    manager = cache.manager
    assert manager.can_append(seq, two)
    assert manager.can_append_many([seq], three)
    assert manager.append_many([seq], [two])[0].slots == [3, 4]
    assert (manager.seq_len(seq), type(manager.seq_len(seq))) == (5, int)
    inputs = attention_inputs()
    paged_attention(**inputs, sliding_window=np.int64(3))
    plan_decode(inputs["seq_lens"], num_q_heads=np.int64(4), num_kv_heads=two, head_dim=np.int64(8))
    key, value = inputs["key_cache"], inputs["value_cache"]
    out = flash_attn_with_kvcache(
        rows(2, 4)[:, None],
        key,
        value,
        cache_seqlens=np.int64(5),
        block_table=inputs["block_tables"],
    )
    assert isinstance(out, Tensor)
    with pytest.raises(TypeError, match="num_tokens must be an int, got float"):
        manager.append(seq, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="query_lens must be an int, got bool"):
        cache.step([seq], True)


# Products of scales.


def test_scales_past_the_largest_float() -> None:
    def attend(**options: Any) -> object:
        return paged_attention(**attention_inputs() | options)

    for name in ("scale", "softcap", "k_scale", "v_scale"):
        for value in (1e39, float("inf"), float("nan")):
            with pytest.raises(RuntimeError, match=f"{name} must be.*finite in float32"):
                attend(**{name: value})
    for name in ("softcap", "k_scale"):  # which as floats are 0
        with pytest.raises(RuntimeError, match=f"{name} must be positive"):
            attend(**{name: 1e-60})
    for k_scale in (1e30, torch.tensor(1e30), torch.tensor([1.0, 1e30])):
        with pytest.raises(RuntimeError, match="k_scale must be finite when multiplied by scale"):
            attend(scale=-1e30, k_scale=k_scale)
    key, value_cache = pools()
    with pytest.raises(RuntimeError, match="k_scale must be positive and finite in float32"):
        reshape_and_cache(rows(1), rows(1), key, value_cache, torch.tensor([0]), k_scale=1e39)
    assert torch.equal(key, pools()[0])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_scores_of_zero_times_a_product_that_overflows(
    backend: Backend, kv_dtype: torch.dtype
) -> None:
    # A scale per token is not looked at before: 0 times what overflows is still 0.
    dtypes = [torch.float32] if kv_dtype == torch.float32 else [torch.float32, torch.float16]
    for dtype in dtypes:
        values = torch.arange(4.0).to(kv_dtype).view(1, 4, 1, 1).expand(1, 4, 1, HEAD_DIM)
        tensors = [
            torch.zeros(1, 1, HEAD_DIM, dtype=dtype),
            torch.ones(1, 4, 1, HEAD_DIM).to(kv_dtype),
            values.contiguous(),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([4], dtype=torch.int32),
            torch.full((1, 4, 1), 1e30),
        ]
        query, key, value, table, lens, k_scale = (backend.place(tensor) for tensor in tensors)
        out = paged_attention(
            query, key, value, table, lens, scale=1e30, k_scale=k_scale, v_scale=1.0
        )
        assert isinstance(out, Tensor)
        torch.testing.assert_close(out.cpu().float(), torch.full((1, 1, HEAD_DIM), 1.5))


# Blocks below a window.


def test_blocks_below_a_window_may_be_gone(backend: Backend) -> None:
    block_size, length, window = 4, 21, 6
    generator = torch.Generator().manual_seed(0)
    for query_len in (1, 3):
        query = torch.randn(1, query_len, 4, HEAD_DIM, generator=generator)
        key, value = torch.randn(2, 6, block_size, 2, HEAD_DIM, generator=generator)
        table = torch.tensor([[5, 3, 1, 0, 2, 4]], dtype=torch.int32)
        lens = torch.tensor([length], dtype=torch.int32)
        options: dict[str, Any] = {"sliding_window": window}
        want = reference.paged_attention(query, key, value, table, lens, **options)
        first = (length - query_len + 1 - window) // block_size
        for gone in (-1, 99):
            holes = table.clone()
            holes[0, :first] = gone
            place = backend.place
            placed = [place(tensor) for tensor in (query, key, value, holes, lens)]
            with backend.checks():
                out = paged_attention(*placed, **options)
                ends = place(torch.tensor([0, query_len], dtype=torch.int32))
                ragged = paged_attention(placed[0][0], *placed[1:], cu_query_lens=ends, **options)
                for result in (out, ragged):
                    assert isinstance(result, Tensor)
                    torch.testing.assert_close(
                        result.cpu().double().view_as(query), want, rtol=1e-5, atol=1e-5
                    )
                holes[0, first] = gone
                placed[3] = place(holes)
                with pytest.raises(RuntimeError, match=rf"got {gone} at \(0, {first}\)"):
                    paged_attention(*placed, **options)


# flash-attn's function with lengths from a device.


@pytest.mark.backends("emulator", "cuda")  # on a CPU they are refused: see test_flash_attn.py
def test_negative_lengths_write_nothing_where_they_are_not_checked(backend: Backend) -> None:
    key, value = pools()
    new_key, new_value = (rows(3, seed=s)[:, None].repeat(1, 2, 1, 1) for s in (1, 2))
    query = torch.randn(3, 2, 4, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    table = torch.tensor([[3, 0], [1, 2], [3, 0]], dtype=torch.int32)
    lens = torch.tensor([-1, 2, 7], dtype=torch.int32)
    q, k_cache, v_cache, k, v, block_table, cache_seqlens = backend.place_all(
        [query, key, value, new_key, new_value, table, lens]
    )
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table, causal=True
    )
    assert isinstance(out, Tensor)
    for cache, before, new in ((k_cache, key, new_key), (v_cache, value, new_value)):
        wrote = before.clone()
        wrote[1, 2:4] = new[1]
        wrote[0, 3] = new[2, 0]  # the last slot of the row; its second token has no room
        assert torch.equal(cache.cpu(), wrote)
    assert not out[0].cpu().any()
    assert out[1:].cpu().any()
