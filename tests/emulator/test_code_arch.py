"""Kernels compiled for an older architecture than the GPU's: the host asks what is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from accuracy import assert_accurate
from backends import Backend
from cases import CASES, Case, attend, build

import emulator
from emulator.harness import Selftest, assert_message

NAMES = ("bf16", "ragged", "chunked", "many_rows_chunked", "e4m3_per_token", "int8_per_head")


@pytest.fixture
def compile_for(hooks: Backend) -> Iterator[Callable[[int], None]]:
    """Makes the kernels such of an architecture, on a GPU of compute capability 9.0."""
    runtime = emulator.product(hooks=True)
    yield lambda arch: runtime.configure(compute_capability=(9, 0), code_arch=arch)
    runtime.configure(compute_capability=(9, 0), code_arch=90)


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=lambda c: c.name)
def test_tensor_cores_where_the_code_has_them(
    hooks: Backend,
    counters: emulator.Counters,
    compile_for: Callable[[int], None],
    case: Case,
    arch: int,
) -> None:
    compile_for(arch)
    inputs = build(case)
    out, lse = attend(inputs.on(hooks))
    assert_accurate(out, inputs, lse)
    instructions = {name for launch in counters.launches for name in launch.instructions}
    assert any(name.startswith("mma") for name in instructions) == (arch >= 80)


@pytest.mark.parametrize(("arch", "ctas"), [(80, 2), (86, 1), (90, 3)])
def test_a_plan_counts_on_the_ctas_that_registers_were_bounded_for(
    hooks: Backend,
    counters: emulator.Counters,
    compile_for: Callable[[int], None],
    arch: int,
    ctas: int,
) -> None:
    compile_for(arch)
    emulator.configure(sms=2, hooks=True)
    inputs = build(Case("planned", seq_lens=(400, 70), head_dim=128))
    out, lse = attend(inputs.on(hooks))
    assert_accurate(out, inputs, lse)
    assert counters.launches[-1].grid[0] == 2 * ctas  # of 75 KiB each


@pytest.mark.parametrize(
    ("kernel", "option", "instruction", "since"),
    [
        ("zero_fill", 0, "cp.async", 80),
        ("multiply_matrices", 16, "mma.m16n8k16.f16", 80),
        ("multiply_matrices", -16, "mma.m16n8k16.bf16", 80),
        ("multiply_matrices", 8, "mma.m16n8k8.f16", 75),
    ],
)
def test_an_instruction_that_the_code_cannot_have(
    selftest: Selftest, kernel: str, option: int, instruction: str, since: int
) -> None:
    data = selftest.zeros(32, 3, 4, dtype=torch.int32)
    try:
        for arch in (70, 75, 80):
            selftest.runtime.configure(code_arch=arch)
            error = selftest.error(kernel, data, option=option, threads=32, smem=512)
            if arch >= since:
                assert error is None
            else:
                message = f"{instruction} is of sm_{since} and later, the code is for sm_{arch}"
                assert_message(error, message, "in tests/emulator/kernels/")
    finally:
        selftest.runtime.configure(code_arch=90)
