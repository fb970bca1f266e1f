"""`paceline.barrier()`: all live workers meet, under every policy, wherever their scripts are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import paceline
from paceline import policies
from paceline.cluster import Resize, load
from paceline.core.messages import Members
from paceline.errors import PacelineError
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver import script_barrier
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from tests.live.test_run_end import OVER_TCP, launch, make, step

POLICIES = [
    "bsp", "asp", "ssp:staleness=1", "backup:extra=1", "deadline", "elastic:lookahead=3", "scheduled", "specsync",
    "waiting:delay_s=0.01", "hop:graph=ring", "hop:graph=ring,order=serial", "hop:graph=ring,notify_ack=true", "adpsgd",
]  # fmt: skip


def meet(folder: Path, which: object) -> None:
    """Wait with the others, and leave a file with the times of coming and going."""
    came = time.monotonic()
    paceline.barrier()
    (folder / f"{which}@{paceline.init().rank}").write_text(f"{came} {time.monotonic()}")


def check_meetings(folder: Path, ranks: int) -> int:
    """Nobody has left before all had come; how many meetings there were."""
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for path in folder.glob("*@*"):
        came, left = map(float, path.read_text().split())
        times[path.name.partition("@")[0]].append((came, left))
    for met in times.values():
        assert len(met) == ranks
        assert max(came for came, _ in met) <= min(left for _, left in met)
    return len(times)


@pytest.mark.parametrize(
    ("policy", "where"),
    [
        *((policy, "") for policy in POLICIES),
        *(
            (policy, where)
            for policy in ("bsp", "asp", "backup:extra=1", "hop:graph=ring", "adpsgd")
            for where in OVER_TCP
        ),
    ],
)
def test_all_meet_before_within_and_after_their_loops(policy: str, where: str, tmp_path: Path) -> None:
    def work() -> None:
        rank = paceline.init().rank
        meet(tmp_path, "start")
        model, opt = make()
        for number in range(12):
            step(model, opt, took_s=(0.0, 0.005, 0.02)[rank])
            if number % 4 == 3:
                meet(tmp_path, number)
        meet(tmp_path, "end")

    launch(work, policy, where=where)
    assert check_meetings(tmp_path, 3) == 5


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_that_breaks_out_early_keeps_nobody_waiting_for_its_gradients(policy: str, tmp_path: Path) -> None:
    def work() -> None:
        rank = paceline.init().rank
        model, opt = make()
        for _ in range((5, 30, 30)[rank]):
            step(model, opt, took_s=0.002)
        meet(tmp_path, "end")
        for _ in range(5):
            step(model, opt)
        assert all(parameter.isfinite().all() for parameter in model.parameters())

    launch(work, policy)
    assert check_meetings(tmp_path, 3) == 1


def test_with_overlap_too(tmp_path: Path) -> None:
    def work() -> None:
        model, opt = make(overlap=True)
        for _ in range((5, 20)[paceline.init().rank]):
            step(model, opt)
        meet(tmp_path, "end")
        for _ in range(5):
            step(model, opt)

    launch(work, "bsp", workers=2)
    assert check_meetings(tmp_path, 2) == 1


@pytest.mark.parametrize("policy", ["bsp", "hop:graph=ring"])
def test_who_is_lost_or_has_ended_is_not_waited_for(policy: str, tmp_path: Path) -> None:
    def work() -> None:
        rank = paceline.init().rank
        model, opt = make()
        for _ in range(10):
            step(model, opt)
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            time.sleep(0.3)
            return
        meet(tmp_path, "end")

    launch(work, policy, workers=4)
    assert check_meetings(tmp_path, 2) == 1


@pytest.mark.parametrize("policy", ["bsp", "asp", "hop:graph=ring", "adpsgd"])
def test_those_who_are_done_meet_after_their_loops(policy: str, tmp_path: Path) -> None:
    def work() -> None:
        model, opt = make()
        while not opt.done:
            step(model, opt)
            if opt.global_step == 10 and paceline.init().rank == 1:
                paceline.stop()
        time.sleep(0.1 * paceline.init().rank)
        for number in range(3):
            meet(tmp_path, number)

    launch(work, policy)
    assert check_meetings(tmp_path, 3) == 3


@pytest.mark.parametrize("policy", ["bsp", "hop:graph=ring"])
def test_the_end_of_a_run_lets_those_who_wait_go(policy: str, tmp_path: Path) -> None:
    """Worker 0 waits in a barrier that the others never come to: `step` ends their scripts."""

    def work() -> None:
        model, opt = make()
        rank = paceline.init().rank
        for number in range(10**6):
            step(model, opt)
            if number == 5 and rank == 0:
                paceline.barrier()
                assert opt.done
                (tmp_path / "went on").touch()
                return
            if number == 20 and rank == 1:
                paceline.stop()

    launch(work, policy)
    assert (tmp_path / "went on").exists()


def test_a_barrier_of_one_and_one_without_a_run() -> None:
    def work() -> None:
        paceline.barrier()
        model, opt = make()
        step(model, opt)
        paceline.barrier()

    launch(work, "bsp", workers=1)
    paceline.barrier()


def test_only_the_thread_that_trains_may_wait() -> None:
    def work() -> None:
        errors: list[BaseException] = []
        model, opt = make()

        def wait() -> None:
            try:
                paceline.barrier()
            except PacelineError as error:
                errors.append(error)

        step(model, opt)
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert "paceline.barrier() was called outside the thread that made paceline.Optimizer" in str(errors[0])

    launch(work, "bsp", workers=1)


def test_within_a_closure_it_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        _, opt = make()
        opt.step(paceline.barrier)

    run = paceline.launch(work, workers=1, timeout_s=60)
    assert run.failures
    assert "paceline.barrier() was called within step: call it between steps" in capfd.readouterr().err


def test_it_is_said_for_whom_one_waits_long(monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script_barrier, "LONG_S", 0.1)

    def work() -> None:
        model, opt = make()
        step(model, opt)
        if paceline.init().rank == 1:
            time.sleep(1.0)
        paceline.barrier()

    launch(work, "bsp")
    assert capfd.readouterr().out.count("2 in paceline.barrier() still wait for worker 1\n") == 1


def test_whoever_waits_is_not_stuck(tmp_path: Path) -> None:
    def work() -> None:
        model, opt = make()
        for _ in range(5):
            step(model, opt)
        if paceline.init().rank == 1:
            for _ in range(150):
                step(model, opt, took_s=0.02)
        meet(tmp_path, "end")

    drive(work, lambda driver: None, care=FaultPolicy(timeout_s=60, hang_timeout_s=2.0), policy="asp")
    assert check_meetings(tmp_path, 3) == 1


def drive(work: Callable[[], None], deed: Callable[[Driver], None], **more) -> Run:
    """A run in which something is done to the driver's processes, a while after the script has said 'now'."""
    given = {"care": FaultPolicy(timeout_s=60), **more}
    plan = RunPlan(Members(3, 2), function_starter(work), policies.parse(given.pop("policy", "bsp")), **given)
    driver = Driver(plan, say=print)

    def wait_and_do() -> None:
        while not driver.parts.logged.history and not driver.parts.state.finishing:
            time.sleep(0.01)
        deed(driver)

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    try:
        run = driver.run()
    finally:
        thread.join()
    assert run.failures == []
    return run


