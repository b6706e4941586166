"""Tensors that are written share no memory with others, or the call is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_cache import HEAD_DIM, attention_inputs, pools, rows
from torch import Tensor

from paged_attn import copy_blocks, paged_attention, reshape_and_cache, swap_blocks


def overlapping_calls() -> dict[str, tuple[str, Callable[[], object]]]:
    """Each by what is wrong with it: what the message says, and the call."""
    inputs = attention_inputs()
    memory = torch.randn(400)
    query = memory[:64].view(2, 4, HEAD_DIM)
    key, value = pools()
    twice = torch.randn(6, 4, 2, HEAD_DIM)
    slots = torch.tensor([0, 1])
    scales = torch.zeros(4, 4, 2)
    int8_key, int8_value = (pool.to(torch.int8) for pool in pools())

    def attend(out: Tensor) -> Callable[[], object]:
        return lambda: paged_attention(**inputs | {"query": query, "out": out})

    return {
        "out shifted by a row": ("out must not share.*query", attend(memory[8:72].view(2, 4, 8))),
        "out in another order": (
            "out must not share.*query",
            attend(memory[:64].view(4, 2, 8).transpose(0, 1)),
        ),
        "out in the keys": (
            "out must not share.*key_cache",
            attend(inputs["key_cache"][1].view(2, 4, 8)),
        ),
        "out in the values": (
            "out must not share.*value_cache",
            attend(inputs["value_cache"].view(-1, 4, 8)[5:7]),
        ),
        "out over itself": (
            "out must not overlap itself",
            attend(memory.as_strided((2, 4, 8), (16, 8, 1), 100)),
        ),
        "pools shifted by a block": (
            "dst must not share.*src",
            lambda: swap_blocks(twice[:4], twice[1:5], [(0, 1)]),
        ),
        "pools shifted by a block, copied in both": (
            "must not share.*_caches",
            lambda: copy_blocks(twice[:4], twice[1:5], [(0, 1)]),
        ),
        "rows of the cache itself": (
            "key_cache must not share.*key",
            lambda: reshape_and_cache(key[1][:2], rows(2), key, value, slots),
        ),
        "keys over values": (
            "key_cache must not share.*value_cache",
            lambda: reshape_and_cache(rows(2), rows(2, seed=1), key, key, slots),
        ),
        "one tensor for both scales": (
            "k_scale must not share.*v_scale",
            lambda: reshape_and_cache(
                rows(2), rows(2), int8_key, int8_value, slots, k_scale=scales, v_scale=scales
            ),
        ),
    }


@pytest.mark.parametrize("name", overlapping_calls())
def test_memory_that_overlaps_is_refused(name: str) -> None:
    message, call = overlapping_calls()[name]
    with pytest.raises(RuntimeError, match=message):
        call()


def test_memory_that_only_lies_between_is_taken() -> None:
    inputs = attention_inputs()
    want = paged_attention(**inputs)
    assert isinstance(want, Tensor)
    # Written where the query was; or beside it, in one tensor of queries, keys and values.
    fused = torch.zeros(2, 12, HEAD_DIM)
    fused[:, :4] = inputs["query"]
    query = fused[:, :4]
    paged_attention(**inputs | {"query": query}, out=fused[:, 5:9])
    assert torch.equal(fused[:, 5:9], want)
    assert torch.equal(query, inputs["query"])
    paged_attention(**inputs | {"query": query}, out=query)
    assert torch.equal(query, want)
    # Keys and values interleaved, by block, by token, and by head.
    for split in range(4):
        shape = [4, 4, 2, HEAD_DIM]
        both = torch.zeros(*shape[:split], 2, *shape[split:])
        key, value = both.select(split, 0), both.select(split, 1)
        if split < 3:
            reshape_and_cache(rows(2), rows(2, seed=1), key, value, torch.tensor([0, 5]))
            copy_blocks([key, key], [value, value], [(0, 2)])
            swap_blocks(key, value, [(0, 3)])
            assert torch.equal(key[2, 0], rows(2)[0])
            assert torch.equal(value[3, 0], rows(2)[0])
            assert torch.equal(value[1, 1], rows(2, seed=1)[1])
            paged_attention(**inputs | {"key_cache": key, "value_cache": value})
    # As of an attention whose values are its keys.
    key = torch.zeros(4, 4, 2, HEAD_DIM)
    reshape_and_cache(same := rows(2), same, key, key, torch.tensor([0, 5]))
    assert torch.equal(key[1, 1], same[1])
