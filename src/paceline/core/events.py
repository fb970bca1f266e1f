"""Facts, in the past tense. A machine is told what happened and when (`at`, seconds since the run began)."""

from __future__ import annotations

from msgspec import Struct

from paceline.core.messages import (
    Ack,
    Hello,
    Notify,
    Offer,
    Parameters,
    Plan,
    Pull,
    Push,
    Release,
    Reply,
    Resync,
    Rise,
    Token,
    Update,
    View,
)


class ViewChanged(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The authority on membership said who takes part from now on."""

    at: float
    view: View


class Restored(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A shard starts from a checkpoint: everything before `iteration` is finished, the slice is at `version`."""

    at: float
    iteration: int
    version: int


class ServersChanged(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """There are other servers from now on, and each shard has another part of the parameters (`nbytes` each).

    It happens when nothing is under way: every worker in `view` has its parameters and has pushed nothing since, no
    gradient is held, nobody waits. `versions` are what the shards had by then: all go on from the largest. A shard
    that is new learns how far everybody is: everything before `V` is finished, `next` has (worker, iteration).
    `since` is when a worker began to stand still for it.
    """

    at: float
    since: float
    nbytes: tuple[int, ...]
    versions: tuple[int, ...]
    view: View
    V: int
    next: tuple[tuple[int, int], ...]


class PushArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A shard holds the whole slice of a worker's gradient.

    `significance` is |g| / |w| on that slice, for a policy that wants it (`Gate.wants_significance`).
    """

    at: float
    push: Push
    significance: float | None = None


class PushRejected(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A slice arrived that must not be applied (not finite, for one). It counts as progress, not in a mean."""

    at: float
    push: Push
    reason: str


class PullArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A worker asked this shard for parameters, or the scheduler whether it may ask the shards."""

    at: float
    pull: Pull


class PullRepeated(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A worker that waits asked this shard again, for the first time in a new life of its server.

    What the life before has answered may never have reached it.
    """

    at: float
    pull: Pull


class ParametersArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A shard's answer has reached the worker, whole."""

    at: float
    parameters: Parameters


class GradientReady(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The computation ordered by `Compute(iteration, attempt)` is done; `nbytes` per shard."""

    at: float
    iteration: int
    attempt: int
    nbytes: tuple[int, ...]


class TimerFired(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The time of a `SetTimer` is over. `timer` is the number it was set under."""

    at: float
    timer: int


class RiseArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A shard told the scheduler how far it is."""

    at: float
    rise: Rise


class ReleaseArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The scheduler lets this worker pull."""

    at: float
    release: Release


class NotifyArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A worker told the scheduler where it is."""

    at: float
    notify: Notify


class ResyncArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The scheduler asks this worker to begin an iteration again."""

    at: float
    resync: Resync


class PlanArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The scheduler told this shard where the workers are to stop."""

    at: float
    plan: Plan


class ComputeAborted(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The computation ordered by `Compute(iteration, attempt)` was given up: there is no gradient of it."""

    at: float
    iteration: int
    attempt: int


class GradientRejected(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A peer's computation is done, and its gradient must not be applied (not finite, or none at all)."""

    at: float
    iteration: int
    attempt: int
    nbytes: tuple[int, ...]
    reason: str


class UpdateArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A neighbour's parameters have reached this peer, whole."""

    at: float
    update: Update


class TokenArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """An out-neighbour told this peer how far it is."""

    at: float
    token: Token


class AckArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """An out-neighbour has averaged in this peer's update."""

    at: float
    ack: Ack


class HelloArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A neighbour said the first word on a new edge."""

    at: float
    hello: Hello


class OfferArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """AD-PSGD: a neighbour wants to average."""

    at: float
    offer: Offer


class ReplyArrived(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """AD-PSGD: the neighbour this peer had chosen answered."""

    at: float
    reply: Reply


PeerEvent = GradientRejected | UpdateArrived | TokenArrived | AckArrived | HelloArrived | OfferArrived | ReplyArrived
Event = (
    ViewChanged
    | Restored
    | ServersChanged
    | PushArrived
    | PushRejected
    | PullArrived
    | PullRepeated
    | ParametersArrived
    | GradientReady
    | TimerFired
    | RiseArrived
    | ReleaseArrived
    | NotifyArrived
    | ResyncArrived
    | PlanArrived
    | ComputeAborted
    | PeerEvent
)
