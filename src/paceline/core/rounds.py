"""When does a worker's round of local steps end? The worker's side of it, in both runtimes.

`Rounds` is told when a round begins and when each step has ended, and answers whether the round has, by the rule of
`core/local_steps.py`. It measures how long a step takes, which a planned round is about. The plan comes from
`core/control/round_planner.py`, some time after the round has begun, and nobody waits for it: a round that has heard of
none ends after `at_most` steps, and the very first, before any speed is known, after `at_least`.

A plan names a moment, and the round ends with the last step that can be expected to end by then. So what a step takes
longer or shorter than expected costs a step at most, not what it adds up to over a round.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

from paceline.core.control.round_planner import EndRound
from paceline.core.local_steps import LocalSteps

WINDOW = 24
"""The steps that a step's time is estimated from."""
STANDSTILL = 10.0
"""A step so many times as long as the median had an evaluation in it, or a checkpoint: it says nothing about speed."""
LATE = 0.1
"""A step that is expected to end later than planned by no more than this share of it is still taken."""


class Pace:
    """How long the next step of a worker can be expected to take."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def note(self, seconds: float) -> None:
        self.recent.append(seconds)

    @property
    def step_s(self) -> float | None:
        """The mean of the last steps without those that stood still; None before the first that takes time."""
        usual = STANDSTILL * median(self.recent or (0.0,))
        return fmean(seconds for seconds in self.recent if seconds <= usual) if usual > 0 else None


class Rounds:
    """The rounds of one worker, one after the other."""

    def __init__(self, local: LocalSteps) -> None:
        self.local = local
        self.pace = Pace()
        self.number = 0
        """The number of this round; the first is 1."""
        self.steps = 0
        """The steps that have ended in it."""
        self.began = 0.0
        self.last = 0.0
        """When it began, and when its last step ended, or it began."""
        self.limit = 0
        """It ends after so many steps at the latest."""
        self.moment: float | None = None
        """When it is planned to end."""

    def begin(self, now: float) -> None:
        """The worker has its parameters, and begins a round."""
        local = self.local
        known = self.pace.step_s is not None
        self.number += 1
        self.steps = 0
        self.began = self.last = now
        self.moment = None
        self.limit = local.at_least if local.is_planned and not known else local.most_steps

    def hear(self, order: EndRound, now: float) -> None:
        """The plan for this round has come; one for an earlier round is too late."""
        if order.round != self.number:
            return
        if order.in_s is None:
            self.limit = order.steps
        else:
            self.moment = now + order.in_s

    def end_step(self, now: float) -> bool:
        """A step has ended; returns whether the round has."""
        self.pace.note(now - self.last)
        self.steps += 1
        self.last = now
        if self.steps >= self.limit:
            return True
        if self.local.rule == "time":
            return now - self.began >= self.local.every_s
        return self.moment is not None and self.steps >= self.local.at_least and self.is_last(now, self.moment)

    def is_last(self, now: float, moment: float) -> bool:
        """Returns whether one more step cannot be expected to end by the moment."""
        step_s = self.pace.step_s or 0.0
        return now + (1 - LATE) * step_s > moment
