"""The state machine every node is: `handle(event) -> actions`, and nothing else changes its state.

One call does three things:

1. `on_<event>`: bookkeeping for that event;
2. `settle()`: the rules that depend on the state alone (raise V, release, start), until none fires. A rule
   written there also covers what everybody forgets: the slowest worker dies, so the minimum rises.
3. `check()`: the invariants, when `checks` is on (tests, virtual runs).

Equal events in equal order give equal actions: that is what makes a trace replayable and a simulation of
the very code that runs live possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from paceline.core.actions import Action
from paceline.core.events import (
    AckArrived,
    ComputeAborted,
    Event,
    GradientReady,
    GradientRejected,
    HelloArrived,
    NotifyArrived,
    OfferArrived,
    ParametersArrived,
    PlanArrived,
    PullArrived,
    PullRepeated,
    PushArrived,
    PushRejected,
    ReleaseArrived,
    ReplyArrived,
    Restored,
    ResyncArrived,
    RiseArrived,
    ServersChanged,
    TimerFired,
    TokenArrived,
    UpdateArrived,
    ViewChanged,
)


class InvariantViolated(AssertionError):
    """A machine is in a state that its own rules exclude: a bug in the machine or in a policy."""


class IllegalEvent(ValueError):
    """A runtime handed a machine an event that its role or state excludes. The state is unchanged."""


class Machine:
    """Base of all machines: dispatch by event type, then settle, then check."""

    METHODS: ClassVar[dict[type, str]] = {
        ViewChanged: "on_view_changed",
        Restored: "on_restored",
        ServersChanged: "on_servers_changed",
        PushArrived: "on_push_arrived",
        PushRejected: "on_push_rejected",
        PullArrived: "on_pull_arrived",
        PullRepeated: "on_pull_repeated",
        ParametersArrived: "on_parameters_arrived",
        GradientReady: "on_gradient_ready",
        GradientRejected: "on_gradient_rejected",
        TimerFired: "on_timer_fired",
        RiseArrived: "on_rise_arrived",
        ReleaseArrived: "on_release_arrived",
        NotifyArrived: "on_notify_arrived",
        ResyncArrived: "on_resync_arrived",
        PlanArrived: "on_plan_arrived",
        ComputeAborted: "on_compute_aborted",
        UpdateArrived: "on_update_arrived",
        TokenArrived: "on_token_arrived",
        AckArrived: "on_ack_arrived",
        HelloArrived: "on_hello_arrived",
        OfferArrived: "on_offer_arrived",
        ReplyArrived: "on_reply_arrived",
    }

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.checks = False

    def handle(self, event: Event) -> list[Action]:
        # By name: a table of bound methods in each machine would be what 10 000 of them mostly consist of.
        handler: Callable[[Any], None] | None = getattr(self, self.METHODS[type(event)], None)
        if handler is None:
            raise IllegalEvent(f"{type(self).__name__} does not take {type(event).__name__}")
        actions: list[Action] = []
        self.actions = actions
        handler(event)
        self.settle()
        if self.checks:
            self.check()
        return actions

    def settle(self) -> None:
        """Apply the state-triggered rules until none fires."""

    def check(self) -> None:
        """Raise `InvariantViolated` if the state is impossible."""


def require(condition: bool, what: str) -> None:
    """An invariant. Spelled as a function so that `python -O` keeps it."""
    if not condition:
        raise InvariantViolated(what)
