"""A gate is what one shard remembers of a policy while it runs: its conditions, with a memory.

Most policies need none: their conditions look at the worker's iteration and at V, and `Gate` just asks them.
A policy whose condition depends on more (a coin, how fast workers are, how long an iteration has taken)
returns a gate of its own from `policy.gate(rank, members, seed)`. The policy itself stays a frozen set of
numbers; the gate belongs to one shard, is told what happened there, and must be deterministic: time comes with
what it is told, randomness from `coin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.messages import Handle
from paceline.core.progress import Progress

if TYPE_CHECKING:
    from paceline.core.policy import CentralPolicy

MASK = (1 << 64) - 1


class Gate:
    """The conditions of a policy that has no memory."""

    wants_significance = False
    """Whether runtimes are to measure |g| / |w| of each push (`PushArrived.significance`)."""

    def __init__(self, policy: CentralPolicy) -> None:
        self.policy = policy

    def may_pull(self, worker: int, i: int, progress: Progress) -> bool:
        """The pull condition: may `worker`, which has pushed iteration i, read now?"""
        return self.policy.may_pull(i, progress.V)

    def freed_at(self, worker: int, i: int, V: int) -> int:
        """The V at which this parked pull is answered."""
        return self.policy.freed_at(i, V)

    def note_push(self, handle: Handle, at: float, significance: float | None) -> None:
        """A gradient of a member has come, on time or late, and it is no copy."""

    def note_release(self, worker: int, at: float) -> None:
        """A parked pull of this worker is answered."""

    def note_rise(self, V: int, at: float) -> float | None:
        """V has risen. The seconds after which the policy's `finishes_overtime` decides, or None for never."""
        return None

    def forget(self, worker: int) -> None:
        """This worker has left; whoever comes back under its rank is another process."""


def coin(*numbers: int) -> float:
    """A number in [0, 1) that depends on `numbers` alone: equal wherever and whenever it is thrown.

    The finalizer of splitmix64, chained; good enough to decide who waits, and pure.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & MASK)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)
