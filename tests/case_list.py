"""What calls of paged attention look like: every case by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from paged_attn.decode import ChunkSize


@dataclass(frozen=True)
class Case:
    """What a call of paged_attention looks like; `build` makes its tensors."""

    name: str
    seq_lens: tuple[int, ...] = (1, 17, 40)
    query_lens: int | tuple[int, ...] | None = None  # tuple: ragged; None: a query without q_len
    padding: int = 0  # ragged query tokens that belong to no sequence
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None  # None: dtype
    layout: str = "nhd"  # one of LAYOUTS, see make_pools
    scale_kind: str = "none"  # of k_scale and v_scale: none, float, tensor, head, token
    scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    chunk_size: ChunkSize = None
    index_dtype: torch.dtype = torch.int32
    table_layout: str = "dense"  # dense, transposed, spread

    @property
    def pool_dtype(self) -> torch.dtype:
        """The dtype of the cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    def replace(self, **changes: Any) -> Case:
        """A variation of this case."""
        return dataclasses.replace(self, **changes)


CASES = (
    Case("one_token", seq_lens=(1,)),
    Case("block_edges", seq_lens=(15, 16, 17, 31, 32, 33)),
    Case("bf16", dtype=torch.bfloat16),
    Case("fp32", dtype=torch.float32),
    Case("empty_sequences", seq_lens=(0, 3, 0)),
    Case("query_len_4", query_lens=4, seq_lens=(4, 9, 37)),
    Case("query_longer_than_context", query_lens=4, seq_lens=(2, 0, 5)),
    Case("ragged", query_lens=(3, 1, 0, 5), seq_lens=(10, 1, 7, 5), padding=2),
    Case("ragged_int64", query_lens=(2, 3), seq_lens=(40, 3), index_dtype=torch.int64),
    Case("not_causal", query_lens=3, seq_lens=(3, 9, 37), causal=False),
    Case("window", sliding_window=5, seq_lens=(4, 5, 6, 33)),
    Case("window_at_block_edges", query_lens=(3, 4), seq_lens=(33, 18), sliding_window=16),
    Case("window_of_one", query_lens=2, sliding_window=1),
    Case("window_not_causal", query_lens=4, sliding_window=6, causal=False),
    Case("softcap", softcap=2.0, scale=1.0, dtype=torch.float32),
    Case("alibi", alibi=True, num_q_heads=12, query_lens=2),
    Case("sinks", sinks=True, seq_lens=(1, 2, 33)),
    Case("sinks_without_keys", sinks=True, seq_lens=(0, 5), query_lens=2),
    Case("chunked", chunk_size=8, seq_lens=(1, 8, 9, 70)),
    Case("chunked_across_blocks", chunk_size=20, query_lens=3, seq_lens=(19, 21, 61)),
    Case("chunked_sinks", chunk_size=8, sinks=True, query_lens=2, seq_lens=(0, 8, 41)),
    Case("chunked_by_length", chunk_size="auto", seq_lens=(0, 512, 513, 700), query_lens=2),
    Case("hnd", layout="hnd"),
    Case("interleaved", layout="interleaved", block_size=7),
    Case("last_dim_split", layout="last_dim"),
    Case("padded", layout="padded", head_dim=80),
    Case("unaligned", layout="unaligned"),
    Case("strides_of_k_and_v_differ", layout="mixed", dtype=torch.bfloat16),
    Case("e4m3", kv_dtype=torch.float8_e4m3fn),
    Case("e4m3_per_head", kv_dtype=torch.float8_e4m3fn, scale_kind="head", num_kv_heads=4),
    Case("e4m3_per_token", kv_dtype=torch.float8_e4m3fn, scale_kind="token", layout="hnd"),
    Case("e4m3_unaligned", kv_dtype=torch.float8_e4m3fn, scale_kind="float", layout="unaligned"),
    Case("e5m2", kv_dtype=torch.float8_e5m2, scale_kind="tensor", dtype=torch.bfloat16),
    Case("e5m2_fp32", kv_dtype=torch.float8_e5m2, scale_kind="token", dtype=torch.float32),
    Case("int8", kv_dtype=torch.int8, scale_kind="float", layout="last_dim"),
    Case("int8_fp32", kv_dtype=torch.int8, scale_kind="tensor", dtype=torch.float32),
    Case("int8_per_head", kv_dtype=torch.int8, scale_kind="head", dtype=torch.bfloat16),
    Case("int8_per_token", kv_dtype=torch.int8, scale_kind="token", layout="interleaved"),
    Case("int64_indices", index_dtype=torch.int64, table_layout="spread"),
    Case("transposed_table", table_layout="transposed", block_size=2),
    Case("block_size_1", block_size=1, seq_lens=(1, 5, 33)),
    Case("multi_query", num_q_heads=64, num_kv_heads=1, query_lens=2, seq_lens=(2, 33)),
    Case("multi_head", num_q_heads=3, num_kv_heads=3),
    Case("widest_head", head_dim=512, seq_lens=(3, 33)),
    Case("negative_scale", scale=-0.3),
    Case("many_rows", num_q_heads=12, query_lens=9, seq_lens=(9, 70, 0, 33), sinks=True),
    Case("prefill", query_lens=150, seq_lens=(150, 171), dtype=torch.bfloat16, softcap=5.0),
    Case("prefill_window", query_lens=(90, 1, 70), seq_lens=(95, 60, 70), sliding_window=20),
    Case("many_rows_chunked", num_q_heads=40, query_lens=2, seq_lens=(70, 9), chunk_size=32),
    Case(
        "many_rows_e4m3_per_token",
        num_q_heads=36,
        query_lens=3,
        seq_lens=(3, 77, 200),
        kv_dtype=torch.float8_e4m3fn,
        scale_kind="token",
        layout="hnd",
    ),
    Case(
        "many_rows_wide",
        num_q_heads=20,
        query_lens=2,
        seq_lens=(35, 140),
        head_dim=248,
        alibi=True,
        block_size=7,
    ),
    Case(
        "many_rows_int8_wide",
        num_q_heads=18,
        query_lens=4,
        seq_lens=(35, 90),
        head_dim=208,
        dtype=torch.bfloat16,
        kv_dtype=torch.int8,
        scale_kind="token",
    ),
    Case(
        "everything",
        query_lens=(3, 0, 2, 1),
        padding=1,
        seq_lens=(45, 0, 1, 18),
        num_q_heads=12,
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
        scale_kind="token",
        layout="interleaved",
        scale=0.2,
        sliding_window=20,
        softcap=3.0,
        alibi=True,
        sinks=True,
        chunk_size=16,
        index_dtype=torch.int64,
        table_layout="transposed",
    ),
)
