"""Where all models on a host are views of the one vector that the server steps: under BSP, with one server."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import paceline
from paceline import policies, session
from paceline.api import Job, train_job_live
from paceline.cluster import Resize, load
from paceline.core.messages import Members
from paceline.errors import PacelineError
from paceline.function_workers import function_starter
from paceline.policies import BSP
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.worker.shared_parameters_view import SharedParametersView
from paceline.runtime.live.worker.worker_memory import HostMemory
from paceline.tensors.layout import Layout, layout_of
from tests.reference import largest_difference, train_alone

SHARED, OWN = 1.0, 0.0


def steps(count: int, compute_s: float = 0.0, overlap: bool = False) -> Callable[[], None]:
    """So many steps; while a worker computes, its model stays as it is. It says where its parameters are."""

    def work() -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        opt = paceline.Optimizer(sgd, model=model, overlap=overlap)
        live = session.init().live
        assert live is not None
        assert not live.steps_here
        while opt.global_step < count:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            opt.zero_grad()
            model(torch.ones(1, 16)).sum().backward()
            time.sleep(compute_s * (1 + live.run.rank))
            for old, parameter in zip(before, model.parameters(), strict=True):
                assert torch.equal(old, parameter), "the model changed while it was computed with"
            opt.step()
            paceline.log(loss=SHARED if live.memory.is_common else OWN, accuracy=float(live.run.rank))

    return work


def driver_of(work: Callable[[], None], policy: str = "bsp", members: Members | None = None, **more) -> Driver:
    given = {"care": FaultPolicy(timeout_s=60), **more}
    return Driver(RunPlan(members or Members(3, 1), function_starter(work), policies.parse(policy), **given))


def run_and_kill_server(driver: Driver, is_time: Callable[[], bool]) -> Run:
    def kill() -> None:
        while not is_time():
            time.sleep(0.001)
        next(child for child in driver.parts.children.values() if child.role == "server").kill()

    thread = threading.Thread(target=kill)
    thread.start()
    run = driver.run()
    thread.join()
    return run


def places(run: Run) -> set[float | None]:
    assert run.failures == []
    return {point.loss for point in run.history}


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "sgd:lr=0.05,momentum=0.9", "adam:lr=0.002,ema=0.9"])
def test_it_is_single_process_training(optimizer: str) -> None:
    run = train_job_live(Job("digits-mlp", "bsp", 3, 1, "steady:compute_s=0", 40, None, optimizer, None, 0))
    alone = train_alone("digits-mlp", 3, 40, optimizer.removesuffix(",ema=0.9"), torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5


@pytest.mark.parametrize("overlap", [False, True])
def test_under_bsp_with_one_server_all_read_one_vector(overlap: bool) -> None:
    assert places(driver_of(steps(30, overlap=overlap)).run()) == {SHARED}


@pytest.mark.parametrize(
    ("policy", "servers"),
    [("bsp", 2), ("asp", 1), ("ssp:staleness=0", 1), ("backup:extra=1", 1), ("asp@0,bsp@5", 1), ("deadline", 1)],
    ids=str,
)
def test_where_somebody_may_compute_meanwhile_everybody_has_their_own(policy: str, servers: int) -> None:
    assert places(driver_of(steps(20, 0.001), policy, Members(3, servers)).run()) == {OWN}


def test_a_durable_server_shares_nothing(tmp_path: Path) -> None:
    """What it has stepped since its last answer must not be seen if it dies before that is in its log."""
    assert places(
        driver_of(steps(20), checkpointing=CheckpointOptions(tmp_path, durable=DurabilityOptions())).run()
    ) == {OWN}


def test_without_room_for_it_everybody_has_their_own(monkeypatch) -> None:
    create = shared_memory.create

    def full(path: Path, layout: Layout) -> torch.Tensor:
        if path.name == shared_memory.COMMON:
            raise PacelineError("no room")
        return create(path, layout)

    monkeypatch.setattr(shared_memory, "create", full)
    assert places(driver_of(steps(20)).run()) == {OWN}


def test_after_its_server_was_killed_everybody_has_their_own(tmp_path: Path) -> None:
    """And nobody's model has changed while it was computed with: workers are slow, one slower than the other."""
    driver = driver_of(steps(150, 0.002), checkpointing=CheckpointOptions(tmp_path, every_updates=10))

    def has_trained() -> bool:
        """There is a checkpoint after the one of update 0."""
        return (
            driver.parts.checkpointer is not None
            and driver.parts.checkpointer.last is not None
            and driver.parts.checkpointer.last.name > "000000"
        )

    run = run_and_kill_server(driver, has_trained)
    assert places(run) == {SHARED, OWN}
    for rank in range(3):
        told = [point.loss for point in run.history if point.accuracy == rank]
        assert told == sorted(told, reverse=True), "shared, and from then on not any more"
    assert run.replay() == []


