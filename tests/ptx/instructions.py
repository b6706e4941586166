"""From an instruction's text to a function on lanes. What is not known raises PtxError."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .parser import Instruction, Kernel, PtxError
from .state import Context, constant
from .values import RAW, TYPES, Array, bits_of, read

Operation = Callable[[Context], None]
Source = Callable[[Context], Array]

_CONSTANT = re.compile(r"-?\d")
_ADDRESS = re.compile(r"\[\s*([$%\w@]+)\s*(?:\+\s*(-?\d+))?\s*\]$")


class Decoder:
    """An instruction whose modifiers are taken one by one: none may be left at the end."""

    def __init__(self, instruction: Instruction, kernel: Kernel) -> None:
        self.instruction = instruction
        self.kernel = kernel
        self.operands = instruction.operands
        self.left = list(instruction.modifiers)

    def error(self, message: str = "unknown instruction") -> PtxError:
        return PtxError(f"{message}: {self.instruction}")

    def take(self, *options: str) -> str | None:
        """The first modifier that is one of the options; it counts as handled."""
        for modifier in self.left:
            if modifier in options:
                self.left.remove(modifier)
                return modifier
        return None

    def need(self, *options: str) -> str:
        taken = self.take(*options)
        if taken is None:
            raise self.error(f"without .{'/.'.join(options)}")
        return taken

    def type(self) -> str:
        """The last modifier, which must be a type."""
        if not self.left or self.left[-1] not in TYPES:
            raise self.error()
        return self.left.pop()

    def finish(self, *counts: int) -> None:
        """Raises unless all modifiers were handled and the number of operands is possible."""
        if self.left or len(self.operands) not in counts:
            raise self.error()

    def source(self, index: int, type_name: str) -> Source:
        text = self.operands[index]
        width = self.kernel.registers.get(text)
        if _CONSTANT.match(text) and not type_name.endswith("x2"):
            raw = np.full(1, constant(text, type_name), RAW[bits_of(type_name)])
            value = read(raw, type_name)[0]
            return lambda c: np.full(c.count, value)
        if width is None or width != bits_of(type_name) or type_name.startswith("bf"):
            if width is not None and width < bits_of(type_name):
                raise self.error(f"{text} is too narrow")
            return lambda c: c.operand(text, type_name)
        if type_name.endswith("x2"):
            return lambda c: read(c.get(text), type_name)
        kind = read(np.zeros(1, RAW[width]), type_name).dtype
        return lambda c: c.get(text).view(kind)

    def vector(self, index: int) -> list[str]:
        """The elements of `{a, b}`, or the one operand without braces."""
        text = self.operands[index]
        if not text.startswith("{"):
            return [text]
        return [part.strip() for part in text.strip("{}").split(",")]

    def address(self, index: int) -> Source:
        """An address operand, as uint64."""
        match = _ADDRESS.match(self.operands[index])
        if match is None:
            raise self.error(f"unknown address {self.operands[index]!r}")
        name, offset = match.group(1), np.uint64(int(match.group(2) or 0) & 0xFFFFFFFFFFFFFFFF)
        width = self.kernel.registers.get(name, 64)
        if width == 32:
            return lambda c: (c.get(name) + np.uint32(offset & np.uint64(0xFFFFFFFF))).astype(
                np.uint64
            )
        return lambda c: c.operand(name, "u64") + offset

    def elementwise(
        self, function: Callable[..., Array], sources: list[str], result: str
    ) -> Operation:
        """destination = function(sources), each of the type that is given."""
        self.finish(1 + len(sources))
        get = [self.source(i + 1, name) for i, name in enumerate(sources)]
        destination = self.operands[0]
        return lambda c: c.set(destination, function(*[source(c) for source in get]), result)


Handler = Callable[[Decoder], Operation]
_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Registers the decoder of these instructions."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


def decode(instruction: Instruction, kernel: Kernel) -> Operation:
    """The function that executes an instruction."""
    # The modules register their handlers; they need this one first.
    from . import access, arithmetic, conversions, warp_ops  # noqa: F401

    handler = _HANDLERS.get(instruction.name)
    decoder = Decoder(instruction, kernel)
    if handler is None:
        raise decoder.error()
    run = handler(decoder)
    if decoder.left:
        raise decoder.error()
    return run
