"""Machines and policies that break one rule each, on purpose: what `paceline.testing` must catch.

The first group breaks, in turn, the rules by which shards that disagree for a moment stay in step (ARCHITECTURE.md,
"Each shard decides alone"). Most of these classes also turn off the machine's own `check()`, so that it is the harness,
from outside, that must notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.core.actions import Answer, Apply, Compute, Drop
from paceline.core.events import ParametersArrived, PullArrived, PullRepeated, PushArrived, ViewChanged
from paceline.core.messages import Handle, Members, Parameters, Pull, View
from paceline.core.policy import CentralPolicy
from paceline.core.progress import Progress
from paceline.core.pull_gate import PullGate
from paceline.core.push_weights import PushWeights
from paceline.core.shard import Shard
from paceline.core.worker import NOT_STARTED, Worker
from paceline.policies import BSP, DSSP, SSP, Backup, Deadline
from paceline.policies.dssp import DSSPGate


class UncheckedShard(Shard):
    def check(self) -> None:
        """Look away."""


class UncheckedWorker(Worker):
    def check(self) -> None:
        """Look away."""


# Rules of "Shards disagree".


class TakesTheSmallest(UncheckedWorker):
    """A worker's iteration is the smallest any shard answered."""

    def agree(self, answered: list[int]) -> int:
        return min(answered)


class TakesTheFirst(UncheckedWorker):
    """A worker's iteration is what shard 0 answered."""

    def agree(self, answered: list[int]) -> int:
        return answered[0]


class NeverPullsAgain(UncheckedWorker):
    """The largest answer, but no second pull from the shards that answered less."""

    def settle(self) -> None:
        if self.incarnation != NOT_STARTED and not self.computing and not self.waiting:
            self.iteration = self.agree(self.answered)
            self.computing = True
            self.actions.append(Compute(self.iteration, 0))


class NoPromiseOnPush(UncheckedShard):
    """A push moves the worker on by one, whatever its iteration."""

    def note_push(self, worker: int, iteration: int) -> None:
        self.progress.push(worker, self.progress.next[worker])


class NoPromiseOnPull(UncheckedShard):
    """A pull says nothing about what the worker will push."""

    def note_promise(self, pull: Pull) -> None:
        """Ignore it."""


class NoPromiseOnAnswer(UncheckedShard):
    """Telling a worker which iteration to compute says nothing about what it will push."""

    def answer(self, pull: Pull, reason: str, released_by: int) -> None:
        promise = self.progress.promise
        self.progress.promise = lambda worker, to: None  # type: ignore[method-assign]
        super().answer(pull, reason, released_by)
        self.progress.promise = promise  # type: ignore[method-assign]


class NoPromiseOnPushNorAnswer(NoPromiseOnPush, NoPromiseOnAnswer):
    """Only pulls promise."""


class NoPromiseAtAll(NoPromiseOnPush, NoPromiseOnPull, NoPromiseOnAnswer):
    """next = next + 1 at each push, and nothing else."""


class SkippedAreExpected(UncheckedShard):
    """A worker that skips an iteration is waited for all the same: promises raise `next` and nothing else."""

    def is_finished(self) -> bool:
        progress = self.progress
        there = progress.passed_V() - len(progress.skipped.get(progress.V, ()))
        return bool(progress.passed_V()) and self.policy.finishes(there, len(progress.next), self.workers)


class SkippedCountAsPushed(UncheckedShard):
    """A worker that skips an iteration counts as if it had pushed it, gradient or not (see decision 2)."""

    def is_finished(self) -> bool:
        passed = self.progress.passed_V()
        return bool(passed) and self.policy.finishes(passed, len(self.progress.next), self.workers)


class ViewsInOrderOfArrival(UncheckedShard):
    """The last view to arrive counts, whatever its number."""

    def is_newer(self, view: View) -> bool:
        return True


