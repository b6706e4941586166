"""Executes the CUDA kernels on a CPU: one fiber for each CUDA thread, seeded schedules."""

from .build import build
from .counters import Counters, Launch, Line, Totals
from .runtime import (
    SCHEDULES,
    Runtime,
    configure,
    load,
    mark_undefined,
    place,
    product,
    selftest,
)

__all__ = [
    "SCHEDULES",
    "Counters",
    "Launch",
    "Line",
    "Runtime",
    "Totals",
    "build",
    "configure",
    "load",
    "mark_undefined",
    "place",
    "product",
    "selftest",
]
