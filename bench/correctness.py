"""A representative set of calls, compared with paged_attn.reference on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from bytes import dtype_name
from report import Check
from timing import capture, synchronize
from torch import Tensor

import paged_attn
from paged_attn import reference

NAN_BYTE = 0x7F  # NaN in both fp8 formats, 127 in int8
DEAD_BLOCK = 2147480000  # a table entry that must not be followed
SPARE_BLOCKS = 2
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EIGHT_BIT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
LSE_UNIT = 2e-5
_K_SCALE, _V_SCALE = 0.029, 0.023  # of an 8-bit cache; no powers of two


@dataclass(frozen=True)
class CheckCase:
    """What a call looks like. `seq_lens` is also what the tables have room for."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: dtype
    num_q_heads: int = 16
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    seq_lens: tuple[int, ...] = (1, 17, 0, 1000, 4096)
    query_lens: int | tuple[int, ...] = 1  # tuple: ragged
    causal: bool = True
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    chunk_size: int | None = None

    def within(self, longest: int) -> CheckCase:
        """The same with no longer sequences than that."""
        return replace(self, seq_lens=tuple(min(length, longest) for length in self.seq_lens))


def cases() -> list[CheckCase]:
    """Every pair of dtypes, then every feature."""
    pairs = [(dtype, kv) for dtype in FLOAT_DTYPES for kv in (None, *EIGHT_BIT_DTYPES)]
    e4m3 = torch.float8_e4m3fn
    named = [
        CheckCase(f"{dtype_name(dtype)}, cache {dtype_name(kv or dtype)}", dtype, kv)
        for dtype, kv in pairs
    ]
    return [
        *named,
        CheckCase("block size 1", block_size=1),
        CheckCase("block size 1, int8", block_size=1, kv_dtype=torch.int8),
        CheckCase("block size 64", block_size=64),
        CheckCase("block size 64, e4m3", block_size=64, kv_dtype=e4m3),
        CheckCase("MHA", num_q_heads=4, num_kv_heads=4),
        CheckCase("MQA", num_q_heads=32, num_kv_heads=1),
        CheckCase("head_dim 64", head_dim=64),
        CheckCase("head_dim 80, e4m3", head_dim=80, kv_dtype=e4m3),
        CheckCase("head_dim 256", head_dim=256, seq_lens=(3, 700)),
        CheckCase("head_dim 512", head_dim=512, seq_lens=(3, 700)),
        CheckCase("query_len 2", query_lens=2),
        CheckCase("query_len 7, int8", query_lens=7, kv_dtype=torch.int8),
        CheckCase("query_len 40", query_lens=40, seq_lens=(40, 77, 600)),
        CheckCase("ragged", query_lens=(1, 5, 0, 3, 2)),
        CheckCase("not causal", query_lens=3, causal=False),
        CheckCase("window 100", sliding_window=100),
        CheckCase("window 1, query_len 4", sliding_window=1, query_lens=4),
        CheckCase("softcap 20", softcap=20.0),
        CheckCase("sinks", sinks=True),
        CheckCase("ALiBi", alibi=True),
        CheckCase("chunk_size 512", chunk_size=512),
        CheckCase(
            "all features, e4m3",
            kv_dtype=e4m3,
            query_lens=3,
            sliding_window=500,
            softcap=10.0,
            sinks=True,
            alibi=True,
            block_size=7,
        ),
    ]


def replay_cases() -> list[CheckCase]:
    """What is captured in a CUDA graph and replayed with other lengths."""
    return [
        CheckCase("replay"),
        CheckCase("replay, int8, block size 1", kv_dtype=torch.int8, block_size=1),
        CheckCase("replay, float32", dtype=torch.float32),
        CheckCase("replay, chunk_size 512", chunk_size=512),
        CheckCase("replay, window, query_len 3", sliding_window=300, query_lens=3),
    ]


