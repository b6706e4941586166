"""Random histories of a whole cache: what each sequence reads back against lists of its tokens.

Keys and values are really written, V = token id, and gathered again after every step, by way of the
tables on the device. Prompts repeat, so that the prefix cache has something to find; the pool is
small, so that much fails, and what fails must change nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from manager_state import manager_state, unchanged

from paged_attn import OutOfBlocksError, PagedKVCache
from paged_attn.kv_cache import Batch
from paged_attn.kv_swap import Swapper

LAYERS, BLOCKS, BLOCK_SIZE, HOST_BLOCKS = 2, 16, 3, 9
MAX_SEQUENCES = 6
INDEX = st.integers(0, 99)


class LateEvent:
    """Happens when the history says so."""

    def __init__(self) -> None:
        self.happened = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.happened


class KVHistories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedKVCache(
            LAYERS,
            BLOCKS,
            BLOCK_SIZE,
            1,
            8,
            dtype=torch.float32,
            layout="HND",
            num_host_blocks=HOST_BLOCKS,
            enable_prefix_caching=True,
            watermark=1,
        )
        self.manager = self.cache.manager
        self.running: dict[int, list[int]] = {}
        self.parked: dict[int, list[int]] = {}  # swapped out or preempted
        self.named: dict[int, int] = {}  # ids that the manager has been told
        self.declared: set[tuple[int, ...]] = set()  # prefixes that may be found
        self.pins: list[int] = []
        self.events: list[LateEvent] = []
        self.fresh = itertools.count(10_000)

    def pick(self, index: int) -> int:
        return sorted(self.running)[index % len(self.running)]

    def pick_parked(self, index: int, ids: list[int]) -> int:
        return sorted(ids)[index % len(ids)]

    def write(self, batch: Batch, tokens: list[int]) -> None:
        """K = -V, V = token id + layer / 2: exact in float32."""
        rows = torch.tensor(tokens, dtype=torch.float32)[:, None, None].expand(-1, 1, 8)
        for layer in range(LAYERS):
            value = rows + layer / 2
            self.cache.write(layer, -value, value, batch)

    def next_tokens(self, seq: int, n: int) -> list[int]:
        """As the prompt goes on, if the sequence is one; else never seen before."""
        tokens = self.running[seq]
        first = tokens[0] if tokens else -1
        if 0 < first < 10_000 and tokens == list(range(first, first + len(tokens))):
            return list(range(first + len(tokens), first + len(tokens) + n))
        return [next(self.fresh) for _ in range(n)]

    def room_for_one_more(self) -> bool:
        return len(self.running) + len(self.parked) < MAX_SEQUENCES

    @precondition(room_for_one_more)
    @rule(n=st.integers(0, 10))
    def add(self, n: int) -> None:
        if not self.manager.can_add(n):
            with unchanged(self.manager, OutOfBlocksError):
                self.cache.add(n)
            return
        seq = self.cache.add(n)
        assert seq not in self.running
        assert seq not in self.parked
        self.running[seq] = [next(self.fresh) for _ in range(n)]
        self.named[seq] = 0
        self.write(self.cache.batch([seq], n), self.running[seq])

    @precondition(room_for_one_more)
    @rule(pattern=st.integers(1, 2), n=st.integers(0, 14), chunk=st.booleans())
    def add_prompt(self, pattern: int, n: int, chunk: bool) -> None:
        tokens = list(range(1000 * pattern, 1000 * pattern + n))
        num_tokens = n // 2 if chunk else None
        if not self.manager.can_add_prompt(tokens, num_tokens=num_tokens):
            with unchanged(self.manager, OutOfBlocksError):
                self.cache.add_prompt(tokens, num_tokens=num_tokens)
            return
        seq, num_cached = self.cache.add_prompt(tokens, num_tokens=num_tokens)
        assert num_cached % BLOCK_SIZE == 0
        assert num_cached < max(n, 1)
        assert num_cached == 0 or tuple(tokens[:num_cached]) in self.declared
        length = self.manager.seq_len(seq)
        self.running[seq] = tokens[:length]
        self.named[seq] = n
        self.write(self.cache.batch([seq], length - num_cached), tokens[num_cached:length])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        ids = data.draw(
            st.lists(st.sampled_from(sorted(self.running)), unique=True, min_size=1, max_size=4)
        )
        lens = [data.draw(st.sampled_from([1, 1, 1, 0, 2, 5])) for _ in ids]
        if not self.manager.can_append_many(ids, lens):
            with unchanged(self.manager, OutOfBlocksError):
                self.cache.step(ids, lens)
            return
        self.name(ids)
        batch = self.cache.step(ids, lens)
        new = [self.next_tokens(seq, n) for seq, n in zip(ids, lens, strict=True)]
        for slot in batch.slot_mapping.tolist():
            block = slot // BLOCK_SIZE
            assert self.manager.pool.ref_count(block) == 1
            assert block not in self.manager._indexed
        self.write(batch, [token for tokens in new for token in tokens])
        for seq, tokens in zip(ids, new, strict=True):
            self.running[seq] += tokens

    def name(self, ids: list[int]) -> None:
        """A prompt in chunks whose tokens turn out otherwise is told so."""
        for seq in ids:
            if self.named[seq] > len(self.running[seq]):
                state = self.manager._seqs[seq]
                del state.tokens[len(self.running[seq]) :]
                self.named[seq] = len(self.running[seq])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), index=INDEX, drop=st.integers(1, 4))
    def step_back_into_what_can_be_found(self, data: st.DataObject, index: int, drop: int) -> None:
        self.mark_written(index, 0)
        self.truncate(index, drop)
        if data.draw(st.booleans()):
            self.append_one(index)
        else:
            self.step(data)

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def append_one(self, index: int) -> None:
        seq = self.pick(index)
        if not self.manager.can_append(seq):
            with unchanged(self.manager, OutOfBlocksError):
                self.cache.append(seq)
            return
        self.name([seq])
        slots = self.cache.append(seq)
        tokens = self.next_tokens(seq, 1)
        batch = self.cache.batch([seq], 1)
        assert batch.slot_mapping.tolist() == slots
        self.write(batch, tokens)
        self.running[seq] += tokens

    @precondition(lambda self: self.running)
    @rule(index=INDEX, drop=st.integers(0, 3))
    def mark_written(self, index: int, drop: int) -> None:
        seq = self.pick(index)
        tokens = self.running[seq]
        end = max(0, len(tokens) - drop)
        self.cache.mark_written(seq, tokens[self.named[seq] :], end=end)
        self.named[seq] = max(self.named[seq], len(tokens))
        for stop in range(BLOCK_SIZE, end + 1, BLOCK_SIZE):
            self.declared.add(tuple(tokens[:stop]))

    @precondition(lambda self: self.running and self.room_for_one_more())
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        seq = self.pick(index)
        child = self.cache.fork(seq)
        self.running[child] = self.running[seq].copy()
        self.named[child] = self.named[seq]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        ids = sorted(self.running)
        beams = data.draw(st.lists(st.sampled_from(ids), unique=True, max_size=4))
        parents = [data.draw(st.sampled_from(ids)) for _ in beams]
        free = self.manager.num_available_blocks
        self.cache.reorder(beams, parents)
        assert self.manager.num_available_blocks >= free
        old = {seq: (tokens.copy(), self.named[seq]) for seq, tokens in self.running.items()}
        for beam, parent in zip(beams, parents, strict=True):
            self.running[beam], self.named[beam] = old[parent][0].copy(), old[parent][1]

    @precondition(lambda self: self.running)
    @rule(index=INDEX, drop=st.integers(0, 7))
    def truncate(self, index: int, drop: int) -> None:
        seq = self.pick(index)
        new_len = max(0, len(self.running[seq]) - drop)
        if new_len < len(self.running[seq]):
            self.named[seq] = min(self.named[seq], new_len)
        self.cache.truncate(seq, new_len)
        del self.running[seq][new_len:]

    @precondition(lambda self: self.running or self.parked)
    @rule(index=INDEX, behind=st.booleans())
    def free(self, index: int, behind: bool) -> None:
        seq = self.pick_parked(index, [*self.running, *self.parked])
        (self.manager if behind else self.cache).free(seq)
        self.running.pop(seq, None)
        self.parked.pop(seq, None)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        ids = data.draw(
            st.lists(st.sampled_from(sorted(self.running)), unique=True, min_size=1, max_size=3)
        )
        self.cache.poll_swaps()
        if not self.manager.can_swap_out(ids):
            with unchanged(self.manager, OutOfBlocksError):
                self.cache.swap_out(ids)
            return
        self.cache.swap_out(ids)
        for seq in ids:
            self.parked[seq] = self.running.pop(seq)

    @precondition(lambda self: self.manager.swapped_ids())
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        swapped = sorted(self.manager.swapped_ids())
        ids = data.draw(st.lists(st.sampled_from(swapped), unique=True, min_size=1, max_size=3))
        self.cache.poll_swaps()
        if not self.manager.can_swap_in(ids):
            with unchanged(self.manager, OutOfBlocksError):
                self.cache.swap_in(ids)
            return
        self.cache.swap_in(ids)
        for seq in ids:
            self.running[seq] = self.parked.pop(seq)

    @rule()
    def overlap_from_now_on(self) -> None:
        def make_event() -> LateEvent:
            self.events.append(LateEvent())
            return self.events[-1]

        if self.cache.poll_swaps() == 0:
            self.cache._swapper = Swapper(
                self.manager, self.cache.pools, self.cache.device, make_event=make_event
            )

    @rule()
    def copies_have_run(self) -> None:
        for event in self.events:
            event.happened = True
        self.events.clear()
        assert self.cache.poll_swaps() == 0

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def preempt(self, index: int) -> None:
        seq = self.pick(index)
        self.manager.preempt(seq)
        self.parked[seq] = self.running.pop(seq)

    @precondition(lambda self: self.manager.preempted_ids())
    @rule(index=INDEX)
    def resume(self, index: int) -> None:
        seq = self.pick_parked(index, self.manager.preempted_ids())
        if not self.manager.can_resume(seq):
            with unchanged(self.manager, OutOfBlocksError):
                self.manager.resume(seq)
            return
        num_cached = self.manager.resume(seq)
        tokens = self.running[seq] = self.parked.pop(seq)
        assert num_cached == 0 or tuple(tokens[:num_cached]) in self.declared
        rest = len(tokens) - num_cached
        self.write(self.cache.batch([seq], rest), tokens[num_cached:])  # recomputed

    @precondition(lambda self: self.running and len(self.pins) < 3)
    @rule(index=INDEX)
    def pin(self, index: int) -> None:
        self.pins.append(self.manager.pin(self.pick(index)))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.manager.unpin(self.pins.pop(0))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def with_an_empty_pool(self, data: st.DataObject) -> None:
        """Failure injection: whatever needs a block now fails and changes nothing."""
        pool = self.manager.pool
        taken = pool.allocate(pool.num_available)
        seq = self.pick(data.draw(INDEX))
        before = manager_state(self.manager)
        calls: list[tuple[Any, ...]] = [
            (self.manager.can_add(1), self.cache.add, 1),
            (self.manager.can_append(seq, 4), self.cache.step, [seq], 4),
            (self.manager.can_append(seq, 4), self.cache.append, seq, 4),
            (self.manager.can_add_prompt([1, 2]), self.cache.add_prompt, [1, 2]),
        ]
        for can, call, *args in calls:
            assert not can
            try:
                call(*args)
            except OutOfBlocksError:
                assert manager_state(self.manager) == before
            else:
                raise AssertionError(f"{call} found a block in an empty pool")
        pool.free(taken)

    @invariant()
    def the_books_agree(self) -> None:
        self.manager.check_invariants()
        stats = self.manager.stats()
        assert stats.blocks_used + stats.blocks_cached + stats.blocks_free == BLOCKS
        assert self.manager.seq_ids() != [] or not self.running
        assert {*self.manager.swapped_ids(), *self.manager.preempted_ids()} == set(self.parked)

    @invariant()
    def every_sequence_reads_back_its_tokens(self) -> None:
        ids = list(self.running)[::-1]
        if not ids:
            return
        batch = self.cache.batch(ids, 0)
        width = batch.block_tables.shape[1]
        for seq, row in zip(ids, batch.block_tables.tolist(), strict=True):
            table = self.manager.block_table(seq)
            assert row == table + [-1] * (width - len(table))
        expected = torch.tensor([float(t) for seq in ids for t in self.running[seq]])
        for layer in range(LAYERS):
            key, value = self.cache.gather(layer, batch)
            assert torch.equal(value[:, 0, 0], expected + layer / 2)
            assert torch.equal(value, value[:, :, :1].expand_as(value))
            assert torch.equal(key, -value)


TestKVHistories = KVHistories.TestCase
TestKVHistories.settings = settings(
    max_examples=15,
    stateful_step_count=600,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
