"""The driver's side of a run on several hosts: their agents, and the processes they run for it.

An agent offers places; the driver fills them with workers (and servers, if they are to be spread) and from then on
treats what runs there as its own children: they are told things, heard, killed and restarted through their agent. An
agent that says nothing for `LOST_S` is given up with all its processes: others do not wait for it any more. When it
speaks again it is dismissed; it then ends what it still has and offers its places anew, and the workers come back as
new incarnations. Nobody else decides who is a member (docs/decisions/0020).
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from paceline.core.messages import Resync, Role
from paceline.errors import PacelineError
from paceline.runtime.live import memory, wire
from paceline.runtime.live.across import dispatch, luggage
from paceline.runtime.live.across.far import FarListener, KeyPair
from paceline.runtime.live.across.luggage import Refused
from paceline.runtime.live.across.steady import Steady
from paceline.runtime.live.across.zeromq import is_key
from paceline.runtime.live.driver import vetting
from paceline.runtime.live.driver.children import Child
from paceline.tensors.assignment import Ranges

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

LOST_S = 2.5
LAST_WORDS_S = 10.0
"""How long the driver waits at the end for what the processes of other hosts have left."""
GOODBYE_S = 2.0
"""How long it waits until agents have heard that the run is over."""
JOIN = b"join"
"""Who speaks with the run's own key: somebody who wants to be known by one of his own."""
LARGEST = 1 << 27
"""Bytes of a message of an agent: a piece of a file, or the description of a model."""
AT_ONCE = 256
"""Messages heard before everything else has its turn."""


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


class FarChild(Child):
    """A process of another host."""

    def __init__(self, role: Role, rank: int, incarnation: int, host: Host, number: int) -> None:
        super().__init__(role, rank, incarnation, 0, -number, lambda: self.code)
        self.host = host
        self.code = 0
        self.is_lost = False
        """Its agent is silent; nobody knows what became of it."""

    def signal(self, number: int) -> None:
        self.host.say(dispatch.Signal(self.role, self.rank, self.incarnation, number))

    def reap(self) -> int:
        return self.code


@dataclass
class Host:
    """An agent, as the driver knows it."""

    name: bytes
    label: str
    steady: Steady
    servers: int = 0
    ranks: list[int] = field(default_factory=list)
    children: dict[tuple[Role, int, int], FarChild] = field(default_factory=dict)
    shards: tuple[int, ...] = ()
    """Which servers its places are for, if its launcher says."""
    last_code: int = 0
    """With which the last of them that ended has."""

    def say(self, message: dispatch.ToAgent, frames: tuple[bytes, ...] = ()) -> None:
        self.steady.say(dispatch.encode(message), frames)

    def __str__(self) -> str:
        return f"host {self.label}"


