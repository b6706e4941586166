"""bench/static_report.py: its rules on cases worked out by hand, and one kernel's machine code."""

from __future__ import annotations

import itertools
from pathlib import Path

import machine_code
import occupancy
import pytest
import sass
import static_report

# A loop of three blocks with a rare one (0x60) that is laid out after the loop, as ptxas does, and
# an inner loop of its own before it.
LISTING = """
	code for sm_90
		Function : _Z6kernelv
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   MOV R1, c[0x0][0x28] ;           /* 0x00000a0000017a02 */
                                                                    /* 0x000fe20000000f00 */
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;          /* 0x0000000102027810 */
        /*0020*/              @!P0 BRA 0x10 ;                       /* 0xfffffff000f80947 */
        /*0030*/                   LDSM.16.M88.4 R4, [R2+0x20] ;    /* 0x000020000204783b */
        /*0040*/                   HMMA.16816.F32 R8, R4, R6, R8 ;  /* 0x000000060408723c */
        /*0050*/               @P1 BRA P2, 0xb0 ;                   /* 0x0000005000007947 */
        /*0060*/              @!P3 LDGSTS.E.BYPASS.128 [R3], desc[UR4][R10.64] ; /* 0x1 */
        /*0070*/              @!P3 LDGSTS.E.BYPASS.128 [R3+0x110], desc[UR4][R12.64] ; /* 0x2 */
        /*0080*/                   BRA.DIV UR4, 0xe0 ;              /* 0x0000005200007947 */
        /*0090*/               @P0 BRA 0x30 ;                       /* 0xffffff9000000947 */
        /*00a0*/                   EXIT ;                           /* 0x000000000000794d */
        /*00b0*/                   FMUL R8, R8, R9 ;                /* 0x0000000908087220 */
        /*00c0*/                   STL [R1], R8 ;                   /* 0x0000000801007387 */
        /*00d0*/                   BRA 0x60 ;                       /* 0xffffff8000007947 */
        /*00e0*/                   WARPSYNC.ALL ;                   /* 0x0000000000007948 */
        /*00f0*/                   BRA 0x90 ;                       /* 0xffffffa000007947 */
        /*0100*/                   BRA 0x100;                       /* 0xfffffffc00fc7947 */
		..........
		Function : _Z5emptyv
        /*0000*/                   EXIT ;                           /* 0x000000000000794d */
"""
MISSING = machine_code.missing()


@pytest.mark.parametrize(
    ("arch", "registers", "shared_memory", "threads", "ctas"),
    [
        # 128 registers x 32 lanes are 4096 a warp: 16 warps in all, 4 of each sub-partition.
        (90, 128, 0, 128, 4),
        # 129 are rounded up to 136, 4352 a warp: 3 warps fit a sub-partition's 16384.
        (90, 129, 0, 128, 3),
        (90, 168, 0, 128, 3),
        (90, 169, 0, 128, 2),
        # 65 registers are 72, 2304 a warp: 7 in a sub-partition; 28 warps are 4 CTAs of 6.
        (80, 65, 0, 192, 4),
        # 8 registers never limit: 64 warps, or 48, and no more than the CTAs of the architecture.
        (90, 8, 0, 1024, 2),
        (89, 8, 0, 1024, 1),
        (80, 8, 0, 32, 32),
        (86, 8, 0, 32, 16),
        (89, 8, 0, 32, 24),
        # A KiB of each CTA is the system's: 3 x 76 KiB are all of 228, 3 x 75.25 + 3 are more.
        (90, 32, 75 * 1024, 128, 3),
        (90, 32, 75 * 1024 + 128, 128, 2),
        (80, 32, 81 * 1024, 128, 2),
        (80, 32, 81 * 1024 + 1, 128, 1),
        # The most that one CTA may have, and a byte more.
        (89, 32, 99 * 1024, 128, 1),
        (89, 32, 99 * 1024 + 1, 128, 0),
        (90, 32, 227 * 1024, 128, 1),
        (90, 32, 227 * 1024 + 1, 128, 0),
    ],
)
def test_resident_ctas(
    arch: int, registers: int, shared_memory: int, threads: int, ctas: int
) -> None:
    found = occupancy.ctas_per_sm(
        occupancy.ARCHS[arch], registers=registers, shared_memory=shared_memory, threads=threads
    )
    assert found == ctas


