"""When a worker's rounds of local steps end (`core/local_steps.py`)."""

from __future__ import annotations

import time

from paceline.core.local_steps import LocalSteps


class RoundEnds:
    """Says after each local step whether it is the last of its round."""

    def __init__(self, local: LocalSteps) -> None:
        self.local = local
        self.steps = 0
        """The steps of the round that is under way."""
        self.began_s = time.monotonic()

    def steps_of(self, rounds: int) -> int:
        """Returns how many local steps so many rounds have, as far as is known beforehand."""
        return rounds * (self.local.steps or self.local.at_least)

    def begin(self, iteration: int) -> None:
        """This round begins: the model has its parameters."""
        self.steps, self.began_s = 0, time.monotonic()

    def note_step(self) -> None:
        """A local step was taken."""
        self.steps += 1

    def is_due(self) -> bool:
        """Returns whether the round ends with the step that was taken last."""
        local = self.local
        if local.rule == "steps":
            return self.steps >= local.steps
        if not local.at_least <= self.steps < local.at_most:
            return self.steps >= local.at_most
        return time.monotonic() - self.began_s >= local.every_s