class Hosts:
    """All agents of a run."""

    def __init__(self, driver: Driver, meeting: Meeting) -> None:
        self.driver = driver
        self.meeting = meeting
        self.listener = FarListener(meeting.host, (meeting.port, meeting.port), meeting.keys, LARGEST, hwm=0)
        if meeting.join:
            self.listener.enrol(meeting.join, JOIN)
        self.hosts: dict[bytes, Host] = {}
        self.stays: dict[bytes, str] = {}
        """The conversation each name is in, or was in last."""
        self.home: dict[int, Host] = {}
        """Where each worker belongs, also while its host is gone."""
        self.lost: dict[bytes, float] = {}
        """Hosts with workers that were given up, and when."""
        self.tokens: dict[str, str] = {}
        """The key by which each host that came with the run's key is known."""
        self.number = 0

    @property
    def address(self) -> str:
        return f"tcp://{self.meeting.advertise or self.meeting.host}:{self.listener.port}"

    def enrol(self, key: str, token: str) -> None:
        """The agent with this key may come."""
        self.listener.enrol(key, b"host:" + token.encode())

    # Hearing.

    def hear(self) -> None:
        for _ in range(AT_ONCE):
            if (received := self.listener.receive()) is None:
                return
            name, message, frames = received
            try:
                if name == JOIN and self.meeting.join:
                    self._take_knock(dispatch.decode_knock(message))
                else:
                    self._hear(name, dispatch.decode_numbered(message), frames)
            except (*wire.BAD_MESSAGE, Refused) as error:
                print(f"refused a message of {name.decode(errors='replace')}: {error}", file=sys.stderr)

    def _take_knock(self, knock: dispatch.Knock) -> None:
        """Somebody with the run's key wants to be known by one of his own, and not as somebody else."""
        taken = {key: token for token, key in self.tokens.items()}
        if not is_key(knock.key) or knock.key == self.meeting.join or taken.get(knock.key, knock.token) != knock.token:
            raise Refused("its key is none, or somebody else's")
        if self.tokens.setdefault(knock.token, knock.key) != knock.key:
            raise Refused("it wants the name of another host")
        self.enrol(knock.key, knock.token)

    def _hear(self, name: bytes, numbered: dispatch.Numbered, frames: list[memoryview]) -> None:
        if self.meeting.keys is None and not name.startswith(b"host:"):
            raise Refused("it is no agent")
        host = self.hosts.get(name)
        message = dispatch.decode_from_agent(numbered.body)
        if host is None or host.steady.stay != numbered.stay:
            if isinstance(message, dispatch.Arrive) and numbered.number == 1 and self.stays.get(name) != numbered.stay:
                if host is not None:
                    self._give_up(host, "has started anew")
                self._welcome(name, numbered, message)
            elif host is None:
                dismissed = dispatch.encode(dispatch.Dismissed())
                self.listener.send(name, dispatch.encode(dispatch.Numbered(numbered.stay, 0, 0, dismissed)))
            return
        if host.steady.take(numbered) and not isinstance(message, dispatch.Arrive):
            self._take(host, message, frames)

    def _welcome(self, name: bytes, numbered: dispatch.Numbered, arrive: dispatch.Arrive) -> None:
        driver = self.driver
        vetting.check_offer(arrive)
        steady = Steady(numbered.stay, lambda message, frames: self.listener.send(name, message, frames))
        steady.take(numbered)
        self.stays[name] = numbered.stay
        self.lost.pop(name, None)
        host = self.hosts[name] = Host(name, arrive.host, steady, arrive.servers)
        host.shards = arrive.ranks if not arrive.workers else ()
        if driver.stopping or driver.asked_to_finish:
            host.say(dispatch.Over("the run is ending", 0))
            return
        config = (driver.folder.path / "config").read_bytes()
        host.say(dispatch.Welcome(config, driver.begun, time.monotonic()))
        before = [rank for rank, home in self.home.items() if home.name == name]
        wanted = () if self.meeting.join else arrive.ranks  # who only has the run's key takes nobody's place
        for place in range(arrive.workers):
            rank = wanted[place] if place < len(wanted) else self._free_rank(before)
            if not driver.peers.has_place(rank):
                continue
            self._replace(rank)
            host.ranks.append(rank)
            self.home[rank] = host
            driver.start_worker(rank)
        if arrive.workers and not host.ranks:
            host.say(dispatch.Over(driver.peers.full, 1))
            return
        missing = 0 if driver.begun else driver.members.workers - len(self.home)
        rest = f" ({missing} still to come)" if missing > 0 else ""
        driver.say(f"{host} is there: {', '.join(f'worker {rank}' for rank in host.ranks) or 'for servers'}{rest}")

    def _replace(self, rank: int) -> None:
        """Another agent is for this worker now: the one it had, of another name, is not counted on any more."""
        before = self.home.get(rank)
        if before is not None:
            if self.hosts.get(before.name) is before:
                self._give_up(before, "has been replaced")
            self.lost.pop(before.name, None)

    def _free_rank(self, before: list[int]) -> int:
        """A rank that nobody has: one that this host had before, if it can be, or one of a host that is gone."""
        taken = {child.rank for child in self.driver.live_workers()}
        taken.update(rank for rank, home in self.home.items() if self.hosts.get(home.name) is home)
        free: int = next(rank for rank in (*before, *range(len(taken) + 1)) if rank not in taken)
        return free

    def _take(self, host: Host, message: dispatch.FromAgent, frames: list[memoryview]) -> None:
        driver = self.driver
        match message:
            case dispatch.Ping() | dispatch.Arrive():
                pass
            case dispatch.Started():
                self._take_started(host, message)
            case dispatch.Piece():
                vetting.check_file(host, message.file, message.size, driver.begun)
                content = frames[0] if frames else b""
                luggage.unpack(driver.folder.path, message.file, message.offset, message.size, content)
            case dispatch.Said():
                self._take_said(host, message)
            case dispatch.Goodbye():
                driver.say(f"{host} has left")
                self._forget(host)
            case dispatch.Ended():
                child = host.children.pop((message.role, message.rank, message.incarnation), None)
                if child is not None:
                    child.code = message.code
                    host.last_code = message.code
                    if message.last_words:
                        driver.say(message.last_words)
                    driver.children.pop(child.sentinel, None)
                    driver.child_ended(child)
                    self._consider_dismissing(host)
            case _:
                assert_never(message)

    def _consider_dismissing(self, host: Host) -> None:
        """A host that joined, and whose workers have all failed: it is told so, and others may have its places."""
        due = {rank for _, rank in self.driver.restarting.due}
        if self.meeting.join and host.last_code and not host.children and not due.intersection(host.ranks):
            host.say(dispatch.Over("its workers have failed", 1))
            self._forget(host)

    def _take_started(self, host: Host, started: dispatch.Started) -> None:
        """A process was started, with this key: a worker's, of this host, and nobody else's."""
        process = (started.rank, started.incarnation)
        if (started.role, *process) not in host.children:
            raise Refused(f"{host} has no {started.role} {started.rank}")
        if started.key and started.role == "worker":
            known = self.driver.enrolling.known
            if not is_key(started.key) or any(key == started.key and who != process for who, key in known.items()):
                raise Refused(f"the key of worker {started.rank} is none, or somebody else's")
            self.driver.enrolling.enrol(*process, started.key)

    def _take_said(self, host: Host, said: dispatch.Said) -> None:
        """A process of the host speaks to the driver: only for itself."""
        message = vetting.read_said(host, said)
        match message:
            case wire.Saved() if self.driver.keeper is not None and self.driver.keeper.under_way is not None:
                message = luggage.unpack_checkpoint(message, self.driver.folder.path, self.driver.keeper.under_way)
            case wire.Finished(shard):
                self._join_vectors(shard)
        self.driver.hear(message)

    def _join_vectors(self, shard: int) -> None:
        """A server of another host has left the whole vectors: its own part of them counts."""
        driver = self.driver
        layout = driver.lead.layout if driver.lead is not None else None
        if layout is None or shard >= len(driver.servers.assignment):
            raise Refused(f"server {shard} cannot have finished")
        part: Ranges = driver.servers.assignment[shard]
        for name in (memory.WHOLE, memory.AVERAGE):
            path = driver.folder.path / luggage.OF_SHARD.format(shard=shard, name=name)
            if path.exists():
                try:
                    theirs = memory.attach(path, layout)
                except PacelineError as error:
                    raise Refused(str(error)) from None
                ours = memory.attach(driver.folder.path / name, layout)
                for start, stop in part:
                    ours[start:stop] = theirs[start:stop]
                path.unlink()

    # Telling.

    def start(self, host: Host, role: Role, rank: int, incarnation: int) -> FarChild:
        self.number += 1
        child = host.children[role, rank, incarnation] = FarChild(role, rank, incarnation, host, self.number)
        host.say(dispatch.Start(role, rank, incarnation))
        return child

    def start_worker(self, rank: int, incarnation: int) -> FarChild:
        return self.start(self.home[rank], "worker", rank, incarnation)

    def release(self, child: Child) -> bool:
        """Do not count on this process any more, however it ends. False if it is on the driver's host."""
        if not isinstance(child, FarChild):
            return False
        child.host.children.pop((child.role, child.rank, child.incarnation), None)
        return True

    def has_home(self, rank: int) -> bool:
        """Whether the host this worker belongs to is there; if not, it starts it when it is back."""
        return rank in self.home and self.home[rank].name in self.hosts

    def place_server(self, shard: int) -> Host | None:
        """A host that has a place for this server, the emptiest first."""

        def load(host: Host) -> int:
            return sum(child.role == "server" for child in host.children.values())

        fit = [host for host in self.hosts.values() if not host.shards or shard in host.shards]
        free = [host for host in fit if load(host) < host.servers]
        return min(free, key=load, default=None)

    @property
    def places_for_servers(self) -> int:
        return sum(host.servers for host in self.hosts.values())

    def of(self, role: Role, rank: int, incarnation: int | None = None) -> Host | None:
        """Where this process runs, if on another host."""
        for host in self.hosts.values():
            for theirs in host.children:
                if theirs[:2] == (role, rank) and incarnation in (None, theirs[2]):
                    return host
        return None

    def tell_worker(self, host: Host, to: str, message: wire.ToWorker) -> None:
        for path in luggage.for_worker(message, self.driver.folder.path, self.driver.peers.active):
            self._send_file(host, path, path.name)
        host.say(dispatch.Tell(to, wire.encode(message)))

    def tell_server(self, host: Host, shard: int, message: wire.ToServer) -> None:
        for path, name in luggage.for_server(message, self.driver.folder.path, shard):
            self._send_file(host, path, name)
        host.say(dispatch.Tell(f"server:{shard}", wire.encode(message)))

    def ring(self, resync: Resync) -> None:
        host = self.of("worker", resync.worker, resync.incarnation)
        if host is not None:
            host.say(dispatch.Ring(resync.worker, resync.incarnation, resync.iteration))

    def _send_file(self, host: Host, path: Path, name: str) -> None:
        for offset, size, content in luggage.pieces(path):
            host.say(dispatch.Piece(name, offset, size), (content,))

    # Losing, ending.

    def tick(self) -> None:
        pong = dispatch.encode(dispatch.Pong())
        for host in list(self.hosts.values()):
            host.steady.tick(pong)
            if host.steady.silent_s > LOST_S:
                self._give_up(host, f"has been silent for {host.steady.silent_s:.1f} s")

    def _give_up(self, host: Host, why: str) -> None:
        """Count on none of its processes any more."""
        driver = self.driver
        del self.hosts[host.name]
        self.stays[host.name] = host.steady.stay
        due = {rank for _, rank in driver.restarting.due}
        if not host.children and not due.intersection(host.ranks):
            return
        driver.say(f"{host} {why}: its processes are given up until it is back")
        if host.ranks:
            self.lost[host.name] = time.monotonic()
        self._lose(host)

    def _lose(self, host: Host) -> None:
        for child in list(host.children.values()):
            child.is_lost, child.code = True, -signal.SIGKILL
            self.driver.children.pop(child.sentinel, None)
            self.driver.child_ended(child)

    def _forget(self, host: Host) -> None:
        """It is gone for good: its places are nobody's."""
        self.hosts.pop(host.name, None)
        for rank in [rank for rank, home in self.home.items() if home is host]:
            del self.home[rank]
        self._lose(host)

    @property
    def may_come_back(self) -> bool:
        """Nobody is there to train, but the first have not come, or somebody who was lost may come back."""
        driver = self.driver
        if not driver.begun:
            return True
        if driver.stopping or driver.ended_well or not self.lost:
            return False
        return time.monotonic() - max(self.lost.values()) < self.meeting.away_s

    def await_ended(self) -> None:
        """Hear the last of the processes of other hosts: what they have left comes with their end."""
        until = time.monotonic() + LAST_WORDS_S
        while any(host.children for host in self.hosts.values()) and time.monotonic() < until:
            self.driver.waiter.wait(0.05)
            self.hear()
            self.tick()

    def close(self) -> None:
        code = 0 if self.driver.done() and not self.driver.failures else 1
        for host in self.hosts.values():
            host.say(dispatch.Over("it has ended" if not code else "it has failed", code))
        until = time.monotonic() + GOODBYE_S
        while any(host.steady.unheard for host in self.hosts.values()) and time.monotonic() < until:
            self.driver.waiter.wait(0.02)
            self.hear()
        self.listener.close()
