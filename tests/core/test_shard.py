"""The shard, one behaviour at a time: what it takes, what it ignores, what its check sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from paceline.core.actions import Answer, Apply, Park
from paceline.core.events import PullArrived, PullRepeated, PushArrived, Restored, ViewChanged
from paceline.core.machine import IllegalEvent, InvariantViolated
from paceline.core.messages import Handle, Members, Parameters, Pull, Push, View
from paceline.core.policy import CentralPolicy
from paceline.core.shard import Shard
from paceline.errors import ConfigError
from paceline.policies import ASP, BSP, SSP, Backup, parameter, parse

from .drive import ShardAlone, answered, answers, dropped, parked, state_of


class TestShard:
    @pytest.mark.parametrize("held", [9, 11, 15])
    def test_a_restored_shard_behind_its_workers_takes_their_gradients_as_fresh(self, held: int) -> None:
        shard = Shard(ASP(staleness_weighted=True), 0, Members(2, 1))
        shard.handle(Restored(0.0, 5, 10))
        shard.handle(ViewChanged(0.0, View(1, ((0, 0), (1, 0)))))
        (step,) = shard.handle(PushArrived(0.0, Push(Handle(0, 0, 7, held, 8))))
        assert isinstance(step, Apply)
        assert step.weight == (0.5 if held > 9 else 0.25)

    @pytest.mark.parametrize(
        ("policy", "full"), [("asp", False), ("asp:scale=none", True), ("ssp:staleness=9,scale=none", True)]
    )
    def test_a_step_on_arrival_is_shared_by_those_who_are_there_or_have_finished(self, policy: str, full: bool) -> None:
        shard = parse(policy).machine("server", 0, Members(4, 1), 0)

        def weight(iteration: int, view: View) -> float:
            shard.handle(ViewChanged(0.0, view))
            (step, *_) = shard.handle(PushArrived(0.0, Push(Handle(0, 0, iteration, iteration, 8))))
            assert isinstance(step, Apply)
            return step.weight

        four, three, two = ((0, 0), (1, 0), (2, 0), (3, 0)), ((0, 0), (1, 0), (2, 0)), ((0, 0), (1, 0))
        views = [View(1, four), View(2, three, (3,)), View(3, two, (3,)), View(4, two[:1], (1, 3)), View(5, four[:1])]
        found = [weight(iteration, view) for iteration, view in enumerate([*views, View(6, four, ())])]
        assert found == ([1.0] * 6 if full else [1 / 4, 1 / 4, 1 / 3, 1 / 3, 1, 1 / 4])

    @pytest.mark.parametrize("policy", ["bsp", "deadline", "waiting:base=bsp"])
    def test_of_a_mean_those_who_have_finished_keep_their_share(self, policy: str) -> None:
        shard = parse(policy).machine("server", 0, Members(3, 1), 0)

        def weight(iteration: int, view: View) -> float:
            shard.handle(ViewChanged(0.0, view))
            for worker, _ in view.members:
                actions = shard.handle(PushArrived(0.0, Push(Handle(worker, 0, iteration, iteration, 8))))
            step = next(action for action in actions if isinstance(action, Apply))
            assert len(step.handles) == len(view.members)
            return step.weight

        views = [View(1, ((0, 0), (1, 0), (2, 0))), View(2, ((0, 0), (1, 0)), (2,)), View(3, ((0, 0),), (2,))]
        views += [View(4, ((0, 0),), (1, 2)), View(5, ((0, 0),))]
        assert [weight(iteration, view) for iteration, view in enumerate(views)] == [1, 2 / 3, 1 / 2, 1 / 3, 1]

    def test_the_last_gradients_of_those_who_have_finished_count_in_the_means_they_wait_for(self) -> None:
        """Their share of N is not given up twice: a mean of everybody's gradients is a whole step."""

        def weight(view: View) -> float:
            shard = BSP().machine("server", 0, Members(4, 1), 0)
            shard.handle(ViewChanged(0.0, View(1, ((0, 0), (1, 0), (2, 0), (3, 0)))))
            for worker in (0, 1):
                shard.handle(PushArrived(0.0, Push(Handle(worker, 0, 0, 0, 8))))
            actions = list(shard.handle(ViewChanged(0.0, view)))
            for worker in {2, 3} & dict(view.members).keys():
                actions += shard.handle(PushArrived(0.0, Push(Handle(worker, 0, 0, 0, 8))))
            step = next(action for action in actions if isinstance(action, Apply))
            assert len(step.handles) == 4 - (3 not in dict(view.members))
            return step.weight

        assert weight(View(2, ((1, 0), (2, 0), (3, 0)), (0,))) == 1, "it had pushed before it finished"
        assert weight(View(2, ((1, 0), (2, 0)), (0, 3))) == 3 / 4, "worker 3 had not"
        assert weight(View(2, ((1, 0), (2, 0)), (0,))) == 1, "worker 3 is lost"

    def test_a_policy_of_ones_own_may_mean_something_else_by_scale(self) -> None:
        @dataclass(frozen=True)
        class Mine(ASP):
            name = "mine"
            scale: float = parameter(2.0, doc="seconds")  # type: ignore[assignment]

        shard = ShardAlone(Mine(), workers=4)
        (step, *_) = shard.push(0, 0)
        assert isinstance(step, Apply)
        assert step.weight == 1 / 4

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

    @pytest.mark.parametrize("policy", [BSP(), SSP(staleness=0), Backup(extra=0)], ids=str)
    def test_a_duplicate_of_a_parked_pull_changes_nothing(self, policy: CentralPolicy) -> None:
        shard = ShardAlone(policy, workers=2)
        assert parked(shard.iterate(0, 0))
        before = state_of(shard.shard)
        assert shard.pull(0, 1) == []
        assert state_of(shard.shard) == before
        assert answered(shard.push(1, 0)) == [(0, 1)], "once"

    def test_a_newer_pull_takes_the_place_of_the_parked_one(self) -> None:
        shard = ShardAlone(SSP(staleness=0), workers=2)
        shard.pull(0, 1)
        (park,) = parked(shard.pull(0, 3))
        assert park.pull == Pull(0, 0, 3)
        assert [answered(shard.push(1, iteration)) for iteration in range(3)] == [[], [], [(0, 3)]]

    def test_a_push_promises_nothing_older(self) -> None:
        """next = max(next, i + 1), and nobody expects the iterations skipped (decision 2)."""
        shard = ShardAlone(ASP(), workers=2)
        shard.push(0, 4)
        assert shard.shard.progress.next == {0: 5, 1: 0}
        assert shard.shard.progress.passed == dict.fromkeys(range(5), 1)
        assert shard.shard.progress.skipped == {iteration: {0} for iteration in range(4)}

    def test_a_skipped_iteration_is_not_expected_and_not_there(self) -> None:
        """Worker 2 skips iteration 0: of the two gradients it needs one is there, and one can still come."""
        shard = ShardAlone(Backup(extra=1), workers=3)
        shard.push(0, 0)
        assert parked(shard.pull(2, 1))
        (step,) = [action for action in shard.push(1, 0) if isinstance(action, Apply)]
        assert [handle.source for handle in step.handles] == [0, 1]

    def test_when_too_few_can_still_come_those_that_can_are_enough(self) -> None:
        shard = ShardAlone(Backup(extra=1), workers=3)
        shard.push(0, 0)
        shard.pull(2, 1)
        (step,) = [action for action in shard.pull(1, 1) if isinstance(action, Apply)]
        assert [handle.source for handle in step.handles] == [0]

    def test_v_never_rises_beyond_what_somebody_has_passed(self) -> None:
        """Whatever a policy says: one whose push condition is always true must not make the shard spin."""

        class Hasty(BSP):
            def finishes(self, there: int, expected: int, workers: int) -> bool:
                return True

        shard = ShardAlone(Hasty(), workers=2)
        assert shard.V == 0
        shard.push(0, 0)
        assert shard.V == 1
        shard.pull(1, 4)
        assert shard.V == 4
        shard.view()
        assert shard.V == 4

    def test_the_push_condition_is_asked_about_gradients_there_and_expected(self) -> None:
        class Curious(BSP):
            def finishes(self, there: int, expected: int, workers: int) -> bool:
                asked.append((there, expected, workers))
                return super().finishes(there, expected, workers)

        asked: list[tuple[int, int, int]] = []
        shard = ShardAlone(Curious(), workers=4)
        shard.shard.checks = False
        assert asked == [], "nobody has passed iteration 0"
        shard.push(0, 0)
        shard.pull(1, 1)
        shard.view(0, 1, 3)
        shard.reject(3, 0, "not finite")
        assert list(dict.fromkeys(asked)) == [(1, 4, 4), (1, 3, 4), (1, 2, 4), (1, 1, 4)]
        assert shard.V == 1

    def test_a_push_after_its_worker_left_is_dropped_with_a_reason(self) -> None:
        shard = ShardAlone(ASP(), workers=2)
        shard.view(0)
        (drop,) = dropped(shard.push(1, 1))
        assert drop.reason == "worker 1 left before its push of iteration 1 came"

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
        assert park.reason == "iteration 0 lacks workers 1, 2, 3, 4 and 4 others"

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
        ("worker 0 is parked for V=0, V is 0", lambda shard: shard.parked.update({0: shard.parked.pop(1)})),
        ("worker 0 is parked for V=-1, V is 0", lambda shard: shard.parked.clear()),
        ("worker 7 waits but is no member", lambda shard: shard.waiting.update({7: Pull(7, 0, 1)})),
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


