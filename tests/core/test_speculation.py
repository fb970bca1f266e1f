"""SpecSync's worker and shard, one behaviour at a time; the policy; machines that are broken on purpose."""

from __future__ import annotations

import pytest

from paceline.core.actions import AbortCompute, Action, Compute, Send
from paceline.core.events import (
    ComputeAborted,
    GradientReady,
    PullArrived,
    Restored,
    ResyncArrived,
    ViewChanged,
)
from paceline.core.machine import IllegalEvent, Machine
from paceline.core.messages import Members, Notify, Pull, Push, Resync, Role, View
from paceline.core.scheduler import SCHEDULER
from paceline.core.shard import Shard
from paceline.core.speculation import SpeculativeWorker
from paceline.errors import ConfigError
from paceline.policies import SSP, SpecSync, parse
from paceline.testing import PolicyBroken, play

from .drive import ShardAlone, WorkerAlone, answered, computed, parked, sent, state_of


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

    def handle_pull(self, pull: Pull) -> None:
        if pull.attempt and not self.gate.may_pull(pull.worker, pull.iteration - 1, self.progress):
            self.asked[pull.worker] = (pull.iteration, pull.attempt)
            self.park(pull, pull.iteration - 1, self.progress.V)
        else:
            super().handle_pull(pull)


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
