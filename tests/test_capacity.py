"""The capacity bench: its allocators and its counting by hand, and the claims on a short trace."""

from __future__ import annotations

import json
import random
from pathlib import Path

import capacity
import host
import pytest
import torch
from kv_memory import BuddyAllocator, ContiguousMemory, PagedMemory, Preemption, Usage
from serving import Machine, simulate
from sharing import BeamScores, beam, parallel
from traces import ALPACA, MAX_LEN, SHAREGPT, TRACES, Request, Trace

MACHINE = Machine()


# Traces.


def test_lengths_are_those_that_are_stated() -> None:
    for trace in TRACES:
        requests = trace.requests(4000)
        prompts = sum(r.prompt_len for r in requests) / len(requests)
        outputs = sum(r.output_len for r in requests) / len(requests)
        # The longest are drawn again, which takes a part of the mean.
        assert 0.8 * trace.prompt_mean < prompts < 1.05 * trace.prompt_mean
        assert 0.8 * trace.output_mean < outputs < 1.05 * trace.output_mean
        assert max(r.prompt_len + r.output_len for r in requests) <= MAX_LEN
        assert min(min(r.prompt_len, r.output_len) for r in requests) >= 1


def test_arrivals_are_poisson_and_lengths_do_not_depend_on_them() -> None:
    slow, fast = SHAREGPT.requests(2000, rate=2.0), SHAREGPT.requests(2000, rate=10.0)
    assert [r.prompt_len for r in slow] == [r.prompt_len for r in fast]
    assert slow[-1].arrival == pytest.approx(1000, rel=0.1)
    assert fast[-1].arrival == pytest.approx(slow[-1].arrival / 5)
    assert SHAREGPT.requests(3)[2].arrival == 0
    assert SHAREGPT.requests(20, seed=1) != SHAREGPT.requests(20)
    assert SHAREGPT.requests(20) == SHAREGPT.requests(20)


# Memory.


def test_buddies_do_not_overlap_and_join_again() -> None:
    rng = random.Random(0)
    buddies = BuddyAllocator(1000)
    taken: list[tuple[int, int]] = []
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            buddies.release(*taken.pop(rng.randrange(len(taken))))
            continue
        size = rng.randint(1, 300)
        found = buddies.allocate(size)
        if found is None:
            continue
        start, order = found
        assert size <= 1 << order < 2 * size
        assert start >= 0
        assert start + (1 << order) <= 1000
        for other, other_order in taken:
            assert start + (1 << order) <= other or other + (1 << other_order) <= start
        taken.append(found)
    for one in taken:
        buddies.release(*one)
    whole = [buddies.allocate(1 << order) for order in (9, 8, 7, 6, 5, 3)]
    assert all(whole)  # 1000 = 512 + 256 + 128 + 64 + 32 + 8
    assert buddies.allocate(1) is None


def test_reservations_by_hand() -> None:
    request = Request(0.0, prompt_len=10, output_len=25)
    expected = {
        "max": Usage(tokens=10, reserved=24, internal=2048 - 34),
        "pow2": Usage(tokens=10, reserved=24, internal=42 - 34),
        "oracle": Usage(tokens=10, reserved=24, internal=0),
    }
    for kind in capacity.RESERVATIONS:
        memory = ContiguousMemory(4096, kind)
        assert memory.admit(0, request)
        assert memory.usage() == expected[kind]
        assert memory.grow([0]) == []
        assert memory.usage().tokens == 11
        assert memory.usage().reserved == 23


def test_pages_by_hand() -> None:
    memory = PagedMemory(64, 16, watermark=0)
    assert memory.admit(0, Request(0.0, 10, 25))
    assert memory.admit(1, Request(0.0, 32, 1))
    assert memory.usage() == Usage(tokens=42, reserved=0, internal=6)
    assert not memory.admit(2, Request(0.0, 17, 1))
    assert memory.grow([0, 1]) == []
    assert memory.usage() == Usage(tokens=44, reserved=0, internal=20)
    memory.release(1)
    assert memory.usage() == Usage(tokens=11, reserved=0, internal=5)


def test_the_machine_is_that_of_the_paper() -> None:
    assert MACHINE.bytes_per_token == 800 * 1024
    assert MACHINE.total_slots == 15_728
    assert MACHINE.iteration_seconds(1, 0) == pytest.approx(26e9 / 1.555e12)


# The server.


def test_one_request_alone() -> None:
    (request,) = [Request(3.0, 10, 4)]
    outcome = simulate([request], PagedMemory(64, 16), MACHINE)
    seconds = sum(
        MACHINE.iteration_seconds(new, cached)
        for new, cached in ((10, 10), (1, 11), (1, 12), (1, 13))
    )
    assert outcome.seconds == pytest.approx(3.0 + seconds)
    assert outcome.seconds_per_token == pytest.approx(seconds / 4)
    assert (outcome.finished, outcome.preemptions) == (1, 0)
    assert outcome.requests_per_second == 0.0  # none ever waits


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_under_pressure_every_request_is_served(way: Preemption) -> None:
    requests = SHAREGPT.requests(60)
    memory = PagedMemory(3000, 16, way)
    outcome = simulate(requests, memory, MACHINE)
    assert outcome.finished == 60
    assert outcome.preemptions > 5
    assert (outcome.tokens_recomputed > 0) == (way == "recompute")
    assert (outcome.blocks_swapped > 0) == (way == "swap")
    assert memory.usage() == Usage(0, 0, 0)
    memory.manager.check_invariants()
    assert memory.manager.num_free_blocks == memory.manager.num_blocks


