"""The messages between the processes of a live run, besides the core's. Encoded by msgspec.

worker -> driver     Describe (the model, from worker 0), Log, Rejected, Leave; Ask, for the scheduler
driver -> worker     Begin, ServerRestarted, Refuse, Stop; Released, from the scheduler
driver -> server     Enrol, Configure, StartClock, NewView, Checkpoint, Finish; Planned, Reduced
server -> driver     Ready, Status, Due, Saved, Undurable, Finished; Ask, for the scheduler; Measured
worker -> server     Exchange: push and pull of one iteration in one message; Fetch; from other hosts Staged, Commit
server -> worker     the core's Parameters; Fetched; to other hosts CodedParameters (`coded_messages.py`)
Between hosts these are in an `Envelope` (`protocol/envelope.py`), with gradients and parameters as frames behind it.
Without servers: PeerStatus and Without to the driver, NewView and Done from it, and from peer to peer a Parcel of the
core's messages. `lease_messages.py`, `resizing_messages.py`, `round_messages.py` and `script_calls.py` list theirs.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paceline.core.events import ServersChanged
from paceline.core.local_steps import LocalSteps
from paceline.core.messages import MeanNorm, Parameters, PeerMessage, Plan, Pull, Push, Release, ToScheduler, View
from paceline.core.topology import Topology
from paceline.errors import ConfigError
from paceline.runtime.live.protocol import lease_messages, requests, resizing_messages, round_messages, script_calls
from paceline.runtime.live.protocol.configuration import Endpoint, ModelDevice, ServerDevice
from paceline.runtime.live.protocol.records import DurabilityOptions, ShardEntry
from paceline.tensors.assignment import Assignment
from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.piece_optimizers import Hyper


class Describe(Struct, frozen=True, tag=True):
    """What a worker is about to train. Worker 0's becomes the run's; the others' must have the same digest."""

    rank: int
    incarnation: int
    digest: str
    layout: Layout | None
    optimizer: OptimizerSpec | None
    policy: str | None
    aliases: dict[str, str]
    """The second names of tied weights."""
    endpoint: Endpoint | None = None
    """Where a peer can be reached, in a run on several hosts."""
    model_on: ModelDevice = ModelDevice()
    local_steps: LocalSteps | None = None
    """How workers train alone between exchanges, if they do."""


class Log(Struct, frozen=True, tag=True):
    rank: int
    at: float
    iteration: int
    updates: int
    values: dict[str, float]


class Leave(Struct, frozen=True, tag=True):
    rank: int
    incarnation: int
    iteration: int = 0
    """The first iteration that it has not done."""
    stays: bool = False
    """Whether it is a peer that answers its neighbours until a view does not name it any more."""
    finished: bool = True
    """Whether its script came to its end; false if a scenario has it leave earlier."""
    retires: bool = False
    """Whether its script goes on without training: another `Leave` follows."""


class Done(Struct, frozen=True, tag=True):
    """These (rank, incarnation) have finished: what they have not sent by now will not come."""

    processes: tuple[tuple[int, int], ...]


class Without(Struct, frozen=True, tag=True):
    """A peer waits for what this finished peer will never send: it is to be no member any more."""

    rank: int
    incarnation: int


class Begin(Struct, frozen=True, tag=True):
    """The servers are ready and the worker may pull. `epoch_s` is the monotonic time of second 0."""

    view: View
    policy: str
    epoch_s: float
    hyper: tuple[Hyper, ...] | None
    """The run's present hyper-parameters, for a worker that joins."""
    assignment: Assignment
    """Which server holds which part of the parameters."""
    endpoints: tuple[Endpoint, ...]
    """Where each server can be reached; without servers, as in `NewView`."""
    changed: ServersChanged | None
    """The latest change of servers, if any, which is replayed to the machine of a joining worker."""
    resumed: bool
    """Whether what is not trained comes from a checkpoint, for worker 0 too."""
    iteration: int = 0
    """Without servers: the iterations of the checkpoint that the run goes on from."""
    graph: Topology | None = None
    """Without servers: the communication graph, which may be in a file that only the driver's host has."""
    schedulers: bytes = b""
    """The states of LR schedulers that the run keeps (`LRSchedulerStates`)."""


