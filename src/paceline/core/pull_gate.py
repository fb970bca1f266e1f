"""A gate is what one shard remembers of a policy while it runs: its conditions, with a memory.

Most policies need none: their conditions look at the worker's iteration and at V, and `PullGate` just asks them.
A policy whose condition depends on more (a coin, how fast workers are, how long an iteration has taken)
returns a gate of its own from `policy.gate(rank, members, seed)`. The policy itself stays a frozen set of
numbers; the gate belongs to one shard, notes what happens there, and must be deterministic: time comes with the events,
randomness from `coin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.messages import Handle
from paceline.core.progress import Progress

if TYPE_CHECKING:
    from paceline.core.policy import CentralPolicy

MASK = (1 << 64) - 1


class PullGate:
    """The conditions of a policy that has no memory."""

    wants_significance = False
    """Whether runtimes are to measure |g| / |w| of each push (`PushArrived.significance`)."""

    def __init__(self, policy: CentralPolicy) -> None:
        self.policy = policy

    def may_pull(self, worker: int, i: int, progress: Progress) -> bool:
        """The pull condition: may `worker`, which has pushed iteration i, read now?"""
        return self.policy.may_pull(i, progress.V)

    def freed_at(self, worker: int, i: int, V: int) -> int:
        """Returns the V at which this parked pull is answered."""
        return self.policy.freed_at(i, V)

    def note_push(self, handle: Handle, at: float, significance: float | None) -> None:
        """Notes that a gradient of a member has come, on time or late. Copies are not noted."""

    def note_release(self, worker: int, at: float) -> None:
        """Notes that a parked pull of this worker is answered."""

    def note_rise(self, V: int, at: float) -> float | None:
        """Notes that V has risen. Returns the seconds after which `finishes_overtime` decides, or None for never."""
        return None

    def forget(self, worker: int) -> None:
        """Forgets a worker that has left; whoever comes back under its rank is another process."""


def coin(*numbers: int) -> float:
    """Returns a number in [0, 1) that depends on `numbers` alone: equal wherever and whenever it is drawn.

    It chains the finalizer of splitmix64, which is good enough to decide who waits, and pure.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & MASK)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)
