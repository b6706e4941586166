"""Head dimensions, block sizes, group sizes and lengths that kernels are tempted to assume."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import Case, attend, build
from support import attend_one

import paged_attn

HEAD_DIMS = (8, 16, 32, 40, 64, 80, 96, 112, 120, 128, 160, 192, 248, 256, 512)
BLOCK_SIZES = (1, 2, 7, 8, 16, 24, 32, 48, 64, 128, 256, 544)
GROUPS = (1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 64)


def check(backend: Backend, case: Case) -> None:
    inputs = build(case)
    out, lse = attend(inputs.on(backend))
    assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["fp16", "fp32", "bf16_int8", "fp16_e4m3"])
def test_head_dim(backend: Backend, head_dim: int, kind: str) -> None:
    case = Case(f"head_dim_{head_dim}", head_dim=head_dim, seq_lens=(1, 18), query_lens=2)
    if kind == "fp32":
        case = case.replace(dtype=torch.float32)
    elif kind == "bf16_int8":
        case = case.replace(dtype=torch.bfloat16, kv_dtype=torch.int8, scale_kind="float")
    elif kind == "fp16_e4m3":
        case = case.replace(kv_dtype=torch.float8_e4m3fn, scale_kind="token", chunk_size=8)
    check(backend, case)


@pytest.mark.backends("cpu", "cuda")
def test_every_head_dim(backend: Backend) -> None:
    for head_dim in (*range(8, 257, 8), 512):
        check(backend, Case("every_head_dim", head_dim=head_dim, seq_lens=(9,)))


@pytest.mark.parametrize("head_dim", [1, 7, 12, 129, 264, 504, 520, 1024])
def test_unsupported_head_dim_is_refused(backend: Backend, head_dim: int) -> None:
    inputs = build(Case("head_dim_refused", head_dim=head_dim, seq_lens=(3,))).on(backend)
    with pytest.raises(RuntimeError, match=rf"query must .*multiple of 8.*512, got {head_dim}$"):
        attend(inputs)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "last_dim"])
def test_block_size(backend: Backend, block_size: int, layout: str) -> None:
    lengths = tuple(
        sorted({1, 19, *(block_size + step for step in (-1, 0, 1) if 0 < block_size + step < 70)})
    )
    case = Case(f"block_size_{block_size}", seq_lens=lengths, block_size=block_size, layout=layout)
    check(backend, case.replace(head_dim=32))


@pytest.mark.parametrize("group", GROUPS)
def test_group_heads_read_their_own_kv_head(backend: Backend, group: int) -> None:
    # V of KV head h is h: a tile of heads that runs over its group's end shows it.
    num_kv_heads = 3
    case = Case(
        "groups", num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, seq_lens=(5, 18)
    )
    inputs = build(case)
    inputs.query.zero_()
    inputs.value_cache.copy_(torch.arange(3.0)[:, None].expand_as(inputs.value_cache))
    for chunk_size in (None, 8):
        out, _ = attend(inputs.on(backend), chunk_size=chunk_size)
        want = torch.arange(group * num_kv_heads) // group
        assert torch.equal(out[:, :, 0].cpu(), want.half().expand(2, -1))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("query_lens", [None, 3])
def test_group_size(backend: Backend, group: int, query_lens: int | None) -> None:
    check(
        backend,
        Case(
            f"group_{group}",
            num_q_heads=2 * group,
            num_kv_heads=2,
            seq_lens=(4, 18),
            query_lens=query_lens,
            head_dim=16,
        ),
    )


def test_a_sequence_longer_than_shared_memory_holds(backend: Backend) -> None:
    # 58,113 fp32 logits are more than any GPU's shared memory.
    length = 58113
    values = [float(t % 16 == 3) for t in range(length)]
    out, _ = attend_one(backend, values, block_size=16, dtype=torch.float16)
    assert out == pytest.approx([sum(values) / length], rel=1e-2)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_lens": ()},
        {"query_lens": 0},
        {"query_lens": (0, 0, 0)},
        {"seq_lens": (), "query_lens": ()},
        {"seq_lens": (), "query_lens": (), "padding": 2},
        {"seq_lens": (0, 0, 0)},
    ],
    ids=["no_sequence", "no_query_token", "none_ragged", "nothing", "only_padding", "no_key"],
)
def test_empty_inputs(backend: Backend, changes: dict[str, object]) -> None:
    inputs = build(Case("empty").replace(**changes))
    for chunk_size in (None, 4) if changes.get("query_lens") != 0 else (None,):
        out, lse = attend(inputs.on(backend), chunk_size=chunk_size)
        assert_accurate(out, inputs, lse)
        assert bool((out == 0).all())


def test_a_table_without_columns(backend: Backend) -> None:
    inputs = build(Case("no_columns", seq_lens=(0, 0)))
    tables = torch.empty((2, 0), dtype=torch.int32)
    out, lse = attend(inputs.replace(block_tables=tables).on(backend))
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


def test_heads_that_do_not_divide(backend: Backend) -> None:
    for num_q_heads, num_kv_heads in ((3, 2), (33, 2), (1, 2)):
        inputs = build(Case("indivisible", num_kv_heads=num_kv_heads, num_q_heads=num_q_heads))
        with pytest.raises(
            RuntimeError, match=rf"query must have a multiple of.*{num_kv_heads} KV"
        ):
            attend(inputs.on(backend))
        with pytest.raises(ValueError, match="num_q_heads must be a multiple of num_kv_heads"):
            paged_attn.plan_decode(
                inputs.seq_lens,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=64,
            )
