"""A script that waits for the others in `paceline.barrier()`."""

from __future__ import annotations

from paceline.errors import PacelineError, printable
from paceline.runtime.live.protocol import script_calls, wire
from paceline.runtime.live.system.training_end import Stopped
from paceline.runtime.live.trainer.run_connection import RunConnection

IDLE_S = 0.2
REASON = "the worker waits in a barrier"


class BarrierWait:
    """What a worker or a peer knows of the barrier that its script is in."""

    def __init__(self) -> None:
        self.waits = False
        self.awaited = -1
        """The last iteration that others are known to wait for."""
        self.in_step = False
        """Whether the script is in the closure of a step."""

    def enter(self, run: RunConnection) -> None:
        """The script waits from now on, and the driver is told."""
        if self.in_step:
            raise PacelineError("paceline.barrier() was called within step: call it between steps")
        self.waits, self.awaited = True, -1
        run.send(script_calls.AtBarrier(run.rank, run.incarnation))

    def open(self) -> None:
        """All are there: the script goes on."""
        self.waits = False


def wait_before_training(run: RunConnection) -> None:
    """Waits in a process that has made no `paceline.Optimizer` yet."""
    run.send(script_calls.AtBarrier(run.rank, run.incarnation))
    while True:
        run.waiter.wait(IDLE_S)
        while (message := run.driver.receive()) is not None:
            match wire.decode_to_worker(message):
                case script_calls.BarrierOpened():
                    return
                case wire.Refuse(reason):
                    raise PacelineError(printable(reason))
                case wire.Stop():
                    raise Stopped
