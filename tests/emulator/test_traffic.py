"""What the decode kernel moves: K and V once, in whole sectors, and little else."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from cases import Case, Inputs, attend, build

import emulator
from emulator import Launch, Line, Totals
from emulator.checks import names_of


def kv_bytes(case: Case) -> int:
    """Bytes of all K and V rows of the sequences."""
    row = case.head_dim * case.pool_dtype.itemsize
    return 2 * sum(case.seq_lens) * case.num_kv_heads * row


def decode_launch(counters: emulator.Counters) -> Launch:
    """The launch of the decode kernel; the plan's is before it."""
    *_, launch = counters.launches
    assert any(name.startswith("mma") for name in launch.instructions)
    return launch


def pools_read(launch: Launch, inputs: Inputs) -> Totals:
    """What was read of the pools."""
    names = names_of(inputs.key_cache, inputs.value_cache)
    assert not any(line.write and line.buffer in names for line in launch.lines)
    return launch.select(lambda line: line.buffer in names)


ROWS = [
    *((group, 1) for group in range(1, 17)),
    *((group, 8) for group in range(1, 17, 3)),
    *((4, query_len) for query_len in range(2, 8)),
    (16, 8),
]


@pytest.mark.parametrize(("group", "query_len"), ROWS)
def test_rows_read_k_and_v_once(
    hooks: Backend, group: int, query_len: int, counters: emulator.Counters
) -> None:
    case = Case(
        "rows",
        seq_lens=(41, 300, 8),
        query_lens=query_len,
        num_q_heads=2 * group,
        kv_dtype=torch.float8_e4m3fn if group % 2 else torch.float16,
    )
    inputs = build(case).on(hooks)
    attend(inputs)
    read = pools_read(decode_launch(counters), inputs)
    assert read.bytes == kv_bytes(case)
    assert read.transactions == read.ideal == read.bytes // 32


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_block_sizes_read_k_and_v_once(
    hooks: Backend, block_size: int, head_dim: int, counters: emulator.Counters
) -> None:
    case = Case("blocks", seq_lens=(41, 300), block_size=block_size, head_dim=head_dim)
    inputs = build(case).on(hooks)
    attend(inputs)
    read = pools_read(decode_launch(counters), inputs)
    assert read.bytes == kv_bytes(case)
    assert read.transactions == read.ideal == read.bytes // 32


def _of_tiles(line: Line) -> bool:
    return line.shared and any(
        name in place for place in line.place for name in ("token_ring.cuh", "fragments.cuh")
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
def test_shared_memory_has_no_bank_conflicts(
    hooks: Backend, head_dim: int, kv_dtype: torch.dtype, counters: emulator.Counters
) -> None:
    scale_kind = "none" if kv_dtype == torch.float16 else "float"
    for query_len in (1, 5):  # private rings, a shared one
        case = Case(
            "tiles",
            seq_lens=(200, 512),
            query_lens=query_len,
            num_q_heads=8,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
            scale_kind=scale_kind,
        )
        attend(build(case).on(hooks))
        tiles = decode_launch(counters).select(_of_tiles)
        assert tiles.bytes >= 2 * kv_bytes(case)  # written, and read at least once
        assert tiles.transactions == tiles.ideal


@pytest.mark.parametrize(
    ("seq_lens", "limit"), [((4096, 4096, 5000), 0.02), ((1024,) * 16, 0.06)], ids=["4k", "1k"]
)
def test_partial_results_and_tables_are_little(
    hooks: Backend, seq_lens: tuple[int, ...], limit: float, counters: emulator.Counters
) -> None:
    case = Case("others", seq_lens=seq_lens, num_q_heads=8, num_kv_heads=1, head_dim=128)
    emulator.configure(sms=1, hooks=True)
    inputs = build(case).on(hooks)
    out = hooks.place(torch.zeros(inputs.query.shape, dtype=inputs.query.dtype))
    attend(inputs, out=out)
    launch = decode_launch(counters)
    read = pools_read(launch, inputs)
    assert read.bytes == kv_bytes(case)
    known = names_of(inputs.key_cache, inputs.value_cache, inputs.query, out)
    rest = launch.select(lambda line: not line.shared and line.buffer not in known)
    assert rest.transactions > 0
    assert 32 * rest.transactions <= limit * read.bytes
