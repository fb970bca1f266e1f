"""The state of a shard's machine as plain values, and back: what a snapshot of a durable server holds besides tensors.

    state = take_snapshot(shard)              lists, numbers and texts; msgpack takes them
    restore_snapshot(fresh, state)            `fresh`, a new machine of the same policy, is now as `shard` was

Everything a machine remembers is in its attributes, those of its `Progress`, its `PushWeights` and its gate: numbers,
texts, messages of the core, and lists, dicts, sets and deques of them. They are written attribute by attribute and put
back into the objects that the fresh machine has in those places, so no class is looked up by a name in a file, and
nothing can be made that was not there. Policies are not written: they are frozen, and the fresh machine has its own.
The order of dicts is kept, for the order in which workers came may matter.

A gate of a user's own that remembers something else (a `random.Random`, an array, an object of its own) cannot be
frozen: `CannotSnapshot`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from paceline.core import messages
from paceline.core.policy import Policy
from paceline.core.progress import Progress
from paceline.core.pull_gate import PullGate
from paceline.core.push_weights import PushWeights
from paceline.core.shard import Shard

PLAIN = (type(None), bool, int, float, str, bytes)
MESSAGES: dict[str, Any] = {
    each.__name__: each
    for each in vars(messages).values()
    if isinstance(each, type) and (issubclass(each, msgspec.Struct) or each is messages.Node)
}
OF_THE_MOMENT = ("actions", "checks")
"""Attributes of a machine that are not part of its memory."""


class CannotSnapshot(TypeError):
    """A machine remembers something that cannot be written down."""


def take_snapshot(machine: Shard) -> Any:
    """Returns what the machine remembers, between two events."""
    return _freeze_object(machine, type(machine).__name__)


def restore_snapshot(machine: Shard, state: Any) -> None:
    """Has a fresh machine remember what is in a snapshot."""
    V = dict(dict(state[1])["progress"][1])["V"]
    machine.adopt(machine.plan.in_force(machine.rank, V))
    _thaw_object(machine, state)


def _freeze_object(thing: object, where: str) -> Any:
    kept = [(name, value) for name, value in vars(thing).items() if name not in OF_THE_MOMENT]
    return ["object", [[name, _freeze(value, f"{where}.{name}")] for name, value in kept]]


def _freeze(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (list, tuple):
        return [kind.__name__, [_freeze(each, where) for each in value]]
    if kind in (set, frozenset):
        return [kind.__name__, [_freeze(each, where) for each in sorted(value)]]
    if kind is deque:
        return ["deque", [_freeze(each, where) for each in value], value.maxlen]
    if kind is dict:
        return ["dict", [[_freeze(key, where), _freeze(each, where)] for key, each in value.items()]]
    if MESSAGES.get(kind.__name__) is kind:
        fields = value if kind is messages.Node else msgspec.structs.astuple(value)
        return ["message", kind.__name__, [_freeze(each, where) for each in fields]]
    if isinstance(value, Policy):
        return ["policy"]
    if isinstance(value, PullGate | Progress | PushWeights):
        return _freeze_object(value, where)
    raise CannotSnapshot(f"{where} is a {kind.__qualname__}, which cannot be written down")


def _thaw_object(thing: object, state: Any) -> None:
    for name, frozen in state[1]:
        kind = frozen[0] if isinstance(frozen, list | tuple) else ""
        if kind == "object":
            _thaw_object(getattr(thing, name), frozen)
        elif kind != "policy":
            setattr(thing, name, _thaw(frozen))


def _thaw(frozen: Any) -> Any:
    if not isinstance(frozen, list | tuple):
        return frozen
    match frozen[0]:
        case "list":
            return [_thaw(each) for each in frozen[1]]
        case "tuple":
            return tuple(_thaw(each) for each in frozen[1])
        case "set":
            return {_thaw(each) for each in frozen[1]}
        case "frozenset":
            return frozenset(_thaw(each) for each in frozen[1])
        case "deque":
            return deque((_thaw(each) for each in frozen[1]), frozen[2])
        case "dict":
            return {_thaw(key): _thaw(each) for key, each in frozen[1]}
        case "message":
            return MESSAGES[frozen[1]](*[_thaw(each) for each in frozen[2]])
        case _:
            raise CannotSnapshot(f"{frozen[0]!r} cannot stand in a list or a dict")
