"""Executes the CUDA kernels on a CPU: one fiber for each CUDA thread, seeded schedules."""

from .build import build
from .runtime import SCHEDULES, Runtime, configure, load, place, product, selftest

__all__ = [
    "SCHEDULES",
    "Runtime",
    "build",
    "configure",
    "load",
    "place",
    "product",
    "selftest",
]
