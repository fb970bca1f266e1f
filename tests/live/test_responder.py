"""AD-PSGD live: a peer answers while its script computes, and the script sees nothing of it until its next step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.cluster import Fault, load
from paceline.core.actions import Compute, Reduce
from paceline.core.events import GradientReady, OfferArrived
from paceline.core.messages import View
from paceline.errors import PacelineError
from paceline.run import Run
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.peer.peer import LivePeer
from paceline.runtime.live.peer.peer_parameters import PeerParameters
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.storage import endpoints
from paceline.runtime.live.worker.worker import LiveWorker
from paceline.session import world
from tests.live.test_peers import driver_of

STEPS = 12
OVER_TCP = {"keys": MultihostOptions("127.0.0.1", ""), "no keys": MultihostOptions("127.0.0.1", "", keys=False)}


def made(lr: float = 1.0) -> tuple[nn.Sequential, paceline.Optimizer]:
    """The product of two numbers, so that backward needs the parameters that forward has used."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model, paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=lr), model=model)


def push(model: nn.Module, opt: paceline.Optimizer, gradient: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    opt.step()


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def numbers(model: nn.Module) -> list[float]:
    return [float(parameter) for parameter in model.parameters()]


def answered_while_computing(run: Run, rank: int, iteration: int) -> list[float]:
    """The times at which this peer averaged a neighbour's offer in while it computed that iteration."""
    computing, answered = False, []
    for record in run.trace:
        if record.node != ("peer", rank):
            continue
        if isinstance(record.event, GradientReady):
            computing = False
        if computing and isinstance(record.event, OfferArrived):
            answered += [record.event.at for action in record.actions if isinstance(action, Reduce)]
        computing |= any(isinstance(a, Compute) and a.iteration == iteration for a in record.actions)
    return answered


@pytest.mark.parametrize(
    ("graph", "peers", "where"),
    [
        ("complete", 3, "here"),
        ("ring", 4, "here"),
        ("ring", 4, "copied"),
        ("ring", 4, "keys"),
        ("complete", 3, "no keys"),
    ],
)
def test_a_peer_that_computes_for_long_holds_nobody_back_and_is_averaged_with(
    graph: str, peers: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peer 1 computes one iteration until all others have taken theirs. On the ring it only answers.

    Parameters are copied to the model as if that were on a GPU, or are views of shared memory, or neighbours are on
    other hosts.
    """

    def work() -> None:
        rank = paceline.init().rank
        model, opt = made()
        push(model, opt, -float(rank**2))
        if rank != 1:
            for _ in range(STEPS):
                push(model, opt, 0.0)
            (tmp_path / str(rank)).touch()
            return

        def slowly() -> torch.Tensor:
            before, places = numbers(model), [parameter.data_ptr() for parameter in model.parameters()]
            opt.zero_grad()
            loss = model(torch.ones(1, 1)).sum()
            wait_until(lambda: len(list(tmp_path.iterdir())) == peers - 1)
            assert numbers(model) == before, "the model is what it was"
            assert [parameter.data_ptr() for parameter in model.parameters()] == places
            loss.backward()
            gradients = [float(parameter.grad) for parameter in model.parameters()]
            assert gradients == pytest.approx(before[::-1]), "of the parameters that forward has seen"
            for parameter in model.parameters():
                parameter.grad.zero_()
            return loss

        before = numbers(model)
        opt.step(slowly)
        assert numbers(model) != before, "it has what was averaged meanwhile"

    more = {}
    if where == "copied":
        made_of = PeerParameters.__init__

        def copied(values: PeerParameters, *given: Any) -> None:
            made_of(values, *given)
            values.in_place = False

        monkeypatch.setattr(PeerParameters, "__init__", copied)
    elif where != "here":
        monkeypatch.setattr(endpoints, "shared_folder", lambda folder, endpoint: None)
        more = {"multihost": OVER_TCP[where]}
    care = FaultPolicy(timeout_s=60, hang_timeout_s=20)
    run = driver_of(work, f"adpsgd:graph={graph}", peers, care=care, **more)[0].run()
    assert run.failures == []
    assert len(answered_while_computing(run, 1, 1)) > 1
    assert run.replay() == []
    mean = 1.0 + sum(rank**2 for rank in range(peers)) / peers
    for value in run.parameters.values():
        assert float(value) == pytest.approx(mean), "the average of all changes by gradients alone"


def test_a_peer_that_computes_gives_its_parameters_to_one_that_comes_back(tmp_path: Path) -> None:
    """Peer 0 is killed in the midst of its iterations; its only neighbour computes until it is back and has trained."""

    def work() -> None:
        run = paceline.init().run
        assert run is not None
        model, opt = made()
        push(model, opt, 0.0)
        if run.rank == 0:
            for _ in range(STEPS):
                push(model, opt, 0.0)
            (tmp_path / str(run.incarnation)).touch()
            return
        wait_until((tmp_path / "1").exists)
        push(model, opt, 0.0)

    restart = Fault("restart", 0, at_iteration=5, for_s=0.0)
    care = FaultPolicy(timeout_s=60, hang_timeout_s=20)
    cluster = replace(load("steady:compute_s=0.001"), faults=(restart,))
    run = driver_of(work, "adpsgd:graph=ring", 2, care=care, cluster=cluster)[0].run()
    assert run.failures == []
    assert run.evaluated.endswith("the average of 2 peers")
    assert run.replay() == []


@pytest.mark.parametrize("steps_again", [True, False], ids=["it steps again", "its script ends"])
def test_what_goes_wrong_in_the_thread_is_told_to_the_script(
    steps_again: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        rank = paceline.init().rank
        average = PeerParameters.average

        def fail(values: PeerParameters, *given: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("on purpose")
            average(values, *given)

        if rank == 1:
            PeerParameters.average = fail  # type: ignore[method-assign]
        model, opt = made()
        peer = world().live
        assert isinstance(peer, LivePeer)
        if rank == 1:
            wait_until(lambda: peer.responder.failure is not None)
        if rank == 0 or steps_again:
            push(model, opt, 0.0)

    run = driver_of(work, "adpsgd:graph=ring", 2)[0].run()
    assert run.failures == ["worker 1 failed with exit code 1"]
    assert "RuntimeError: on purpose" in capfd.readouterr().err
    assert run.evaluated.endswith("the average of 1 peer")


def test_a_peer_that_was_given_up_while_it_computed_ends_with_its_script() -> None:
    def work() -> None:
        model, opt = made()
        push(model, opt, 0.0)
        peer = world().live
        assert isinstance(peer, LivePeer)
        if peer.run.rank == 0:
            with peer.responder.paused(), pytest.raises(PacelineError, match="given up"):
                peer.events.see(View(99, ((1, 0),)), ())

    assert driver_of(work, "adpsgd:graph=ring", 2)[0].run().failures == []


def test_a_forked_child_is_refused_although_the_thread_held_the_lock() -> None:
    def work() -> None:
        model, opt = made()
        peer = world().live
        assert isinstance(peer, LivePeer)
        with peer.responder.lock:
            child = os.fork()
            if not child:
                refused = 0
                for deed in (opt.step, opt.skip_step):
                    try:
                        deed()
                    except PacelineError as error:
                        refused += "in a child process" in str(error)
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        push(model, opt, 0.0)

    assert driver_of(work, "adpsgd:graph=ring", 2)[0].run().failures == []


def test_the_thread_sleeps_while_nobody_says_anything(tmp_path: Path) -> None:
    def work() -> None:
        model, opt = made()
        peer = world().live
        assert isinstance(peer, LivePeer)
        push(model, opt, 0.0)
        if peer.run.rank == 1:
            rounds, hear = 0, peer.events.hear

            def count(timeout_s: float) -> bool:
                nonlocal rounds
                rounds += 1
                return hear(timeout_s)

            peer.responder.hear = count
            time.sleep(0.3)
            assert rounds < 20, "it hears that the other is done, and little else"

    assert driver_of(work, "adpsgd:graph=ring", 2)[0].run().failures == []


@pytest.mark.parametrize("policy", ["asp", "hop:graph=ring", "adpsgd:graph=ring"])
def test_steps_from_several_threads_at_once_are_refused_in_one_line(policy: str) -> None:
    def work() -> None:
        model, opt = made()
        begun, go = threading.Event(), threading.Event()

        def compute() -> torch.Tensor:
            begun.set()
            go.wait()
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        threads = [threading.Thread(target=opt.step, args=[compute])]
        threads[0].start()
        begun.wait()
        try:
            for deed in (opt.step, opt.skip_step):
                with pytest.raises(PacelineError, match=r"several threads at once.*call step from one thread"):
                    deed()
        finally:
            go.set()
            threads[0].join()
        assert opt.global_step == 1
        push(model, opt, 0.0)
        assert opt.global_step == 2, "one after the other they may"

    assert paceline.launch(work, workers=2, policy=policy, timeout_s=60).failures == []


def test_a_step_beside_one_that_waits_for_others_is_refused(tmp_path: Path) -> None:
    def work() -> None:
        rank = paceline.init().rank
        model, opt = made()
        live = world().live
        assert isinstance(live, LiveWorker)
        if rank == 1:
            wait_until((tmp_path / "refused").exists)
            push(model, opt, 0.0)
            return
        thread = threading.Thread(target=push, args=[model, opt, 0.0])
        thread.start()
        wait_until(lambda: live.executor.ordered is None)
        with pytest.raises(PacelineError, match="several threads at once"):
            opt.step()
        (tmp_path / "refused").touch()
        thread.join()

    assert paceline.launch(work, workers=2, policy="bsp", timeout_s=60).failures == []
