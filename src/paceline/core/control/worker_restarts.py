"""What becomes of workers whose processes have ended: which are started again, and when, and how the others count.

    ended well      it has done its iterations
    lost            its host is silent: it comes back with that, as somebody else's decision
    restarted       it failed or was killed, and the scenario says that it comes back, or restarts are left
    dropped         otherwise: the others go on without it, or the run ends, if it is to end then

The pause before a restart doubles with each of a rank's incarnations. Nobody is started while the run is ending; who
belongs to a host that is away is started by its host when that is back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from msgspec import Struct

from paceline.core.control.machine import ControlMachine
from paceline.core.machine import require

PAUSE_S, PAUSE_MOST_S = 0.5, 30.0
REFUSED = 2
"""The exit code of a worker whose script made something that is refused."""


class WorkerEnded(Struct, frozen=True):
    """A worker's process has ended, `how` in words. A negative code is the signal that killed it."""

    at: float
    rank: int
    incarnation: int
    code: int
    how: str
    lost_with: str = ""
    """The host that it was lost with, if so."""
    back_after_s: float | None = None
    """After how long the scenario has it come back, if so."""
    stopping: bool = False
    """The run is ending."""


class TimePassed(Struct, frozen=True):
    at: float
    stopping: bool
    away: frozenset[int] = frozenset()
    """Workers whose host is away."""


class RestartLater(Struct, frozen=True):
    """Say that this worker will be started again, because the scenario says so or so many restarts are left."""

    rank: int
    after_s: float
    how: str
    left: int | None


class StartWorker(Struct, frozen=True):
    rank: int


class DropWorker(Struct, frozen=True):
    """Say that this worker does not come back."""

    rank: int
    how: str


class EndRun(Struct, frozen=True):
    """End the run, which has failed."""

    why: str


WorkerEvent = WorkerEnded | TimePassed
WorkerOrder = RestartLater | StartWorker | DropWorker | EndRun


@dataclass
class Outcomes:
    """How workers have ended, in words, but for those that were started again."""

    well: int = 0
    failures: list[str] = field(default_factory=list)
    """Workers that ended with an error."""
    losses: list[str] = field(default_factory=list)
    """Workers that were killed."""
    refused: int = 0
    """How many of the failures were refused."""

    @property
    def why(self) -> str:
        return "; ".join([*self.failures, *self.losses])


class WorkerRestarter(ControlMachine[WorkerEvent, WorkerOrder]):
    """Has so many workers restarted in all. With `abort` one that is dropped ends the run. Who was brought by somebody
    else (`joined`) does not fail it."""

    def __init__(self, left: int = 0, abort: bool = False, joined: bool = False) -> None:
        super().__init__()
        self.left = left
        self.abort = abort
        self.joined = joined
        self.due: list[tuple[float, int]] = []
        """(when, rank)."""
        self.outcomes = Outcomes()

    @property
    def ranks(self) -> set[int]:
        """The workers that will be started again."""
        return {rank for _, rank in self.due}

    def take(self, event: WorkerEvent) -> None:
        match event:
            case WorkerEnded():
                self.on_worker_ended(event)
            case TimePassed():
                for entry in [entry for entry in self.due if entry[0] <= event.at or event.stopping]:
                    self.due.remove(entry)
                    if not event.stopping and entry[1] not in event.away:
                        self.orders.append(StartWorker(entry[1]))
            case _:
                assert_never(event)

    def on_worker_ended(self, event: WorkerEnded) -> None:
        name, outcomes = f"worker {event.rank}", self.outcomes
        if event.code == 0:
            outcomes.well += 1
        elif event.lost_with:
            outcomes.losses.append(f"{name} was lost with {event.lost_with}")
        elif not event.stopping and (event.back_after_s is not None or self.left):
            self.restart(event)
        else:
            what = f"{name} {event.how}"
            (outcomes.failures if event.code > 0 and not self.joined else outcomes.losses).append(what)
            outcomes.refused += event.code == REFUSED
            dropped = DropWorker(event.rank, event.how)
            self.orders.append(EndRun(f"{what}, and the run is to end then") if self.abort else dropped)

    def restart(self, event: WorkerEnded) -> None:
        after_s, left = event.back_after_s, None
        if after_s is None:
            self.left -= 1
            after_s, left = min(PAUSE_S * 2**event.incarnation, PAUSE_MOST_S), self.left
        self.due.append((event.at + after_s, event.rank))
        self.orders.append(RestartLater(event.rank, after_s, event.how, left))

    def check(self) -> None:
        require(self.left >= 0, "more restarts than there were")
        require(len(self.ranks) == len(self.due), f"a worker is to be started twice: {self.due}")
