"""The demo: the small model gives the same tokens over a paged and over a contiguous cache."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn import PagedKVCache, kv_pools
from paged_attn.__main__ import main
from paged_attn.tiny_lm import (
    ContiguousCache,
    PagedCache,
    Sampling,
    TinyConfig,
    TinyLM,
    generate,
)

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = TinyConfig()
PROMPT = torch.tensor(list(b"Every page goes into any frame, and a table says where."))


def paged_cache(block_size: int = 16, num_blocks: int = 512) -> PagedCache:
    return PagedCache(
        PagedKVCache(
            CONFIG.num_layers,
            num_blocks,
            block_size,
            CONFIG.num_kv_heads,
            CONFIG.head_dim,
            dtype=torch.float32,
        )
    )


def sample(cache: Any, prompt: Tensor = PROMPT, **kwargs: Any) -> Tensor:
    sampling = Sampling(**{"num_samples": 3, "max_new_tokens": 12, **kwargs})
    return generate(TinyLM(), cache, prompt, sampling)


def contiguous_cache(max_len: int = 128) -> ContiguousCache:
    return ContiguousCache(CONFIG, max_len, torch.device("cpu"))


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("prompt_len", [1, 55])
@pytest.mark.parametrize("chunk_size", [5, 512])
def test_tokens_are_identical(block_size: int, prompt_len: int, chunk_size: int) -> None:
    prompt = PROMPT[:prompt_len]
    paged = sample(paged_cache(block_size), prompt, chunk_size=chunk_size)
    assert torch.equal(paged, sample(contiguous_cache(), prompt, chunk_size=chunk_size))
    assert paged.shape == (3, 12)
    assert len({tuple(tokens) for tokens in paged.tolist()}) == 3  # samples differ


def test_a_missing_copy_on_write_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sample(contiguous_cache())
    monkeypatch.setattr(kv_pools, "copy_blocks", lambda *args: None)
    assert not torch.equal(sample(paged_cache()), right)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_one_wrong_block_changes_every_sample(block: int) -> None:
    class Damaged(PagedCache):
        def fork(self, num_samples: int) -> None:
            super().fork(num_samples)
            for pool in self.pool.key_caches + self.pool.value_caches:
                pool[block] = pool[(block + 1) % 3]

    right = sample(contiguous_cache())
    wrong = sample(Damaged(paged_cache().pool))
    assert (wrong != right).any(dim=1).all()


def test_samples_depend_on_their_seed_alone() -> None:
    three = sample(paged_cache())
    assert torch.equal(sample(paged_cache(), num_samples=1), three[:1])
    assert torch.equal(sample(paged_cache(), seed=1, num_samples=2), three[1:])
    before = torch.get_rng_state()
    noise = Sampling().noise(256)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.isfinite(noise).all()


def test_prompt_blocks_are_shared_and_given_back() -> None:
    cache = paged_cache()
    sample(cache)
    stats = cache.pool.manager.stats()
    # 55 tokens: 3 full blocks for all; the fourth, and a fifth for tokens 64 and 65, for each.
    assert (stats.blocks_shared, stats.blocks_used, stats.copies) == (3, 3 + 3 * 2, 2)
    cache.free()
    assert cache.pool.manager.num_free_blocks == cache.pool.manager.num_blocks


def test_model_is_the_same_every_time() -> None:
    torch.manual_seed(1)
    first = TinyLM().state_dict()
    torch.manual_seed(2)
    for name, weight in TinyLM().state_dict().items():
        assert torch.equal(weight, first[name])


def test_caches_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(ValueError, match="exceed max_len 16"):
        contiguous_cache(16).advance(17)
    cache = paged_cache()
    with pytest.raises(RuntimeError, match="call advance"):
        cache.attend(0, torch.zeros(1, 8, 32))


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--max-new-tokens", "8"]) == 0
    output = capsys.readouterr().out
    assert "tokens      identical" in output
    assert "128 of them shared, 3 copied on write" in output


def test_command_line_with_a_file_longer_than_max_len(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 2)
    arguments = ["--max-len", "100", "--max-new-tokens", "20", "--samples", "2", "--block-size"]
    assert main([str(text), *arguments, "5"]) == 0
    captured = capsys.readouterr()
    assert "reading the last 80 of 512 bytes" in captured.err
    assert "prompt      80 tokens, then 2 samples of 20" in captured.out


@pytest.mark.parametrize("prompt_len", [1, 16, 17])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("new_tokens", [1, 17])
def test_the_pool_of_the_command_line_is_large_enough(
    tmp_path: Path, prompt_len: int, block_size: int, new_tokens: int
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"x" * prompt_len)
    sizes = ["--block-size", str(block_size), "--max-new-tokens", str(new_tokens)]
    assert main([str(text), *sizes, "--max-len", "64", "--samples", "2"]) == 0


def test_different_tokens_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"a short text that ends inside a block")
    monkeypatch.setattr(kv_pools, "copy_blocks", lambda *args: None)
    assert main([str(text), "--max-new-tokens", "16"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file"], "cannot read no-such-file"),
        (["--samples", "0"], "must be at least 1, got 0"),
        (["--max-len", "64"], "--max-len above --max-new-tokens"),
        (["--block-size", "x"], "invalid"),
    ],
)
def test_command_line_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    assert message in capsys.readouterr().err


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--info"]) == 0
    assert "version" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
