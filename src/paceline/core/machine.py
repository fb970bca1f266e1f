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

import re
from collections.abc import Callable
from typing import Any, ClassVar, get_args

from paceline.core.actions import Action
from paceline.core.events import Event


class InvariantViolated(AssertionError):
    """A machine is in a state that its own rules exclude: a bug in the machine or in a policy."""


class IllegalEvent(ValueError):
    """A runtime handed a machine an event that its role or state excludes. The state is unchanged."""


def method_named_after(kind: type) -> str:
    """Returns the name of an event or an action as that of a method: push_arrived for `PushArrived`."""
    return re.sub("(?<!^)([A-Z])", r"_\1", kind.__name__).lower()


class Machine:
    """The base of all machines: it dispatches an event by its type, then settles, then checks."""

    METHODS: ClassVar[dict[type, str]] = {event: f"on_{method_named_after(event)}" for event in get_args(Event)}

    HANDLERS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {}
    """The methods that a class of machines has, by the event."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.HANDLERS = {event: getattr(cls, name) for event, name in cls.METHODS.items() if hasattr(cls, name)}

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.checks = False

    def handle(self, event: Event) -> list[Action]:
        handler = self.HANDLERS.get(type(event))
        if handler is None:
            raise IllegalEvent(f"{type(self).__name__} does not take {type(event).__name__}")
        actions: list[Action] = []
        self.actions = actions
        handler(self, event)
        self.settle()
        if self.checks:
            self.check()
        return actions

    def settle(self) -> None:
        """Applies the state-triggered rules until none fires."""

    def check(self) -> None:
        """Raises `InvariantViolated` if the state is impossible."""


def require(condition: bool, what: str) -> None:
    """Raises `InvariantViolated` unless the condition holds. It is a function so that `python -O` keeps it."""
    if not condition:
        raise InvariantViolated(what)
