"""Policies that look at the clock, which comes with the events: DSSP, Deadline, naive waiting. And stale steps."""

from __future__ import annotations

import pytest

from paceline.core.actions import Action, Apply, SetTimer
from paceline.core.events import GradientReady, PullArrived, PushArrived, TimerFired
from paceline.core.messages import Handle, Members, Pull, Push
from paceline.core.policy import CentralPolicy
from paceline.errors import ConfigError
from paceline.policies import ASP, DSSP, SSP, Backup, Deadline, Waiting

from .drive import ShardAlone, WorkerAlone, answered, applied, computed, dropped, parked, sent, sources


class ClockedShard(ShardAlone):
    """`at(2.5).iterate(0, 1)`: the same, at a time."""

    def __init__(self, policy: CentralPolicy, workers: int) -> None:
        self.time = 0.0
        super().__init__(policy, workers)

    def at(self, time: float) -> ClockedShard:
        self.time = time
        return self

    def push(self, worker: int, iteration: int) -> list[Action]:
        handle = Handle(worker, 0, iteration, self.versions.get(worker, 0), 8)
        return self.shard.handle(PushArrived(self.time, Push(handle)))

    def pull(self, worker: int, iteration: int) -> list[Action]:
        return self.note(self.shard.handle(PullArrived(self.time, Pull(worker, 0, iteration))))

    def fire(self, timer: int) -> list[Action]:
        return self.note(self.shard.handle(TimerFired(self.time, timer)))


class TestDSSP:
    def paced(self, policy: DSSP) -> ClockedShard:
        """Worker 0 takes 1 s an iteration, worker 1 takes 3.4 s; both intervals are known at 6.8."""
        shard = ClockedShard(policy, workers=2)
        shard.at(1.0).iterate(0, 0)
        shard.at(2.0).iterate(0, 1)
        shard.at(3.4).iterate(1, 0)
        shard.at(6.8).iterate(1, 1)
        shard.at(7.0).push(0, 2)
        return shard

    def test_it_goes_on_to_where_the_predicted_wait_is_shortest(self) -> None:
        """At 8.0 worker 0 has pushed iteration 3; V = 2, the slow one pushes at 10.2, 13.6, 17.0 ...

        After r more iterations of 1 s it would wait 2.2, 1.2, 0.2, 2.6, 1.6, ...: r = 2 is best."""
        shard = self.paced(DSSP(low=1, high=8))
        shard.at(7.0).pull(0, 3)
        assert answered(shard.at(8.0).iterate(0, 3)) == [(0, 4)]
        assert answered(shard.at(9.0).iterate(0, 4)) == [(0, 5)]
        (park,) = parked(shard.at(10.0).iterate(0, 5))
        assert park.reason == "4 ahead of worker 1, bound 1 to 8"
        assert answered(shard.at(10.2).push(1, 2)) == [(0, 6)], "the next rise of V frees it"

    def test_time_parked_is_no_part_of_a_workers_pace(self) -> None:
        """Else whoever was parked once would look as slow as the one it waited for, and be parked for ever."""
        shard = self.paced(DSSP(low=1, high=8))
        shard.at(7.0).pull(0, 3)
        for time, iteration in ((8.0, 3), (9.0, 4), (10.0, 5)):
            shard.at(time).iterate(0, iteration)
        shard.at(10.2).iterate(1, 2)
        assert answered(shard.at(11.2).iterate(0, 6)) == [(0, 7)], "after 2 more it waits 0.4 s, now 2.4 s"

    def test_high_is_the_limit(self) -> None:
        shard = self.paced(DSSP(low=1, high=2))
        shard.at(7.0).pull(0, 3)
        assert answered(shard.at(8.0).iterate(0, 3)) == [(0, 4)]
        assert parked(shard.at(9.0).iterate(0, 4)), "2 ahead would be better still, but that is high"

    def test_without_a_history_it_is_ssp_with_low(self) -> None:
        shard = ClockedShard(DSSP(low=2, high=9), workers=2)
        decisions = [bool(parked(shard.at(float(i)).iterate(0, i))) for i in range(3)]
        assert decisions == [False, False, True]

    def test_ties_go_to_the_smallest(self) -> None:
        """Both take 1 s and the slow one's push is due in half a second, after any r."""
        shard = ClockedShard(DSSP(low=1, high=6), workers=2)
        for i in range(3):
            shard.at(float(i)).iterate(0, i)
            shard.at(i + 0.5).iterate(1, i)
        shard.at(3.0).iterate(0, 3)
        assert shard.V == 3
        assert parked(shard.at(4.0).iterate(0, 4))

    def test_high_below_low_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="dssp:high=1 is out of range: low=2 or more"):
            DSSP(low=2, high=1)


