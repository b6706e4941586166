"""Good arguments for every op, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from backends import Backend
from support import raw
from torch import Tensor

import paged_attn

Args = dict[str, Any]
OPS: dict[str, Callable[..., Any]] = {
    "paged_attention": paged_attn.paged_attention,
    "reshape_and_cache": paged_attn.reshape_and_cache,
    "gather_cache": paged_attn.gather_cache,
    "merge_states": paged_attn.merge_states,
    "copy_blocks": paged_attn.copy_blocks,
    "swap_blocks": paged_attn.swap_blocks,
}


def caches(dtype: torch.dtype = torch.float16) -> Args:
    return {
        "key_cache": torch.zeros(6, 4, 2, 16, dtype=dtype),
        "value_cache": torch.zeros(6, 4, 2, 16, dtype=dtype),
    }


def sequences() -> Args:
    return {
        "block_tables": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 8], dtype=torch.int32),
    }


def good(op: str) -> Args:
    """Arguments that the op takes."""
    if op == "paged_attention":
        query = torch.ones(2, 4, 16, dtype=torch.float16)
        return {"query": query, **caches(), **sequences(), "out": torch.full_like(query, 7)}
    if op == "reshape_and_cache":
        rows = {name: torch.ones(3, 2, 16, dtype=torch.float16) for name in ("key", "value")}
        return {**rows, **caches(), "slot_mapping": torch.tensor([0, 5, 23])}
    if op == "gather_cache":
        return {**caches(), **sequences(), "total_tokens": 13}
    if op == "merge_states":
        state = {"out_a": torch.ones(3, 4, 16), "lse_a": torch.zeros(3, 4)}
        return state | {"out_b": torch.ones(3, 4, 16), "lse_b": torch.zeros(3, 4)}
    if op == "copy_blocks":
        lists = {name: [torch.ones(6, 4, 2, 16) for _ in range(2)] for name in ("keys", "values")}
        pairs = torch.tensor([[0, 1], [2, 3]])
        return {
            "key_caches": lists["keys"],
            "value_caches": lists["values"],
            "block_mapping": pairs,
        }
    pools = {"src": torch.ones(6, 4, 2, 16), "dst": torch.zeros(5, 4, 2, 16)}
    return pools | {"block_mapping": torch.tensor([[5, 4]])}


def put(**changes: Any) -> Callable[[Args], Args]:
    """Replaces arguments; a function gets the old value."""

    def change(args: Args) -> Args:
        new = {n: v(args[n]) if callable(v) and n in args else v for n, v in changes.items()}
        return args | new

    return change


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def sparse_rows(tensor: Tensor) -> Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def with_entry(index: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[index] = value
        return changed

    return change


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused."""

    op: str
    message: str  # a regular expression for what follows "op: "
    change: Callable[[Args], Args]


INT8 = {name: to(torch.int8) for name in ("key_cache", "value_cache")}
FP8 = {name: to(torch.float8_e4m3fn) for name in ("key_cache", "value_cache")}
CU_QUERY_LENS = torch.tensor([0, 1, 2], dtype=torch.int32)


def tensors_of(args: Args) -> list[Tensor]:
    flat = [
        item for value in args.values() for item in (value if isinstance(value, list) else [value])
    ]
    return [value for value in flat if isinstance(value, Tensor)]


def place(backend: Backend, args: Args) -> Args:
    tensors = tensors_of(args)
    placed = iter(backend.place_all(tensors))

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [next(placed) for _ in value]
        return next(placed) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in args.items()}


def check_refused(backend: Backend, wrong: Wrong) -> None:
    """The call raises the message, and every byte of every argument stays."""
    args = place(backend, wrong.change(good(wrong.op)))
    if "block_mapping" in args:
        args["block_mapping"] = args["block_mapping"].cpu()
    before = [raw(tensor) for tensor in tensors_of(args)]
    refused = pytest.raises(
        (RuntimeError, ValueError, TypeError), match=f"^{wrong.op}: {wrong.message}"
    )
    with backend.checks(), refused:
        OPS[wrong.op](**args)
    after = [raw(tensor) for tensor in tensors_of(args)]
    assert all(map(torch.equal, before, after)), "an argument was written"


def name_of(wrong: Wrong) -> str:
    """A short name of a wrong call."""
    words = wrong.message.replace("\\", "").split()[:6]
    return f"{wrong.op}-{'_'.join(words)}"
