"""`paceline.Sampler` in live runs: strided while nobody comes or goes, and no sample lost when somebody does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import policies
from paceline.cluster import Fault, load
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.driver.sample_dispatchers import SamplerDispatch
from paceline.sample_order import permutation
from paceline.testing.samples import RecordedSampler, counted, lost
from tests.live.meanwhile import meanwhile

SIZE, BATCH = 240, 8
ON_AND_ON = 1_000_000


def data(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def optimizer() -> tuple[nn.Module, paceline.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    return model, paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model=model)


class Loop:
    """A training loop over a recorded sampler, in a worker."""

    def __init__(self, folder: Path, size: int = SIZE, per_step: int | None = None, **loader) -> None:
        self.sampler = RecordedSampler(data(size), folder, per_step=per_step)
        self.loader = DataLoader(data(size), loader.pop("batch_size", BATCH), sampler=self.sampler, **loader)
        self.model, self.opt = optimizer()

    def step(self, *batches: torch.Tensor, factor: float = 1.0) -> None:
        """One step on these samples; a run that is stopped ends in it."""
        self.opt.zero_grad()
        for batch in batches:
            (factor * self.model(batch[:, None].float()).sum()).backward()
        try:
            self.opt.step()
        finally:
            self.sampler.used(torch.cat(batches).tolist(), not self.opt.step_was_dropped)
            if paceline.init().rank == 0:
                paceline.log(loss=0.0)

    def epochs(self, epochs: int) -> None:
        for _ in range(epochs):
            for (batch,) in self.loader:
                self.step(batch)


def driver_of(work: Callable[[], object], policy: str = "bsp", **more) -> Driver:
    given = {"cluster": load("steady:compute_s=0.002"), "care": FaultPolicy(timeout_s=60), **more}
    members = given.pop("members", Members(3, 2))
    plan = RunPlan(members, function_starter(work), policies.parse(policy), **given)
    return Driver(plan, say=lambda line: None)


def dispatch_of(driver: Driver) -> SamplerDispatch:
    (dispatch,) = driver.parts.sample_dispatchers.dispatches.values()
    return dispatch


def finished(driver: Driver) -> int:
    return sum(len(dispatch.finished()) for dispatch in list(driver.parts.sample_dispatchers.dispatches.values()))


def stopped_after(driver: Driver, deed: Callable[[], object]) -> Run:
    """Does `deed` beside a run, and stops the run when it is done."""

    def do_and_stop() -> None:
        deed()
        driver.parts.interrupts.count = 1

    return meanwhile(driver, do_and_stop, points=0)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def once(folder: Path, size: int = SIZE) -> set[int]:
    """The epochs of which every sample counted; none may have counted twice."""
    found = counted(folder)
    assert {times for samples in found.values() for times in samples.values()} == {1}
    return {epoch for epoch, samples in found.items() if set(samples) == set(range(size))}


def test_while_nobody_comes_or_goes_the_samples_are_strided(tmp_path: Path) -> None:
    """Of sizes that do not divide, too: the samples of all workers together are the permutations."""
    size = 203

    def work() -> None:
        loop = Loop(tmp_path, size)
        order = []
        for _ in range(3):
            for (batch,) in loop.loader:
                order.append(batch)
                loop.step(batch)
        torch.save(torch.cat(order), tmp_path / f"order-{paceline.init().rank}")
        assert len(loop.sampler) == len(range(paceline.init().rank, size, 3))

    driver = driver_of(work)
    assert driver.run().failures == []
    for rank in range(3):
        expected = [sample for epoch in range(3) for sample in permutation(size, 0, epoch)[rank::3].tolist()]
        assert torch.load(tmp_path / f"order-{rank}").tolist() == expected
    assert once(tmp_path, size) == {0, 1, 2}
    assert set(dispatch_of(driver).finished()) == {0, 1, 2}, "the last words of all are heard"


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=2", "backup:extra=1", "asp"])
def test_workers_are_killed_and_no_sample_is_lost(policy: str, tmp_path: Path) -> None:
    driver = driver_of(lambda: Loop(tmp_path).epochs(ON_AND_ON), policy, care=FaultPolicy(restarts=2, timeout_s=60))
    chance = random.Random(policy)

    def kill() -> None:
        for victim in (1, 2):
            target = len(driver.parts.logged.history) + chance.randint(5, 30)
            wait_until(lambda target=target: len(driver.parts.logged.history) > target)
            next(child for child in driver.parts.workers.live() if child.rank == victim).kill()
        wait_until(lambda: len(driver.parts.roster.members) == 3)
        now = dispatch_of(driver).machine.unopened
        wait_until(lambda: set(dispatch_of(driver).finished()) >= set(range(now + 1)))

    stopped_after(driver, kill)
    assert lost(tmp_path, dispatch_of(driver)) == {}


def test_samples_of_dropped_gradients_are_dealt_again(tmp_path: Path) -> None:
    slow = load("one-slow:factor=3,compute_s=0.004")
    driver = driver_of(lambda: Loop(tmp_path).epochs(ON_AND_ON), "backup:extra=1", cluster=slow)
    run = stopped_after(driver, lambda: wait_until(lambda: finished(driver) >= 3))
    assert run.metrics.dropped > 0
    assert once(tmp_path) >= set(dispatch_of(driver).finished()), "nobody was lost: each of them counted once"


def test_skipped_steps_and_gradients_that_are_not_finite_do_not_come_again(tmp_path: Path) -> None:
    """A sample that makes NaN would otherwise keep the run going for ever."""

    def work() -> None:
        loop = Loop(tmp_path)
        for epoch in range(3):
            for number, (batch,) in enumerate(loop.loader):
                if number == 2:
                    loop.opt.skip_step()
                    loop.sampler.used(batch.tolist(), counted=False)
                else:
                    loop.step(batch, factor=float("nan") if epoch == 1 or number == 4 else 1.0)

    driver = driver_of(work)
    assert driver.run().failures == []
    assert set(dispatch_of(driver).finished()) >= {0, 1, 2}


def test_whoever_joins_gets_its_share_of_the_current_epoch(tmp_path: Path) -> None:
    driver = driver_of(lambda: Loop(tmp_path, 960).epochs(ON_AND_ON), "ssp:staleness=2", members=Members(2, 1))

    def join() -> None:
        wait_until(lambda: finished(driver) >= 2)
        driver.parts.worker_restarts.injector.due.append(Fault("join", 2, at_s=0.0))
        wait_until(lambda: len(driver.parts.roster.members) == 3)
        now = dispatch_of(driver).machine.unopened
        wait_until(lambda: set(dispatch_of(driver).finished()) >= set(range(now + 2)))

    stopped_after(driver, join)
    assert once(tmp_path, 960) >= set(dispatch_of(driver).finished())
    joined = counted(tmp_path, "2.0")
    assert min(joined) >= 1, "not from the beginning"
    whole = [samples.total() for epoch, samples in joined.items() if min(joined) < epoch < max(joined)]
    assert whole
    assert all(total > 960 / 3 * 0.7 for total in whole)


def test_who_ends_in_the_middle_of_an_epoch_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    def work() -> None:
        loop = Loop(tmp_path)
        for number, (batch,) in enumerate(loop.loader):
            if paceline.init().rank == 1 and number == 3:
                return
            loop.step(batch)
        loop.epochs(2)

    driver = driver_of(work)
    assert driver.run().failures == []
    assert counted(tmp_path, "1.0")[0].total() == 3 * BATCH
    assert once(tmp_path) >= {0, 1}
    assert set(dispatch_of(driver).finished()) >= {0, 1}


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loop_that_is_left_goes_on_where_it_was(drop_last: bool, tmp_path: Path) -> None:
    """Samples that were drawn and not used are dealt again: those of the loop that was left, and of a last batch
    that is too small."""

    def work() -> None:
        loop = Loop(tmp_path, batch_size=7, drop_last=drop_last)
        while loop.opt.global_step < 60:
            for number, (batch,) in enumerate(loop.loader):
                if number == 4:
                    break
                loop.step(batch)

    driver = driver_of(work)
    assert driver.run().failures == []
    assert once(tmp_path) >= {0, 1, 2}
    assert set(dispatch_of(driver).finished()) >= {0, 1, 2}


@pytest.mark.parametrize(("policy", "per_step"), [("bsp", 2 * BATCH), ("bsp", None), ("backup:extra=1", None)])
def test_a_loader_with_processes_of_its_own_draws_ahead(policy: str, per_step: int | None, tmp_path: Path) -> None:
    """Two micro-batches a step; what is drawn ahead is acknowledged by the step that uses it, no sooner."""

    def work() -> None:
        torch.set_num_threads(1)
        loop = Loop(tmp_path, per_step=per_step, num_workers=2, prefetch_factor=3)
        while True:
            batches = iter(loop.loader)
            for (first,) in batches:
                second = next(batches, None)
                loop.step(*([first] if second is None else [first, second[0]]))

    slow = load("one-slow:factor=3,compute_s=0.004")
    driver = driver_of(work, policy, cluster=slow, members=Members(2, 1))
    run = stopped_after(driver, lambda: wait_until(lambda: finished(driver) >= 3))
    assert (run.metrics.dropped > 0) == (policy != "bsp")
    assert once(tmp_path) >= set(dispatch_of(driver).finished())


@pytest.mark.parametrize(
    ("workers", "per_step"), [(0, None), (2, None), (2, 7)], ids=["plain", "loader ahead", "per step"]
)
def test_a_pass_that_is_given_up_has_not_used_what_it_drew(workers: int, per_step: int | None, tmp_path: Path) -> None:
    """Closures that draw their own batch: what is written down as counted is what the last run of each has seen."""

    def work() -> None:
        loop = Loop(tmp_path, per_step=per_step, num_workers=workers, batch_size=7)
        steps = passes = 0
        for _ in range(6):
            batches = iter(loop.loader)
            while True:
                seen: list[list[int]] = []

                def closure(batches: Iterator[list[torch.Tensor]] = batches, seen: list[list[int]] = seen) -> None:
                    (batch,) = next(batches)
                    seen.append(batch.tolist())
                    loop.opt.zero_grad()
                    time.sleep(0.004)
                    loop.model(batch[:, None].float()).sum().backward()

                try:
                    loop.opt.step(closure)
                except StopIteration:
                    assert not seen, "a second run has something to draw"
                    break
                for batch in seen[:-1]:
                    loop.sampler.used(batch, counted=False)
                loop.sampler.used(seen[-1], counted=True)
                steps, passes = steps + 1, passes + len(seen)
                if workers == 0:
                    assert seen[0] == seen[-1], "the same samples"
        paceline.log(loss=float(passes - steps))

    driver = driver_of(work, "specsync:abort_time=0.002,abort_rate=0")
    run = driver.run()
    assert run.failures == []
    assert sum(point.loss for point in run.history) > 5, "passes were given up"
    dispatch = dispatch_of(driver)
    assert dispatch.finished()
    assert lost(tmp_path, dispatch) == {}


def test_a_resumed_run_goes_on_with_its_epoch(tmp_path: Path) -> None:
    def work() -> None:
        loop = Loop(tmp_path)
        while loop.opt.global_step < goal:
            for (batch,) in loop.loader:
                loop.step(batch)
                if loop.opt.global_step == goal:
                    break

    goal = 25  # 10 steps an epoch: in the third
    driver = driver_of(work, checkpointing=CheckpointOptions(tmp_path))
    driver.run()
    assert dispatch_of(driver).finished() == [0, 1]
    for path in tmp_path.glob("*.counted"):
        path.unlink()
    goal = 50
    driver = driver_of(work, checkpointing=CheckpointOptions(tmp_path, resume=True))
    driver.run()
    assert dispatch_of(driver).finished() == [2, 3]
    assert once(tmp_path) == {2, 3}


def draws(sampler: paceline.Sampler) -> list[int]:
    return list(sampler)


def in_a_thread() -> None:
    _, _ = optimizer()
    errors: list[BaseException] = []

    def draw() -> None:
        try:
            draws(paceline.Sampler(range(4)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    raise errors[0]


def two_loops() -> None:
    optimizer()
    sampler = paceline.Sampler(range(40))
    list(zip(sampler, sampler, strict=False))


class Pairs:
    """A batch sampler of somebody's own."""

    def __init__(self, sampler: paceline.Sampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        draws = iter(self.sampler)
        yield from ([first, next(draws)] for first in draws)


def ahead_without_saying() -> None:
    optimizer()
    torch.set_num_threads(1)
    next(iter(DataLoader(range(40), batch_sampler=Pairs(paceline.Sampler(range(40))), num_workers=1)))


def other_sizes() -> None:
    optimizer()
    draws(paceline.Sampler(range(4 + paceline.init().rank)))


def other_seeds() -> None:
    optimizer()
    draws(paceline.Sampler(range(4), seed=paceline.init().rank))


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: (draws(paceline.Sampler(range(4))), optimizer()), "drawn from before paceline.Optimizer was made"),
        (in_a_thread, "drawn from outside the thread that made paceline.Optimizer"),
        (two_loops, "two loops draw from one paceline.Sampler"),
        (ahead_without_saying, "say how many samples a step uses, paceline.Sampler(data, per_step=...)"),
        (other_sizes, "make the same samplers in the same order on every worker"),
        (other_seeds, "make the same samplers in the same order on every worker"),
    ],
)
def test_what_would_lose_samples_in_silence_is_refused(work: Callable[[], object], said: str, capfd) -> None:
    def joined() -> None:
        paceline.init()
        work()

    with suppress(paceline.RunFailed):  # if it is refused before the run began
        assert paceline.launch(joined, workers=2, timeout_s=30).failures
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_several_samplers_have_decks_of_their_own() -> None:
    def work() -> None:
        samplers = [paceline.Sampler(range(size)) for size in (30, 50)]
        model, opt = optimizer()
        for _ in range(2):
            for sampler in samplers:
                loader = DataLoader(range(sampler.size), 5, sampler=sampler)
                for batch in loader:
                    opt.zero_grad()
                    model(batch[:, None].float()).sum().backward()
                    opt.step()

    driver = driver_of(work, members=Members(2, 1))
    assert driver.run().failures == []
    assert sorted(
        (dispatch.size, tuple(dispatch.finished())) for dispatch in driver.parts.sample_dispatchers.dispatches.values()
    ) == [
        (30, (0, 1)),
        (50, (0, 1)),
    ]


def test_more_workers_than_samples_do_not_spin() -> None:
    """A worker whose share is empty takes from others, an epoch or two ahead."""

    def work() -> None:
        sampler = paceline.Sampler(range(2))
        model, opt = optimizer()
        while opt.global_step < 20:
            assert len(list(sampler)) > 0
            opt.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            opt.step()

    fast = replace(load("steady:compute_s=0"), faults=())
    assert driver_of(work, cluster=fast).run().failures == []
