"""python -m paged_attn: a small language model over a text, with a paged and a contiguous cache.

Prints whether both caches lead to the same tokens, and the memory that each needs. Exit status: 0
if the tokens are the same, 1 if not, 2 for arguments that do not fit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from paged_attn import build_info
from paged_attn.kv_cache import PagedKVCache
from paged_attn.tiny_lm import (
    ContiguousCache,
    GenerationCache,
    PagedCache,
    Sampling,
    TinyConfig,
    TinyLM,
    generate,
)

_SAMPLE = Path(__file__).parent / "data" / "sample.txt"
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class _Run:
    tokens: Tensor  # int64 [num_samples, max_new_tokens], CPU
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.info:
        print_info()
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA device")
    try:
        text = args.file.read_bytes()
    except OSError as error:
        parser.error(f"cannot read {args.file}: {error.strerror}")
    room = args.max_len - args.max_new_tokens
    if not text or room < 1:
        parser.error("need a text of at least one byte, and --max-len above --max-new-tokens")
    if len(text) > room:
        print(f"reading the last {room:,} of {len(text):,} bytes: --max-len", file=sys.stderr)
    return _demo(args, text[-room:])


def print_info() -> None:
    """Prints build_info(), a line for each entry."""
    info = build_info()
    width = max(map(len, info))
    for name, value in info.items():
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value)) or "none"
        print(f"{name:<{width}}  {value}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paged_attn",
        description="Samples from a small random language model with a paged and a contiguous KV "
        "cache, and compares tokens and memory.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=_SAMPLE, help="text to read (default: one shipped)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--block-size", type=_positive, default=16, help="tokens a block")
    parser.add_argument("--max-new-tokens", type=_positive, default=64, help="tokens a sample")
    parser.add_argument("--samples", type=_positive, default=4, help="samples of the one text")
    parser.add_argument(
        "--max-len",
        type=_positive,
        default=4096,
        help="tokens that the contiguous cache reserves for each sample",
    )
    parser.add_argument("--info", action="store_true", help="say what is built and used, and exit")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _demo(args: argparse.Namespace, text: bytes) -> int:
    config = TinyConfig()
    sampling = Sampling(num_samples=args.samples, max_new_tokens=args.max_new_tokens)
    device = torch.device(args.device)
    model = TinyLM(config).to(device)
    prompt = torch.tensor(list(text), device=device)
    pool = _pool_for(config, len(prompt), sampling, args.block_size, device)
    print(
        f"model       {config.num_layers} layers, {config.num_q_heads} query heads, "
        f"{config.num_kv_heads} KV heads of {config.head_dim}, fp32, on {device}\n"
        f"prompt      {len(prompt):,} tokens, then {sampling.num_samples} samples of "
        f"{sampling.max_new_tokens}"
    )

    warm_up = prompt[:_WARM_UP_TOKENS], Sampling(num_samples=1, max_new_tokens=2)
    for cache in (PagedCache(pool), ContiguousCache(config, args.max_len, device)):
        generate(model, cache, *warm_up)
        if isinstance(cache, PagedCache):
            cache.free()
    paged_cache = PagedCache(pool)
    paged = _timed("paged", model, paged_cache, prompt, sampling)
    contiguous_cache = ContiguousCache(config, args.max_len, device)
    contiguous = _timed("contiguous", model, contiguous_cache, prompt, sampling)

    stats = pool.manager.stats()
    reserved = contiguous_cache.storage.nbytes
    reserved_blocks = sampling.num_samples * -(-args.max_len // args.block_size)
    print(
        f"paged       {stats.blocks_used:,} blocks of {pool.block_size} tokens, "
        f"{stats.blocks_shared:,} of them shared, {stats.copies} copied on write; "
        f"{_mib(pool.bytes_used)}; {paged.seconds:.2f} s\n"
        f"contiguous  the room of {reserved_blocks:,} blocks, {sampling.num_samples} x "
        f"{args.max_len:,} tokens reserved; {_mib(reserved)}; {contiguous.seconds:.2f} s\n"
        f"memory      {reserved / pool.bytes_used:.1f} x less with pages"
    )
    for sample, tokens in enumerate(paged.tokens[:4].tolist()):
        print(f"sample {sample}    {bytes(tokens)[:24]!r}")
    same = torch.equal(paged.tokens, contiguous.tokens)
    print(f"tokens      {'identical' if same else 'DIFFERENT'}")
    return 0 if same else 1


def _pool_for(
    config: TinyConfig,
    prompt_len: int,
    sampling: Sampling,
    block_size: int,
    device: torch.device,
) -> PagedKVCache:
    """A pool of exactly the blocks that the samples need: full prompt blocks are there once."""
    shared = prompt_len // block_size
    # The last token of a sample is never written.
    each = -(-(prompt_len + sampling.max_new_tokens - 1) // block_size) - shared
    return PagedKVCache(
        config.num_layers,
        shared + max(1, sampling.num_samples * each),
        block_size,
        config.num_kv_heads,
        config.head_dim,
        dtype=torch.float32,
        device=device,
    )


def _timed(
    name: str, model: TinyLM, cache: GenerationCache, prompt: Tensor, sampling: Sampling
) -> _Run:
    total = len(prompt) + sampling.num_samples * (sampling.max_new_tokens - 1)
    # To stderr, where that is a terminal, and only if it takes longer than delay seconds.
    with tqdm(total=total, desc=name, unit="tok", delay=1.5, leave=False, disable=None) as bar:
        start = time.perf_counter()
        tokens = generate(model, cache, prompt, sampling, progress=bar.update).cpu()
        return _Run(tokens, time.perf_counter() - start)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
