"""What a worker says to the servers and hears from them: one message to each shard, one answer from each.

A server on this host is reached through a Unix socket and shared memory (`worker/local_server_link.py`), one on another
host over TCP (`worker/remote_server_link.py`). The last message to each is kept: a server that was restarted, or that a
broken connection kept from hearing it, is sent it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from safetensors.torch import load_file

from paceline.core.events import ParametersArrived
from paceline.core.messages import Parameters, Pull, Push
from paceline.core.worker import Worker
from paceline.errors import PacelineError
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.runtime.live.storage import endpoints
from paceline.runtime.live.storage.process_keys import find_keys
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.worker.local_server_link import LocalServerLink, ServerLink
from paceline.runtime.live.worker.outgoing_frames import RemotePayload
from paceline.runtime.live.worker.remote_server_link import EarlyServerLink, RemoteServerLink
from paceline.runtime.live.worker.worker_memory import WorkerMemory
from paceline.tensors import state, wire_precision
from paceline.tensors.assignment import Assignment, size
from paceline.tensors.piece_optimizers import Hyper, State

IDLE_S = 0.2
REMOTE_REST_S = 0.02
"""How long the links to other hosts are left alone while a server of this host is waited for."""


class ServerConnections:
    """A worker's links to all servers."""

    def __init__(
        self, run: RunConnection, machine: Worker, memory: WorkerMemory, deliver: Callable[[ParametersArrived], None]
    ) -> None:
        self.run = run
        self.machine = machine
        self.memory = memory
        self.deliver = deliver
        self.links: list[ServerLink] = []
        self.remote: dict[int, RemoteServerLink] = {}
        """The links to other hosts, by shard."""
        self.endpoints: list[Endpoint] = []
        self.assignment: Assignment = ()
        """Which server has which part of the parameters."""
        self.slice_bytes: tuple[int, ...] = ()
        """How many bytes a gradient has for each server: in memory, or on its way to another host."""
        self.outbox: dict[int, list[Push | Pull]] = {}
        self.last_sent: dict[int, wire.Exchange] = {}
        self.sent_hyper: tuple[Hyper, ...] | None = None
        self.fetched: set[str] = set()

    @cached_property
    def payload(self) -> RemotePayload:
        """What travels to other hosts and back, once a server is there."""
        assert self.run.config.multihost is not None
        memory, multihost = self.memory, self.run.config.multihost
        codec = wire_precision.codec_of(multihost.wire)
        return RemotePayload(memory.layout, memory.own, memory.gradient, memory.gathered, codec)

    # Links.

    def connect_all(self, assignment: Assignment, at: Sequence[Endpoint]) -> None:
        """Connects to the servers, each in its present incarnation. What each has is by `assignment`."""
        known = dict(zip(enumerate(self.endpoints), self.links, strict=True))
        self.assignment = assignment
        self.links = [known.pop(each) if each in known else self.connect(*each) for each in enumerate(at)]
        for link in known.values():
            self.disconnect(link)
        for link, part in zip(self.links, assignment, strict=True):
            link.assign(part)
        self.endpoints = list(at)
        self.choose_paths()

    def connect(self, shard: int, endpoint: Endpoint) -> ServerLink:
        """Makes a link to this server."""
        run = self.run
        process = (run.rank, run.incarnation)
        multihost = run.config.multihost
        if multihost is None or multihost.shared_memory:
            local = endpoints.connect(run.folder, process, shard, endpoint)
            if local is not None:
                return LocalServerLink(local)
        if multihost is None or not endpoint.address:
            raise PacelineError(f"server {shard} is on another host, and listens to its own only")
        keys = find_keys(run.folder, *process) if multihost.keys else None
        kind = EarlyServerLink if self.payload.leaves_early else RemoteServerLink
        remote = kind(endpoint, b"%d:%d" % process, run.config.run, keys, self.payload, run.folder)
        run.waiter.watch(remote.link)
        return remote

    def kinds(self) -> tuple[str, ...]:
        """Says how each server is reached."""
        multihost = self.run.config.multihost
        remote = "tcp with keys" if multihost is not None and multihost.keys else "tcp"
        return tuple(remote if shard in self.remote else "memory" for shard in range(len(self.links)))

    def disconnect(self, link: ServerLink) -> None:
        if isinstance(link, RemoteServerLink):
            self.run.waiter.forget(link.link.fileno())
        link.close()

    def choose_paths(self) -> None:
        """Has gradients and parameters travel as suits the servers that there are now."""
        self.remote = {shard: link for shard, link in enumerate(self.links) if isinstance(link, RemoteServerLink)}
        itemsize = self.memory.layout.itemsize
        self.slice_bytes = tuple(
            self.payload.nbytes(part) if shard in self.remote else size(part) * itemsize
            for shard, part in enumerate(self.assignment)
        )
        gathers = len(self.remote) == len(self.links) and self.payload.gathers
        early = [link for link in self.remote.values() if isinstance(link, EarlyServerLink)]
        here = self.memory.device_name
        if here and not all(endpoint.device for endpoint in self.endpoints):
            raise PacelineError("a server has come back without the device that the model is on: start the run again")
        common = all(endpoint.common and endpoint.device == here for endpoint in self.endpoints)
        self.memory.follow(common, gathers, early)

    def follow_restart(self, shard: int, endpoint: Endpoint) -> None:
        """A server was restarted: what was said to its last incarnation is said again."""
        self.sent_hyper = None
        if self.links[shard].gone or self.endpoints[shard] != endpoint:
            self.disconnect(self.links[shard])
            self.endpoints[shard] = endpoint
            link = self.links[shard] = self.connect(shard, endpoint)
            link.assign(self.assignment[shard])
            self.choose_paths()
            self.send_again(shard)

    def reconnect(self, shard: int) -> None:
        """Nobody is at the other end: on another host somebody may be, all the same."""
        if self.links[shard].reconnect():
            self.send_again(shard)

    def close(self) -> None:
        for link in self.links:
            self.disconnect(link)

    # Sending.

    def defer(self, shard: int, message: Push | Pull) -> None:
        """Sends a message with the next `flush`."""
        self.outbox.setdefault(shard, []).append(message)

    def flush(self, absent: tuple[int, ...] = (), hyper: tuple[Hyper, ...] | None = None, refusal: str = "") -> None:
        """Sends what the machine has ordered: one message to each shard."""
        for shard, messages in self.outbox.items():
            exchange = wire.Exchange(tuple(messages), hyper, absent, refusal)
            self.links[shard].send(exchange)
            # After a rest the pull comes alone: to a server that was restarted, its push is to be said again too.
            before = self.last_sent.get(shard)
            if before is not None and isinstance(before.messages[-1], Push):
                exchange = msgspec.structs.replace(before, messages=(*before.messages, *messages))
            self.last_sent[shard] = exchange
        self.outbox.clear()

    def change_hyper(self, hyper: tuple[Hyper, ...] | None) -> tuple[Hyper, ...] | None:
        """Returns the hyper-parameters if they are to be sent, having changed."""
        before, self.sent_hyper = self.sent_hyper, hyper
        return None if hyper is before or hyper == before else hyper

    def forget_sent(self) -> None:
        """Servers have changed, and everything was answered."""
        self.sent_hyper = None
        self.last_sent.clear()

    def send_again(self, shard: int) -> None:
        """If this server's answer is waited for, or will be, it may never have seen our push.

        Its part of the segment may hold anything, so the gradient goes there once more.
        """
        if shard in self.last_sent and (shard in self.machine.waiting or self.machine.pausing):
            self.memory.restore(self.assignment[shard])
            self.links[shard].send(self.last_sent[shard])

    # Receiving.

    def receive_any(self, shards: Collection[int], timeout_s: float) -> bool:
        """Takes the answer of whoever of these shards answers; whether one did. If all are gone, at once.

        Meanwhile the links to servers on other hosts are all looked after: what one of them has not got yet, this one
        may be waiting for by way of another worker.
        """
        if len(self.links) == 1:
            return not self.links[0].gone and self.receive(0, timeout_s)
        there = [shard for shard in shards if not self.links[shard].gone]
        if not there:
            return False
        if not self.remote:
            return self.receive(min(there), timeout_s)
        local = [shard for shard in there if shard not in self.remote]
        received = bool(local) and self.receive(min(local), REMOTE_REST_S)
        ready = self.run.waiter.wait(0.0 if local else timeout_s)
        for shard, link in self.remote.items():
            if link.link in ready:
                received |= self.receive(shard, 0.0)
        return received

    def receive(self, shard: int, timeout_s: float) -> bool:
        """Takes a shard's answer, if it comes within the time; whether it did."""
        message = self.links[shard].receive(timeout_s)
        if message is None:
            return False
        if isinstance(message, Parameters):
            self.deliver(ParametersArrived(self.run.now(), message))
        elif message.error:
            raise PacelineError(f"a server could not hand over its optimizer's state: {message.error}")
        else:
            self.fetched.add(message.file)
        return True

    def folder_of(self, shard: int) -> Path:
        """Returns where a server of this host leaves files for this worker: another launcher may have started it."""
        if shard in self.remote:
            return self.run.folder
        return endpoints.shared_folder(self.run.folder, self.endpoints[shard]) or self.run.folder

    def fetch_state(self, hear_driver: Callable[[], None]) -> State:
        """Returns the optimizer's whole state, from all servers."""
        run, parts = self.run, []
        for shard in range(len(self.links)):
            file = f"state-{run.rank}.{run.incarnation}-{shard}"
            self.fetched.discard(file)
            self.links[shard].send(wire.Fetch(file))
            while file not in self.fetched:
                if not self.receive(shard, IDLE_S) and self.links[shard].gone:
                    run.waiter.wait(IDLE_S)
                    self.reconnect(shard)
                    hear_driver()
                    self.links[shard].send(wire.Fetch(file))
            left = self.folder_of(shard) / file
            parts.append(load_file(left))
            left.unlink()
        return state.join(parts, self.memory.layout, self.assignment)
