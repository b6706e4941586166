"""Every wrong argument is refused, by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from backends import Backend
from support import raw
from torch import Tensor

import paged_attn

Args = dict[str, Any]
OPS: dict[str, Callable[..., Any]] = {
    "paged_attention": paged_attn.paged_attention,
    "reshape_and_cache": paged_attn.reshape_and_cache,
    "gather_cache": paged_attn.gather_cache,
    "merge_states": paged_attn.merge_states,
    "copy_blocks": paged_attn.copy_blocks,
    "swap_blocks": paged_attn.swap_blocks,
}


def caches(dtype: torch.dtype = torch.float16) -> Args:
    return {
        "key_cache": torch.zeros(6, 4, 2, 16, dtype=dtype),
        "value_cache": torch.zeros(6, 4, 2, 16, dtype=dtype),
    }


def sequences() -> Args:
    return {
        "block_tables": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 8], dtype=torch.int32),
    }


def good(op: str) -> Args:
    """Arguments that the op takes."""
    if op == "paged_attention":
        query = torch.ones(2, 4, 16, dtype=torch.float16)
        return {"query": query, **caches(), **sequences(), "out": torch.full_like(query, 7)}
    if op == "reshape_and_cache":
        rows = {name: torch.ones(3, 2, 16, dtype=torch.float16) for name in ("key", "value")}
        return {**rows, **caches(), "slot_mapping": torch.tensor([0, 5, 23])}
    if op == "gather_cache":
        return {**caches(), **sequences(), "total_tokens": 13}
    if op == "merge_states":
        state = {"out_a": torch.ones(3, 4, 16), "lse_a": torch.zeros(3, 4)}
        return state | {"out_b": torch.ones(3, 4, 16), "lse_b": torch.zeros(3, 4)}
    if op == "copy_blocks":
        lists = {name: [torch.ones(6, 4, 2, 16) for _ in range(2)] for name in ("keys", "values")}
        pairs = torch.tensor([[0, 1], [2, 3]])
        return {
            "key_caches": lists["keys"],
            "value_caches": lists["values"],
            "block_mapping": pairs,
        }
    pools = {"src": torch.ones(6, 4, 2, 16), "dst": torch.zeros(5, 4, 2, 16)}
    return pools | {"block_mapping": torch.tensor([[5, 4]])}


def put(**changes: Any) -> Callable[[Args], Args]:
    """Replaces arguments; a function gets the old value."""

    def change(args: Args) -> Args:
        new = {n: v(args[n]) if callable(v) and n in args else v for n, v in changes.items()}
        return args | new

    return change


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def sparse_rows(tensor: Tensor) -> Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def with_entry(index: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[index] = value
        return changed

    return change


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused."""

    op: str
    message: str  # a regular expression for what follows "op: "
    change: Callable[[Args], Args]
    checked_values: bool = False  # contents of index tensors: on CUDA in debug mode only


