"""Facts, in the past tense. A machine is told what happened and when (`at`, seconds since the run began)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from paceline.core import messages


class Fact(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What all events have: when it happened."""

    at: float


class ViewChanged(Fact, frozen=True):
    """The authority on membership said who takes part from now on."""

    view: messages.View


class Restored(Fact, frozen=True):
    """A shard starts from a checkpoint: everything before `iteration` is finished, the slice is at `version`."""

    iteration: int
    version: int


class ServersChanged(Fact, frozen=True):
    """There are other servers from now on, and each shard has another part of the parameters (`nbytes` each).

    It happens when nothing is under way: every worker in `view` has its parameters and has pushed nothing since, no
    gradient is held, nobody waits. `versions` are what the shards had reached by then: all go on from the largest. A
    new shard learns how far everybody is: everything before `V` is finished, and `next` has (worker, iteration).
    `since` is when a worker was held for it.
    """

    since: float
    nbytes: tuple[int, ...]
    versions: tuple[int, ...]
    view: messages.View
    V: int
    next: tuple[tuple[int, int], ...]


class PushArrived(Fact, frozen=True):
    """A shard holds the whole slice of a worker's gradient.

    `significance` is |g| / |w| on that slice, for a policy that wants it (`PullGate.wants_significance`).
    """

    push: messages.Push
    significance: float | None = None


class PushRejected(Fact, frozen=True):
    """A slice arrived that must not be applied (not finite, for one). It counts as progress, not in a mean."""

    push: messages.Push
    reason: str


class PullArrived(Fact, frozen=True):
    """A worker asked this shard for parameters, or the scheduler whether it may ask the shards."""

    pull: messages.Pull


class PullRepeated(Fact, frozen=True):
    """A worker that waits asked this shard again, for the first time since the server was restarted.

    An answer of the server before the restart may never have reached it.
    """

    pull: messages.Pull


class ParametersArrived(Fact, frozen=True):
    """A shard's answer has reached the worker, whole."""

    parameters: messages.Parameters


class GradientReady(Fact, frozen=True):
    """The computation ordered by `Compute(iteration, attempt)` is done; `nbytes` per shard.

    The gradient stands for `weight` samples, and for so many local steps if it is the outer gradient of a round.
    """

    iteration: int
    attempt: int
    nbytes: tuple[int, ...]
    weight: messages.Weight = 1.0
    steps: int = 1


class TimerFired(Fact, frozen=True):
    """The time of a `SetTimer` is over. `timer` is the number it was set under."""

    timer: int


class RiseArrived(Fact, frozen=True):
    """A shard told the scheduler how far it is."""

    rise: messages.Rise


class ReleaseArrived(Fact, frozen=True):
    """The scheduler lets this worker pull."""

    release: messages.Release


class NotifyArrived(Fact, frozen=True):
    """A worker told the scheduler where it is."""

    notify: messages.Notify


class ResyncArrived(Fact, frozen=True):
    """The scheduler asks this worker to begin an iteration again."""

    resync: messages.Resync


class PlanArrived(Fact, frozen=True):
    """The scheduler told this shard where the workers are to stop."""

    plan: messages.Plan


class SliceNormArrived(Fact, frozen=True):
    """A shard told the reducer the norm of its part of a mean."""

    norm: messages.SliceNorm


class NormArrived(Fact, frozen=True):
    """The reducer told this shard the norm of a mean over all shards."""

    norm: messages.MeanNorm


class ComputeAborted(Fact, frozen=True):
    """The computation ordered by `Compute(iteration, attempt)` was given up: there is no gradient of it."""

    iteration: int
    attempt: int


class GradientRejected(Fact, frozen=True):
    """A peer's computation is done, and its gradient must not be applied (not finite, or none at all)."""

    iteration: int
    attempt: int
    nbytes: tuple[int, ...]
    reason: str


class UpdateArrived(Fact, frozen=True):
    """A neighbour's parameters have reached this peer, whole."""

    update: messages.Update


class TokenArrived(Fact, frozen=True):
    """An out-neighbour told this peer how far it is."""

    token: messages.Token


class AckArrived(Fact, frozen=True):
    """An out-neighbour has averaged in this peer's update."""

    ack: messages.Ack


class HelloArrived(Fact, frozen=True):
    """A neighbour introduced itself on a new edge."""

    hello: messages.Hello


class OfferArrived(Fact, frozen=True):
    """AD-PSGD: a neighbour wants to average."""

    offer: messages.Offer


class ReplyArrived(Fact, frozen=True):
    """AD-PSGD: the neighbour this peer had chosen answered."""

    reply: messages.Reply


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
    | SliceNormArrived
    | NormArrived
    | ComputeAborted
    | PeerEvent
)

ARRIVALS: dict[type, Callable[[float, Any], Event]] = {
    messages.Push: PushArrived,
    messages.Pull: PullArrived,
    messages.Parameters: ParametersArrived,
    messages.Rise: RiseArrived,
    messages.Release: ReleaseArrived,
    messages.Notify: NotifyArrived,
    messages.Resync: ResyncArrived,
    messages.Plan: PlanArrived,
    messages.SliceNorm: SliceNormArrived,
    messages.MeanNorm: NormArrived,
    messages.Update: UpdateArrived,
    messages.Token: TokenArrived,
    messages.Ack: AckArrived,
    messages.Hello: HelloArrived,
    messages.Offer: OfferArrived,
    messages.Reply: ReplyArrived,
}


def arrival_of(message: messages.Message, at: float) -> Event:
    """The event that a machine is told when `message` arrives at time `at`."""
    return ARRIVALS[type(message)](at, message)
