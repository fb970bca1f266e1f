"""What a host knows of the run it takes part in: nothing before the driver has welcomed it, then its configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import structs

from paceline import private_files
from paceline.runtime.live.messaging.addresses import on_host
from paceline.runtime.live.protocol import agent_messages, wire
from paceline.runtime.live.protocol.configuration import LiveConfig
from paceline.runtime.live.storage import endpoints, file_transfer
from paceline.runtime.live.trainer.startup import BEGUN


class Unwelcomed:
    """A host that the driver has not welcomed. It takes no orders about processes; `connect` asks for admission."""

    is_welcome = False

    def __init__(self, connect: Callable[[], None]) -> None:
        self.tick = connect

    def has_keys(self) -> bool:
        raise file_transfer.MessageRefused("it starts a process of this host before it has welcomed it")

    def localized(self, to: str, message: bytes) -> bytes:
        raise file_transfer.MessageRefused("it sends to a process of this host before it has welcomed it")


class Welcomed:
    """A host with the run's configuration, which its processes find in its folder.

    `advertise` is the address by which other hosts reach it; `policy` is that of its own command line, if it has one.
    """

    is_welcome = True

    def __init__(self, folder: Path, welcome: agent_messages.Welcome, advertise: str, policy: str | None) -> None:
        self.folder = folder
        self.clock_offset = welcome.now - time.monotonic()
        """The driver's clock less this host's, and less the milliseconds that the welcome was on its way."""
        private_files.make_folder(folder / "trace", exist_ok=True)
        config = msgspec.json.decode(welcome.config, type=LiveConfig)
        multihost = on_host(config.multihost, advertise) if config.multihost is not None else None
        self.config = structs.replace(
            config, output=str(folder / "trace"), multihost=multihost, guest=True, own_policy=policy
        )
        private_files.write(folder / "config", msgspec.json.encode(self.config))
        if not (folder / endpoints.NONCE).exists():
            endpoints.make_nonce(folder)
        if welcome.begun:
            self._note_begun()

    def _note_begun(self) -> None:
        (self.folder / BEGUN).touch(0o600)

    def tick(self) -> None:
        """Nothing is to be done."""

    def has_keys(self) -> bool:
        """Whether the processes of the run have keys."""
        return self.config.multihost is not None and self.config.multihost.keys

    def localized(self, to: str, message: bytes) -> bytes:
        """Returns a message to a process of this host, with this host's clock and paths."""
        if to.startswith("server:"):
            order = file_transfer.localized(wire.decode_to_server(message), self.folder)
            if isinstance(order, wire.Configure | wire.StartClock) and order.epoch_s is not None:
                order = structs.replace(order, epoch_s=order.epoch_s - self.clock_offset)
            return wire.encode(order)
        decoded = wire.decode_to_worker(message)
        if not isinstance(decoded, wire.Begin):
            return message
        self._note_begun()
        return wire.encode(structs.replace(decoded, epoch_s=decoded.epoch_s - self.clock_offset))


HostState = Unwelcomed | Welcomed
