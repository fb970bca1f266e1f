"""What a peer has received and not averaged yet, and the rules of Hop that look at it: enough to go on? which weights?

    mode            goes on from iteration k when                              average
    standard        an update of k from every in-neighbour                    weights of the graph
    backup(b)       updates of k from all but b                               plain, over what is there
    staleness(s)    the newest from every in-neighbour is of k-s or later     iteration - (k-s) + 1 (eq. 2)
    hybrid(b, s)    all but b have a newest of k-s or later                   eq. 2

Equations and sections are those of Luo et al. 2019. Where gradients stand for unequal numbers of samples, each weight
is multiplied by that of the gradient last in those parameters (`core/push_weights.py`), and all are scaled to a sum of
1.

An update of an iteration that is already averaged, or more than s before, is late: it is dropped, on arrival or when
a later iteration is averaged. With staleness only each sender's newest is kept, since later parameters contain the
earlier ones (4.4); without, updates lie by iteration, like the paper's rotating queues (6.1).

An in-neighbour that came later (core/neighbour_links.py) sends from some iteration on; before that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from paceline.core.messages import Handle
from paceline.core.push_weights import relative


class HopRules(Struct, frozen=True):
    """How peers wait for each other; None turns a rule off."""

    backup: int = 0
    staleness: int | None = None
    max_gap: int | None = None
    acks: bool = False
    skip: int | None = None
    trigger: int = 1
    serial: bool = False

    @property
    def slack(self) -> int:
        """How many iterations old an update may be when it is averaged in."""
        return self.staleness or 0

    @property
    def is_standard(self) -> bool:
        return not self.backup and self.staleness is None


class WeightedAverage(Struct, frozen=True):
    """The updates to average with their weights, the peer's own weight, and the updates that are too old for it."""

    handles: tuple[Handle, ...]
    weights: tuple[float, ...]
    own: float
    late: tuple[Handle, ...]


class UpdateQueue:
    def __init__(self, rules: HopRules) -> None:
        self.rules = rules
        self.held: dict[int, dict[int, Handle]] = {}
        """sender -> iteration -> the update of it."""
        self.newest: dict[int, int] = {}
        """sender -> the largest iteration of an update that came from it."""

        self.seen: dict[int, int] = {}
        """sender -> the version of the last update that came from it; senders number their updates."""

    def __len__(self) -> int:
        return sum(map(len, self.held.values()))

    def add(self, handle: Handle) -> list[Handle]:
        """Keeps an update, and returns those that need not be kept any longer. A copy of one that came is ignored."""
        sender, iteration = handle.source, handle.iteration
        if handle.version <= self.seen.get(sender, 0):
            return []
        self.seen[sender] = handle.version
        if iteration <= self.newest.get(sender, -1):
            return [handle]  # sent for a beginning that was over, then again as the update of that iteration
        self.newest[sender] = iteration
        kept = self.held.setdefault(sender, {})
        before = list(kept.values()) if self.rules.staleness is not None else []
        if before:
            kept.clear()
        kept[iteration] = handle
        return before

    def forget(self, sender: int) -> list[Handle]:
        """Removes and returns the updates of a sender that is gone."""
        self.newest.pop(sender, None)
        self.seen.pop(sender, None)
        return list(self.held.pop(sender, {}).values())

    def forget_late(self, averaged: int) -> list[Handle]:
        """Removes and returns the updates that are too old for a peer that begins later."""
        late = [handle for handle in self.handles() if self.is_late(handle, averaged)]
        for handle in late:
            del self.held[handle.source][handle.iteration]
        return late

    def missing(self, k: int, firsts: Mapping[int, int]) -> list[int]:
        """Returns the in-neighbours whose update for k is still to come; `firsts` has the first update of each."""
        if self.rules.staleness is None:
            return [j for j, first in firsts.items() if first <= k and k not in self.held.get(j, ())]
        least = k - self.rules.staleness
        return [j for j, first in firsts.items() if first <= least and self.newest.get(j, -1) < least]

    def is_enough(self, k: int, firsts: Mapping[int, int]) -> bool:
        """Whether iteration k may be averaged: all updates have come but those of the backups, and at least one."""
        spared = min(self.rules.backup, max(0, len(firsts) - 1))
        return len(self.missing(k, firsts)) <= spared

    def pop_average(self, k: int, weights: Mapping[int, float], own: float) -> WeightedAverage:
        """Removes the updates of iteration k, and those that are too old now, and returns their average.

        `own` is the weight of the gradient last in the peer's own parameters.
        """
        rules = self.rules
        if rules.staleness is None:
            taken = [kept[k] for kept in self.held.values() if k in kept]
        else:
            taken = [h for kept in self.held.values() for h in kept.values() if h.iteration >= k - rules.staleness]
        taken.sort(key=lambda handle: handle.source)
        chosen = set(taken)
        late = [h for kept in self.held.values() for h in kept.values() if h.iteration <= k and h not in chosen]
        for handle in (*taken, *late):
            del self.held[handle.source][handle.iteration]
        shares = self.shares(taken, k, weights)
        if factors := relative([*(handle.weight for handle in taken), own]):
            shares = [share * factor for share, factor in zip(shares, factors, strict=True)]
        total = sum(shares)
        scaled = tuple(share / total for share in shares[:-1])
        return WeightedAverage(tuple(taken), scaled, 1.0 - sum(scaled), tuple(late))

    def shares(self, taken: list[Handle], k: int, weights: Mapping[int, float]) -> list[float]:
        """Returns the weights of the updates and, last, of the peer's own parameters, not scaled to a sum of 1."""
        rules = self.rules
        if rules.staleness is not None:
            least = k - rules.staleness
            return [handle.iteration - least + 1.0 for handle in taken] + [rules.staleness + 1.0]
        if rules.backup:
            return [1.0] * (len(taken) + 1)
        given = [weights[handle.source] for handle in taken]
        # Who does not send yet (it has just joined) leaves its share to the peer's own.
        return [*given, 1.0 - sum(given)]

    def is_late(self, handle: Handle, averaged: int) -> bool:
        """Whether no average can use the update any more, once all up to `averaged` are done."""
        return handle.iteration < averaged + 1 - self.rules.slack

    def handles(self) -> Iterable[Handle]:
        return (handle for kept in self.held.values() for handle in kept.values())
