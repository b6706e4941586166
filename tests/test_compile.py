"""The ops under torch.compile: no graph break, mutation seen, memory kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import CASES, attend, build
from torch import Tensor

import paged_attn
from paged_attn import paged_attention, reshape_and_cache
from paged_attn.flash_attn import flash_attn_with_kvcache

ops: Any = torch.ops.paged_attn
EAGER_BACKENDS = ("aot_eager", "inductor")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, of its own parts
        yield
    torch.compiler.reset()


def pools(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(2, 6, 4, 2, 16, generator=generator)
    return both[0].to(dtype), both[1].to(dtype)


def tables() -> tuple[Tensor, Tensor]:
    block_tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    return block_tables, torch.tensor([5, 8], dtype=torch.int32)


def attention_args(**changes: Any) -> tuple[Any, ...]:
    query = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(2))
    args: dict[str, Any] = {
        "out": torch.empty(2, 4, 16),
        "lse": None,
        "query": query,
        "caches": pools(),
        "cu_query_lens": None,
        "scale": None,
        "causal": True,
        "sliding_window": None,
        "softcap": None,
        "alibi_slopes": None,
        "sinks": None,
        "scales": (None, None, None, None),
        "chunk_size": None,
    } | changes
    return (
        *(args[name] for name in ("out", "lse", "query")),
        *args["caches"],
        *tables(),
        *(args[name] for name in ("cu_query_lens", "scale", "causal", "sliding_window")),
        *(args[name] for name in ("softcap", "alibi_slopes", "sinks")),
        *args["scales"],
        args["chunk_size"],
        None,  # plan
        2,  # plan_kv_bytes
    )


def write_args(kv_dtype: torch.dtype = torch.float32, scales: Any = (None,) * 4) -> tuple[Any, ...]:
    rows = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(3))
    return rows, rows.flip(0), *pools(kv_dtype), torch.tensor([0, -1, 23]), *scales


SCALES = torch.ones(2), torch.tensor(2.0), None, None
PER_TOKEN = torch.zeros(6, 4, 2), torch.zeros(6, 4, 2), None, None
SAMPLES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "attention": (ops.paged_attention, attention_args()),
    "attention_fp8_with_all": (
        ops.paged_attention,
        attention_args(
            lse=torch.empty(2, 4),
            caches=pools(torch.float8_e5m2),
            cu_query_lens=torch.tensor([0, 1, 2], dtype=torch.int32),
            scale=0.5,
            causal=False,
            sliding_window=3,
            softcap=2.0,
            alibi_slopes=torch.ones(4),
            sinks=torch.zeros(4),
            scales=SCALES,
            chunk_size=4,
        ),
    ),
    "flash_attn": (
        ops.flash_attn_with_kvcache,
        (
            *(torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 4), torch.randn(2, 1, 4, 16)),
            *(torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)),
            *pools(),
            tables()[0],
            torch.tensor([1, 4], dtype=torch.int32),
            *(0.5, True, 3, 2.0, torch.ones(4)),
        ),
    ),
    "plan": (
        ops.plan_decode,
        (torch.empty(8192, dtype=torch.int32), tables()[1], None, 0, 4, 2, 16, 1, True, None, 2),
    ),
    "merge": (
        ops.merge_states,
        tuple(torch.randn(3, 4, 8) if i % 2 == 0 else torch.randn(3, 4) for i in range(6)),
    ),
    "write": (ops.reshape_and_cache, write_args()),
    "write_fp8": (ops.reshape_and_cache, write_args(torch.float8_e4m3fn, (None, None, 0.5, 2.0))),
    "write_int8_per_token": (ops.reshape_and_cache, write_args(torch.int8, PER_TOKEN)),
    "gather": (
        ops.gather_cache,
        (*pools(), *tables(), *(None,) * 4, None, 13),
    ),
    "copy": (
        ops.copy_blocks,
        ([*pools()], [*pools()], torch.tensor([[0, 1], [2, 3]])),
    ),
    "swap": (ops.swap_blocks, (*pools(), torch.tensor([[0, 1]]))),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    op, args = SAMPLES[name]
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if "fp8" not in name:  # torch cannot compare fp8 tensors there
        utils.append("test_schema")
    torch.library.opcheck(op.default, args, test_utils=utils)


def test_every_op_is_sampled() -> None:
    names = {op._qualified_op_name for op, _ in SAMPLES.values()}
    schemas = torch._C._jit_get_all_schemas()
    assert names == {s.name for s in schemas if s.name.startswith("paged_attn::")}


def test_schemas_mark_what_is_written() -> None:
    written = {
        "paged_attention": {"out", "lse", "plan"},
        "flash_attn_with_kvcache": {"out", "lse", "k_cache", "v_cache"},
        "plan_decode": {"plan"},
        "merge_states": {"out", "lse"},
        "reshape_and_cache": {"key_cache", "value_cache", "k_scale", "v_scale"},
        "gather_cache": set(),
        "copy_blocks": {"key_caches", "value_caches"},
        "swap_blocks": {"dst"},
    }
    for name, want in written.items():
        arguments = getattr(ops, name).default._schema.arguments
        got = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        assert got == want, name


def decode_step(
    query: Tensor, rows: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Write, read, write, read: the second read must see the second write."""
    block_tables, seq_lens = tables()
    results = []
    for i in range(2):
        reshape_and_cache(rows * (i + 1), rows - i, key_cache, value_cache, slots)
        result = paged_attention(query, key_cache, value_cache, block_tables, seq_lens)
        assert isinstance(result, Tensor)
        results.append(result + 1)
    return results[0], results[1]


