"""Cut into chunks of a given size, a sequence has the same bits in any batch and form of call."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from backends import EMULATED, Backend
from cases import Case, Inputs, attend, build
from hypothesis import given, seed, settings
from support import dtype_id, same_bits
from torch import Tensor

from paged_attn import PagedKVCache

MAX_ROWS = 160  # of a sequence's query, for each KV head: few, for the emulator
heads = pytest.mark.parametrize("num_heads", [(32, 1), (8, 2), (4, 4)], ids=str)
kv_dtypes = pytest.mark.parametrize(
    "kv_dtype", [None, torch.float8_e4m3fn, torch.int8], ids=dtype_id
)
DTYPES = st.sampled_from((torch.float16, torch.bfloat16))
CHUNK_SIZES: Any = st.sampled_from((100, 32, 48, 7, 16, 1000, "auto"))
QUERY_LENS = st.one_of(st.integers(1, 5), st.integers(1, 40))
SEQ_LENS = st.one_of(st.integers(40, 130), st.integers(0, 40))


def check(
    request: pytest.FixtureRequest,
    backend: Backend,
    strategy: st.SearchStrategy[Any],
    body: Callable[[Any], None],
) -> None:
    """Runs the body on examples, each test on others, and fewer where a thread is a fiber."""
    count = 5 if backend.name in EMULATED else 20
    start = zlib.crc32(request.node.name.encode())
    seed(start)(settings(max_examples=count)(given(strategy)(body)))()


@st.composite
def batches(
    draw: st.DrawFn, num_heads: tuple[int, int], kv_dtype: torch.dtype | None
) -> tuple[Case, int]:
    """Sequences of a ragged call, and where the first one of them is put in a batch."""
    num_q_heads, num_kv_heads = num_heads
    most = MAX_ROWS * num_kv_heads // num_q_heads
    query_len = min(draw(QUERY_LENS), most)
    # As long as the first, which makes a uniform batch, or not.
    one = st.one_of(st.just(query_len), st.integers(0, min(40, most)))
    others = draw(st.lists(st.tuples(one, SEQ_LENS), min_size=1, max_size=3))
    case = Case(
        "batch_invariance",
        seq_lens=(draw(SEQ_LENS), *(length for _, length in others)),
        query_lens=(query_len, *(count for count, _ in others)),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from((64, 72, 128, 256))),
        block_size=draw(st.sampled_from((16, 32, 4))),
        dtype=draw(DTYPES),
        kv_dtype=kv_dtype,
        scale_kind="none" if kv_dtype is None else draw(st.sampled_from(("float", "token"))),
        scale=draw(st.sampled_from((None, 1.0))),  # 1: maxima are raised often, and far
        causal=draw(st.booleans()),
        sliding_window=draw(st.one_of(st.none(), st.integers(1, 60))),
        softcap=draw(st.sampled_from((None, 3.0))),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        chunk_size=draw(CHUNK_SIZES),
    )
    return case, draw(st.integers(0, len(others)))


def select(inputs: Inputs, order: list[int], query: Tensor, cu_query_lens: Any) -> Inputs:
    """A call of these sequences, with a table no wider than it must be."""
    lens = inputs.seq_lens[order]
    width = -(-int(lens.max()) // inputs.case.block_size)
    return inputs.replace(
        query=query,
        block_tables=inputs.block_tables[order, :width],
        seq_lens=lens,
        options=inputs.options | {"cu_query_lens": cu_query_lens},
    )


def ragged(backend: Backend, inputs: Inputs, order: list[int], padding: int = 0) -> Inputs:
    """These sequences in a ragged call."""
    rows = [inputs.query[slice(*inputs.query_spans()[seq])] for seq in order]
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
    query = torch.cat([*rows, *[inputs.query[:1]] * padding])
    return select(inputs, order, query, backend.place(ends))


def uniform(inputs: Inputs, order: list[int]) -> Inputs:
    """These sequences, all with as many query tokens, in a call that is not ragged."""
    rows = [inputs.query[slice(*inputs.query_spans()[seq])] for seq in order]
    return select(inputs, order, torch.stack(rows), None)


@heads
@kv_dtypes
def test_a_sequence_in_any_batch(
    request: pytest.FixtureRequest,
    backend: Backend,
    num_heads: tuple[int, int],
    kv_dtype: torch.dtype | None,
) -> None:
    def body(drawn: tuple[Case, int]) -> None:
        case, place = drawn
        inputs = build(case).on(backend)
        lens = case.query_lens
        assert isinstance(lens, tuple)
        want, want_lse = attend(uniform(inputs, [0]))

        def compare(call: Inputs, place: Any) -> None:
            out, lse = attend(call)
            assert same_bits(out[place], want[0])
            assert same_bits(lse[place], want_lse[0])

        others = list(range(1, len(lens)))
        order = [*others[:place], 0, *others[place:]]
        alike = [seq for seq in order if lens[seq] == lens[0]]
        compare(uniform(inputs, alike), alike.index(0))
        compare(ragged(backend, inputs, [0]), slice(lens[0]))
        start = sum(lens[seq] for seq in others[:place])
        compare(ragged(backend, inputs, order, padding=2), slice(start, start + lens[0]))

    check(request, backend, batches(num_heads, kv_dtype), body)


@kv_dtypes
@pytest.mark.parametrize("chunk_size", [None, 48])
@pytest.mark.parametrize("query_len", [1, 2, 5])
def test_what_other_rows_hold_does_not_matter(
    backend: Backend, query_len: int, chunk_size: int | None, kv_dtype: torch.dtype | None
) -> None:
    # Their maxima are raised in other tiles: they are larger, much smaller, or not there.
    case = Case(
        "other_rows",
        seq_lens=(290,),
        query_lens=query_len,
        num_q_heads=6,
        num_kv_heads=1,
        kv_dtype=kv_dtype,
        scale_kind="none" if kv_dtype is None else "float",
        scale=0.5,
    )
    inputs = build(case)
    want, want_lse = attend(inputs.on(backend), chunk_size=chunk_size)
    for factor in (8.0, 0.01, 0.0):
        query = inputs.query * factor
        query[:, 0, 4] = inputs.query[:, 0, 4]
        out, lse = attend(inputs.replace(query=query).on(backend), chunk_size=chunk_size)
        assert same_bits(out[0, 0, 4], want[0, 0, 4])
        assert same_bits(lse[0, 0, 4:5], want_lse[0, 0, 4:5])


@heads
@kv_dtypes
def test_a_step_of_a_cache_in_any_company(
    request: pytest.FixtureRequest,
    backend: Backend,
    num_heads: tuple[int, int],
    kv_dtype: torch.dtype | None,
) -> None:
    # A step of one token each is a uniform call, one with prompts a ragged one.
    def body(drawn: tuple[torch.dtype, int, Any, list[int], list[int]]) -> None:
        dtype, head_dim, chunk_size, seq_lens, others = drawn
        num_q_heads, num_kv_heads = num_heads
        scale: Any = None if kv_dtype is None else "per_token"
        cache = PagedKVCache(
            1,
            32,
            16,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device="cuda" if backend.name == "cuda" else "cpu",
            k_scale=scale,
            v_scale=scale,
            chunk_size=chunk_size,
        )
        generator = torch.Generator().manual_seed(sum(seq_lens))

        def rows(count: int, num_heads: int) -> Tensor:
            values = torch.randn(count, num_heads, head_dim, generator=generator)
            return values.to(dtype).to(cache.device)

        ids = [cache.add() for _ in seq_lens]
        first = cache.step(ids, seq_lens)
        key, value = (rows(sum(seq_lens), num_kv_heads) for _ in range(2))
        cache.write(0, key, value, first)
        query = rows(1 + sum(others), num_q_heads)
        want = cache.attend(0, query[:1], cache.batch(ids[:1]), return_lse=True)
        for batch in (cache.batch(ids), cache.batch(ids, [1, *others])):
            got = cache.attend(0, query[: len(batch.slot_mapping)], batch, return_lse=True)
            assert all(same_bits(g[:1], w) for g, w in zip(got, want, strict=True))

    steps = st.tuples(
        DTYPES,
        st.sampled_from((64, 72, 128)),
        CHUNK_SIZES,
        st.lists(st.integers(40, 90), min_size=3, max_size=3),
        st.lists(st.integers(1, 20), min_size=2, max_size=2),
    )
    check(request, backend, steps, body)
