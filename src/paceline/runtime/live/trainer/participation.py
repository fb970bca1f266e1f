"""What a script and its run ask of each other: the same for a worker and for a peer.

Whether the run is to end and the training is over, samples, `paceline.barrier()`, and the states of LR schedulers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.core.control.round_planner import EndRound
from paceline.errors import PacelineError
from paceline.runtime.live.protocol import lease_messages, round_messages, script_calls, wire
from paceline.runtime.live.system.training_end import Stopped, TrainingEnd
from paceline.runtime.live.trainer.barrier_wait import BarrierWait
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.trainer.sample_leases import SampleLeases

PATIENCE_S = 5.0
"""How long a process of a run that is to end waits for others."""


class Participation:
    """What a process that trains knows of its script, and of what the driver wants of that."""

    def __init__(self, run: RunConnection, await_driver: Callable[[], None]) -> None:
        """`await_driver` hears what the driver says next, if it says something soon."""
        self.run = run
        self.end = TrainingEnd()
        self.stopping = False
        """Whether no further iteration is to begin, since the run is to end."""
        self.waiting_since_s = 0.0
        """Since when a process that is to stop waits for others."""
        self.barrier = BarrierWait()
        self.leases = SampleLeases(run, self.end, await_driver)
        self.plan_round: Callable[[EndRound], None] = lambda order: None
        """Called with the plan for a round of local steps."""
        self.before_leaving: Callable[[], None] = lambda: None
        """Called when the script has ended, before the process leaves the run."""

    def handle_order(self, message: wire.ToWorker) -> None:
        """Does what the driver says, as far as it concerns the script."""
        match message:
            case wire.Stop():
                self._stop()
                self.run.scenario.has_left |= message.leaves
            case lease_messages.LeaseAnswer():
                self.leases.receive(message)
            case round_messages.Planned(order):
                self.plan_round(order)
            case script_calls.BarrierOpened():
                self.barrier.open()
            case script_calls.Follow(iteration):
                self.barrier.awaited = iteration
            case wire.Refuse(reason):
                raise PacelineError(reason)

    def ask_to_end(self, iteration: int) -> None:
        """`paceline.stop()` was called in this iteration: the driver is to end the run for all."""
        if not self.stopping:
            self._stop()
            self.run.send(script_calls.EndRun(self.run.rank, self.run.incarnation, iteration))

    def _stop(self) -> None:
        self.stopping = True
        self.begin_waiting()

    def begin_waiting(self) -> None:
        """Starts the time anew for which this process, if it is to stop, waits for others."""
        self.waiting_since_s = time.monotonic()

    @property
    def gives_up(self) -> bool:
        """Whether this process is to stop and has waited long enough for others."""
        return self.stopping and time.monotonic() - self.waiting_since_s > PATIENCE_S

    def check_patience(self) -> None:
        """Ends the script if this process is to stop and has waited long enough for others."""
        if self.gives_up:
            raise Stopped

    def keep_schedulers(self, states: bytes) -> None:
        """Has the run keep the states of the script's LR schedulers."""
        self.run.send(script_calls.LRSchedulerStates(self.run.rank, self.run.incarnation, states))

    def send_last_reports(self) -> None:
        """The script has ended: the driver is told what it was not told yet of samples and schedulers."""
        self.leases.report()
        self.before_leaving()
