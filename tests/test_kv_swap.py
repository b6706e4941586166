"""Swapping real keys and values, in order and beside other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from late import LateStream
from manager_state import unchanged
from test_kv_cache import KINDS, assert_reads, make, write

from paged_attn import OutOfBlocksError, PagedKVCache, gather_cache
from paged_attn.kv_swap import Swapper

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def fill(cache: PagedKVCache, tokens: list[int]) -> int:
    seq = cache.add()
    write(cache, cache.step([seq], len(tokens)), tokens)
    return seq


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_swapped_reads_back(kind: str) -> None:
    cache = make(num_blocks=4, num_host_blocks=6, **KINDS[kind])
    first = fill(cache, [1, 2, 3, 4, 5, 6])
    child = cache.fork(first)
    write(cache, cache.step([child]), [7])
    cache.swap_out([first, child])
    others = [fill(cache, [20 + i] * 4) for i in range(4)]  # over all blocks
    for seq in others[:3]:
        cache.free(seq)
    cache.swap_in([child, first])
    assert_reads(cache, first, [1, 2, 3, 4, 5, 6])
    assert_reads(cache, child, [1, 2, 3, 4, 5, 6, 7])
    assert_reads(cache, others[3], [23] * 4)
    assert cache.manager.stats().blocks_used == 4  # the first block is shared again


def test_memory_of_the_host() -> None:
    cache = make(num_blocks=4, num_host_blocks=6)
    assert cache.host_bytes_total == 6 * 4 * cache.bytes_per_token
    assert make().host_bytes_total == 0
    seq = fill(cache, [1] * 16)
    small = make(num_blocks=4, num_host_blocks=1)
    other = fill(small, [1, 2, 3, 4, 5])
    with unchanged(small.manager, OutOfBlocksError):
        small.swap_out([other])
    assert_reads(small, other, [1, 2, 3, 4, 5])
    cache.swap_out([seq])
    assert cache.bytes_used == 0


class LateCopies:
    """Makes a cache's swaps run late: after whatever the test does in between."""

    def __init__(self, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = LateStream()
        self.pools = cache.pools
        self._real = cache.pools.copy_out, cache.pools.copy_in
        monkeypatch.setattr(cache.pools, "copy_out", self._late(0))
        monkeypatch.setattr(cache.pools, "copy_in", self._late(1))
        cache._swapper = Swapper(
            cache.manager, cache.pools, cache.device, make_event=self.stream.make_event
        )

    def _late(self, which: int) -> Callable[[Sequence[tuple[int, int]]], None]:
        def copy(pairs: Sequence[tuple[int, int]]) -> None:
            real = self._real[which]
            self.stream.queue(lambda: real(pairs))

        return copy


def test_blocks_stay_while_they_are_copied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(num_blocks=2, num_host_blocks=2)
    late = LateCopies(cache, monkeypatch)
    seq = fill(cache, [1, 2, 3, 4, 5])
    cache.swap_out([seq])
    with unchanged(cache.manager, OutOfBlocksError, "needs 1 blocks, 0 of 2"):
        cache.add(1)
    assert cache.poll_swaps() == 1
    late.stream.run()
    other = fill(cache, [8, 9])  # add() polls
    assert cache.poll_swaps() == 0
    cache.free(other)
    cache.swap_in([seq])
    late.stream.run()
    assert_reads(cache, seq, [1, 2, 3, 4, 5])


def test_host_blocks_stay_while_they_are_copied_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make(num_blocks=4, num_host_blocks=2)
    late = LateCopies(cache, monkeypatch)
    seq, other = fill(cache, [1, 2, 3, 4, 5]), fill(cache, [6, 7])
    cache.swap_out([seq])
    late.stream.run()
    cache.swap_in([seq])
    with unchanged(cache.manager, OutOfBlocksError, "needs 1 blocks, 0 of 2"):
        cache.swap_out([other])
    late.stream.run()
    cache.swap_out([other])
    late.stream.run()
    assert_reads(cache, seq, [1, 2, 3, 4, 5])


def test_a_step_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(num_blocks=2, num_host_blocks=2)
    late = LateCopies(cache, monkeypatch)
    seq, other = fill(cache, [1]), fill(cache, [1, 2, 3, 4])
    cache.swap_out([seq])
    with pytest.raises(OutOfBlocksError):
        cache.step([other])
    late.stream.run()
    cache.step([other])


@CUDA
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("side", [False, True])
def test_swaps_on_a_gpu(overlap: bool, side: bool) -> None:
    cuda: Any = torch.cuda
    stream = cuda.Stream() if side else cuda.current_stream()
    with cuda.stream(stream):
        cache = make(num_blocks=2, num_host_blocks=2, device="cuda", overlap_swaps=overlap)
        seq = cache.add()
        batch = cache.step([seq], 5)
        rows = torch.randn(5, 2, 16, device="cuda")
        cuda._sleep(50_000_000)
        for layer in range(cache.num_layers):
            cache.write(layer, rows + layer, rows - layer, batch)
        cache.swap_out([seq])
        while cache.poll_swaps():
            pass
        other = cache.add()
        batch = cache.step([other], 8)
        zeros = torch.zeros(8, 2, 16, device="cuda")
        for layer in range(cache.num_layers):
            cache.write(layer, zeros, zeros, batch)
        cache.free(other)
        cache.swap_in([seq])
        batch = cache.batch([seq], 0)
        for layer in range(cache.num_layers):
            key, value = gather_cache(
                cache.key_caches[layer],
                cache.value_caches[layer],
                batch.block_tables,
                batch.seq_lens,
            )
            assert torch.equal(key, rows + layer)
            assert torch.equal(value, rows - layer)
