"""From the PTX text that nvcc writes to kernels made of basic blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path


class PtxError(Exception):
    """The text says something that this interpreter does not know."""


@dataclass(frozen=True)
class Location:
    """Where an instruction stands: its line of PTX, and of the source if -lineinfo told it."""

    line: int
    source: str

    def __str__(self) -> str:
        return f"PTX line {self.line}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands;`. The guard is a predicate register, negated with a leading `!`."""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    location: Location

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}; at {self.location}"


@dataclass(frozen=True)
class Variable:
    """A variable of a state space, at an offset within it."""

    offset: int
    size: int


@dataclass
class Kernel:
    """One .entry. Block i falls through to block i + 1 unless its last instruction branches."""

    name: str
    params: dict[str, Variable] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)  # bits; 1: predicate
    shared: dict[str, Variable] = field(default_factory=dict)
    shared_bytes: int = 0  # static; dynamic shared memory starts here
    max_threads: int | None = None
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # of blocks

    def place_shared(self, name: str, size: int, align: int) -> None:
        offset = -(-self.shared_bytes // align) * align
        self.shared[name] = Variable(offset, size)
        self.shared_bytes = offset + size


# What ends a block: control flow, and whatever lanes wait for each other at.
_ENDS_BLOCK = {"bra", "ret", "exit"}
RENDEZVOUS = {"bar", "barrier", "shfl", "vote", "match", "redux", "ldmatrix", "movmatrix", "mma"}

_LABEL = re.compile(r"([$%\w]+):(?!:)\s*")
_ENTRY = re.compile(r"\.entry\s+([$\w]+)\s*\((.*)\)", re.DOTALL)
_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(param|shared)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.[busf](\d+)\s+([$\w]+)(?:\[(\d*)\])?$"
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([$%\w]+)\s+)?([\w.:]+)\s*(.*)$", re.DOTALL)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_NAME = re.compile(r"[$%]?[A-Za-z_][$\w]*(?:\.[xyz])?")


