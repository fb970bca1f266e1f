"""What a worker says to the servers and hears from them: one message to each shard, one answer from each.

A server on this host is reached through a Unix socket and shared memory, one on another host over TCP (`doors.py`,
`abroad.py`). Whatever was said last is kept: a server that was restarted, or that a broken connection kept from
hearing it, is told again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.events import ParametersArrived
from paceline.core.messages import Parameters, Pull, Push
from paceline.errors import PacelineError
from paceline.runtime.live import wire
from paceline.runtime.live.across import doors
from paceline.runtime.live.across.abroad import Cargo, FarShard, find_keys
from paceline.runtime.live.configuration import Door
from paceline.runtime.live.sockets import Link
from paceline.runtime.live.worker.early import Ahead
from paceline.tensors import state
from paceline.tensors.assignment import Assignment, size
from paceline.tensors.steppers import Hyper, State

if TYPE_CHECKING:
    from paceline.runtime.live.worker.worker import LiveWorker

IDLE_S = 0.2
TEND_S = 0.02
"""How long the links to other hosts are left alone while a server of this host is waited for."""
MEND_S = 0.3
"""How long a broken connection to another host is left alone before it is tried again."""


class Talk:
    """A worker's talk with the servers."""

    def __init__(self, worker: LiveWorker) -> None:
        self.worker = worker
        self.links: list[Link | FarShard] = []
        self.doors: list[Door] = []
        self.assignment: Assignment = ()
        """Which server has which part of the parameters."""
        self.slice_bytes: tuple[int, ...] = ()
        self.outbox: dict[int, list[Push | Pull]] = {}
        self.said: dict[int, wire.Exchange] = {}
        """The last message to each shard."""
        self.sent_hyper: tuple[Hyper, ...] | None = None
        self.fetched: set[str] = set()
        self.cargo: Cargo | None = None
        """What travels, once a server is on another host."""
        self.mended_s: dict[int, float] = {}
        """When the link to each shard was opened anew."""

    def meet(self, assignment: Assignment, at: Sequence[Door]) -> None:
        """Connect to the servers, each in its present life. What each has is by `assignment`."""
        known: dict[tuple[int, Door], Link | FarShard] = dict(zip(enumerate(self.doors), self.links, strict=True))
        self.assignment = assignment
        self.links = [known.pop(each) if each in known else self.knock(*each) for each in enumerate(at)]
        for link in known.values():
            self.leave(link)
        for shard, link in enumerate(self.links):
            if isinstance(link, FarShard):
                link.carry(assignment[shard])
        self.doors = list(at)
        self.worker.find_parameters()
        self.slice_bytes = tuple(size(part) * self.worker.layout.itemsize for part in assignment)

    def knock(self, shard: int, door: Door) -> Link | FarShard:
        """A link to this server."""
        worker = self.worker
        process = (worker.rank, worker.incarnation)
        abroad = worker.config.abroad
        near = doors.knock(worker.folder, process, shard, door) if abroad is None or abroad.near else None
        if near is not None:
            return near
        if abroad is None or not door.address:
            raise PacelineError(f"server {shard} is on another host, and listens to its own only")
        if self.cargo is None:
            self.cargo = Cargo(worker.folder, worker.segments, abroad.wire)
        keys = find_keys(worker.folder, *process) if abroad.keys else None
        far = FarShard(door, worker.name, worker.config.run, keys, self.cargo)
        far.carry(self.assignment[shard])
        worker.waiter.watch(far.link)
        return far

    def leave(self, link: Link | FarShard) -> None:
        if isinstance(link, FarShard):
            self.worker.waiter.forget(link.link.fileno())
        link.close()

    def say(self, shard: int, message: Push | Pull) -> None:
        """With the next `flush`."""
        self.outbox.setdefault(shard, []).append(message)

    def flush(self, absent: tuple[int, ...] = (), hyper: tuple[Hyper, ...] | None = None, refusal: str = "") -> None:
        """Send what the machine has ordered: one message to each shard."""
        for shard, messages in self.outbox.items():
            exchange = wire.Exchange(tuple(messages), hyper, absent, refusal)
            self.tell(shard, exchange)
            # After a rest the pull comes alone: to a server that was restarted, its push is to be said again too.
            before = self.said.get(shard)
            if before is not None and isinstance(before.messages[-1], Push):
                exchange = msgspec.structs.replace(before, messages=(*before.messages, *messages))
            self.said[shard] = exchange
        self.outbox.clear()

    def tell(self, shard: int, request: wire.Exchange | wire.Fetch) -> None:
        link = self.links[shard]
        if isinstance(link, FarShard):
            link.say(request)
        else:
            link.send(wire.encode(request))

    def loosen(self, cargo: Cargo, gradients: Sequence[Tensor | None]) -> bool:
        """Whether this gradient goes to the servers from where it is, and need not be in a segment."""
        cargo.loose = gradients if self.all_gather() and cargo.may_be_loose(gradients) else ()
        return bool(cargo.loose)

    def fasten(self, cargo: Cargo) -> bool:
        """Whether the gradient was to go from where it is and cannot any more: a server is on this host by now."""
        if not cargo.loose or self.all_gather():
            return False
        cargo.loose = ()
        return True

    def all_gather(self) -> bool:
        """Whether every server can be sent what lies in several places."""
        return all(isinstance(link, FarShard) and link.gathers for link in self.links)

    def stage(self, index: int) -> None:
        """With `overlap`: this tensor's gradient is in the segment, and what is whole with it may leave."""
        ordered = self.worker.ordered
        if ordered is not None:
            for link in self.links:
                if isinstance(link, FarShard):
                    link.stage(index, ordered.iteration)

    def begin_attempt(self) -> None:
        """What has left early will not be pushed."""
        for ahead in self.all_ahead():
            ahead.begin()

    def end_attempt(self, changed: Iterable[int]) -> None:
        """What has left early will be pushed, but for these tensors'."""
        indices = tuple(changed)
        for ahead in self.all_ahead():
            ahead.end(indices)

    def all_ahead(self) -> list[Ahead]:
        return [link.ahead for link in self.links if isinstance(link, FarShard) and link.ahead is not None]

    def hear_any(self, shards: Collection[int], timeout_s: float) -> bool:
        """Hear whoever of these shards answers; whether one did. If all are gone, at once.

        Meanwhile the links to servers on other hosts are all looked after: what one of them has not got yet, this one
        may be waiting for by way of another worker.
        """
        if len(self.links) == 1:
            return not self.links[0].gone and self.hear(0, timeout_s)
        there = [shard for shard in shards if not self.links[shard].gone]
        if not there:
            return False
        far = [shard for shard, link in enumerate(self.links) if isinstance(link, FarShard)]
        if not far:
            return self.hear(min(there), timeout_s)
        near = [shard for shard in there if shard not in far]
        heard = bool(near) and self.hear(min(near), TEND_S)
        ready = self.worker.waiter.wait(0.0 if near else timeout_s)
        for shard in far:
            link = self.links[shard]
            if isinstance(link, FarShard) and link.link in ready:
                heard |= self.hear(shard, 0.0)
        return heard

    def hear(self, shard: int, timeout_s: float) -> bool:
        """Hear a shard's answer, if it comes within the time; whether it did."""
        link = self.links[shard]
        message: Parameters | wire.Fetched | None
        if isinstance(link, FarShard):
            message = link.hear(timeout_s)
        else:
            received = link.wait_for(timeout_s)
            message = None if received is None else wire.decode_from_shard(received)
        if message is None:
            return False
        self.take(message)
        return True

    def take(self, message: wire.Fetched | Parameters) -> None:
        if isinstance(message, wire.Fetched):
            if message.error:
                raise PacelineError(f"a server could not hand over its optimizer's state: {message.error}")
            self.fetched.add(message.file)
        else:
            self.worker.seat.tell(ParametersArrived(self.worker.now(), message))

    def mend(self, shard: int) -> None:
        """Nobody is at the other end. On another host somebody may be, all the same: try again, and say it again.

        On this host only the driver can tell when it is back.
        """
        link = self.links[shard]
        if isinstance(link, FarShard) and time.monotonic() - self.mended_s.get(shard, 0.0) > MEND_S:
            self.mended_s[shard] = time.monotonic()
            link.reopen()
            self.say_again(shard)

    def reopened(self, shard: int, door: Door) -> None:
        """A server was restarted: what was said to its last life is to be said again."""
        self.sent_hyper = None
        if self.links[shard].gone or self.doors[shard] != door:
            self.leave(self.links[shard])
            self.doors[shard] = door
            self.worker.find_parameters()
            self.links[shard] = self.knock(shard, door)
            self.say_again(shard)

    def say_again(self, shard: int) -> None:
        """If we wait for this server's answer, or are about to pull, it may never have seen our push.

        Its part of the segment may hold anything, so the gradient goes there once more.
        """
        worker = self.worker
        if shard not in self.said or not (shard in worker.machine.waiting or worker.machine.pausing):
            return
        worker.segments.restore(self.assignment[shard], worker.pushed)
        self.tell(shard, self.said[shard])

    def fetch_state(self) -> State:
        """The optimizer's whole state, from all servers."""
        worker = self.worker
        parts = []
        for shard in range(len(self.links)):
            file = f"state-{worker.rank}.{worker.incarnation}-{shard}"
            self.fetched.discard(file)
            self.tell(shard, wire.Fetch(file))
            while file not in self.fetched:
                if not self.hear(shard, IDLE_S) and self.links[shard].gone:
                    worker.waiter.wait(IDLE_S)
                    self.mend(shard)
                    worker.hear_driver()
                    self.tell(shard, wire.Fetch(file))
            parts.append(load_file(worker.folder / file))
            (worker.folder / file).unlink()
        return state.join(parts, worker.layout, self.assignment)

    def close(self) -> None:
        for link in self.links:
            self.leave(link)
