"""paged_attention on every named case, and what must not change its results."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import CASES, Case, Inputs, attend, build, make_plan, poison, strided
from torch import Tensor

import paged_attn

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def raw(tensor: Tensor) -> Tensor:
    """A tensor's whole storage as bytes, NaN and padding included."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage()).clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def select(inputs: Inputs, order: list[int]) -> Inputs:
    """The same call with these sequences in this order; not for ragged queries."""
    return inputs.replace(
        query=inputs.query[order],
        block_tables=inputs.block_tables[order],
        seq_lens=inputs.seq_lens[order],
    )


@cases
def test_case(backend: Backend, case: Case) -> None:
    inputs = build(case)
    placed = inputs.on(backend)
    before = [raw(tensor) for tensor in (placed.key_cache, placed.value_cache, placed.query)]
    out, lse = attend(placed)
    assert_accurate(out, inputs, lse)
    after = [raw(tensor) for tensor in (placed.key_cache, placed.value_cache, placed.query)]
    assert all(map(torch.equal, before, after)), "an input was written"


@cases
def test_given_out(backend: Backend, case: Case) -> None:
    inputs = build(case).on(backend)
    lead = inputs.query.shape[:-2]
    out = backend.place(strided(lead, case.num_q_heads, case.head_dim, case.dtype))
    around = raw(out)
    returned, _ = attend(inputs, out=out)
    fresh, _ = attend(inputs)
    assert returned is out
    assert same_bits(out, fresh)
    poison(out)
    assert torch.equal(raw(out), around), "written between out's rows"


@pytest.mark.schedules
@pytest.mark.parametrize("name", ["chunked", "chunked_sinks", "ragged", "everything"])
def test_same_inputs_same_bits(backend: Backend, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    inputs = build(case)
    placed = inputs.on(backend)
    first, first_lse = attend(placed)
    again, again_lse = attend(placed)
    assert same_bits(first, again)
    assert same_bits(first_lse, again_lse)
    assert_accurate(first, inputs, first_lse)


def test_without_lse_the_output_is_the_same(backend: Backend) -> None:
    inputs = build(Case("with_and_without_lse", chunk_size=8, sinks=True)).on(backend)
    with_lse, _ = attend(inputs)
    without = paged_attn.paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.seq_lens,
        **inputs.options,
        plan=make_plan(inputs, 8),
    )
    assert isinstance(without, Tensor)
    assert same_bits(without, with_lse)


PLANNED = (
    Case("short", seq_lens=(1,)),
    Case("long", seq_lens=(900, 0, 33), sinks=True),  # in fragments, wherever CTAs are few
    Case("long_window", seq_lens=(900, 700), query_lens=2, sliding_window=300),
    Case("long_ragged", seq_lens=(900, 40, 700), query_lens=(3, 0, 1), padding=2, sinks=True),
)


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.name)
def test_a_plan_of_the_step_changes_nothing(backend: Backend, case: Case) -> None:
    # Made beforehand and used twice, as by two layers: the same cuts as a call makes for itself.
    inputs = build(case).on(backend)
    want, lse = attend(inputs)
    assert_accurate(want, build(case), lse)
    plan = make_plan(inputs)
    for _ in range(2):
        got = paged_attn.paged_attention(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            inputs.block_tables,
            inputs.seq_lens,
            **inputs.options,
            plan=plan,
        )
        assert isinstance(got, Tensor)
        assert same_bits(got, want)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 8, 16, 33, 1 << 40])
@pytest.mark.parametrize("query_lens", [None, 3, (2, 1, 4)])
def test_any_chunk_size(
    backend: Backend, chunk_size: int, query_lens: int | tuple[int, ...] | None
) -> None:
    case = Case("chunk_sizes", query_lens=query_lens, seq_lens=(1, 16, 39), block_size=8)
    inputs = build(case.replace(sinks=True, sliding_window=20))
    out, lse = attend(inputs.on(backend), chunk_size=chunk_size)
    assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_chunked_bits_do_not_depend_on_the_batch(backend: Backend, chunk_size: int) -> None:
    inputs = build(Case("batch_invariance", seq_lens=(37, 1, 16, 90), query_lens=2)).on(backend)
    together, lse = attend(inputs, chunk_size=chunk_size)
    for seq in range(4):
        alone, alone_lse = attend(select(inputs, [seq]), chunk_size=chunk_size)
        assert same_bits(alone, together[seq : seq + 1])
        assert same_bits(alone_lse, lse[seq : seq + 1])


def test_chunked_bits_of_ragged_sequences_do_not_depend_on_the_batch(backend: Backend) -> None:
    lens = (2, 1, 40, 1)  # alone they are of few query rows, many, few; together of some
    inputs = build(Case("ragged_batch", seq_lens=(37, 1, 66, 90), query_lens=lens)).on(backend)
    together, lse = attend(inputs, chunk_size=16)
    for seq, length in enumerate(lens):
        rows = slice(sum(lens[:seq]), sum(lens[: seq + 1]))
        alone = inputs.replace(
            query=inputs.query[rows],
            block_tables=inputs.block_tables[seq : seq + 1],
            seq_lens=inputs.seq_lens[seq : seq + 1],
            options=inputs.options
            | {"cu_query_lens": backend.place(torch.tensor([0, length], dtype=torch.int32))},
        )
        out, alone_lse = attend(alone, chunk_size=16)
        assert same_bits(out, together[rows])
        assert same_bits(alone_lse, lse[rows])


def test_a_sequence_that_needs_longer_chunks(backend: Backend) -> None:
    # 64 chunks of 512 tokens do not reach its end.
    case = Case("longer_chunks", seq_lens=(33000,), num_q_heads=1, num_kv_heads=1, head_dim=8)
    inputs = build(case)
    out, lse = attend(inputs.on(backend), chunk_size="auto")
    assert_accurate(out, inputs, lse)


