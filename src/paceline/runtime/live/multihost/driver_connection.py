"""An agent's connection to the driver: one reliable channel over as many TCP connections as it takes."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import RunFailed, printable
from paceline.runtime.live.messaging.addresses import host_and_port
from paceline.runtime.live.messaging.reliable_channel import Frames, ReliableChannel
from paceline.runtime.live.messaging.remote_links import KeyPair, RemoteLink
from paceline.runtime.live.protocol import agent_messages, wire
from paceline.runtime.live.storage import file_transfer

REOPEN_S = 0.5
DRIVER_DEAD_S = 3.0
"""How long the agent goes on when the driver's host says that nobody listens there any more."""
ADMISSION_S = 10.0
"""How long it may take to be admitted: until a busy driver has read its `ConnectRequest`, its own key is refused."""
CHECK_S = 1.0
"""How often the agent of a silent driver checks whether anybody listens there."""


class DriverConnection:
    """Sends messages and files to the driver, and receives its orders; `say` gets lines for a person."""

    def __init__(
        self,
        address: str,
        server_key: str,
        keys: KeyPair | None,
        token: str,
        patience_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.address = address
        self.patience_s = patience_s
        self.say = say
        self.link = RemoteLink(address, b"host:" + token.encode(), keys, server_key, most_waiting=0)
        self.reopened_s = self.checked_s = time.monotonic()
        self.begin_session()

    def begin_session(self) -> None:
        """Forgets what was sent and received so far: a new channel begins."""
        self.channel = ReliableChannel(secrets.token_hex(8), self.link.send, lambda: self.link.is_idle)

    def send(self, message: agent_messages.FromAgent, frames: Frames = ()) -> None:
        self.channel.send(agent_messages.encode(message), frames)

    def send_file(self, path: Path, name: str) -> None:
        for offset, size, content in file_transfer.pieces(path):
            self.send(agent_messages.Piece(name, offset, size), (content,))

    def acknowledge(self) -> None:
        """Has the driver know that its last message has arrived."""
        self.channel.send_unreliable(agent_messages.encode(agent_messages.Ping()))

    def receive(self) -> tuple[agent_messages.ToAgent, list[memoryview]] | None:
        """The next order with its frames; None if there is none right now."""
        while (received := self.link.receive()) is not None:
            try:
                numbered = agent_messages.decode_numbered(received[0])
                order = agent_messages.decode_to_agent(numbered.body)
            except wire.BAD_MESSAGE as error:
                self.refuse(error)
            else:
                if numbered.session == self.channel.session and self.channel.accept(numbered):
                    return order, received[1]
        return None

    def refuse(self, error: Exception) -> None:
        """Says why an order was refused. Whoever sends what cannot be decoded is disconnected."""
        self.say(printable(f"refused a message of the driver: {error}"))
        if not isinstance(error, file_transfer.MessageRefused):
            self.link.disconnect()

    def tick(self, is_welcome: bool) -> None:
        """Keeps the connection going; raises `RunFailed` when there is no hope for it.

        `is_welcome` says whether the driver has welcomed this host.
        """
        self.channel.tick(agent_messages.encode(agent_messages.Ping()))
        silent_s, now = self.channel.silent_s, time.monotonic()
        if self.link.gone and now - self.reopened_s > REOPEN_S:
            self.reopened_s = now
            self.link.reopen()
            self.channel.retransmit()
        if silent_s > self.patience_s:
            why = self.link.refused or "it does not answer"
            raise RunFailed(f"nothing was heard of {self.address} for {silent_s:.0f} s: {why}")
        if silent_s < DRIVER_DEAD_S or now - self.checked_s < CHECK_S:
            return
        self.checked_s = now
        listens = anybody_listens(self.address)
        if is_welcome and not listens:
            raise RunFailed(f"the driver at {self.address} is gone")
        if not is_welcome and listens and self.link.refused and silent_s > ADMISSION_S:
            raise RunFailed(f"this host was not let in: {self.link.refused}")

    def close(self) -> None:
        self.link.close()


def anybody_listens(address: str) -> bool:
    """False if the other host says that nobody does; true if it does not answer."""
    try:
        with socket.create_connection(host_and_port(address), timeout=1.0):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
