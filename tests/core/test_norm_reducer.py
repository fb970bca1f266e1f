"""The norm of a mean over all shards: random runs under the judge, each rule broken in turn, and what is said again."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.actions import Action, Answer, Apply, Drop, Measure, Park, Send
from paceline.core.events import (
    NormArrived,
    PullArrived,
    PushArrived,
    Restored,
    ServersChanged,
    SliceNormArrived,
    ViewChanged,
)
from paceline.core.machine import Machine
from paceline.core.messages import Handle, MeanNorm, Members, Node, Pull, Push, Role, SliceNorm, View
from paceline.core.norm_reducer import NormReducer
from paceline.core.policy import CentralPolicy
from paceline.core.shard import Shard
from paceline.core.state_snapshot import restore_snapshot, take_snapshot
from paceline.core.trace import Trace, replay
from paceline.policies import BSP, Backup, parse
from paceline.testing import PolicyBroken, Story, play, wire

POLICIES = [
    "bsp",
    "backup:extra=1",
    "deadline:quantile=0.1,factor=1,least=0.3",
    "scheduled:base=backup(extra=1)",
    "waiting:delay_s=0.5,base=bsp",
    "bsp+backup:extra=1",
    "backup:extra=1@0,bsp@3,deadline@6",
]


def play_one(policy: CentralPolicy, seed: int, make: wire.MachineFactory | None = None) -> Story:
    workers, servers, iterations = 2 + seed % 3, 2 + seed % 2, 6 + 2 * (seed % 3)
    return play(
        policy, workers=workers, servers=servers, iterations=iterations, seed=seed, machine_factory=make,
        clips_mean=True,
    )  # fmt: skip


@pytest.mark.parametrize("text", POLICIES)
def test_every_step_has_the_norm_of_all_shards_and_nobody_waits_for_ever(text: str) -> None:
    policy = parse(text)
    assert isinstance(policy, CentralPolicy)
    seen: Counter[str] = Counter()
    for seed in range(25):
        seen += play_one(policy, seed).counts
    assert seen["Measure"] > 200
    assert seen["kills"] > 10
    assert seen["strikes"] > 5
    assert seen["Apply"] == seen["Measure"], "a step for each, of each one"


def test_a_run_can_be_played_again_from_its_trace() -> None:
    trace = Trace.from_bytes(play_one(BSP(), 3).trace.to_bytes())

    def machine_of(node: Node, header: object) -> Machine:
        machine = BSP().machine(node.role, node.rank, trace.header.members, trace.header.seed)
        if isinstance(machine, Shard):
            machine.clips_mean = trace.header.clips_mean
        return machine

    assert replay(trace, machine_of) == []


def test_one_shard_asks_nobody() -> None:
    story = play(BSP(), workers=3, servers=1, iterations=8, seed=1, clips_mean=True)
    assert story.counts["Measure"] == 0
    assert story.counts["Apply"] > 5


class Unchecked(Shard):
    def check(self) -> None:
        """The judge is to find it, not the machine itself."""


class DoesNotSayThatItHasNone(Unchecked):
    """An iteration without gradients here is passed in silence."""

    def settle(self) -> None:
        super().settle()
        self.actions[:] = [each for each in self.actions if not isinstance(each, Send)]


class HoldsUpThoseWhoJoin(Unchecked):
    """Nobody is answered while a norm is awaited."""

    def handle_pull(self, pull: Pull) -> None:
        super().handle_pull(pull)
        if self.measuring and self.actions and isinstance(self.actions[-1], Answer):
            self.actions.pop()
            self.waiting[pull.worker] = pull
            self.parked.setdefault(self.progress.V + 1, []).append(pull)
            self.actions.append(Park(pull, "a norm", (), 0))


class TakesWhatComesMeanwhile(Unchecked):
    """A gradient that comes while a norm is awaited goes into the mean."""

    def counts(self, handle: Handle, good: bool, significance: float | None = None) -> bool:
        measuring, self.measuring = self.measuring, False
        try:
            return super().counts(handle, good, significance)
        finally:
            self.measuring = measuring


class StepsAtOnce(Unchecked):
    """Does not wait for the others' parts."""

    def measure(self) -> Measure:
        measure = super().measure()
        self.measuring = False
        self.finish(1.0)
        return measure


class SaysNothingAgain(Unchecked):
    """A new life does not speak to the reducer."""

    def reports_to_repeat(self) -> list[Action]:
        return []


class WaitsForEverybodysNumber(NormReducer):
    """Does not accept that a shard has none."""

    def on_slice_norm_arrived(self, event: SliceNormArrived) -> None:
        if event.norm.squared is not None:
            super().on_slice_norm_arrived(event)


class ForgetsAtOnce(NormReducer):
    """Keeps no part of an iteration that all have spoken of, so that who asks again is told less."""

    def settle(self) -> None:
        told = {self.asking[shard] for shard in self.asking}
        super().settle()
        for iteration in told - set(self.asking.values()):
            self.squared.pop(iteration, None)

    def check(self) -> None:
        """The judge is to find it."""


class TellsTheFirst(NormReducer):
    """Tells who asks what is there by then."""

    def settle(self) -> None:
        said, self.said = self.said, [10**9 if shard in self.asking else at for shard, at in enumerate(self.said)]
        self.said = [max(self.said)] * len(said)
        super().settle()
        self.said = said

    def check(self) -> None:
        """The judge is to find it."""


def rules_broken(shard: type[Shard], policy: CentralPolicy, runs: int = 300) -> set[str]:
    def make(role: Role, rank: int, members: Members, seed: int) -> Machine:
        return shard(policy, rank, members) if role == "server" else policy.machine(role, rank, members, seed)

    found = set()
    for seed in range(runs):
        try:
            play_one(policy, seed, make)
        except PolicyBroken as error:
            found.add(error.rule)
            break
    return found


