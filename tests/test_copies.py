"""Copies and pickles of every public class go on by themselves, or are refused in a sentence."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from manager_state import manager_state
from small_cache import make_cache, rows
from torch import Tensor

from paged_attn import BlockManager, BlockPool, OutOfBlocksError, PagedKVCache, plan_decode


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, through_pickle, through_torch_save]
each_copy = pytest.mark.parametrize("duplicate", COPIES, ids=lambda f: f.__name__)


def run(cache: PagedKVCache, seq: int, num_tokens: int, seed: int) -> Tensor:
    batch = cache.step([seq], num_tokens)
    outs = []
    for layer in range(cache.num_layers):
        cache.write(layer, rows(num_tokens, seed=seed), rows(num_tokens, seed=seed + 1), batch)
        outs.append(cache.attend(layer, rows(num_tokens, 4, seed=seed + 2), batch))
    return torch.cat(outs)


@each_copy
@pytest.mark.parametrize(
    "options",
    [
        {"num_q_heads": 4, "num_host_blocks": 4},
        {"kv_dtype": torch.int8, "k_scale": "per_token", "v_scale": "per_token", "layout": "HND"},
        {"kv_dtype": torch.float8_e4m3fn, "enable_prefix_caching": True, "num_blocks": 4096},
    ],
    ids=["plain", "int8", "huge_pages"],
)
def test_copy_of_a_cache_goes_on_by_itself(
    duplicate: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    cache = make_cache(**options)
    seq = cache.add()
    run(cache, seq, 3, seed=1)
    twin = duplicate(cache)
    # Each goes its own way; then the copy catches up.
    mine = run(cache, seq, 1, seed=5)
    batch = twin.step([seq])
    assert batch.slot_mapping.tolist() == [twin.manager.slots(seq, 3, 4)[0]]
    assert batch.seq_lens.tolist() == [4]
    assert batch.block_tables.tolist() == [twin.manager.block_table(seq)]
    for layer in range(2):
        twin.write(layer, rows(1, seed=5), rows(1, seed=6), batch)
        other = twin.attend(layer, rows(1, 4, seed=7), batch)
        assert torch.equal(other, mine[layer : layer + 1])
    run(twin, seq, 2, seed=11)  # into the next block, of the copy alone
    assert cache.manager.seq_len(seq) == 4
    again, once = cache.gather(0, cache.batch([seq])), twin.gather(0, twin.batch([seq]))
    assert torch.equal(again[0], once[0][:4])
    twin.manager.check_invariants()
    if "num_host_blocks" in options:
        twin.swap_out([seq])
        twin.swap_in([seq])
        assert torch.equal(twin.gather(1, twin.batch([seq]))[0], once[0])


@each_copy
def test_copy_of_a_manager_goes_on_by_itself(duplicate: Callable[[Any], Any]) -> None:
    manager = BlockManager(
        8, 2, enable_prefix_caching=True, num_host_blocks=4, record_events=True, watermark=1
    )
    seq, _ = manager.add_prompt([1, 2, 3, 4, 5])
    manager.mark_written(seq)
    manager.pin(seq)
    held = manager.swap_out([manager.fork(seq)], hold=True)
    twin = duplicate(manager)
    assert manager_state(twin) == manager_state(manager)
    twin.finish_transfer(held.transfer_id)
    assert twin.add_prompt([1, 2, 3, 4, 9]).num_cached == 4  # the hash has the same key
    twin.append_many([seq], [9])
    twin.free(seq)
    twin.check_invariants()
    manager.check_invariants()
    assert manager.seq_len(seq) == 5


@each_copy
def test_copies_of_other_classes(duplicate: Callable[[Any], Any]) -> None:
    cache = make_cache(num_q_heads=4, record_events=True)
    seq = cache.add()
    batch = cache.step([seq], [3])
    cache.attend(0, rows(3, 4), batch)
    twin = duplicate(batch)
    assert torch.equal(twin.slot_mapping, batch.slot_mapping)
    assert list(twin.plans) == list(batch.plans)
    pool = BlockPool(3)
    pool.allocate(2)
    assert duplicate(pool).allocate(1) == pool.allocate(1)
    for value in (
        cache.manager.stats(),
        cache.manager.take_events(),
        cache.manager.append(seq),
        plan_decode(batch.seq_lens, num_q_heads=4, num_kv_heads=2, head_dim=8, chunk_size=4),
    ):
        assert duplicate(value) == value


@pytest.mark.parametrize(
    "make",
    [lambda: BlockPool(2), lambda: BlockManager(2, 2), make_cache],
    ids=["pool", "manager", "cache"],
)
def test_shallow_copies_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"copy\.deepcopy"):
        copy.copy(make())


def fail_to_allocate(_: int) -> None:
    BlockPool(1).allocate(2)


def test_error_in_a_worker_reaches_its_parent() -> None:
    error = OutOfBlocksError("BlockManager.add", 5, 3, 9, reserved=1)
    for twin in (through_pickle(error), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is OutOfBlocksError
        assert str(twin) == str(error)
        assert (twin.needed, twin.free) == (5, 3)
    with multiprocessing.get_context("fork").Pool(1) as workers:
        result = workers.map_async(fail_to_allocate, [0])
        with pytest.raises(OutOfBlocksError, match="needs 2 blocks, 1 of 1 are free"):
            result.get(timeout=30)
