"""What the processes of a live run say to each other, besides the core's messages. Encoded by msgspec.

worker -> driver     Describe (the model, from worker 0), Play, Log, Rejected, Held, Want, Leave; Ask, for the scheduler
driver -> worker     Begin, Dealt, Reopened, Hold, Resliced, Refuse, Stop; Told, from the scheduler
driver -> server     Enrol, Configure, NewView, Checkpoint, Survey, Give, Reslice, Retire, Finish, Planned
server -> driver     Ready, Status, Due, Saved, Standing, Gave, Undurable, Finished; Ask, for the scheduler
`paceline servers` -> driver     Want; and back: Outcome
worker -> server     Exchange: push and pull of one iteration in one message; Fetch; from other hosts Staged, Commit
server -> worker     the core's Parameters; Fetched
Between hosts these are in a Sealed (`sealing.py`), with gradients and parameters as frames behind it.

Without servers: PeerStatus and Without to the driver, NewView and Done from it, and from peer to peer a Parcel of the
core's messages.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paceline.core.deck import Deal, HandAcknowledged, HandRequested, HandReturned, Pass
from paceline.core.events import ServersChanged
from paceline.core.messages import Parameters, PeerMessage, Plan, Pull, Push, Release, ToScheduler, View
from paceline.core.topology import Topology
from paceline.runtime.live.checkpoint import Shard as Entry
from paceline.runtime.live.configuration import Door
from paceline.runtime.live.server.durable import Durable
from paceline.tensors.assignment import Assignment
from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.steppers import Hyper


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
    door: Door | None = None
    """Where a peer is, in a run that crosses hosts."""


class Log(Struct, frozen=True, tag=True):
    rank: int
    at: float
    iteration: int
    updates: int
    values: dict[str, float]


class Leave(Struct, frozen=True, tag=True):
    rank: int
    incarnation: int
    stays: bool = False
    """A peer that is done, and answers its neighbours until a view does not name it any more."""


class Done(Struct, frozen=True, tag=True):
    """These (rank, incarnation) have done their iterations: what they have not sent by now will not come."""

    processes: tuple[tuple[int, int], ...]


class Without(Struct, frozen=True, tag=True):
    """A peer waits for what one that is done will never send: it is to be no member any more."""

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
    assignment: Assignment
    """Which server holds which part of the parameters."""
    doors: tuple[Door, ...]
    """Where each server is; without servers, as in `NewView`."""
    changed: ServersChanged | None
    """How the number of servers has changed, if it has: this worker's machine starts with that it began with."""
    resumed: bool
    """What is not trained comes from the checkpoint, for worker 0 too."""
    iteration: int = 0
    """Without servers: the iterations before this run, of the checkpoint it goes on from."""
    graph: Topology | None = None
    """Without servers: who sends to whom. It may be in a file, which only the driver's host has."""


class Refuse(Struct, frozen=True, tag=True):
    reason: str


class Stop(Struct, frozen=True, tag=True):
    reason: str


class Reopened(Struct, frozen=True, tag=True):
    """A server was restarted: whoever waits for its answer is to say again what it said, to its new life."""

    shard: int
    door: Door


class Hold(Struct, frozen=True, tag=True):
    """Do not push this iteration or any later one, and say so when it comes to that; None: go on.

    `change` counts the changes of servers begun in the run, so that what was said of one is not taken for another.
    """

    change: int
    at: int | None


class Held(Struct, frozen=True, tag=True):
    """This worker has all its parameters, and does not push iteration `iteration` until it is told."""

    change: int
    rank: int
    incarnation: int
    iteration: int


class Resliced(Struct, frozen=True, tag=True):
    """The servers are others from now on: go on with these."""

    assignment: Assignment
    doors: tuple[Door, ...]
    event: ServersChanged


class Survey(Struct, frozen=True, tag=True):
    """Tell how everybody stands on this shard, now and whenever that has changed; None: no more."""

    change: int | None


class Standing(Struct, frozen=True, tag=True):
    """How everybody stands on a shard: under which view, who waits, whether gradients wait for others."""

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
    """Leave what other servers are to have in the run's folder. `number` counts the changes."""

    number: int
    before: Assignment
    after: Assignment


