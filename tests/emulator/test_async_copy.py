"""Asynchronous copies: they land as late as they may, and whoever relies on less is told."""

import pytest
import torch

import emulator
from emulator.harness import Selftest, assert_message, line_of

ROWS_BYTES = 512  # of the shared memory of most kernels here: 32 rows of 16 bytes


def words(selftest: Selftest, *shape: int) -> torch.Tensor:
    """Different words in every place."""
    count = torch.Size(shape).numel()
    return selftest.runtime.place(torch.arange(1, count + 1, dtype=torch.int32).view(shape), "data")


def site(marker: str) -> str:
    return line_of(marker, "faulty_instructions.cpp")


@pytest.mark.usefixtures("each_schedule")
def test_a_copy_lands_at_the_wait(selftest: Selftest) -> None:
    data = words(selftest, 8)
    assert selftest.error("landing", data, threads=1, smem=64) is None
    after_issue, before_wait, after_wait = data[4:7].tolist()
    assert after_issue == before_wait == -1, "the destination is poisoned"
    assert after_wait == 1234, "what the source holds at the wait"


@pytest.mark.parametrize(
    ("left", "landed"),
    [(-1, 4), (0, 4), (1, 3), (2, 2), (3, 1), (4, 0), (5, 0)],
)
def test_a_wait_leaves_the_newest_groups(selftest: Selftest, left: int, landed: int) -> None:
    data = words(selftest, 6, 4)
    assert selftest.error("groups", data, option=left, threads=1, smem=64) is None
    seen = data[4:].view(4, 2)
    assert seen.tolist() == [[int(i < landed)] * 2 for i in range(4)]


@pytest.mark.parametrize(("empty", "landed"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_empty_groups_count(selftest: Selftest, empty: int, landed: int) -> None:
    data = words(selftest, 8)
    assert selftest.error("empty_groups", data, option=empty, threads=1, smem=64) is None
    assert data[4] == landed


@pytest.mark.usefixtures("each_schedule")
def test_zeroes_for_what_is_not_copied(selftest: Selftest) -> None:
    data = words(selftest, 32, 4)
    expected = data.clone().view(torch.uint8).view(32, 16)
    for row in range(16):
        expected[row, row:] = 0
    assert selftest.error("zero_fill", data, threads=32, smem=ROWS_BYTES) is None
    assert torch.equal(data.view(torch.uint8), expected)


@pytest.mark.usefixtures("each_schedule")
def test_in_flight(selftest: Selftest) -> None:
    data = words(selftest, 32, 4)
    assert selftest.error("in_flight", data, threads=32, smem=ROWS_BYTES + 32) is None
    assert data.tolist() == [[1, 1, 0, 0]] * 32


@pytest.mark.usefixtures("each_schedule")
def test_copies_of_many_threads(selftest: Selftest) -> None:
    data = words(selftest, 3, 128, 4)
    expected = data.flip(1)
    error = selftest.error("copy_through_shared_memory", data, ctas=3, threads=128, smem=2048)
    assert error is None
    assert torch.equal(data, expected)


# ---- Faults ----


@pytest.mark.usefixtures("each_schedule")
def test_exit_with_a_pending_copy(selftest: Selftest) -> None:
    data = words(selftest, 4)
    assert_message(
        selftest.error("exit_with_pending_copy", data, threads=32, smem=ROWS_BYTES),
        "exit with 1 pending asynchronous copies, the oldest to at byte 144 of 'shared memory'",
        f"issued in tests/emulator/kernels/{site('exit_with_pending_copy')}",
        "in thread (9, 0, 0)",
    )


def test_a_missing_wait_gives_poison(selftest: Selftest) -> None:
    data = words(selftest, 32, 4)
    expected = data.clone()
    assert selftest.error("missing_copy_wait", data, option=1, threads=32, smem=ROWS_BYTES) is None
    assert torch.equal(data, expected)
    assert selftest.error("missing_copy_wait", data, threads=32, smem=ROWS_BYTES) is None
    assert (data == -1).all()


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (4, "16 bytes from a misaligned source, at byte 4 of 'data' (68 bytes)"),
        (64, "read of 16 bytes out of bounds, at byte 64 of 'data' (68 bytes)"),
        (80, "read of 16 bytes out of bounds, 12 bytes past the end of 'data' (68 bytes)"),
        (-16, "read of 16 bytes out of bounds, 16 bytes before the start of 'data' (68 bytes)"),
    ],
)
def test_sources(selftest: Selftest, offset: int, message: str) -> None:
    data = words(selftest, 17)
    assert selftest.error("copy_source", data, option=48, threads=1, smem=ROWS_BYTES) is None
    error = selftest.error("copy_source", data, option=offset, threads=1, smem=ROWS_BYTES)
    assert_message(error, message, site("copy_source"))


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (8, "write of 16 bytes misaligned"),
        (512, "write of 16 bytes out of bounds, at byte 512 of 'shared memory' (512 bytes)"),
        (2**31, "write of 16 bytes out of bounds, at byte 2147483648 of 'shared memory'"),
        (-16, "write of 16 bytes out of bounds, 16 bytes before the start of 'shared memory'"),
    ],
)
def test_destinations(selftest: Selftest, offset: int, message: str) -> None:
    data = words(selftest, 4)
    assert selftest.error("copy_destination", data, option=496, threads=1, smem=512) is None
    error = selftest.error("copy_destination", data, option=offset, threads=1, smem=512)
    assert_message(error, message, site("copy_destination"))