def split_operands(text: str) -> tuple[str, ...]:
    """Splits at the commas outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part)


class _Parser:
    def __init__(self, text: str) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.lines = text.splitlines()
        self.files = dict(_FILE.findall(text))
        self.module_shared: list[tuple[str, int, int]] = []
        self.kernel: Kernel | None = None
        self.scopes: list[dict[str, str]] = []  # names that inline assembly declares in braces
        self.num_scopes = 0
        self.source = ""
        self.number = 0

    def fail(self, message: str) -> PtxError:
        return PtxError(f"PTX line {self.number}: {message}")

    def parse(self) -> dict[str, Kernel]:
        statement, in_section = "", False
        for number, raw in enumerate(self.lines, 1):
            self.number = number
            line = raw.split("//")[0].strip()
            if in_section:
                in_section = line != "}"
                continue
            if line.startswith(".section"):
                in_section = True
                continue
            if not statement and line.startswith("."):
                line = self.directive(line)
            statement = self.statements(f"{statement} {line}".strip())
        if statement or self.kernel is not None:
            raise self.fail(f"the text ends within {statement or 'a kernel'!r}")
        return self.kernels

    def directive(self, line: str) -> str:
        """Handles a directive that ends with its line; returns others."""
        word = line.split()[0]
        if word == ".loc":
            self.source = self.locate(line)
        elif word == ".maxntid":
            dims = [int(n) for n in line.split(None, 1)[1].split(",")]
            assert self.kernel is not None
            self.kernel.max_threads = dims[0]
        elif word not in (".version", ".target", ".address_size", ".file", ".minnctapersm"):
            return line
        return ""

    def locate(self, line: str) -> str:
        match = _LOC.match(line)
        if match is None:
            raise self.fail(line)
        file, number, outer_file, outer = match.groups()
        source = f"{Path(self.files[file]).name}:{number}"
        if outer_file and f"{outer_file}:{outer}" != f"{file}:{number}":
            source += f", inlined at {Path(self.files[outer_file]).name}:{outer}"
        return source

    def statements(self, text: str) -> str:
        """Handles the whole statements at the front of the text; returns the rest."""
        while text:
            label = _LABEL.match(text)
            if text.startswith("{"):
                self.open_scope()
                text = text[1:].lstrip()
            elif text.startswith("}"):
                self.close_scope()
                text = text[1:].lstrip()
            elif label is not None:
                self.label(label.group(1))
                text = text[label.end() :]
            elif ".entry" in text:
                if ")" not in text:
                    return text
                head, text = text.split(")", 1)
                self.entry(head + ")")
                text = text.lstrip()
            elif ";" in text:
                statement, text = text.split(";", 1)
                self.statement(statement.strip())
                text = text.lstrip()
            else:
                return text
        return text

    def entry(self, text: str) -> None:
        match = _ENTRY.search(text)
        if match is None:
            raise self.fail(text)
        self.kernel = Kernel(match.group(1))
        offset = 0
        for declaration in split_operands(match.group(2)):
            variable = _VARIABLE.match(declaration)
            if variable is None or variable.group(1) != "param":
                raise self.fail(f"unknown parameter {declaration!r}")
            _, align, bits, name, count = variable.groups()
            size = int(bits) // 8 * int(count or 1)
            aligned = int(align or int(bits) // 8)
            offset = -(-offset // aligned) * aligned
            self.kernel.params[name] = Variable(offset, size)
            offset += size
        for shared in self.module_shared:
            self.kernel.place_shared(*shared)

    def open_scope(self) -> None:
        if self.kernel is None:
            raise self.fail("a brace outside of a kernel")
        if not self.scopes:
            self.kernel.blocks.append([])
        self.scopes.append({})
        self.num_scopes += 1

    def close_scope(self) -> None:
        self.scopes.pop()
        if not self.scopes and self.kernel is not None:
            # Dynamic shared memory, declared without a size, comes after all the rest.
            for name, variable in self.kernel.shared.items():
                if variable.size == 0:
                    self.kernel.shared[name] = Variable(-(-self.kernel.shared_bytes // 16) * 16, 0)
            self.kernels[self.kernel.name] = self.kernel
            self.kernel, self.source = None, ""

    def label(self, name: str) -> None:
        assert self.kernel is not None
        if self.kernel.blocks[-1]:
            self.kernel.blocks.append([])
        self.kernel.labels[self.rename(name)] = len(self.kernel.blocks) - 1

    def rename(self, text: str) -> str:
        """The text with the names of inner scopes replaced by unique ones."""
        inner = [scope for scope in self.scopes[1:] if scope]
        if not inner:
            return text

        def replace(match: re.Match[str]) -> str:
            name = match.group()
            return next((s[name] for s in reversed(inner) if name in s), name)

        return _NAME.sub(replace, text)

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self.declare_registers(text)
            return
        if text.startswith(".pragma"):
            return  # advice on unrolling
        if text.startswith("."):
            variable = _VARIABLE.match(text)
            if variable is None or variable.group(1) != "shared":
                raise self.fail(f"unknown directive {text!r}")
            _, align, bits, name, count = variable.groups()
            # `[]` is dynamic shared memory, no bracket a scalar.
            size = int(bits) // 8 * (1 if count is None else int(count or 0))
            shared = (name, size, int(align or int(bits) // 8))
            if self.kernel is None:
                self.module_shared.append(shared)
            else:
                self.kernel.place_shared(*shared)
            return
        self.instruction(text)

    def declare_registers(self, text: str) -> None:
        match = _REGISTERS.match(text)
        if match is None or self.kernel is None:
            raise self.fail(text)
        kind = match.group(1)
        bits = 1 if kind == "pred" else 32 if kind.endswith("x2") else int(re.sub(r"\D", "", kind))
        for name in split_operands(match.group(2)):
            family = re.match(r"([$%\w]+)<(\d+)>$", name)
            if family is not None:
                for i in range(int(family.group(2))):
                    self.kernel.registers[f"{family.group(1)}{i}"] = bits
            elif len(self.scopes) > 1:
                unique = f"{name}@{self.num_scopes}"
                self.scopes[-1][name] = unique
                self.kernel.registers[unique] = bits
            else:
                self.kernel.registers[name] = bits

    def instruction(self, text: str) -> None:
        match = _INSTRUCTION.match(text)
        if match is None or self.kernel is None:
            raise self.fail(f"not an instruction: {text!r}")
        negated, guard, opcode, operands = match.groups()
        instruction = Instruction(
            opcode=opcode,
            operands=split_operands(self.rename(operands)),
            guard=negated + self.rename(guard) if guard else None,
            location=Location(self.number, self.source),
        )
        blocks = self.kernel.blocks
        if instruction.name in RENDEZVOUS and blocks[-1]:
            blocks.append([])
        blocks[-1].append(instruction)
        if instruction.name in _ENDS_BLOCK or instruction.name in RENDEZVOUS:
            blocks.append([])


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX module by name."""
    return _Parser(text).parse()
