"""SpecSync's machines: one behaviour at a time, then against a direct reading of Algorithm 2 (000), then broken."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.actions import AbortCompute, Action, Compute, Send, SetTimer
from paceline.core.events import (
    ComputeAborted,
    GradientReady,
    NotifyArrived,
    PullArrived,
    Restored,
    ResyncArrived,
    TimerFired,
    ViewChanged,
)
from paceline.core.machine import IllegalEvent, Machine
from paceline.core.messages import Members, Node, Notify, Pull, Push, Resync, Role, View
from paceline.core.scheduler import SCHEDULER
from paceline.core.shard import Shard
from paceline.core.speculation import FEW, MOST, Iteration, Speculation, SpeculativeWorker, Speculator
from paceline.errors import ConfigError
from paceline.policies import SSP, SpecSync, parse
from paceline.policies.tuning import tune
from paceline.testing import PolicyBroken, play

from .drive import ShardAlone, WorkerAlone, answered, computed, parked, sent, state_of
from .test_tuning import cubic


def resync(worker: WorkerAlone, iteration: int, incarnation: int = 0) -> list[Action]:
    return worker.worker.handle(ResyncArrived(0.0, Resync(0, incarnation, iteration)))


def aborted(worker: WorkerAlone, iteration: int, attempt: int = 0) -> list[Action]:
    return worker.worker.handle(ComputeAborted(0.0, iteration, attempt))


def begun() -> WorkerAlone:
    """A worker that computes iteration 1, on version 5 of both shards."""
    worker = WorkerAlone(SpecSync(), servers=2)
    worker.start()
    worker.answer_all(0)
    worker.finish(0)
    worker.answer_all(1, version=5)
    return worker


class TestWorker:
    def test_gives_notice_when_all_parameters_are_there_and_it_has_pushed(self) -> None:
        worker = WorkerAlone(SpecSync(), servers=2)
        worker.start()
        assert worker.answer_all(0) == [Compute(0, 0)], "nothing was pushed before the first iteration"
        worker.finish(0)
        assert worker.answer(1, 1) == []
        assert worker.answer(0, 1) == [Send(SCHEDULER, Notify(0, 0, 1)), Compute(1, 0)]

    def test_aborts_pulls_again_and_starts_over_on_what_it_gets(self) -> None:
        worker = begun()
        assert resync(worker, 1) == [AbortCompute(1, 0)]
        assert sent(aborted(worker, 1)) == [(0, Pull(0, 0, 1, 1)), (1, Pull(0, 0, 1, 1))]
        assert worker.answer(0, 1, version=8) == []
        assert worker.answer(1, 1, version=9) == [Compute(1, 1)], "no second notice: nothing was pushed"
        pushes = [message for _, message in sent(finish(worker, 1, 1)) if isinstance(message, Push)]
        assert [push.handle.version for push in pushes] == [8, 9]

    def test_aborts_an_iteration_once(self) -> None:
        worker = begun()
        resync(worker, 1)
        assert resync(worker, 1) == [], "it is being aborted"
        aborted(worker, 1)
        assert resync(worker, 1) == [], "it has been"
        worker.answer_all(1, version=9)
        assert resync(worker, 1) == [], "and is begun again"

    def test_a_finished_gradient_beats_the_abort(self) -> None:
        worker = begun()
        resync(worker, 1)
        pushes = [message for _, message in sent(finish(worker, 1, 0)) if isinstance(message, Push)]
        assert [push.handle.version for push in pushes] == [5, 5]
        worker.answer_all(2, version=9)
        assert resync(worker, 2) == [AbortCompute(2, 0)], "the next iteration is another matter"

    @pytest.mark.parametrize(("iteration", "incarnation"), [(0, 0), (2, 0), (1, 1)])
    def test_ignores_what_is_not_meant_for_this_iteration(self, iteration: int, incarnation: int) -> None:
        worker = begun()
        before = state_of(worker.worker)
        assert resync(worker, iteration, incarnation) == []
        assert state_of(worker.worker) == before

    def test_ignores_it_while_it_does_not_compute(self) -> None:
        worker = begun()
        finish(worker, 1, 0)
        assert resync(worker, 2) == []

    def test_refuses_an_abort_that_nobody_asked_for(self) -> None:
        worker = begun()
        with pytest.raises(IllegalEvent, match="did not abort attempt 0 at iteration 1"):
            aborted(worker, 1)
        resync(worker, 1)
        with pytest.raises(IllegalEvent, match="did not abort attempt 0 at iteration 2"):
            aborted(worker, 2)

    def test_goes_on_with_a_later_iteration_if_a_shard_says_so(self) -> None:
        worker = begun()
        resync(worker, 1)
        aborted(worker, 1)
        worker.answer(0, 1, version=9)
        assert sent(worker.answer(1, 4, version=9)) == [(0, Pull(0, 0, 4))]
        assert computed(worker.answer(0, 4, version=9)) == [4]


def finish(worker: WorkerAlone, iteration: int, attempt: int) -> list[Action]:
    return worker.worker.handle(GradientReady(0.0, iteration, attempt, (8, 8)))


class TestShard:
    def test_a_second_pull_for_an_iteration_is_never_parked(self) -> None:
        """Not even by a shard that was restored to where its condition does not hold yet."""
        for attempt in (0, 1):
            shard = Shard(SSP(staleness=1), 0, Members(2, 1))
            shard.handle(Restored(0.0, 2, 7))
            shard.handle(ViewChanged(0.0, View(1, ((0, 0), (1, 0)))))
            actions = shard.handle(PullArrived(0.0, Pull(1, 0, 5, attempt)))
            assert (len(parked(actions)), answered(actions)) == ((0, [(1, 5)]) if attempt else (1, []))

    def test_a_copy_of_either_pull_is_not_answered(self) -> None:
        shard = ShardAlone(SSP(staleness=1), workers=2)
        shard.iterate(0, 0)
        shard.shard.handle(PullArrived(0.0, Pull(0, 0, 1, 1)))
        for attempt in (0, 1):
            assert shard.shard.handle(PullArrived(0.0, Pull(0, 0, 1, attempt))) == []


def scheduler(workers: int, speculation: Speculation | None = None) -> Speculator:
    machine = Speculator(speculation, None if speculation else tune)
    machine.checks = True
    machine.handle(ViewChanged(0.0, View(1, tuple((worker, 0) for worker in range(workers)))))
    return machine


def notify(machine: Machine, at: float, worker: int, iteration: int, incarnation: int = 0) -> list[Action]:
    return machine.handle(NotifyArrived(at, Notify(worker, incarnation, iteration)))


def resynced(actions: list[Action]) -> list[tuple[int, int]]:
    """(worker, iteration) of those who are told to begin again."""
    sends = [action for action in actions if isinstance(action, Send)]
    assert all(send.to == Node("worker", send.message.worker) for send in sends)  # type: ignore[union-attr]
    return [(send.message.worker, send.message.iteration) for send in sends]  # type: ignore[union-attr]


class TestScheduler:
    def test_counts_the_others_in_a_window_closed_on_the_right(self) -> None:
        machine = scheduler(4, Speculation(1.0, 0.5))
        assert notify(machine, 1.0, 0, 1) == [SetTimer(1, 1.0)]
        for worker, at in ((1, 1.0), (2, 1.5), (3, 2.0), (2, 2.0)):
            notify(machine, at, worker, 1 if at < 2 or worker == 3 else 2)
        assert resynced(machine.handle(TimerFired(2.0, 1))) == [(0, 1)], "3 > 4 * 0.5; that of 1.0 is not after it"

    def test_as_many_as_the_rate_says_are_not_enough(self) -> None:
        machine = scheduler(4, Speculation(1.0, 0.5))
        notify(machine, 1.0, 0, 1)
        notify(machine, 1.5, 1, 1)
        notify(machine, 2.0, 2, 1)
        assert machine.handle(TimerFired(2.0, 1)) == []

    def test_a_timer_that_fires_late_counts_what_came_in_time(self) -> None:
        machine = scheduler(3, Speculation(1.0, 0.0))
        notify(machine, 1.0, 0, 1)
        notify(machine, 2.1, 1, 1)
        assert machine.handle(TimerFired(2.2, 1)) == []

    def test_the_next_notice_takes_the_place_of_the_last(self) -> None:
        machine = scheduler(3, Speculation(1.0, 0.0))
        notify(machine, 1.0, 0, 1)
        notify(machine, 1.2, 1, 1)
        notify(machine, 1.5, 0, 2)
        assert machine.handle(TimerFired(2.0, 1)) == []
        notify(machine, 2.1, 1, 2)
        assert resynced(machine.handle(TimerFired(2.5, 3))) == [(0, 2)]

    def test_the_lost_are_not_told_but_what_they_pushed_counts(self) -> None:
        machine = scheduler(3, Speculation(1.0, 0.0))
        notify(machine, 1.0, 0, 1)
        notify(machine, 1.5, 1, 1)
        machine.handle(ViewChanged(1.6, View(2, ((0, 0), (1, 1), (2, 0)))))
        assert resynced(machine.handle(TimerFired(2.0, 1))) == [(0, 1)]
        assert machine.handle(TimerFired(2.5, 2)) == []

    def test_copies_and_earlier_lives_are_not_heard(self) -> None:
        machine = scheduler(3, Speculation(1.0, 0.0))
        machine.handle(ViewChanged(0.5, View(2, ((0, 0), (1, 1), (2, 0)))))
        notify(machine, 1.0, 0, 1)
        notify(machine, 1.1, 1, 3, incarnation=1)
        before = state_of(machine)
        assert notify(machine, 1.2, 0, 1) == notify(machine, 1.3, 1, 9, incarnation=0) == []
        assert state_of(machine) == before

    def test_tunes_when_everybody_has_given_notice_again(self) -> None:
        machine = scheduler(3)
        pushes = [(1.0, 0), (1.1, 1), (1.2, 2), (2.0, 0), (2.1, 1)]
        for at, worker in pushes:
            assert notify(machine, at, worker, 1 if at < 2 else 2) == []
        assert machine.in_force is None
        assert notify(machine, 2.3, 2, 2) == []
        assert machine.in_force == cubic([*pushes, (2.3, 2)], machine.iterations)
        assert machine.in_force is not None
        assert notify(machine, 3.0, 0, 3) == [SetTimer(1, machine.in_force.abort_time_s)]

    def test_an_epoch_does_not_wait_for_the_lost(self) -> None:
        machine = scheduler(3)
        for iteration in (1, 2):
            for worker in (0, 1):
                notify(machine, iteration + worker / 10, worker, iteration)
        assert machine.in_force is None
        machine.handle(ViewChanged(3.0, View(2, ((0, 0), (1, 0)))))
        assert machine.in_force is not None

    @pytest.mark.parametrize("heard", [0, 1], ids=["never heard", "heard once"])
    @pytest.mark.parametrize("fixed", [Speculation(0.01, 1.0), Speculation(1e9, 1.0), None])
    def test_a_silent_worker_does_not_make_it_remember(self, fixed: Speculation | None, heard: int) -> None:
        machine = scheduler(3, fixed)
        for action in notify(machine, 0.01, 2, 1) if heard else ():
            assert isinstance(action, SetTimer)
            machine.handle(TimerFired(0.02, action.timer))
        for step in range(1, 10_000):
            for worker in range(2):
                for action in notify(machine, step + worker / 10, worker, step):
                    if fixed is not None and fixed.abort_time_s < 1 and isinstance(action, SetTimer):
                        machine.handle(TimerFired(step + worker / 10 + 0.01, action.timer))
        long_kept = heard == 1 and fixed is None
        assert len(machine.times) <= (2 * 3 * MOST + FEW if long_kept else 2 * FEW)
        assert len(machine.watches) <= 3

    def test_does_not_remember_for_ever(self) -> None:
        machine = scheduler(3, Speculation(0.05, 0.0))
        for iteration in range(1, 200):
            for worker in range(3):
                at = iteration + worker / 10
                [timer] = notify(machine, at, worker, iteration)
                assert isinstance(timer, SetTimer)
                machine.handle(TimerFired(at + 0.05, timer.timer))
        assert len(machine.times) < 10
        assert not machine.watches


class Algorithm2:
    """000, Algorithm 2 and V.B, read directly: all notices are kept, the counters are counted anew each time.

    "Upon receiving a notify message from a worker, the scheduler appends it to the push history and kicks start the
    speculation for the sender. To do so, it resets the push counter of the sender and starts the corresponding timer
    which will expire in ABORT_TIME." One timer for each worker. The tuner is Algorithm 1 in its cubic form.
    """

    def __init__(self, workers: int, fixed: Speculation | None) -> None:
        self.m = workers
        self.fixed = fixed
        self.history: list[tuple[float, int]] = []
        self.epoch: set[int] = set()
        self.timer: dict[int, tuple[float, float, Speculation, int]] = {}
        """worker -> when it was set, when it is due, what was in force, the iteration."""

    def next_due(self) -> float | None:
        return min((due for _, due, _, _ in self.timer.values()), default=None)

    def notified(self, at: float, worker: int, iteration: int) -> None:
        in_force = self.fixed if self.fixed is not None else self.tuned
        self.history.append((at, worker))
        self.epoch.add(worker)
        self.timer.pop(worker, None)
        if in_force is not None:
            self.timer[worker] = (at, at + in_force.abort_time_s, in_force, iteration)
        self.tune()

    tuned: Speculation | None = None

    def tune(self) -> None:
        own = {worker: [at for at, who in self.history if who == worker] for worker in range(self.m)}
        if self.epoch != set(own) or min(map(len, own.values())) < 2:
            return
        last = {worker: (times[-2], times[-1] - times[-2]) for worker, times in own.items()}
        self.tuned = cubic(self.history, {worker: Iteration(*began) for worker, began in last.items()})
        self.epoch = set()

    def fire(self, now: float) -> set[tuple[int, int]]:
        told = set()
        for worker, (since, due, in_force, iteration) in list(self.timer.items()):
            if due == now:
                del self.timer[worker]
                count = sum(since < at <= due and who != worker for at, who in self.history)
                if count > self.m * in_force.abort_rate:
                    told.add((worker, iteration))
        return told


STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=60)
"""(worker, eighths of a second since the one before): on a grid, so that ties are frequent."""
FIXED = st.one_of(
    st.none(), st.builds(Speculation, st.sampled_from([0.125, 0.25, 0.5, 1.0]), st.sampled_from([0.0, 0.2, 0.4, 0.8]))
)


def told_by_both(workers: int, fixed: Speculation | None, steps: list[tuple[int, int]], make: type[Speculator]) -> int:
    """Feed both the same notices, event by event; how many were told to re-sync, by both the same."""
    machine = make(fixed, None if fixed else tune)
    machine.checks = True
    machine.handle(ViewChanged(0.0, View(1, tuple((worker, 0) for worker in range(workers)))))
    direct = Algorithm2(workers, fixed)
    at, iterations, pending, told = 1.0, [0] * workers, dict[int, float](), 0

    def fire_until(now: float, including: bool) -> None:
        nonlocal told
        while pending:
            due = min(pending.values())
            if due > now or (due == now and not including):
                return
            expected = direct.fire(due)
            got: list[tuple[int, int]] = []
            for timer in [timer for timer, when in pending.items() if when == due]:
                del pending[timer]
                got += resynced(machine.handle(TimerFired(due, timer)))
            assert len(got) == len(set(got))
            assert set(got) == expected
            told += len(got)

    for worker, eighths in steps:
        worker %= workers
        if eighths == 0 and direct.history and direct.history[-1][1] == worker:
            eighths = 1  # an iteration takes some time
        fire_until(at + eighths / 8, including=False)
        at += eighths / 8
        if any(who == worker and when == at for when, who in direct.history):
            continue
        iterations[worker] += 1
        for action in notify(machine, at, worker, iterations[worker]):
            assert isinstance(action, SetTimer)
            pending[action.timer] = at + action.after_s
        direct.notified(at, worker, iterations[worker])
        assert machine.in_force == (fixed or direct.tuned)
    fire_until(at + 100, including=True)
    assert direct.next_due() is None
    return told


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), FIXED, STEPS)
def test_sends_exactly_the_resyncs_of_algorithm_2(
    workers: int, fixed: Speculation | None, steps: list[tuple[int, int]]
) -> None:
    told_by_both(workers, fixed, steps, Speculator)


class OpenOnTheRight(Speculator):
    def uncovered(self, watch):  # type: ignore[no-untyped-def]
        due_s = watch.since_s + watch.speculation.abort_time_s
        workers = [w for at, w in zip(self.times, self.workers, strict=True) if watch.since_s < at < due_s]
        return len(workers) - workers.count(watch.notice.worker)


class CountsItself(Speculator):
    def uncovered(self, watch):  # type: ignore[no-untyped-def]
        due_s = watch.since_s + watch.speculation.abort_time_s
        return sum(watch.since_s <= at <= due_s for at in self.times)


class RemembersTooLittle(Speculator):
    """Forgets what outstanding timers need."""

    def forget(self) -> None:
        self.times.clear()
        self.workers.clear()


class TunesTooOften(Speculator):
    """Does not wait until everybody has given notice again."""

    def settle(self) -> None:
        self.missing.clear()
        super().settle()


@pytest.mark.parametrize("broken", [OpenOnTheRight, CountsItself, RemembersTooLittle, TunesTooOften])
def test_a_broken_scheduler_is_seen(broken: type[Speculator]) -> None:
    draw = random.Random(0)
    with pytest.raises(AssertionError):  # noqa: PT012
        for _ in range(300):
            fixed = draw.choice([None, Speculation(0.5, 0.2)])
            steps = [(draw.randrange(5), draw.randrange(7)) for _ in range(40)]
            told_by_both(3, fixed, steps, broken)


class TestPolicy:
    def test_has_a_text_form_with_its_base(self) -> None:
        assert str(parse("specsync")) == "specsync:base=asp"
        text = "specsync:base=ssp(staleness=2),abort_time=0.05,abort_rate=0.2"
        assert str(parse(text)) == text
        assert parse(text) == SpecSync(base="ssp(staleness=2)", abort_time=0.05, abort_rate=0.2)

    @pytest.mark.parametrize("base", ["bsp", "backup", "deadline", "waiting", "scheduled", "specsync"])
    def test_refuses_what_takes_means_and_what_is_not_one_policy(self, base: str) -> None:
        with pytest.raises(ConfigError, match=f"specsync:base={base}.* cannot be speculated on: name one policy"):
            parse(f"specsync:base={base}")

    @pytest.mark.parametrize("text", ["specsync:abort_time=1", "specsync:abort_rate=0.2"])
    def test_takes_both_numbers_or_none(self, text: str) -> None:
        with pytest.raises(ConfigError, match="takes abort_time and abort_rate together"):
            parse(text)

    def test_cannot_be_on_one_shard_only(self) -> None:
        with pytest.raises(ConfigError, match="cannot be one of several policies"):
            parse("specsync+asp")


class PushesWhatItHadFirst(SpeculativeWorker):
    """Names the version of the parameters it gave up."""

    def on_parameters_arrived(self, event):  # type: ignore[no-untyped-def]
        before = list(self.versions)
        super().on_parameters_arrived(event)
        if self.attempt:
            self.versions = before


class AbortsAgain(SpeculativeWorker):
    def on_resync_arrived(self, event: ResyncArrived) -> None:
        if self.computing and event.resync.iteration == self.iteration and not self.aborting:
            self.aborting = True
            self.actions.append(AbortCompute(self.iteration, self.attempt))


class AbortsWhatIsDone(SpeculativeWorker):
    def on_resync_arrived(self, event: ResyncArrived) -> None:
        if event.resync.iteration == self.iteration - 1 and event.resync.incarnation == self.incarnation:
            self.actions.append(AbortCompute(event.resync.iteration, 0))


class AsksAsBefore(SpeculativeWorker):
    """Its second pull looks like the first, and is taken for a copy."""

    def on_compute_aborted(self, event: ComputeAborted) -> None:
        super().on_compute_aborted(event)
        for index, action in enumerate(self.actions):
            assert isinstance(action, Send)
            assert isinstance(action.message, Pull)
            self.actions[index] = Send(action.to, Pull(self.rank, self.incarnation, self.iteration))


class AsksTheGateAgain(Shard):
    """PSSP's coin falls as it did before, also for whom a rise of V has let through since."""

    def take_pull(self, pull: Pull) -> None:
        if pull.attempt and not self.gate.may_pull(pull.worker, pull.iteration - 1, self.progress):
            self.asked[pull.worker] = (pull.iteration, pull.attempt)
            self.park(pull, pull.iteration - 1, self.progress.V)
        else:
            super().take_pull(pull)


@pytest.mark.parametrize(
    ("substitute", "rule"),
    [
        (PushesWhatItHadFirst, "fresh"),
        (AbortsAgain, "abort"),
        (AbortsWhatIsDone, "abort"),
        (AsksAsBefore, "hang"),
        (AsksTheGateAgain, "parked"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_machine_is_caught(substitute: type[Machine], rule: str) -> None:
    policy = SpecSync(base="pssp(staleness=1,c=0.5)", abort_time=1.0, abort_rate=0.0)

    def make(role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "worker" and issubclass(substitute, SpeculativeWorker):
            return substitute(rank, members)
        if role == "server" and issubclass(substitute, Shard):
            return substitute(policy.base_policy, rank, members, seed)
        return policy.machine(role, rank, members, seed)

    broken = set()
    for seed in range(300):
        try:
            play(policy, workers=3 + seed % 3, iterations=8, seed=seed, machine_factory=make)
        except PolicyBroken as error:
            broken.add(error.rule)
            if rule in broken:
                break
    assert rule in broken
