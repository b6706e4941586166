"""Requests of a server: lengths in the shape of two public data sets, Poisson arrivals.

The mean lengths are those of Kwon et al. 2023 (arXiv 2309.06180), figure 11: ShareGPT 161 tokens of
prompt and 338 of output, Alpaca 19 and 58. Only means are given there, so the shape is ours:
log-normal, with a standard deviation of the logarithm of 1.1 (ShareGPT) and 0.7 (Alpaca). A request
of more than 2,048 tokens, the context of OPT, is drawn again; the means are those before that.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MAX_LEN = 2048


@dataclass(frozen=True)
class Request:
    """One request."""

    arrival: float  # seconds
    prompt_len: int  # tokens
    output_len: int

    @property
    def total_len(self) -> int:
        """Tokens in the cache when it is done; the last one is never written."""
        return self.prompt_len + self.output_len - 1


@dataclass(frozen=True)
class Trace:
    """A distribution of lengths in tokens."""

    name: str
    prompt_mean: float
    output_mean: float
    sigma: float  # standard deviation of the logarithm

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output of one request."""
        while True:
            prompt, output = (
                max(1, round(rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)))
                for mean in (self.prompt_mean, self.output_mean)
            )
            if prompt + output <= MAX_LEN:
                return prompt, output

    def requests(self, count: int, rate: float = math.inf, seed: int = 0) -> list[Request]:
        """`count` requests in order of arrival, `rate` a second; infinite: all at once.

        The lengths depend on the seed alone, not on the rate.
        """
        sizes, times = random.Random(f"{self.name} {seed}"), random.Random(seed)
        requests, now = [], 0.0
        for _ in range(count):
            now += times.expovariate(1.0) / rate
            requests.append(Request(now, *self.lengths(sizes)))
        return requests


SHAREGPT = Trace("ShareGPT", 161.31, 337.99, 1.1)
ALPACA = Trace("Alpaca", 19.31, 58.45, 0.7)
TRACES = (SHAREGPT, ALPACA)