def _pool(case: CheckCase, alive: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """A pool whose slots are random numbers where alive, else NaN."""
    dtype = case.kv_dtype or case.dtype
    shape = (alive.numel(), case.num_kv_heads, case.head_dim)
    rows = torch.randn(shape, generator=generator)
    if dtype.itemsize == 1:
        rows = rows / scale
        rows = rows.round().clamp(-127, 127) if dtype == torch.int8 else rows.clamp(-448, 448)
        pool = rows.to(dtype)
        pool.view(torch.uint8)[~alive] = NAN_BYTE
    else:
        pool = rows.to(dtype)
        pool[~alive] = torch.nan
    return pool.view(-1, case.block_size, case.num_kv_heads, case.head_dim)


def make_inputs(case: CheckCase, seq_lens: tuple[int, ...], seed: int) -> dict[str, Any]:
    """The arguments of a call with these lengths; shapes are those of the case's own lengths."""
    generator = torch.Generator().manual_seed(seed)
    room = [-(-length // case.block_size) for length in case.seq_lens]
    num_blocks = sum(room) + SPARE_BLOCKS
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.full((len(room), max(room) + 1), DEAD_BLOCK, dtype=torch.int32)
    alive = torch.zeros(num_blocks * case.block_size, dtype=torch.bool)
    first = 0
    for seq, (count, length) in enumerate(zip(room, seq_lens, strict=True)):
        used = -(-length // case.block_size)
        tables[seq, :used] = order[first : first + used]
        token = torch.arange(length)
        block = tables[seq].long()[token // case.block_size]
        alive[block * case.block_size + token % case.block_size] = True
        first += count
    batch = len(seq_lens)
    lead: tuple[int, ...] = (batch,) if case.query_lens == 1 else (batch, -1)
    options: dict[str, Any] = {}
    if isinstance(case.query_lens, tuple):
        lead = (sum(case.query_lens),)
        ends = torch.tensor((0, *case.query_lens)).cumsum(0)
        options["cu_query_lens"] = ends.to(torch.int32)
    elif case.query_lens > 1:
        lead = (batch, case.query_lens)
    if case.dtype != (case.kv_dtype or case.dtype):
        options |= {"k_scale": _K_SCALE, "v_scale": _V_SCALE}
    if case.sinks:
        options["sinks"] = torch.randn(case.num_q_heads, generator=generator)
    if case.alibi:
        options["alibi_slopes"] = paged_attn.alibi_slopes(case.num_q_heads)
    query = torch.randn(*lead, case.num_q_heads, case.head_dim, generator=generator)
    return options | {
        "query": query.to(case.dtype),
        "key_cache": _pool(case, alive, _K_SCALE, generator),
        "value_cache": _pool(case, alive, _V_SCALE, generator),
        "block_tables": tables,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "causal": case.causal,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
    }


def _on(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def attend(case: CheckCase, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The call, with its plan and its LSE."""
    query, cu_query_lens = inputs["query"], inputs.get("cu_query_lens")
    plan = paged_attn.plan_decode(
        inputs["seq_lens"],
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        query_len=query.shape[1] if query.dim() == 4 else 1,
        cu_query_lens=cu_query_lens,
        num_query_tokens=None if cu_query_lens is None else query.shape[0],
        causal=case.causal,
        sliding_window=case.sliding_window,
        chunk_size=case.chunk_size,
        kv_dtype=inputs["key_cache"].dtype,
    )
    result = paged_attn.paged_attention(**inputs, plan=plan, return_lse=True)
    assert isinstance(result, tuple)
    return result


def compare(name: str, result: tuple[Tensor, Tensor], inputs: dict[str, Any]) -> Check:
    """Holds a result to the reference, row by row: an error counts against its row's largest."""
    want, want_lse = reference.paged_attention(**inputs, return_lse=True)
    out, lse = result[0].cpu().double(), result[1].cpu().double()
    row_largest = want.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = float(((out - want).abs() / row_largest).max())
    allowed = 2 * max(torch.finfo(inputs["query"].dtype).eps, 4e-6)
    finite = torch.isfinite(want_lse)
    lse_error = float((lse - want_lse)[finite].abs().max())
    lse_allowed = LSE_UNIT * max(1.0, float(want_lse[finite].abs().max()))
    problem = None
    if not torch.isfinite(out).all():
        problem = "not finite"
    elif not torch.equal(lse[~finite], want_lse[~finite]):
        problem = "LSE of rows that see no key"
    elif error > allowed or lse_error > lse_allowed:
        problem = "inexact"
    return Check(name, error, allowed, lse_error, lse_allowed, problem)


def _failed(name: str, error: Exception) -> Check:
    return Check(name, None, 0.0, None, 0.0, f"{type(error).__name__}: {error}")


def check_call(case: CheckCase, device: torch.device) -> Check:
    """One call."""
    try:
        inputs = make_inputs(case, case.seq_lens, seed=1)
        return compare(case.name, attend(case, _on(inputs, device)), inputs)
    except Exception as error:  # a report says what failed and goes on
        return _failed(case.name, error)


def check_replays(case: CheckCase, device: torch.device) -> Iterator[Check]:
    """Captures a step, its plan included, at lengths of 1; replays it with others."""
    query_len = case.query_lens if isinstance(case.query_lens, int) else 1
    shortest = tuple(min(length, query_len) for length in case.seq_lens)
    between = tuple(length // 2 for length in case.seq_lens)
    try:
        static = _on(make_inputs(case, shortest, seed=2), device)
        results: list[tuple[Tensor, Tensor]] = []
        replay = capture([lambda: results.append(attend(case, static))], device)
        for seed, seq_lens in enumerate((case.seq_lens, shortest, between, case.seq_lens), 3):
            name = f"{case.name}, longest {max(seq_lens)}"
            inputs = make_inputs(case, seq_lens, seed)
            for key, value in inputs.items():
                if isinstance(value, Tensor):
                    static[key].copy_(value)
            replay()
            synchronize(device)
            yield compare(name, results[-1], inputs)
    except Exception as error:  # a report says what failed and goes on
        yield _failed(case.name, error)
