"""A device that is late on purpose: what is enqueued happens only when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor


class LateCopyStream:
    """A `CopyStream` without a GPU: whoever forgets to wait reads what was there before."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.most = 0
        """The longest the queue has been."""

    def enqueue(self, work: Callable[[], None], uses: Iterable[Tensor]) -> None:
        self.queue.append(work)
        self.most = max(self.most, len(self.queue))

    def hold_back(self) -> None:
        self.join()

    def join(self) -> None:
        while self.queue:
            self.queue.pop(0)()
