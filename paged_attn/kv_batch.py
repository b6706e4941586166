"""One step's tokens as tensors, and the plans of its attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attn.decode import ChunkSize, DecodePlan, plan_decode
from paged_attn.device_tables import StepLists

__all__ = ["Batch"]


class PlanKey(NamedTuple):
    """What a plan is made for, beside the lengths."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    query_len: int  # 0: ragged
    causal: bool
    sliding_window: int | None
    chunk_size: ChunkSize
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class Batch:
    """One step's tokens, as the ops take them: tensors on the cache's device.

    The tokens are those of the first sequence, then those of the second, and so on. Later steps
    do not change a batch, unless it is given to them as `out`.
    """

    slot_mapping: Tensor  # int64 [num_tokens]
    block_tables: Tensor  # int32 [num_seqs, max_blocks], -1 past a sequence's blocks
    seq_lens: Tensor  # int32 [num_seqs], the tokens of this step included
    cu_query_lens: Tensor | None  # int32 [num_seqs + 1]; None: one token each
    query_len: int = 0  # tokens of each sequence; 0 where they differ
    plans: dict[PlanKey, DecodePlan] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the tensors are views, of several dtypes, of one upload."""
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.__dict__.items()
        }

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return self.slot_mapping.shape[0]

    def check_rows(self, method: str, name: str, rows: Tensor) -> None:
        """Raises ValueError unless there is a row a token, by token or by sequence."""
        shape, num_seqs = rows.shape, self.seq_lens.shape[0]
        if rows.dim() == 3:
            fits = shape[0] == self.num_tokens
        else:
            fits = rows.dim() == 4 and tuple(shape[:2]) == (num_seqs, self.query_len)
        if not fits:
            by_seq = f", or [{num_seqs}, {self.query_len}, num_heads, head_dim]"
            raise ValueError(
                f"PagedKVCache.{method}: {name} must be [{self.num_tokens}, num_heads, head_dim]"
                f"{by_seq if self.query_len else ''}, as the batch has tokens, got {tuple(shape)}"
            )

    @property
    def plan(self) -> DecodePlan | None:
        """The first plan made for the step: by step() with num_q_heads, else by attend()."""
        return next(iter(self.plans.values()), None)

    def plan_for(
        self,
        query: Tensor,
        key_cache: Tensor,
        *,
        causal: bool = True,
        sliding_window: int | None = None,
        chunk_size: ChunkSize = None,
    ) -> DecodePlan | None:
        """The plan for such a query, made once a step and kept.

        None where the query does not fit the cache, which paged_attention then explains. Arguments
        as for `PagedKVCache.attend` and `plan_decode`. Runs on the current stream; never waits.
        """
        heads, head_dim = key_cache.shape[2:]
        if query.dim() not in (3, 4) or query.shape[-1] != head_dim or query.shape[-2] % heads:
            return None
        num_q_heads = query.shape[-2]
        ragged = query.dim() == 3 and self.cu_query_lens is not None
        query_len = 0 if ragged else query.shape[1] if query.dim() == 4 else 1
        if num_q_heads == 0 or (query_len == 0 and not ragged):
            return None
        return self._plan(
            PlanKey(
                num_q_heads,
                heads,
                head_dim,
                query_len,
                causal,
                sliding_window,
                chunk_size,
                key_cache.dtype,
            )
        )

    def plan_step(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        chunk_size: ChunkSize,
        kv_dtype: torch.dtype,
    ) -> None:
        """Makes the plan of causal attention of packed queries, which most layers use."""
        query_len = 1 if self.cu_query_lens is None else 0
        self._plan(
            PlanKey(
                num_q_heads, num_kv_heads, head_dim, query_len, True, None, chunk_size, kv_dtype
            )
        )

    def check_room(self, method: str, query_lens: list[int], max_blocks: int) -> None:
        """Raises ValueError unless a step of this size can be written into this batch."""
        for what, needed, room in (
            ("sequences", len(query_lens), self.seq_lens.shape[0]),
            ("tokens", sum(query_lens), self.slot_mapping.shape[0]),
            ("blocks a sequence", max_blocks, self.block_tables.shape[1]),
        ):
            if needed > room:
                raise ValueError(
                    f"PagedKVCache.{method}: out must have room for {needed} {what}, has {room}"
                )
        if self.cu_query_lens is None and query_lens.count(1) != len(query_lens):
            raise ValueError(
                f"PagedKVCache.{method}: out is a batch of one token a sequence, got query_lens "
                f"{query_lens}"
            )

    def pad(self, step: StepLists) -> StepLists:
        """The step, padded to this batch's size: slots -1, lengths 0, no query tokens."""
        num_seqs, num_tokens = self.seq_lens.shape[0], self.slot_mapping.shape[0]
        ends = step.query_ends
        if self.cu_query_lens is not None:
            ends = list(range(len(step.seq_lens) + 1)) if ends is None else ends
            ends = ends + [ends[-1]] * (num_seqs + 1 - len(ends))
        return replace(
            step,
            slots=step.slots + [-1] * (num_tokens - len(step.slots)),
            seq_lens=step.seq_lens + [0] * (num_seqs - len(step.seq_lens)),
            query_ends=ends,
        )

    def become(self, other: Batch) -> Batch:
        """Takes over the numbers of a batch of the same size, where its own tensors are."""
        for mine, new in (
            (self.slot_mapping, other.slot_mapping),
            (self.block_tables, other.block_tables),
            (self.seq_lens, other.seq_lens),
            (self.cu_query_lens, other.cu_query_lens),
        ):
            if mine is not None and new is not None:
                mine.copy_(new)
        object.__setattr__(self, "query_len", other.query_len)
        for key, plan in self.plans.items():
            again = self._make_plan(key)
            if plan.tensor is not None and again.tensor is not None:
                plan.tensor.copy_(again.tensor)
        return self

    def _plan(self, key: PlanKey) -> DecodePlan:
        if key not in self.plans:
            self.plans[key] = self._make_plan(key)
        return self.plans[key]

    def _make_plan(self, key: PlanKey) -> DecodePlan:
        ragged = key.query_len == 0
        return plan_decode(
            self.seq_lens,
            **key._replace(query_len=1 if ragged else key.query_len)._asdict(),
            cu_query_lens=self.cu_query_lens if ragged else None,
            num_query_tokens=self.slot_mapping.shape[0] if ragged else None,
        )
