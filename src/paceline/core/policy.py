"""What a policy is: a frozen, comparable set of hyper-parameters with a text form and a machine per node.

A central policy (one with parameter servers) states four things, FluentPS's conditions (Yao et al. 2019, III.B):

    may_pull(i, V)               the pull condition: may a worker that has pushed iteration i read now?
    freed_at(i, V)               the V at which a pull that was parked is answered
    finishes(there, expected, n) the push condition: is iteration V finished, with so many gradients of it?
    on_arrival                   is a gradient applied when it arrives, or the mean of the iteration when it finishes?

and `why` in words, for the report and the dashboard. Conditions that need a memory, or a coin, are in the
policy's `gate` (`core/pull_gate.py`). Everything else is in `core/shard.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.core.machine import Machine
from paceline.core.messages import Members, Role
from paceline.core.progress import Progress, name_workers
from paceline.core.pull_gate import PullGate
from paceline.core.shard import Shard
from paceline.core.spec import Spec, option
from paceline.core.topology import Topology
from paceline.core.worker import Worker
from paceline.errors import ConfigError

SCALES = ("workers", "none")


@dataclass(frozen=True)
class Policy(Spec):
    """A policy says who waits for whom. `str(policy)` is its text form; `policies.parse` reads it back."""

    kind: ClassVar[str] = "policy"
    paper: ClassVar[str] = ""
    """The paper, section or table the rule comes from (`docs/papers.md`)."""
    has_scheduler: ClassVar[bool] = False
    """Whether one more node, the scheduler, decides for all shards together."""
    balances: ClassVar[bool] = True
    """Whether workers wait for slower ones by iterations, so that batches balanced by speed make sense."""
    refuses_local_steps: ClassVar[str] = ""
    """Why local steps make no sense under it, in words; nothing if they do (`core/local_steps.py`)."""
    servers_may_change: ClassVar[bool] = True
    """Whether the number of servers may change while a run goes on."""

    def machine(self, role: Role, rank: int, members: Members, seed: int) -> Machine:
        """Makes the machine of one node. `members` is the size as configured; views say who is alive."""
        raise NotImplementedError

    def validate(self, members: Members) -> None:
        """Raises `ConfigError` if this policy cannot run with so many workers and servers."""


@dataclass(frozen=True)
class CentralPolicy(Policy):
    """A policy of workers and parameter servers: two predicates, explained on top of its file."""

    on_arrival: ClassVar[bool]
    in_step: ClassVar[bool] = False
    """Whether every live worker waits for the parameters whenever they change; then one copy of them is enough for a
    host.

    It is a promise, checked by `paceline.testing`. It is not inherited: a subclass that changes a condition must make
    it again.
    """

    def __init_subclass__(cls) -> None:
        cls.in_step = cls.__dict__.get("in_step", False)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__.lower()

    def may_pull(self, i: int, V: int) -> bool:
        raise ConfigError(f"{self} does not say who may read: it lacks may_pull(self, i, V)")

    def freed_at(self, i: int, V: int) -> int:
        raise ConfigError(f"{self} makes workers wait but does not say until which V: it lacks freed_at(self, i, V)")

    def finishes(self, there: int, expected: int, workers: int) -> bool:
        """Whether iteration V is finished; unless a policy says otherwise, when all expected gradients are there.

        `there` counts the gradients of iteration V of live workers, `expected` the live workers that have not skipped
        it, `workers` is the number configured.
        """
        return there >= expected

    def finishes_overtime(self, there: int, expected: int, workers: int) -> bool:
        """Whether iteration V is finished once the time that the gate's `note_rise` gave it is over."""
        return self.finishes(there, expected, workers)

    @property
    def bound(self) -> int | None:
        """How many iterations ahead of the slowest live worker anybody may start one; None if there is no bound.

        It is a promise, checked by `paceline.testing`.
        """
        return None

    def why(self, i: int, progress: Progress) -> str:
        """Says why a worker that has pushed iteration i is parked."""
        return f"iteration {progress.V} lacks {name_workers(*progress.missing())}"

    def gate(self, rank: int, members: Members, seed: int) -> PullGate:
        """Makes the conditions of shard `rank`, with what they remember."""
        return PullGate(self)

    def in_force(self, rank: int, V: int) -> CentralPolicy:
        """Returns the policy of shard `rank` at V: itself, unless it is made of others (`policies/composite.py`)."""
        return self

    def constituents(self) -> tuple[CentralPolicy, ...]:
        """Returns every policy that may ever be in force on a shard: itself, unless it is made of others."""
        return (self,)

    def machine(self, role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "worker":
            return Worker(rank, members)
        if role == "server":
            return Shard(self, rank, members, seed)
        raise ConfigError(f"{self} has no machine for the role {role!r}: it has workers and servers")


@dataclass(frozen=True)
class PeerPolicy(Policy):
    """A policy without servers: peers on a graph, each with its own parameters and its own optimizer."""

    def topology(self, peers: int) -> Topology:
        """Returns who sends to whom among so many peers."""
        raise NotImplementedError

    def peer(self, rank: int, graph: Topology, seed: int) -> Machine:
        """Makes the machine of a peer on this graph."""
        raise NotImplementedError

    def machine(self, role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "peer":
            return self.peer(rank, self.topology(members.workers), seed)
        raise ConfigError(f"{self} has no machine for the role {role!r}: it has peers")

    def placed(self, machines: tuple[int, ...]) -> PeerPolicy:
        """Returns the policy with so many peers on each machine, by rank, if its graph needs that and it is not set."""
        return self

    def most_ahead(self, there: int, back: int) -> float:
        """Returns by how many iterations peer i may be ahead of j at most (Luo et al. 2019, Table 1).

        `there` is the length of the shortest path i -> j, `back` that of j -> i.
        """
        return math.inf


def lazy_option() -> Any:
    """Declares the option of policies that park: when is a parked pull answered (Yao et al. 2019, III.C)?"""
    return option(
        False, doc="answer a parked pull only when the slowest has caught up with it, not at the soft barrier"
    )


def scale_option() -> Any:
    """Declares the option of policies that apply on arrival; `core/shard.py` looks for a field of this name."""
    return option(
        "workers",
        choices=SCALES,
        doc="workers: a step on arrival takes lr/N; none: it takes the whole lr, as in the papers",
    )


def staleness_weighted_option() -> Any:
    """Declares the option of policies that apply on arrival; `core/shard.py` looks for a field of this name."""
    return option(False, doc="divide each step by 1 + its staleness, the updates since its parameters were read")