class Refuse(Struct, frozen=True, tag=True):
    reason: str


class Stop(Struct, frozen=True, tag=True):
    reason: str
    leaves: bool = False
    """Whether a scenario has this worker leave while the others go on."""


class ServerRestarted(Struct, frozen=True, tag=True):
    """A server was restarted: whoever waits for its answer is to repeat the request to its new incarnation."""

    shard: int
    endpoint: Endpoint


class Journalled(Struct, frozen=True):
    """A server is to keep a log (`storage/update_log.py`), and with `recover` to begin with what it holds."""

    folder: str
    durable: DurabilityOptions
    recover: bool


class Configure(Struct, frozen=True, tag=True):
    """What a server is to hold, and from which state it begins."""

    policy: str
    layout: Layout
    assignment: Assignment
    optimizer: OptimizerSpec
    epoch_s: float | None
    """The monotonic time of second 0, if the run has begun; else it comes in `StartClock`."""
    checkpoint: str | None
    """The checkpoint to start from instead of worker 0's values, if any."""
    reslice: resizing_messages.Reslice | None
    """The change of servers after which this one starts with what others have written, if any."""
    checkpoint_every: int | None
    """The number of updates after which to send `Due`."""
    journal: Journalled | None = None
    """Set if the server is durable."""
    step_on: ServerDevice = ServerDevice()


class StartClock(Struct, frozen=True, tag=True):
    """Servers and workers are ready and training begins: the monotonic time of second 0."""

    epoch_s: float


class Checkpoint(Struct, frozen=True, tag=True):
    """The server is to write its part of a checkpoint into this folder."""

    folder: str


class Due(Struct, frozen=True, tag=True):
    """A checkpoint is due, by the number of updates."""


class Saved(Struct, frozen=True, tag=True):
    """A server has written its part of a checkpoint, unless there was an error."""

    folder: str
    shard: int
    entry: ShardEntry | None
    error: str


class WorkerStatus(Struct, frozen=True, array_like=True):
    """A worker as a shard sees it: iterations pushed, why it waits (or ""), staleness of its last push."""

    pushed: int
    waits: str
    staleness: int


class Status(Struct, frozen=True, tag=True):
    """The workers as a shard sees them."""

    shard: int
    workers: dict[int, WorkerStatus]
    hyper: tuple[Hyper, ...] | None
    """The hyper-parameters, if schedulers have changed them."""


class PeerStatus(Struct, frozen=True, tag=True):
    """The status of a peer. The first one means that it has parameters."""

    rank: int
    incarnation: int
    status: WorkerStatus
    hyper: tuple[Hyper, ...] | None


class NewView(Struct, frozen=True, tag=True):
    """The members of the run from now on."""

    view: View
    endpoints: tuple[Endpoint, ...] = ()
    """Where each peer can be reached, in the order of the view, in a run on several hosts."""


class Finish(Struct, frozen=True, tag=True):
    """The run is over: the server is to write its part of the model and end."""


class Ready(Struct, frozen=True, tag=True):
    """The server listens; a second one says that it is configured."""

    shard: int
    configured: bool
    endpoint: Endpoint
    problem: str = ""  # why it steps on the CPU, if it was to step on a device


class Enrol(Struct, frozen=True, tag=True):
    """Whoever has this key is this process of the run; "" revokes the key it had."""

    key: str
    name: str
    """RANK:INCARNATION"""


class Rejected(Struct, frozen=True, tag=True):
    """A worker's gradient was not finite, which the driver's user is to know."""

    worker: int
    iteration: int
    reason: str


class Cost(Struct, frozen=True):
    """What being durable has cost a server's last incarnation: bytes and pushes logged, snapshots begun, time spent."""

    nbytes: int
    pushes: int
    snapshots: int
    seconds: float
    alive_s: float


class Finished(Struct, frozen=True, tag=True):
    """The server has written its part of the model and ends."""

    shard: int
    cost: Cost | None = None
    """Set if it was durable."""


