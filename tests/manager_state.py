"""All that a block manager knows, to tell whether a failed call changed something."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest

from paged_attn.blocks import BlockManager, BlockPool


def pool_state(pool: BlockPool) -> object:
    """Free list, owners and cached blocks, in their orders."""
    return (
        pool._free.copy(),
        pool.owners.copy(),
        pool.cached_blocks(),
        pool._kept.copy(),
        None if pool.events is None else pool.events.copy(),
    )


def manager_state(manager: BlockManager) -> object:
    """Everything but the next id."""
    prefix = manager._prefix
    return (
        copy.deepcopy((manager._seqs, manager._swapped, manager._preempted)),
        manager.stats(),
        pool_state(manager.pool),
        pool_state(manager.host_pool),
        copy.deepcopy((manager._pins, [held.sources for held in manager._transfers.values()])),
        None if prefix is None else copy.deepcopy((prefix.entries, prefix._blocks)),
    )


@contextlib.contextmanager
def unchanged(
    manager: BlockManager, error: type[Exception], match: str | None = None
) -> Iterator[None]:
    """The block raises `error` and leaves the manager as it was."""
    before = manager_state(manager)
    with pytest.raises(error, match=match):
        yield
    assert manager_state(manager) == before
    manager.check_invariants()
