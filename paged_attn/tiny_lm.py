"""A small byte-level transformer that generates text over a paged or a contiguous KV cache.

It is untrained (fixed random weights), so its text means nothing; what it shows is that a model
reads the same from a paged cache as from a contiguous one, and how little a paged one takes. The
model is a plain decoder: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), rotary positions (Su
et al. 2021, arXiv 2104.09864), grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from paged_attn.kv_cache import Batch, PagedKVCache

__all__ = [
    "ContiguousCache",
    "GenerationCache",
    "PagedCache",
    "Sampling",
    "TinyConfig",
    "TinyLM",
    "generate",
]


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model. Tokens are bytes."""

    vocab_size: int = 256
    num_layers: int = 2
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_dim: int = 512
    rope_base: float = 10000.0
    # Factor of the scores: attention picks out few tokens, so that one wrong block of the cache
    # shows in the text.
    sharpness: float = 8.0
    seed: int = 0

    @property
    def hidden_dim(self) -> int:
        """Width of the residual stream."""
        return self.num_q_heads * self.head_dim


class AttentionCache(Protocol):
    """What the model needs of a cache: store the new tokens of a layer, then attend to all."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores the new tokens' keys and values, each `[num_tokens, num_kv_heads, head_dim]`."""

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Causal attention of the new tokens, `[num_tokens, num_q_heads, head_dim]`."""


class GenerationCache(AttentionCache, Protocol):
    """What generate() needs: a cache that starts with one empty sequence."""

    def advance(self, query_len: int) -> None:
        """Makes room for `query_len` new tokens of every sequence: the next forward pass's."""

    def fork(self, num_samples: int) -> None:
        """Makes the one sequence `num_samples` equal ones."""