def test_order_of_the_batch(backend: Backend) -> None:
    # Rows of the table are looked up by sequence, whatever their order and whatever ids they hold.
    inputs = build(Case("batch_order", seq_lens=(5, 33, 1, 48, 17), block_size=4)).on(backend)
    straight, _ = attend(inputs, chunk_size=16)
    for order in ([3, 1, 2, 0, 4], [4, 3, 2, 1, 0], [1, 1, 1]):
        shuffled, _ = attend(select(inputs, order), chunk_size=16)
        assert same_bits(shuffled, straight[order])


def test_which_blocks_hold_a_sequence_does_not_matter(backend: Backend) -> None:
    inputs = build(Case("renamed_blocks", seq_lens=(33, 20, 7), block_size=4))
    want, _ = attend(inputs.on(backend), chunk_size=8)
    num_blocks = inputs.key_cache.shape[0]
    for order in (list(range(num_blocks))[::-1], [*range(3, num_blocks), 0, 1, 2]):
        # Block order[i] becomes block i.
        names = torch.empty(num_blocks, dtype=torch.int32)
        names[order] = torch.arange(num_blocks, dtype=torch.int32)
        live = inputs.block_tables < num_blocks
        tables = inputs.block_tables.clone()
        tables[live] = names[inputs.block_tables[live].long()]
        renamed = inputs.replace(
            key_cache=inputs.key_cache[order],
            value_cache=inputs.value_cache[order],
            block_tables=tables,
        )
        got, _ = attend(renamed.on(backend), chunk_size=8)
        assert same_bits(got, want)


def repage(inputs: Inputs, block_size: int) -> Inputs:
    """The same sequences in poisoned pools with another block size."""
    case = inputs.case.replace(block_size=block_size)
    other = build(case)
    for pool_name in ("key_cache", "value_cache"):
        old, new = getattr(inputs, pool_name), getattr(other, pool_name)
        for seq, length in enumerate(case.seq_lens):
            t = torch.arange(length)
            rows = old[inputs.block_tables[seq].long()[t // old.shape[1]], t % old.shape[1]]
            new[other.block_tables[seq].long()[t // block_size], t % block_size] = rows
    return other.replace(query=inputs.query)


def test_repaging_changes_nothing(backend: Backend) -> None:
    case = Case("repaged", seq_lens=(1, 17, 50), head_dim=32, block_size=5, dtype=torch.float32)
    inputs = build(case)
    want, want_lse = attend(inputs.on(backend), chunk_size=16)
    for block_size in (1, 2, 7, 8, 16, 24, 32, 48, 64, 128, 256, 544):
        got, lse = attend(repage(inputs, block_size).on(backend), chunk_size=16)
        assert same_bits(got, want), block_size
        assert same_bits(lse, want_lse), block_size


def test_sharing_a_prefix_changes_nothing(backend: Backend) -> None:
    inputs = build(Case("shared_prefix", seq_lens=(20, 23), block_size=4))
    tables, pools = inputs.block_tables, (inputs.key_cache, inputs.value_cache)
    for pool in pools:  # both sequences start with the same 16 tokens, each in its own blocks
        pool[tables[1, :4].long()] = pool[tables[0, :4].long()]
    separate, _ = attend(inputs.on(backend), chunk_size=8)
    shared_tables = tables.clone()
    shared_tables[1, :4] = tables[0, :4]
    shared, _ = attend(inputs.replace(block_tables=shared_tables).on(backend), chunk_size=8)
    assert same_bits(shared, separate)


@pytest.mark.parametrize("sliding_window", [None, 4])
def test_many_tokens_equal_many_calls(backend: Backend, sliding_window: int | None) -> None:
    case = Case("drafts", seq_lens=(10, 33), query_lens=3, sliding_window=sliding_window)
    inputs = build(case.replace(alibi=True, sinks=True)).on(backend)
    together, lse = attend(inputs, chunk_size=8)
    for token in range(3):
        one = inputs.replace(query=inputs.query[:, token], seq_lens=inputs.seq_lens - 2 + token)
        alone, alone_lse = attend(one, chunk_size=8)
        # The tiles of a call begin where its first token's window does: close, not the same bits.
        torch.testing.assert_close(alone, together[:, token], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(alone_lse, lse[:, token], rtol=1e-5, atol=1e-5)


def test_ragged_equals_padded_batch(backend: Backend) -> None:
    inputs = build(Case("ragged_as_batch", seq_lens=(12, 33, 5), query_lens=2)).on(backend)
    batch, lse = attend(inputs, chunk_size=8)
    options = inputs.options | {
        "cu_query_lens": backend.place(torch.tensor([0, 2, 4, 6], dtype=torch.int32))
    }
    flat = inputs.replace(query=inputs.query.flatten(0, 1), options=options)
    ragged, ragged_lse = attend(flat, chunk_size=8)
    assert same_bits(ragged, batch.flatten(0, 1))
    assert same_bits(ragged_lse, lse.flatten(0, 1))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expanded_query(backend: Backend, dim: int) -> None:
    # One query for all sequences, for all tokens, or for all heads: a stride of 0 is a stride.
    inputs = build(Case("expanded", seq_lens=(5, 17, 33), query_lens=3))
    placed = inputs.on(backend)
    expanded = placed.query.narrow(dim, 0, 1).expand_as(placed.query)
    assert expanded.stride(dim) == 0
    out, lse = attend(placed.replace(query=expanded))
    dense = inputs.query.narrow(dim, 0, 1).expand_as(inputs.query)
    assert_accurate(out, inputs.replace(query=dense), lse)
