"""The driver's conversations with the agents of other hosts.

An agent that says nothing for `LOST_S`, longer where its line is slow, is given up with all its processes: others do
not wait for it any more. When it speaks again it is dismissed; it then ends what it still has and offers its places
anew, and the workers come back as new incarnations. Nobody else decides who is a member (docs/decisions/0020).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from paceline.errors import printable
from paceline.runtime.live.driver import agent_validation
from paceline.runtime.live.driver.agent_reports import AgentReports
from paceline.runtime.live.driver.host_arrivals import HostArrivals
from paceline.runtime.live.driver.remote_hosts import JOIN, RemoteHost, RemoteHosts
from paceline.runtime.live.messaging.keys import is_key
from paceline.runtime.live.messaging.reliable_channel import ReliableChannel
from paceline.runtime.live.messaging.unix_sockets import Waiter
from paceline.runtime.live.protocol import agent_messages, wire
from paceline.runtime.live.storage.file_transfer import MessageRefused

logger = logging.getLogger(__name__)

LOST_S = 2.5
LAST_WORDS_S = 10.0
"""How long the driver waits at the end for what the processes of other hosts have left."""
GOODBYE_S = 2.0
"""How long it waits until agents have heard that the run is over."""
AT_ONCE = 256
"""Messages heard before everything else has its turn."""


@dataclass(eq=False)
class AgentConversations:
    """Hears all agents, and notices which have fallen silent."""

    hosts: RemoteHosts
    arrivals: HostArrivals
    reports: AgentReports
    waiter: Waiter
    sessions: dict[bytes, str] = field(default_factory=dict)
    """The conversation each name is in, or was in last."""
    tokens: dict[str, str] = field(default_factory=dict)
    """The key by which each host that came with the run's key is known."""
    broken: set[bytes] = field(default_factory=set)
    """Hosts whose connection ended, and that have no other yet."""

    def hear(self) -> None:
        for _ in range(AT_ONCE):
            if (received := self.hosts.listener.receive()) is None:
                break
            name, message, frames = received
            try:
                if name == JOIN and self.hosts.meeting.join:
                    self._take_connect_request(agent_messages.decode_connect_request(message))
                else:
                    self._hear(name, agent_messages.decode_numbered(message), frames)
            except (*wire.BAD_MESSAGE, MessageRefused) as error:
                refused = f"refused a message of {name.decode(errors='replace')}: {error}"
                logger.warning(printable(refused))
                if not isinstance(error, MessageRefused):
                    self.hosts.listener.disconnect(name)
        self.broken.update(self.hosts.listener.gone())
        for name in [name for name in self.broken if self.hosts.listener.connected(name)]:
            self.broken.remove(name)
            if name in self.hosts.hosts:
                self.hosts.hosts[name].channel.retransmit()

    def _take_connect_request(self, connect: agent_messages.ConnectRequest) -> None:
        """Somebody with the run's key wants to be known by one of his own, and not as somebody else."""
        taken = {key: token for token, key in self.tokens.items()}
        if (
            not is_key(connect.key)
            or connect.key == self.hosts.meeting.join
            or taken.get(connect.key, connect.token) != connect.token
        ):
            raise MessageRefused("its key is none, or somebody else's")
        if self.tokens.setdefault(connect.token, connect.key) != connect.key:
            raise MessageRefused("it wants the name of another host")
        self.hosts.enrol(connect.key, connect.token)

    def _hear(self, name: bytes, numbered: agent_messages.Numbered, frames: list[memoryview]) -> None:
        if self.hosts.meeting.keys is None and not name.startswith(b"host:"):
            raise MessageRefused("it is no agent")
        host = self.hosts.hosts.get(name)
        message = agent_messages.decode_from_agent(numbered.body)
        if host is None or host.channel.session != numbered.session:
            if (
                isinstance(message, agent_messages.Arrive)
                and numbered.number == 1
                and self.sessions.get(name) != numbered.session
            ):
                if host is not None:
                    self.arrivals.give_up(host, "has started anew")
                self._welcome(name, numbered, message)
            elif host is None:
                dismissed = agent_messages.encode(agent_messages.Dismissed())
                numbered = agent_messages.Numbered(numbered.session, 0, 0, dismissed)
                self.hosts.listener.send(name, agent_messages.encode(numbered))
            return
        if host.channel.accept(numbered) and not isinstance(message, agent_messages.Arrive):
            self.reports.take(host, message, frames)

    def _welcome(self, name: bytes, numbered: agent_messages.Numbered, arrive: agent_messages.Arrive) -> None:
        agent_validation.check_offer(arrive)
        listener = self.hosts.listener
        channel = ReliableChannel(
            numbered.session,
            lambda message, frames: listener.send(name, message, frames),
            lambda: listener.connected(name) and not listener.is_sending(name),
        )
        channel.accept(numbered)
        self.sessions[name] = numbered.session
        self.arrivals.welcome(RemoteHost(name, printable(arrive.host[:100]), channel, arrive.servers), arrive)

    def tick(self) -> None:
        pong = agent_messages.encode(agent_messages.Pong())
        for host in list(self.hosts.hosts.values()):
            host.channel.tick(pong)
            if self.hosts.listener.connected(host.name):
                host.patience_s = self.hosts.listener.patience_s(host.name)
            if host.channel.silent_s > LOST_S + host.patience_s:
                self.arrivals.give_up(host, f"has been silent for {host.channel.silent_s:.1f} s")

    def await_ended(self) -> None:
        """Hear the last of the processes of other hosts: what they have left comes with their end."""
        until = time.monotonic() + LAST_WORDS_S
        while any(host.children for host in self.hosts.hosts.values()) and time.monotonic() < until:
            self.waiter.wait(0.05)
            self.hear()
            self.tick()

    def say_goodbye(self, failed: bool) -> None:
        """Tell all that the run is over, and wait until they have heard it."""
        for host in self.hosts.hosts.values():
            host.say(agent_messages.Over("it has failed" if failed else "it has ended", int(failed)))
        until = time.monotonic() + GOODBYE_S
        while any(host.channel.unacknowledged for host in self.hosts.hosts.values()) and time.monotonic() < until:
            self.waiter.wait(0.02)
            self.hear()