def test_with_more_servers_everybody_has_their_own() -> None:
    scenario = replace(load("steady:compute_s=0.002"), resizes=(Resize(2, at_iteration=10), Resize(1, at_iteration=20)))
    run = driver_of(steps(40), cluster=scenario).run()
    assert places(run) == {SHARED, OWN}
    assert [(each.before, each.after) for each in run.server_changes] == [(1, 2), (2, 1)]


def test_workers_that_die_and_come_back_find_it() -> None:
    """At any time: in the midst of their gradient, waiting, computing."""

    def work() -> None:
        if session.init().run.incarnation == 0 and session.init().rank > 0:
            pid = os.getpid()
            threading.Timer(0.1 + 0.05 * session.init().rank, os.kill, (pid, signal.SIGKILL)).start()
        steps(150, 0.002)()

    run = driver_of(work, care=FaultPolicy(timeout_s=60, restarts=2)).run()
    assert {point.loss for point in run.history} == {SHARED}
    assert sorted(run.failures) == []
    assert run.replay() == []


def test_whoever_goes_back_takes_along_what_it_needs(tmp_path: Path) -> None:
    """Between two steps the parameters; while it hands in a gradient, that is what its segment holds."""
    tensors = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    layout = layout_of([("a", tensors[0], 0), ("b", tensors[1], 0)])
    common = shared_memory.create(tmp_path / shared_memory.COMMON, layout)
    for handing_in, expected in ((False, 7.0), (True, -1.0)):
        memory = HostMemory(tmp_path, (int(handing_in), 0), layout, tensors, overlap=False)
        memory.follow(common=True, gathers=False, early=[])
        memory.begin()
        common.fill_(7.0)
        assert all(bool((tensor == 7.0).all()) for tensor in tensors)
        assert memory.write([torch.full_like(tensor, -1.0) for tensor in tensors])
        assert all(bool((tensor == 7.0).all()) for tensor in tensors), "gradients do not touch the parameters"
        if handing_in:
            memory.commit()
        else:
            memory.release()
        memory.follow(common=False, gathers=False, early=[])
        common.fill_(99.0)
        assert all(bool((tensor == expected).all()) for tensor in tensors)
        assert memory.first_changed() is None
        memory.close()


def small(count: int, between: Callable[[int, int, torch.nn.Linear], None], lr: float = 1e-6) -> Callable[[], None]:
    """So many steps with a gradient of 100 that change next to nothing. `between` is told of rank, step and model."""

    def work() -> None:
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(model.weight, 0.5)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=lr), model=model)
        rank = session.init().rank
        while opt.global_step < count:
            opt.zero_grad()
            between(rank, opt.global_step, model)
            assert torch.allclose(model.weight, torch.tensor(0.5), atol=0.1), model.weight
            (100 * model(torch.ones(1, 4))).sum().backward()
            opt.step()
        between(rank, count, model)

    return work


def run_small(between: Callable[[int, int, torch.nn.Linear], None], failures: int = 0) -> None:
    run = driver_of(small(10, between)).run()
    assert len(run.failures) == failures
    assert torch.allclose(run.parameters["weight"], torch.tensor(0.5), atol=0.01)


