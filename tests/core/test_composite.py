"""Several policies in one run: text forms, what a switch does to what is held, parked and under way."""

from __future__ import annotations

import pytest

from paceline.core.actions import Answer, Apply, Drop
from paceline.core.events import PullArrived, PushArrived, Restored, ViewChanged
from paceline.core.messages import Handle, Members, Pull, Push, View
from paceline.core.policy import CentralPolicy
from paceline.core.pull_gate import coin
from paceline.core.shard import Shard
from paceline.errors import ConfigError
from paceline.policies import ASP, BSP, PSSP, SSP, Backup, Mix, Switch, parse
from paceline.testing import PolicyBroken, play

from .drive import ShardAlone, answered, applied, dropped, parked, sources


def central(text: str) -> CentralPolicy:
    policy = parse(text)
    assert isinstance(policy, CentralPolicy)
    return policy


class TestTextForm:
    @pytest.mark.parametrize(
        ("text", "policy"),
        [
            ("bsp@0,ssp:staleness=3@100", Switch(((BSP(), 0), (SSP(staleness=3), 100)))),
            ("ssp:staleness=3+backup:extra=1", Mix((SSP(staleness=3), Backup(extra=1)))),
            (
                "bsp+asp@0,pssp:staleness=1,c=0.5@7",
                Switch(((Mix((BSP(), ASP())), 0), (PSSP(staleness=1, c=0.5), 7))),
            ),
        ],
    )
    def test_there_and_back(self, text: str, policy: CentralPolicy) -> None:
        assert parse(text) == policy
        assert str(policy) == text

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("bsp@0,ssp", "'bsp@0,ssp': each policy needs its iteration, as bsp@0,ssp:staleness=3@100"),
            ("bsp@0,", "'bsp@0,': each policy needs its iteration, as bsp@0,ssp:staleness=3@100"),
            ("bsp@1", "bsp@1: the first policy begins @0, each other at a later iteration"),
            ("bsp@0,asp@0", "bsp@0,asp@0: the first policy begins @0, each other at a later iteration"),
            ("waiting+bsp", "waiting:delay_s=0.02,base=asp cannot be one of several policies: it says what workers do, "
                            "not only shards"),
            ("bsp@0,spp@3", "unknown policy 'spp', did you mean 'ssp'?"),
        ],
    )  # fmt: skip
    def test_errors_are_one_line(self, text: str, line: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse(text)
        assert str(caught.value).startswith(line)
        assert "\n" not in str(caught.value)

    def test_more_policies_than_shards(self) -> None:
        with pytest.raises(ConfigError, match="names 2 policies for 1 servers"):
            parse("bsp+asp").validate(Members(4, 1))
        with pytest.raises(ConfigError, match="backup:extra=4 needs more than 4 workers"):
            parse("bsp@0,backup:extra=4@9").validate(Members(4, 1))

    def test_a_mix_repeats_when_there_are_more_shards(self) -> None:
        mix = central("bsp+asp")
        assert [str(mix.in_force(rank, 0)) for rank in range(5)] == ["bsp", "asp", "bsp", "asp", "bsp"]


class TestSwitch:
    def test_from_asp_to_bsp_a_worker_far_ahead_does_not_wait_for_what_lies_between(self) -> None:
        shard = ShardAlone(central("asp@0,bsp@2"), workers=2)
        for iteration in range(10):
            shard.iterate(0, iteration)
        shard.iterate(1, 0)
        shard.iterate(1, 1)
        assert (str(shard.shard.policy), shard.V) == ("bsp", 10), "everybody stands where the fastest does"
        assert parked(shard.iterate(0, 10))
        assert answered(shard.iterate(1, 10)) == [(0, 11), (1, 11)]

    def test_the_slow_adopt_the_iteration_and_what_they_are_computing_counts(self) -> None:
        shard = ShardAlone(central("asp@0,bsp@1"), workers=3)
        for iteration in range(5):
            shard.iterate(0, iteration)
        shard.iterate(1, 0)
        shard.iterate(2, 0)
        assert shard.V == 5
        late = shard.push(1, 1)
        assert [(sources(step), step.weight) for step in applied(late)] == [([(1, 1)], 1 / 3)]
        assert answered(shard.pull(1, 2)) == [(1, 5)]
        assert not dropped(late)

    def test_only_that_one(self) -> None:
        """Under Backup, what comes late afterwards is dropped as ever."""
        shard = ShardAlone(central("asp@0,backup:extra=1@1"), workers=3)
        for worker in (0, 1, 2):
            shard.iterate(worker, 0)
        for iteration in (1, 2):
            shard.iterate(0, iteration)
            shard.iterate(1, iteration)
        assert shard.V == 3
        assert not applied(shard.push(2, 1)), "worker 2 was not behind when the policy changed"
        behind = ShardAlone(central("asp@0,backup:extra=1@1"), workers=3)
        for worker, iteration in ((2, 0), (0, 0), (0, 1), (0, 2), (1, 0)):
            behind.iterate(worker, iteration)
        assert behind.V == 3
        assert applied(behind.iterate(0, 3) + behind.iterate(1, 3))
        assert behind.V == 4
        assert applied(behind.iterate(2, 1)), "owed, however late"
        behind.iterate(0, 4)
        behind.iterate(1, 4)
        assert dropped(behind.push(2, 4)), "late like anybody"

    def test_what_was_late_before_stays_late(self) -> None:
        """Backup had finished its iteration without it: a change of policy does not bring it back."""
        shard = ShardAlone(central("backup:extra=1@0,asp@2"), workers=3)
        for iteration in range(2):
            shard.iterate(0, iteration)
            shard.iterate(1, iteration)
        assert str(shard.shard.policy) == "asp"
        assert dropped(shard.push(2, 0))

    def test_who_has_pulled_since_owes_nothing(self) -> None:
        """Another shard had sent worker 2 ahead; what it pushes late afterwards is late."""
        shard = ShardAlone(central("asp@0,backup:extra=1@1"), workers=3)
        for worker, iteration in ((2, 0), (0, 0), (0, 1), (0, 2), (1, 0)):
            shard.iterate(worker, iteration)
        assert answered(shard.pull(2, 3)) == [(2, 3)]
        shard.iterate(0, 3)
        shard.iterate(1, 3)
        assert dropped(shard.push(2, 3))

    def test_who_was_parked_owes_nothing(self) -> None:
        """What it computes after its release, it computes under the new policy: late is late."""
        seed = next(s for s in range(99) if coin(s, 0, 0) < 0.5 <= min(coin(s, 1, 0), coin(s, 1, 1)))
        policy = central("pssp:staleness=0,c=0.5,lazy=true@0,backup:extra=1@1")
        shard = ShardAlone(policy, workers=3, seed=seed)
        assert parked(shard.iterate(0, 0))
        for worker, iteration in ((1, 0), (1, 1)):
            assert not parked(shard.iterate(worker, iteration)), "they won the toss"
        assert (0, 2) in answered(shard.iterate(2, 0)), "released by the switch"
        shard.iterate(1, 2)
        shard.iterate(2, 2)
        assert shard.V == 3
        assert dropped(shard.push(0, 2))

    def test_whose_own_pull_brings_the_switch_owes_nothing(self) -> None:
        shard = ShardAlone(central("asp@0,backup:extra=1@1"), workers=3)
        for worker, iteration in ((0, 0), (0, 1), (0, 2), (1, 0)):
            shard.iterate(worker, iteration)
        assert answered(shard.pull(2, 1)) == [(2, 3)], "another shard had sent it past iteration 0"
        shard.iterate(0, 3)
        shard.iterate(1, 3)
        assert dropped(shard.push(2, 3))

    def test_held_gradients_are_applied_and_a_mean_divides_by_the_members(self) -> None:
        """A restored shard hears of iterations beyond the switch while it is before it."""
        shard = Shard(central("bsp@0,asp@5"), 0, Members(3, 1))
        shard.checks = True
        shard.handle(Restored(0.0, 4, 9))
        shard.handle(ViewChanged(0.0, View(1, ((0, 0), (1, 0), (2, 0)))))
        shard.handle(PushArrived(0.0, Push(Handle(0, 0, 7, 9, 8))))
        shard.handle(PullArrived(0.0, Pull(0, 0, 8)))
        shard.handle(PullArrived(0.0, Pull(1, 0, 7)))
        actions = shard.handle(PullArrived(0.0, Pull(2, 0, 7)))
        assert [(sources(step), step.weight) for step in applied(actions)] == [([(0, 7)], 1 / 3)]
        assert str(shard.policy) == "asp"
        assert answered(actions) == [(0, 8), (1, 8), (2, 8)]

    def test_parked_pulls_are_settled(self) -> None:
        shard = ShardAlone(central("ssp:staleness=1@0,asp@1"), workers=2)
        shard.iterate(0, 0)
        assert parked(shard.iterate(0, 1))
        (answer,) = [action for action in shard.push(1, 0) if isinstance(action, Answer)]
        assert answer.reason == "asp is in force from iteration 2 on"
        assert answer.parameters.iteration == 2

    def test_a_jump_over_a_phase(self) -> None:
        shard = ShardAlone(central("asp@0,bsp@1,ssp:staleness=1@4"), workers=2)
        for iteration in range(6):
            shard.iterate(0, iteration)
        shard.iterate(1, 0)
        assert (str(shard.shard.policy), shard.V) == ("ssp:staleness=1", 6)

    def test_restored_behind_a_switch_it_is_past_it(self) -> None:
        shard = Shard(central("bsp@0,asp@5"), 0, Members(3, 1))
        shard.handle(Restored(0.0, 6, 9))
        assert str(shard.policy) == "asp"


class TestRandomRuns:
    @pytest.mark.parametrize(
        "text", ["asp@0,bsp@4", "ssp:staleness=3@0,bsp@2,asp@5,ssp:staleness=1@7", "bsp+asp@0,asp+bsp@4"]
    )
    def test_without_faults_no_gradient_is_dropped(self, text: str) -> None:
        """Of policies that drop none themselves: every gradient that was computed is applied, on every shard."""
        for seed in range(20):
            story = play(central(text), workers=4, iterations=10, seed=seed, faults=False)
            assert story.counts["Drop"] == 0
            gradients = story.counts["Compute"] - 4
            used = [
                (record.node, handle)
                for record in story.trace
                for action in record.actions
                if isinstance(action, Apply)
                for handle in action.handles
            ]
            assert len(used) == len(set(used)) == gradients * 3

    def test_the_switches_move_somebody(self) -> None:
        """A harness in which nobody is ahead at a switch would prove nothing."""
        skipped = sum(
            44 - play(central("asp@0,bsp@4"), workers=4, iterations=10, seed=seed, faults=False).counts["Compute"]
            for seed in range(20)
        )
        assert skipped > 50


class ForgetsWhatIsOwed(Shard):
    """A switch drops the gradients that it made late."""

    def switch(self, policy: CentralPolicy) -> None:
        super().switch(policy)
        self.owing.clear()


class AppliesAllThatIsLate(Shard):
    """Whoever was behind at a switch may be late for ever."""

    class Unforgiving(set[int]):
        def discard(self, worker: int) -> None:
            """Never."""

    def switch(self, policy: CentralPolicy) -> None:
        super().switch(policy)
        self.owing = self.Unforgiving(self.owing)


class TheParkedOweToo(Shard):
    """Whoever was parked at a switch may be late once, with a gradient computed under the new policy."""

    def switch(self, policy: CentralPolicy) -> None:
        parked = {worker for worker in self.waiting if self.progress.next[worker] < max(self.progress.next.values())}
        super().switch(policy)
        self.owing |= parked


class ForgetsTheParked(Shard):
    def switch(self, policy: CentralPolicy) -> None:
        self.waiting.clear()
        super().switch(policy)


class StaysBehind(Shard):
    """V does not jump: gradients of one iteration are in part applied, in part held."""

    def switch(self, policy: CentralPolicy) -> None:
        self.adopt(policy)


class NeverSwitches(Shard):
    def switch(self, policy: CentralPolicy) -> None:
        self.policy = policy


@pytest.mark.parametrize(
    ("substitute", "text", "rule"),
    [
        (ForgetsWhatIsOwed, "asp@0,bsp@4", "late"),
        (AppliesAllThatIsLate, "asp@0,backup:extra=1@2", "mean"),
        (TheParkedOweToo, "pssp:staleness=0,c=0.5,lazy=true@0,backup:extra=1@2", "mean"),
        (ForgetsTheParked, "ssp:staleness=1@0,asp@4", "parked"),
        (StaysBehind, "asp@0,bsp@4", "mean"),
        (NeverSwitches, "asp@0,pssp:staleness=0,c=1@3", "bound"),
    ],
)
def test_a_switch_that_goes_wrong_is_caught(substitute: type[Shard], text: str, rule: str) -> None:
    policy = central(text)
    broken = set()
    for seed in range(120):
        try:
            play(
                policy, workers=2 + seed % 3, iterations=8, seed=seed,
                machine_factory=lambda role, rank, members, seed: (
                    substitute(policy, rank, members, seed)
                    if role == "server"
                    else policy.machine(role, rank, members, seed)
                ),
            )  # fmt: skip
        except PolicyBroken as error:
            broken.add(error.rule)
            if rule in broken:
                break
    assert rule in broken


def test_what_is_dropped_at_a_switch_is_nothing() -> None:
    shard = ShardAlone(central("asp@0,bsp@3"), workers=2)
    actions = []
    for iteration in range(6):
        actions += shard.iterate(0, iteration)
    for iteration in range(4):
        actions += shard.iterate(1, iteration)
    assert not [action for action in actions if isinstance(action, Drop)]