def step_args(
    make_pools: Callable[[], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    query, rows = (torch.randn(2, h, 16, generator=generator) for h in (4, 2))
    return query, rows, *make_pools(), torch.tensor([8, 19])


def separate() -> tuple[Tensor, Tensor]:
    return pools()


def interleaved() -> tuple[Tensor, Tensor]:
    both = torch.stack(pools(), dim=1)
    return both[:, 0], both[:, 1]


def hnd() -> tuple[Tensor, Tensor]:
    key, value = (pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in pools())
    return key, value


@pytest.mark.parametrize("make_pools", [separate, interleaved, hnd], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend_name", EAGER_BACKENDS)
def test_write_read_write_read(
    backend_name: str, make_pools: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    eager, compiled = step_args(make_pools), step_args(make_pools)
    want = decode_step(*eager)
    assert not torch.equal(*want)
    addresses = [pool.data_ptr() for pool in compiled[2:4]]
    step = torch.compile(decode_step, fullgraph=True, backend=backend_name)
    for got, expected in zip(step(*compiled), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for got, expected in zip(compiled[2:4], eager[2:4], strict=True):
        assert torch.equal(got, expected), "the caller's cache was not written"
    assert [pool.data_ptr() for pool in compiled[2:4]] == addresses


@pytest.mark.parametrize("backend_name", EAGER_BACKENDS)
def test_views_taken_inside(backend_name: str) -> None:
    # kv[:, 0] of the caller's tensor, sliced in the compiled function.
    def step(both: Tensor, rows: Tensor, query: Tensor, slots: Tensor) -> Tensor:
        result = decode_step(query, rows, both[:, 0], both[:, 1], slots)
        return result[0] + result[1]

    query, rows, *_, slots = step_args(separate)
    eager, mine = (torch.stack(pools(), dim=1) for _ in range(2))
    want = step(eager, rows, query, slots)
    address = mine.data_ptr()
    compiled = torch.compile(step, fullgraph=True, backend=backend_name)
    torch.testing.assert_close(compiled(mine, rows, query, slots), want, rtol=0, atol=0)
    assert torch.equal(mine, eager)
    assert mine.data_ptr() == address


def test_batch_size_may_change_without_recompiling() -> None:
    calls = 0

    def count(graph: Any, _inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return graph.forward

    def step(query: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
        result = paged_attention(query, key_cache, value_cache, block_tables, seq_lens)
        assert isinstance(result, Tensor)
        return result * 2

    key_cache, value_cache = pools()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=count)
    generator = torch.Generator().manual_seed(6)
    for num_seqs in (5, 3, 7, 11):  # no other dimension has the first size
        query = torch.randn(num_seqs, 4, 16, generator=generator)
        block_tables = torch.arange(2, dtype=torch.int32).repeat(num_seqs, 1)
        seq_lens = torch.arange(1, num_seqs + 1, dtype=torch.int32).clamp(max=8)
        want = step(query, block_tables, seq_lens)
        assert torch.equal(compiled(query, block_tables, seq_lens), want)
    assert calls == 1


@pytest.mark.parametrize("backend_name", EAGER_BACKENDS)
def test_all_options(backend_name: str) -> None:
    case = next(case for case in CASES if case.name == "everything")
    inputs = build(case)
    want = attend(inputs)

    def step(query: Tensor) -> tuple[Tensor, Tensor]:
        return attend(inputs.replace(query=query))

    got = torch.compile(step, fullgraph=True, backend=backend_name)(inputs.query)
    for mine, expected in zip(got, want, strict=True):
        assert torch.equal(mine.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("backend_name", EAGER_BACKENDS)
def test_other_ops(backend_name: str) -> None:
    mapping = torch.tensor([[1, 5]])

    def step(key_cache: Tensor, value_cache: Tensor, host: Tensor) -> tuple[Tensor, ...]:
        paged_attn.copy_blocks(key_cache, value_cache, mapping)
        paged_attn.swap_blocks(key_cache, host, mapping)
        block_tables, seq_lens = tables()
        key, value = paged_attn.gather_cache(
            key_cache, value_cache, block_tables + 1, seq_lens, total_tokens=13
        )
        lse = key[..., 0]
        return (*paged_attn.merge_states(key, lse, value, lse), host * 2)

    eager, mine = ((*pools(), torch.zeros(6, 4, 2, 16)) for _ in range(2))
    want = step(*eager)
    got = torch.compile(step, fullgraph=True, backend=backend_name)(*mine)
    for result, expected in zip(got, want, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    for tensor, expected in zip(mine, eager, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("backend_name", EAGER_BACKENDS)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])
def test_computed_scales_are_written(backend_name: str, kv_dtype: torch.dtype) -> None:
    def step(rows: Tensor, key_cache: Tensor, value_cache: Tensor, scales: Tensor) -> Tensor:
        slots = torch.tensor([4, 5, 6])
        reshape_and_cache(
            rows, rows, key_cache, value_cache, slots, k_scale=scales[0], v_scale=scales[1]
        )
        block_tables, seq_lens = torch.tensor([[1]]), torch.tensor([3])
        result = paged_attention(
            rows[:1],
            key_cache,
            value_cache,
            block_tables,
            seq_lens,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        assert isinstance(result, Tensor)
        return result + scales[0].sum()

    rows = write_args()[0]
    eager, mine = (
        [torch.zeros(6, 4, 2, 16).to(kv_dtype) for _ in range(2)] + [torch.zeros(2, 6, 4, 2)]
        for _ in range(2)
    )
    want = step(rows, *eager)
    got = torch.compile(step, fullgraph=True, backend=backend_name)(rows, *mine)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert mine[2].count_nonzero().item() == 12
    for tensor, expected in zip(mine, eager, strict=True):
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_fake_tensors_run_the_fakes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        query, key_cache, value_cache = (
            mode.from_tensor(t) for t in (torch.zeros(2, 4, 16), *pools())
        )
        block_tables, seq_lens = (mode.from_tensor(t) for t in tables())
        result = paged_attention(
            query, key_cache, value_cache, block_tables, seq_lens, return_lse=True
        )
    assert [tuple(t.shape) for t in result] == [(2, 4, 16), (2, 4)]


def flash_step(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor]:
    result = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=tables()[0], causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert isinstance(result, tuple)
    return result


def test_flash_attn_compiles_whole() -> None:
    generator = torch.Generator().manual_seed(4)
    compiled = torch.compile(flash_step, fullgraph=True)
    for query_len in (1, 2):
        q = torch.randn(2, query_len, 4, 16, generator=generator)
        k, v = torch.randn(2, 2, query_len, 2, 16, generator=generator)
        eager, traced = pools(), pools()
        for lens in (torch.tensor([1, 4]), torch.tensor([5, 6])):
            want = flash_step(q, k, v, *eager, lens)
            got = compiled(q, k, v, *traced, lens)
            for a, b in zip((*want, *eager), (*got, *traced), strict=True):
                assert torch.equal(a, b)
