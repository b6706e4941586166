"""Runs one launch: all threads of all CTAs are lanes of numpy arrays.

Threads at the same place run together, those that are furthest behind in the text first, so that
what diverged meets again where branches join. That hides a missing barrier; the other orders let
one warp of each CTA after the other run as far as it can, the first or the last one first. At an
instruction for whole warps, lanes wait for the others of its mask; at a barrier, for all threads of
the CTA that have not exited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .flow import live_registers, target_of
from .instructions import decode
from .memory import GlobalMemory, KernelError, SharedMemory
from .parser import RENDEZVOUS, Instruction, Kernel, PtxError
from .state import WARP, Context, CopyQueue, Launch
from .values import RAW, Array

MAX_STEPS = 2_000_000  # blocks; more is an endless loop
ORDERS = ("together", "first_warp_first", "last_warp_first")

Operation = Callable[[Context], None]


@dataclass
class Program:
    """A kernel with its instructions made executable."""

    kernel: Kernel
    blocks: list[list[Operation]] = field(default_factory=list)
    live: list[frozenset[str]] = field(default_factory=list)
    last: list[Instruction | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = live_registers(self.kernel)
        for block in self.kernel.blocks:
            last = block[-1] if block else None
            ends = last is not None and last.name in ("bra", "ret", "exit")
            self.last.append(last if ends else None)
            body = block[:-1] if ends else block
            is_barrier = bool(body) and barrier_scope(body[0]) == "cta"
            self.blocks.append([] if is_barrier else [_operation(i, self.kernel) for i in body])


def _operation(instruction: Instruction, kernel: Kernel) -> Operation:
    run = decode(instruction, kernel)
    guard = instruction.guard
    if guard is None:
        return run
    if instruction.name in RENDEZVOUS:
        raise PtxError(f"a guard on an instruction for whole warps: {instruction}")

    def guarded(c: Context) -> None:
        chosen = c.guard(guard)
        if chosen.all():
            run(c)
        elif chosen.any():
            part = c.part(np.flatnonzero(chosen))
            run(part)
            part.merge()

    return guarded


def barrier_scope(instruction: Instruction) -> str | None:
    """What waits at an instruction: the CTA, the warp or nobody."""
    if instruction.name not in RENDEZVOUS:
        return None
    if instruction.name not in ("bar", "barrier"):
        return "warp"
    modifiers = [m for m in instruction.modifiers if m not in ("cta", "aligned")]
    if instruction.name == "bar" and modifiers == ["warp", "sync"]:
        return "warp"
    if modifiers != ["sync"] or instruction.guard is not None:
        raise PtxError(f"unknown barrier: {instruction}")
    return "cta"


class Machine:
    """The state of one launch."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        *,
        late_copies: bool = False,
        order: str = ORDERS[0],
    ) -> None:
        kernel = program.kernel
        if kernel.max_threads is not None and launch.threads > kernel.max_threads:
            raise KernelError(f"{launch.threads} threads a CTA, {kernel.name} allows fewer")
        self.program, self.kernel, self.launch, self.memory = program, kernel, launch, memory
        self.num_threads = launch.ctas * launch.threads
        self.cta = np.arange(self.num_threads) // launch.threads
        self.tid = np.arange(self.num_threads) % launch.threads
        dynamic = max((v.offset for v in kernel.shared.values() if v.size == 0), default=0)
        size = max(kernel.shared_bytes, dynamic + launch.shared_bytes if dynamic else 0)
        self.shared = SharedMemory(launch.ctas, max(size, launch.shared_bytes))
        self.copies = CopyQueue(self.num_threads, late=late_copies)
        self.registers: dict[str, Array] = {}
        # What is the same in all threads.
        self.fixed = {"%ntid.x": launch.threads, "%nctaid.x": launch.ctas, "WARP_SZ": WARP}
        self.fixed |= {f"%{name}.{axis}": 0 for name in ("tid", "ctaid") for axis in "yz"}
        self.fixed |= {f"%{name}.{axis}": 1 for name in ("ntid", "nctaid") for axis in "yz"}
        self.fixed |= {name: launch.params + v.offset for name, v in kernel.params.items()}
        self.fixed |= {name: v.offset for name, v in kernel.shared.items()}
        self.alive = np.ones(self.num_threads, dtype=np.bool_)
        warp = self.tid // WARP
        directions = dict(zip(ORDERS, (0 * warp, warp, -warp), strict=True))
        self.team = directions[order]  # of a thread; the lowest runs first
        self.waiting: dict[tuple[int, int], list[Array]] = {}  # by team and block
        self.add_waiting(0, np.arange(self.num_threads))
        self.parked: dict[int, list[Array]] = {}  # for the rest of their warps
        # For the rest of their CTAs: the barrier, and the block that follows it.
        self.barrier = np.full(self.num_threads, -1)
        self.resume = np.full(self.num_threads, -1)
        self.expected = np.zeros(self.num_threads, dtype=np.int64)  # 0: all of the CTA
        self.steps = 0
        self.executed = 0  # instructions, of threads

    def register(self, name: str) -> Array:
        """The values of a register in all threads; what was never written is all ones."""
        if name not in self.registers:
            kind = RAW[self.kernel.registers[name]]
            ones = True if kind is np.bool_ else np.iinfo(kind).max
            self.registers[name] = np.full(self.num_threads, ones, dtype=kind)
        return self.registers[name]

    def add_waiting(self, block: int, lanes: Array) -> None:
        for team in np.unique(self.team[lanes]):
            group = lanes[self.team[lanes] == team]
            self.waiting.setdefault((int(team), block), []).append(group)

    def run(self) -> None:
        with np.errstate(all="ignore"):
            while self.waiting:
                first = min(self.waiting)
                lanes = np.sort(np.concatenate(self.waiting.pop(first)))
                self.run_group(first[1], lanes)
        if self.alive.any():
            raise KernelError(f"{self.kernel.name}: deadlock\n{self.stuck()}")

    def stuck(self) -> str:
        """Who waits where."""
        lines = []
        for block, groups in self.parked.items():
            lanes = np.sort(np.concatenate(groups))
            lines.append(f"{len(lanes)} lanes at {self.kernel.blocks[block][0]}")
        at_barrier = np.flatnonzero(self.alive & (self.barrier >= 0))
        for block in np.unique(self.resume[at_barrier]):
            lanes = at_barrier[self.resume[at_barrier] == block]
            threads = f"CTA {self.cta[lanes[0]]}, thread {self.tid[lanes[0]]} and on"
            lines.append(f"{len(lanes)} threads ({threads}) at {self.kernel.blocks[block - 1][0]}")
        return "\n".join(lines)

    def run_group(self, block: int, lanes: Array) -> None:
        """Runs lanes from a block on, until they part or others are further behind."""
        c: Context | None = Context(self, lanes)
        while c is not None:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise KernelError(f"{self.kernel.name}: endless, at {self.kernel.blocks[block][0]}")
            body = self.kernel.blocks[block]
            scope = barrier_scope(body[0]) if body else None
            if scope == "warp":
                c = self.meet_warp(block, c)
            elif scope == "cta":
                c = self.meet_cta(block, c)
            if c is None:
                return
            self.executed += len(self.program.blocks[block]) * c.count
            for operation in self.program.blocks[block]:
                operation(c)
            c, block = self.leave(block, c)

    def leave(self, block: int, c: Context) -> tuple[Context | None, int]:
        """Goes to the next block; None where the lanes part, end or must let others go first."""
        last = self.program.last[block]
        taken = None if last is None or last.guard is None else c.guard(last.guard)
        if last is None or (taken is not None and not taken.any()):
            return self.go(block + 1, c)
        whole = taken is None or bool(taken.all())
        if last.name == "bra":
            target = target_of(last, self.kernel)
            if whole:
                return self.go(target, c)
            assert taken is not None
            c.flush(self.program.live[target] | self.program.live[block + 1])
            self.add_waiting(target, c.lanes[taken])
            self.add_waiting(block + 1, c.lanes[~taken])
            return None, block
        ended = c.lanes if whole else c.lanes[taken]
        if not whole:
            assert taken is not None
            c.flush(self.program.live[block + 1])
            self.add_waiting(block + 1, c.lanes[~taken])
        self.copies.check_exit(ended, self.kernel.name)
        self.alive[ended] = False
        self.release(self.cta[ended])
        return None, block

    def go(self, block: int, c: Context) -> tuple[Context | None, int]:
        if self.waiting and min(self.waiting) <= (int(self.team[c.lanes[0]]), block):
            c.flush(self.program.live[block])
            self.add_waiting(block, c.lanes)
            return None, block
        return c, block

    def meet_warp(self, block: int, c: Context) -> Context | None:
        """Waits until the lanes of each lane's mask are here. Whole warps need not wait."""
        if c.whole_warps():
            return c
        c.flush(self.program.live[block])
        lanes = np.sort(np.concatenate([*self.parked.pop(block, []), c.lanes]))
        everyone = Context(self, lanes)
        instruction = self.kernel.blocks[block][0]
        mask = np.full(len(lanes), 0xFFFFFFFF, dtype=np.int64)
        if instruction.name in ("bar", "shfl", "vote", "redux"):
            mask = everyone.operand(instruction.operands[-1], "b32").astype(np.int64)
        # Mind that the threads of a CTA may not fill its last warp.
        warp = self.cta[lanes] * self.launch.warps + self.tid[lanes] // WARP
        arrived = np.zeros(self.launch.ctas * self.launch.warps, dtype=np.int64)
        bit = np.int64(1) << (self.tid[lanes] % WARP)
        np.bitwise_or.at(arrived, warp, bit)
        ready = (arrived[warp] & mask) == mask
        if ((mask & bit) == 0).any():
            raise KernelError(f"a lane is not in its own mask: {instruction}")
        if not ready.all():
            self.parked.setdefault(block, []).append(lanes[~ready])
        return Context(self, lanes[ready]) if ready.any() else None

    def meet_cta(self, block: int, c: Context) -> Context | None:
        """Waits for the other threads of each CTA. Whole CTAs need not wait."""
        instruction = self.kernel.blocks[block][0]
        operands = instruction.operands
        identity = c.operand(operands[0], "u32").astype(np.int64)
        count = c.operand(operands[1], "u32").astype(np.int64) if len(operands) > 1 else 0
        cta = self.cta[c.lanes]
        here = np.bincount(cta, minlength=self.launch.ctas)
        there = np.bincount(self.cta[self.alive], minlength=self.launch.ctas)
        if np.all((here == there) | (here == 0)) and not np.any(count):
            return c
        c.flush(self.program.live[block + 1])
        self.barrier[c.lanes] = identity
        self.expected[c.lanes] = count
        self.resume[c.lanes] = block + 1
        self.release(cta)
        return None

    def release(self, ctas: Array) -> None:
        """Lets the threads of these CTAs go whose barrier is complete."""
        waits = self.barrier >= 0
        for cta in np.unique(ctas[np.isin(ctas, self.cta[waits])]):
            of_cta = np.flatnonzero(waits & (self.cta == cta))
            alive = int(self.alive[self.cta == cta].sum())
            for identity in np.unique(self.barrier[of_cta]):
                lanes = of_cta[self.barrier[of_cta] == identity]
                if len(lanes) < (int(self.expected[lanes[0]]) or alive):
                    continue
                self.barrier[lanes] = -1
                for block in np.unique(self.resume[lanes]):
                    group = lanes[self.resume[lanes] == block]
                    self.add_waiting(int(block), group)
