"""Small PTX kernels, run on numpy arrays."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .machine import Program
from .memory import Buffer, GlobalMemory
from .parser import parse
from .runtime import run_kernel
from .values import Array

HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"


def program(text: str) -> Program:
    """The one kernel of a module."""
    (kernel,) = parse(text).values()
    return Program(kernel)


def execute(
    kernel: Program,
    arrays: list[Array],
    *,
    ctas: int = 1,
    threads: int = 32,
    read_only: int = 0,
    **options: Any,
) -> None:
    """Runs a kernel whose parameters are pointers to these arrays, the first ones read-only."""
    memory = GlobalMemory()
    for i, array in enumerate(arrays):
        buffer = Buffer(array.ctypes.data, array.nbytes, f"array {i}", read_only=i < read_only)
        memory.add(buffer)
    pointers = [struct.pack("<Q", array.ctypes.data) for array in arrays]
    run_kernel(kernel, pointers, memory, ctas=ctas, threads=threads, **options)


def kernel_text(body: str, num_pointers: int, declarations: str = "") -> str:
    """A kernel with its pointers in %p0, %p1, ..., the thread in %tid, and scratch registers."""
    params = ", ".join(f".param .u64 arg{i}" for i in range(num_pointers))
    loads = "\n".join(f"ld.param.u64 %p{i}, [arg{i}];" for i in range(num_pointers))
    return f"""{HEADER}
.visible .entry test({params})
{{
.reg .pred %q<4>;
.reg .b16 %h<8>;
.reg .b32 %r<32>;
.reg .f32 %f<16>;
.reg .b64 %rd<16>;
.reg .b64 %p<{num_pointers}>;
.reg .b32 %tid;
{declarations}
{loads}
mov.u32 %tid, %tid.x;
{body}
ret;
}}
"""


def evaluate(line: str, inputs: list[Array], result: Any) -> Array:
    """Runs `line`, which reads %a, %b and %c of each thread and writes %d, of dtype `result`."""
    count = len(inputs[0])
    out = np.zeros(count, dtype=result)
    arrays = [*(np.ascontiguousarray(x) for x in inputs), out]
    body, registers = "", ""
    for i, (name, array) in enumerate(zip("abcd"[: len(inputs)] + "d", arrays, strict=True)):
        size = array.dtype.itemsize
        registers += f".reg .b{8 * max(size, 2)} %{name};\n"
        body += f"mul.wide.u32 %rd0, %tid, {size};\nadd.s64 %rd{i + 1}, %p{i}, %rd0;\n"
        if name != "d":
            body += f"ld.global.b{8 * size} %{name}, [%rd{i + 1}];\n"
    body += f"{line}\nst.global.b{8 * out.dtype.itemsize} [%rd{len(arrays)}], %d;"
    execute(program(kernel_text(body, len(arrays), registers)), arrays, threads=count)
    return out
