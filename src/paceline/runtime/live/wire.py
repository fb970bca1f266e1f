"""What the processes of a live run say to each other, besides the core's messages. Encoded by msgspec.

worker -> driver     Describe (the model, from worker 0), Play, Log, Rejected, Leave; Ask, for the scheduler
driver -> worker     Begin, Dealt, Reopened, Refuse, Stop; Told, from the scheduler
driver -> server     Configure, NewView, Checkpoint, Finish; Planned, from the scheduler
server -> driver     Ready, Status, Due, Saved, Finished; Ask, for the scheduler
worker -> server     Exchange: push and pull of one iteration in one message; Fetch
server -> worker     the core's Parameters; Fetched

Without servers: PeerStatus to the driver, NewView from it, and from peer to peer a Parcel of the core's messages.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from paceline.core.deck import Deal, HandAcknowledged, HandRequested, HandReturned, Pass
from paceline.core.messages import FromScheduler, Members, Parameters, PeerMessage, Plan, Pull, Push, ToScheduler, View
from paceline.runtime.live.checkpoint import Shard as Entry
from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import Hyper, OptimizerSpec


class LiveConfig(Struct, frozen=True):
    """What every process of a run is told at its start, in a file of the run's folder."""

    members: Members
    seed: int
    cluster: dict[str, Any] | None
    """The scenario whose slowdowns, slow links and faults are injected, as a table (cluster/files.py)."""
    output: str
    """Where traces go."""
    slicing: str
    """How the parameters are cut over the servers (`Layout.slicing`)."""
    policy: str | None = None
    """What beats the script's policy, if anything does."""
    keeps_state: bool = False
    """Peers leave their optimizer's state at the end: there will be a checkpoint."""


class Describe(Struct, frozen=True, tag=True):
    """What a worker is about to train. Worker 0's becomes the run's; the others' must have the same digest."""

    rank: int
    incarnation: int
    digest: str
    layout: Layout | None
    optimizer: OptimizerSpec | None
    policy: str | None
    aliases: dict[str, str]
    """Second names of tied weights."""


class Log(Struct, frozen=True, tag=True):
    rank: int
    at: float
    iteration: int
    updates: int
    values: dict[str, float]


class Leave(Struct, frozen=True, tag=True):
    rank: int
    incarnation: int


class Play(Struct, frozen=True, tag=True):
    """What a worker tells the deck of one of its samplers: what it has settled, and then perhaps that it wants more.

    Samplers are numbered in the order in which a script makes them. Size and seed must be the same on every worker.
    """

    rank: int
    incarnation: int
    sampler: int
    size: int
    seed: int
    events: tuple[HandRequested | HandAcknowledged | HandReturned, ...]


class Dealt(Struct, frozen=True, tag=True):
    """The deck's answer to a request, and the epoch that was asked for: a joiner does not know it."""

    sampler: int
    epoch: int
    answer: Deal | Pass


class Begin(Struct, frozen=True, tag=True):
    """The servers are ready: pull and compute. `epoch_s` is the monotonic time of second 0."""

    view: View
    policy: str
    epoch_s: float
    hyper: tuple[Hyper, ...] | None
    """The hyper-parameters of the run by now, for a worker that joins."""
    lives: tuple[int, ...]
    """How often each server was restarted."""
    resumed: bool
    """What is not trained comes from the checkpoint, for worker 0 too."""
    iteration: int = 0
    """Without servers: the iterations before this run, of the checkpoint it goes on from."""


class Refuse(Struct, frozen=True, tag=True):
    reason: str


class Stop(Struct, frozen=True, tag=True):
    reason: str


class Reopened(Struct, frozen=True, tag=True):
    """A server was restarted: whoever waits for its answer is to say again what it said, to its new life."""

    shard: int
    life: int


class Configure(Struct, frozen=True, tag=True):
    policy: str
    layout: Layout
    optimizer: OptimizerSpec
    epoch_s: float
    checkpoint: str | None
    """Start from this folder instead of worker 0's values."""
    checkpoint_every: int | None
    """Say `Due` after so many updates."""


class Checkpoint(Struct, frozen=True, tag=True):
    """Write your part of a checkpoint into this folder."""

    folder: str


class Due(Struct, frozen=True, tag=True):
    """It is time for a checkpoint, by the number of updates."""


class Saved(Struct, frozen=True, tag=True):
    folder: str
    shard: int
    entry: Entry | None
    error: str


class WorkerStatus(Struct, frozen=True, array_like=True):
    """How a worker looks from a shard: iterations pushed, why it waits (or ""), staleness of its last push."""

    pushed: int
    waits: str
    staleness: int


class Status(Struct, frozen=True, tag=True):
    shard: int
    workers: dict[int, WorkerStatus]
    hyper: tuple[Hyper, ...] | None
    """What schedulers have changed the hyper-parameters to."""


class PeerStatus(Struct, frozen=True, tag=True):
    """How a peer is. The first says that it has parameters."""

    rank: int
    incarnation: int
    status: WorkerStatus
    hyper: tuple[Hyper, ...] | None


class NewView(Struct, frozen=True, tag=True):
    view: View


class Finish(Struct, frozen=True, tag=True):
    pass


class Ready(Struct, frozen=True, tag=True):
    """The server is there; then, that it is configured."""

    shard: int
    configured: bool


class Rejected(Struct, frozen=True, tag=True):
    """A worker's gradient was not finite: for the person at the driver."""

    worker: int
    iteration: int
    reason: str


class Finished(Struct, frozen=True, tag=True):
    shard: int


class Ask(Struct, frozen=True, tag=True):
    """What a worker or a shard tells the scheduler."""

    message: ToScheduler


class Told(Struct, frozen=True, tag=True):
    """What the scheduler tells a worker."""

    message: FromScheduler


class Planned(Struct, frozen=True, tag=True):
    """What the scheduler tells a shard."""

    plan: Plan


class Exchange(Struct, frozen=True, tag=True):
    """A worker's messages to one shard, with what the shard's optimizer needs to know of the gradient."""

    messages: tuple[Push | Pull, ...]
    hyper: tuple[Hyper, ...] | None
    """The hyper-parameters of all groups, when a scheduler has changed them."""
    absent: tuple[int, ...]
    """Tensors that have no gradient in this push."""
    refusal: str
    """Why the gradient must not be used, if so. The worker looks while it copies, so all shards agree."""


class Fetch(Struct, frozen=True, tag=True):
    """A worker asks a shard to write its optimizer's state to this file of the run's folder."""

    file: str


class Fetched(Struct, frozen=True, array_like=True, tag=True):
    file: str
    error: str


class Letter(Struct, frozen=True, array_like=True):
    """A peer's message to another, and the slot of the sender that its parameters are in (`slots.py`)."""

    message: PeerMessage
    slot: int | None


class Parcel(Struct, frozen=True, array_like=True):
    """What one step of a peer's machine says to one neighbour."""

    letters: tuple[Letter, ...]


ToDriver = Describe | Play | Log | Leave | Ready | Rejected | Finished | Due | Saved | Status | PeerStatus | Ask
ToWorker = Begin | Dealt | Refuse | Stop | Reopened | Told | NewView
ToServer = Configure | NewView | Checkpoint | Finish | Planned

encode = msgspec.msgpack.Encoder().encode
decode_to_driver = msgspec.msgpack.Decoder(ToDriver).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_to_shard = msgspec.msgpack.Decoder(Exchange | Fetch).decode
decode_parcel = msgspec.msgpack.Decoder(Parcel).decode
decode_from_shard = msgspec.msgpack.Decoder(Fetched | Parameters).decode

BAD_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding something malformed may raise."""
