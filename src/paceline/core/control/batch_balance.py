"""How many samples each worker takes in a step, so that all are done at the same time: the machine of balanced batches.

The joined batch stays what it is, `batch` samples for each live worker. Each worker takes the part of it that is in
proportion to its speed, in samples a second: then all compute equally long. Where a step has a fixed part too, what is
in proportion now is not quite after the next change, but comes nearer each time: times become equal all the same.

**Rounds.** Sizes are fixed for a round of `ROUND_STEPS` steps, when the first worker asks for it; all who ask for that
round get their part of the same joined batch. So all ranks agree, and nothing has to be said at a step: a worker asks
with its request for a lease of samples, one round ahead (`runtime/live/trainer/batch_leases.py`), and reports with it
how long its latest steps took. Whoever lags, having skipped iterations, takes up one of the newest two rounds. While
somebody's speed is not known a round is one step. Near the end of an epoch a round is shorter, and the last joined
batch is what is left.

**An estimate that forgets.** A worker's speed is the median of its last `WINDOW` steps, so that one slow step changes
nothing; if that is within `JUMP` times the estimate before, halfway between both, else the median at once: a worker
that has become slower for good gets less as soon as most of those steps were slow. A worker without steps counts like
the mean of the others.

**Limits.** No worker gets less than its `least` or more than its `most`, which its memory may set; what one cannot take
the others do. Only if the limits leave no other way is the joined batch another than wanted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import geometric_mean, median
from typing import Annotated, NamedTuple, assert_never

from msgspec import Meta, Struct

from paceline.core.control.machine import ControlMachine
from paceline.core.events import ViewChanged
from paceline.core.machine import require

ROUND_STEPS = 3
"""Steps for which sizes are fixed: they follow a change of speed within about three rounds."""
WINDOW = 5
"""The steps that a speed is estimated from."""
JUMP = 1.5
"""A speed that is so many times another is a new one, and none that varies."""

Size = Annotated[int, Meta(ge=1, le=1 << 40)]
StepTime = tuple[Annotated[float, Meta(gt=0, le=1e15)], Annotated[float, Meta(ge=0, le=1e9)]]
"""The samples of a step, and the seconds from its parameters to its gradient."""


class BatchRequested(Struct, frozen=True, array_like=True, tag=True):
    """A worker asks how large its batches are to be in the next steps, and says how long its latest ones took.

    `left` is how many samples `epoch` has left for everybody; whoever dispatches them fills it in.
    """

    at: float
    worker: int
    incarnation: int
    ticket: int
    batch: Size
    least: Size
    most: Size | None
    steps: Annotated[tuple[StepTime, ...], Meta(max_length=64)]
    epoch: int = 0
    left: int | None = None


class SetBatch(Struct, frozen=True, array_like=True, tag=True):
    """Tell the worker to take so many samples in each of so many steps: the answer to its request of this ticket."""

    worker: int
    incarnation: int
    ticket: int
    samples: int
    steps: int


class Wish(NamedTuple):
    """What one worker may take, and how fast it is."""

    speed: float
    least: int
    most: int | None


class Speed:
    """An estimate of a worker's samples a second."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.estimate: float | None = None

    def note(self, steps: Sequence[StepTime]) -> None:
        self.recent.extend(samples / seconds for samples, seconds in steps if seconds > 0)
        if self.recent:
            now = median(self.recent)
            before = now if self.estimate is None else self.estimate
            self.estimate = now if max(now / before, before / now) > JUMP else geometric_mean((now, before))


class Taker:
    """A worker that takes balanced batches: its limits, its speed, and where it is."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.least = 1
        self.most: int | None = None
        self.speed = Speed()
        self.round = 0
        """The number of the last round it has asked for."""
        self.answer: SetBatch | None = None


class Round(NamedTuple):
    """The sizes of the members' batches, by rank, for some steps in one epoch."""

    number: int
    epoch: int
    steps: int
    sizes: dict[int, int]


