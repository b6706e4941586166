"""Where control may go from a block, and which registers live there."""

from __future__ import annotations

import re

from .parser import Instruction, Kernel, PtxError

_WRITES_NOTHING = {
    "bar",
    "barrier",
    "bra",
    "cp",
    "exit",
    "fence",
    "griddepcontrol",
    "membar",
    "prefetch",
    "red",
    "ret",
    "st",
    "trap",
}
_TOKEN = re.compile(r"[$%\w@.]+")


def registers_in(operand: str, kernel: Kernel) -> list[str]:
    """The registers that an operand names."""
    return [token for token in _TOKEN.findall(operand) if token in kernel.registers]


def written_by(instruction: Instruction, kernel: Kernel) -> list[str]:
    if instruction.name in _WRITES_NOTHING or not instruction.operands:
        return []
    return registers_in(instruction.operands[0], kernel)


def read_by(instruction: Instruction, kernel: Kernel) -> list[str]:
    """The registers that an instruction needs; a guarded write keeps what was there."""
    operands = list(instruction.operands)
    if instruction.guard is None and written_by(instruction, kernel):
        operands = operands[1:]
    if instruction.guard is not None:
        operands.append(instruction.guard)
    return [name for operand in operands for name in registers_in(operand, kernel)]


def target_of(branch: Instruction, kernel: Kernel) -> int:
    """The block that a `bra` goes to."""
    if set(branch.modifiers) - {"uni"} or branch.operands[0] not in kernel.labels:
        raise PtxError(f"unknown branch: {branch}")
    return kernel.labels[branch.operands[0]]


def successors(kernel: Kernel, block: int) -> list[int]:
    """The blocks that may come after a block."""
    last = kernel.blocks[block][-1] if kernel.blocks[block] else None
    following = [block + 1] if block + 1 < len(kernel.blocks) else []
    if last is None or last.name not in ("bra", "ret", "exit"):
        return following
    targets = [target_of(last, kernel)] if last.name == "bra" else []
    return targets + (following if last.guard is not None else [])


def live_registers(kernel: Kernel) -> list[frozenset[str]]:
    """For each block the registers whose values may still be read when control enters it."""
    needed: list[set[str]] = []
    killed: list[set[str]] = []
    for block in kernel.blocks:
        need: set[str] = set()
        kill: set[str] = set()
        for instruction in block:
            need.update(name for name in read_by(instruction, kernel) if name not in kill)
            if instruction.guard is None:
                kill.update(written_by(instruction, kernel))
        needed.append(need)
        killed.append(kill)
    live: list[frozenset[str]] = [frozenset() for _ in kernel.blocks]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(kernel.blocks))):
            after: set[str] = set()
            for successor in successors(kernel, i):
                after |= live[successor]
            new = frozenset(needed[i] | (after - killed[i]))
            changed |= new != live[i]
            live[i] = new
    return live
