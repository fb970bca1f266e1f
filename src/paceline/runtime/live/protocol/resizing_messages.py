"""The messages with which a run changes the number of its servers (`driver/server_resizing.py`).

worker -> driver               Held, Want
driver -> worker               Hold, Resliced
driver -> server               Survey, Give, Reslice, Retire
server -> driver               Standing, Gave
`paceline servers` -> driver   Want; and back: Outcome
"""

from __future__ import annotations

from msgspec import Struct

from paceline.core.events import ServersChanged
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.tensors.assignment import Assignment
from paceline.tensors.piece_optimizers import Hyper


class Hold(Struct, frozen=True, tag=True):
    """The worker is not to push iteration `at` or any later one, and to report when it waits; with None it goes on.

    `change` counts the changes of servers in the run, so that messages of an earlier one are recognized.
    """

    change: int
    at: int | None


class Held(Struct, frozen=True, tag=True):
    """This worker has all its parameters, and does not push `iteration` until it is told to."""

    change: int
    rank: int
    incarnation: int
    iteration: int


class Resliced(Struct, frozen=True, tag=True):
    """The servers have changed: the worker is to go on with these."""

    assignment: Assignment
    endpoints: tuple[Endpoint, ...]
    event: ServersChanged


class Survey(Struct, frozen=True, tag=True):
    """The server is to report its `Standing` now and whenever it changes; with None it stops."""

    change: int | None


class Standing(Struct, frozen=True, tag=True):
    """The state of a shard: its view, each worker's next iteration, who waits, whether it holds gradients."""

    change: int
    shard: int
    view: int
    V: int
    version: int
    next: dict[int, int]
    waiting: tuple[int, ...]
    holds: bool
    hyper: tuple[Hyper, ...] | None


class Give(Struct, frozen=True, tag=True):
    """The server is to write what others will own to the run's folder. `number` counts the changes."""

    number: int
    before: Assignment
    after: Assignment


class Gave(Struct, frozen=True, tag=True):
    """The server has written what others will own, unless there was an error."""

    shard: int
    number: int
    error: str


class Reslice(Struct, frozen=True, tag=True):
    """The server is to read what others have written for it, and to go on with its new part."""

    give: Give
    event: ServersChanged


class Retire(Struct, frozen=True, tag=True):
    """The server owns nothing any more: it is to end."""


class Want(Struct, frozen=True, tag=True):
    """A person, or the scenario in its entry `entry`, asks for another number of servers."""

    servers: int
    requester: str = ""
    """Who is to get the `Outcome`."""
    entry: int | None = None


class Outcome(Struct, frozen=True, tag=True):
    """The result of a `Want`, in words."""

    text: str
    refused: bool


ToDriver = Held | Standing | Gave | Want
ToWorker = Hold | Resliced
ToServer = Survey | Give | Reslice | Retire