class NoEarlyPulls(UncheckedShard):
    """A pull from somebody no view has named yet is thrown away."""

    def on_pull_arrived(self, event: PullArrived) -> None:
        if self.incarnations.get(event.pull.worker) == event.pull.incarnation:
            self.handle_pull(event.pull)


class LastEarlyPullWins(UncheckedShard):
    """Of two pulls of unnamed lives of one rank the later is kept, though it may be a ghost's."""

    def on_pull_arrived(self, event: PullArrived) -> None:
        known = self.incarnations.get(event.pull.worker)
        if known is None or event.pull.incarnation > known:
            self.early[event.pull.worker] = event.pull
        else:
            super().on_pull_arrived(event)


class KeepsTheDead(Progress):
    """What a lost worker had pushed still counts as passed: counting pushes against the members left."""

    def leave(self, worker: int) -> None:
        self._lift(worker, self.next.pop(worker))


class LostStayCounted(UncheckedShard):
    def __init__(self, policy: CentralPolicy, rank: int, members: Members) -> None:
        super().__init__(policy, rank, members)
        self.progress = KeepsTheDead()


class LostStayCountedChecked(Shard):
    """The same, with the machine's own `check()` on."""

    def __init__(self, policy: CentralPolicy, rank: int, members: Members) -> None:
        super().__init__(policy, rank, members)
        self.progress = KeepsTheDead()


class LostAreWaitedFor(UncheckedShard):
    """Whoever was a member once has to push for ever."""

    def on_view_changed(self, event: ViewChanged) -> None:
        members = dict(self.view.members) | dict(event.view.members)
        whole = View(event.view.number, tuple(sorted(members.items())))
        super().on_view_changed(ViewChanged(event.at, whole))


class CountsAgainstN(UncheckedShard):
    """FluentPS to the letter: iteration V is finished when Count[V] == N, N as configured."""

    def is_finished(self) -> bool:
        return self.progress.passed_V() >= self.workers


class FinishedGiveUpTheirShare(UncheckedShard):
    """N is the number of live members, so that the last one steps with the whole learning rate."""

    @property
    def sharing(self) -> int:
        return len(self.incarnations)


class LostKeepTheirShare(UncheckedShard):
    """N is the number configured."""

    @property
    def sharing(self) -> int:
        return self.workers


# Gradients used twice, never, or by mistake.


class AppliesDuplicates(UncheckedShard):
    """A push that comes again is used again."""

    def counts(self, handle: Handle, good: bool, significance: float | None = None) -> bool:
        if self.incarnations.get(handle.source) == handle.incarnation and handle.iteration >= self.progress.V:
            self.note_push(handle.source, handle.iteration)
            return True
        return super().counts(handle, good, significance)


class DropsDuplicatesOfTheDead(UncheckedShard):
    """A push of a life that is over is dropped each time it comes, though it may be held or applied."""

    def counts(self, handle: Handle, good: bool, significance: float | None = None) -> bool:
        if self.incarnations.get(handle.source) != handle.incarnation:
            self.actions.append(Drop(handle, "a ghost"))
            return False
        return super().counts(handle, good, significance)


class AppliesGhosts(UncheckedShard):
    """A push of a worker that has left is applied."""

    def counts(self, handle: Handle, good: bool, significance: float | None = None) -> bool:
        known = self.incarnations.get(handle.source)
        return super().counts(handle, good, significance) if known == handle.incarnation else bool(self.incarnations)


class AppliesRejected(UncheckedShard):
    """A slice that is not finite is applied."""

    def on_push_rejected(self, event: Any) -> None:
        self.on_push_arrived(PushArrived(event.at, event.push))


class AppliesLate(UncheckedShard):
    """A gradient of a finished iteration is applied by itself instead of being dropped."""

    def drop(self, handle: Handle, reason: str) -> None:
        self.apply((handle,), 1.0)


class LosesGradients(UncheckedShard):
    """Of an iteration's gradients the first is forgotten."""

    def apply(self, handles: tuple[Handle, ...], weight: float, norm: float | None = None) -> None:
        super().apply(handles[1:] or handles, weight, norm)


