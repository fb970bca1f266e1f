"""A host's part in a run: an agent that runs processes for the driver of another host.

It has a folder of its own with the names the driver's has, and to its processes it is the driver: what they send to the
Unix socket there it passes on, what the driver sends to them it hands over, with the files that belong to it
(`storage/file_transfer.py`). It starts, watches and ends them as it is ordered. If the driver is silent the agent waits
for it, and its processes do; when it is dismissed, having been silent too long itself, it ends them and offers its
places anew.

Each part has one job: `driver_connection.py` (the channel to the driver), `local_processes.py` (the processes of this
host), `host_state.py` (what the driver has said of the run).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from paceline.core.messages import Role
from paceline.errors import printable
from paceline.runtime.live.driver.children import Child, WorkerStarter
from paceline.runtime.live.messaging.addresses import host_and_port, leading_to
from paceline.runtime.live.messaging.remote_links import KeyPair
from paceline.runtime.live.messaging.unix_sockets import Listener, Waiter
from paceline.runtime.live.multihost.driver_connection import DriverConnection
from paceline.runtime.live.multihost.host_state import HostState, Unwelcomed, Welcomed
from paceline.runtime.live.multihost.local_processes import LocalProcesses
from paceline.runtime.live.protocol import agent_messages, wire
from paceline.runtime.live.storage import file_transfer, shared_memory
from paceline.runtime.live.storage.abort_flag import AbortFlag
from paceline.runtime.live.storage.abort_flag import path as abort_flag_path
from paceline.runtime.live.storage.trace_files import SUFFIXES

TICK_S = 0.2


@dataclass(frozen=True)
class AgentOffer:
    """What an agent offers, and to whom."""

    address: str
    server_key: str
    """The driver's public key; "" without keys."""
    keys: KeyPair | None
    token: str
    """The agent's name among the hosts of the run."""
    workers: int = 1
    servers: int = 0
    ranks: tuple[int, ...] = ()
    patience_s: float = 60.0
    """How long it waits for a driver that is silent."""
    advertise: str = ""
    """The address by which others reach this host's servers; "" for that of the interface to the driver."""
    policy: str | None = None
    """The policy of this host's own command line, if it has one: only then may it be in a file of this host."""

    def places(self, role: Role) -> int:
        return self.servers if role == "server" else self.workers


