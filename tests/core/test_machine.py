"""The machine base, the shard and the worker, one behaviour at a time: dispatch, illegal events, checks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_args

import pytest

from paceline.core.actions import Action, Answer, Apply
from paceline.core.events import (
    Event,
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    PushRejected,
    ViewChanged,
)
from paceline.core.machine import IllegalEvent, InvariantViolated, Machine, require
from paceline.core.messages import Handle, Members, Node, Parameters, Pull, Push, View
from paceline.core.shard import Shard
from paceline.core.worker import Worker
from paceline.errors import ConfigError
from paceline.policies import ASP, BSP, SSP, Backup
from paceline.testing import in_words

from .drive import ShardAlone, WorkerAlone, answered, answers, computed, dropped, parked, sent

EVENTS: list[Event] = [
    ViewChanged(0.0, View(9, ((0, 0),))),
    PushArrived(0.0, Push(Handle(0, 0, 0, 0, 8))),
    PushRejected(0.0, Push(Handle(0, 0, 0, 0, 8)), "not finite"),
    PullArrived(0.0, Pull(0, 0, 1)),
    ParametersArrived(0.0, Parameters(0, 0, 0, 0, 0, False)),
    GradientReady(0.0, 0, 0, (8, 8)),
]


def state_of(machine: Machine) -> dict[str, Any]:
    """Everything a machine remembers, deeply copied; what it was last asked to do is not part of it."""
    state = {}
    for field, value in vars(machine).items():
        if field not in ("actions", "handlers"):
            state[field] = copy.deepcopy(vars(value) if hasattr(value, "__dict__") else value)
    return state


class TestDispatch:
    def test_the_list_of_events_is_complete(self) -> None:
        assert {type(event) for event in EVENTS} == set(get_args(Event)) == set(Machine.METHODS)

    def test_each_event_goes_to_the_method_named_after_it(self) -> None:
        class Listener(Machine):
            def __getattr__(self, method: str) -> Callable[[Event], None]:
                if not method.startswith("on_"):
                    raise AttributeError(method)
                return lambda event: heard.append((method, type(event).__name__))

        heard: list[tuple[str, str]] = []
        listener = Listener()
        for event in EVENTS:
            listener.handle(event)
        assert heard == [
            ("on_view_changed", "ViewChanged"),
            ("on_push_arrived", "PushArrived"),
            ("on_push_rejected", "PushRejected"),
            ("on_pull_arrived", "PullArrived"),
            ("on_parameters_arrived", "ParametersArrived"),
            ("on_gradient_ready", "GradientReady"),
        ]

    def test_first_the_event_then_settle_then_check(self) -> None:
        class Listener(Machine):
            def on_pull_arrived(self, event: PullArrived) -> None:
                steps.append("event")

            def settle(self) -> None:
                steps.append("settle")

            def check(self) -> None:
                steps.append("check")

        steps: list[str] = []
        listener = Listener()
        listener.handle(PullArrived(0.0, Pull(0, 0, 1)))
        assert steps == ["event", "settle"], "checks are off unless turned on"
        listener.checks = True
        listener.handle(PullArrived(0.0, Pull(0, 0, 1)))
        assert steps[2:] == ["event", "settle", "check"]

    def test_each_call_returns_a_list_of_its_own(self) -> None:
        shard = ShardAlone(ASP(), workers=2)
        first = shard.push(0, 0)
        kept = list(first)
        second = shard.push(1, 0)
        assert first == kept
        assert first is not second

    def test_a_role_without_a_machine_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="ssp:staleness=3 has no machine for the role 'driver'"):
            SSP(staleness=3).machine("driver", 0, Members(2, 1), 0)

    def test_every_event_and_action_has_words(self) -> None:
        shard = ShardAlone(Backup(extra=1), workers=3)
        actions: list[Action] = shard.iterate(0, 0) + shard.iterate(1, 0) + shard.iterate(2, 0)
        worker = WorkerAlone(BSP())
        actions += worker.start() + worker.answer_all(0)
        assert {type(action) for action in actions} == set(get_args(Action))
        for thing in [*EVENTS, *actions]:
            assert "\n" not in in_words(thing)


class TestIllegalEvents:
    @pytest.mark.parametrize("event", EVENTS[4:], ids=lambda event: type(event).__name__)
    def test_a_shard_takes_no_events_of_workers(self, event: Event) -> None:
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        before = state_of(shard.shard)
        with pytest.raises(IllegalEvent, match=f"Shard does not take {type(event).__name__}"):
            shard.shard.handle(event)
        assert state_of(shard.shard) == before

    @pytest.mark.parametrize("event", EVENTS[1:4], ids=lambda event: type(event).__name__)
    def test_a_worker_takes_no_events_of_shards(self, event: Event) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        before = state_of(worker.worker)
        with pytest.raises(IllegalEvent, match=f"Worker does not take {type(event).__name__}"):
            worker.worker.handle(event)
        assert state_of(worker.worker) == before

    @pytest.mark.parametrize("iteration", [0, 1])
    def test_a_gradient_nobody_ordered(self, iteration: int) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        before = state_of(worker.worker)
        with pytest.raises(IllegalEvent, match=f"worker 0 is not computing iteration {iteration}"):
            worker.finish(iteration)
        assert state_of(worker.worker) == before

    def test_a_gradient_of_another_iteration(self) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        worker.answer_all(3)
        before = state_of(worker.worker)
        with pytest.raises(IllegalEvent, match="worker 0 is not computing iteration 2"):
            worker.finish(2)
        assert state_of(worker.worker) == before
        assert sent(worker.finish(3))

    def test_a_gradient_that_is_ready_twice(self) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        worker.answer_all(0)
        worker.finish(0)
        before = state_of(worker.worker)
        with pytest.raises(IllegalEvent):
            worker.finish(0)
        assert state_of(worker.worker) == before


class TestShard:
    def test_a_view_that_is_not_newer_changes_nothing(self) -> None:
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        before = state_of(shard.shard)
        for number in (0, 1):
            assert shard.shard.handle(ViewChanged(0.0, View(number, ((0, 0),)))) == []
        assert state_of(shard.shard) == before

    def test_a_duplicate_push_changes_nothing(self) -> None:
        for policy in (BSP(), ASP(), SSP(staleness=1), Backup(extra=1)):
            shard = ShardAlone(policy, workers=3)
            shard.push(0, 0)
            before = state_of(shard.shard)
            assert shard.push(0, 0) == []
            assert shard.reject(0, 0, "not finite") == []
            assert state_of(shard.shard) == before

    def test_a_push_promises_nothing_older(self) -> None:
        """next = max(next, i + 1), and the iterations skipped count as passed (algorithms.md 1)."""
        shard = ShardAlone(ASP(), workers=2)
        shard.push(0, 4)
        assert shard.shard.progress.next == {0: 5, 1: 0}
        assert shard.shard.progress.passed == dict.fromkeys(range(5), 1)

    def test_a_pull_promises_nothing_older(self) -> None:
        shard = ShardAlone(BSP(), workers=2)
        (park,) = parked(shard.pull(0, 3))
        assert park.waits_for == (1,)
        assert shard.shard.progress.next == {0: 3, 1: 0}
        shard.push(1, 0)
        shard.push(1, 1)
        assert answered(shard.push(1, 2)) == [(0, 3)]

    def test_a_rejected_push_counts_as_progress(self) -> None:
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        actions = shard.reject(1, 0, "not finite")
        assert [(drop.handle.source, drop.reason) for drop in dropped(actions)] == [(1, "not finite")]
        assert answered(actions) == [(0, 1)]
        assert [p.dropped for p in answers(shard.pull(1, 1))] == [True]

    def test_dropped_is_about_the_last_push_only(self) -> None:
        shard = ShardAlone(SSP(staleness=5), workers=2)
        shard.reject(0, 0, "not finite")
        assert [p.dropped for p in answers(shard.pull(0, 1))] == [True]
        assert [p.dropped for p in answers(shard.iterate(0, 1))] == [False]

    def test_the_mean_is_in_the_order_of_ranks(self) -> None:
        """Floating-point sums depend on their order; the order of arrival must not matter."""
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            shard = ShardAlone(BSP(), workers=3)
            actions = [action for worker in order for action in shard.push(worker, 0)]
            (step,) = [action for action in actions if isinstance(action, Apply)]
            assert [handle.source for handle in step.handles] == [0, 1, 2]

    def test_a_release_says_who_moved(self) -> None:
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        (release,) = [action for action in shard.push(1, 0) if isinstance(action, Answer)]
        assert (release.released_by, release.reason) == (1, "iteration 0 is finished")

    def test_a_release_by_a_loss_names_nobody(self) -> None:
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        (release,) = [action for action in shard.view(0) if isinstance(action, Answer)]
        assert release.released_by == -1

    def test_many_missing_workers_are_counted_not_listed(self) -> None:
        shard = ShardAlone(BSP(), workers=9)
        (park,) = parked(shard.iterate(0, 0))
        assert (park.waits_for, park.waits_for_count) == ((1, 2, 3, 4), 8)
        assert park.reason == "iteration 0 lacks workers 1, 2, 3, 4 and 4 more"

    @pytest.mark.parametrize("extra", [3, 4])
    def test_as_many_backups_as_workers_are_refused(self, extra: int) -> None:
        with pytest.raises(ConfigError, match=f"backup:extra={extra} .* with 3, extra may be from 0 to 2"):
            Backup(extra=extra).validate(Members(3, 1))

    CORRUPTIONS: tuple[tuple[str, Callable[[Shard], object]], ...] = (
        ("exactly the live members", lambda shard: shard.incarnations.pop(1)),
        ("is kept although V is", lambda shard: shard.progress.passed.update({-1: 2})),
        (r"passed\[0\] is 2, members say 1", lambda shard: shard.progress.passed.update({0: 2})),
        ("is finished, yet V did not rise", lambda shard: shard.progress.leave(shard.incarnations.popitem()[0])),
        ("older than V=0 is held", lambda shard: shard.held.update({-1: []})),
        ("is parked for V=0, V is 0", lambda shard: shard.parked.update({0: [Pull(1, 0, 1)]})),
        ("worker 0 is parked twice", lambda shard: shard.parked.update({2: [Pull(0, 0, 2)]})),
    )

    @pytest.mark.parametrize(
        ("message", "corrupt"), CORRUPTIONS, ids=lambda value: value if isinstance(value, str) else ""
    )
    def test_its_check_sees_an_impossible_state(self, message: str, corrupt: Callable[[Shard], object]) -> None:
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        shard.shard.check()
        corrupt(shard.shard)
        with pytest.raises(InvariantViolated, match=message):
            shard.shard.check()

    def test_its_check_sees_a_held_gradient_that_should_have_been_applied(self) -> None:
        shard = ShardAlone(ASP(), workers=2)
        shard.shard.held[0] = [Handle(0, 0, 0, 0, 8)]
        with pytest.raises(InvariantViolated, match="held although it applies on arrival"):
            shard.shard.check()


class TestWorker:
    def test_starts_when_a_view_names_it(self) -> None:
        worker = WorkerAlone(BSP(), servers=2, rank=1)
        assert worker.worker.handle(ViewChanged(0.0, View(1, ((0, 0),)))) == []
        actions = worker.worker.handle(ViewChanged(0.0, View(2, ((0, 0), (1, 3)))))
        assert sent(actions) == [(0, Pull(1, 3, 0)), (1, Pull(1, 3, 0))]

    def test_starts_once(self) -> None:
        worker = WorkerAlone(BSP())
        assert worker.start()
        assert worker.worker.handle(ViewChanged(0.0, View(2, ((0, 0), (1, 0))))) == []
        assert worker.worker.handle(ViewChanged(0.0, View(1, ((0, 0),)))) == []

    def test_does_not_start_on_a_view_that_was_overtaken(self) -> None:
        worker = WorkerAlone(BSP())
        worker.worker.handle(ViewChanged(0.0, View(5, ((1, 0),))))
        assert worker.worker.handle(ViewChanged(0.0, View(4, ((0, 0), (1, 0))))) == []

    def test_takes_the_largest_answer_and_asks_the_others_again(self) -> None:
        worker = WorkerAlone(BSP(), servers=3)
        worker.start()
        assert worker.answer(1, 5) == worker.answer(0, 3) == []
        assert sent(worker.answer(2, 4)) == [(0, Pull(0, 0, 5)), (2, Pull(0, 0, 5))]

    def test_asks_again_until_all_agree(self) -> None:
        """A shard that was behind may overtake: then the others are behind."""
        worker = WorkerAlone(Backup(extra=1), servers=2)
        worker.start()
        worker.answer(0, 5)
        assert sent(worker.answer(1, 3)) == [(1, Pull(0, 0, 5))]
        assert sent(worker.answer(1, 7)) == [(0, Pull(0, 0, 7))]
        assert computed(worker.answer(0, 7)) == [7]

    def test_an_answer_that_comes_twice_is_taken_once(self) -> None:
        worker = WorkerAlone(ASP(), servers=2)
        worker.start()
        worker.answer(0, 0, version=1)
        worker.answer(0, 0, version=2)
        assert worker.worker.versions[0] == 1

    def test_an_answer_to_another_life_is_not_taken(self) -> None:
        worker = WorkerAlone(ASP(), servers=1)
        worker.start()
        before = state_of(worker.worker)
        ghost = Parameters(0, 0, 1, 4, 4, False)
        assert worker.worker.handle(ParametersArrived(0.0, ghost)) == []
        assert state_of(worker.worker) == before

    def test_knows_on_which_shards_its_push_was_dropped(self) -> None:
        worker = WorkerAlone(Backup(extra=1), servers=2)
        worker.start()
        worker.answer_all(0)
        worker.finish(0)
        worker.answer(0, 1, dropped=True)
        worker.answer(1, 1)
        assert worker.worker.dropped == [True, False]

    def test_its_check_sees_answers_for_different_iterations(self) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        worker.answer_all(0)
        worker.worker.answered[1] = 4
        with pytest.raises(InvariantViolated, match=r"worker 0 computes 0 on answers for \[0, 4\]"):
            worker.worker.check()

    def test_its_check_sees_computing_while_waiting(self) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        worker.worker.computing = True
        with pytest.raises(InvariantViolated, match="worker 0 computes while it waits"):
            worker.worker.check()


def test_require_is_no_assert_statement() -> None:
    """`python -O` must not take the invariants away."""
    require(True, "fine")
    with pytest.raises(InvariantViolated, match="not fine"):
        require(False, "not fine")


def test_machines_of_one_policy_share_nothing() -> None:
    policy = SSP(staleness=1)
    one, other = ShardAlone(policy, workers=2), ShardAlone(policy, workers=2)
    one.iterate(0, 0)
    assert state_of(other.shard) == state_of(ShardAlone(policy, workers=2).shard)
    assert isinstance(policy.machine("worker", 0, Members(2, 1), 0), Worker)
    assert str(Node("server", 3)) == "server 3"
