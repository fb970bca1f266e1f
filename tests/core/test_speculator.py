"""SpecSync's scheduler: one behaviour at a time, then against Algorithm 2 read directly, then broken."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.actions import Action, Send, SetTimer
from paceline.core.events import (
    NotifyArrived,
    TimerFired,
    ViewChanged,
)
from paceline.core.machine import Machine
from paceline.core.messages import Node, Notify, View
from paceline.core.speculation import FEW, MOST, Iteration, Speculation, Speculator
from paceline.policies.specsync_tuning import tune

from .drive import state_of
from .test_specsync_tuning import cubic


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

    @pytest.mark.parametrize(("finished", "told"), [((3,), []), ((), [(0, 1)])], ids=["finished", "lost"])
    def test_m_counts_those_who_have_finished(self, finished: tuple[int, ...], told: list[tuple[int, int]]) -> None:
        machine = scheduler(4, Speculation(1.0, 0.5))
        machine.handle(ViewChanged(0.5, View(2, ((0, 0), (1, 0), (2, 0)), finished)))
        for worker, at in ((0, 1.0), (1, 1.5), (2, 2.0)):
            notify(machine, at, worker, 1)
        assert resynced(machine.handle(TimerFired(2.0, 1))) == told, "2 > 3 * 0.5, but not > 4 * 0.5"

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

    def test_tunes_with_the_m_that_counts_those_who_have_finished(self) -> None:
        pushes, whole = [(1.0, 0), (1.1, 1), (2.0, 0), (2.3, 1)], scheduler(2)
        machine = scheduler(4)
        machine.handle(ViewChanged(0.5, View(2, ((0, 0), (1, 0)), (2, 3))))
        for at, worker in pushes:
            for each in (machine, whole):
                notify(each, at, worker, 1 if at < 2 else 2)
        assert machine.in_force == cubic(pushes, machine.iterations, m=4)
        assert whole.in_force == cubic(pushes, machine.iterations)
        assert machine.in_force != whole.in_force

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
    """Reads Algorithm 2 and V.B of Zhang et al. 2018 directly: all notices are kept, and all is counted anew each time.

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
