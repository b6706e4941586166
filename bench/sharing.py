"""Blocks saved, and bytes not copied, where several outputs share a prompt."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from traces import Request, Trace

from paged_attn import BlockManager


@dataclass(frozen=True)
class Sharing:
    """Sums over the requests of a trace, each served alone."""

    method: str  # "parallel" or "beam"
    width: int  # samples or beams
    block_steps: int  # blocks in use, summed over the steps
    unshared_block_steps: int  # the same if nothing were shared
    tokens_copied: int  # copy-on-write
    contiguous_tokens_copied: int  # by a system with contiguous sequences

    @property
    def saved(self) -> float:
        """Share of the blocks that are not needed."""
        return 1 - self.block_steps / self.unshared_block_steps


class _Counter:
    """Counts what one manager does."""

    def __init__(self, request: Request, width: int, block_size: int) -> None:
        length = request.prompt_len + request.output_len
        self.manager = BlockManager(width * (length // block_size + 2), block_size)
        self.used = self.unshared = 0

    def count(self, seqs: Sequence[int]) -> None:
        manager = self.manager
        self.used += manager.pool.num_used
        self.unshared += sum(-(-length // manager.block_size) for length in manager.seq_lens(seqs))


def parallel(trace: Trace, width: int, count: int, block_size: int) -> Sharing:
    """`width` samples of each prompt; each has a length of its own."""
    rng = random.Random(width)
    used = unshared = copied = contiguous = 0
    for request in trace.requests(count):
        outputs = [trace.lengths(rng)[1] for _ in range(width)]
        longest = Request(0.0, request.prompt_len, max(outputs))
        counter = _Counter(longest, width, block_size)
        manager = counter.manager
        seqs = [manager.add(request.prompt_len)]
        seqs += [manager.fork(seqs[0]) for _ in outputs[1:]]
        contiguous += (width - 1) * request.prompt_len
        for step in range(1, max(outputs)):
            # The last token of a sample is not written.
            live = [seq for seq, n in zip(seqs, outputs, strict=True) if n > step]
            for seq, n in zip(seqs, outputs, strict=True):
                if n == step:
                    manager.free(seq)
            manager.append_batch(live, [1] * len(live))
            counter.count(live)
        used, unshared = used + counter.used, unshared + counter.unshared
        copied += manager.stats().copies * block_size
    return Sharing("parallel", width, used, unshared, copied, contiguous)


def beam(trace: Trace, width: int, count: int, block_size: int) -> Sharing:
    """Beam search over a model of a language model: see BeamScores."""
    rng = random.Random(width)
    used = unshared = copied = contiguous = 0
    for request in trace.requests(count):
        counter = _Counter(request, width, block_size)
        manager = counter.manager
        beams = [manager.add(request.prompt_len)]
        beams += [manager.fork(beams[0]) for _ in range(width - 1)]
        contiguous += (width - 1) * request.prompt_len
        scores = BeamScores(width, rng)
        for step in range(request.output_len - 1):
            parents = scores.step() if step else list(range(width))
            manager.reorder(beams, [beams[parent] for parent in parents])
            # A contiguous system leaves one child of each parent where it is, and copies others.
            contiguous += (width - len(set(parents))) * manager.seq_len(beams[0])
            manager.append_batch(beams, [1] * width)
            counter.count(beams)
        used, unshared = used + counter.used, unshared + counter.unshared
        copied += manager.stats().copies * block_size
    return Sharing("beam", width, used, unshared, copied, contiguous)


class BeamScores:
    """Which beams survive, if token probabilities follow Zipf's law.

    Each beam's next token of rank r has a probability proportional to r ** -s; s is drawn anew for
    each beam and step from [1, 4]: from flat to nearly certain. The `width` best of all candidates
    survive.
    """

    _VOCABULARY = 1000

    def __init__(self, width: int, rng: random.Random) -> None:
        self._rng = rng
        self._width = width
        self._scores = [0.0] * width
        self._log_sums = [
            math.log(sum(rank ** -(1 + 3 * i / 15) for rank in range(1, self._VOCABULARY)))
            for i in range(16)
        ]

    def step(self) -> list[int]:
        """The parent of each survivor. A survivor that can keeps its parent's place."""
        candidates = []
        for parent, score in enumerate(self._scores):
            i = self._rng.randrange(16)
            exponent = 1 + 3 * i / 15
            for rank in range(1, self._width + 1):
                gain = -exponent * math.log(rank) - self._log_sums[i]
                candidates.append((score + gain, parent))
        best = sorted(candidates, reverse=True)[: self._width]
        places: list[tuple[float, int] | None] = [None] * self._width
        others = []
        for candidate in best:
            if places[candidate[1]] is None:
                places[candidate[1]] = candidate
            else:
                others.append(candidate)
        filled = [place if place is not None else others.pop() for place in places]
        top = max(score for score, _ in filled)
        self._scores = [score - top for score, _ in filled]
        return [parent for _, parent in filled]
