"""What nodes say to each other: nouns, one class for both ends.

A message names tensors, it never holds them. A `Handle` is the name of one gradient slice: who computed it
(`source`, in which `incarnation` of its process), for which `iteration`, on parameters of which `version` of
the shard it is meant for. The runtimes keep the tensors behind the names.

Iterations count from 0. A `Pull` asks for the parameters of `iteration`; the worker has by then pushed
iteration - 1, or promises never to push anything older than `iteration` (see `core/progress.py`).

Messages, events and actions are trees of such structs, so the garbage collector need not look at them (gc=False).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

Role = Literal["worker", "server", "scheduler", "driver", "peer"]


class Node(NamedTuple):
    """The address of one machine: its role and its rank within the role (a server's rank is its shard)."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


class Members(Struct, frozen=True, array_like=True, gc=False):
    """The size of the run as configured. Who is alive right now is a `View`."""

    workers: int
    servers: int


class View(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Who takes part, said by the one authority on membership.

    `members` holds (rank, incarnation) pairs in rank order, complete each time, so a receiver needs only the
    view with the largest `number` it has seen: a join that overtakes a loss does no harm.
    """

    number: int
    members: tuple[tuple[int, int], ...]


class Handle(Struct, frozen=True, array_like=True, gc=False):
    """The name of a gradient slice."""

    source: int
    incarnation: int
    iteration: int
    version: int
    nbytes: int


class Push(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A gradient slice for one shard, whole."""

    handle: Handle


class Pull(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A worker asks one shard for the parameters of `iteration`.

    With an `attempt` above 0 it asks once more: it has given up computing on what it was answered, and wants newer
    parameters for the same iteration (a re-sync pull, `core/speculation.py`).
    """

    worker: int
    incarnation: int
    iteration: int
    attempt: int = 0


class Parameters(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A shard's answer: its slice at `version`, to compute `iteration` with.

    `iteration` may be larger than what was asked for: a late or joining worker adopts the shard's.
    `dropped` says that the worker's last push did not count on this shard.
    """

    shard: int
    worker: int
    incarnation: int
    iteration: int
    version: int
    dropped: bool


class Rise(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A shard tells the scheduler that everything before V is finished there, by the push of worker `by` (-1: none)."""

    shard: int
    V: int
    by: int


class Release(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The scheduler tells a worker that it may pull the parameters of `iteration` from the shards."""

    worker: int
    incarnation: int
    iteration: int


class Notify(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A worker tells the scheduler that it is about to compute, or is to ask for, `iteration`."""

    worker: int
    incarnation: int
    iteration: int


class Resync(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The scheduler tells a worker to give up computing `iteration` and begin it again on newer parameters."""

    worker: int
    incarnation: int
    iteration: int


class Plan(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The scheduler tells the shards where each worker is to stop next: (worker, incarnation, iteration), by rank.

    A plan is complete; only one with a larger `number` than the last counts. `due_s` is when the last of them is
    predicted to be there, and `wait_s` for how long the first will have waited: for those who read the trace.
    """

    number: int
    stops: tuple[tuple[int, int, int], ...]
    due_s: float = 0.0
    wait_s: float = 0.0


ToScheduler = Pull | Rise | Notify
"""What workers and shards tell the scheduler."""
FromScheduler = Release | Resync
"""What the scheduler tells a worker."""


# Between peers, where there are no servers (core/peer.py, core/gossip.py).


class Update(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The whole parameters of a peer, in `handle.iteration`, as they are when this is sent.

    `handle.version` numbers the peer's sendings, `nbytes` is 0: all are alike. A receiver keeps the parameters until
    its machine orders `Reduce` or `Drop`.
    """

    handle: Handle


class Token(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A peer tells its in-neighbours that it has entered `iteration`: a token for each since the last it told."""

    peer: int
    incarnation: int
    iteration: int


class Ack(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A peer tells its in-neighbours that it has averaged in their updates of `iteration`."""

    peer: int
    incarnation: int
    iteration: int


class Hello(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The first word on an edge that view `view` made: where the peer is, and the first update it will send on it.

    `iteration` is -1 if the peer has just joined: it asks for parameters to begin with.
    """

    peer: int
    incarnation: int
    iteration: int
    first: int
    view: int


class Offer(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """AD-PSGD: here are my parameters, average them with yours and send me yours."""

    handle: Handle


class Reply(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """AD-PSGD: the parameters asked for by the offer of `iteration`, or none: an offer of its own was under way."""

    peer: int
    incarnation: int
    iteration: int
    handle: Handle | None


PeerMessage = Update | Token | Ack | Hello | Offer | Reply
Message = Push | Pull | Parameters | Rise | Release | Notify | Resync | Plan | PeerMessage
