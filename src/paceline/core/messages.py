"""What nodes say to each other: nouns, one class for both ends.

A message names tensors, it never holds them. A `Handle` is the name of one gradient slice: who computed it
(`source`, in which `incarnation` of its process), for which `iteration`, on parameters of which `version` of
the shard it is meant for. The runtimes keep the tensors behind the names.

Iterations count from 0. A `Pull` asks for the parameters of `iteration`; the worker has by then pushed
iteration - 1, or promises never to push anything older than `iteration` (see `core/progress.py`).

Messages, events and actions are trees of such structs, so the garbage collector need not look at them (gc=False).
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

Role = Literal["worker", "server", "scheduler", "reducer", "driver", "peer"]


class Node(NamedTuple):
    """The address of one machine: its role and its rank within the role (a server's rank is its shard)."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


Process = tuple[int, int]
"""A process that takes part is a rank and an incarnation: whoever comes back under a rank has a new incarnation."""


class Members(Struct, frozen=True, array_like=True, gc=False):
    """The size of the run as configured. Who is alive right now is a `View`."""

    workers: int
    servers: int


class View(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Who takes part, as numbered by the one authority on membership.

    `members` holds (rank, incarnation) pairs in rank order, complete each time, so a receiver needs only the view with
    the largest `number` it has seen: a join that overtakes a loss does no harm. `finished` holds the ranks that have
    done their iterations: nobody waits for them, but they keep their share of N, by which steps are scaled. A worker
    that was lost is in neither.
    """

    number: int
    members: tuple[tuple[int, int], ...]
    finished: tuple[int, ...] = ()


MOST_WEIGHT = 1e15
Weight = Annotated[float, Meta(ge=0, le=MOST_WEIGHT)]
"""How many samples a gradient stands for; 0 if that is not known (`core/push_weights.py`)."""


class Handle(Struct, frozen=True, array_like=True, gc=False):
    """The name of a gradient slice, and its weight; of a peer's parameters, the weight of the gradient last in them."""

    source: int
    incarnation: int
    iteration: int
    version: int
    nbytes: int
    weight: Weight = 1.0


def in_rank_order(handles: list[Handle]) -> tuple[Handle, ...]:
    """Sorts handles by rank, so that a mean does not depend on who came first."""
    return tuple(sorted(handles, key=lambda handle: (handle.source, handle.incarnation)))


class OfHandle(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A message that names the tensor that travels with it."""

    handle: Handle


class OfWorker(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A message of a worker, or to one, about one of its iterations."""

    worker: int
    incarnation: int
    iteration: int


class OfPeer(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A message of a peer about one of its iterations."""

    peer: int
    incarnation: int
    iteration: int


class Push(OfHandle, frozen=True):
    """A worker sends one shard its whole slice of a gradient."""


class Pull(OfWorker, frozen=True):
    """A worker asks one shard for the parameters of `iteration`.

    With an `attempt` above 0 it asks once more: it has given up computing on the parameters it had, and wants newer
    ones for the same iteration (a re-sync pull, `core/speculation.py`).
    """

    attempt: int = 0


class Parameters(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A shard answers with its slice at `version`, to compute `iteration` with.

    `iteration` may be larger than the one in the pull: a late or joining worker adopts the shard's. `dropped` says that
    the worker's last push did not count on this shard.
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


class Release(OfWorker, frozen=True):
    """The scheduler tells a worker that it may pull the parameters of `iteration` from the shards."""


class Notify(OfWorker, frozen=True):
    """A worker tells the scheduler that it is about to compute, or is to ask for, `iteration`."""


class Resync(OfWorker, frozen=True):
    """The scheduler tells a worker to give up computing `iteration` and begin it again on newer parameters."""


class Plan(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The scheduler tells the shards where each worker is to stop next: (worker, incarnation, iteration), by rank.

    A plan is complete; only one with a larger `number` than the last counts. For those who read the trace, `due_s` is
    when the last worker is predicted to arrive, and `wait_s` how long the first will have waited then.
    """

    number: int
    stops: tuple[tuple[int, int, int], ...]
    due_s: float = 0.0
    wait_s: float = 0.0


class SliceNorm(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A shard tells the reducer the squared norm, on its slice, of the mean that it is about to step on.

    `squared` is None if this shard has no step on `iteration` left to take. Either way it has none left on any
    iteration before.
    """

    shard: int
    iteration: int
    squared: float | None


class MeanNorm(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The reducer tells a shard the norm of the mean of `iteration` over all shards."""

    iteration: int
    norm: float


ToScheduler = Pull | Rise | Notify
"""What workers and shards tell the scheduler."""
FromScheduler = Release | Resync
"""What the scheduler tells a worker."""


# Between peers, where there are no servers (core/hop_peer.py, core/adpsgd_peer.py).


class Update(OfHandle, frozen=True):
    """A peer sends its whole parameters, as they are now, in `handle.iteration`.

    `handle.version` numbers what the peer has sent; `nbytes` is 0, since all are alike. A receiver keeps the parameters
    until its machine orders `Reduce` or `Drop`.
    """


class Token(OfPeer, frozen=True):
    """A peer tells its in-neighbours that it has entered `iteration`: that is a token for each iteration since the
    last."""


class Ack(OfPeer, frozen=True):
    """A peer tells its in-neighbours that it has averaged in their updates of `iteration`."""


class Hello(OfPeer, frozen=True):
    """A peer introduces itself on an edge that view `view` made: where it is, and the first update it will send there.

    `iteration` is -1 if the peer has just joined: it asks for parameters to begin with.
    """

    first: int
    view: int


class Offer(OfHandle, frozen=True):
    """AD-PSGD: a peer offers its parameters to be averaged, and asks for the neighbour's."""


class Reply(OfPeer, frozen=True):
    """AD-PSGD: a peer answers the offer of `iteration` with its parameters, or with None if its own offer was under
    way."""

    handle: Handle | None


PeerMessage = Update | Token | Ack | Hello | Offer | Reply
Sendable = Push | Pull | Rise | Release | Notify | Resync | Plan | SliceNorm | MeanNorm | PeerMessage
"""What an action `Send` sends; parameters are sent by `Answer`."""
Message = Sendable | Parameters
