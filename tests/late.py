"""A stream that runs late, for tests without a GPU of what must wait for one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class LateStream:
    """Work is queued, and done when the test says so; events happen in the same order."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def queue(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Reads `source` when the stream gets to it, as a copy from pinned memory does."""
        self.queue(lambda: target.copy_(source))

    def make_event(self) -> LateEvent:
        return LateEvent(self)

    def run(self, count: int | None = None) -> None:
        """Does the first `count` pieces of work, or all."""
        count = len(self.work) if count is None else count
        for work in self.work[:count]:
            work()
        del self.work[:count]


class LateEvent:
    """See paged_attn.staging.Event."""

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.happened = False

    def record(self) -> None:
        self.happened = False
        self.stream.queue(lambda: setattr(self, "happened", True))

    def query(self) -> bool:
        return self.happened
