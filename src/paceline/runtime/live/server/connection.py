"""What ties a server's process to its run: who it is there, its sockets, its clock and its trace."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from paceline import private_files
from paceline.core.messages import Node, Parameters
from paceline.errors import PacelineError
from paceline.runtime.live.messaging.addresses import routable
from paceline.runtime.live.messaging.remote_links import KeyPair, RemoteListener, make_keys
from paceline.runtime.live.messaging.unix_sockets import Link, Listener, Waiter, server_path
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import Endpoint, LiveConfig, MultihostOptions
from paceline.runtime.live.storage import endpoints
from paceline.runtime.live.storage.trace_files import TimesFile, TraceFile


class ServerConnection:
    """A server's process before, and while, it has a part of the parameters."""

    def __init__(self, folder: Path, shard: int, incarnation: int) -> None:
        self.folder = folder
        self.shard = shard
        self.incarnation = incarnation
        self.config = msgspec.json.decode((folder / "config").read_bytes(), type=LiveConfig)
        self.listener = Listener(server_path(folder, shard, incarnation))
        self.driver = Link(folder / "driver", b"server:%d" % shard)
        self.remote: RemoteListener | None = None
        """For workers on other hosts, if there may be any."""
        address = key = ""
        if (multihost := self.config.multihost) is not None:
            keys = make_keys() if multihost.keys else None
            self.remote = listen(folder / f"port-{shard}", multihost, keys)
            address = f"tcp://{multihost.advertise or routable(multihost.host)}:{self.remote.port}"
            key = keys.public if keys is not None else ""
        self.endpoint = Endpoint(incarnation, str(folder), endpoints.read_nonce(folder), address, key)
        self.waiter = Waiter()
        self.waiter.watch(self.driver)
        self.trace = TraceFile(Path(self.config.output), Node("server", shard), incarnation)
        self.times = TimesFile(Path(self.config.output), Node("server", shard), incarnation)
        self.epoch_s: float | None = None
        """The monotonic time of the run's second 0, once it has begun."""

    def now(self) -> float:
        """Seconds since the run began; 0 until then."""
        return time.monotonic() - self.epoch_s if self.epoch_s is not None else 0.0

    def answer(self, parameters: Parameters) -> None:
        """Tells a worker of this host that its parameters are there.

        That the worker may be gone is not the server's business: the driver notices, and a view will say so.
        """
        self.listener.send(b"%d:%d" % (parameters.worker, parameters.incarnation), wire.encode(parameters))

    def tell(self, message: wire.ToDriver) -> None:
        """Sends a message to the driver."""
        self.driver.send(wire.encode(message))

    def enrol(self, order: wire.Enrol) -> None:
        """Lets in the worker of another host that has this key, or nobody under its name any more."""
        if self.remote is None:
            return
        if order.key:
            self.remote.enrol(order.key, order.name.encode())
        else:
            self.remote.expel(order.name.encode())

    def hear_workers(self) -> None:
        """Begins to accept workers. What they have said before waits until then."""
        if self.listener.waiter is None:
            self.waiter.watch(self.listener)
            if self.remote is not None:
                self.waiter.watch(self.remote)

    def close(self) -> None:
        self.trace.close()
        self.times.close()
        self.driver.close()
        self.listener.close()
        if self.remote is not None:
            self.remote.close()
        self.waiter.close()


def listen(file: Path, multihost: MultihostOptions, keys: KeyPair | None) -> RemoteListener:
    """A listener on the port of this server's last incarnation, which `file` names, if that is free; else on any."""
    listener = None
    if file.exists():
        port = int(file.read_text())
        try:
            listener = RemoteListener(multihost.host, (port, port), keys)
        except PacelineError:
            listener = None
    if listener is None:
        listener = RemoteListener(multihost.host, multihost.ports, keys)
    private_files.write(file, str(listener.port).encode())
    return listener
