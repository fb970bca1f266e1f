"""The scheduler: one decision for all shards. And proof that the judge of the random runs sees it broken."""

from __future__ import annotations

import pytest

from paceline.core.actions import Compute, Park, Send
from paceline.core.events import (
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    ReleaseArrived,
    Restored,
    RiseArrived,
    ViewChanged,
)
from paceline.core.machine import IllegalEvent, Machine
from paceline.core.messages import Handle, Members, Node, Parameters, Pull, Push, Release, Rise, Role, View
from paceline.core.scheduler import SCHEDULER, ReportingShard, ScheduledWorker, Scheduler
from paceline.errors import ConfigError
from paceline.policies import BSP, SSP, Scheduled, parse
from paceline.testing import PolicyBroken, play

TWO = Members(2, 2)
BOTH = ViewChanged(0.0, View(1, ((0, 0), (1, 0))))


def scheduler(policy: BSP | SSP | None = None) -> Scheduler:
    machine = Scheduler(policy or BSP(), TWO)
    machine.checks = True
    machine.handle(BOTH)
    return machine


def released(worker: int, iteration: int, incarnation: int = 0) -> Send:
    return Send(Node("worker", worker), Release(worker, incarnation, iteration))


class TestScheduler:
    def test_holds_a_pull_until_the_last_shard_has_finished(self) -> None:
        machine = scheduler()
        [parked] = machine.handle(PullArrived(1.0, Pull(0, 0, 1)))
        assert parked == Park(Pull(0, 0, 1), "no shard has finished iteration 0", (1,), 1)
        assert machine.handle(RiseArrived(2.0, Rise(1, 1, 1))) == []
        [parked] = machine.handle(PullArrived(2.0, Pull(1, 0, 1)))
        assert isinstance(parked, Park)
        assert parked.reason == "shard 0 has not finished iteration 0"
        assert machine.handle(RiseArrived(3.0, Rise(0, 1, 1))) == [released(0, 1), released(1, 1)]

    def test_releases_at_once_whom_the_policy_lets_pass(self) -> None:
        machine = scheduler(SSP(staleness=2))
        assert machine.handle(PullArrived(1.0, Pull(0, 0, 1))) == [released(0, 1)]
        assert machine.handle(PullArrived(1.0, Pull(0, 0, 2))) == [released(0, 2)]
        assert isinstance(machine.handle(PullArrived(1.0, Pull(0, 0, 3)))[0], Park)
        machine.handle(RiseArrived(2.0, Rise(0, 1, 1)))
        assert machine.handle(RiseArrived(2.0, Rise(1, 1, 1))) == [released(0, 3)]

    def test_a_shard_that_jumps_frees_everybody_it_passes(self) -> None:
        """V of a shard may rise by several in one event: the slowest worker left."""
        machine = scheduler(SSP(staleness=1))
        machine.handle(PullArrived(1.0, Pull(0, 0, 1)))
        machine.handle(PullArrived(1.0, Pull(0, 0, 2)))
        machine.handle(RiseArrived(2.0, Rise(0, 5, -1)))
        assert machine.handle(RiseArrived(2.0, Rise(1, 4, -1))) == [released(0, 2)]

    def test_copies_and_earlier_lives_are_not_heard(self) -> None:
        machine = scheduler()
        machine.handle(PullArrived(1.0, Pull(0, 1, 1)))
        assert machine.handle(PullArrived(1.0, Pull(0, 1, 1))) == []
        assert machine.handle(PullArrived(1.0, Pull(0, 0, 7))) == []
        machine.handle(RiseArrived(2.0, Rise(0, 1, 1)))
        assert machine.handle(RiseArrived(2.0, Rise(1, 1, 1))) == [released(0, 1, 1)]

    def test_the_lost_are_not_released(self) -> None:
        machine = scheduler()
        machine.handle(PullArrived(1.0, Pull(0, 0, 1)))
        machine.handle(ViewChanged(2.0, View(2, ((1, 0),))))
        machine.handle(RiseArrived(2.0, Rise(0, 1, 1)))
        assert machine.handle(RiseArrived(2.0, Rise(1, 1, 1))) == []

    def test_a_shard_that_comes_back_from_a_checkpoint_may_stand_lower(self) -> None:
        machine = scheduler()
        for shard in (0, 1):
            machine.handle(RiseArrived(1.0, Rise(shard, 4, 0)))
        machine.handle(RiseArrived(2.0, Rise(1, 2, -1)))
        assert isinstance(machine.handle(PullArrived(3.0, Pull(0, 0, 5)))[0], Park)
        machine.handle(RiseArrived(4.0, Rise(0, 5, 1)))
        assert machine.handle(RiseArrived(4.0, Rise(1, 4, 1))) == []
        assert machine.handle(RiseArrived(5.0, Rise(1, 5, 1))) == [released(0, 5)]

    def test_a_shard_that_is_none_is_refused(self) -> None:
        with pytest.raises(IllegalEvent, match="there is no shard 2"):
            scheduler().handle(RiseArrived(1.0, Rise(2, 1, 0)))