class PagedCache:
    """A GenerationCache over a PagedKVCache: samples share the blocks of their prompt."""

    def __init__(self, pool: PagedKVCache) -> None:
        self.pool = pool
        self.seq_ids = [pool.add()]
        self._batch: Batch | None = None

    def advance(self, query_len: int) -> None:
        """Raises OutOfBlocksError if the pool is too small."""
        self._batch = self.pool.step(self.seq_ids, query_len)

    def fork(self, num_samples: int) -> None:
        """Copies nothing; a sample's first write copies the partly filled last block."""
        self.seq_ids += [self.pool.fork(self.seq_ids[0]) for _ in range(num_samples - 1)]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See AttentionCache."""
        self.pool.write(layer, key, value, self._current())

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """See AttentionCache."""
        out: Tensor = self.pool.attend(layer, query, self._current())
        return out

    def free(self) -> None:
        """Gives all blocks back to the pool."""
        for seq_id in self.seq_ids:
            self.pool.free(seq_id)
        self.seq_ids, self._batch = [], None

    def _current(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("PagedCache: call advance() before a forward pass")
        return self._batch


class ContiguousCache:
    """A GenerationCache that reserves `max_len` tokens for every sequence: plain PyTorch."""

    def __init__(self, config: TinyConfig, max_len: int, device: torch.device) -> None:
        # Keys and values of all layers and sequences.
        shape = (config.num_layers, 2, 1, config.num_kv_heads, max_len, config.head_dim)
        self.storage = torch.zeros(shape, device=device)
        self.start, self.end = 0, 0  # the positions of the new tokens

    def advance(self, query_len: int) -> None:
        """Raises ValueError past `max_len`."""
        max_len = self.storage.shape[4]
        if self.end + query_len > max_len:
            raise ValueError(
                f"ContiguousCache: {self.end + query_len} tokens exceed max_len {max_len}"
            )
        self.start, self.end = self.end, self.end + query_len

    def fork(self, num_samples: int) -> None:
        """Copies the prompt for every sample."""
        self.storage = self.storage.repeat_interleave(num_samples, dim=2)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See AttentionCache."""
        for pool, rows in zip(self.storage[layer], (key, value), strict=True):
            pool[:, :, self.start : self.end] = self._split(rows)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """See AttentionCache."""
        keys, values = self.storage[layer, :, :, :, : self.end]
        position = torch.arange(self.start, self.end, device=query.device)
        visible = torch.arange(self.end, device=query.device) <= position[:, None]
        out = functional.scaled_dot_product_attention(
            self._split(query), keys, values, attn_mask=visible, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(query.shape)

    def _split(self, rows: Tensor) -> Tensor:
        """`[num_seqs * query_len, heads, d]` as `[num_seqs, heads, query_len, d]`."""
        query_len = self.end - self.start
        return rows.reshape(-1, query_len, *rows.shape[1:]).transpose(1, 2)


class _Layer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.num_kv_heads * config.head_dim
        self.qkv_sizes = [config.hidden_dim, kv_dim, kv_dim]
        self.attention_norm = nn.RMSNorm(config.hidden_dim)
        self.qkv = nn.Linear(config.hidden_dim, sum(self.qkv_sizes), bias=False)
        self.attention_out = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.mlp_norm = nn.RMSNorm(config.hidden_dim)
        self.mlp_in = nn.Linear(config.hidden_dim, config.mlp_dim, bias=False)
        self.mlp_out = nn.Linear(config.mlp_dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor, layer: int, cache: AttentionCache) -> Tensor:
        query, key, value = (
            part.reshape(len(x), -1, self.config.head_dim)
            for part in self.qkv(self.attention_norm(x)).split(self.qkv_sizes, dim=1)
        )
        cache.write(layer, _rotate(key, angles), value)
        attended = cache.attend(layer, _rotate(query * self.config.sharpness, angles))
        x = x + self.attention_out(attended.flatten(1))
        out: Tensor = x + self.mlp_out(functional.silu(self.mlp_in(self.mlp_norm(x))))
        return out


class TinyLM(nn.Module):
    """The model, fp32, with weights that depend on config.seed alone. Move it with .to(device)."""

    def __init__(self, config: TinyConfig | None = None) -> None:
        super().__init__()
        self.config = config = TinyConfig() if config is None else config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_dim)
        self.head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(config.seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    # Logits, and scores before sharpness, of a standard deviation about 1.
                    parameter.normal_(std=config.hidden_dim**-0.5, generator=generator)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: AttentionCache) -> Tensor:
        """Runs new tokens, int64 `[num_tokens]`, at their positions, int64 `[num_tokens]`.

        Returns the logits of the token that follows each, fp32 `[num_tokens, vocab_size]`.
        """
        half = self.config.head_dim // 2
        frequency = self.config.rope_base ** (-torch.arange(half, device=tokens.device) / half)
        angles = positions[:, None] * frequency  # [num_tokens, head_dim / 2]
        x = self.embedding(tokens)
        for layer, module in enumerate(self.layers):
            x = module(x, angles, layer, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _rotate(rows: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + d/2) of `[num_tokens, heads, d]` turned by their angles."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@dataclass(frozen=True)
class Sampling:
    """How generate() continues a prompt. Sample i depends on seed + i alone."""

    num_samples: int = 4
    max_new_tokens: int = 64
    temperature: float = 0.5
    seed: int = 0
    chunk_size: int = 512  # prompt tokens a forward pass

    def noise(self, vocab_size: int) -> Tensor:
        """Gumbel noise, fp32 `[max_new_tokens, num_samples, vocab_size]` on the CPU.

        The argmax of logits / temperature + noise is a sample of the softmax, and one that the last
        bits of the logits do not decide (Maddison et al. 2014, arXiv 1411.0030).
        """
        noise = torch.empty(self.num_samples, self.max_new_tokens, vocab_size)
        for sample, rows in enumerate(noise):
            rows.exponential_(generator=torch.Generator().manual_seed(self.seed + sample))
        return -noise.log().transpose(0, 1)


def generate(
    model: TinyLM,
    cache: GenerationCache,
    prompt: Tensor,
    sampling: Sampling,
    progress: Callable[[int], object] = lambda num_tokens: None,
) -> Tensor:
    """Samples several continuations of one prompt, all in one batch.

    prompt: int64 `[prompt_len]` on the model's device, not empty. cache: a fresh one. progress is
    called with the tokens that each forward pass ran. Returns int64
    `[num_samples, max_new_tokens]` on the same device. Copies no result to the host.
    """
    prompt_len = len(prompt)
    positions = torch.arange(prompt_len + sampling.max_new_tokens, device=prompt.device)
    noise = sampling.noise(model.config.vocab_size).to(prompt.device)
    logits = torch.empty(0)
    for start in range(0, prompt_len, sampling.chunk_size):
        chunk = prompt[start : start + sampling.chunk_size]
        cache.advance(len(chunk))
        logits = model(chunk, positions[start : start + len(chunk)], cache)
        progress(len(chunk))
    cache.fork(sampling.num_samples)
    logits = logits[-1].expand(sampling.num_samples, -1)
    samples: list[Tensor] = []
    for step in range(sampling.max_new_tokens):
        samples.append((logits / sampling.temperature + noise[step]).argmax(dim=1))
        if step + 1 < sampling.max_new_tokens:
            cache.advance(1)
            position = positions[prompt_len + step].expand(sampling.num_samples)
            logits = model(samples[-1], position, cache)
            progress(sampling.num_samples)
    return torch.stack(samples, dim=1)