class TestRestored:
    def test_a_shard_starts_where_its_checkpoint_ends_and_workers_adopt_it(self) -> None:
        shard = Shard(BSP(), 0, Members(2, 1))
        shard.checks = True
        assert shard.handle(Restored(0.0, 30, 41)) == []
        shard.handle(ViewChanged(0.0, View(1, ((0, 0), (1, 0)))))
        (answer,) = shard.handle(PullArrived(0.0, Pull(0, 0, 0)))
        assert answer == Answer(Parameters(0, 0, 0, 30, 41, False), "", -1)

    def test_only_before_anything_else(self) -> None:
        shard = Shard(BSP(), 0, Members(2, 1))
        shard.handle(ViewChanged(0.0, View(1, ((0, 0),))))
        with pytest.raises(IllegalEvent, match="it cannot be restored"):
            shard.handle(Restored(0.0, 30, 41))
        assert shard.progress.V == 0


def test_an_answer_that_was_lost_with_the_server_is_given_again() -> None:
    shard = Shard(SSP(staleness=0), 0, Members(2, 1))
    shard.checks = True
    shard.handle(ViewChanged(0.0, View(1, ((0, 0), (1, 0)))))
    first, second = Pull(0, 0, 0), Pull(0, 0, 1)
    (answer,) = shard.handle(PullArrived(1.0, first))
    assert shard.handle(PullArrived(2.0, first)) == []  # a copy: its worker may be computing
    assert shard.handle(PullRepeated(3.0, first)) == [answer]
    shard.handle(PushArrived(4.0, Push(Handle(0, 0, 0, 0, 8))))
    assert [type(action) for action in shard.handle(PullRepeated(5.0, second))] == [Park]  # it was not heard before
    assert shard.handle(PullRepeated(6.0, second)) == []  # parked, and so it stays
    assert shard.handle(PullRepeated(7.0, first)) == []  # nobody waits for that any more
    assert shard.handle(PullRepeated(8.0, Pull(1, 1, 0))) == []  # of a life no view has named yet
    (released,) = (a for a in shard.handle(ViewChanged(9.0, View(2, ((0, 0),)))) if isinstance(a, Answer))
    (again,) = shard.handle(PullRepeated(10.0, second))
    assert again.parameters == released.parameters