INT8 = {name: to(torch.int8) for name in ("key_cache", "value_cache")}
FP8 = {name: to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
CU = torch.tensor([0, 1, 2], dtype=torch.int32)
PA, RC, GC, MS, CB, SB = OPS

WRONG = [
    # Shapes.
    Wrong(PA, r"query must be \[num_seqs, .*got \(2, 64\)$", put(query=lambda t: t.flatten(1))),
    Wrong(
        PA,
        r"query must be \[num_tokens, .*got \(1, 2, 4, 16\)$",
        put(query=lambda t: t[None], out=lambda t: t[None], cu_query_lens=CU),
    ),
    Wrong(
        PA,
        r"key_cache must be \[num_blocks, .* head_dim 16 as query, got \(6, 4, 2, 8\)$",
        put(key_cache=lambda t: t[..., :8]),
    ),
    Wrong(
        PA,
        r"key_cache must be \[num_blocks, .*got \(6, 4, 32\)$",
        put(key_cache=lambda t: t.flatten(2)),
    ),
    Wrong(
        PA,
        r"value_cache must have the shape of key_cache, \(6, 4, 2, 16\), got \(6, 2, 2, 16\)",
        put(value_cache=lambda t: t[:, :2]),
    ),
    Wrong(
        PA,
        r"query must have a multiple of key_cache's 2 KV heads, got 3 heads",
        put(query=lambda t: t[:, :3], out=lambda t: t[:, :3]),
    ),
    Wrong(
        PA,
        r"block_tables must be \[num_seqs, max_blocks\] with num_seqs 2, got \(1, 2\)",
        put(block_tables=lambda t: t[:1]),
    ),
    Wrong(
        PA,
        r"block_tables must be \[num_seqs, max_blocks\].*got \(4,\)",
        put(block_tables=lambda t: t.flatten()),
    ),
    Wrong(
        PA,
        r"seq_lens must be \[num_seqs\] with num_seqs 2, got \(3,\)",
        put(seq_lens=torch.ones(3, dtype=torch.int32)),
    ),
    Wrong(
        PA, r"cu_query_lens must be \[num_seqs \+ 1\], got \(1, 3\)", put(cu_query_lens=CU[None])
    ),
    Wrong(
        PA,
        r"block_tables must .*num_seqs 3, got \(2, 2\)",
        put(cu_query_lens=torch.tensor([0, 1, 1, 2])),
    ),
    Wrong(
        PA,
        r"out must have the shape of query, \(2, 4, 16\), got \(4, 2, 16\)",
        put(out=lambda t: t.view(4, 2, 16)),
    ),
    Wrong(
        PA,
        r"alibi_slopes must be \[num_q_heads\], \(4,\), got \(2,\)",
        put(alibi_slopes=torch.ones(2)),
    ),
    Wrong(PA, r"sinks must be \[num_q_heads\], \(4,\), got \(4, 1\)", put(sinks=torch.ones(4, 1))),
    Wrong(
        PA,
        r"k_scale must be a float, or a tensor of shape \(\), \(2,\) or \(6, 4, 2\), got \(4,\)",
        put(k_scale=torch.ones(4)),
    ),
    Wrong(PA, r"v_scale must be a float, .* got \(6, 4, 1\)", put(v_scale=torch.ones(6, 4, 1))),
    # Dtypes.
    Wrong(
        PA, "query must be float16, bfloat16 or float32, got float64", put(query=to(torch.float64))
    ),
    Wrong(
        PA,
        "key_cache must have the dtype of query, float16, .*got float32",
        put(key_cache=to(torch.float32), value_cache=to(torch.float32)),
    ),
    Wrong(PA, "key_cache must be float16, .*got uint8", put(key_cache=to(torch.uint8))),
    Wrong(
        PA,
        "value_cache must have the dtype of key_cache, int8, got float16",
        put(key_cache=to(torch.int8), k_scale=1.0),
    ),
    Wrong(
        PA, "block_tables must be int32 or int64, got float32", put(block_tables=to(torch.float32))
    ),
    Wrong(PA, "seq_lens must be int32 or int64, got bool", put(seq_lens=to(torch.bool))),
    Wrong(PA, "cu_query_lens must be int32 or int64, got float32", put(cu_query_lens=CU.float())),
    Wrong(PA, "out must have the dtype of query, float16, got float32", put(out=to(torch.float32))),
    Wrong(
        PA,
        "alibi_slopes must be float32, got float16",
        put(alibi_slopes=torch.ones(4, dtype=torch.float16)),
    ),
    Wrong(PA, "sinks must be float32, got float64", put(sinks=torch.ones(4, dtype=torch.float64))),
    Wrong(
        PA,
        "k_scale must be float32, got float16",
        put(k_scale=torch.tensor(1.0, dtype=torch.float16)),
    ),
    # Strides.
    Wrong(PA, "query must have stride 1 in its last dimension, got 2", put(query=sparse_rows)),
    Wrong(PA, "key_cache must have stride 1 in its last", put(key_cache=sparse_rows)),
    Wrong(PA, "value_cache must have stride 1 in its last", put(value_cache=sparse_rows)),
    Wrong(PA, "out must have stride 1 in its last", put(out=sparse_rows)),
    Wrong(
        PA,
        "out must not overlap itself.* dimension 1",
        put(out=lambda t: t[:, :1].expand(2, 4, 16)),
    ),
    # Numbers.
    Wrong(PA, "scale must be finite, got nan", put(scale=float("nan"))),
    Wrong(PA, "scale must be finite, got inf", put(scale=float("inf"))),
    Wrong(PA, "softcap must be positive and finite.*got 0$", put(softcap=0.0)),
    Wrong(PA, "softcap must be positive and finite.*got -1$", put(softcap=-1.0)),
    Wrong(PA, "softcap must be positive and finite.*got nan", put(softcap=float("nan"))),
    Wrong(PA, "sliding_window must be at least 1.*got 0$", put(sliding_window=0)),
    Wrong(PA, "sliding_window must be at least 1.*got -1$", put(sliding_window=-1)),
    Wrong(PA, "k_scale must be given, as an int8", put(**INT8, v_scale=1.0)),
    Wrong(PA, "v_scale must be given, as an int8", put(**INT8, k_scale=1.0)),
    Wrong(PA, "k_scale must be positive and finite, got 0", put(k_scale=0.0)),
    Wrong(PA, "v_scale must be positive and finite, got -2", put(v_scale=-2.0)),
    Wrong(PA, "v_scale must be positive and finite, got nan", put(v_scale=float("nan"))),
    # Contents.
    Wrong(
        PA,
        "seq_lens must not be negative, got -1 for sequence 1",
        put(seq_lens=with_entry((1,), -1)),
        True,
    ),
    Wrong(
        PA,
        "seq_lens must fit block_tables, .*2 blocks of 4 tokens, got 9 for sequence 0",
        put(seq_lens=with_entry((0,), 9)),
        True,
    ),
    Wrong(
        PA,
        r"block_tables must name blocks of a pool of 6, got -1 at \(0, 1\)",
        put(block_tables=with_entry((0, 1), -1)),
        True,
    ),
    Wrong(
        PA,
        r"block_tables must name blocks of a pool of 6, got 6 at \(1, 0\)",
        put(block_tables=with_entry((1, 0), 6)),
        True,
    ),
    Wrong(
        PA,
        r"block_tables must name .*got 2147483647 at \(1, 1\)",
        put(block_tables=with_entry((1, 1), 2**31 - 1)),
        True,
    ),
    Wrong(
        PA,
        r"block_tables must name .*got 4294967297 at \(0, 0\)",
        put(block_tables=lambda t: with_entry((0, 0), 2**32 + 1)(t.long())),
        True,
    ),
    Wrong(
        PA,
        "seq_lens must fit .*got 4294967297 for sequence 0",
        put(seq_lens=lambda t: with_entry((0,), 2**32 + 1)(t.long())),
        True,
    ),
    Wrong(PA, "cu_query_lens must start with 0, got 1", put(cu_query_lens=CU + 1), True),
    Wrong(
        PA,
        "cu_query_lens must never decrease, got 2 then 1 at 2",
        put(cu_query_lens=torch.tensor([0, 2, 1])),
        True,
    ),
    Wrong(
        PA,
        "cu_query_lens must end within query's 2 tokens, got 3",
        put(cu_query_lens=torch.tensor([0, 1, 3])),
        True,
    ),
    Wrong(
        PA, "k_scale must be positive and finite, got 0 at 0", put(k_scale=torch.tensor(0.0)), True
    ),
    Wrong(
        PA,
        "v_scale must be positive and finite, got nan at 1",
        put(v_scale=torch.tensor([1.0, float("nan")])),
        True,
    ),
    # Cache writes.
    Wrong(
        RC,
        r"key must be \[num_tokens, num_kv_heads, head_dim\], got \(3, 32\)",
        put(key=lambda t: t.flatten(1)),
    ),
    Wrong(
        RC,
        r"value must have the shape of key, \(3, 2, 16\), got \(2, 2, 16\)",
        put(value=lambda t: t[:2]),
    ),
    Wrong(
        RC, "value must have the dtype of key, float16, got bfloat16", put(value=to(torch.bfloat16))
    ),
    Wrong(
        RC,
        "key must be float16, bfloat16 or float32, got int8",
        put(key=to(torch.int8), value=to(torch.int8)),
    ),
    Wrong(RC, "key must have stride 1 in its last", put(key=sparse_rows)),
    Wrong(RC, "value must have stride 1 in its last", put(value=sparse_rows)),
    Wrong(
        RC,
        r"key must have key_cache's 2 KV heads, got \(3, 1, 16\)",
        put(key=lambda t: t[:, :1], value=lambda t: t[:, :1]),
    ),
    Wrong(
        RC,
        "key_cache must be .*head_dim 8 as key, got",
        put(key=lambda t: t[..., :8], value=lambda t: t[..., :8]),
    ),
    Wrong(
        RC,
        "key_cache must have the dtype of key, float16, .*got float32",
        put(key_cache=to(torch.float32), value_cache=to(torch.float32)),
    ),
    Wrong(
        RC, "key_cache must not overlap itself", put(key_cache=lambda t: t[:1].expand(6, 4, 2, 16))
    ),
    Wrong(
        RC,
        r"slot_mapping must be \[n\] with n at most key's 3 tokens, got \(4,\)",
        put(slot_mapping=torch.arange(4)),
    ),
    Wrong(RC, r"slot_mapping must be \[n\].*got \(3, 1\)", put(slot_mapping=lambda t: t[:, None])),
    Wrong(
        RC, "slot_mapping must be int32 or int64, got float32", put(slot_mapping=to(torch.float32))
    ),
    Wrong(
        RC,
        r"slot_mapping must name slots of a pool of 24 .*got 24 at 2",
        put(slot_mapping=with_entry((2,), 24)),
        True,
    ),
    Wrong(RC, "k_scale must be given, as an int8", put(**INT8, v_scale=1.0)),
    Wrong(RC, "v_scale must be given, as an int8", put(**INT8, k_scale=1.0)),
    Wrong(RC, "k_scale must be positive and finite, got -1", put(**FP8, k_scale=-1.0)),
    Wrong(
        RC,
        "k_scale must be positive and finite, got inf at 0",
        put(**FP8, k_scale=torch.tensor(torch.inf)),
        True,
    ),
    Wrong(
        RC,
        "k_scale must not be one per token, as a float16 cache needs none",
        put(k_scale=torch.ones(6, 4, 2)),
    ),
    Wrong(
        RC,
        "v_scale must not overlap itself",
        put(**FP8, v_scale=torch.ones(1, 1, 1).expand(6, 4, 2)),
    ),
    # Gathering.
    Wrong(
        GC,
        r"key_cache must be \[num_blocks, .*got \(6, 4, 32\)",
        put(key_cache=lambda t: t.flatten(2), value_cache=lambda t: t.flatten(2)),
    ),
    Wrong(
        GC,
        "key_cache must be float16, bfloat16, float32, float8_e4m3fn.*got float64",
        put(key_cache=to(torch.float64), value_cache=to(torch.float64)),
    ),
    Wrong(
        GC,
        "dtype must be float16, bfloat16 or float32, got float8_e4m3fn",
        put(dtype=torch.float8_e4m3fn),
    ),
    Wrong(GC, "value_cache must have the shape of key_cache", put(value_cache=lambda t: t[:5])),
    Wrong(
        GC, r"block_tables must be .*num_seqs 2, got \(1, 2\)", put(block_tables=lambda t: t[:1])
    ),
    Wrong(GC, r"seq_lens must be \[num_seqs\], got \(2, 1\)", put(seq_lens=lambda t: t[:, None])),
    Wrong(GC, "seq_lens must be int32 or int64, got float32", put(seq_lens=to(torch.float32))),
    Wrong(GC, "total_tokens must be at least .*13.*got 12", put(total_tokens=12), True),
    Wrong(GC, "total_tokens must .*got -1", put(total_tokens=-1)),
    Wrong(GC, "seq_lens must fit block_tables", put(seq_lens=with_entry((0,), 9)), True),
    Wrong(
        GC,
        "seq_lens must not be negative, got -3 for sequence 0",
        put(seq_lens=with_entry((0,), -3), total_tokens=None),
        True,
    ),
    Wrong(
        GC,
        "seq_lens must not be negative, got -30 for sequence 0",
        put(seq_lens=with_entry((0,), -30), total_tokens=None),
        True,
    ),
    Wrong(GC, "block_tables must name blocks", put(block_tables=with_entry((0, 0), 6)), True),
    Wrong(GC, "v_scale must be given, as an int8", put(**INT8, k_scale=1.0)),
    # Merging.
    Wrong(
        MS, "out_a must be float16, bfloat16 or float32, got float64", put(out_a=to(torch.float64))
    ),
    Wrong(
        MS,
        r"out_b must have the shape of out_a, \(3, 4, 16\), got \(3, 4, 8\)",
        put(out_b=lambda t: t[..., :8]),
    ),
    Wrong(
        MS, "out_b must have the dtype of out_a, float32, got float16", put(out_b=to(torch.float16))
    ),
    Wrong(
        MS,
        r"lse_a must have the shape of out_a without head_dim.*got \(3,\)",
        put(lse_a=lambda t: t[:, 0]),
    ),
    Wrong(MS, "lse_b must have the shape of out_a without", put(lse_b=lambda t: t[:2])),
    Wrong(MS, "lse_b must be float32, got float64", put(lse_b=to(torch.float64))),
    # Copying.
    Wrong(
        CB,
        "value_caches must have as many layers as key_caches, 2, got 1",
        put(value_caches=lambda pools: pools[:1]),
    ),
    Wrong(
        CB,
        r"value_caches must have one shape, \(6, 4, 2, 16\), got \(5, 4, 2, 16\)",
        put(value_caches=lambda pools: [pools[0], pools[1][:5]]),
    ),
    Wrong(
        CB,
        "key_caches must have one dtype, float32, got float16",
        put(key_caches=lambda pools: [pools[0], pools[1].half()]),
    ),
    Wrong(
        CB,
        r"key_caches must be \[num_blocks, .*got \(6, 4, 32\)",
        put(key_caches=lambda pools: [pool.flatten(2) for pool in pools]),
    ),
    Wrong(
        CB,
        "key_caches must have stride 1",
        put(key_caches=lambda pools: [pools[0], sparse_rows(pools[1])]),
    ),
    Wrong(
        CB,
        "value_caches must not overlap itself",
        put(value_caches=lambda pools: [pools[0], pools[1][:1].expand(6, 4, 2, 16)]),
    ),
    Wrong(
        CB, r"block_mapping must be \[n, 2\].*got \(4,\)", put(block_mapping=lambda t: t.flatten())
    ),
    Wrong(
        CB,
        "block_mapping must be int32 or int64, got float32",
        put(block_mapping=to(torch.float32)),
    ),
    Wrong(
        CB,
        "block_mapping must name sources of a pool of 6 blocks, got -1 in pair 1",
        put(block_mapping=with_entry((1, 0), -1)),
        True,
    ),
    Wrong(
        CB,
        "block_mapping must name destinations .*6 blocks, got 6 in pair 0",
        put(block_mapping=with_entry((0, 1), 6)),
        True,
    ),
    Wrong(
        SB,
        r"dst must have blocks of src's shape, \(6, 4, 2, 16\), got \(5, 4, 1, 16\)",
        put(dst=lambda t: t[:, :, :1]),
    ),
    Wrong(SB, "dst must have the dtype of src, float32, got float16", put(dst=to(torch.float16))),
    Wrong(SB, "dst must not overlap itself", put(dst=lambda t: t[:1].expand(5, 4, 2, 16))),
    Wrong(
        SB,
        r"block_mapping must be \[n, 2\].*got \(1, 3\)",
        put(block_mapping=torch.ones(1, 3, dtype=torch.int64)),
    ),
    Wrong(
        SB,
        "block_mapping must name destinations .*5 blocks, got 5 in pair 0",
        put(block_mapping=with_entry((0, 1), 5)),
    ),
]


def tensors_of(args: Args) -> list[Tensor]:
    flat = [
        item for value in args.values() for item in (value if isinstance(value, list) else [value])
    ]
    return [value for value in flat if isinstance(value, Tensor)]


def place(backend: Backend, args: Args) -> Args:
    tensors = tensors_of(args)
    placed = iter(backend.place_all(tensors))

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [next(placed) for _ in value]
        return next(placed) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in args.items()}