class Agent:
    """Runs the processes of one host. `starter` starts workers; `say` gets lines for a person."""

    def __init__(
        self,
        offer: AgentOffer,
        starter: WorkerStarter,
        say: Callable[[str], None],
        connect: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect` is called now and then until the driver has welcomed this host."""
        self.offer = offer
        self.say = say
        self.folder = shared_memory.RunFolder()
        self.waiter = Waiter()
        self.driver = DriverConnection(offer.address, offer.server_key, offer.keys, offer.token, offer.patience_s, say)
        self.listener = Listener(self.folder.path / "driver")
        self.processes = LocalProcesses(self.folder.path, self.waiter, starter, say)
        self.state: HostState = Unwelcomed(connect)
        self.over: agent_messages.Over | None = None

    def run(self) -> int:
        """Serves until the run is over, and returns the exit code."""
        try:
            self.waiter.watch(self.driver.link)
            self.waiter.watch(self.listener)
            if self.offer.workers:
                self.processes.starter.prepare()  # once it has arrived it is given up if it is silent for long
            self._arrive()
            while self.over is None:
                self._turn()
            if self.over.reason:
                self.say(f"the run is over: {printable(self.over.reason)}")
            return self.over.code
        except KeyboardInterrupt:
            self.driver.send(agent_messages.Goodbye())
            raise
        finally:
            self.close()

    def end(self, code: int) -> None:
        """Ends this host's part in the run: `run` returns the code."""
        self.over = agent_messages.Over("", code)

    def close(self) -> None:
        """Ends all processes, and leaves nothing."""
        self.processes.close()
        self.driver.close()
        self.listener.close()
        self.waiter.close()
        self.folder.remove()

    def _arrive(self) -> None:
        """Offers all places."""
        offer, name = self.offer, f"{socket.gethostname()}/{self.offer.token[:6]}"
        self.driver.send(agent_messages.Arrive(name, offer.workers, offer.servers, offer.ranks))

    def _turn(self) -> None:
        departed = self.processes.departed()
        ready = self.waiter.wait(0.0 if departed else TICK_S)  # what they sent before they left is read now
        while self.over is None and (received := self.driver.receive()) is not None:
            try:
                self._handle_order(*received)
            except (*wire.BAD_MESSAGE, file_transfer.MessageRefused) as error:
                self.driver.refuse(error)
        self._pass_on()
        self.processes.read_output(ready)
        for child in self.processes.ended([*departed, *ready]):
            self._process_ended(child)
        self.state.tick()
        self.driver.tick(self.state.is_welcome)

    def _handle_order(self, order: agent_messages.ToAgent, frames: list[memoryview]) -> None:
        folder = self.folder.path
        match order:
            case agent_messages.Welcome():
                advertise = self.offer.advertise or leading_to(host_and_port(self.offer.address)[0])
                self.state = Welcomed(folder, order, advertise, self.offer.policy)
            case agent_messages.Start(role, rank, incarnation):
                places, has_keys = self.offer.places(role), self.state.has_keys()
                self.driver.send(self.processes.start(role, rank, incarnation, places, has_keys))
            case agent_messages.Signal():
                self.processes.signal(order)
            case agent_messages.Tell(to, message):
                self.listener.send(to.encode(), self.state.localized(to, message))
            case agent_messages.Ring(rank, incarnation, iteration):
                with contextlib.suppress(FileNotFoundError):
                    flag = AbortFlag(abort_flag_path(folder, rank, incarnation))
                    flag.set(iteration)
                    flag.close()
            case agent_messages.Piece():
                content = frames[0] if frames else b""
                file_transfer.check_from_driver(order.file, order.size)
                file_transfer.unpack(folder, order.file, order.offset, order.size, content)
            case agent_messages.Pong():
                pass
            case agent_messages.Dismissed():
                self._start_anew()
            case agent_messages.Over():
                self.over = order
                self.driver.acknowledge()
            case _:
                assert_never(order)

    def _start_anew(self) -> None:
        self.say("the driver has given this host up, it was out of reach: starting anew")
        self.processes.end_all()
        while self.listener.receive() is not None:
            pass  # what they had sent is of no use any more
        self.driver.begin_session()
        self._arrive()
        for path in sorted((self.folder.path / "trace").iterdir()):
            if path.suffix in SUFFIXES:
                self._send_trace(path)

    def _process_ended(self, child: Child) -> None:
        code = self.processes.reap(child)
        self._pass_on()  # its last messages may have come after its end was seen
        for path in self.processes.traces(child):
            self._send_trace(path)
        self.driver.send(self.processes.report(child, code))

    def _send_trace(self, path: Path) -> None:
        self.driver.send_file(path, f"trace/{path.name}")
        path.unlink()

    def _pass_on(self) -> None:
        """Sends the driver what the processes of this host have sent it, with the files that belong to it."""
        folder = self.folder.path
        while (received := self.listener.receive()) is not None:
            sender, encoded = received
            try:
                message = wire.decode_to_driver(encoded)
            except wire.BAD_MESSAGE as error:
                self.say(f"refused a message of {sender.decode(errors='replace')}: {error}")
                continue
            for path in file_transfer.from_worker(message, folder):
                self.driver.send_file(path, path.name)
            for path, name in file_transfer.from_server(message, folder):
                self.driver.send_file(path, name)
            self.driver.send(agent_messages.Said(sender.decode(), encoded))


def new_token() -> str:
    """A name for an agent that no other has."""
    return f"{os.getpid()}-{secrets.token_hex(6)}"