class Gave(Struct, frozen=True, tag=True):
    shard: int
    number: int
    error: str


class Reslice(Struct, frozen=True, tag=True):
    """Take what others have left for you, and go on with the part that is yours from now on."""

    give: Give
    event: ServersChanged


class Retire(Struct, frozen=True, tag=True):
    """This server has given everything away: end."""


class Want(Struct, frozen=True, tag=True):
    """Somebody wants another number of servers: a person, or the scenario (its entry `entry`)."""

    servers: int
    peer: str = ""
    """Who is to be told what came of it."""
    entry: int | None = None


class Outcome(Struct, frozen=True, tag=True):
    """What came of it, in words."""

    text: str
    refused: bool


class Journalled(Struct, frozen=True):
    """A server is to log what it does (`durable.py`), and perhaps to begin with what its last life has logged."""

    folder: str
    durable: Durable
    recover: bool


class Configure(Struct, frozen=True, tag=True):
    policy: str
    layout: Layout
    assignment: Assignment
    optimizer: OptimizerSpec
    epoch_s: float
    checkpoint: str | None
    """Start from this folder instead of worker 0's values."""
    reslice: Reslice | None
    """Or from what other servers have left, the number of servers having changed."""
    checkpoint_every: int | None
    """Say `Due` after so many updates."""
    journal: Journalled | None = None
    """If the server is durable."""


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
    doors: tuple[Door, ...] = ()
    """For peers of a run that crosses hosts: where each member is, in the order of the view."""


class Finish(Struct, frozen=True, tag=True):
    pass


class Ready(Struct, frozen=True, tag=True):
    """The server is there; then, that it is configured."""

    shard: int
    configured: bool
    door: Door


class Enrol(Struct, frozen=True, tag=True):
    """Whoever has this key speaks for this process of the run, and nobody else does; "": nobody does any more."""

    key: str
    name: str
    """RANK:INCARNATION"""


class Rejected(Struct, frozen=True, tag=True):
    """A worker's gradient was not finite: for the person at the driver."""

    worker: int
    iteration: int
    reason: str


class Cost(Struct, frozen=True):
    """What being durable has cost a server, in its last life: bytes and pushes logged, snapshots begun, time spent."""

    nbytes: int
    pushes: int
    snapshots: int
    seconds: float
    alive_s: float


class Finished(Struct, frozen=True, tag=True):
    shard: int
    cost: Cost | None = None
    """If it was durable."""


class Undurable(Struct, frozen=True, tag=True):
    """A server cannot write its log any more (`lost`), or could not make a snapshot of itself."""

    shard: int
    error: str
    lost: bool


class Ask(Struct, frozen=True, tag=True):
    """What a worker or a shard tells the scheduler."""

    message: ToScheduler


class Told(Struct, frozen=True, tag=True):
    """What the scheduler tells a worker that waits."""

    message: Release


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


class Staged(Struct, frozen=True, tag=True):
    """From another host: a frame of the gradient that is being computed (`early.py`)."""

    iteration: int
    attempt: int
    frame: int


class Commit(Struct, frozen=True, tag=True):
    """From another host: an exchange whose gradient is in these frames, which are staged, and in those behind it."""

    exchange: Exchange
    attempt: int
    staged: tuple[int, ...]


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


ToDriver = (
    Describe | Play | Log | Leave | Ready | Rejected | Finished | Due | Saved | Status | PeerStatus | Ask | Held
    | Standing | Gave | Want | Without | Undurable
)  # fmt: skip
ToWorker = Begin | Dealt | Refuse | Stop | Reopened | Told | Hold | Resliced | NewView | Done
ToServer = Enrol | Configure | NewView | Checkpoint | Finish | Planned | Survey | Give | Reslice | Retire

encode = msgspec.msgpack.Encoder().encode
decode_to_driver = msgspec.msgpack.Decoder(ToDriver).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
decode_to_shard = msgspec.msgpack.Decoder(Exchange | Fetch).decode
decode_from_afar = msgspec.msgpack.Decoder(Exchange | Fetch | Staged | Commit).decode
decode_parcel = msgspec.msgpack.Decoder(Parcel).decode
decode_from_shard = msgspec.msgpack.Decoder(Fetched | Parameters).decode

BAD_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding something malformed may raise."""