def test_a_worker_pushes_asks_and_pulls_when_released() -> None:
    worker = ScheduledWorker(0, TWO)
    worker.checks = True
    worker.handle(BOTH)
    for shard in (0, 1):
        actions = worker.handle(ParametersArrived(1.0, Parameters(shard, 0, 0, 0, 0, False)))
    assert actions == [Compute(0, 0)]
    sent = [action for action in worker.handle(GradientReady(2.0, 0, 0, (8, 8))) if isinstance(action, Send)]
    assert [type(action.message) for action in sent] == [Push, Push, Pull]
    assert sent[-1] == Send(SCHEDULER, Pull(0, 0, 1))
    assert worker.handle(ReleaseArrived(3.0, Release(0, 0, 0))) == []
    assert worker.handle(ReleaseArrived(3.0, Release(0, 1, 1))) == []
    pulls = [Send(Node("server", shard), Pull(0, 0, 1)) for shard in (0, 1)]
    assert worker.handle(ReleaseArrived(3.0, Release(0, 0, 1))) == pulls
    assert worker.handle(ReleaseArrived(3.0, Release(0, 0, 1))) == []


def test_a_shard_reports_where_it_starts_and_each_rise() -> None:
    shard = ReportingShard(BSP(), 1, TWO)
    assert shard.handle(Restored(0.0, 3, 9))[-1] == Send(SCHEDULER, Rise(1, 3, -1))
    shard.handle(BOTH)
    assert len(shard.handle(PushArrived(1.0, Push(Handle(0, 0, 3, 9, 8))))) == 0
    assert shard.handle(PushArrived(1.0, Push(Handle(1, 0, 3, 9, 8))))[-1] == Send(SCHEDULER, Rise(1, 4, 1))
    assert ReportingShard(BSP(), 0, TWO).handle(BOTH) == [Send(SCHEDULER, Rise(0, 0, -1))]


class TestPolicy:
    def test_has_a_text_form_with_its_base(self) -> None:
        assert str(parse("scheduled:base=ssp(staleness=2)")) == "scheduled:base=ssp(staleness=2)"
        assert parse("scheduled") == Scheduled(base="bsp")

    @pytest.mark.parametrize("base", ["pssp", "dssp", "waiting", "scheduled"])
    def test_refuses_what_a_scheduler_cannot_decide(self, base: str) -> None:
        with pytest.raises(ConfigError, match="cannot be decided by a scheduler"):
            parse(f"scheduled:base={base}")

    def test_cannot_be_on_one_shard_only(self) -> None:
        with pytest.raises(ConfigError, match="cannot be one of several policies"):
            parse("scheduled+bsp")


class LooksAtTheFastestShard(Scheduler):
    def settle(self) -> None:
        self.finished = [max(self.finished)] * len(self.finished)
        super().settle()


class ForgetsOneInFive(Scheduler):
    def release(self, pull: Pull) -> None:
        if pull.iteration % 5:
            super().release(pull)


class KnowsNoLives(Scheduler):
    """What a worker that comes back asks is taken for a copy of what its earlier life asked."""

    def on_pull_arrived(self, event: PullArrived) -> None:
        before = self.asked.get(event.pull.worker)
        if before is None or before.iteration < event.pull.iteration:
            super().on_pull_arrived(event)


class ReportsTooMuch(ReportingShard):
    def settle(self) -> None:
        super().settle()
        last = self.actions[-1] if self.actions else None
        if isinstance(last, Send) and isinstance(last.message, Rise):
            self.actions[-1] = Send(SCHEDULER, Rise(self.rank, last.message.V + 1, self.mover))


class ReportsWhenPushed(ReportingShard):
    """V also rises when somebody leaves."""

    def on_view_changed(self, event: ViewChanged) -> None:
        super().on_view_changed(event)
        self.actions[:] = [action for action in self.actions if not isinstance(action, Send)]


class AsksTheSchedulerForEverything(ScheduledWorker):
    """Pulls from shards that answered less go to the scheduler too, so those shards miss a promise."""

    def settle(self) -> None:
        if not (self.waiting or self.computing or self.pausing) and len(set(self.answered)) > 1:
            self.iteration = max(self.answered)
            self.pausing = True
            self.pause()
        else:
            super().settle()


Substitute = type[Scheduler] | type[ReportingShard] | type[ScheduledWorker]

BROKEN: list[tuple[Substitute, str, str]] = [
    (LooksAtTheFastestShard, "bsp", "together"),
    (ForgetsOneInFive, "bsp", "hang"),
    (KnowsNoLives, "bsp", "hang"),
    (ReportsTooMuch, "ssp(staleness=1)", "together"),
    (ReportsWhenPushed, "bsp", "hang"),
    (AsksTheSchedulerForEverything, "bsp", "hang"),
]


@pytest.mark.parametrize(("substitute", "base", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_machine_is_caught(substitute: Substitute, base: str, rule: str) -> None:
    policy = Scheduled(base=base)

    def make(role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "scheduler" and issubclass(substitute, Scheduler):
            return substitute(policy.base_policy, members)
        if role == "server" and issubclass(substitute, ReportingShard):
            return substitute(policy.base_policy, rank, members, seed)
        if role == "worker" and issubclass(substitute, ScheduledWorker):
            return substitute(rank, members)
        return policy.machine(role, rank, members, seed)

    broken = set()
    for seed in range(200):
        try:
            play(policy, workers=2 + seed % 3, iterations=8, seed=seed, machine_factory=make)
        except PolicyBroken as error:
            broken.add(error.rule)
            if rule in broken:
                break
    assert rule in broken
