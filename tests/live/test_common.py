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
from paceline.run import Run
from paceline.runtime.live import memory
from paceline.runtime.live.driver.children import function_starter
from paceline.runtime.live.driver.keeping import Keeping
from paceline.runtime.live.driver.launch import Driver, LivePlan
from paceline.runtime.live.driver.watching import Care
from paceline.runtime.live.server.durable import Durable
from paceline.runtime.live.worker.segments import Segments
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
        assert live.has_servers
        while opt.global_step < count:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            opt.zero_grad()
            model(torch.ones(1, 16)).sum().backward()
            time.sleep(compute_s * (1 + live.rank))
            for old, parameter in zip(before, model.parameters(), strict=True):
                assert torch.equal(old, parameter), "the model changed while it was computed with"
            opt.step()
            paceline.log(
                loss=OWN if live.segments.parameters is live.segments.own else SHARED, accuracy=float(live.rank)
            )

    return work


def driver_of(work: Callable[[], None], policy: str = "bsp", members: Members | None = None, **more) -> Driver:
    given = {"care": Care(timeout_s=60), **more}
    return Driver(LivePlan(members or Members(3, 1), function_starter(work), policies.parse(policy), **given))


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
    assert places(driver_of(steps(20), keeping=Keeping(tmp_path, durable=Durable())).run()) == {OWN}


def test_without_room_for_it_everybody_has_their_own(monkeypatch) -> None:
    create = memory.create

    def full(path: Path, layout: Layout) -> torch.Tensor:
        if path.name == memory.COMMON:
            raise PacelineError("no room")
        return create(path, layout)

    monkeypatch.setattr(memory, "create", full)
    assert places(driver_of(steps(20)).run()) == {OWN}


def test_after_its_server_was_killed_everybody_has_their_own(tmp_path: Path) -> None:
    """And nobody's model has changed while it was computed with: workers are slow, one slower than the other."""
    driver = driver_of(steps(150, 0.002), keeping=Keeping(tmp_path, every_updates=10))

    def kill() -> None:
        while driver.keeper is None or driver.keeper.last is None:
            time.sleep(0.001)
        next(child for child in driver.children.values() if child.role == "server").kill()

    thread = threading.Thread(target=kill)
    thread.start()
    run = driver.run()
    thread.join()
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
        if session.init().live.incarnation == 0 and session.init().rank > 0:
            pid = os.getpid()
            threading.Timer(0.1 + 0.05 * session.init().rank, os.kill, (pid, signal.SIGKILL)).start()
        steps(150, 0.002)()

    run = driver_of(work, care=Care(timeout_s=60, restarts=2)).run()
    assert {point.loss for point in run.history} == {SHARED}
    assert sorted(run.failures) == []
    assert run.replay() == []


def test_whoever_goes_back_takes_along_what_it_needs(tmp_path: Path) -> None:
    """Between two steps the parameters; while it hands in a gradient, that is what its segment holds."""
    tensors = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    layout = layout_of([("a", tensors[0], 0), ("b", tensors[1], 0)])
    common = memory.create(tmp_path / memory.COMMON, layout)
    for holds_gradient, expected in ((False, 7.0), (True, -1.0)):
        segments = Segments(tmp_path, int(holds_gradient), 0, layout, tensors, overlap=False)
        segments.share()
        segments.adopt()
        common.fill_(7.0)
        assert all(bool((tensor == 7.0).all()) for tensor in tensors)
        assert segments.transfer.write([torch.full_like(tensor, -1.0) for tensor in tensors])
        assert all(bool((tensor == 7.0).all()) for tensor in tensors), "gradients do not touch the parameters"
        segments.part(holds_gradient)
        common.fill_(99.0)
        assert all(bool((tensor == expected).all()) for tensor in tensors)
        assert not any(segments.moved(index) for index in range(2))
        segments.close()
