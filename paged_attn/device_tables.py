"""The block tables of a manager on the device, where only what changed is uploaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_attn.blocks import BlockManager, TableChange
from paged_attn.staging import Field, StagingRing

__all__ = ["DeviceTables", "StepLists", "StepTensors"]

_BLANK_ROW = 0  # stays -1 all over: the table of a padding sequence


@dataclass(frozen=True)
class StepLists:
    """A step as the host knows it. Padding may follow the sequences and their tokens."""

    seq_ids: Sequence[int]
    slots: list[int]  # one a token; -1: padding
    seq_lens: list[int]  # one a sequence; 0: padding
    query_ends: list[int] | None  # cu_query_lens
    max_blocks: int  # width of the tables


@dataclass(frozen=True)
class StepTensors:
    """The same on the device. Nothing here is a view of what later steps change."""

    slot_mapping: Tensor  # int64 [num_tokens]
    block_tables: Tensor  # int32 [num_seqs, max_blocks], -1 past a sequence's blocks
    seq_lens: Tensor  # int32 [num_seqs]
    cu_query_lens: Tensor | None  # int32 [num_seqs + 1]


class DeviceTables:
    """Mirrors the tables of one manager: a row a sequence, for as long as the sequence lives.

    A step uploads one packed buffer: its slots and lengths, the rows of its sequences, and the
    table entries that changed, which for decoding are those of the few sequences that crossed into
    a new block. Two small kernels follow: the entries are scattered into the rows, and the rows
    gathered, so that a batch may name any sequences in any order and keeps its tables when later
    steps change them.
    """

    def __init__(self, manager: BlockManager, ring: StagingRing) -> None:
        self._manager = manager
        self._ring = ring
        self._table = self._blank(8, 8)
        self._rows: dict[int, int] = {}  # of a sequence
        self._num_entries: list[int] = [0]  # of a row that are not -1
        self._free_rows: list[int] = []
        self.entries_uploaded = 0

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which mirror the tables of their own manager anew."""
        return {"_manager": self._manager, "_ring": self._ring}

    def __setstate__(self, state: dict[str, Any]) -> None:
        manager: BlockManager = state["_manager"]
        manager.restart_table_changes()
        DeviceTables.__init__(self, manager, state["_ring"])

    def forget(self, seq_id: int) -> None:
        """The sequence is gone, its row free."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free_rows.append(row)

    def upload(self, step: StepLists) -> StepTensors:
        """Brings the tables up to date and gives the step's tensors, on the current stream."""
        try:
            rows = [self._row(seq_id) for seq_id in step.seq_ids]
            changes = self._manager.take_table_changes(step.seq_ids)
            places, entries = self._changed_entries(rows, changes)
            rows += [_BLANK_ROW] * (len(step.seq_lens) - len(rows))
            fields: list[Field] = [
                (torch.int64, step.slots),
                (torch.int64, rows),
                (torch.int64, places),
                (torch.int32, step.seq_lens),
                (torch.int32, entries),
            ]
            if step.query_ends is not None:
                fields.append((torch.int32, step.query_ends))
            slots, row_index, index, seq_lens, values, *ends = self._ring.upload(fields)
            if places:
                self._table.view(-1).scatter_(0, index, values)
            width = min(step.max_blocks, self._table.shape[1])
            tables = self._table[:, :width].index_select(0, row_index)
        except BaseException:
            # The manager believes its changes seen, but they are not all there: begin anew.
            self._rows.clear()
            self._free_rows, self._num_entries = [], [0]
            self._table = self._blank(*self._table.shape)
            self._manager.restart_table_changes()
            raise
        self.entries_uploaded += len(entries)
        if width < step.max_blocks:
            tables = torch.nn.functional.pad(tables, (0, step.max_blocks - width), value=-1)
        return StepTensors(slots, tables, seq_lens, ends[0] if ends else None)

    def _row(self, seq_id: int) -> int:
        row = self._rows.get(seq_id)
        if row is None:
            if not self._free_rows and len(self._num_entries) == self._table.shape[0]:
                self._drop_rows_of_the_gone()
            if self._free_rows:
                row = self._free_rows.pop()
            else:
                row = len(self._num_entries)
                self._num_entries.append(0)
            self._rows[seq_id] = row
        return row

    def _drop_rows_of_the_gone(self) -> None:
        """Sequences may be freed by way of the manager, without a word to forget()."""
        manager = self._manager
        living = {*manager.seq_ids(), *manager.swapped_ids(), *manager.preempted_ids()}
        for seq_id in [seq_id for seq_id in self._rows if seq_id not in living]:
            self.forget(seq_id)

    def _changed_entries(
        self, rows: list[int], changes: list[TableChange]
    ) -> tuple[list[int], list[int]]:
        """Where entries go in the flat table, and what they are."""
        width = max((start + len(blocks) for _, start, blocks in changes), default=0)
        self._make_room(len(self._num_entries), width)
        stride = self._table.shape[1]
        places: list[int] = []
        entries: list[int] = []
        for number, start, blocks in changes:
            row = rows[number]
            before, now = self._num_entries[row], start + len(blocks)
            entries += blocks
            if before > now:
                entries += [-1] * (before - now)
            places.extend(range(row * stride + start, row * stride + max(before, now)))
            self._num_entries[row] = now
        return places, entries

    def _make_room(self, num_rows: int, width: int) -> None:
        old_rows, old_width = self._table.shape
        if num_rows > old_rows or width > old_width:
            # At least doubled, so that growing costs O(1) a row on average.
            larger = self._blank(
                max(old_rows, 2 * num_rows if num_rows > old_rows else 0),
                max(old_width, 2 * width if width > old_width else 0),
            )
            larger[:old_rows, :old_width] = self._table
            self._table = larger

    def _blank(self, num_rows: int, width: int) -> Tensor:
        return torch.full((num_rows, width), -1, dtype=torch.int32, device=self._ring.device)
