"""Fixtures for tests of the product; a conftest.py imports them."""

from collections.abc import Iterator

import pytest

import emulator


@pytest.fixture
def counters() -> Iterator[emulator.Counters]:
    """Counts of the launches that the test makes through the hook build."""
    with emulator.product(hooks=True).counted() as counts:
        yield counts
