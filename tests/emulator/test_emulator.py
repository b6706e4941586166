"""The emulator itself: what it computes, what it catches, and that clean kernels raise no alarm."""

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import emulator
from emulator.build import selftest_target
from emulator.harness import Selftest, assert_message, line_of

SEEDS = (0, 1, 12345)


# ---- Clean kernels ----


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("each_schedule")
def test_reduction_of_a_cta(selftest: Selftest, seed: int) -> None:
    selftest.runtime.configure(seed=seed)
    sums = selftest.zeros(17)
    assert selftest.error("block_reduction", sums, ctas=17, threads=128, smem=512) is None
    assert sums.tolist() == [8128.0 + 128 * cta for cta in range(17)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("each_schedule")
def test_shuffles(selftest: Selftest, seed: int) -> None:
    selftest.runtime.configure(seed=seed)
    data = selftest.zeros(96, 4, dtype=torch.int32)
    assert selftest.error("shuffles", data, threads=96) is None
    for thread, (neighbour, following, reverse, in_half) in enumerate(data.tolist()):
        warp, lane = thread // 32 * 32, thread % 32
        assert neighbour == warp + (lane ^ 5)
        assert following == warp + (lane + 1) % 32
        assert reverse == warp + 31 - lane
        assert in_half == warp + (3 if lane < 16 else 19)


@pytest.mark.usefixtures("each_schedule")
def test_votes(selftest: Selftest) -> None:
    data = selftest.zeros(64, 4, dtype=torch.int32)
    assert selftest.error("votes", data) is None
    odd = ctypes.c_int32(0xAAAAAAAA).value
    assert data[:32].tolist() == [[odd, 0, 1, 0]] * 32
    assert data[32:].tolist() == [[odd, 1, 0, 0]] * 32


def test_indices_of_three_dimensions(selftest: Selftest) -> None:
    grid, block = (3, 2, 4), (5, 4, 3)
    data = selftest.zeros(24, 60, dtype=torch.int32)
    run = selftest.runtime.library.selftest_run_3d
    run.restype = ctypes.c_char_p
    triple = ctypes.c_uint * 3
    assert run(ctypes.c_void_p(data.data_ptr()), triple(*grid), triple(*block)) is None
    expected = [thread * 32 + thread % 32 for thread in range(60)]
    assert data.tolist() == [expected] * 24


def test_vector_copy(selftest: Selftest) -> None:
    data = selftest.runtime.place(torch.cat([torch.rand(400), torch.zeros(400)]))
    assert selftest.error("copy_vectors", data) is None
    assert torch.equal(data[:400], data[400:])


# ---- Schedules ----


def recorded(
    selftest: Selftest, option: int, count: int, *, ctas: int = 1, threads: int
) -> list[int]:
    data = selftest.zeros(count + 1, dtype=torch.int32)
    assert selftest.error("record_order", data, option=option, ctas=ctas, threads=threads) is None
    assert data[0] == count
    return [int(index) for index in data[1:]]


def test_ctas_run_in_a_seeded_random_order(selftest: Selftest) -> None:
    orders = set()
    for seed in range(8):
        selftest.runtime.configure(seed=seed)
        order = recorded(selftest, 0, 100, ctas=100, threads=1)
        assert sorted(order) == list(range(100))
        assert order == recorded(selftest, 0, 100, ctas=100, threads=1)
        orders.add(tuple(order))
    assert len(orders) == 8
    assert tuple(range(100)) not in orders


def test_order_of_threads(selftest: Selftest) -> None:
    forward = list(range(64))
    backward = forward[::-1]
    for schedule in emulator.SCHEDULES:
        orders = set()
        for seed in range(4):
            selftest.runtime.configure(seed=seed, schedule=schedule)
            order = recorded(selftest, 1, 128, threads=64)
            before, after = order[:64], order[64:]
            assert sorted(before) == sorted(after) == forward
            # Who arrives last at the barrier goes on first: a fiber runs until it blocks.
            assert after[0] == before[-1]
            if schedule == "in_order":
                assert (before, after[1:]) == (forward, forward[:-1])
            if schedule == "reverse":
                assert (before, after[1:]) == (backward, backward[:-1])
            if schedule in ("random", "priorities"):
                assert before not in (forward, backward)
            orders.add(tuple(order))
        assert len(orders) == (4 if schedule in ("random", "priorities") else 1)


def test_missing_barrier_shows(selftest: Selftest) -> None:
    wrong = set()
    for schedule in emulator.SCHEDULES:
        selftest.runtime.configure(schedule=schedule)
        sums = selftest.zeros(1)
        assert selftest.error("block_reduction", sums, option=1, threads=128, smem=512) is None
        if sums.item() != 8128.0:
            wrong.add(schedule)
    assert {"in_order", "random", "priorities"} <= wrong


# ---- Barriers and collectives that do not meet ----


@pytest.mark.usefixtures("each_schedule")
def test_barrier_after_exit(selftest: Selftest) -> None:
    assert_message(
        selftest.error("barrier_after_exit"),
        "divergent barrier in CTA (0, 0, 0): 16 of 64 threads have exited",
        f"warp 0: lanes 0-31 wait at the CTA barrier in tests/emulator/kernels/"
        f"{line_of('barrier_after_exit')}",
        "warp 1: lanes 0-15 wait at the CTA barrier",
        "warp 1: lanes 16-31 have exited",
    )
    assert selftest.error("barrier_after_exit", option=1) is None


@pytest.mark.usefixtures("each_schedule")
def test_barriers_at_two_places(selftest: Selftest) -> None:
    assert_message(
        selftest.error("barriers_at_two_places", threads=4),
        "divergent barrier",
        f"warp 0: lanes 1, 3 wait at the CTA barrier in tests/emulator/kernels/"
        f"{line_of('second of two barriers')}",
        line_of("first of two barriers"),
    )
    assert selftest.error("barriers_at_two_places", option=2) is None


@pytest.mark.usefixtures("each_schedule")
def test_missing_lane(selftest: Selftest) -> None:
    assert_message(
        selftest.error("missing_lane", threads=32),
        "divergent barrier",
        "warp 0: lanes 0-6, 8-31 wait in shuffle_xor of mask 0xffffffff",
        line_of("missing_lane shuffle"),
        "warp 0: lanes 7 wait at the CTA barrier",
        line_of("missing_lane barrier"),
    )


@pytest.mark.usefixtures("each_schedule")
def test_lane_that_nobody_joins(selftest: Selftest) -> None:
    assert_message(
        selftest.error("lane_beside_the_barrier"),
        "divergent barrier",
        "warp 1: lanes 0-6, 8-31 wait at the CTA barrier",
        "warp 1: lanes 7 wait in sync_warp of mask 0x000000c0",
    )


@pytest.mark.usefixtures("each_schedule")
def test_cycle_of_collectives(selftest: Selftest) -> None:
    assert_message(
        selftest.error("cycle_of_collectives", threads=32),
        "deadlock in CTA (0, 0, 0): 14 of 32 threads have exited",
        "warp 0: lanes 16 wait in sync_warp of mask 0x00030000",
        "warp 0: lanes 17 wait in sync_warp of mask 0x00020001",
    )


@pytest.mark.parametrize(
    "kernel", ["collectives_of_two_kinds", "collectives_at_two_places", "collectives_of_two_masks"]
)
@pytest.mark.usefixtures("each_schedule")
def test_mismatched_collectives(selftest: Selftest, kernel: str) -> None:
    message = selftest.error(kernel, threads=32)
    assert_message(message, "mismatched collective: lane ", "while others wait elsewhere")


def test_collective_outside_of_mask(selftest: Selftest) -> None:
    assert_message(
        selftest.error("collective_outside_of_mask", threads=32),
        "calls sync_warp of mask 0xfffffff0",
        "and is not in the mask",
    )
    assert_message(
        selftest.error("shuffle_from_outside_of_mask", threads=32),
        "reads lane 20, which is not in the mask",
    )


@pytest.mark.usefixtures("each_schedule")
def test_exit_before_shuffle(selftest: Selftest) -> None:
    assert_message(
        selftest.error("exit_before_shuffle", threads=32),
        "collective with an exited lane",
        "shuffle_xor",
        line_of("exit_before_shuffle"),
    )


def test_lanes_that_the_cta_does_not_have(selftest: Selftest) -> None:
    assert selftest.error("warp_sync", threads=64) is None
    assert_message(selftest.error("warp_sync", threads=40), "waits for lanes 8-31")


# ---- Other failures ----


@pytest.mark.usefixtures("each_schedule")
def test_exceptions_of_a_kernel(selftest: Selftest) -> None:
    assert_message(
        selftest.error("throws_exception", ctas=5),
        "emulator: thrown by the kernel\n  in thread (33, 0, 0) (warp 1, lane 1) of CTA (2, 0, 0)",
    )
    assert_message(selftest.error("throws_integer"), "unknown exception\n  in thread (0, 0, 0)")


def test_arithmetic_and_stack_faults(selftest: Selftest) -> None:
    assert_message(selftest.error("division_by_zero"), "arithmetic fault", "of CTA (0, 0, 0)")
    assert selftest.error("division_by_zero", option=1) is None
    assert_message(selftest.error("stack_overflow", selftest.zeros(1)), "stack overflow")


@pytest.mark.parametrize(
    "shape",
    [
        (0, 64, 0),
        (2**31, 64, 0),
        (1, 0, 0),
        (1, 1025, 0),
        (1, 2000, 0),
        (1, 64, 227 * 1024 + 1),
    ],
)
def test_refused_launches(selftest: Selftest, shape: tuple[int, int, int]) -> None:
    ctas, threads, smem = shape
    assert_message(
        selftest.error("barriers", ctas=ctas, threads=threads, smem=smem),
        "paged_attn: kernel launch: invalid configuration argument: grid (",
    )


def test_largest_launches(selftest: Selftest) -> None:
    assert selftest.error("barriers", option=2, threads=1024, smem=227 * 1024) is None
    selftest.runtime.configure(max_shared_memory=1000)
    assert selftest.error("barriers", smem=1000) is None
    assert_message(selftest.error("barriers", smem=1001), "1001 bytes of shared memory, of 1000")


def test_faults_outside_of_a_launch_are_not_ours() -> None:
    script = (
        "import ctypes, emulator, sys; library = emulator.selftest().library\n"
        "for _ in range(2): library.selftest_run(b'division_by_zero', None, 0, 0, 1, 1, 0)\n"
        "ctypes.string_at(1)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == -11, run.stderr


def test_configuration(selftest: Selftest) -> None:
    runtime = selftest.runtime
    for schedule in emulator.SCHEDULES:
        runtime.configure(seed=2**64 - 1, schedule=schedule)
        assert (runtime.seed, runtime.schedule) == (2**64 - 1, schedule)
        message = selftest.error("throws_integer")
        assert_message(message, f"EMU_SEED=18446744073709551615 EMU_SCHEDULE={schedule}")
    with pytest.raises(RuntimeError, match="schedule must be"):
        runtime.configure(schedule="alphabetical")
    with pytest.raises(RuntimeError, match="must be positive"):
        runtime.configure(sms=0)


# ---- Cost ----


def test_many_ctas(selftest: Selftest) -> None:
    count = selftest.zeros(1, dtype=torch.int64)
    start = time.perf_counter()
    assert selftest.error("count_threads", count, ctas=65537, threads=32) is None
    seconds = time.perf_counter() - start
    assert count.item() == 65537 * 32
    print(f"\n65537 CTAs of 32 threads, 5 shuffles each: {seconds:.2f} s")
    assert seconds < 30


def test_throughput(selftest: Selftest) -> None:
    for schedule in emulator.SCHEDULES:
        selftest.runtime.configure(schedule=schedule)
        start = time.perf_counter()
        assert selftest.error("barriers", option=1000, threads=1024) is None
        seconds = time.perf_counter() - start
        print(f"\n{schedule}: {seconds / 1.024e6 * 1e9:.0f} ns for a thread to pass a barrier")


# ---- The build ----


def test_processes_can_build_at_one_time() -> None:
    script = "import emulator; r = emulator.selftest(); print(r.seed, r.schedule)"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "EMU_SEED": seed, "EMU_SCHEDULE": schedule},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, schedule in (("7", "reverse"), ("0x10", "in_order"))
    ]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert outputs == ["7 reverse", "16 in_order"]


def test_core_names_nothing_of_this_project() -> None:
    core = [source for source in selftest_target().sources if "core" in source.path.parts]
    assert len(core) >= 5
    for path in (Path(__file__).parent / "core").iterdir():
        assert not re.search(r"paged|attn|ptx::shared_memory", path.read_text()), path


def test_twin_has_the_names_of_the_original() -> None:
    """Names alone: what they mean is compared by every test that runs on both."""
    declared = re.compile(
        r"^(?:__device__|inline|template|void|T|Vector|Smem)\b[^({]*?[ &](\w+)\(", re.MULTILINE
    )
    here = Path(__file__).parent
    original = (here.parents[1] / "csrc/device/ptx.cuh").read_text()
    twin = (here / "include/device/ptx.cuh").read_text()
    assert len(declared.findall(original)) > 20
    assert set(declared.findall(original)) == set(declared.findall(twin))
