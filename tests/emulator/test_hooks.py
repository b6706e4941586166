"""The hook build sees every access: planted bugs are found in every run, clean kernels never."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

import emulator
from emulator.harness import Selftest, assert_message, line_of

SEEDS = (0, 1, 77)
CLEAN_SEEDS = range(20)


@dataclass(frozen=True)
class Planted:
    """A kernel of kernels/planted.cpp, and what its failure has to say."""

    kernel: str
    message: str  # a pattern
    threads: int = 64
    ctas: int = 1
    smem: int = 0
    floats: int = 256
    bug: int = 0
    right: tuple[int, ...] = (1,)
    undefined: tuple[int, int] | None = None  # floats [begin, end)
    uninitialised: tuple[int, int] | None = None

    def data(self, selftest: Selftest) -> torch.Tensor:
        """The kernel's data, in guarded memory."""
        data = selftest.zeros(self.floats)
        index = torch.arange(self.floats)
        if self.undefined is not None:
            begin, end = self.undefined
            selftest.runtime.mark_undefined(data, (index >= begin) & (index < end))
        if self.uninitialised is not None:
            begin, end = self.uninitialised
            selftest.runtime.mark_uninitialised(data, (index >= begin) & (index < end))
        return data

    def run(self, selftest: Selftest, option: int) -> str | None:
        """The message of a launch."""
        return selftest.error(
            self.kernel,
            self.data(selftest),
            option=option,
            threads=self.threads,
            ctas=self.ctas,
            smem=self.smem,
        )


# A reader that comes before the writer finds nothing, one that comes after it a race.
EARLY = "^emulator: (race: |read of 4 bytes that are uninitialised)"

PLANTED = (
    Planted("missing_barrier_after_wait", EARLY, smem=512),
    Planted("missing_barrier_after_async_wait", EARLY, smem=512),
    Planted("missing_wait", "that an asynchronous copy has yet to write", smem=512),
    Planted("missing_trailing_barrier", "race: ", smem=512),
    Planted("tail_mask", "read of 4 bytes marked undefined", threads=32, undefined=(64, 128)),
    Planted("garbage_block", "read of 4 bytes marked undefined", threads=32, undefined=(4, 16)),
    Planted("table_over_read", "read of 4 bytes marked undefined", threads=32, undefined=(4, 16)),
    Planted("shared_array", "array index out of bounds", threads=32, smem=256),
    Planted("shared_pointer", "out of bounds, 0 bytes past the end", threads=32, smem=132),
    Planted("unsynchronised_sum", "race: "),
    Planted("missing_warp_sync", EARLY, smem=512),
    Planted("half_warp_sync", EARLY, threads=32, smem=512),
    Planted("chain_of_warp_syncs", EARLY, threads=32, smem=512),
    Planted("missing_barrier_after_broadcast", EARLY, smem=4),
    Planted("reduction_scratch", EARLY, smem=512),
    Planted("diverging_barrier", "divergent barrier"),
    Planted("uninitialised_shared", "read of 4 bytes that are uninitialised", smem=256),
    Planted(
        "uninitialised_global", "read of 4 bytes that are uninitialised", uninitialised=(0, 64)
    ),
    Planted("one_destination", "race between CTAs: write of 4 bytes", ctas=5),
    Planted("neighbour_cta", "race between CTAs: ", ctas=6),
    Planted(
        "last_cta", "race between CTAs: read of 4 bytes", ctas=3, smem=4, floats=600, right=(1, 4)
    ),
    Planted(
        "last_cta",
        "race between CTAs: read of 4 bytes",
        ctas=3,
        smem=4,
        floats=600,
        bug=2,
        right=(),
    ),
    Planted(
        "last_cta",
        "race between CTAs: read of 4 bytes",
        ctas=3,
        smem=4,
        floats=600,
        bug=3,
        right=(),
    ),
    Planted("misaligned_vector", "(read|write) of 16 bytes misaligned", threads=32),
    Planted("overflowing_sum", "undefined behaviour: signed overflow", threads=32),
    Planted("inlined_store", "write of 4 bytes out of bounds, 0 bytes past the end", threads=32),
)


def ids(planted: Planted) -> str:
    return f"{planted.kernel}-{planted.bug}" if planted.bug else planted.kernel


@pytest.mark.parametrize("planted", PLANTED, ids=ids)
@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
def test_planted_bug_is_found(hooked: Selftest, planted: Planted, schedule: str) -> None:
    for seed in SEEDS:
        hooked.runtime.configure(schedule=schedule, seed=seed)
        message = planted.run(hooked, planted.bug)
        assert_message(message, "CTA (", f"EMU_SEED={seed} EMU_SCHEDULE={schedule}")
        assert message is not None
        assert re.search(planted.message, message), message
        assert "planted.cpp:" in message, message


@pytest.mark.parametrize("planted", [p for p in PLANTED if p.right], ids=ids)
@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
def test_right_twin_is_silent(hooked: Selftest, planted: Planted, schedule: str) -> None:
    for option in planted.right:
        for seed in CLEAN_SEEDS:
            hooked.runtime.configure(schedule=schedule, seed=seed)
            assert planted.run(hooked, option) is None


def test_a_failure_names_both_accesses(hooked: Selftest) -> None:
    hooked.runtime.configure(seed=0, schedule="in_order")
    message = hooked.error("last_cta", hooked.zeros(600), ctas=3, threads=64, smem=4)
    assert_message(
        message,
        "race between CTAs: read of 4 bytes at byte ",
        " of 'data' (2400 bytes), in tests/emulator/kernels/planted.cpp:",
        "\n  not ordered after the write by thread (",
        f"in tests/emulator/kernels/{line_of('partial sum', 'planted.cpp')}\n",
    )


def test_a_failure_names_both_lines_of_inlined_code(hooked: Selftest) -> None:
    lines = [
        f"tests/emulator/kernels/{line_of(marker, 'planted.cpp')}"
        for marker in ("inlined store", "caller of the inlined store")
    ]
    assert_message(
        hooked.error("inlined_store", hooked.zeros(64), threads=32), ", in " + " < ".join(lines)
    )


def test_writing_takes_marks_off(hooked: Selftest) -> None:
    data = hooked.zeros(256)
    hooked.runtime.mark_undefined(data)
    assert_message(hooked.error("vector_copy", data, threads=32, smem=512), "marked undefined")
    data = hooked.zeros(256)
    hooked.runtime.mark_undefined(data.reshape(2, 128), torch.tensor([[False], [True]]))
    for _ in range(2):
        assert hooked.error("vector_copy", data, threads=32, smem=512) is None


def test_marks_are_for_hooks(selftest: Selftest) -> None:
    data = selftest.zeros(256)
    selftest.runtime.mark_undefined(data)
    assert not selftest.runtime.hooked
    assert selftest.error("vector_copy", data, threads=32, smem=512) is None


def test_marks_outside_of_a_buffer(hooked: Selftest) -> None:
    with pytest.raises(RuntimeError, match="cannot mark 400 bytes"):
        hooked.runtime.mark_undefined(torch.zeros(100))
