"""Fixtures for tests of the product; a conftest.py imports them."""

from collections.abc import Iterator

import pytest
from backends import Backend

import emulator

from .checks import calls_go_to, hooks_backend


@pytest.fixture
def counters() -> Iterator[emulator.Counters]:
    """Counts of the launches that the test makes through the hook build."""
    with emulator.product(hooks=True).counted() as counts:
        yield counts


@pytest.fixture
def hooks() -> Iterator[Backend]:
    """The hook build on 4 SMs; paged_attn's functions call it while the test runs."""
    backend = hooks_backend()
    emulator.configure(seed=0, schedule="random", sms=4, hooks=True)
    with calls_go_to(backend):
        yield backend
    emulator.configure(seed=0, schedule="random", sms=4, hooks=True)
