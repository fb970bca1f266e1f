"""How long the rounds of local steps are, where that depends on everybody's speed: the plan of `local_steps=auto`.

ElasticBSP predicts when each worker ends its next iterations, and chooses the ends that are closest together as the
next barrier (`core/barrier_scheduler.py`, Zhao et al. 2021). Here what is predicted are the *steps* of the rounds under
way: row p has the times at which worker p ends its step `at_least`, and each further one up to `at_most`. The same
search (`policies/zipline.py`) finds the moment at which all are at the end of a step, or as close to it as can be, and
each worker ends its round there: all arrive together, and each has done as much as it could.

**What is said.** A worker says that it begins a round, and how long its steps take (`RoundBegun`); when all have, each
is told the moment (`EndRound`). Nobody waits for that (`core/rounds.py`). A moment travels as the seconds until it, so
clocks need not agree.

**Who is not there.** A worker that evaluates, or waits in a policy's gate, begins no round. When somebody begins its
next round and the one before has never been planned, it is planned without those who are missing.

**In proportion to speed** (`local_steps=proportional`; DyLU, Liu et al. 2024): the fastest does `at_most` steps, and
each other so many as it can do meanwhile, at least `at_least`; until everybody's speed is known, `at_least`. That needs
nobody's beginning, so it is answered at once.

What it promises. Where step times last, nobody waits longer than the shortest of the waits to choose from, over all
moments between everybody's `at_least` and somebody's `at_most`. Where they vary by themselves the moment is as good as
any, and what counts is that a round ends by a moment at all. What the bounds leave no choice about, it cannot mend: the
slowest's `at_least` steps may take longer than the fastest's `at_most`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, assert_never

from msgspec import Meta, Struct

from paceline.core.barrier_scheduler import ChooseBarrier
from paceline.core.control.machine import ControlMachine
from paceline.core.events import ViewChanged
from paceline.core.local_steps import LocalSteps
from paceline.core.machine import require
from paceline.core.messages import Process

MOST_PREDICTED = 512
"""So many ends of steps are predicted of each worker at most."""

Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class RoundBegun(Struct, frozen=True, array_like=True, tag=True):
    """A worker begins its round of this number; a step takes it `step_s`, if it has done any."""

    at: float
    worker: int
    incarnation: int
    round: int
    step_s: Seconds | None


class EndRound(Struct, frozen=True, array_like=True, tag=True):
    """Tell the worker when to end the round of this number: in so many seconds, or, without those, after `steps`.

    With a time, `steps` is the step that is expected to be its last.
    """

    worker: int
    incarnation: int
    round: int
    steps: int
    in_s: float | None


class Running(NamedTuple):
    """A round that has begun."""

    number: int
    began: float
    step_s: float | None


class RoundPlanner(ControlMachine[ViewChanged | RoundBegun, EndRound]):
    """Plans the rounds of all members; `choose` is ZipLine's search, `paceline.policies.zipline.plan`."""

    def __init__(self, local: LocalSteps, choose: ChooseBarrier) -> None:
        super().__init__()
        self.local = local
        self.choose = choose
        self.view_number = 0
        self.members: set[Process] = set()
        self.newest: dict[Process, Running] = {}
        """The last round that each process has begun, also of those whom no view has named yet."""
        self.unplanned: set[Process] = set()
        """The processes whose last round has no plan."""
        self.plans = 0
        """How many plans there have been, and how many of them the bounds have left no choice."""
        self.bound_plans = 0

    def take(self, event: ViewChanged | RoundBegun) -> None:
        match event:
            case ViewChanged(view=view):
                if view.number <= self.view_number:
                    return
                self.view_number, self.members = view.number, set(view.members)
                incarnations = dict(view.members)
                for process in [each for each in self.newest if each[1] < incarnations.get(each[0], each[1] + 1)]:
                    del self.newest[process]
                    self.unplanned.discard(process)
            case RoundBegun():
                self.on_round_begun(event)
            case _:
                assert_never(event)
        if self.members and self.members <= self.unplanned:
            self.plan(event.at)

    def on_round_begun(self, event: RoundBegun) -> None:
        process = (event.worker, event.incarnation)
        before = self.newest.get(process)
        if before is not None and event.round <= before.number:
            return  # a copy
        if process in self.unplanned and process in self.members:
            self.plan(event.at, but=process)
        self.newest[process] = Running(event.round, event.at, event.step_s)
        if self.local.rule == "proportional":
            self.answer_in_proportion(process)
        else:
            self.unplanned.add(process)

    def answer_in_proportion(self, process: Process) -> None:
        number, _, step_s = self.newest[process]
        steps = self.local.at_least
        known = [part.step_s for each, part in self.newest.items() if each in self.members and part.step_s is not None]
        if step_s is not None and len(known) == len(self.members):
            steps = max(steps, int(self.local.at_most * min(1.0, min(known) / step_s) + 1e-9))
        self.orders.append(EndRound(*process, number, steps, None))

    def plan(self, now: float, but: Process | None = None) -> None:
        """Plans the rounds of all members that have none, and know how fast they are, but for one that is over."""
        there = sorted(self.unplanned & self.members)
        self.unplanned.difference_update(there)
        rounds = {each: self.newest[each] for each in there if each != but}
        rows = {each: self.ends(part.began, part.step_s) for each, part in rounds.items() if part.step_s is not None}
        if not rows:
            return
        barrier = self.choose(list(rows.values()))
        self.plans += 1
        self.bound_plans += max(row[0] for row in rows.values()) > min(row[-1] for row in rows.values())
        for (process, _), index in zip(rows.items(), barrier.iterations, strict=True):
            steps = self.local.at_least + index
            self.orders.append(EndRound(*process, rounds[process].number, steps, barrier.time - now))

    def ends(self, began: float, step_s: float) -> list[float]:
        """Returns when a worker is expected to end each step that may be its round's last."""
        least, most = self.local.at_least, self.local.at_most
        return [began + steps * step_s for steps in range(least, min(most, least + MOST_PREDICTED - 1) + 1)]

    def check(self) -> None:
        require(self.unplanned <= self.newest.keys(), "a round has no plan that nobody has begun")
        incarnations = dict(self.members)
        for rank, incarnation in self.newest:
            require(incarnation >= incarnations.get(rank, incarnation), f"a former process of {rank} is remembered")
