"""The product's kernels under the hook build: right, and without an alarm, in any order."""

from __future__ import annotations

from functools import partial

import pytest
from backends import Backend

import emulator
from emulator.checks import CHECKS, TINY, Check, check_decode

OFTEN: dict[str, Check] = {
    **{case.name: partial(check_decode, case=case) for case in TINY},
    **{name: CHECKS[name] for name in ("cache_f16_e4m3", "copy_e4m3_padded", "merge_f16")},
}


@pytest.mark.parametrize("name", CHECKS)
def test_calls(hooks: Backend, name: str) -> None:
    first = list(CHECKS).index(name)
    for seed in (first, first + 2):
        schedule = emulator.SCHEDULES[seed % 4]
        emulator.configure(seed=seed, schedule=schedule, sms=4, hooks=True)
        CHECKS[name](hooks)


@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
@pytest.mark.parametrize("name", OFTEN)
def test_orders(hooks: Backend, name: str, schedule: str) -> None:
    for seed in range(20):
        emulator.configure(seed=seed, schedule=schedule, sms=1 + seed % 3, hooks=True)
        OFTEN[name](hooks)
