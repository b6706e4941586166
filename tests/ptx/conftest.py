"""The product on its interpreted PTX, where there is an nvcc."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backends import Backend

from paged_attn import _ops

from . import runtime
from .build import ARCHS, missing


@pytest.fixture
def nvcc() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=ARCHS, ids=lambda arch: f"sm_{arch}")
def ptx(
    request: pytest.FixtureRequest, nvcc: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backend]:
    """paged_attn's functions run the PTX of one architecture while the test runs."""
    chosen = runtime.backend(request.param)
    monkeypatch.setattr(_ops, "lib", chosen.namespace)
    yield chosen
    chosen.set_checks(False)
