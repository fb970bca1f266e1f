"""The messages between the driver and the agents of other hosts. Encoded by msgspec; files follow as raw frames.

agent -> driver     Arrive, Started, Ended, Said (by a process of the host), Piece, Ping, Goodbye
driver -> agent     Welcome, Start, Signal, Tell (a process of the host), Ring, Piece, Pong, Dismissed, Over
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paceline.core.messages import Role


class Arrive(Struct, frozen=True, tag=True):
    """An agent offers to run so many processes. It runs none at this time."""

    host: str
    """The host's name, for people."""
    workers: int
    servers: int
    ranks: tuple[int, ...]
    """The ranks of its workers, or of its servers if it has no workers; if empty, the driver chooses."""


class Welcome(Struct, frozen=True, tag=True):
    """The driver accepts an agent's offer."""

    config: bytes
    """The run's configuration, as the driver's own processes read it."""
    begun: bool
    now: float
    """The driver's clock."""


class Start(Struct, frozen=True, tag=True):
    """The agent is to start this process."""

    role: Role
    rank: int
    incarnation: int


class Started(Struct, frozen=True, tag=True):
    """The agent has started this process."""

    role: Role
    rank: int
    incarnation: int
    key: str
    """The public key by which servers of other hosts know the process."""


class Signal(Struct, frozen=True, tag=True):
    """The agent is to send this process a signal."""

    role: Role
    rank: int
    incarnation: int
    number: int


class Ended(Struct, frozen=True, tag=True):
    """A process of the host has ended."""

    role: Role
    rank: int
    incarnation: int
    code: int
    last_words: str
    """The end of what the process printed, if it failed."""


class Said(Struct, frozen=True, tag=True):
    """A message of a process of the host to the driver."""

    by: str
    message: bytes


class Tell(Struct, frozen=True, tag=True):
    """A message of the driver to a process of the host."""

    to: str
    message: bytes


class Ring(Struct, frozen=True, tag=True):
    """A worker of the host is to abort its computation (`storage/abort_flag.py`)."""

    rank: int
    incarnation: int
    iteration: int


class Piece(Struct, frozen=True, tag=True):
    """A part of a file of the run's folder; the frame behind it is its content."""

    file: str
    offset: int
    size: int
    """Bytes of the whole file."""


class Ping(Struct, frozen=True, tag=True):
    """The agent is there, and has received what the message acknowledges."""


class Pong(Struct, frozen=True, tag=True):
    """The driver is there, and has received what the message acknowledges."""


class Goodbye(Struct, frozen=True, tag=True):
    """The agent was ended by its user: nobody is to wait for it."""


class Dismissed(Struct, frozen=True, tag=True):
    """The agent was silent for too long and has lost its places: it is to end all processes and arrive anew."""


class Over(Struct, frozen=True, tag=True):
    """The run is over for this host: the agent is to end."""

    reason: str
    code: int


class ConnectRequest(Struct, frozen=True, tag=True):
    """A host that has the run's key file asks to be known by a key of its own."""

    key: str
    token: str


class Numbered(Struct, frozen=True, array_like=True):
    """A message of a reliable channel (`messaging/reliable_channel.py`)."""

    session: str
    number: int
    """0 if it may be lost."""
    acknowledged: int
    """The number of the last message that its sender has received."""
    body: bytes


FromAgent = Arrive | Started | Ended | Said | Piece | Ping | Goodbye
ToAgent = Welcome | Start | Signal | Tell | Ring | Piece | Pong | Dismissed | Over

encode = msgspec.msgpack.Encoder().encode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_numbered = msgspec.msgpack.Decoder(Numbered).decode
decode_connect_request = msgspec.msgpack.Decoder(ConnectRequest).decode
