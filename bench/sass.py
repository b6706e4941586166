"""What `cuobjdump -sass` prints, as functions, basic blocks and loops.

Only what a count of instructions needs: no operands are understood but branch targets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

_FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")
# /*0310*/  @!P0 BRA 0x2460 ;  /* encoding */
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?\w+)\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"\s*(?P<operands>[^;]*);"
)
_TARGET = re.compile(r"(?:^|[\s,])(0x[0-9a-f]+)$")

# Leave the function, or go where only the call stack knows.
_NO_SUCCESSOR = ("EXIT", "RET", "BPT", "KILL")
_BRANCHES = ("BRA", "JMP", "BRX", "JMX")


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction. `opcode` is without modifiers: LDGSTS of LDGSTS.E.BYPASS.128."""

    address: int
    guard: str  # "" or "@P0", "@!UP3", ...
    name: str  # with modifiers
    operands: str

    @property
    def opcode(self) -> str:
        """The name up to the first dot."""
        return self.name.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Where a direct branch goes."""
        if self.opcode not in _BRANCHES:
            return None
        match = _TARGET.search(self.operands)
        return int(match[1], 16) if match else None

    @property
    def conditional(self) -> bool:
        """Whether some lanes, or the warp at some times, pass it by."""
        # BRA.DIV goes elsewhere only where the warp is not converged; BRA.U, BRA UP0, ... and
        # BRA P0, ... have their condition among the operands.
        has_operand_condition = re.match(r"\s*!?U?P\d", self.operands) is not None
        return (self.guard not in ("", "@PT", "@UPT")) or (
            self.opcode in _BRANCHES and (".DIV" in self.name or has_operand_condition)
        )


@dataclass
class Block:
    """Instructions that run one after another."""

    instructions: list[Instruction]
    successors: list[int] = field(default_factory=list)  # numbers of blocks

    def count(self, wanted: Callable[[Instruction], bool]) -> int:
        """How many of its instructions are wanted."""
        return sum(map(wanted, self.instructions))


@dataclass(frozen=True)
class Loop:
    """A natural loop: `header` dominates `blocks`, of which `latches` jump back to it."""

    header: int
    latches: tuple[int, ...]
    blocks: frozenset[int]


@dataclass
class Function:
    """A kernel as a control flow graph. Block 0 is the entry."""

    name: str
    instructions: list[Instruction]

    @cached_property
    def blocks(self) -> list[Block]:
        """The basic blocks, in the order of their addresses."""
        addresses = {ins.address for ins in self.instructions}
        starts = {ins.target for ins in self.instructions if ins.target in addresses}
        blocks: list[Block] = []
        ended = True
        for ins in self.instructions:
            if ended or ins.address in starts:
                blocks.append(Block([]))
            blocks[-1].instructions.append(ins)
            ended = ins.opcode in _BRANCHES or ins.opcode in _NO_SUCCESSOR
        number = {block.instructions[0].address: i for i, block in enumerate(blocks)}
        for i, block in enumerate(blocks):
            last = block.instructions[-1]
            if last.target is not None and last.target in number:
                block.successors.append(number[last.target])
            ends = last.opcode in _BRANCHES or last.opcode in _NO_SUCCESSOR
            if (not ends or last.conditional) and i + 1 < len(blocks):
                block.successors.append(i + 1)
        return blocks

    @cached_property
    def dominators(self) -> dict[int, frozenset[int]]:
        """For each block that is reached from the entry: the blocks on every way to it."""
        order = self._reverse_postorder()
        before: dict[int, list[int]] = {block: [] for block in order}
        for block in order:
            for successor in self.blocks[block].successors:
                before[successor].append(block)
        everything = frozenset(order)
        found = dict.fromkeys(order, everything)
        found[0] = frozenset((0,))
        changed = True
        while changed:
            changed = False
            for block in order[1:]:
                common = frozenset.intersection(*(found[b] for b in before[block])) | {block}
                changed |= common != found[block]
                found[block] = common
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """All natural loops, the smallest first. Back edges to one header make one loop."""
        latches: dict[int, list[int]] = {}
        for block, dominators in self.dominators.items():
            for successor in self.blocks[block].successors:
                if successor in dominators:
                    latches.setdefault(successor, []).append(block)
        before: dict[int, list[int]] = {}
        for block in self.dominators:
            for successor in self.blocks[block].successors:
                before.setdefault(successor, []).append(block)
        loops = []
        for header, ends in latches.items():
            body = {header}
            todo = list(ends)
            while todo:
                block = todo.pop()
                if block not in body:
                    body.add(block)
                    todo += before.get(block, [])
            loops.append(Loop(header, tuple(ends), frozenset(body)))
        return sorted(loops, key=lambda loop: len(loop.blocks))

    def innermost_loop(self, opcodes: Iterable[str]) -> Loop | None:
        """The smallest loop that contains all the opcodes."""
        wanted = set(opcodes)
        for loop in self.loops:
            present = {ins.opcode for b in loop.blocks for ins in self.blocks[b].instructions}
            if wanted <= present:
                return loop
        return None

    def trip(self, loop: Loop, essential: Callable[[Instruction], bool]) -> list[Instruction]:
        """The instructions of a steady trip around a loop.

        Of all ways from the header to a latch, those with the most essential instructions, and of
        these the shortest: code that only some trips need is passed by, essential code is not.
        An inner loop counts as run once.
        """
        best: dict[int, tuple[int, int]] = {}  # essential, -instructions; from here to a latch
        follow: dict[int, int | None] = {}
        order = [block for block in self._reverse_postorder() if block in loop.blocks]
        position = {block: i for i, block in enumerate(order)}
        for block in reversed(order):
            ways: list[tuple[tuple[int, int], int | None]] = []
            if block in loop.latches:
                ways.append(((0, 0), None))
            for successor in self.blocks[block].successors:
                ahead = successor in loop.blocks and position[successor] > position[block]
                if ahead and successor in best:
                    ways.append((best[successor], successor))
            if not ways:
                continue
            (gain, cost), follow[block] = max(ways, key=lambda way: way[0])
            own = self.blocks[block]
            best[block] = (gain + own.count(essential), cost - len(own.instructions))
        path: list[Instruction] = []
        here: int | None = loop.header
        while here is not None:
            path += self.blocks[here].instructions
            here = follow[here]
        return path

    def _reverse_postorder(self) -> list[int]:
        """The blocks reached from the entry: each before its successors, but for back edges."""
        done: list[int] = []
        seen = {0}
        stack = [(0, iter(self.blocks[0].successors))]
        while stack:
            block, successors = stack[-1]
            following = next((s for s in successors if s not in seen), None)
            if following is None:
                done.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.blocks[following].successors)))
        return done[::-1]


def parse(text: str) -> Iterator[Function]:
    """Yields the functions of a listing."""
    name = None
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            if name is not None:
                yield Function(name, instructions)
            name, instructions = match[1], []
        elif name is not None and (match := _INSTRUCTION.match(line)):
            instructions.append(
                Instruction(
                    address=int(match["address"], 16),
                    guard=match["guard"] or "",
                    name=match["opcode"],
                    operands=match["operands"].strip(),
                )
            )
    if name is not None:
        yield Function(name, instructions)