class MixesIterations(UncheckedShard):
    """A step is taken every second iteration, on the gradients of both."""

    kept: tuple[Handle, ...] = ()

    def apply(self, handles: tuple[Handle, ...], weight: float, norm: float | None = None) -> None:
        if self.kept:
            super().apply(self.kept + handles, weight, norm)
            self.kept = ()
        else:
            self.kept = handles


class DropsTheThird(UncheckedShard):
    """Every third good gradient is dropped without a reason."""

    seen = 0

    def counts(self, handle: Handle, good: bool, significance: float | None = None) -> bool:
        good = super().counts(handle, good, significance)
        self.seen += good
        if good and self.seen % 3 == 0:
            self.drop(handle, "bad luck")
            return False
        return good


# Answers.


class AnswersTheDead(UncheckedShard):
    """Parked pulls are answered to lives that are over."""

    def settle(self) -> None:
        for pulls in self.parked.values():
            for pull in list(pulls):
                if self.incarnations.get(pull.worker) != pull.incarnation:
                    pulls.remove(pull)
                    self.answer_the_dead(pull)
        super().settle()

    def answer_the_dead(self, pull: Pull) -> None:
        parameters = Parameters(self.rank, pull.worker, pull.incarnation, pull.iteration, self.version, False)
        self.actions.append(Answer(parameters, "", -1))


class NeverAnswersAgain(UncheckedShard):
    """An answer that was lost with its server is not given again."""

    def on_pull_repeated(self, event: PullRepeated) -> None:
        self.on_pull_arrived(PullArrived(event.at, event.pull))


class AnswersAllWhoAskAgain(UncheckedShard):
    """Who asks a new life of the server is answered, parked or not."""

    def on_pull_repeated(self, event: PullRepeated) -> None:
        if self.incarnations.get(event.pull.worker) == event.pull.incarnation:
            self.answer(event.pull, "", -1)


class ForgetsWhatItDropped(UncheckedShard):
    """The worker is not told that its push was dropped."""

    def drop(self, handle: Handle, reason: str) -> None:
        self.actions.append(Drop(handle, reason))


class LiesAboutVersions(UncheckedShard):
    """Answers name the version before the last step."""

    def answer(self, pull: Pull, reason: str, released_by: int) -> None:
        self.version -= 1
        super().answer(pull, reason, released_by)
        self.version += 1


class AnswersTwice(UncheckedShard):
    """Each answer is sent twice."""

    def answer(self, pull: Pull, reason: str, released_by: int) -> None:
        super().answer(pull, reason, released_by)
        self.actions.append(self.actions[-1])


class JumpsVersions(UncheckedShard):
    """Versions are counted in twos."""

    def apply(self, handles: tuple[Handle, ...], weight: float) -> None:
        self.version += 2
        self.actions.append(Apply(handles, weight, self.version))


class ParksInSilence(UncheckedShard):
    """A pull is parked without a word to anybody."""

    def park(self, pull: Pull, i: int, V: int) -> None:
        super().park(pull, i, V)
        self.actions.pop()


class ParksTwice(UncheckedShard):
    """A pull that comes again while it is parked is parked again."""

    def handle_pull(self, pull: Pull) -> None:
        if self.waiting.get(pull.worker) == pull:
            self.park(pull, pull.iteration - 1, self.progress.V)
        else:
            super().handle_pull(pull)


class AnswersEveryCopy(UncheckedShard):
    """A pull that comes again after it was answered is answered again."""

    def handle_pull(self, pull: Pull) -> None:
        if self.waiting.get(pull.worker) == pull:
            return
        self.mover = pull.worker
        self.note_promise(pull)
        self.settle()
        i, V = pull.iteration - 1, self.progress.V
        if self.policy.may_pull(i, V):
            self.answer(pull, "", -1)
        else:
            self.park(pull, i, V)