class BatchBalance(ControlMachine[ViewChanged | BatchRequested, SetBatch]):
    """Fixes the sizes of rounds; `batch` is that of a worker if all are equal."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.view_number = 0
        self.members: dict[int, int] = {}
        """rank -> incarnation."""
        self.takers: dict[int, Taker] = {}
        self.rounds: deque[Round] = deque(maxlen=2)
        """The newest rounds: whoever lags more takes up the older of them."""

    def take(self, event: ViewChanged | BatchRequested) -> None:
        match event:
            case ViewChanged(view=view):
                if view.number > self.view_number:
                    self.view_number, self.members = view.number, dict(view.members)
                    here = self.takers.items()
                    self.takers = {rank: taker for rank, taker in here if self.members.get(rank) == taker.incarnation}
            case BatchRequested():
                self.on_batch_requested(event)
            case _:
                assert_never(event)

    def on_batch_requested(self, event: BatchRequested) -> None:
        if self.members.get(event.worker) != event.incarnation:
            # A joiner asks before a view names it, and a former incarnation's answer is of no use to anybody.
            self.orders.append(SetBatch(event.worker, event.incarnation, event.ticket, event.batch, ROUND_STEPS))
            return
        taker = self.takers.setdefault(event.worker, Taker(event.incarnation))
        if taker.answer is not None and event.ticket <= taker.answer.ticket:
            if event.ticket == taker.answer.ticket:
                self.orders.append(taker.answer)
            return
        taker.least, taker.most = event.least, event.most
        taker.speed.note(event.steps)
        following = [each for each in self.rounds if each.number > taker.round and each.epoch == event.epoch]
        part = next((each for each in following if event.worker in each.sizes), None)
        if part is None:
            part = self.next_round(event.epoch, event.left)
            self.rounds.append(part)
        taker.round = part.number
        samples = min(part.sizes[event.worker], event.most or self.batch * len(self.members))
        taker.answer = SetBatch(event.worker, event.incarnation, event.ticket, samples, part.steps)
        self.orders.append(taker.answer)

    def next_round(self, epoch: int, left: int | None) -> Round:
        known = all(rank in self.takers and self.takers[rank].speed.estimate for rank in self.members)
        joined, steps = self.batch * len(self.members), ROUND_STEPS if known else 1
        if left is not None and left < joined * steps:
            steps = max(1, left // joined)
            joined = min(joined, left)
        ranks = sorted(self.members)
        sizes = apportion(joined, [self.wish(rank) for rank in ranks])
        number = self.rounds[-1].number + 1 if self.rounds else 1
        return Round(number, epoch, steps, dict(zip(ranks, sizes, strict=True)))

    def wish(self, rank: int) -> Wish:
        known = [taker.speed.estimate for taker in self.takers.values() if taker.speed.estimate is not None]
        mean = sum(known) / len(known) if known else 1.0
        taker = self.takers.get(rank) or Taker(self.members[rank])
        return Wish(taker.speed.estimate or mean, taker.least, taker.most)

    def check(self) -> None:
        require(self.takers.keys() <= self.members.keys(), "somebody takes batches who is no member")
        for each in self.rounds:
            require(all(size > 0 for size in each.sizes.values()), f"{each} has an empty batch")


def apportion(joined: int, wishes: Sequence[Wish]) -> list[int]:
    """Returns whole numbers in proportion to speeds, within the limits, whose sum is `joined` if limits allow it."""

    def sizes_at(pace: float) -> list[float]:
        return [
            min(max(pace * each.speed, each.least), math.inf if each.most is None else each.most) for each in wishes
        ]

    low, high = 0.0, max((joined + 1) / each.speed for each in wishes)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(sizes_at(middle)) < joined else (low, middle)
    exact = sizes_at(high)
    whole = [math.floor(each + 1e-9) for each in exact]
    by_rest = sorted(range(len(wishes)), key=lambda each: (whole[each] - exact[each], each))
    for each in by_rest[: max(0, joined - sum(whole))]:
        whole[each] += whole[each] < exact[each]
    return whole