@pytest.mark.parametrize("op", OPS)
def test_good_arguments_are_taken(backend: Backend, op: str) -> None:
    with backend.checks():
        OPS[op](**place(backend, good(op)))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.op}-{wrong.message[:40]}")
def test_refused_and_nothing_written(backend: Backend, wrong: Wrong) -> None:
    args = place(backend, wrong.change(good(wrong.op)))
    if wrong.op == "swap_blocks" or wrong.op == "copy_blocks":
        args["block_mapping"] = args["block_mapping"].cpu()
    before = [raw(tensor) for tensor in tensors_of(args)]
    with (
        backend.checks(),
        pytest.raises((RuntimeError, ValueError, TypeError), match=f"^{wrong.op}: {wrong.message}"),
    ):
        OPS[wrong.op](**args)
    after = [raw(tensor) for tensor in tensors_of(args)]
    assert all(map(torch.equal, before, after)), "an argument was written"


@pytest.mark.backends("cpu", "cuda")  # the emulator's ops have no fakes
@pytest.mark.parametrize("op", OPS)
def test_tensors_of_another_device_are_refused(backend: Backend, op: str) -> None:
    # Whatever argument it is, a tensor from elsewhere must not silently make the call do nothing.
    names = [name for name, value in good(op).items() if isinstance(value, (Tensor, list))]
    for name in names:
        args = place(backend, good(op))
        old = args[name]
        args[name] = [t.to("meta") for t in old] if isinstance(old, list) else old.to("meta")
        with pytest.raises((RuntimeError, ValueError), match=rf"^{op}: \w+ must be "):
            OPS[op](**args)


