"""What only a GPU can show: CUDA graphs, streams, several devices, host memory that changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import DEAD_BLOCK, Case, Inputs, attend, build, make_plan, poison, store_rows
from cuda_support import behind_a_producer, capture, cuda
from support import same_bits
from torch import Tensor
from wrong_calls import OPS, good, place

import paged_attn
from paged_attn import copy_blocks, gather_cache, reshape_and_cache, swap_blocks

pytestmark = pytest.mark.backends("cuda")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LENS = (4096, 48, 1600)  # the first fills its table
NAMES = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")

DECODE = Case("decode", LENS, num_q_heads=8, head_dim=128, dtype=torch.bfloat16)
CASES = (
    DECODE,
    DECODE.replace(name="float32", dtype=torch.float32),
    DECODE.replace(name="e4m3", kv_dtype=torch.float8_e4m3fn, scale_kind="head"),
    DECODE.replace(name="int8_block_size_1", kv_dtype=torch.int8, scale_kind="float", block_size=1),
    DECODE.replace(name="per_token", kv_dtype=torch.int8, scale_kind="token"),
    DECODE.replace(name="window", sliding_window=700, query_lens=3),
    DECODE.replace(name="chunked", chunk_size=256),
    DECODE.replace(name="int64_indices", index_dtype=torch.int64, table_layout="transposed"),
    DECODE.replace(name="widest_head", head_dim=512, dtype=torch.float16),
    DECODE.replace(name="ragged", query_lens=(2, 0, 5), padding=2, sinks=True, softcap=5.0),
)
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def make(case: Case, seed: int = 0) -> Inputs:
    """The tensors of a case, its table no wider than the longest sequence needs."""
    inputs = build(case, seed)
    width = -(-max(case.seq_lens) // case.block_size)
    return inputs.replace(block_tables=inputs.block_tables[:, :width])


def shortened(inputs: Inputs, lens: Sequence[int]) -> Inputs:
    """The same call with shorter sequences; what they lost is NaN, or an entry out of range."""
    block_size = inputs.key_cache.shape[1]
    tables = inputs.block_tables.clone()
    slots = []
    for table, length in zip(tables, lens, strict=True):
        token = torch.arange(length)
        slots.append(table[token // block_size] * block_size + token % block_size)
        table[-(-length // block_size) :] = DEAD_BLOCK
    alive = torch.cat(slots).long()
    changes: dict[str, Any] = {"block_tables": tables}
    for name in ("key_cache", "value_cache"):
        pool = getattr(inputs, name)
        bits = pool.view(torch.uint8) if pool.element_size() == 1 else pool
        rows = bits[alive // block_size, alive % block_size].view(pool.dtype)
        changes[name] = poison(torch.empty_like(pool))
        store_rows(changes[name], alive, rows)
    return inputs.replace(seq_lens=torch.tensor(lens, dtype=inputs.seq_lens.dtype), **changes)


def load(static: Inputs, source: Inputs) -> None:
    """Copies all tensors into those that a graph knows."""
    for name in NAMES:
        getattr(static, name).copy_(getattr(source, name), non_blocking=True)
    for name, value in static.options.items():
        if isinstance(value, Tensor):
            value.copy_(source.options[name], non_blocking=True)


def attend_planned(inputs: Inputs, plan: paged_attn.DecodePlan) -> tuple[Tensor, Tensor]:
    arguments = [getattr(inputs, name) for name in NAMES]
    result = paged_attn.paged_attention(*arguments, **inputs.options, plan=plan, return_lse=True)
    assert isinstance(result, tuple)
    return result


@cases
@pytest.mark.parametrize("first", ["shortest", "longest"])
def test_replay_with_other_lengths(backend: Backend, case: Case, first: str) -> None:
    # Nothing of the launch may depend on the lengths or tables that were there at capture.
    longest, other = make(case), make(case, seed=1)
    shortest, mixed = shortened(longest, (1, 1, 1)), shortened(other, (1000, 0, 33))
    order = (shortest, longest) if first == "shortest" else (longest, shortest)
    static = order[0].on(backend)
    captured = capture(lambda: attend(static))
    for inputs in (*order, mixed, other, shortest):
        load(static, inputs)
        out, lse = captured.run()
        assert_accurate(out, inputs, lse)


@cases
def test_plan_in_the_graph(backend: Backend, case: Case) -> None:
    # Two layers share a plan that is made anew at each replay.
    def layers(inputs: Inputs) -> list[Inputs]:
        options = inputs.options
        scales = {"k_scale": options["v_scale"], "v_scale": options["k_scale"]}
        swapped = {"key_cache": inputs.value_cache, "value_cache": inputs.key_cache}
        return [inputs, inputs.replace(options=options | scales, **swapped)]

    shortest, longest = shortened(make(case), (1, 1, 1)), make(case, seed=1)
    static = shortest.on(backend)

    def step() -> list[Tensor]:
        plan = make_plan(static)
        return [tensor for layer in layers(static) for tensor in attend_planned(layer, plan)]

    captured = capture(step)
    for inputs in (longest, shortest, shortened(longest, (4095, 17, 800))):
        load(static, inputs)
        results = [result.clone() for result in captured.run()]
        for layer, out, lse in zip(layers(inputs), results[::2], results[1::2], strict=True):
            assert_accurate(out, layer, lse)
        assert all(map(same_bits, results, captured.run()))


@pytest.mark.parametrize("planned", [False, True])
def test_a_replay_stays_within_the_captured_width(backend: Backend, planned: bool) -> None:
    # The table that was captured has 16 columns of a wider one, whose others name no block.
    case = DECODE.replace(seq_lens=(256, 256, 100))
    inputs = make(case)
    wide = torch.full((3, 40), DEAD_BLOCK, dtype=torch.int32)
    wide[:, :16] = inputs.block_tables
    static = inputs.replace(block_tables=wide[:, :16]).on(backend)
    assert static.block_tables.stride(0) == 40
    captured = capture(
        lambda: attend_planned(static, make_plan(static)) if planned else attend(static)
    )
    for lens in ((257, 256, 100), (640, 10_000, 100)):
        static.seq_lens.copy_(torch.tensor(lens))
        out, lse = captured.run()
        assert_accurate(out, inputs, lse)


@pytest.mark.parametrize("name", ["decode", "chunked", "float32"])
def test_memory_between_capture_and_replay(backend: Backend, name: str) -> None:
    # A graph's workspace is its own: what others allocate, fill and free in between is not it.
    case = next(case for case in CASES if case.name == name)
    longest = make(case)
    shortest = shortened(longest, (1, 1, 1))
    static = longest.on(backend)
    captured = capture(lambda: attend(static))
    watched = [*(getattr(static, name) for name in NAMES), *captured.results]
    addresses = [tensor.data_ptr() for tensor in watched]
    held = []
    for inputs in (longest, shortest, longest):
        cuda.empty_cache()
        for size in (1 << 8, 1 << 14, 1 << 20, 1 << 24):
            held.append(torch.full((size,), torch.nan, device=static.query.device))
            torch.full((3 * size,), torch.nan, device=static.query.device)
        load(static, inputs)
        out, lse = captured.run()
        assert_accurate(out, inputs, lse)
        assert all(bool(tensor.isnan().all()) for tensor in held), "a replay wrote to others"
    assert [tensor.data_ptr() for tensor in watched] == addresses


def test_replays_back_to_back(backend: Backend) -> None:
    # As an engine runs: new tensors, replay, next, and nobody waits.
    versions = [make(DECODE, seed) for seed in range(4)]
    versions += [shortened(inputs, (1 + seed, 40, 1599)) for seed, inputs in enumerate(versions)]
    placed = [inputs.on(backend) for inputs in versions]
    static = versions[0].on(backend)
    captured = capture(lambda: attend(static))
    results = [[torch.empty_like(result) for result in captured.results] for _ in placed]
    with behind_a_producer(cuda.current_stream()):
        for inputs, copies in zip(placed, results, strict=True):
            load(static, inputs)
            captured.graph.replay()
            for copy, result in zip(copies, captured.results, strict=True):
                copy.copy_(result)
    for inputs, (out, lse) in zip(versions, results, strict=True):
        assert_accurate(out, inputs, lse)


def test_a_plan_serves_several_layers(backend: Backend) -> None:
    # Also again and in another order: a call leaves the plan as it found it.
    layers = [make(DECODE, seed) for seed in range(3)]
    placed = [layer.on(backend) for layer in layers]
    plan = make_plan(placed[0])
    first = [attend_planned(layer, plan) for layer in placed]
    again = [attend_planned(layer, plan) for layer in reversed(placed)][::-1]
    for layer, results, repeated in zip(layers, first, again, strict=True):
        assert_accurate(results[0], layer, results[1])
        assert all(map(same_bits, results, repeated))


def test_two_streams_with_a_plan_each(backend: Backend) -> None:
    placed = [make(DECODE, seed).on(backend) for seed in range(2)]
    alone = [attend_planned(inputs, make_plan(inputs)) for inputs in placed]
    streams = [cuda.Stream() for _ in placed]
    cuda.synchronize()
    results: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for _ in range(20):
        for inputs, stream, mine in zip(placed, streams, results, strict=True):
            with cuda.stream(stream):
                mine.append(attend_planned(inputs, make_plan(inputs)))
    cuda.synchronize()
    for want, mine in zip(alone, results, strict=True):
        assert all(all(map(same_bits, want, got)) for got in mine)


@cases
@pytest.mark.parametrize("side", [False, True])
def test_attention_behind_a_long_producer(backend: Backend, case: Case, side: bool) -> None:
    inputs = make(case)
    source, static = inputs.on(backend), inputs.on(backend)
    stream = cuda.Stream() if side else cuda.current_stream()
    with behind_a_producer(stream, may_wait=True):  # loads kernels, allocates
        attend(source)
        load(static, source)
    static.seq_lens.zero_()
    for tensor in (static.query, static.key_cache, static.value_cache):
        poison(tensor)
    with behind_a_producer(stream):
        load(static, source)
        out, lse = attend(static)
    assert_accurate(out, inputs, lse)


def test_cache_ops_behind_a_long_producer(backend: Backend) -> None:
    key, value = torch.randn(2, 5, 2, 64)
    slots = torch.tensor([31, 8, 9, -1, 0])
    keys, values = backend.place_pair(torch.zeros(2, 12, 4, 2, 64).unbind())
    source = [backend.place(tensor) for tensor in (key, value, slots)]
    late_key, late_value = (torch.full_like(source[0], torch.nan) for _ in range(2))
    late_slots = torch.full_like(source[2], -1)
    tables = backend.place(torch.tensor([[2, 7], [11, 3]], dtype=torch.int32))
    lens = backend.place(torch.tensor([8, 3], dtype=torch.int32))
    stream = cuda.Stream()
    with behind_a_producer(stream, may_wait=True):  # loads kernels, allocates
        reshape_and_cache(late_key, late_value, keys, values, late_slots)
        copy_blocks(keys, values, [(0, 1)])
        gather_cache(keys, values, tables, lens, total_tokens=11)
    with behind_a_producer(stream):
        for there, here in zip((late_key, late_value, late_slots), source, strict=True):
            there.copy_(here)
        reshape_and_cache(late_key, late_value, keys, values, late_slots)
        copy_blocks(keys, values, [(2, 11), (7, 4)])
        gathered = gather_cache(keys, values, tables, lens, total_tokens=11)
    for tokens, pool, got in zip((key, value), (keys, values), gathered, strict=True):
        want = torch.zeros(12, 4, 2, 64)
        for token in (0, 1, 2, 4):
            want.view(48, 2, 64)[slots[token]] = tokens[token]
        want[11], want[4] = want[2], want[7]
        assert torch.equal(pool.cpu(), want)
        assert torch.equal(got.cpu(), torch.cat([want[2], want[7], want[11, :3]]))


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_with_a_mapping_that_changes(backend: Backend, pinned: bool) -> None:
    # The mapping is overwritten as soon as a call returns, long before its copy runs.
    num_blocks, generator = 64, torch.Generator().manual_seed(0)
    want = torch.randn(2, num_blocks, 4, 2, 16, generator=generator)
    pools = backend.place_pair(want.unbind())
    mapping = torch.zeros(8, 2, dtype=torch.int64)
    mapping = mapping.pin_memory() if pinned else mapping
    for may_wait in (True, False):  # the first time allocates what the second needs
        with behind_a_producer(cuda.current_stream(), may_wait):
            for _ in range(50):
                order = torch.randperm(num_blocks, generator=generator)[:16].view(8, 2)
                mapping.copy_(order)
                copy_blocks(pools[0], pools[1], mapping)
                want[:, order[:, 1]] = want[:, order[:, 0]]
            mapping.fill_(1)
    assert torch.equal(torch.stack(pools).cpu(), want)


@pytest.mark.parametrize("side", [False, True])
def test_swaps_behind_a_long_producer(backend: Backend, side: bool) -> None:
    # Out, the blocks used for something else at once, and in again.
    data = torch.randn(6, 4, 2, 16)
    source = backend.place(data)
    pool = torch.full_like(source, torch.nan)
    host = torch.zeros(4, 4, 2, 16).pin_memory()
    with behind_a_producer(cuda.Stream() if side else cuda.current_stream()):
        pool.copy_(source)
        swap_blocks(pool, host, [(5, 0), (2, 3)])
        pool.zero_()
        swap_blocks(host, pool, [(3, 1), (0, 4)])
    assert torch.equal(host[[0, 3]], data[[5, 2]])
    assert not host[[1, 2]].any()
    assert torch.equal(pool.cpu()[[1, 4]], data[[2, 5]])
    assert not pool.cpu()[[0, 2, 3, 5]].any()


# Arguments that must be on the device of the others.
MIXED = [
    (op, name)
    for op in OPS
    for name, value in good(op).items()
    if name not in {"block_mapping", "src", "dst"} and not isinstance(value, int)
]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda:1", marks=two_gpus)])
@pytest.mark.parametrize(("op", "name"), MIXED)
def test_tensors_of_several_devices(backend: Backend, op: str, name: str, where: str) -> None:
    args = place(backend, good(op))
    if "block_mapping" in args:
        args["block_mapping"] = args["block_mapping"].cpu()
    moved = args[name]
    args[name] = [moved[0], moved[1].to(where)] if isinstance(moved, list) else moved.to(where)
    with pytest.raises(RuntimeError, match=rf"^{op}: \w+ must be (on the same device as|a CUDA)"):
        OPS[op](**args)


@two_gpus
@cases
def test_on_another_device_than_the_current(backend: Backend, case: Case) -> None:
    second = dataclasses.replace(backend, place_storage=lambda tensor: tensor.to("cuda:1"))
    inputs = make(case)
    with cuda.device(0):
        placed = inputs.on(second)
        for out, lse in (attend(placed), attend_planned(placed, make_plan(placed))):
            assert out.device == lse.device == torch.device("cuda:1")
            cuda.synchronize(1)
            assert_accurate(out, inputs, lse)
        assert cuda.current_device() == 0


@two_gpus
def test_cache_ops_on_another_device_than_the_current(backend: Backend) -> None:
    with cuda.device(0):
        rows = torch.arange(4 * 8.0).view(4, 1, 8)
        key, slots = rows.to("cuda:1"), torch.tensor([5, 0, 2, 7], device="cuda:1")
        pools = [torch.zeros(4, 2, 1, 8, device="cuda:1") for _ in range(2)]
        reshape_and_cache(key, key, pools[0], pools[1], slots)
        copy_blocks(pools[0], pools[1], [(3, 1), (2, 0)])
        here = torch.zeros(4, 2, 1, 8, device="cuda:0")
        swap_blocks(pools[0], here, [(1, 2)])
        cuda.synchronize(0)
        cuda.synchronize(1)
        want = torch.zeros(8, 1, 8)
        want[slots.cpu()] = rows
        want = want.view(4, 2, 1, 8)
        want[1], want[0] = want[3], want[2]
        assert all(torch.equal(pool.cpu(), want) for pool in pools)
        assert torch.equal(here[2].cpu(), want[1])
        assert cuda.current_device() == 0
