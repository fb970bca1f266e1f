"""The servers of a run as the driver knows them: which are there, their incarnations and parts of the parameters."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.runtime.live.protocol import resizing_messages, wire
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.tensors.assignment import Assignment


class Servers:
    """Starts servers, tells them things, and has another number of them when that is ordered."""

    def __init__(
        self,
        count: int,
        start_process: Callable[[int, int], bool],
        tell: Callable[[int, wire.ToServer], None],
    ) -> None:
        """`start_process` starts an incarnation of one, if there is a place for it; `tell` sends one a message."""
        self.count = count
        self.start_process = start_process
        self.tell = tell
        self.there: set[int] = set()
        self.configured: set[int] = set()
        self.finished: set[int] = set()
        self.incarnations = [0] * count
        """How often each was started anew, those that were removed included."""
        self.endpoints: dict[int, Endpoint] = {}
        """Where each is spoken to, as it said."""
        self.retired: set[tuple[int, int]] = set()
        """(shard, incarnation) of those that were removed."""
        self.homeless: set[int] = set()
        """To be started when a host has a place for them."""
        self.assignment: Assignment = ()
        """Which has which part of the parameters."""
        self.started_s = time.monotonic()
        """When the last of them was started."""

    @property
    def all_there(self) -> bool:
        """The processes have started."""
        return len(self.there) == self.count

    @property
    def all_configured(self) -> bool:
        """False while one is being restarted: what it is told now would be lost."""
        return len(self.configured) == self.count

    @property
    def all_finished(self) -> bool:
        return len(self.finished) == self.count

    @property
    def current_endpoints(self) -> tuple[Endpoint, ...]:
        """Where each is, in its present incarnation."""
        return tuple(self.endpoints[shard] for shard in range(self.count))

    def start(self) -> None:
        """Start all, or, if they are to run on other hosts that are not there yet, note that they are to be."""
        for shard in range(self.count):
            self._start(shard)

    def _start(self, shard: int) -> None:
        self.started_s = time.monotonic()
        if not self.start_process(shard, self.incarnations[shard]):
            self.homeless.add(shard)

    def tick(self) -> None:
        """Start those that found no place, if there is one now."""
        for shard in sorted(self.homeless):
            self.homeless.discard(shard)
            self._start(shard)

    def restart(self, shard: int) -> None:
        """Starts the next incarnation of a server that has died."""
        self._forget(shard)
        self._start(shard)

    def _forget(self, shard: int) -> None:
        self.there.discard(shard)
        self.configured.discard(shard)
        self.incarnations[shard] += 1

    def remove_all(self) -> None:
        """There are none in this run after all."""
        self.count = 0
        self.there.clear()
        self.homeless.clear()

    def change(self, after: Assignment, order: resizing_messages.Reslice) -> None:
        """From now on there are so many: the last ones end or are started, the others get other parts."""
        before, self.count, self.assignment = self.count, len(after), after
        for shard in range(self.count, before):
            self.retired.add((shard, self.incarnations[shard]))
            self.tell(shard, resizing_messages.Retire())
            self._forget(shard)
        for shard in range(min(before, self.count)):
            self.configured.discard(shard)
            self.tell(shard, order)
        self.incarnations += [0] * (self.count - len(self.incarnations))
        for shard in range(before, self.count):
            self._start(shard)

    def tell_all(self, message: wire.ToServer) -> None:
        for shard in range(self.count):
            self.tell(shard, message)

    def tell_configured(self, message: wire.ToServer) -> None:
        """The others are told when they are."""
        for shard in self.configured:
            self.tell(shard, message)