def test_float_scale_per_token_for_int8_is_given_for_both(backend: Backend) -> None:
    # A scale a token is as good as a float: nothing more is asked for.
    args = place(backend, put(**INT8)(good("reshape_and_cache")))
    scales = {name: backend.place(torch.zeros(6, 4, 2)) for name in ("k_scale", "v_scale")}
    paged_attn.reshape_and_cache(**args, **scales)
    assert scales["k_scale"].count_nonzero().item() == 3 * 2


@pytest.mark.backends("emulator", "cuda")
def test_without_checks_lengths_stay_within_the_table(backend: Backend) -> None:
    # Trusted, not checked: yet a length beyond the table must not read beyond it.
    args = place(backend, put(seq_lens=with_entry((0,), 9))(good("paged_attention")))
    out = paged_attn.paged_attention(**args)
    assert isinstance(out, Tensor)
    assert bool(out.isfinite().all())


PLAN: Args = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_q_heads": 0}, "num_q_heads must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"num_q_heads": 3}, r"num_q_heads must be a multiple of num_kv_heads \(2\), got 3"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"query_len": 0}, "query_len must be at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"seq_lens": torch.ones(2, 1)}, r"seq_lens must be \[num_seqs\], got \(2, 1\)"),
    ],
)
def test_plan_refuses(change: Args, message: str) -> None:
    args = {"seq_lens": torch.ones(2, dtype=torch.int32)} | PLAN | change
    with pytest.raises(ValueError, match=f"^plan_decode: {message}"):
        paged_attn.plan_decode(**args)


@pytest.mark.parametrize(
    "change",
    [
        {"num_q_heads": 8},
        {"num_kv_heads": 1},
        {"head_dim": 8},
        {"query_len": 2},
        {"cu_query_lens": CU},
    ],
    ids=str,
)
def test_plan_for_another_call_is_refused(backend: Backend, change: Args) -> None:
    args = place(backend, good("paged_attention"))
    plan = paged_attn.plan_decode(args["seq_lens"], **(PLAN | change))
    with pytest.raises(ValueError, match="^paged_attention: plan must be made for this call"):
        paged_attn.paged_attention(**args, plan=plan)
    assert bool((args["out"] == 7).all())