def test_what_a_script_writes_to_its_model_is_its_own_until_it_steps() -> None:
    """Averaged weights swapped in for an evaluation: the others compute on what they were given."""

    def between(rank: int, step: int, model: torch.nn.Linear) -> None:
        if rank == 0 and step == 5:
            kept = model.weight.data.clone()
            model.weight.data.fill_(1000.0)
            time.sleep(0.2)
            model.weight.data.copy_(kept)
        elif step == 5:
            time.sleep(0.1)
        elif rank == 0 and step == 7:
            model.weight.data[0, 0] = 0.55  # the next step brings back what the server has
        elif rank == 0 and step == 8:
            assert abs(float(model.weight[0, 0].detach()) - 0.5) < 0.01

    run_small(between)


def test_what_a_script_writes_after_its_last_step_is_not_the_runs() -> None:
    def between(rank: int, step: int, model: torch.nn.Linear) -> None:
        if rank == 0 and step == 10:
            model.load_state_dict({"weight": torch.full((1, 4), 777.0)})
            time.sleep(0.2)
        elif step == 10:
            time.sleep(0.1)
            assert float(model.weight[0, 0].detach()) < 1

    run_small(between)


def test_a_worker_that_is_refused_for_what_it_wrote_harms_nobody() -> None:
    def between(rank: int, step: int, model: torch.nn.Linear) -> None:
        if rank == 1 and step == 5:
            with torch.no_grad():
                model.weight[0, 0] = 0.45

    run_small(between, failures=1)


def test_a_server_that_dies_when_a_worker_has_its_answer_takes_nothing_from_it(tmp_path: Path) -> None:
    """The worker hears of the new server before it has returned from its step: its model is what it was answered."""
    flag = tmp_path / "kill"

    def between(rank: int, step: int, _: torch.nn.Linear) -> None:
        live = session.init().live
        if rank == 1 and step == 0:
            await_order = live.executor.await_order

            def dawdle() -> None:
                await_order()
                if live.iteration == 25:
                    flag.touch()
                    time.sleep(1.0)

            live.executor.await_order = dawdle

    driver = driver_of(small(40, between), checkpointing=CheckpointOptions(tmp_path / "kept", every_updates=10))

    run = run_and_kill_server(driver, flag.exists)
    assert run.failures == []
    assert not list(driver.parts.folder.glob(shared_memory.COMMON))


def test_a_policy_that_changes_a_condition_of_bsps_promises_nothing() -> None:
    class NearlyAll(BSP):
        def finishes(self, there: int, expected: int, workers: int) -> bool:
            return there >= expected - 1

    assert BSP.in_step
    assert not NearlyAll.in_step


@pytest.mark.parametrize("pagemap", [True, False])
def test_through_a_window_one_sees_the_server_and_writes_for_oneself(pagemap: bool, tmp_path: Path) -> None:
    layout = layout_of([("a", torch.zeros(10_000), 0)])
    common = shared_memory.create(tmp_path / "common", layout)
    window = SharedParametersView(tmp_path / "common", layout)
    if not pagemap:
        window.close()
    common.fill_(1.0)
    assert window.vector.eq(1.0).all()
    assert window.written() != pagemap
    window.vector[5000] = 2.0
    assert common.eq(1.0).all()
    common.fill_(3.0)
    assert window.written()
    window.refresh()
    assert window.vector.eq(3.0).all()
    assert window.written() != pagemap


def test_who_had_no_page_fault_has_written_nothing(tmp_path: Path, monkeypatch) -> None:
    layout = layout_of([("a", torch.zeros(100_000), 0)])
    common = shared_memory.create(tmp_path / "common", layout)
    window = SharedParametersView(tmp_path / "common", layout)
    assert window.vector.eq(0.0).all()
    asked = []
    written = window.written
    monkeypatch.setattr(window, "written", lambda: asked.append(1) or written())
    for faults, expected in [(7, 1), (7, 1), (9, 2), (9, 2), (0, 3), (0, 4)]:  # 0: they are not counted here
        monkeypatch.setattr(
            "paceline.runtime.live.worker.shared_parameters_view.page_faults", lambda faults=faults: faults
        )
        window.refresh()
        assert len(asked) == expected
    monkeypatch.undo()
    for count in range(20):
        thread = threading.Thread(target=window.vector[5000 * count :].fill_, args=(2.0,))
        thread.start()
        thread.join()
        common.fill_(count)
        window.refresh()
        assert window.vector.eq(count).all()
