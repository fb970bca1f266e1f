"""What all machines have in common: dispatch, illegal events, sharing nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

import pytest

from paceline.core.actions import Action, Apply, Measure, Reduce, Send, Wait
from paceline.core.events import (
    AckArrived,
    ComputeAborted,
    Event,
    GradientReady,
    GradientRejected,
    HelloArrived,
    NormArrived,
    NotifyArrived,
    OfferArrived,
    ParametersArrived,
    PlanArrived,
    PullArrived,
    PullRepeated,
    PushArrived,
    PushRejected,
    ReleaseArrived,
    ReplyArrived,
    Restored,
    ResyncArrived,
    RiseArrived,
    ServersChanged,
    SliceNormArrived,
    TimerFired,
    TokenArrived,
    UpdateArrived,
    ViewChanged,
)
from paceline.core.formatting import to_text
from paceline.core.machine import IllegalEvent, InvariantViolated, Machine, require
from paceline.core.messages import (
    Ack,
    Handle,
    Hello,
    MeanNorm,
    Members,
    Node,
    Notify,
    Offer,
    Parameters,
    Plan,
    Pull,
    Push,
    Release,
    Reply,
    Resync,
    Rise,
    SliceNorm,
    Token,
    Update,
    View,
)
from paceline.core.worker import Worker
from paceline.errors import ConfigError
from paceline.policies import ASP, BSP, SSP, Backup, SpecSync, Waiting

from .drive import ShardAlone, WorkerAlone, sent, state_of

EVENTS: list[Event] = [
    ViewChanged(0.0, View(9, ((0, 0),))),
    Restored(0.0, 3, 7),
    PushArrived(0.0, Push(Handle(0, 0, 0, 0, 8))),
    PushRejected(0.0, Push(Handle(0, 0, 0, 0, 8)), "not finite"),
    PullArrived(0.0, Pull(0, 0, 1)),
    ParametersArrived(0.0, Parameters(0, 0, 0, 0, 0, False)),
    GradientReady(0.0, 0, 0, (8, 8)),
    TimerFired(0.0, 1),
    RiseArrived(0.0, Rise(0, 1, 0)),
    ReleaseArrived(0.0, Release(0, 0, 1)),
    NotifyArrived(0.0, Notify(0, 0, 1)),
    ResyncArrived(0.0, Resync(0, 0, 1)),
    PlanArrived(0.0, Plan(1, ((0, 0, 4),))),
    SliceNormArrived(0.0, SliceNorm(0, 1, 2.0)),
    NormArrived(0.0, MeanNorm(1, 2.0)),
    ComputeAborted(0.0, 1, 0),
    ServersChanged(0.0, 0.0, (8, 8), (3,), View(9, ((0, 0),)), 4, ((0, 4),)),
    GradientRejected(0.0, 0, 0, (8,), "not finite"),
    UpdateArrived(0.0, Update(Handle(0, 0, 1, 0, 0))),
    TokenArrived(0.0, Token(0, 0, 1)),
    AckArrived(0.0, Ack(0, 0, 1)),
    HelloArrived(0.0, Hello(0, 0, 1, 2, 3)),
    OfferArrived(0.0, Offer(Handle(0, 0, 1, 0, 0))),
    ReplyArrived(0.0, Reply(0, 0, 1, None)),
    PullRepeated(0.0, Pull(0, 0, 1)),
]


class TestDispatch:
    def test_the_list_of_events_is_complete(self) -> None:
        assert {type(event) for event in EVENTS} == set(get_args(Event)) == set(Machine.METHODS)

    def test_each_event_goes_to_the_method_named_after_it(self) -> None:
        def hears(method: str) -> Callable[[Machine, Event], None]:
            return lambda _, event: heard.append((method, type(event).__name__))

        heard: list[tuple[str, str]] = []
        listener = type("Listener", (Machine,), {method: hears(method) for method in Machine.METHODS.values()})()
        for event in EVENTS:
            listener.handle(event)
        names = [type(event).__name__ for event in EVENTS]
        assert heard == [("on" + re.sub("([A-Z])", r"_\1", name).lower(), name) for name in names]

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
        waiting = WorkerAlone(Waiting(delay_s=1.0))
        waiting.start()
        waiting.answer_all(0)
        actions += waiting.finish(0)
        speculating = WorkerAlone(SpecSync())
        speculating.start()
        speculating.answer_all(0)
        actions += speculating.worker.handle(ResyncArrived(0.0, Resync(0, 0, 0)))
        actions += [Measure(1, (Handle(0, 0, 1, 0, 8),)), Apply((Handle(0, 0, 1, 0, 8),), 1.0, 1, 2.0)]
        actions += [
            Send(Node("reducer", 0), SliceNorm(0, 1, None)),
            Reduce(3, (Handle(0, 0, 1, 0, 0),), (0.5,), 0.5),
            Wait(3, "updates of peer 1", (1,)),
        ]
        assert {type(action) for action in actions} == set(get_args(Action))
        for thing in [*EVENTS, *actions]:
            assert "\n" not in to_text(thing)


class TestIllegalEvents:
    @pytest.mark.parametrize("event", EVENTS[5:7], ids=lambda event: type(event).__name__)
    def test_a_shard_takes_no_events_of_workers(self, event: Event) -> None:
        shard = ShardAlone(BSP(), workers=2)
        shard.iterate(0, 0)
        before = state_of(shard.shard)
        with pytest.raises(IllegalEvent, match=f"Shard does not take {type(event).__name__}"):
            shard.shard.handle(event)
        assert state_of(shard.shard) == before

    @pytest.mark.parametrize("event", EVENTS[1:5], ids=lambda event: type(event).__name__)
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
        with pytest.raises(IllegalEvent, match=f"worker 0 is not computing attempt 0 of iteration {iteration}"):
            worker.finish(iteration)
        assert state_of(worker.worker) == before

    def test_a_gradient_of_another_iteration(self) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        worker.answer_all(3)
        before = state_of(worker.worker)
        with pytest.raises(IllegalEvent, match="worker 0 is not computing attempt 0 of iteration 2"):
            worker.finish(2)
        assert state_of(worker.worker) == before
        assert sent(worker.finish(3))

    @pytest.mark.parametrize(
        ("event", "message"),
        [
            (GradientReady(0.0, 3, 1, (8, 8)), "worker 0 is not computing attempt 1 of iteration 3"),
            (GradientReady(0.0, 3, 0, (8,)), "a gradient in 1 slices for 2 shards"),
            (GradientReady(0.0, 3, 0, (8, 8, 8)), "a gradient in 3 slices for 2 shards"),
        ],
        ids=["attempt", "too few slices", "too many slices"],
    )
    def test_a_gradient_that_is_not_what_was_ordered(self, event: Event, message: str) -> None:
        worker = WorkerAlone(BSP(), servers=2)
        worker.start()
        worker.answer_all(3)
        before = state_of(worker.worker)
        with pytest.raises(IllegalEvent, match=message):
            worker.worker.handle(event)
        assert state_of(worker.worker) == before
        assert sent(worker.finish(3)), "it goes on computing"

    def test_a_gradient_that_is_ready_twice(self) -> None:
        worker = WorkerAlone(BSP())
        worker.start()
        worker.answer_all(0)
        worker.finish(0)
        before = state_of(worker.worker)
        with pytest.raises(IllegalEvent):
            worker.finish(0)
        assert state_of(worker.worker) == before


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