class Undurable(Struct, frozen=True, tag=True):
    """A server cannot write its log any more (`lost`), or could not write a snapshot."""

    shard: int
    error: str
    lost: bool


class Ask(Struct, frozen=True, tag=True):
    """A message of a worker or a shard to the scheduler."""

    message: ToScheduler


class Released(Struct, frozen=True, tag=True):
    """The scheduler's `Release` on its way to a worker that waits. A `Resync` takes another way
    (`storage/abort_flag.py`)."""

    message: Release


class Planned(Struct, frozen=True, tag=True):
    """A message of the scheduler to a shard."""

    plan: Plan


class Measured(Struct, frozen=True, tag=True):
    """A message of a shard to the reducer, with the fields of the core's `SliceNorm`."""

    shard: int
    iteration: int
    squared: float | None


class Reduced(Struct, frozen=True, tag=True):
    """A message of the reducer to a shard."""

    norm: MeanNorm


class Exchange(Struct, frozen=True, tag=True):
    """A worker's messages to one shard, with what the shard's optimizer needs besides the gradient."""

    messages: tuple[Push | Pull, ...]
    hyper: tuple[Hyper, ...] | None
    """The hyper-parameters of all groups, when a scheduler has changed them."""
    absent: tuple[int, ...]
    """Tensors that have no gradient in this push."""
    refusal: str
    """Why the gradient must not be used, or "". The worker checks while it copies, so all shards agree."""
    held: int = 0
    """The number of the parameters that the worker has, where they come in a code (`coded_messages.py`)."""


class Staged(Struct, frozen=True, tag=True):
    """A frame, for another host, of a gradient that is still being computed (`worker/early_frames.py`)."""

    iteration: int
    attempt: int
    frame: int


class Commit(Struct, frozen=True, tag=True):
    """An exchange, for another host, whose gradient is in staged frames and in those behind this message."""

    exchange: Exchange
    attempt: int
    staged: tuple[int, ...]


class Fetch(Struct, frozen=True, tag=True):
    """A worker asks a shard to write its optimizer's state to a file of the run's folder."""

    file: str


class Fetched(Struct, frozen=True, array_like=True, tag=True):
    """A shard has written its optimizer's state, unless there was an error."""

    file: str
    error: str


class Letter(Struct, frozen=True, array_like=True):
    """A peer's message to another, and the sender's slot with its parameters (`peer/parameter_slots.py`)."""

    message: PeerMessage
    slot: int | None


class Parcel(Struct, frozen=True, array_like=True):
    """The messages of one step of a peer's machine to one neighbour."""

    letters: tuple[Letter, ...]


ToDriver = (
    Describe | Log | Leave | Ready | Rejected | Finished | Due | Saved | Status | PeerStatus | Ask
    | Without | Undurable | Measured | lease_messages.LeaseEvents | resizing_messages.ToDriver
    | script_calls.LRSchedulerStates | script_calls.EndRun | script_calls.AtBarrier | script_calls.Awaited
    | round_messages.Begun | requests.StopAsked | requests.CheckpointAsked
)  # fmt: skip
ToWorker = (
    Begin | Refuse | Stop | ServerRestarted | Released | NewView | Done | lease_messages.LeaseAnswer
    | resizing_messages.ToWorker | script_calls.BarrierOpened | script_calls.Follow | round_messages.Planned
)  # fmt: skip
ToServer = (
    Enrol | Configure | StartClock | NewView | Checkpoint | Finish | Planned | Reduced | resizing_messages.ToServer
    | script_calls.Absent
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode_to_driver = msgspec.msgpack.Decoder(ToDriver).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_outcome = msgspec.msgpack.Decoder(resizing_messages.Outcome).decode
decode_to_shard = msgspec.msgpack.Decoder(Exchange | Fetch).decode
decode_remote_request = msgspec.msgpack.Decoder(Exchange | Fetch | Staged | Commit).decode
decode_parcel = msgspec.msgpack.Decoder(Parcel).decode
decode_from_shard = msgspec.msgpack.Decoder(Fetched | Parameters).decode

BAD_MESSAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError)
"""The exceptions that decoding a malformed message may raise."""