def test_issue_share() -> None:
    # 4.8e12 B/s over 132 x 4 x 1.98e9 = 1.04544e12 slots/s: 4.5914 bytes a slot.
    h200 = occupancy.ARCHS[90].board
    assert h200.issue_share(288 / 16384) == pytest.approx(0.0807, abs=1e-4)
    assert h200.issue_share(1 / 4.8e12 * 1.04544e12) == pytest.approx(1.0)


def test_listing_becomes_functions_and_blocks() -> None:
    kernel, empty = sass.parse(LISTING)
    assert (kernel.name, empty.name) == ("_Z6kernelv", "_Z5emptyv")
    assert len(kernel.instructions) == 17
    copy = kernel.instructions[6]
    assert (copy.address, copy.guard, copy.opcode) == (0x60, "@!P3", "LDGSTS")
    assert copy.name == "LDGSTS.E.BYPASS.128"
    branch = kernel.instructions[5]
    assert (branch.target, branch.conditional) == (0xB0, True)
    first = [f"{block.instructions[0].address:x}" for block in kernel.blocks]
    assert first == ["0", "10", "30", "60", "90", "a0", "b0", "e0", "100"]
    # A branch under a condition of its own falls through as well; one without any does not.
    assert sorted(kernel.blocks[2].successors) == [3, 6]
    assert kernel.blocks[6].successors == [3]
    assert kernel.blocks[5].successors == []
    assert empty.blocks[0].successors == []


def test_loops_and_the_trip_around_one() -> None:
    kernel, empty = sass.parse(LISTING)
    inner, outer = kernel.loops
    assert (inner.header, inner.blocks) == (1, frozenset((1,)))
    assert (outer.header, outer.blocks) == (2, frozenset((2, 3, 4, 6, 7)))
    assert kernel.innermost_loop(("HMMA", "LDGSTS")) == outer
    assert kernel.innermost_loop(("HMMA", "LDG")) is None
    assert empty.loops == []
    # The rare block is passed by, unless it is what is asked for.
    steady = kernel.trip(outer, lambda ins: ins.opcode == "LDGSTS")
    assert [ins.address for ins in steady] == [0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90]
    rare = kernel.trip(outer, lambda ins: ins.opcode in ("FMUL", "LDGSTS"))
    assert [ins.address for ins in rare][3:6] == [0xB0, 0xC0, 0xD0]


def test_counts_of_a_kernel() -> None:
    kernel, empty = sass.parse(LISTING)
    trip = machine_code.main_loop(kernel)
    assert trip is not None
    assert (trip.instructions, trip.kv_bytes) == (7, 2 * 32 * 16)
    assert (trip.narrow_copies, trip.local_accesses) == (0, 1), "STL counts wherever it is"
    assert machine_code.main_loop(empty) is None


def test_what_ptxas_says() -> None:
    printed = """ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_90'
ptxas info    : Function properties for _Z6kernelv
    24 bytes stack frame, 20 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size
"""
    found = machine_code.parse_resources(printed)
    assert found == {"_Z6kernelv": machine_code.Resources(registers=168, stack=24, spills=28)}


def test_a_report_on_nothing_is_an_error() -> None:
    with pytest.raises(machine_code.ReportError, match="'i9' in its name"):
        machine_code.units("i9")


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_machine_code_of_f16_on_sm_90(tmp_path: Path) -> None:
    units = machine_code.units("decode_mma_f16")
    facts = machine_code.read_facts(units, tmp_path)
    compiled = [machine_code.compile_unit(unit, 90, tmp_path) for unit in units]
    rows = static_report.rows_of(compiled, facts, 90)
    shapes = list(itertools.product((64, 128, 256), (8, 16, 128)))
    assert [row.key[1:] for row in rows] == shapes
    most = {(64, 8): 0.11, (64, 16): 0.12, (128, 8): 0.08, (128, 16): 0.10, (256, 8): 0.07}
    most[256, 16] = 0.09
    for row in rows:
        assert (row.resources.spills, row.resources.stack) == (0, 0), row.key
        assert (row.trip.local_accesses, row.trip.narrow_copies) == (0, 0), row.key
        assert row.trip.opcodes["HMMA"] > 0, row.key
        assert row.trip.opcodes["LDSM"] > 0, row.key
        if row.many_rows:
            continue
        assert row.trip.kv_bytes == row.facts.tile_bytes, row.key
        assert row.in_flight >= static_report.GOAL_IN_FLIGHT[90], row.key
        assert row.share <= most[row.key[1:]], row.key