def test_what_can_never_fit_is_said() -> None:
    with pytest.raises(RuntimeError, match="does not fit into an empty cache"):
        simulate([Request(0.0, 100, 1)], PagedMemory(64, 16), MACHINE)
    with pytest.raises(RuntimeError, match="runs alone does not fit"):
        simulate([Request(0.0, 60, 10)], PagedMemory(64, 16), MACHINE)


def test_pages_waste_little_and_serve_more() -> None:
    requests = SHAREGPT.requests(300)
    outcomes = {
        name: simulate(requests, make(), MACHINE) for name, make in capacity.systems(MACHINE)
    }
    for outcome in outcomes.values():
        shares = (outcome.tokens, outcome.reserved, outcome.internal, outcome.external)
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
    contiguous = [outcomes[f"contiguous, {kind}"] for kind in capacity.RESERVATIONS]
    assert [round(outcome.tokens, 1) for outcome in contiguous] == [0.2, 0.3, 0.4]
    paged = outcomes["paged, 16"]
    assert paged.tokens > 0.94
    assert paged.internal < 0.04
    assert paged.running > 2.2 * contiguous[2].running
    for fewer, more in zip(contiguous, [*contiguous[1:], paged], strict=True):
        assert more.requests_per_second > 1.1 * fewer.requests_per_second
    tails = [outcomes[f"paged, {size}"].internal for size in capacity.BLOCK_SIZES]
    assert tails == sorted(tails)
    assert tails[0] == 0


# Sharing.


class Fixed(Trace):
    """Every request has the mean lengths."""

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        return int(self.prompt_mean), int(self.output_mean)


def test_parallel_samples_by_hand() -> None:
    # Six tokens of prompt, two samples of three: 7 and 8 tokens, in 2 blocks each; 3 with sharing.
    result = parallel(Fixed("", 6, 3, 0), 2, count=1, block_size=4)
    assert (result.block_steps, result.unshared_block_steps) == (6, 8)
    assert result.saved == 0.25
    assert result.tokens_copied == 4  # one block
    assert result.contiguous_tokens_copied == 6  # one prompt


def test_beams_that_always_survive_share_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeamScores, "step", lambda self: [0, 1])
    result = beam(Fixed("", 6, 3, 0), 2, count=1, block_size=4)
    assert (result.block_steps, result.unshared_block_steps) == (6, 8)
    assert (result.tokens_copied, result.contiguous_tokens_copied) == (4, 6)


def test_beams_of_one_parent_copy_its_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeamScores, "step", lambda self: [0, 0])
    result = beam(Fixed("", 5, 3, 0), 2, count=1, block_size=4)
    # Step 1 copies block 1; step 2 drops one of the two, and copies the other again.
    assert (result.tokens_copied, result.contiguous_tokens_copied) == (8, 5 + 6)


def test_scores_keep_survivors_in_their_places() -> None:
    scores = BeamScores(4, random.Random(0))
    distinct = []
    for _ in range(200):
        parents = scores.step()
        for place, parent in enumerate(parents):
            assert parents[parent] == parent or place != parent
        distinct.append(len(set(parents)))
    assert min(distinct) < 4
    assert max(distinct) > 1


def test_more_outputs_save_more() -> None:
    for trace in (SHAREGPT, ALPACA):
        for share in (parallel, beam):
            saved = [share(trace, width, 6, 16).saved for width in capacity.WIDTHS]
            assert 0 < saved[0] < saved[1] < saved[2] < 0.9


# The commands.


def test_a_short_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "TRACES", (SHAREGPT,))
    assert capacity.main(["--requests", "24", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "capacity.md").read_text()
    assert capsys.readouterr().out == text + "\n"
    for line in text.splitlines():
        assert line.startswith("|") == line.endswith("|")
    data = json.loads((tmp_path / "capacity.json").read_text())
    assert len(data["systems"]) == 8
    assert {row["system"]: row["sustained"] for row in data["systems"]}["paged, 16"] > 0
    assert len(data["sharing"]) == 6
    assert len(data["pressure"]) == 10
    assert [row["way"] for row in data["pressure"][:2]] == ["recompute", "swap"]
    if list(tmp_path.glob("*.png")):
        for name in ("sharegpt", "sharing"):
            assert (tmp_path / f"capacity_{name}.png").stat().st_size > 10_000
    else:
        with pytest.raises(ImportError):
            __import__("matplotlib")


def test_no_requests_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        capacity.main(["--requests", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_the_host_bench_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_NEW_TOKENS", 3)
    rows = host.measure(torch.device("cpu"), steps=3)
    assert len(rows) == 4 + 9
    assert all(row.value > 0 for row in rows)
