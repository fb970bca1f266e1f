"""The other hosts of a run, and the processes that run there for the driver.

An agent offers places; the driver fills them with workers (and servers, if they are to be spread) and from then on
treats what runs there as its own children: they are told things, heard, killed and restarted through their agent
(docs/decisions/0020).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.messages import Resync, Role
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.messaging.reliable_channel import ReliableChannel
from paceline.runtime.live.messaging.remote_links import KeyPair, RemoteListener
from paceline.runtime.live.protocol import agent_messages, wire
from paceline.runtime.live.storage import file_transfer

JOIN = b"join"
"""The name of any caller that has the run's shared key only. All it may do is register a key of its own."""
LARGEST = 1 << 27
"""Bytes of a message of an agent: a piece of a file, or the description of a model."""


@dataclass(frozen=True)
class Meeting:
    """Where agents meet the driver, and what it counts on."""

    host: str
    port: int
    """0: any."""
    advertise: str
    keys: KeyPair | None
    """The driver's own; None: without keys."""
    join: str = ""
    """The public key of the run's key file, whose owners may come; "": only whose key the launcher knows."""
    spread: bool = False
    """The servers run where agents have places for them, not beside the driver."""
    away_s: float = 60.0
    """How long the run waits for hosts that were lost when nobody else is left."""


class RemoteChild(Child):
    """A process of another host."""

    def __init__(self, role: Role, rank: int, incarnation: int, host: RemoteHost, number: int) -> None:
        super().__init__(role, rank, incarnation, 0, -number, lambda: self.code)
        self.host = host
        self.code = 0
        self.is_lost = False
        """Its agent is silent; nobody knows what became of it."""

    @property
    def is_local(self) -> bool:
        return False

    def signal(self, number: int) -> None:
        self.host.say(agent_messages.Signal(self.role, self.rank, self.incarnation, number))

    def reap(self) -> int:
        return self.code


@dataclass
class RemoteHost:
    """An agent, as the driver knows it."""

    name: bytes
    label: str
    channel: ReliableChannel
    servers: int = 0
    ranks: list[int] = field(default_factory=list)
    children: dict[tuple[Role, int, int], RemoteChild] = field(default_factory=dict)
    shards: tuple[int, ...] = ()
    """Which servers its places are for, if its launcher says."""
    patience_s: float = 0.0
    """How much longer than usual it may be silent, as its line was when it was last connected."""
    last_code: int = 0
    """With which the last of them that ended has."""

    def say(self, message: agent_messages.ToAgent, frames: tuple[bytes, ...] = ()) -> None:
        self.channel.send(agent_messages.encode(message), frames)

    def __str__(self) -> str:
        return f"host {self.label}"


class RemoteHosts:
    """The agents that are there, and which processes belong to which."""

    def __init__(self, meeting: Meeting, folder: Path, state: RunState) -> None:
        self.meeting = meeting
        self.folder = folder
        self.state = state
        self.listener = RemoteListener(
            meeting.host, (meeting.port, meeting.port), meeting.keys, LARGEST, most_waiting=0
        )
        if meeting.join:
            self.listener.enrol(meeting.join, JOIN)
        self.hosts: dict[bytes, RemoteHost] = {}
        self.home: dict[int, RemoteHost] = {}
        """Where each worker belongs, also while its host is gone."""
        self.number = 0

    @property
    def address(self) -> str:
        return f"tcp://{self.meeting.advertise or self.meeting.host}:{self.listener.port}"

    def enrol(self, key: str, token: str) -> None:
        """The agent with this key may come."""
        self.listener.enrol(key, b"host:" + token.encode())

    def is_there(self, host: RemoteHost) -> bool:
        """Whether this is how the agent of that name is known now."""
        return self.hosts.get(host.name) is host

    def start(self, host: RemoteHost, role: Role, rank: int, incarnation: int) -> RemoteChild:
        self.number += 1
        child = host.children[role, rank, incarnation] = RemoteChild(role, rank, incarnation, host, self.number)
        host.say(agent_messages.Start(role, rank, incarnation))
        return child

    def start_worker(self, rank: int, incarnation: int) -> RemoteChild:
        return self.start(self.home[rank], "worker", rank, incarnation)

    def release(self, child: Child) -> bool:
        """Do not count on this process any more, however it ends. False if it is on the driver's host."""
        if not isinstance(child, RemoteChild):
            return False
        child.host.children.pop((child.role, child.rank, child.incarnation), None)
        return True

    def has_home(self, rank: int) -> bool:
        """Whether the host this worker belongs to is there; if not, it starts it when it is back."""
        return rank in self.home and self.home[rank].name in self.hosts

    def place_server(self, shard: int) -> RemoteHost | None:
        """A host that has a place for this server, the emptiest first."""

        def load(host: RemoteHost) -> int:
            return sum(child.role == "server" for child in host.children.values())

        fit = [host for host in self.hosts.values() if not host.shards or shard in host.shards]
        free = [host for host in fit if load(host) < host.servers]
        return min(free, key=load, default=None)

    @property
    def places_for_servers(self) -> int:
        return sum(host.servers for host in self.hosts.values())

    def of(self, role: Role, rank: int, incarnation: int | None = None) -> RemoteHost | None:
        """Where this process runs, if on another host."""
        for host in self.hosts.values():
            for theirs in host.children:
                if theirs[:2] == (role, rank) and incarnation in (None, theirs[2]):
                    return host
        return None

    def tell_worker(self, host: RemoteHost, to: str, message: wire.ToWorker) -> None:
        for path in file_transfer.for_worker(message, self.folder, self.state.without_servers):
            self._send_file(host, path, path.name)
        host.say(agent_messages.Tell(to, wire.encode(message)))

    def tell_server(self, host: RemoteHost, shard: int, message: wire.ToServer) -> None:
        for path, name in file_transfer.for_server(message, self.folder, shard):
            self._send_file(host, path, name)
        host.say(agent_messages.Tell(f"server:{shard}", wire.encode(message)))

    def ring(self, resync: Resync) -> None:
        host = self.of("worker", resync.worker, resync.incarnation)
        if host is not None:
            host.say(agent_messages.Ring(resync.worker, resync.incarnation, resync.iteration))

    def _send_file(self, host: RemoteHost, path: Path, name: str) -> None:
        for offset, size, content in file_transfer.pieces(path):
            host.say(agent_messages.Piece(name, offset, size), (content,))