@pytest.mark.parametrize(
    ("shard", "rules"),
    [
        (DoesNotSayThatItHasNone, {"hang", "handles"}),
        (HoldsUpThoseWhoJoin, {"hang", "parked", "handles"}),
        (TakesWhatComesMeanwhile, {"norm", "enough", "handles"}),
        (StepsAtOnce, {"norm", "mean"}),
        (SaysNothingAgain, {"hang", "handles"}),
    ],
)
def test_a_shard_that_breaks_a_rule_is_caught(shard: type[Shard], rules: set[str]) -> None:
    found = rules_broken(shard, BSP())
    assert found
    assert found <= rules


@pytest.mark.parametrize(
    ("reducer", "rules"),
    [
        (WaitsForEverybodysNumber, {"hang", "handles"}),
        (ForgetsAtOnce, {"norm", "machine"}),
        (TellsTheFirst, {"norm", "machine"}),
    ],
)
def test_a_reducer_that_breaks_a_rule_is_caught(
    reducer: type[NormReducer], rules: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "NormReducer", reducer)
    found = rules_broken(Shard, BSP())
    assert found
    assert found <= rules


# By hand.


def shard_of(policy: CentralPolicy, workers: int = 2) -> Shard:
    shard = policy.machine("server", 0, Members(workers, 2), 0)
    assert isinstance(shard, Shard)
    shard.clips_mean = shard.checks = True
    return shard


def begin(shard: Shard, workers: int, number: int = 1) -> None:
    shard.handle(ViewChanged(0.0, View(number, tuple((rank, 0) for rank in range(workers)))))


def push(shard: Shard, worker: int, iteration: int) -> list[Action]:
    return shard.handle(PushArrived(0.0, Push(Handle(worker, 0, iteration, shard.version, 8))))


def test_while_a_norm_is_awaited_v_has_not_risen_and_who_joins_is_answered() -> None:
    shard = shard_of(BSP())
    begin(shard, 2)
    assert push(shard, 0, 0) == []
    (measure,) = push(shard, 1, 0)
    assert isinstance(measure, Measure)
    assert [handle.source for handle in measure.handles] == [0, 1]
    assert shard.progress.V == 0
    (parked,) = shard.handle(PullArrived(1.0, Pull(0, 0, 1)))
    assert isinstance(parked, Park)
    assert parked.reason == "the norm of iteration 0 is not known yet"
    begin(shard, 3, number=2)
    (answered,) = shard.handle(PullArrived(1.0, Pull(2, 0, 0)))
    assert isinstance(answered, Answer)
    assert answered.parameters.iteration == 0, "another shard may wait for its iteration 0"
    (dropped,) = push(shard, 2, 0)
    assert isinstance(dropped, Drop)
    assert dropped.reason == "late: iteration 0, the shard is at 0"
    assert shard.handle(NormArrived(2.0, MeanNorm(7, 3.0))) == [], "it was for another life"
    apply, released = shard.handle(NormArrived(2.0, MeanNorm(0, 3.0)))
    assert apply == Apply(measure.handles, 1.0, 1, 3.0)
    assert isinstance(released, Answer)
    assert released.released_by == 1, "by the worker whose push finished it"
    assert shard.handle(NormArrived(2.0, MeanNorm(0, 3.0))) == [], "told twice"


def test_a_shard_that_starts_later_says_so() -> None:
    shard = shard_of(BSP())
    said = [Send(Node("reducer", 0), SliceNorm(0, 9, None))]
    assert shard.handle(Restored(0.0, 10, 10)) == said
    assert shard.reports_to_repeat() == said


def test_what_is_awaited_is_in_a_snapshot_and_asked_again() -> None:
    shard, fresh = shard_of(Backup(extra=1), 3), shard_of(Backup(extra=1), 3)
    begin(shard, 3)
    push(shard, 2, 0)
    (measure,) = push(shard, 1, 0)
    restore_snapshot(fresh, take_snapshot(shard))
    assert fresh.reports_to_repeat() == [measure]
    norm = NormArrived(1.0, MeanNorm(0, 2.0))
    assert fresh.handle(norm) == shard.handle(norm) != []


def told(actions: list[Action]) -> list[tuple[int, int, float]]:
    return [(a.to.rank, a.message.iteration, a.message.norm) for a in actions]  # type: ignore[union-attr]


def test_the_reducer_waits_for_all_and_keeps_what_may_be_asked_again() -> None:
    reducer = NormReducer(3)
    reducer.checks = True

    def say(shard: int, iteration: int, squared: float | None) -> list[tuple[int, int, float]]:
        return told(reducer.handle(SliceNormArrived(0.0, SliceNorm(shard, iteration, squared))))

    assert say(0, 4, 9.0) == say(1, 4, 16.0) == []
    assert say(2, 4, None) == [(0, 4, 5.0), (1, 4, 5.0)]
    assert say(1, 4, 16.0) == [(1, 4, 5.0)], "a new life of shard 1 asks again"
    assert say(0, 5, 9.0) == say(2, 5, 16.0) == []
    assert say(1, 3, 4.0) == [(1, 3, 2.0)], "from a checkpoint: the others are past it"
    assert say(1, 6, None) == [(0, 5, 5.0), (2, 5, 5.0)]
    changed = ServersChanged(0.0, 0.0, (8, 8), (6, 6, 6), View(2, ()), 6, ())
    assert reducer.handle(changed) == []
    assert say(2, 6, 1.0) == [], "it was removed"
    assert say(0, 6, 4.0) == [(0, 6, 2.0)], "shard 1 has said that it has none"
    assert reducer.squared.keys() == {6}
