"""Orders, in the imperative. A machine returns them; a runtime carries them out, in list order.

`Apply`, `Reduce`, `Drop`, `Answer` and `Park` are done before the machine's next event, or deferred without an
observable effect, and no event reports their completion. `Compute` ends in exactly one `GradientReady` (of a peer,
perhaps `GradientRejected`) or, if `AbortCompute` came in time, `ComputeAborted`; `SetTimer` in one `TimerFired` while
its machine lives. Each handle that arrives is consumed exactly once, by `Apply`, `Reduce` or `Drop`.
"""

from __future__ import annotations

from msgspec import Struct

from paceline.core.messages import Handle, Node, Parameters, Pull, Sendable


class Compute(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Worker, peer: compute the gradient of `iteration` on the parameters that are here."""

    iteration: int
    attempt: int


class Send(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Any machine: send `message` to the node `to`. Messages to one node arrive in the order they were sent."""

    to: Node
    message: Sendable


class Apply(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Shard, peer: take a step of the optimizer on the mean of `handles` at `weight` times its rate, making `version`.

    `norm` is that of the mean over all shards, if means are clipped and `Measure` has asked for it.
    """

    handles: tuple[Handle, ...]
    weight: float
    version: int
    norm: float | None = None

    def staleness(self, handle: Handle) -> int:
        """Returns how many versions were made since the parameters of this gradient were read.

        A restored shard may be behind its workers; then the staleness is 0.
        """
        return max(0, self.version - 1 - handle.version)


class Measure(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Shard: tell the reducer the squared norm of the mean of `handles` on this slice, and keep them.

    One `NormArrived` of that iteration follows while the machine lives, and then the handles are applied.
    """

    iteration: int
    handles: tuple[Handle, ...]


class Drop(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Shard, peer: forget this gradient or update; it must not touch the parameters."""

    handle: Handle
    reason: str


class Answer(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Shard: send the slice as it is now. If the pull had been parked, `reason` says what released it."""

    parameters: Parameters
    reason: str
    released_by: int


class Park(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Shard or scheduler: do not answer yet.

    `waits_for` names some of the workers that are waited for, `waits_for_count` counts them all.
    """

    pull: Pull
    reason: str
    waits_for: tuple[int, ...]
    waits_for_count: int


class SetTimer(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Any machine: deliver `TimerFired(timer)` after so many seconds. It cannot be recalled; a late one is ignored."""

    timer: int
    after_s: float


class AbortCompute(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Worker: give up the computation ordered by `Compute(iteration, attempt)`, unless it is done already."""

    iteration: int
    attempt: int


class Reduce(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Peer: replace the parameters by `own` times themselves plus the updates, each times its weight."""

    iteration: int
    handles: tuple[Handle, ...]
    weights: tuple[float, ...]
    own: float


class Wait(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Peer: do nothing. It tells the report why the peer does not enter its next iteration, and for whom it waits."""

    iteration: int
    reason: str
    waits_for: tuple[int, ...]


Action = Compute | AbortCompute | Send | Measure | Apply | Drop | Answer | Park | SetTimer | Reduce | Wait
