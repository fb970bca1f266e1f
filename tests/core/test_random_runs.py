"""Random runs of every policy under the judge of `paceline.testing`, and proof that the judge bites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from paceline.core.actions import Answer, Apply, Drop, Park, Send
from paceline.core.events import GradientReady, PullArrived, PullRepeated, PushArrived, PushRejected, ViewChanged
from paceline.core.machine import Machine
from paceline.core.messages import Members, Pull, Role
from paceline.core.policy import CentralPolicy
from paceline.core.shard import Shard
from paceline.core.trace import replay
from paceline.core.worker import Worker
from paceline.policies import ASP, BSP, SSP, Backup, parse
from paceline.testing import MachineFactory, PolicyBroken, Story, play

from . import broken
from .drive import seeds

POLICIES: list[CentralPolicy] = [
    BSP(),
    ASP(),
    *(SSP(staleness=s) for s in range(5)),
    *(Backup(extra=b) for b in range(3)),
]

MORE = [
    "ssp:staleness=2,lazy=true",
    "dssp:low=1,high=4",
    "dssp:low=0,high=3,lazy=true",
    "pssp:staleness=1,c=0.3",
    "pssp:staleness=1,c=1",
    "pssp:staleness=2,alpha=0.8",
    "pssp:staleness=1,significance=true,lazy=true",
    "pssp:staleness=0,c=0.5,apart=true",
    "deadline",
    "deadline:quantile=0.1,factor=1,least=0.3",
    "waiting:delay_s=0.5",
    "waiting:delay_s=2,base=backup(extra=1)",
    "asp:staleness_weighted=true",
    "asp:scale=none",
    "ssp:staleness=2,scale=none,staleness_weighted=true",
    "ssp:staleness=2+backup:extra=1",
    "ssp:staleness=1+backup:extra=1+bsp",
    "deadline+asp+pssp:staleness=1",
    "bsp@0,ssp:staleness=2@4",
    "asp@0,bsp@4",
    "asp@0,ssp:staleness=1@3,backup:extra=1@6,asp@8",
    "ssp:staleness=3@0,bsp@2,asp@5,bsp@7",
    "backup:extra=2@0,asp@3,deadline@6",
    "ssp:staleness=1+backup:extra=1@0,bsp+asp@4",
    "scheduled",
    "scheduled:base=asp",
    "scheduled:base=ssp(staleness=2)",
    "scheduled:base=ssp(staleness=1,lazy=true)",
    "scheduled:base=backup(extra=1)",
    "scheduled:base=deadline(quantile=0.1,factor=1,least=0.3)",
    "elastic:lookahead=3",
    "elastic:lookahead=1,predict=mean",
    "elastic:lookahead=15,predict=median,recent=3,staleness_weighted=true",
    "specsync",
    "specsync:abort_time=0.5,abort_rate=0.2",
    "specsync:base=ssp(staleness=1),abort_time=1,abort_rate=0",
    "specsync:base=pssp(staleness=1,c=0.3),abort_time=1,abort_rate=0",
]
"""The rest of the catalogue, and several policies in one run: another on each shard, another after a while."""


def play_one(policy: CentralPolicy, seed: int, servers: int = 3, faults: bool = True) -> Story:
    """Sizes vary with the seed: 3 to 5 workers, 6 to 12 iterations."""
    workers, iterations = 3 + seed % 3, 6 + 2 * (seed % 4)
    return play(policy, workers=workers, servers=servers, iterations=iterations, seed=seed, faults=faults)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
class TestEveryPolicy:
    @seeds(0, 40)
    def test_keeps_its_rules_on_three_shards_under_faults(self, policy: CentralPolicy, seeds: range) -> None:
        for seed in seeds:
            play_one(policy, seed)

    @pytest.mark.parametrize("servers", [1, 2, 4])
    @seeds(1000, 10)
    def test_keeps_its_rules_on_other_numbers_of_shards(
        self, policy: CentralPolicy, servers: int, seeds: range
    ) -> None:
        for seed in seeds:
            play_one(policy, seed, servers)

    def test_keeps_its_rules_with_two_workers(self, policy: CentralPolicy) -> None:
        """The smallest run in which anybody waits. (Backup needs more workers than backups.)"""
        for seed in range(2000, 2010):
            play(policy, workers=max(2, getattr(policy, "extra", 0) + 1), iterations=10, seed=seed)

    def test_without_faults_every_worker_does_every_iteration(self, policy: CentralPolicy) -> None:
        for seed in range(3000, 3005):
            story = play_one(policy, seed, faults=False)
            workers = story.trace.header.members.workers
            iterations = 6 + 2 * (seed % 4)
            if not isinstance(policy, Backup):
                assert story.counts["Compute"] == workers * (iterations + 1)
                assert story.counts["Drop"] == 0
            assert story.counts["kills"] == 0

    def test_equal_seeds_give_equal_runs(self, policy: CentralPolicy) -> None:
        assert play_one(policy, 7).trace.to_bytes() == play_one(policy, 7).trace.to_bytes()
        assert play_one(policy, 7).trace.to_bytes() != play_one(policy, 10).trace.to_bytes()

    def test_a_run_can_be_played_again_from_its_trace(self, policy: CentralPolicy) -> None:
        for seed in range(4000, 4003):
            trace = play_one(policy, seed).trace
            remade = replay(trace, lambda node, header: policy.machine(*node, header.members, header.seed))
            assert remade == []


@pytest.mark.parametrize("text", MORE)
class TestMorePolicies:
    @seeds(0, 24)
    def test_keeps_its_rules_under_faults(self, text: str, seeds: range) -> None:
        policy = parse(text)
        assert isinstance(policy, CentralPolicy)
        for seed in seeds:
            play_one(policy, seed, servers=4 if seed % 6 == 5 else 3)

    def test_a_run_can_be_played_again_from_its_trace(self, text: str) -> None:
        trace = play_one(parse(text), 4000).trace  # type: ignore[arg-type]
        assert parse(trace.header.policy) == parse(text)
        assert trace.to_bytes() == play_one(parse(text), 4000).trace.to_bytes()  # type: ignore[arg-type]
        remade = replay(trace, lambda node, header: parse(header.policy).machine(*node, header.members, header.seed))
        assert remade == []


WEIGHTED = ["bsp", "asp", "ssp:staleness=2", "backup:extra=1", "deadline", "asp:staleness_weighted=true", "asp@0,bsp@4"]


@pytest.mark.parametrize("text", WEIGHTED)
def test_steps_are_weighted_by_the_samples_behind_them(text: str) -> None:
    policy = parse(text)
    assert isinstance(policy, CentralPolicy)
    for seed in range(25):
        story = play(policy, workers=4, iterations=8, seed=seed, weighted=True)
        assert replay(story.trace, lambda node, header: policy.machine(*node, header.members, header.seed)) == []
    story = play(policy, workers=3, iterations=8, seed=1, weighted=True)
    handles = [
        h for record in story.trace for action in record.actions if isinstance(action, Apply) for h in action.handles
    ]
    assert {handle.weight for handle in handles} == {0.5, 8.0, 32.0}


@pytest.mark.parametrize("substitute", [broken.CountsWorkers, broken.ForgetsNobodysWeight])
def test_a_shard_that_weighs_wrongly_is_caught(substitute: type[Shard]) -> None:
    def make(role: Role, rank: int, members: Members, seed: int) -> Machine:
        policy = ASP()
        return (
            substitute(policy, rank, members, seed) if role == "server" else policy.machine(role, rank, members, seed)
        )

    def play_many() -> None:
        for seed in range(60):
            play(ASP(), workers=4, iterations=8, seed=seed, machine_factory=make, weighted=True)

    with pytest.raises(PolicyBroken) as caught:
        play_many()
    assert caught.value.rule == "weight"


def test_equal_weights_change_nothing_but_themselves() -> None:
    """Steps on gradients of 32 samples each are those on gradients that say nothing."""

    class Sized(Worker):
        def on_gradient_ready(self, event: GradientReady) -> None:
            super().on_gradient_ready(replace(event, weight=0.1))

    def steps(policy: CentralPolicy, make: MachineFactory) -> list[tuple[float, int, int]]:
        trace = play(policy, workers=3, iterations=8, seed=5, machine_factory=make).trace
        actions = [action for record in trace for action in record.actions]
        return [(each.weight, each.version, len(each.handles)) for each in actions if isinstance(each, Apply)]

    for policy in (BSP(), ASP(), Backup(extra=1)):

        def make(role: Role, rank: int, members: Members, seed: int, policy: CentralPolicy = policy) -> Machine:
            return Sized(rank, members) if role == "worker" else policy.machine(role, rank, members, seed)

        assert steps(policy, make) == steps(policy, policy.machine)


@pytest.mark.parametrize("extra", range(4))
def test_without_faults_every_step_under_backup_is_on_n_minus_b_gradients(extra: int) -> None:
    """Chen et al. 2016, Algorithm 4, to the letter, also when shards disagree and workers skip iterations."""
    skipped = 0
    for seed in range(15):
        story = play(Backup(extra=extra), workers=4, iterations=10, seed=seed, faults=False)
        steps = [action for record in story.trace for action in record.actions if isinstance(action, Apply)]
        assert len(steps) == 10 * story.trace.header.members.servers
        assert {len(step.handles) for step in steps} == {4 - extra}
        skipped += 4 * 11 - story.counts["Compute"]
    assert bool(skipped) == bool(extra)


def test_the_runs_contain_what_they_should() -> None:
    """A harness that stopped killing would pass every test: count what happened in a few hundred runs."""
    seen: Counter[str] = Counter()
    for policy in (BSP(), SSP(staleness=2), Backup(extra=1)):
        for seed in range(60):
            count_troubles(play_one(policy, seed), seen)
    for what, least in {
        "killed": 250,
        "joined": 150,
        "view overtaken by a newer one": 400,
        "pull before the view that names its worker": 100,
        "second pull of one iteration, from the shards behind": 100,
        "worker told to skip ahead": 100,
        "ghost dropped": 40,
        "late gradient dropped": 300,
        "slice rejected": 500,
        "push that came twice": 500,
        "pull that came again while it was parked": 100,
        "parked": 5000,
        "released by a view": 20,
        "answered again by a new life": 100,
    }.items():
        assert seen[what] >= least, f"{what}: {seen[what]} times, expected at least {least}"


def count_troubles(story: Story, seen: Counter[str]) -> None:
    seen["killed"] += story.counts["kills"]
    seen["joined"] += story.counts["joins"] - story.trace.header.members.workers
    newest: Counter[object] = Counter()
    pushed: Counter[object] = Counter()
    asked: dict[tuple[int, int, int], int] = {}
    for record in story.trace:
        event, actions = record.event, record.actions
        seen["slice rejected"] += isinstance(event, PushRejected)
        if isinstance(event, ViewChanged):
            key = (record.node, record.incarnation)
            seen["view overtaken by a newer one"] += event.view.number < newest[key]
            newest[key] = max(newest[key], event.view.number)
            seen["released by a view"] += any(isinstance(action, Answer) and action.reason for action in actions)
        if isinstance(event, PushArrived | PushRejected):
            pushed[record.node, event.push.handle] += 1
            seen["push that came twice"] += pushed[record.node, event.push.handle] == 2
        seen["answered again by a new life"] += isinstance(event, PullRepeated) and len(actions) > 0
        if isinstance(event, PullArrived | PullRepeated):
            life = (record.node.rank, event.pull.worker, event.pull.incarnation)
            again = asked.get(life) == event.pull.iteration
            asked[life] = event.pull.iteration
            answered = any(isinstance(action, Answer | Park) for action in actions)
            seen["pull that came again while it was parked"] += again
            seen["pull before the view that names its worker"] += not answered and not again
        for action in actions:
            seen["parked"] += isinstance(action, Park)
            if isinstance(action, Drop):
                seen["ghost dropped"] += "left" in action.reason
                seen["late gradient dropped"] += "late" in action.reason
            if isinstance(action, Answer):
                answer = action.parameters
                wanted = asked[record.node.rank, answer.worker, answer.incarnation]
                seen["worker told to skip ahead"] += answer.iteration > wanted > 0
            if isinstance(action, Send) and isinstance(action.message, Pull):
                again = len(actions) < story.trace.header.members.servers and action.message.iteration > 0
                seen["second pull of one iteration, from the shards behind"] += again


def with_machine(policy: CentralPolicy, substitute: type[Shard] | type[Worker]) -> MachineFactory:
    def make(role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "server" and issubclass(substitute, Shard):
            return substitute(policy, rank, members)
        if role == "worker" and issubclass(substitute, Worker):
            return substitute(rank, members)
        return policy.machine(role, rank, members, seed)

    return make


def rules_broken(
    policy: CentralPolicy, make: MachineFactory | None = None, runs: int = 240, faults: bool = True
) -> Iterator[str]:
    """The rule that was broken, for each run that broke one in a small batch. Stop when you have seen enough."""
    for seed in range(runs):
        try:
            play(policy, workers=2 + seed % 3, iterations=8, seed=seed, faults=faults, machine_factory=make)
        except PolicyBroken as error:
            yield error.rule


Substitute = type[Shard] | type[Worker]

SHARDS_DISAGREE: list[tuple[Substitute, CentralPolicy, str]] = [
    (broken.TakesTheSmallest, BSP(), "handles"),
    (broken.TakesTheSmallest, SSP(staleness=1), "handles"),
    (broken.TakesTheSmallest, Backup(extra=1), "answer"),
    (broken.TakesTheFirst, BSP(), "handles"),
    (broken.TakesTheFirst, ASP(), "handles"),
    (broken.TakesTheFirst, Backup(extra=1), "answer"),
    (broken.NeverPullsAgain, BSP(), "bound"),
    (broken.NeverPullsAgain, SSP(staleness=1), "bound"),
    (broken.NeverPullsAgain, Backup(extra=1), "mean"),
    (broken.NoPromiseOnPull, BSP(), "parked"),
    (broken.NoPromiseOnPull, SSP(staleness=1), "parked"),
    (broken.NoPromiseOnPull, Backup(extra=1), "parked"),
    (broken.NoPromiseOnPushNorAnswer, Backup(extra=1), "mean"),
    (broken.NoPromiseAtAll, BSP(), "parked"),
    (broken.NoPromiseAtAll, ASP(), "handles"),
    (broken.NoPromiseAtAll, Backup(extra=1), "parked"),
    (broken.SkippedAreExpected, BSP(), "parked"),
    (broken.SkippedAreExpected, SSP(staleness=1), "parked"),
    (broken.SkippedAreExpected, Backup(extra=1), "parked"),
    (broken.SkippedCountAsPushed, Backup(extra=1), "mean"),
    (broken.ViewsInOrderOfArrival, BSP(), "parked"),
    (broken.ViewsInOrderOfArrival, ASP(), "late"),
    (broken.ViewsInOrderOfArrival, SSP(staleness=1), "bound"),
    (broken.ViewsInOrderOfArrival, Backup(extra=1), "late"),
    (broken.NoEarlyPulls, BSP(), "parked"),
    (broken.NoEarlyPulls, ASP(), "parked"),
    (broken.LastEarlyPullWins, ASP(), "parked"),
    (broken.LostStayCounted, BSP(), "mean"),
    (broken.LostStayCounted, SSP(staleness=1), "bound"),
    (broken.LostStayCounted, Backup(extra=0), "mean"),
    (broken.LostStayCountedChecked, BSP(), "machine"),
    (broken.LostAreWaitedFor, BSP(), "parked"),
    (broken.LostAreWaitedFor, SSP(staleness=1), "parked"),
    (broken.CountsAgainstN, BSP(), "parked"),
    (broken.CountsAgainstN, SSP(staleness=1), "parked"),
]

OTHER_RULES: list[tuple[Substitute, CentralPolicy, str]] = [
    (broken.FinishedGiveUpTheirShare, ASP(), "weight"),
    (broken.LostKeepTheirShare, SSP(staleness=1), "weight"),
    (broken.AppliesDuplicates, BSP(), "handles"),
    (broken.AppliesDuplicates, ASP(), "handles"),
    (broken.DropsDuplicatesOfTheDead, BSP(), "handles"),
    (broken.DropsDuplicatesOfTheDead, ASP(), "handles"),
    (broken.AppliesGhosts, BSP(), "handles"),
    (broken.AppliesGhosts, SSP(staleness=2), "handles"),
    (broken.AppliesRejected, ASP(), "handles"),
    (broken.AppliesLate, Backup(extra=1), "mean"),
    (broken.LosesGradients, BSP(), "handles"),
    (broken.MixesIterations, BSP(), "mean"),
    (broken.MixesIterations, Backup(extra=1), "mean"),
    (broken.DropsTheThird, BSP(), "late"),
    (broken.DropsTheThird, Backup(extra=1), "late"),
    (broken.AnswersTheDead, BSP(), "answer"),
    (broken.NeverAnswersAgain, ASP(), "parked"),
    (broken.NeverAnswersAgain, BSP(), "parked"),
    (broken.AnswersAllWhoAskAgain, SSP(staleness=1), "bound"),
    (broken.ForgetsWhatItDropped, Backup(extra=1), "answer"),
    (broken.LiesAboutVersions, SSP(staleness=1), "answer"),
    (broken.AnswersTwice, ASP(), "answer"),
    (broken.JumpsVersions, ASP(), "handles"),
    (broken.ParksInSilence, BSP(), "parked"),
    (broken.ParksTwice, BSP(), "parked"),
    (broken.ParksTwice, SSP(staleness=1), "parked"),
    (broken.OverlooksAnAnswer, ASP(), "hang"),
    (broken.OverlooksAnAnswer, BSP(), "hang"),
    (broken.ComputesAgain, ASP(), "answer"),
    (broken.Scribbles, SSP(staleness=2), "machine"),
]

WRONG_CONDITIONS: list[tuple[CentralPolicy, str]] = [
    (broken.SSPOffByOne(staleness=0), "bound"),
    (broken.SSPOffByOne(staleness=2), "bound"),
    (broken.SSPNeverFreed(staleness=1), "parked"),
    (broken.BSPWithoutTheLast(), "bound"),
    (broken.BSPWithoutTheLast(), "in step"),
    (broken.BackupInStep(extra=1), "in step"),
    (broken.BackupOneTooFew(extra=0), "enough"),
    (broken.BackupWaitsForAll(extra=1), "enough"),
    (broken.DSSPWithoutALimit(low=0, high=1), "bound"),
    (broken.LazierThanLazy(staleness=1), "parked"),
    (broken.DecidesAnew(), "mean"),
]


def label(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("substitute", "policy", "rule"), SHARDS_DISAGREE + OTHER_RULES, ids=label)
def test_a_broken_machine_is_caught(substitute: Substitute, policy: CentralPolicy, rule: str) -> None:
    assert rule in rules_broken(policy, with_machine(policy, substitute))


@pytest.mark.parametrize(("policy", "rule"), WRONG_CONDITIONS, ids=label)
def test_a_policy_with_a_wrong_condition_is_caught(policy: CentralPolicy, rule: str) -> None:
    assert rule in rules_broken(policy, runs=20)


@pytest.mark.parametrize("substitute", [broken.NoPromiseOnPush, broken.NoPromiseOnAnswer], ids=label)
@pytest.mark.parametrize("policy", [BSP(), SSP(staleness=1), Backup(extra=1)], ids=str)
def test_a_promise_made_twice_may_be_missed_once(substitute: type[Shard], policy: CentralPolicy) -> None:
    """An answer for c and the push of c promise the same: a worker computes c once all shards answered c.

    So either may be left out, on links that keep their order; not both (`NoPromiseOnPushNorAnswer` above),
    and the promise of a *pull* never (`NoPromiseOnPull`). This pins down which rule carries the weight.
    """
    assert list(rules_broken(policy, with_machine(policy, substitute), runs=60)) == []


@pytest.mark.parametrize("policy", [BSP(), ASP(), SSP(staleness=1)], ids=str)
def test_who_waits_for_all_may_count_the_skipped_as_pushed(policy: CentralPolicy) -> None:
    """ "Not expected" and "counted as pushed" differ only for a policy that does without some (decision 2) ..."""
    assert list(rules_broken(policy, with_machine(policy, broken.SkippedCountAsPushed), runs=60)) == []


def test_who_does_without_some_may_not() -> None:
    """... and there it takes no fault for an iteration to be finished on too few gradients."""
    policy = Backup(extra=1)
    assert "mean" in rules_broken(policy, with_machine(policy, broken.SkippedCountAsPushed), faults=False)


class TestLatePulls:
    """Copies of pulls that come after the pull was answered, at any moment.

    Each must be ignored. An answer to it would promise, under Backup, that the worker skips what it is computing,
    so its push would be taken for a copy and never be consumed; and a live shard writes its answer into the segment
    that holds the worker's gradient, or into which the worker is writing one.
    """

    @pytest.mark.parametrize("policy", [BSP(), ASP(), SSP(staleness=1), Backup(extra=1)], ids=str)
    def test_a_shard_that_answers_them_is_caught(self, policy: CentralPolicy) -> None:
        assert "answer" in rules_broken(policy, with_machine(policy, broken.AnswersEveryCopy))


def test_the_error_tells_the_story() -> None:
    policy = broken.SSPOffByOne(staleness=1)
    error = first_error(policy)
    first, *steps = str(error).splitlines()
    assert first.startswith("bound: worker ")
    assert f"({policy}, Members(workers=3, servers=3), seed {error.story.trace.header.seed})" in first
    assert 25 <= len(steps) <= 200
    assert "answer worker" in steps[-1]


def first_error(policy: CentralPolicy) -> PolicyBroken:
    for seed in range(20):
        try:
            play(policy, workers=3, iterations=6, seed=seed, faults=False)
        except PolicyBroken as error:
            return error
    raise AssertionError("no run failed")
