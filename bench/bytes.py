"""The one byte model: what a decode call must read and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TABLE_ENTRY_BYTES = 4  # int32


@dataclass(frozen=True)
class DecodeShape:
    """A decode step of equally long sequences, one query token each."""

    num_q_heads: int
    num_kv_heads: int
    batch: int
    length: int  # tokens of each sequence
    kv_dtype: torch.dtype
    block_size: int
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16  # of query and output

    @property
    def blocks_per_seq(self) -> int:
        """Blocks that hold one sequence."""
        return -(-self.length // self.block_size)

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """Shape of the key cache that holds this step and no more."""
        num_blocks = self.batch * self.blocks_per_seq
        return num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def pool_numel(self) -> int:
        """Elements of the key cache."""
        num_blocks, block_size, num_kv_heads, head_dim = self.pool_shape
        return num_blocks * block_size * num_kv_heads * head_dim

    @property
    def name(self) -> str:
        """What a table's row is called."""
        return (
            f"{self.num_q_heads}/{self.num_kv_heads} b{self.batch} x {self.length} "
            f"{dtype_name(self.kv_dtype)} bs{self.block_size}"
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one call moves if it moves each once."""

    kv: int
    rows: int  # query and output
    tables: int  # block tables and lengths: the price of paging

    @property
    def needed(self) -> int:
        """What attention itself needs, paged or not: bandwidth is counted by this.

        Tables are left out, lest block size 1 look better for reading more of them.
        """
        return self.kv + self.rows


def traffic(shape: DecodeShape) -> Traffic:
    """What a decode call of this shape moves at least."""
    kv_rows = 2 * shape.batch * shape.length * shape.num_kv_heads
    query_rows = shape.batch * shape.num_q_heads
    return Traffic(
        kv=kv_rows * shape.head_dim * shape.kv_dtype.itemsize,
        rows=2 * query_rows * shape.head_dim * shape.dtype.itemsize,
        tables=shape.batch * (shape.blocks_per_seq + 1) * TABLE_ENTRY_BYTES,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as tables print it: bfloat16, float8_e4m3fn."""
    return str(dtype).removeprefix("torch.")