class OverlooksAnAnswer(UncheckedWorker):
    """The fifth answer is not heard."""

    heard = 0

    def on_parameters_arrived(self, event: ParametersArrived) -> None:
        self.heard += 1
        if self.heard != 5:
            super().on_parameters_arrived(event)


class ComputesAgain(UncheckedWorker):
    """Each iteration is computed twice."""

    def settle(self) -> None:
        super().settle()
        if self.actions and isinstance(self.actions[-1], Compute):
            self.actions.append(self.actions[-1])


class Scribbles(Shard):
    """Counts a worker as passed that has not: its own `check()` sees it."""

    def answer(self, pull: Pull, reason: str, released_by: int) -> None:
        super().answer(pull, reason, released_by)
        assert isinstance(self.actions[-1], Answer)
        self.progress.passed[self.progress.V] = self.progress.passed_V() + 1


# Policies with a wrong condition.


@dataclass(frozen=True)
class SSPOffByOne(SSP):
    """i <= V + s, as Figure 3 of Yao et al. 2019 is drawn, instead of i < V + s."""

    def may_pull(self, i: int, V: int) -> bool:
        return i <= V + self.staleness

    def freed_at(self, i: int, V: int) -> int:
        return i - self.staleness


@dataclass(frozen=True)
class SSPNeverFreed(SSP):
    """A parked pull waits for a V that is two too far."""

    def freed_at(self, i: int, V: int) -> int:
        return i + 3


@dataclass(frozen=True)
class BSPWithoutTheLast(BSP):
    """An iteration is finished when all but one have pushed it."""

    in_step: ClassVar[bool] = True

    def finishes(self, there: int, expected: int, workers: int) -> bool:
        return there >= max(1, expected - 1)


@dataclass(frozen=True)
class BackupOneTooFew(Backup):
    """An iteration is finished one gradient before it should be."""

    def finishes(self, there: int, expected: int, workers: int) -> bool:
        return there >= min(max(1, workers - self.extra - 1), expected)


@dataclass(frozen=True)
class BackupWaitsForAll(Backup):
    """Nobody is dropped: an iteration is finished when all who are alive have pushed it."""

    def finishes(self, there: int, expected: int, workers: int) -> bool:
        return there >= expected


@dataclass(frozen=True)
class BackupInStep(Backup):
    """Says that nobody computes while the parameters change: those it does without do."""

    in_step: ClassVar[bool] = True


@dataclass(frozen=True)
class DSSPWithoutALimit(DSSP):
    """Says `high`, frees as if there were none."""

    def gate(self, rank: int, members: Members, seed: int) -> PullGate:
        return DSSPGate(DSSP(low=self.high + 2, high=self.high + 9))


@dataclass(frozen=True)
class LazierThanLazy(SSP):
    """Waits for an iteration that the worker itself has yet to push."""

    def freed_at(self, i: int, V: int) -> int:
        return i + 2


@dataclass(frozen=True)
class DecidesAnew(Deadline):
    """Not a function of what it is asked: no two who ask agree on V."""

    def finishes(self, there: int, expected: int, workers: int) -> bool:
        return there >= expected - (self.calls() % 2)

    def calls(self) -> int:
        object.__setattr__(self, "n", getattr(self, "n", 0) + 1)
        return int(self.n)  # type: ignore[attr-defined]


# Weights of pushes.


class CountsWorkers(UncheckedShard):
    """A step on arrival takes 1/N, whatever the gradient weighs."""

    def apply(self, handles: tuple[Handle, ...], weight: float, norm: float | None = None) -> None:
        super().apply(handles, 1.0 / self.sharing, norm)


class NeverForgets(PushWeights):
    def forget(self, worker: int) -> None:
        """Keep the weight of a worker that is lost."""


class ForgetsNobodysWeight(UncheckedShard):
    """A lost worker's weight counts for the mean of the others'."""

    def __init__(self, policy: CentralPolicy, rank: int, members: Members, seed: int = 0) -> None:
        super().__init__(policy, rank, members, seed)
        self.weights = NeverForgets()
