"""What a push weighs: how many samples its gradient stands for (`Handle.weight`).

A mean of gradients is weighted by that, so that unequal batches make the step that one process would take on the joined
batch. A step on arrival takes the rate times n / (the sum of everybody's latest n), which is 1/N where all are equal.
Whoever's weight is not known yet (0) counts like the mean of the others. Where all weights are equal nothing is
computed from them, so the results are those without weights, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from paceline.core.messages import Handle

UNKNOWN = 0.0


class PushWeights:
    """The weights of everybody's latest push on one shard, as multiples of their mean."""

    def __init__(self) -> None:
        self.latest: dict[int, float] = {}
        """worker -> the weight of its latest push."""
        self.total = 0.0
        """The sum of the latest weights."""
        self.common = UNKNOWN
        """The weight that all pushes have had until now; `UNKNOWN` before the first."""
        self.are_equal = True

    def note(self, handle: Handle) -> None:
        """Takes note of a push that counts."""
        weight = handle.weight
        if weight == UNKNOWN:
            return
        self.common = self.common or weight
        self.are_equal &= weight == self.common
        self.total += weight - self.latest.get(handle.source, 0.0)
        self.latest[handle.source] = weight

    def forget(self, worker: int) -> None:
        """The worker is lost: it has no share in a step any more."""
        self.total -= self.latest.pop(worker, 0.0)

    def of(self, worker: int) -> float:
        """Returns how much the latest push of a worker weighs, if the mean weighs 1."""
        weight = self.latest.get(worker, UNKNOWN)
        return 1.0 if self.are_equal or weight == UNKNOWN else weight * len(self.latest) / self.total

    def sum_of(self, workers: Iterable[int]) -> float:
        """Returns how much the latest pushes of some workers weigh together, if the mean weighs 1."""
        return sum(map(self.of, sorted(workers)))

    def share_of_mean(self, handles: Iterable[Handle], live: Set[int], finished: Sequence[int]) -> float:
        """Returns the weight of a step on a mean: that of the live workers among those that share a step.

        Of a mean, too, those who have finished keep their share, though most add nothing to it any more.
        """
        if not finished:
            return 1.0
        last = {handle.source for handle in handles}.intersection(finished)
        return self.sum_of(live | last) / (len(live) + len(finished))


def relative(weights: Sequence[float]) -> tuple[float, ...]:
    """Returns the weights as multiples of their mean, or nothing if all that are known are equal."""
    known = [weight for weight in weights if weight != UNKNOWN]
    if not known or min(known) == max(known):
        return ()
    mean = sum(known) / len(known)
    return tuple([(weight or mean) / mean for weight in weights])


def shares_of(handles: Sequence[Handle]) -> tuple[float, ...]:
    """Returns the share of each gradient in their mean, or nothing if the shares are equal."""
    return tuple([weight / len(handles) for weight in relative([handle.weight for handle in handles])])
