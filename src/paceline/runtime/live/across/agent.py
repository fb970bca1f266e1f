"""A host's part in a run: an agent that runs processes for the driver of another host.

It has a folder of its own with the names the driver's has, and to its processes it is the driver: what they say to
the Unix socket there it passes on, what the driver says to them it hands over, with the files that belong to it
(`luggage.py`). It starts, watches and ends them as it is told. If the driver is silent it waits for it, and its
processes with it; when it is dismissed, having been silent too long itself, it ends them and offers its places anew.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec
from msgspec import structs

from paceline.core.messages import Role
from paceline.errors import RunFailed
from paceline.runtime.live import memory, wire
from paceline.runtime.live.across import dispatch, doors, luggage
from paceline.runtime.live.across.abroad import key_path
from paceline.runtime.live.across.addresses import leading_to, on_host
from paceline.runtime.live.across.far import FarLink, KeyPair
from paceline.runtime.live.across.steady import Frames, Steady
from paceline.runtime.live.bell import Bell
from paceline.runtime.live.bell import path as bell_path
from paceline.runtime.live.configuration import LiveConfig
from paceline.runtime.live.driver.children import Child, StartWorker, how, start_server
from paceline.runtime.live.driver.echo import Echo
from paceline.runtime.live.driver.enrolling import leave_keys
from paceline.runtime.live.peer import slots
from paceline.runtime.live.recording import SUFFIX
from paceline.runtime.live.sockets import Listener, Waiter
from paceline.runtime.live.worker.joining import BEGUN

TICK_S = 0.2
REOPEN_S = 0.5
DRIVER_DEAD_S = 3.0
"""How long the agent goes on when the driver's host says that nobody listens there any more."""
LET_IN_S = 10.0
"""How long it may take to be let in: until a busy driver has heard its knock, its own key is refused."""
LOOK_S = 1.0
"""How often it looks whether anybody listens there."""
KEPT_LINES = 30


@dataclass(frozen=True)
class Offer:
    """What an agent offers, to whom."""

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
    """The address of this host that others reach its servers by; "": what the driver says."""


