"""Who becomes a member of a run: how it begins, who joins later, who is refused.

    gathering     workers describe their models. When all who live have, enough are there and the servers are too,
                  worker 0's model becomes the run's
    configuring   the servers take their parts. When they have, all who live and have the same model begin together
    begun         whoever comes is admitted if its model is the same; while the number of servers changes it waits

Without servers there are only so many places. While the run is ending whoever comes is told so.
"""

from __future__ import annotations

from typing import Literal, assert_never

from msgspec import Struct

from paceline.core.control.machine import ControlMachine
from paceline.core.machine import IllegalEvent, require

MISSING_S = 20.0
"""The time after which the user is told which workers keep the run from beginning."""

Process = tuple[int, int]
"""A worker's rank and its incarnation."""
Stage = Literal["gathering", "configuring", "begun"]


class WorkerDescribed(Struct, frozen=True):
    """A worker has said what it is about to train. Workers with one digest train the same."""

    rank: int
    incarnation: int
    digest: str
    stopping: bool = False
    """Whether the run is ending."""
    changing: bool = False
    """Whether the number of servers is changing."""


class WorkersThere(Struct, frozen=True):
    """The workers that live before the run begins, and what else has to be there."""

    at: float
    live: tuple[Process, ...]
    lead: int
    """The last incarnation of worker 0."""
    due: bool
    """Whether workers that have ended will be started again."""
    servers_there: bool
    servers_configured: bool


class ModelChosen(Struct, frozen=True):
    """The driver's answer to `ChooseModel`: the run trains this model, with at most `places` workers (None: any)."""

    digest: str
    places: int | None


class ModelRefused(Struct, frozen=True):
    """The driver's other answer to `ChooseModel`: this worker, worker 0, was turned away with its model."""

    rank: int
    incarnation: int


class ChangeEnded(Struct, frozen=True):
    """A change of the number of servers was completed or given up; these workers live."""

    live: tuple[Process, ...]
    stopping: bool


class ChooseModel(Struct, frozen=True):
    """Make this worker's model the run's and configure the servers; `ModelChosen` or `ModelRefused` follows at once."""

    rank: int
    incarnation: int


class FailToBegin(Struct, frozen=True):
    """End the run, since worker 0 has ended without describing a model."""


class BeginRun(Struct, frozen=True):
    """Begin training with these workers."""

    members: tuple[Process, ...]


class AdmitWorker(Struct, frozen=True):
    """Let this worker join the run."""

    rank: int
    incarnation: int


class RefuseWorker(Struct, frozen=True):
    """Turn this worker away: all places are taken (`full`), or its model is not the run's (`differs`)."""

    rank: int
    incarnation: int
    why: Literal["full", "differs"]


class StopWorker(Struct, frozen=True):
    """Tell this worker, which came while the run is ending, to stop."""

    rank: int
    incarnation: int


class TellMissing(Struct, frozen=True):
    """Tell the user that the run waits for these workers."""

    ranks: tuple[int, ...]


AdmissionEvent = WorkerDescribed | WorkersThere | ModelChosen | ModelRefused | ChangeEnded
JoiningOrder = AdmitWorker | RefuseWorker | StopWorker
BeginningOrder = ChooseModel | FailToBegin | BeginRun | TellMissing
AdmissionOrder = JoiningOrder | BeginningOrder


class Admitter(ControlMachine[AdmissionEvent, AdmissionOrder]):
    """Decides when the run begins, with at least `needed` workers, and which workers take part."""

    def __init__(self, at: float, needed: int = 1) -> None:
        super().__init__()
        self.began_at = at
        self.needed = max(1, needed)
        self.stage: Stage = "gathering"
        self.described: dict[Process, str] = {}
        """The digest of each worker's model."""
        self.digest = ""
        """The digest of the run's model, from `configuring` on."""
        self.places: int | None = None
        self.waiting: list[Process] = []
        """The workers that came while the servers were changing."""
        self.told_missing = False

    def take(self, event: AdmissionEvent) -> None:
        match event:
            case WorkerDescribed():
                process = (event.rank, event.incarnation)
                self.described[process] = event.digest
                if event.changing and not event.stopping:
                    self.waiting.append(process)
                else:
                    self.consider_joining(process, event.stopping)
            case ChangeEnded():
                waiting, self.waiting = self.waiting, []
                for process in waiting:
                    if process in event.live:
                        self.consider_joining(process, event.stopping)
            case WorkersThere():
                self.on_workers_there(event)
            case ModelChosen():
                if self.stage != "gathering":
                    raise IllegalEvent("the run has its model")
                self.stage, self.digest, self.places = "configuring", event.digest, event.places
            case ModelRefused():
                self.described.pop((event.rank, event.incarnation), None)
            case _:
                assert_never(event)

    def consider_joining(self, process: Process, stopping: bool) -> None:
        if stopping:
            self.orders.append(StopWorker(*process))
        elif self.stage == "begun" and self.fits(process):
            self.orders.append(AdmitWorker(*process))

    def fits(self, process: Process) -> bool:
        """Returns whether this worker can take part; refuses it if not."""
        if self.places is not None and process[0] >= self.places:
            self.orders.append(RefuseWorker(*process, "full"))
        elif self.described[process] != self.digest:
            self.orders.append(RefuseWorker(*process, "differs"))
        else:
            return True
        del self.described[process]
        return False

    def on_workers_there(self, now: WorkersThere) -> None:
        if self.stage == "begun":
            return
        missing = tuple(rank for rank, incarnation in now.live if (rank, incarnation) not in self.described)
        if missing and not self.told_missing and now.at - self.began_at > MISSING_S:
            self.told_missing = True
            self.orders.append(TellMissing(missing))
        if missing or now.due or len(now.live) < self.needed or not now.servers_there:
            return
        if self.stage == "gathering":
            lead = (0, now.lead)
            self.orders.append(ChooseModel(*lead) if lead in self.described else FailToBegin())
        elif now.servers_configured:
            self.stage = "begun"
            self.orders.append(BeginRun(tuple(process for process in now.live if self.fits(process))))

    def check(self) -> None:
        has_model = self.stage != "gathering"
        require(not has_model or self.digest in self.described.values(), "no worker has described the run's model")
        require(all(process in self.described for process in self.waiting), "a worker waits without a model")
