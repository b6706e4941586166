"""Random histories of a block manager against a model of what every sequence must read back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_blocks import snapshot

from paged_attn.blocks import BlockManager, OutOfBlocksError


class Histories(RuleBasedStateMachine):
    """Memory is a dict from slot to token; each write is a token never written before."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(7, 3)
        self.memory: dict[int, int] = {}
        self.expected: dict[int, list[int]] = {}
        self.tokens = itertools.count()

    def pick(self, index: int) -> int:
        return sorted(self.expected)[index % len(self.expected)]

    def write(self, seq: int, slots: list[int]) -> None:
        for slot in slots:
            assert self.manager.pool.ref_count(slot // 3) == 1
            self.memory[slot] = next(self.tokens)
            self.expected[seq].append(self.memory[slot])

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for offset in range(3):
                if source * 3 + offset in self.memory:
                    self.memory[destination * 3 + offset] = self.memory[source * 3 + offset]

    @rule(num_tokens=st.integers(0, 12))
    def add(self, num_tokens: int) -> None:
        before = snapshot(self.manager)
        if self.manager.can_add(num_tokens):
            seq = self.manager.add(num_tokens)
            assert seq not in self.expected
            self.expected[seq] = []
            self.write(seq, self.manager.slots(seq, 0, num_tokens))
        else:
            with pytest.raises(OutOfBlocksError):
                self.manager.add(num_tokens)
            assert snapshot(self.manager) == before

    @precondition(lambda self: self.expected)
    @rule(index=st.integers(0, 99), num_tokens=st.integers(0, 7))
    def append(self, index: int, num_tokens: int) -> None:
        seq = self.pick(index)
        before = snapshot(self.manager)
        if self.manager.can_append(seq, num_tokens):
            slots, copies = self.manager.append(seq, num_tokens)
            self.copy(copies)
            self.write(seq, slots)
        else:
            with pytest.raises(OutOfBlocksError):
                self.manager.append(seq, num_tokens)
            assert snapshot(self.manager) == before

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def append_many(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.expected)), unique=True))
        counts = [data.draw(st.integers(0, 4)) for _ in seqs]
        before = snapshot(self.manager)
        if self.manager.can_append_many(seqs, counts):
            appends = self.manager.append_many(seqs, counts)
            pairs = [pair for append in appends for pair in append.copies]
            destinations = {destination for _, destination in pairs}
            assert len(destinations) == len(pairs)
            assert not destinations & {source for source, _ in pairs}
            self.copy(pairs)
            for seq, append in zip(seqs, appends, strict=True):
                self.write(seq, append.slots)
        else:
            with pytest.raises(OutOfBlocksError):
                self.manager.append_many(seqs, counts)
            assert snapshot(self.manager) == before

    @precondition(lambda self: self.expected)
    @rule(index=st.integers(0, 99))
    def fork(self, index: int) -> None:
        seq = self.pick(index)
        self.expected[self.manager.fork(seq)] = self.expected[seq].copy()

    @precondition(lambda self: self.expected)
    @rule(index=st.integers(0, 99), drop=st.integers(0, 8))
    def truncate(self, index: int, drop: int) -> None:
        seq = self.pick(index)
        new_len = max(0, len(self.expected[seq]) - drop)
        self.manager.truncate(seq, new_len)
        del self.expected[seq][new_len:]

    @precondition(lambda self: self.expected)
    @rule(index=st.integers(0, 99))
    def free(self, index: int) -> None:
        seq = self.pick(index)
        self.manager.free(seq)
        del self.expected[seq]

    @invariant()
    def every_sequence_reads_back_its_tokens(self) -> None:
        self.manager.check_invariants()
        for seq, tokens in self.expected.items():
            slots = self.manager.slots(seq, 0, self.manager.seq_len(seq))
            assert [self.memory[slot] for slot in slots] == tokens

    @invariant()
    def stats_agree_with_a_count(self) -> None:
        stats = self.manager.stats()
        live = {
            slot
            for seq, tokens in self.expected.items()
            for slot in self.manager.slots(seq, 0, len(tokens))
        }
        assert stats.waste == stats.blocks_used * 3 - len(live)
        assert stats.tokens == sum(map(len, self.expected.values()))
        assert stats.blocks_used + stats.blocks_free == stats.blocks_total


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