def test_a_source_that_is_read_only_will_do(selftest: Selftest) -> None:
    data = selftest.runtime.place(torch.zeros(4), "input", read_only=True)
    assert selftest.error("copy_destination", data, threads=1, smem=512) is None


@pytest.mark.parametrize("size", [17, -1])
def test_more_bytes_than_there_is_room_for(selftest: Selftest, size: int) -> None:
    data = words(selftest, 8)
    error = selftest.error("copy_too_many_bytes", data, option=size, threads=1, smem=512)
    assert_message(error, "asynchronous copy of ", "to a place of 16", site("copy_too_many_bytes"))


def test_two_copies_to_one_place(selftest: Selftest) -> None:
    data = words(selftest, 4)
    assert_message(
        selftest.error("two_copies_to_one_place", data, threads=1, smem=512),
        "asynchronous copy to where another is pending, at byte 0 of 'shared memory'",
        site("two_copies_to_one_place"),
    )


def test_an_address_that_is_not_shared(selftest: Selftest) -> None:
    assert_message(
        selftest.error("shared_address_of_global_memory", words(selftest, 4), threads=1, smem=16),
        "not a pointer to shared memory: at byte 0 of 'data'",
        site("shared_address_of_global_memory"),
    )


# ---- Where each access is reported ----


@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
def test_copies_raise_no_alarm(hooked: Selftest, schedule: str) -> None:
    for seed in range(5):
        hooked.runtime.configure(seed=seed, schedule=schedule)
        data = words(hooked, 3, 128, 4)
        assert (
            hooked.error("copy_through_shared_memory", data, ctas=3, threads=128, smem=2048) is None
        )
        data = words(hooked, 32, 4)
        assert hooked.error("zero_fill", data, threads=32, smem=ROWS_BYTES) is None


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("missing_copy_wait", "read of 16 bytes that an asynchronous copy has yet to write"),
        ("two_copies_to_one_place", "write of 16 bytes that an asynchronous copy has yet to write"),
        ("exit_with_pending_copy", "exit with 1 pending asynchronous copies"),
    ],
)
@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
def test_an_early_access_is_an_error(
    hooked: Selftest, kernel: str, message: str, schedule: str
) -> None:
    hooked.runtime.configure(schedule=schedule)
    error = hooked.error(kernel, words(hooked, 32, 4), threads=32, smem=ROWS_BYTES)
    assert_message(error, message, site(kernel))
