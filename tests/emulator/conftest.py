"""Fixtures of the emulator's own tests."""

from collections.abc import Iterator

import pytest

import emulator
from emulator.fixtures import counters as counters
from emulator.fixtures import hooks as hooks
from emulator.harness import Selftest


def _usable(result: Selftest) -> Iterator[Selftest]:
    """Every test ends with a launch that must succeed: the process stays usable."""
    result.runtime.configure(seed=0, schedule="random", max_shared_memory=227 * 1024)
    yield result
    result.runtime.configure(seed=0, schedule="random", max_shared_memory=227 * 1024)
    sums = result.zeros(3)
    assert result.error("block_reduction", sums, ctas=3, threads=128, smem=512) is None
    assert sums.tolist() == [8128.0, 8256.0, 8384.0]


@pytest.fixture
def selftest() -> Iterator[Selftest]:
    yield from _usable(Selftest())


@pytest.fixture
def hooked() -> Iterator[Selftest]:
    """The same kernels, which report each access."""
    yield from _usable(Selftest(hooks=True))


@pytest.fixture(params=emulator.SCHEDULES)
def each_schedule(request: pytest.FixtureRequest, selftest: Selftest) -> str:
    name: str = request.param
    selftest.runtime.configure(schedule=name)
    return name