class TestDeadline:
    def learned(self, policy: Deadline) -> ClockedShard:
        """Three workers; in iterations 0 and 1 gradients arrive 1, 2 and 3 s after its start."""
        shard = ClockedShard(policy, workers=3)
        for iteration in range(2):
            for worker in range(3):
                actions = shard.at(10.0 * iteration + worker + 1).iterate(worker, iteration)
        self.timers = [action for action in actions if isinstance(action, SetTimer)]
        return shard

    def test_the_time_is_factor_times_the_quantile_of_recent_arrivals(self) -> None:
        """Iteration 0 has no start on this shard; those of 1 arrived 8, 9 and 10 s after V rose at 3 s."""
        self.learned(Deadline(quantile=0.5, factor=2.0))
        assert self.timers == [SetTimer(2, 2.0 * 9.0)]
        self.learned(Deadline(quantile=1.0, factor=1.5))
        assert self.timers == [SetTimer(2, 1.5 * 10.0)]

    def test_until_it_has_learned_everybody_is_waited_for(self) -> None:
        shard = ClockedShard(Deadline(), workers=3)
        actions = [a for worker in range(3) for a in shard.at(worker + 1.0).iterate(worker, 0)]
        assert not [action for action in actions if isinstance(action, SetTimer)]

    def test_when_the_time_is_over_those_who_are_there_make_the_step(self) -> None:
        shard = self.learned(Deadline(least=0.5))
        shard.at(14.0).iterate(0, 2)
        shard.at(15.0).iterate(2, 2)
        actions = shard.at(31.0).fire(2)
        assert [sources(step) for step in applied(actions)] == [[(0, 2), (2, 2)]]
        assert answered(actions) == [(0, 3), (2, 3)]
        late = shard.at(32.0).iterate(1, 2)
        assert dropped(late)
        assert answered(late) == [(1, 3)], "it adopts the shard's iteration"

    def test_never_with_fewer_than_the_least(self) -> None:
        shard = self.learned(Deadline(least=0.6))
        shard.at(14.0).iterate(0, 2)
        assert shard.at(31.0).fire(2) == []
        assert applied(shard.at(40.0).push(1, 2)), "the second makes it enough, in overtime"

    def test_the_timer_of_a_finished_iteration_is_ignored(self) -> None:
        shard = self.learned(Deadline())
        for worker in range(3):
            shard.at(14.0).iterate(worker, 2)
        shard.at(15.0).iterate(0, 3)
        shard.at(15.0).iterate(1, 3)
        assert shard.at(31.0).fire(2) == []
        assert shard.V == 3

    def test_late_gradients_teach_too(self) -> None:
        """Else the time given would shrink with each one that was too late to count."""
        shard = self.learned(Deadline(least=0.5, quantile=1.0, factor=1.0))
        shard.at(14.0).iterate(0, 2)
        shard.at(15.0).iterate(2, 2)
        shard.at(31.0).fire(2)
        shard.at(113.0).iterate(1, 2)
        for worker in range(3):
            actions = shard.at(120.0).iterate(worker, 3)
        assert SetTimer(4, 100.0) in actions


class TestNaiveWaiting:
    def test_the_pull_comes_when_the_timer_fires(self) -> None:
        worker = WorkerAlone(Waiting(delay_s=0.5), servers=2)
        worker.start()
        worker.answer_all(0)
        actions = worker.finish(0)
        assert [type(message) for _, message in sent(actions)] == [Push, Push]
        assert [action for action in actions if isinstance(action, SetTimer)] == [SetTimer(1, 0.5)]
        pulls = sent(worker.worker.handle(TimerFired(0.5, 1)))
        assert pulls == [(0, Pull(0, 0, 1)), (1, Pull(0, 0, 1))]
        assert computed(worker.answer_all(1)) == [1]

    def test_another_timer_changes_nothing(self) -> None:
        worker = WorkerAlone(Waiting(delay_s=0.5), servers=2)
        worker.start()
        worker.answer_all(0)
        worker.finish(0)
        assert worker.worker.handle(TimerFired(0.5, 7)) == []
        worker.worker.handle(TimerFired(0.5, 1))
        assert worker.worker.handle(TimerFired(0.6, 1)) == []

    def test_no_delay_is_the_base_itself(self) -> None:
        waiting, plain = WorkerAlone(Waiting(delay_s=0.0)), WorkerAlone(ASP())
        for worker in (waiting, plain):
            worker.start()
            worker.answer_all(0)
        assert waiting.finish(0) == plain.finish(0)

    def test_the_shards_are_the_bases(self) -> None:
        policy = Waiting(delay_s=0.1, base="backup:extra=2")
        assert str(policy) == "waiting:delay_s=0.1,base=backup(extra=2)"
        shard = policy.machine("server", 0, Members(4, 1), 0)
        assert shard.policy == Backup(extra=2)  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="backup:extra=2 needs more than 2 workers"):
            policy.validate(Members(2, 1))

    @pytest.mark.parametrize("base", ["waiting", "bsp+asp", "nothing"])
    def test_of_what_cannot_be(self, base: str) -> None:
        with pytest.raises(ConfigError):
            Waiting(base=base)

    def test_a_gradient_is_ready_only_once(self) -> None:
        worker = WorkerAlone(Waiting(delay_s=0.5), servers=1)
        worker.start()
        worker.answer_all(0)
        worker.finish(0)
        with pytest.raises(ValueError, match="not computing"):
            worker.worker.handle(GradientReady(0.1, 1, 0, (8,)))


class TestStalenessWeighted:
    @pytest.mark.parametrize(
        "policy", [ASP(staleness_weighted=True), SSP(staleness=9, staleness_weighted=True)], ids=str
    )
    def test_a_step_is_divided_by_one_plus_its_staleness(self, policy: CentralPolicy) -> None:
        shard = ShardAlone(policy, workers=4)
        weights = [step.weight for worker in range(4) for step in applied(shard.push(worker, 0))]
        assert weights == [1 / 4, 1 / 8, 1 / 12, 1 / 16]
        shard.pull(0, 1)
        (fresh,) = applied(shard.push(0, 1))
        assert fresh == Apply((Handle(0, 0, 1, 4, 8),), 1 / 4, 5)
