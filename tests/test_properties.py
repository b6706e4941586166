"""What holds for all shapes and lengths: hypothesis looks for one where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from accuracy import assert_accurate
from backends import EMULATED, Backend
from cases import LAYOUTS, Case, attend, build, make_pools
from hypothesis import given, settings
from support import raw, same_bits

import paged_attn

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
KV_DTYPES = (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def check(backend: Backend, strategy: st.SearchStrategy[Any], body: Callable[[Any], None]) -> None:
    """Runs the body on examples, fewer where a thread is a fiber."""
    count = 30 if backend.name in EMULATED else 100
    settings(max_examples=count)(given(strategy)(body))()


@st.composite
def lengths(draw: st.DrawFn, block_size: int, max_seqs: int = 3) -> tuple[int, ...]:
    """Lengths around the edges of blocks."""
    edge = st.builds(
        lambda blocks, step: max(0, blocks * block_size + step),
        st.integers(0, max(1, 40 // block_size)),
        st.sampled_from((-1, 0, 1)),
    )
    return tuple(draw(st.lists(st.one_of(edge, st.integers(0, 50)), min_size=1, max_size=max_seqs)))


@st.composite
def cases(draw: st.DrawFn, *, ragged: bool = True, quantised: bool = True) -> Case:
    """Any call of paged_attention that is small."""
    block_size = draw(st.sampled_from((1, 2, 3, 4, 7, 8, 16, 24)))
    seq_lens = draw(lengths(block_size))
    query_lens: Any = draw(st.sampled_from((None, 1, 2, 5)))
    if ragged and draw(st.booleans()):
        query_lens = draw(st.tuples(*(st.integers(0, 4) for _ in seq_lens)))
    kv_dtype = draw(st.sampled_from(KV_DTYPES)) if quantised else None
    kinds = ("none", "float", "tensor", "head", "token")
    num_kv_heads = draw(st.integers(1, 3))
    return Case(
        "any",
        seq_lens=seq_lens,
        query_lens=query_lens,
        padding=draw(st.integers(0, 2)) if isinstance(query_lens, tuple) else 0,
        num_q_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3, 8, 9))),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from((8, 16, 24, 64, 72, 128))),
        block_size=block_size,
        dtype=draw(st.sampled_from(FLOATS)),
        kv_dtype=kv_dtype,
        layout=draw(st.sampled_from(LAYOUTS)),
        scale_kind="none"
        if kv_dtype is None
        else draw(st.sampled_from(kinds[1:] if kv_dtype == torch.int8 else kinds)),
        scale=draw(st.sampled_from((None, 0.5, -0.1, 0.0))),
        causal=draw(st.booleans()),
        sliding_window=draw(st.one_of(st.none(), st.integers(1, 40))),
        softcap=draw(st.sampled_from((None, 1.5, 30.0))),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        chunk_size=draw(st.one_of(st.none(), st.integers(1, 40))),
        index_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        table_layout=draw(st.sampled_from(("dense", "transposed", "spread"))),
    )


def test_any_call_is_accurate(backend: Backend) -> None:
    def body(case: Case) -> None:
        inputs = build(case)
        with backend.checks():
            out, lse = attend(inputs.on(backend))
        assert_accurate(out, inputs, lse)

    check(backend, cases(), body)


def test_order_of_the_batch_does_not_matter(backend: Backend) -> None:
    def body(given_case: tuple[Case, Any]) -> None:
        case, random = given_case
        inputs = build(case).on(backend)
        chunk_size = case.chunk_size or 16
        out, lse = attend(inputs, chunk_size=chunk_size)
        order = list(range(len(case.seq_lens)))
        random.shuffle(order)
        shuffled = inputs.replace(
            query=inputs.query[order],
            block_tables=inputs.block_tables[order],
            seq_lens=inputs.seq_lens[order],
        )
        other, other_lse = attend(shuffled, chunk_size=chunk_size)
        assert same_bits(other, out[order])
        assert same_bits(other_lse, lse[order])

    check(backend, st.tuples(cases(ragged=False), st.randoms(use_true_random=False)), body)


def test_repaging(backend: Backend) -> None:
    # The same tokens in blocks of another size, through the ops alone: gather, then write.
    def body(drawn: tuple[Case, int]) -> None:
        case, block_size = drawn
        inputs = build(case)
        placed = inputs.on(backend)
        want, _ = attend(placed, chunk_size=8)
        key, value = paged_attn.gather_cache(
            placed.key_cache, placed.value_cache, placed.block_tables, placed.seq_lens
        )
        other = build(case.replace(block_size=block_size)).on(backend)
        slots = [
            int(other.block_tables[seq, t // block_size]) * block_size + t % block_size
            for seq, length in enumerate(case.seq_lens)
            for t in range(length)
        ]
        paged_attn.reshape_and_cache(
            key,
            value,
            other.key_cache,
            other.value_cache,
            backend.place(torch.tensor(slots, dtype=torch.int64)),
        )
        got, _ = attend(other.replace(query=placed.query, options=placed.options), chunk_size=8)
        assert same_bits(got, want)

    block_sizes = st.sampled_from((1, 2, 5, 16, 31, 64))
    check(backend, st.tuples(cases(quantised=False), block_sizes), body)


@st.composite
def writes(draw: st.DrawFn) -> tuple[Any, ...]:
    """A pool, and slots of it in any order, some of them skipped."""
    num_blocks, block_size = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    slots = draw(st.lists(st.integers(0, num_blocks * block_size - 1), unique=True, max_size=12))
    for place in draw(st.lists(st.integers(0, len(slots)), max_size=3)):
        slots.insert(place, -1)
    return (
        draw(st.sampled_from(FLOATS)),
        draw(st.sampled_from(LAYOUTS)),
        num_blocks,
        block_size,
        draw(st.integers(1, 3)),
        draw(st.sampled_from((8, 24, 64))),
        slots,
        draw(st.integers(0, 3)),
    )


def test_write_touches_its_slots_alone(backend: Backend) -> None:
    def body(drawn: tuple[Any, ...]) -> None:
        dtype, layout, num_blocks, block_size, heads, head_dim, slots, extra = drawn
        generator = torch.Generator().manual_seed(len(slots))
        rows = torch.randn(2, len(slots) + extra, heads, head_dim, generator=generator).to(dtype)
        pools = make_pools(layout, num_blocks, block_size, heads, head_dim, dtype)
        mine = backend.place_pair(pools)
        placed = backend.place(rows)
        mapping = backend.place(torch.tensor(slots, dtype=torch.int64))
        with backend.checks():
            paged_attn.reshape_and_cache(placed[0], placed[1], *mine, mapping)
        for pool, side in zip(pools, rows, strict=True):
            for row, slot in zip(side, slots, strict=False):
                if slot >= 0:
                    pool[slot // block_size, slot % block_size] = row
        for got, want in zip(mine, pools, strict=True):
            assert torch.equal(raw(got).cpu(), raw(want))

    check(backend, writes(), body)


def test_halves_make_the_whole(backend: Backend) -> None:
    def body(drawn: tuple[Case, int]) -> None:
        case, tenths = drawn
        case = case.replace(
            seq_lens=case.seq_lens[:1],
            query_lens=None,
            dtype=torch.float32,
            kv_dtype=None,
            scale_kind="none",
            padding=0,
            alibi=False,
            sinks=False,
            sliding_window=None,
        )
        inputs = build(case)
        block_size = case.block_size
        cut = case.seq_lens[0] // block_size * tenths // 10
        first = inputs.replace(seq_lens=torch.full_like(inputs.seq_lens, cut * block_size))
        second = inputs.replace(
            block_tables=inputs.block_tables[:, cut:],
            seq_lens=inputs.seq_lens - cut * block_size,
        )
        first_part, second_part = attend(first.on(backend)), attend(second.on(backend))
        out, lse = paged_attn.merge_states(*first_part, *second_part)
        assert_accurate(out, inputs, lse)

    check(backend, st.tuples(cases(), st.integers(0, 10)), body)


def test_shared_blocks_read_as_copies(backend: Backend) -> None:
    # Two sequences share a prefix; a third has a copy of it in blocks of its own.
    def body(drawn: tuple[int, int, int]) -> None:
        block_size, shared, rest = drawn
        length = block_size * shared + rest
        inputs = build(Case("prefix", seq_lens=(length,) * 3, block_size=block_size, head_dim=16))
        tables = inputs.block_tables
        for pool in (inputs.key_cache, inputs.value_cache):
            for seq in (1, 2):
                pool[tables[seq, :shared].long()] = pool[tables[0, :shared].long()]
        placed = inputs.on(backend)
        want, _ = attend(placed, chunk_size=8)
        placed.block_tables[1, :shared] = placed.block_tables[0, :shared]
        got, _ = attend(placed, chunk_size=8)
        assert same_bits(got, want)

    check(backend, st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(0, 9)), body)


def test_copy_on_write_isolates_the_writer(backend: Backend) -> None:
    # Forks at any length, then writes in any order: each sequence reads back what it wrote.
    def body(drawn: tuple[int, int, list[tuple[int, int]]]) -> None:
        block_size, prompt, steps = drawn
        manager = paged_attn.BlockManager(num_blocks=64, block_size=block_size)
        pools = backend.place_pair(make_pools("nhd", 64, block_size, 1, 8, torch.float32))

        def write(slots: list[int], values: list[float]) -> None:
            rows = backend.place(torch.tensor(values)[:, None, None].expand(-1, 1, 8).contiguous())
            mapping = backend.place(torch.tensor(slots, dtype=torch.int64))
            paged_attn.reshape_and_cache(rows, rows, *pools, mapping)

        first = manager.add(prompt)
        written = {first: [float(t) for t in range(prompt)]}
        write(manager.slots(first, 0, prompt), written[first])
        for step, (which, count) in enumerate(steps):
            seq = list(written)[which % len(written)]
            if count == 0:
                written[manager.fork(seq)] = list(written[seq])
                continue
            slots, copies = manager.append(seq, count)
            paged_attn.copy_blocks(*pools, copies)
            values = [100.0 * (step + 1) + i for i in range(count)]
            write(slots, values)
            written[seq] += values
        for seq, values in written.items():
            tables = backend.place(torch.tensor([manager.block_table(seq)], dtype=torch.int32))
            lens = backend.place(torch.tensor([len(values)], dtype=torch.int32))
            for gathered in paged_attn.gather_cache(*pools, tables, lens):
                assert gathered[:, 0, 0].tolist() == values

    steps = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8)
    check(backend, st.tuples(st.integers(1, 6), st.integers(1, 14), steps), body)
