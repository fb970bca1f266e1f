"""Rounds of local steps: when a worker ends one, and the plan of `local_steps=auto`."""

from __future__ import annotations

import random
from collections.abc import Callable

from paceline.core.control.round_planner import EndRound, RoundBegun, RoundPlanner
from paceline.core.events import ViewChanged
from paceline.core.local_steps import LocalSteps, make
from paceline.core.messages import View
from paceline.core.rounds import Pace, Rounds
from paceline.policies import zipline


def planner_of(local: LocalSteps, workers: int) -> RoundPlanner:
    planner = RoundPlanner(local, zipline.plan)
    planner.checks = True
    planner.handle(ViewChanged(0.0, View(1, tuple((rank, 0) for rank in range(workers)))))
    return planner


class Loop:
    """Workers that begin every round together, as under bsp; `step_s(rank)` is how long one's next step takes."""

    def __init__(self, local: LocalSteps, workers: int, step_s: Callable[[int], float]) -> None:
        self.planner = planner_of(local, workers)
        self.rounds = [Rounds(local) for _ in range(workers)]
        self.step_s = step_s
        self.now = 0.0

    def round(self) -> list[float]:
        """Does a round, and returns when each has ended it."""
        orders: list[EndRound] = []
        for rank, rounds in enumerate(self.rounds):
            rounds.begin(self.now)
            orders += self.planner.handle(RoundBegun(self.now, rank, 0, rounds.number, rounds.pace.step_s))
        for order in orders:
            self.rounds[order.worker].hear(order, self.now)
        ends = []
        for rank, rounds in enumerate(self.rounds):
            at = self.now + self.step_s(rank)
            while not rounds.end_step(at):
                at += self.step_s(rank)
            ends.append(at)
        self.began, self.now = self.now, max(ends)
        return ends

    def waited(self, rounds: int) -> float:
        """Returns the share of the time of so many rounds that workers have waited."""
        self.round()
        start, idle = self.now, 0.0
        for _ in range(rounds):
            ends = self.round()
            idle += sum(max(ends) - end for end in ends)
        return idle / len(self.rounds) / (self.now - start)

    @property
    def steps(self) -> list[int]:
        return [rounds.steps for rounds in self.rounds]


def fixed(*seconds: float) -> Callable[[int], float]:
    return lambda rank: seconds[rank]


def read(**given: object) -> LocalSteps:
    local = make(**given)  # type: ignore[arg-type]
    assert local is not None
    return local


def test_a_round_of_steps_and_one_of_seconds() -> None:
    loop = Loop(read(local_steps=3), 2, fixed(1.0, 2.0))
    assert loop.round() == [3.0, 6.0]
    loop = Loop(read(every_s=5.0), 2, fixed(1.0, 2.0))
    assert loop.round() == [5.0, 6.0], "the step that is under way then is the last"
    assert loop.steps == [5, 3]


def test_a_planned_round_ends_for_all_at_the_end_of_a_step() -> None:
    loop = Loop(read(local_steps="auto(at_least=4,at_most=20)"), 3, fixed(1.0, 1.5, 2.5))
    loop.round()
    assert loop.steps == [4, 4, 4], "no speed is known yet"
    ends = loop.round()
    assert max(ends) - min(ends) < 1e-6
    assert loop.steps == [15, 10, 6]
    assert loop.planner.bound_plans == 0


def test_bounds_that_leave_no_choice_are_counted() -> None:
    loop = Loop(read(local_steps="auto(at_least=16,at_most=64)"), 2, fixed(1.0, 8.0))
    loop.round()
    loop.round()
    assert loop.steps == [64, 16]
    assert loop.planner.bound_plans == loop.planner.plans == 1


def test_in_proportion_to_speed() -> None:
    loop = Loop(read(local_steps="proportional"), 3, fixed(1.0, 2.0, 3.0))
    loop.round()
    assert loop.steps == [1, 1, 1]
    loop.round()
    assert loop.steps == [1, 1, 21], "the last to begin is the first to know everybody's speed"
    loop.round()
    assert loop.steps == [64, 32, 21]


def test_a_plan_waits_less_than_fixed_and_proportional_rounds() -> None:
    factors = [1.0, 1.1, 1.3, 1.9]
    for sigma in (0.0, 0.5):
        waited = {}
        for text in ("auto", "32", "proportional"):
            draw = random.Random(3)
            loop = Loop(read(local_steps=text), 4, lambda rank: factors[rank] * draw.lognormvariate(0.0, sigma))  # noqa: B023
            waited[text] = loop.waited(40)
        assert waited["auto"] < 0.7 * waited["proportional"] < waited["32"], waited


def test_a_worker_that_stands_still_is_not_waited_for() -> None:
    planner = planner_of(read(local_steps="auto"), 2)
    assert planner.handle(RoundBegun(1.0, 0, 0, 2, 0.1)) == []
    (order,) = planner.handle(RoundBegun(9.0, 0, 0, 3, 0.1)) or [None]
    assert order is None, "its second round is over: nobody is left to be planned"
    planner.handle(RoundBegun(9.5, 1, 0, 2, 0.1))
    assert planner.plans == 1


def test_a_lost_worker_leaves_the_plan_and_copies_are_ignored() -> None:
    planner = planner_of(read(local_steps="auto"), 3)
    assert planner.handle(RoundBegun(1.0, 0, 0, 2, 0.1)) == []
    assert planner.handle(RoundBegun(1.0, 0, 0, 2, 0.1)) == []
    assert planner.handle(RoundBegun(1.1, 2, 0, 2, 0.2)) == []
    orders = planner.handle(ViewChanged(1.2, View(2, ((0, 0), (2, 0)))))
    assert [order.worker for order in orders] == [0, 2]
    assert planner.handle(RoundBegun(1.3, 1, 0, 2, 0.1)) == []


def test_a_standstill_says_nothing_about_speed() -> None:
    pace = Pace()
    assert pace.step_s is None
    for seconds in (1.0, 1.0, 300.0, 1.0):
        pace.note(seconds)
    assert pace.step_s == 1.0
