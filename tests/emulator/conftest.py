"""Fixtures of the emulator's own tests."""

from collections.abc import Iterator

import pytest

import emulator
from emulator.harness import Selftest


@pytest.fixture
def selftest() -> Iterator[Selftest]:
    """Every test ends with a launch that must succeed: the process stays usable."""
    result = Selftest()
    result.runtime.configure(seed=0, schedule="random", max_shared_memory=227 * 1024)
    yield result
    result.runtime.configure(seed=0, schedule="random", max_shared_memory=227 * 1024)
    sums = result.zeros(3)
    assert result.error("block_reduction", sums, ctas=3, threads=128, smem=512) is None
    assert sums.tolist() == [8128.0, 8256.0, 8384.0]


@pytest.fixture(params=emulator.SCHEDULES)
def each_schedule(request: pytest.FixtureRequest, selftest: Selftest) -> str:
    name: str = request.param
    selftest.runtime.configure(schedule=name)
    return name
