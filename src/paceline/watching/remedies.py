"""What would help against what slows a run down, with the figures that the measured times give.

They are estimates: of iterations that stay as they are, and of batches whose time goes with their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALL_THE_SAME = -1
"""The rank in a finding that is about no worker."""
BALANCED = ("bsp", "backup", "deadline", "ssp", "hop")
"""The policies under which batches may be balanced (docs/balance.md)."""
OF_CAUSE = {
    "link": "--wire int8 sends a quarter of the bytes to other hosts, topk:share=0.01 a hundredth",
    "loading data": "DataLoader(num_workers=2) loads while it computes; data in memory, or on a disk of its own",
    "garbage collection": "gc.freeze() once all is built, or gc.disable() and gc.collect() now and then",
    "host": "see what else runs on its host (top), and whether it has as many cores as processes",
}
FREE = ("asp", "adpsgd", "waiting", "specsync")
"""The policies under which nobody waits for a slow one."""


@dataclass(frozen=True)
class Slow:
    """What is known of whoever is slow."""

    cause: str
    policy: str
    servers: int
    rank: int
    own_s: float
    others: Mapping[int, float]
    """What an iteration of each of the others takes without waiting."""
    cost_s: float
    from_start: bool
    compute_s: float = 0.0


def remedies(slow: Slow) -> tuple[str, ...]:
    """Returns what may be tried, the most promising first."""
    head = slow.policy.partition(":")[0].partition("+")[0].partition("@")[0]
    if slow.cause == "server":
        more = f"paceline servers DIR {slow.servers + 1} divides the parameters over one more server"
        return (more, "--wire int8 sends a quarter of the bytes, where the server is on another host")
    helps = [OF_CAUSE[slow.cause]] if slow.cause in OF_CAUSE else []
    others = sorted(slow.others.values())
    longest = others[-1]
    if slow.cause in ("computing", "host") and head in BALANCED:
        every = [*others, slow.own_s]
        balanced = len(every) / sum(1 / each for each in every)
        helps.append(
            f"paceline.BatchSampler(balance=True) gives it smaller batches: an iteration of about {told(balanced)} "
            f"instead of {told(slow.own_s)} (docs/balance.md)"
        )
    if head == "bsp":
        helps.append(f"backup:extra=1 does not wait for it: about {told(longest)}, and one gradient of each is dropped")
        if not slow.from_start:
            helps.append("ssp:staleness=3 bridges it, if it passes")
    elif head == "ssp" and slow.from_start:
        helps.append("pssp:staleness=3,c=0.3 stops the others only at random; asp never")
    if slow.cost_s > 0 and head not in FREE:
        helps.append(
            f"without it: {len(others)} workers, whose iterations take about {told(longest)} instead of "
            f"{told(slow.own_s)}"
        )
    if not helps:
        helps.append("the others lose nothing by it; the run only has fewer gradients of this one")
    return tuple(helps)


def told(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"
