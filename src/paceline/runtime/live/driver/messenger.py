"""What the driver says to the processes of its run, on its own host or through the agent of another one."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.runtime.live.driver.remote_hosts import RemoteHosts
from paceline.runtime.live.messaging.unix_sockets import Listener
from paceline.runtime.live.protocol import resizing_messages, wire


@dataclass(eq=False)
class Messenger:
    """Sends messages to workers, servers, and whoever asked the driver for something."""

    listener: Listener
    hosts: RemoteHosts | None

    def to_worker(self, rank: int, incarnation: int, message: wire.ToWorker) -> None:
        name = f"worker:{rank}:{incarnation}"
        if self.hosts is not None and (host := self.hosts.of("worker", rank, incarnation)) is not None:
            self.hosts.tell_worker(host, name, message)
        else:
            self.listener.send(name.encode(), wire.encode(message))

    def to_server(self, shard: int, message: wire.ToServer) -> None:
        if self.hosts is not None and (host := self.hosts.of("server", shard)) is not None:
            self.hosts.tell_server(host, shard, message)
        else:
            self.listener.send(b"server:%d" % shard, wire.encode(message))

    def answer(self, requester: str, outcome: resizing_messages.Outcome) -> None:
        """Tells the process that asked for a change what came of it."""
        self.listener.send(requester.encode(), wire.encode(outcome))
