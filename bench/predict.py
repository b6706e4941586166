"""What an H200 is expected to do, by counts and a model of five numbers. Nothing is measured here.

    python bench/predict.py

For each goal: the bytes that the decode kernel must move (K and V once, query, output, fragments,
block tables, plan), how much more than its share one CTA has at most by the plan's rule, and what
follows for the share of the measured read bandwidth. The model: a launch costs LAUNCH_US whatever
it does; then bytes flow at READ_BANDWIDTH times STREAM_SHARE, as long as every SM has enough in
flight; merging fragments costs MERGE_US where there are any, LEVEL_US more in two levels. The
first three are fitted to published timings of other kernels on an H100 and an H200, so that a line
below is no more than a check of arithmetic against the goals: bench/gpu_report.py measures.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from static_report import table

NUM_SMS = 132
READ_BANDWIDTH = 4.39e12  # bytes a second
STREAM_SHARE = 0.985
LAUNCH_US = 5.0
MERGE_US = 1.5
LEVEL_US = 1.5

HEAD_DIM = 128
BLOCK_SIZE = 16
ROWS = 8
OVERHEAD = 40  # tokens that a row tile costs beside its keys, as in csrc/cuda/decode.cpp
STEP = 16
DIRECT = 16  # fragments merged in one level


@dataclass(frozen=True)
class Goal:
    """A call, and the share of the measured read bandwidth that it is to reach."""

    num_q_heads: int
    num_kv_heads: int
    batch: int
    length: int
    kv_bytes: int
    share: float

    @property
    def name(self) -> str:
        """As the tables show it."""
        kind = "MHA" if self.num_q_heads == self.num_kv_heads else "GQA"
        dtype = "fp8" if self.kv_bytes == 1 else "bf16"
        heads = f"{self.num_q_heads}/{self.num_kv_heads}"
        return f"{kind} {heads}, {self.batch} x {self.length}, {dtype}"


GOALS = (
    *(Goal(32, 4, 64, 1024 << i, 2, share) for i, share in enumerate((0.77, 0.85, 0.91, 0.93))),
    Goal(32, 32, 64, 1024, 2, 0.93),
    Goal(32, 32, 1, 65536, 2, 0.93),
    Goal(32, 32, 1, 65536, 1, 0.89),
    Goal(32, 4, 1, 65536, 2, 0.72),
)


@dataclass(frozen=True)
class Plan:
    """How equal row tiles are cut, by the rule of csrc/kernels/plan.cuh."""

    imbalance: float  # tokens of the CTA with the most, over the mean of all
    fragments: int  # of all row tiles
    fragments_each: int  # of the row tile with the most


def make_plan(tiles: int, tokens: int, num_ctas: int) -> Plan:
    """Cuts `tiles` row tiles of as many tokens each."""
    cost = tokens + OVERHEAD
    total = tiles * cost
    mean = total / num_ctas
    each = -(-tiles // num_ctas)
    if each * cost <= 1.06 * mean:
        return Plan(each * num_ctas / tiles, 0, 1)
    tolerance = max(32, total // num_ctas // 64)
    places = []
    for index in range(num_ctas + 1):
        tile, rest = divmod(index * total // num_ctas, cost)
        token = max(0, rest - OVERHEAD) // STEP * STEP
        if tokens - token < tolerance <= token or token >= tokens:
            tile, token = tile + 1, 0
        elif token < tolerance:
            token = 0
        places.append((tile, token))
    position = [tile * tokens + token for tile, token in places]
    most_tokens = max(position[i + 1] - position[i] for i in range(num_ctas))
    inside = [tile for tile, token in places if token]
    most = max((inside.count(tile) + 1 for tile in set(inside)), default=1)
    return Plan(most_tokens * num_ctas / (tiles * tokens), len(inside) + len(set(inside)), most)


def predict(goal: Goal) -> list[str]:
    """Returns a line of the table."""
    num_ctas = 3 * NUM_SMS  # of 75 KiB each in 228
    tiles = goal.batch * goal.num_kv_heads
    plan = make_plan(tiles, goal.length, num_ctas)
    kv = 2 * tiles * goal.length * HEAD_DIM * goal.kv_bytes
    rows = goal.batch * goal.num_q_heads
    other = 2 * rows * HEAD_DIM * 2  # query and output
    live_rows = goal.num_q_heads // goal.num_kv_heads
    other += 2 * plan.fragments * live_rows * (HEAD_DIM + 1) * 4  # written and read
    other += tiles * -(-goal.length // BLOCK_SIZE) * 4 + (num_ctas + 1) * 20
    stream = (kv * plan.imbalance + other) / (READ_BANDWIDTH * STREAM_SHARE) * 1e6
    merge = 0.0 if plan.fragments == 0 else MERGE_US
    merge += LEVEL_US if plan.fragments_each > DIRECT else 0.0
    time = LAUNCH_US + stream + merge
    share = kv / READ_BANDWIDTH * 1e6 / time
    return [
        goal.name,
        f"{kv / 1e6:.1f}",
        f"{other / kv:.2%}",
        f"{plan.imbalance:.3f}",
        str(plan.fragments_each),
        f"{time:.1f}",
        f"{share:.0%}",
        f"{goal.share:.0%}",
    ]


def main() -> int:
    """Prints the table."""
    header = [
        "call",
        "KV MB",
        "other traffic",
        "most tokens / mean",
        "fragments a row tile",
        "µs",
        "share predicted",
        "goal",
    ]
    print(table(header, [predict(goal) for goal in GOALS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
