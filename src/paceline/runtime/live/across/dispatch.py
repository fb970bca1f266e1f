"""What the driver and the agents of other hosts say to each other. Encoded by msgspec; files follow as raw frames.

agent -> driver     Arrive, Started, Ended, Said (by a process of the host), Piece, Ping, Goodbye
driver -> agent     Welcome, Start, Signal, Tell (a process of the host), Ring, Piece, Pong, Dismissed, Over
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paceline.core.messages import Role


class Arrive(Struct, frozen=True, tag=True):
    """An agent offers to run so many processes. It has none when it says so."""

    host: str
    """Its name, for people."""
    workers: int
    servers: int
    ranks: tuple[int, ...]
    """Which workers it is for, or which servers if it has no workers, if its launcher says; else the driver does."""


class Welcome(Struct, frozen=True, tag=True):
    config: bytes
    """The run's configuration, as the driver's own processes read it."""
    begun: bool
    now: float
    """The driver's clock."""


class Start(Struct, frozen=True, tag=True):
    role: Role
    rank: int
    incarnation: int


class Started(Struct, frozen=True, tag=True):
    role: Role
    rank: int
    incarnation: int
    key: str
    """The public key by which it is known to servers of other hosts."""


class Signal(Struct, frozen=True, tag=True):
    role: Role
    rank: int
    incarnation: int
    number: int


class Ended(Struct, frozen=True, tag=True):
    role: Role
    rank: int
    incarnation: int
    code: int
    last_words: str
    """The end of what it printed, if it failed."""


class Said(Struct, frozen=True, tag=True):
    """What a process of the host has said to the driver."""

    by: str
    message: bytes


class Tell(Struct, frozen=True, tag=True):
    """What the driver says to a process of the host."""

    to: str
    message: bytes


class Ring(Struct, frozen=True, tag=True):
    """A worker of the host is to give its computation up (`bell.py`)."""

    rank: int
    incarnation: int
    iteration: int


class Piece(Struct, frozen=True, tag=True):
    """A part of a file of the run's folder; the frame behind it is its content."""

    file: str
    offset: int
    size: int
    """Of the whole file."""


class Ping(Struct, frozen=True, tag=True):
    pass


class Pong(Struct, frozen=True, tag=True):
    pass


class Goodbye(Struct, frozen=True, tag=True):
    """The agent's user has ended it: nobody is to wait for it."""


class Dismissed(Struct, frozen=True, tag=True):
    """The driver does not count on this agent any more, it was silent for too long: end all processes, come anew."""


class Over(Struct, frozen=True, tag=True):
    """The run is over for this host: end."""

    reason: str
    code: int


class Knock(Struct, frozen=True, tag=True):
    """Somebody who has the run's key file wants to be known by a key of his own."""

    key: str
    token: str


class Numbered(Struct, frozen=True, array_like=True):
    """One message on a steady connection (`steady.py`)."""

    stay: str
    number: int
    heard: int
    body: bytes


FromAgent = Arrive | Started | Ended | Said | Piece | Ping | Goodbye
ToAgent = Welcome | Start | Signal | Tell | Ring | Piece | Pong | Dismissed | Over

encode = msgspec.msgpack.Encoder().encode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_numbered = msgspec.msgpack.Decoder(Numbered).decode
decode_knock = msgspec.msgpack.Decoder(Knock).decode
