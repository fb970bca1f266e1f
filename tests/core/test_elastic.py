"""ElasticBSP's machines: what the scheduler plans, how shards keep it, and that the judge sees them broken."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline.core.actions import Action, Answer, Park, Send
from paceline.core.barrier_scheduler import BarrierScheduler
from paceline.core.events import GradientReady, NotifyArrived, PlanArrived, PullArrived, PushArrived, ViewChanged
from paceline.core.machine import Machine
from paceline.core.messages import Handle, Members, Node, Notify, Plan, Pull, Push, Role, View
from paceline.core.planned_barrier import NotifyingWorker, PlannedShard
from paceline.core.scheduler import SCHEDULER
from paceline.errors import ConfigError
from paceline.policies import ElasticBSP, parse, zipline
from paceline.policies.interval_prediction import LatestInterval, MeanInterval, MedianInterval
from paceline.testing import PolicyBroken, play

THREE = Members(3, 2)


def view(number: int, *members: tuple[int, int]) -> ViewChanged:
    return ViewChanged(0.0, View(number, members))


ALL = view(1, (0, 0), (1, 0), (2, 0))


class TestPlanner:
    def planner(self, lookahead: int = 4, predict: str = "latest") -> BarrierScheduler:
        machine = ElasticBSP(lookahead=lookahead, predict=predict).machine("scheduler", 0, THREE, 0)
        assert isinstance(machine, BarrierScheduler)
        machine.checks = True
        machine.handle(ALL)
        return machine

    def notify(self, machine: BarrierScheduler, worker: int, iteration: int, at: float, life: int = 0) -> list[Plan]:
        """The plans it led to, one for each shard."""
        actions = machine.handle(NotifyArrived(at, Notify(worker, life, iteration)))
        return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, Plan)]

    def monitor(self, machine: BarrierScheduler, intervals: dict[int, float]) -> list[Plan]:
        """Workers that began at 0 push as often as they can until the slowest has pushed twice."""
        end = 2 * max(intervals.values())
        pushes = sorted(
            (k * interval, worker, k)
            for worker, interval in intervals.items()
            for k in range(1, int(end / interval + 1e-9) + 1)
        )
        plans = []
        for at, worker, k in pushes:
            assert plans == [], "not before everybody has pushed twice"
            plans = self.notify(machine, worker, k, at)
        return plans

    def test_plans_when_everybody_has_pushed_twice_and_tells_all_shards(self) -> None:
        """Intervals 2, 3, 5; at 10 they are at 5, 3, 2. The next ends: 12 14 16 18, 12 15 18 21, 15 20 25 30."""
        machine = self.planner()
        one, other = self.monitor(machine, {0: 2.0, 1: 3.0, 2: 5.0})
        assert one == other == Plan(1, ((0, 0, 7), (1, 0, 5), (2, 0, 3)), 15.0, 1.0)
        assert self.notify(machine, 0, 6, 12.0) == [], "one plan at a time"

    @pytest.mark.parametrize(
        ("lookahead", "left_s", "stop"),
        [(2, 0.05, 4), (2, 0.15, 4), (2, 0.25, 3), (1, 0.15, 3), (1, 0.001, 3), (1, 1e-9, 4)],
    )
    def test_an_iteration_about_to_end_is_stopped_at_only_if_there_is_no_other(
        self, lookahead: int, left_s: float, stop: int
    ) -> None:
        """Workers 0 and 1 take 2 s and are at 2; the ends of worker 2, 10.6 and 11.2, are nearer to their next."""
        machine = self.planner(lookahead=lookahead)
        for k in (1, 2):
            for worker in (0, 1):
                self.notify(machine, worker, k, 4.0 + left_s + 2.0 * k)
        self.notify(machine, 2, 1, 9.4)
        plan, _ = self.notify(machine, 2, 2, 10.0)
        assert {worker: stop for worker, _, stop in plan.stops}[0] == stop

    @pytest.mark.parametrize(("lookahead", "wait_s"), [(1, 1.0), (2, 0.9)])
    def test_who_is_overdue_is_taken_to_end_soon(self, lookahead: int, wait_s: float) -> None:
        machine = self.planner(lookahead=lookahead)
        plan, _ = self.monitor(machine, {0: 1.0, 1: 1.0, 2: 1.0})
        for worker, _, stop in plan.stops:
            self.notify(machine, worker, stop, 3.0)
        for k in (4, 5):
            self.notify(machine, 0, k, float(k))
            self.notify(machine, 1, k, float(k))
        self.notify(machine, 2, 4, 29.0)
        plan, _ = self.notify(machine, 2, 5, 30.0)
        assert (plan.due_s, plan.wait_s) == pytest.approx((31.0, wait_s), abs=1e-5)
        assert {worker: stop for worker, _, stop in plan.stops} == {0: 7, 1: 7, 2: 6}

    def test_monitors_again_when_all_are_at_their_stops(self) -> None:
        machine = self.planner()
        self.monitor(machine, {0: 2.0, 1: 3.0, 2: 5.0})
        for worker, stop, at in ((0, 7, 14.0), (1, 5, 15.0), (2, 3, 15.0)):
            assert self.notify(machine, worker, stop, at) == []
        for worker, k, at in ((0, 8, 17.0), (1, 6, 18.0), (0, 9, 19.0), (2, 4, 20.0), (1, 7, 21.0)):
            assert self.notify(machine, worker, k, at) == []
        plan, _ = self.notify(machine, 2, 5, 25.0)
        assert plan.number == 2
        assert plan.due_s == pytest.approx(30.0), "worker 2 takes 5 s; the 5 s it was held at the barrier do not count"

    def test_an_interval_with_a_barrier_in_it_is_not_learned_from(self) -> None:
        machine = self.planner(predict="mean")
        plan, _ = self.monitor(machine, {0: 1.0, 1: 1.0, 2: 1.0})
        for worker, _, stop in plan.stops:
            self.notify(machine, worker, stop, 3.0)
        for k, at in ((4, 54.0), (5, 55.0)):
            plans = [plan for worker in range(3) for plan in self.notify(machine, worker, k, at)]
        assert (plans[0].due_s, plans[0].wait_s) == pytest.approx((56.0, 0.0))

    def test_the_lost_leave_the_plan(self) -> None:
        machine = self.planner()
        self.monitor(machine, {0: 2.0, 1: 3.0, 2: 5.0})
        self.notify(machine, 0, 7, 14.0)
        self.notify(machine, 1, 5, 15.0)
        machine.handle(view(2, (0, 0), (1, 0)))
        assert not machine.planned, "the barrier is over: it waited for worker 2 only"

    def test_the_lost_are_not_monitored(self) -> None:
        machine = self.planner()
        for k in (1, 2):
            for worker in (0, 1):
                self.notify(machine, worker, k, float(k))
        actions = machine.handle(view(2, (0, 0), (1, 0)))
        [plan, _] = [action.message for action in actions if isinstance(action, Send)]
        assert isinstance(plan, Plan)
        assert [worker for worker, _, _ in plan.stops] == [0, 1]

    def test_a_joiner_is_monitored_also_if_it_was_heard_of_before_its_view(self) -> None:
        machine = self.planner()
        self.notify(machine, 2, 9, 1.0, life=1)
        for k in (1, 2):
            for worker in (0, 1):
                assert self.notify(machine, worker, k, float(k)) == []
        assert machine.handle(view(2, (0, 0), (1, 0), (2, 1))) == []
        plan, _ = self.notify(machine, 2, 10, 3.0, life=1)
        assert [(worker, life) for worker, life, _ in plan.stops] == [(0, 0), (1, 0), (2, 1)]

    def test_copies_and_earlier_lives_are_not_heard(self) -> None:
        machine = self.planner()
        machine.handle(view(2, (0, 1), (1, 0)))
        self.notify(machine, 1, 1, 1.0)
        self.notify(machine, 1, 2, 2.0)
        self.notify(machine, 0, 1, 1.0, life=0)
        assert self.notify(machine, 0, 2, 2.0, life=0) == []
        self.notify(machine, 0, 1, 3.0, life=1)
        assert self.notify(machine, 0, 1, 4.0, life=1) == []
        assert len(self.notify(machine, 0, 2, 5.0, life=1)) == 2

    def test_one_worker_alone_is_left_alone(self) -> None:
        machine = self.planner()
        machine.handle(view(2, (0, 0)))
        assert [self.notify(machine, 0, k, float(k)) for k in range(1, 6)] == [[]] * 5


class TestShard:
    def shard(self, *stops: tuple[int, int, int]) -> PlannedShard:
        """Everybody has pushed iteration 0 and has been answered for 1."""
        machine = PlannedShard(ElasticBSP(), 0, THREE)
        machine.checks = True
        machine.handle(ALL)
        for worker in range(3):
            self.ask(machine, worker, 0)
            self.push(machine, worker, 0)
            self.ask(machine, worker, 1)
        if stops:
            assert machine.handle(PlanArrived(1.0, Plan(1, stops, 2.0, 1.0))) == []
        return machine

    def push(self, machine: PlannedShard, worker: int, iteration: int) -> list[Action]:
        return machine.handle(PushArrived(1.0, Push(Handle(worker, 0, iteration, 0, 8))))

    def ask(self, machine: PlannedShard, worker: int, iteration: int, life: int = 0) -> list[Action]:
        return machine.handle(PullArrived(1.0, Pull(worker, life, iteration)))

    def answered(self, actions: Iterable[Action]) -> list[int]:
        return [action.parameters.worker for action in actions if isinstance(action, Answer)]

    def test_holds_whoever_is_at_its_stop_until_all_are(self) -> None:
        machine = self.shard((0, 0, 3), (1, 0, 2), (2, 0, 2))
        self.push(machine, 0, 1)
        assert self.answered(self.ask(machine, 0, 2)) == [0], "its stop is 3"
        self.push(machine, 0, 2)
        [parked] = self.ask(machine, 0, 3)
        assert parked == Park(Pull(0, 0, 3), "at stop 3 of plan 1, which waits for workers 1, 2", (1, 2), 2)
        self.push(machine, 2, 1)
        [parked] = self.ask(machine, 2, 2)
        assert isinstance(parked, Park)
        assert parked.waits_for == (1,)
        actions = self.push(machine, 1, 1)
        assert self.answered(actions) == [0, 2]
        assert {action.reason for action in actions if isinstance(action, Answer)} == {
            "all are at their stops of plan 1"
        }
        assert self.answered(self.ask(machine, 1, 2)) == [1]
        assert (machine.barriers, machine.progress.V) == (1, 2), "V is what all have finished, not the barrier"

    def test_a_plan_that_comes_late_stops_nobody_for_ever(self) -> None:
        """Worker 0 has been answered for 2, its stop, before the plan is here: it goes on and is held at 3."""
        machine = self.shard()
        self.push(machine, 0, 1)
        assert self.answered(self.ask(machine, 0, 2)) == [0]
        machine.handle(PlanArrived(1.0, Plan(1, ((0, 0, 2), (1, 0, 2), (2, 0, 2)), 2.0, 1.0)))
        self.push(machine, 0, 2)
        assert self.answered(self.ask(machine, 0, 3)) == []
        self.push(machine, 1, 1)
        assert self.answered(self.push(machine, 2, 1)) == [0]

    def test_a_plan_that_comes_when_all_are_past_it_holds_nobody(self) -> None:
        machine = self.shard()
        machine.handle(PlanArrived(1.0, Plan(1, ((0, 0, 1), (1, 0, 1), (2, 0, 1)), 2.0, 1.0)))
        assert machine.barriers == 1
        self.push(machine, 0, 1)
        assert self.answered(self.ask(machine, 0, 2)) == [0]

    def test_a_copy_or_an_older_plan_is_not_heard(self) -> None:
        machine = self.shard((0, 0, 2), (1, 0, 2), (2, 0, 2))
        machine.handle(PlanArrived(1.0, Plan(2, ((0, 0, 4), (1, 0, 2), (2, 0, 2)), 2.0, 1.0)))
        machine.handle(PlanArrived(1.0, Plan(1, ((0, 0, 2), (1, 0, 2), (2, 0, 2)), 2.0, 1.0)))
        self.push(machine, 0, 1)
        assert self.answered(self.ask(machine, 0, 2)) == [0]

    def test_a_newer_plan_lets_go_whom_it_does_not_stop(self) -> None:
        machine = self.shard((0, 0, 2), (1, 0, 2), (2, 0, 2))
        for worker in (0, 1):
            self.push(machine, worker, 1)
            assert self.answered(self.ask(machine, worker, 2)) == []
        actions = machine.handle(PlanArrived(1.0, Plan(2, ((0, 0, 4), (1, 0, 2), (2, 0, 2)), 2.0, 1.0)))
        assert self.answered(actions) == [0]

    def test_the_lost_are_not_waited_for(self) -> None:
        machine = self.shard((0, 0, 2), (1, 0, 2), (2, 0, 5))
        for worker in (0, 1):
            self.push(machine, worker, 1)
            self.ask(machine, worker, 2)
        assert self.answered(machine.handle(view(2, (0, 0), (1, 0)))) == [0, 1]

    def test_a_joiner_waits_for_the_barrier_under_way(self) -> None:
        machine = self.shard((0, 0, 2), (1, 0, 2), (2, 0, 2))
        machine.handle(view(2, (0, 0), (1, 1), (2, 0)))
        [parked] = self.ask(machine, 1, 0, life=1)
        assert isinstance(parked, Park)
        assert parked.reason == "joined during plan 1, which waits for workers 0, 2"
        self.push(machine, 0, 1)
        assert self.answered(self.push(machine, 2, 1)) == [1]

    def test_a_joiner_begins_at_once_while_no_barrier_is_planned(self) -> None:
        machine = self.shard()
        machine.handle(view(2, (0, 0), (1, 1), (2, 0)))
        assert self.answered(self.ask(machine, 1, 0, life=1)) == [1]


def test_a_worker_tells_the_scheduler_of_each_push() -> None:
    worker = NotifyingWorker(0, Members(1, 1))
    worker.handle(view(1, (0, 0)))
    worker.computing = True
    actions = worker.handle(GradientReady(2.0, 0, 0, (8,)))
    assert actions[-1] == Send(SCHEDULER, Notify(0, 0, 1))
    assert actions[-2] == Send(Node("server", 0), Pull(0, 0, 1)), "it does not wait for anything but the shards"


class TestPredictors:
    def test_the_latest_is_the_paper_s(self) -> None:
        latest = LatestInterval()
        for interval in (1.0, 9.0, 2.0):
            latest.note(interval)
        assert latest.next_s() == 2.0

    def test_the_mean_weighs_the_newest_by_alpha(self) -> None:
        mean = MeanInterval(0.25)
        for interval in (4.0, 8.0, 1.0):
            mean.note(interval)
        assert mean.next_s() == pytest.approx(0.25 * 1 + 0.75 * (0.25 * 8 + 0.75 * 4))

    def test_the_median_forgets(self) -> None:
        median = MedianInterval(3)
        for interval in (100.0, 100.0, 1.0, 2.0, 50.0):
            median.note(interval)
        assert median.next_s() == 2.0


class TestPolicy:
    @pytest.mark.parametrize("text", ["elastic:lookahead=15", "elastic:lookahead=4,predict=median,recent=5"])
    def test_has_a_text_form(self, text: str) -> None:
        assert str(parse(text)) == text
        assert parse("elastic") == ElasticBSP(lookahead=15, predict="latest")

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("elastic:lookahead=0", "elastic:lookahead=0 is out of range: from 1 to 10000"),
            ("elastic:lookahead=2.5", "not a whole number"),
            ("elastic:predict=tomorrow", "elastic:predict=tomorrow is not one of latest, mean, median"),
            ("elastic:alpha=0.5", "elastic:alpha belongs to predict=mean, not to predict=latest"),
            ("elastic:predict=mean,alpha=0", "elastic:alpha=0 is out of range: above 0 and at most 1"),
            ("elastic:predict=mean,recent=3", "elastic:recent belongs to predict=median"),
            ("elastic+bsp", "cannot be one of several policies"),
            ("scheduled:base=elastic", "cannot be decided by a scheduler"),
            ("waiting:base=elastic", "cannot be waited on top of"),
        ],
    )
    def test_refuses_what_cannot_be(self, text: str, complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            parse(text)


class AnswersOneInFour(PlannedShard):
    """Lets somebody past its stop now and then."""

    def adopt(self, policy: ElasticBSP) -> None:  # type: ignore[override]
        super().adopt(policy)
        held = self.barrier.may_pull
        self.barrier.may_pull = lambda worker, i, progress: i % 4 == 3 or held(worker, i, progress)  # type: ignore[method-assign]


class WaitsForTheLost(PlannedShard):
    def on_view_changed(self, event: ViewChanged) -> None:
        self.barrier.forget = lambda worker: None  # type: ignore[method-assign]
        super().on_view_changed(event)

    def check(self) -> None:
        """Not to be caught by itself."""


class LetsJoinersIn(PlannedShard):
    def adopt(self, policy: ElasticBSP) -> None:  # type: ignore[override]
        super().adopt(policy)
        barrier = self.barrier
        held = barrier.may_pull
        barrier.may_pull = lambda w, i, progress: w not in barrier.stops or held(w, i, progress)  # type: ignore[method-assign]


class ForgetsToLift(PlannedShard):
    """The barrier is reached only by a push, not by a view."""

    def settle(self) -> None:
        if self.mover >= 0:
            super().settle()

    def check(self) -> None:
        """Not to be caught by itself."""


class PlansForEachShard(BarrierScheduler):
    """Shards that plan alone: they keep their plans, and each waits for what another does not let come."""

    def plan(self) -> None:
        super().plan()
        sent = [action for action in self.actions if isinstance(action, Send) and isinstance(action.message, Plan)]
        for action in sent:
            plan, shard = action.message, action.to.rank
            assert isinstance(plan, Plan)
            stops = tuple((worker, life, stop + (worker + shard) % 3) for worker, life, stop in plan.stops)
            self.actions[self.actions.index(action)] = Send(action.to, Plan(plan.number, stops, 0.0, 0.0))


Substitute = type[PlannedShard] | type[BarrierScheduler]

BROKEN: list[tuple[Substitute, str]] = [
    (AnswersOneInFour, "stop"),
    (WaitsForTheLost, "parked"),
    (LetsJoinersIn, "stop"),
    (ForgetsToLift, "parked"),
    (PlansForEachShard, "hang"),
]


def play_shards(seed: int, substitute: Substitute | None = None, faults: bool = True) -> None:
    policy = ElasticBSP(lookahead=1 + seed % 5)

    def make(role: Role, rank: int, members: Members, seed: int) -> Machine:
        if substitute is not None and role == "server" and issubclass(substitute, PlannedShard):
            return substitute(policy, rank, members, seed)
        if substitute is not None and role == "scheduler" and issubclass(substitute, BarrierScheduler):
            return substitute(policy.lookahead, policy.predictor, zipline.plan, members)
        return policy.machine(role, rank, members, seed)

    workers, servers = 2 + seed % 4, 1 + seed % 4
    play(policy, workers=workers, servers=servers, iterations=12, seed=seed, faults=faults, machine_factory=make)


@pytest.mark.parametrize("faults", [True, False])
def test_keeps_its_rules_on_one_to_four_shards(faults: bool) -> None:
    for seed in range(60):
        play_shards(seed, faults=faults)


@pytest.mark.parametrize(("substitute", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_machine_is_caught(substitute: Substitute, rule: str) -> None:
    broken = set()
    for seed in range(100):
        try:
            play_shards(seed, substitute)
        except PolicyBroken as error:
            broken.add(error.rule)
            if rule in broken:
                break
    assert rule in broken
