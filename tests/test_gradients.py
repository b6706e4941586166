"""No op has a derivative: an input that requires a gradient is refused, never passed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_cache import attention_inputs, rows
from torch import Tensor
from torch.autograd import forward_ad

from paged_attn import gather_cache, merge_states, paged_attention, reshape_and_cache
from paged_attn.flash_attn import flash_attn_with_kvcache

make_dual: Any = forward_ad.make_dual


def refused(op: str, name: str) -> Any:
    return pytest.raises(RuntimeError, match=rf"{op}: {name} must not require.*torch\.no_grad")


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "sinks", "alibi_slopes"])
def test_gradients_are_not_lost_silently(name: str) -> None:
    inputs = attention_inputs()
    inputs |= {"sinks": torch.zeros(4), "alibi_slopes": torch.ones(4)}
    inputs[name].requires_grad_()
    with refused("paged_attention", name):
        paged_attention(**inputs)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            paged_attention(**inputs)


def test_gradients_of_the_other_ops() -> None:
    inputs = attention_inputs()
    key, value, tables, lens = list(inputs.values())[1:]
    states = [rows(2), torch.zeros(2, 2), rows(2), torch.zeros(2, 2)]
    states[2].requires_grad_()
    with refused("merge_states", "out_b"):
        merge_states(*states)
    new = rows(1).requires_grad_()
    with refused("reshape_and_cache", "value"):
        reshape_and_cache(rows(1), new, key, value, torch.tensor([3]))
    with refused("paged_attention", "query"):
        flash_attn_with_kvcache(
            rows(2, 4)[:, None].requires_grad_(), key, value, cache_seqlens=lens, block_table=tables
        )
    key.requires_grad_()
    with refused("gather_cache", "key_cache"):
        gather_cache(key, value, tables, lens)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_function_transforms_are_refused() -> None:
    inputs = attention_inputs()
    query = inputs.pop("query")

    def loss(x: Tensor) -> Tensor:
        out = paged_attention(x, **inputs)
        assert isinstance(out, Tensor)
        return out.sum()

    with refused("paged_attention", "query"):
        torch.func.grad(loss)(query)
    with refused("paged_attention", "query"):
        torch.func.jvp(loss, (query,), (query,))
    with forward_ad.dual_level(), refused("paged_attention", "query"):
        loss(make_dual(query, query))
    loss(query)
