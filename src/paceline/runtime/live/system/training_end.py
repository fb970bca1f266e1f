"""The end of a run as a worker's script experiences it.

A script that does not look for it is ended by `Stopped`, in `step`. One that looks at `opt.done` leaves its loops by
itself and goes on with what stands after them: its training is over, and further steps do nothing.
"""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

VAIN_S = 60.0
"""How long a script may go on to ask for steps and samples: one that loops until enough steps are done never ends."""


class Stopped(SystemExit):
    """Raised by `step` when the run has ended: the target is reached, somebody has called `paceline.stop()` or pressed
    Ctrl-C. `whole`: the model has the parameters of an iteration, so that a script that wants to may go on."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__(0)
        self.whole = whole


class TrainingEnd:
    """True once a process trains no more."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __bool__(self) -> bool:
        return self.at_s is not None

    def note(self) -> None:
        """Training is over from now on."""
        self.at_s = time.monotonic()

    def check(self) -> None:
        """A step or a sample is asked for in vain: ends the script if that has gone on for long."""
        if self.at_s is not None and time.monotonic() - self.at_s > VAIN_S:
            logger.warning(
                f"the run has ended {VAIN_S:g} s ago, and the script still trains: it is ended now "
                "(a loop that looks at opt.done has to end when that is true)"
            )
            raise Stopped