def waiting_while_others_train(folder: Path) -> None:
    model, opt = make()
    rank = paceline.init().rank
    for number in range((5, 200, 200)[rank]):
        step(model, opt, took_s=0.005)
        if (rank, number) == (1, 20):
            paceline.log(loss=1.0)
    meet(folder, "end")
    for _ in range(5):
        step(model, opt)


def test_a_server_that_is_started_again_is_told_who_waits(tmp_path: Path) -> None:
    def kill(driver: Driver) -> None:
        next(child for child in driver.parts.children.values() if child.role == "server" and child.rank == 1).kill()

    checkpointing = CheckpointOptions(tmp_path / "run", every_updates=10)
    drive(lambda: waiting_while_others_train(tmp_path), kill, checkpointing=checkpointing)
    assert check_meetings(tmp_path, 3) == 1


def test_the_number_of_servers_changes_while_one_waits(tmp_path: Path) -> None:
    cluster = load("steady:compute_s=0.005")
    cluster = replace(cluster, resizes=(Resize(3, at_iteration=30),))
    run = drive(lambda: waiting_while_others_train(tmp_path), lambda driver: None, cluster=cluster)
    assert [change.after for change in run.server_changes] == [3]
    assert check_meetings(tmp_path, 3) == 1


def test_samples_that_a_step_has_not_used_are_not_settled_by_waiting(tmp_path: Path) -> None:
    """Worker 0 has drawn a batch when it waits; it follows, and is killed before it steps."""
    data = torch.utils.data.TensorDataset(torch.arange(64.0))

    def work() -> None:
        model, opt = make()
        del model
        loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=paceline.Sampler(data))
        weight = opt.param_groups[0]["params"][0]
        for batches, (batch,) in enumerate(loader):
            if paceline.init().rank == 0 and batches == 3:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
                paceline.barrier()
            opt.zero_grad()
            (weight.sum() * batch.sum()).backward()
            opt.step()
            with (tmp_path / f"used-{paceline.init().rank}").open("a") as file:
                file.write(" ".join(str(int(sample)) for sample in batch) + "\n")

    launch(work, "bsp", workers=2, servers=1)
    used = {int(sample) for path in tmp_path.glob("used-*") for sample in path.read_text().split()}
    assert used == set(range(64))