class Agent:
    """Runs the processes of one host. `start_worker` makes a worker; `say` gets lines for a person."""

    def __init__(
        self,
        offer: Offer,
        start_worker: StartWorker,
        say: Callable[[str], None] = print,
        knock: Callable[[], None] = lambda: None,
    ) -> None:
        """`knock` is called now and then until the driver has welcomed this host."""
        self.offer = offer
        self.knock = knock
        self.start_worker = start_worker
        self.say = say
        self.children: dict[int, Child] = {}
        """By sentinel."""
        self.folder = memory.RunFolder()
        self.waiter = Waiter()
        self.link = FarLink(offer.address, b"host:" + offer.token.encode(), offer.keys, offer.server_key, hwm=0)
        self.echo = Echo(self.waiter, self._print)
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.reopened_s = self.looked_s = time.monotonic()
        self.clock_offset = 0.0
        """The driver's clock less this host's."""
        self.over: dispatch.Over | None = None
        self.failed = ""
        """The end of what the last process that ended has printed, if it failed."""
        self.steady: Steady
        self.listener: Listener

    def run(self) -> int:
        """Serve until the run is over; the exit code."""
        try:
            self.waiter.watch(self.link)
            self._arrive()
            while self.over is None:
                self._turn()
            if self.over.reason:
                self.say(f"the run is over: {self.over.reason}")
            return self.over.code
        except KeyboardInterrupt:
            self.steady.say(dispatch.encode(dispatch.Goodbye()))
            raise
        finally:
            self.close()

    def close(self) -> None:
        """End all processes; nothing is left."""
        self._end_all()
        self.echo.close_all()
        self.link.close()
        with contextlib.suppress(AttributeError):
            self.listener.close()
        self.waiter.close()
        self.folder.remove()

    # Arriving.

    def _arrive(self) -> None:
        """Offer all places, in a new conversation."""
        self.steady = Steady(secrets.token_hex(8), self._send, lambda: self.link.stands)
        offer, name = self.offer, f"{socket.gethostname()}/{self.offer.token[:6]}"
        arrive = dispatch.Arrive(name, offer.workers, offer.servers, offer.ranks)
        self.steady.say(dispatch.encode(arrive))

    def _send(self, message: bytes, frames: Frames) -> None:
        self.link.send(message, frames)

    def _welcomed(self, welcome: dispatch.Welcome) -> None:
        folder = self.folder.path
        now = time.monotonic()
        self.clock_offset = welcome.now - now  # less what the way here took: milliseconds
        (folder / "trace").mkdir(exist_ok=True)
        config = msgspec.json.decode(welcome.config, type=LiveConfig)
        here = self.offer.advertise or leading_to(self.offer.address.removeprefix("tcp://").rpartition(":")[0])
        abroad = on_host(config.abroad, here) if config.abroad is not None else None
        config = structs.replace(config, output=str(folder / "trace"), abroad=abroad)
        (folder / "config").write_bytes(msgspec.json.encode(config))
        self.config = config
        if not (folder / doors.NONCE).exists():
            doors.make_nonce(folder)
        if welcome.begun:
            (folder / BEGUN).touch()
        if not hasattr(self, "listener"):
            self.listener = Listener(folder / "driver")
            self.waiter.watch(self.listener)

    # One turn.

    def _turn(self) -> None:
        left = {sentinel for sentinel, child in self.children.items() if child.has_left()}
        ready = self.waiter.wait(0.0 if left else TICK_S)  # what they said before they left is heard now
        while self.over is None and (received := self.link.receive()) is not None:
            message, frames = received
            try:
                numbered = dispatch.decode_numbered(message)
                body = dispatch.decode_to_agent(numbered.body)
            except wire.BAD_MESSAGE as error:
                self.say(f"refused a message of the driver: {error}")
                continue
            if numbered.stay == self.steady.stay and self.steady.take(numbered):
                self._obey(body, frames)
        while hasattr(self, "listener") and (said := self.listener.receive()) is not None:
            self._pass_on(*said)
        for descriptor in ready:
            if descriptor in self.echo.begun:
                self.echo.hear(descriptor)
        for sentinel in left.union(source for source in ready if source in self.children):
            self._child_ended(self.children.pop(sentinel))
        if not hasattr(self, "listener"):
            self.knock()
        self.steady.tick(dispatch.encode(dispatch.Ping()))
        self._mind_the_driver()

    def _mind_the_driver(self) -> None:
        silent = self.steady.silent_s
        if self.link.gone and time.monotonic() - self.reopened_s > REOPEN_S:
            self.reopened_s = time.monotonic()
            self.link.reopen()
        if silent > self.offer.patience_s:
            why = self.link.refused or "it does not answer"
            raise RunFailed(f"nothing was heard of {self.offer.address} for {silent:.0f} s: {why}")
        if silent < DRIVER_DEAD_S or time.monotonic() - self.looked_s < LOOK_S:
            return
        self.looked_s = time.monotonic()
        welcomed, listens = hasattr(self, "listener"), anybody_listens(self.offer.address)
        if welcomed and not listens:
            raise RunFailed(f"the driver at {self.offer.address} is gone")
        if not welcomed and listens and self.link.refused and silent > LET_IN_S:
            raise RunFailed(f"this host was not let in: {self.link.refused}")

    def _obey(self, message: dispatch.ToAgent, frames: list[memoryview]) -> None:
        match message:
            case dispatch.Welcome():
                self._welcomed(message)
            case dispatch.Start(role, rank, incarnation):
                self._start(role, rank, incarnation)
            case dispatch.Signal():
                for child in self.children.values():
                    if (child.role, child.rank, child.incarnation) == (message.role, message.rank, message.incarnation):
                        child.signal(message.number)
            case dispatch.Tell(to, said):
                self._hand_over(to, said)
            case dispatch.Ring(rank, incarnation, iteration):
                with contextlib.suppress(FileNotFoundError):
                    bell = Bell(bell_path(self.folder.path, rank, incarnation))
                    bell.ring(iteration)
                    bell.close()
            case dispatch.Piece():
                content = frames[0] if frames else b""
                luggage.unpack(self.folder.path, message.file, message.offset, message.size, content)
            case dispatch.Pong():
                pass
            case dispatch.Dismissed():
                self.say("the driver has given this host up, it was out of reach: starting anew")
                self._end_all()
                self._arrive()
                for path in sorted((self.folder.path / "trace").glob(f"*{SUFFIX}")):
                    self._send_trace(path)
            case dispatch.Over():
                self.over = message
                self.steady.mention(dispatch.encode(dispatch.Ping()))  # so that the driver knows
            case _:
                assert_never(message)

    # Processes.

    def _start(self, role: Role, rank: int, incarnation: int) -> None:
        folder = self.folder.path
        key = ""
        if role == "server":
            child = start_server(folder, rank, incarnation)
        else:
            if self.config.abroad is not None and self.config.abroad.keys:
                key = leave_keys(folder, rank, incarnation)
            child = self.start_worker(rank, incarnation, folder)
        self.steady.say(dispatch.encode(dispatch.Started(role, rank, incarnation, key)))
        self.children[child.sentinel] = child
        self.waiter.watch(child.sentinel)
        if child.output is not None:
            self.echo.listen(child.output)

    def _print(self, line: str) -> None:
        self.last_lines.append(line)
        self.say(line)

    def _child_ended(self, child: Child) -> None:
        self.waiter.forget(child.sentinel)
        code = child.reap()
        while hasattr(self, "listener") and (said := self.listener.receive()) is not None:
            self._pass_on(*said)  # its last words may have come after its end was seen
        if child.output in self.echo.begun:
            self.echo.hear(child.output)
        folder = self.folder.path
        for path in sorted((folder / "trace").glob(f"*-{child.rank}.{child.incarnation}{SUFFIX}")):
            if path.name.startswith((child.role, "peer" if child.role == "worker" else child.role)):
                self._send_trace(path)
        self._clean(child, code)
        self.failed = "\n".join(self.last_lines) or f"{child} {how(code)}" if code > 0 else ""
        ended = dispatch.Ended(child.role, child.rank, child.incarnation, code, self.failed)
        self.steady.say(dispatch.encode(ended))

    def _clean(self, child: Child, code: int) -> None:
        """Give back what a process that has ended held of this host's memory."""
        if child.role == "worker":
            memory.remove(self.folder.path, child.rank, child.incarnation)
            key_path(self.folder.path, child.rank, child.incarnation).unlink(missing_ok=True)
            if code:
                slots.remove(self.folder.path, child.rank, child.incarnation)

    def _send_trace(self, path: Path) -> None:
        self._send_file(path, f"trace/{path.name}")
        path.unlink()

    def _end_all(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            with contextlib.suppress(FileNotFoundError):
                self.waiter.forget(child.sentinel)
            self._clean(child, child.reap() or 1)
        self.children.clear()
        while hasattr(self, "listener") and self.listener.receive() is not None:
            pass  # what they had said is of no use any more

    # Passing on.

    def _pass_on(self, by: bytes, said: bytes) -> None:
        """What a process of this host says to the driver."""
        try:
            message = wire.decode_to_driver(said)
        except wire.BAD_MESSAGE as error:
            self.say(f"refused a message of {by.decode(errors='replace')}: {error}")
            return
        folder = self.folder.path
        for path in luggage.from_worker(message, folder):
            self._send_file(path, path.name)
        for path, name in luggage.from_server(message, folder):
            self._send_file(path, name)
        self.steady.say(dispatch.encode(dispatch.Said(by.decode(), said)))

    def _hand_over(self, to: str, said: bytes) -> None:
        """What the driver says to a process of this host, with this host's clock and paths."""
        folder = self.folder.path
        if to.startswith("server:"):
            order = luggage.localized(wire.decode_to_server(said), folder)
            if isinstance(order, wire.Configure):
                order = structs.replace(order, epoch_s=order.epoch_s - self.clock_offset)
            said = wire.encode(order)
        else:
            message = wire.decode_to_worker(said)
            if isinstance(message, wire.Begin):
                (folder / BEGUN).touch()
                said = wire.encode(structs.replace(message, epoch_s=message.epoch_s - self.clock_offset))
        self.listener.send(to.encode(), said)

    def _send_file(self, path: Path, name: str) -> None:
        for offset, size, content in luggage.pieces(path):
            self.steady.say(dispatch.encode(dispatch.Piece(name, offset, size)), (content,))


def anybody_listens(address: str) -> bool:
    """False if the other host says that nobody does; True if so, or if it says nothing."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def new_token() -> str:
    """A name for an agent that no other has."""
    return f"{os.getpid()}-{secrets.token_hex(6)}"
