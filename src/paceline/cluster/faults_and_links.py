"""What happens at a time or an iteration: faults of single workers, other numbers of servers; and whose connection is
worse than the others'.

All are read from tables of a TOML file, key by key, so that what is wrong is said with its key, its value and what
is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

from paceline.cluster import costs
from paceline.errors import ConfigError

MOST_WORKERS = 100_000
FaultKind = Literal["crash", "leave", "join", "pause", "restart"]
T = TypeVar("T", bound=Struct)


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """A fault happens to a worker, at a time or when it starts an iteration."""

    kind: FaultKind
    worker: int
    at_s: float | None = None
    at_iteration: int | None = None
    for_s: float = 0.0
    """How long a pause is, or how long a worker that restarts is gone."""


class Resize(Struct, frozen=True, forbid_unknown_fields=True):
    """The number of servers changes, at a time or when the first worker computes an iteration (live)."""

    count: int
    at_s: float | None = None
    at_iteration: int | None = None


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """The connection of some workers: what they send and receive passes it besides the servers'."""

    workers: tuple[int, ...]
    latency_s: float = 0.0
    bandwidth: float = math.inf
    """Bytes a second in each direction."""

    def seconds(self, nbytes: int) -> float:
        """Returns how long a transfer takes on it, one way."""
        return self.latency_s + nbytes / self.bandwidth


class Edge(Struct, frozen=True, forbid_unknown_fields=True):
    """The connection between two peers, both ways, where it is worse than what their machines and links allow."""

    between: tuple[int, int]
    latency_s: float = 0.0
    bandwidth: float = math.inf


ALLOWED = {
    "kind": f"one of {', '.join(get_args(FaultKind))}",
    "count": "a whole number, 1 or more",
    "worker": "a whole number, 0 or more",
    "workers": "a list of whole numbers, 0 or more",
    "between": "a list of two whole numbers, 0 or more",
    "at_s": "a number of seconds, 0 or more",
    "at_iteration": "a whole number, 0 or more",
    "for_s": "a number of seconds, 0 or more",
    "latency_s": "a number of seconds, 0 or more",
    "bandwidth": "a number of bytes a second, 1 or more",
    "from_iteration": "a whole number, 0 or more",
    "until_iteration": "a whole number, 0 or more",
    **costs.ALLOWED,
}


def read(cls: type[T], table: Mapping[str, Any], label: str) -> T:
    """Makes a `cls` from a table; `label` says which table it is."""
    fields = {field.name: field for field in msgspec.structs.fields(cls)}
    for key, value in table.items():
        if key not in fields:
            raise ConfigError(f"{label} has no key {key!r} (it has: {', '.join(fields)})")
        try:
            msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError:
            raise ConfigError(f"{label}: {key}={value!r} must be {ALLOWED.get(key, costs.OTHERWISE)}") from None
        least = 1 if key in ("bandwidth", "count") else 0
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, int | float) and not least <= number < math.inf for number in numbers):
            raise ConfigError(f"{label}: {key}={value!r} is out of range: {ALLOWED.get(key, costs.OTHERWISE)}")
    for name, field in fields.items():
        if field.required and name not in table:
            raise ConfigError(f"{label} lacks {name}: {ALLOWED.get(name, costs.OTHERWISE)}")
    return msgspec.convert(dict(table), cls)


def check_fault(fault: Fault, workers: int) -> None:
    """Raises `ConfigError` if the fault cannot happen to so many workers."""
    if (fault.at_s is None) == (fault.at_iteration is None):
        raise ConfigError(f"{fault.kind} of worker {fault.worker} needs either at_s or at_iteration")
    if fault.kind == "join" and fault.at_s is None:
        raise ConfigError(f"join of worker {fault.worker} needs at_s: it has no iteration yet")
    most = MOST_WORKERS if fault.kind == "join" else workers
    if not 0 <= fault.worker < most:
        raise ConfigError(f"{fault.kind} of worker {fault.worker}: workers are 0 to {most - 1}")
    for name in ("at_s", "at_iteration", "for_s"):
        value = getattr(fault, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{fault.kind} of worker {fault.worker}: {name}={value} is out of range: 0 or more")


def check_resize(resize: Resize) -> None:
    if (resize.at_s is None) == (resize.at_iteration is None):
        raise ConfigError(f"a change to {resize.count} servers needs either at_s or at_iteration")


def check_workers(label: str, named: Sequence[int], workers: int) -> None:
    for worker in named:
        if worker >= workers:
            raise ConfigError(f"{label} of worker {worker}: workers are 0 to {workers - 1}")
