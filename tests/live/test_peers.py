"""Live runs without servers: peers average through shared memory, die, come back, and leave their average."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline import policies, run_folder, workloads
from paceline.api import Job, simulate_job, train_job_live
from paceline.cluster import Fault, load
from paceline.core.actions import Apply
from paceline.core.events import GradientRejected, ViewChanged
from paceline.core.messages import Members
from paceline.core.topology import neighbours
from paceline.errors import ConfigError, RunFailed
from paceline.function_workers import function_starter
from paceline.report.peers import apartness
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.storage import checkpoint
from paceline.session import world
from paceline.tensors import optimizers
from paceline.workload_training import train
from tests.live.meanwhile import meanwhile
from tests.reference import largest_difference, train_alone

BACKUP = "hop:graph=ring-based,backup=1,max_gap=4"


def job(policy: str, peers: int = 4, cluster="steady:compute_s=0.005", iterations=15, workload="digits-mlp") -> Job:
    return Job(workload, policy, peers, 1, cluster, iterations, None, None, None, 0)


def driver_of(work: Callable[[], None], policy: str, peers: int, **more) -> tuple[Driver, list[str]]:
    said: list[str] = []
    given = {"cluster": load("steady:compute_s=0.005"), "care": FaultPolicy(timeout_s=60), **more}
    plan = RunPlan(Members(peers, 0), function_starter(work), policies.parse(policy), **given)
    return Driver(plan, say=said.append), said


def digits(iterations: int) -> Callable[[], None]:
    return partial(train, workloads.load("digits-mlp"), optimizers.parse("sgd:lr=0.1"), 32, iterations, 0)


def step(opt: paceline.Optimizer, model: nn.Module, x: torch.Tensor) -> None:
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()


def test_complete_standard_serial_is_single_process_training(tmp_path: Path) -> None:
    """Nobody leaves before all are done: who leaves earlier may be missing in a neighbour's last average."""

    def work() -> None:
        digits(50)()
        (tmp_path / str(world().rank)).touch()
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.001)

    run = paceline.launch(work, workers=3, policy="hop:graph=complete,order=serial", timeout_s=60)
    alone = train_alone("digits-mlp", 3, 50, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert run.evaluated == "the peers that logged them; the model is the average of 3 peers"
    assert run.trace.header.members == Members(3, 0)
    assert run.metrics.iterations == 50


@pytest.mark.parametrize("order", ["parallel", "serial"])
@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_standard_equals_virtual_time_up_to_the_last_average(graph: str, order: str) -> None:
    """The fast ones end while the slow one still needs what they have sent."""
    given = job(f"hop:graph={graph},order={order}", 4, "one-slow:factor=8,compute_s=0.01", 10)
    live, virtual = train_job_live(given), simulate_job(given)
    assert largest_difference(live.parameters, virtual.parameters) < 1e-6
    assert live.replay() == []


@pytest.mark.parametrize("policy", ["hop:graph=ring", "hop:graph=ring,order=serial", BACKUP, "adpsgd:graph=complete"])
def test_a_script_may_give_peers_unequal_numbers_of_iterations(policy: str) -> None:
    def work() -> None:
        rank = paceline.init().rank
        model = nn.Linear(4, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for _ in range(5 + 10 * rank):
            step(opt, model, torch.ones(2, 4))

    driver, _ = driver_of(work, policy, 4, care=FaultPolicy(timeout_s=30, hang_timeout_s=5))
    run = driver.run()
    assert run.failures == []
    assert run.evaluated.endswith("the average of 4 peers")
    assert run.replay() == []


def test_who_is_done_goes_when_those_at_work_are_killed_and_is_not_given_up() -> None:
    def work() -> None:
        rank = paceline.init().rank
        model = nn.Linear(4, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        step(opt, model, torch.ones(2, 4))
        if rank == 2:
            time.sleep(60)

    driver, said = driver_of(work, "hop:graph=ring", 3, care=FaultPolicy(timeout_s=30, hang_timeout_s=1.5))
    run = driver.run()
    assert [line for line in said if "given up" in line] == [line for line in said if line.startswith("worker 2 has")]
    assert run.evaluated.endswith("the average of 2 peers")


def test_adpsgd_keeps_the_average_of_all_to_the_end() -> None:
    """Nobody's gradient moves anything after the first step: offers and answers come in pairs, the last ones too."""

    def work() -> None:
        rank = paceline.init().rank
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        for number in range(8):
            model.weight.grad = torch.full((1, 2), -float(rank) if number == 0 else 0.0)
            time.sleep(0.002 * rank)
            opt.step()

    run = driver_of(work, "adpsgd:graph=complete", 4)[0].run()
    assert torch.allclose(run.parameters["weight"], torch.full((1, 2), 1.5), atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        "hop:graph=ring",
        f"{BACKUP},skip=3",
        "hop:graph=ring-based,staleness=2,max_gap=4,backup=1,order=serial",
        "hop:graph=ring,notify_ack=true",
        "adpsgd:graph=ring",
        "adpsgd:graph=complete",
    ],
)
def test_every_mode_runs_with_a_death_and_a_return_and_can_be_played_again(policy: str) -> None:
    restart = Fault("restart", 2, at_iteration=5, for_s=0.05)
    cluster = replace(load("random-slowdown:factor=6,compute_s=0.01"), faults=(restart,))
    run = train_job_live(job(policy, cluster=cluster, iterations=80))
    assert run.replay() == []
    assert run.failures == []
    stepped = [
        record
        for record in run.trace
        if record.node == ("peer", 2) and record.incarnation == 1 and any(isinstance(a, Apply) for a in record.actions)
    ]
    assert stepped, "it came back, and trained on with its neighbours' parameters"
    assert all(torch.isfinite(value).all() for value in run.parameters.values())


def test_with_the_same_sleeps_backup_is_faster_than_standard_as_in_virtual_time() -> None:
    cluster = "random-slowdown:factor=6,compute_s=0.03"
    means = {}
    for policy in ("hop:graph=ring-based", "hop:graph=ring-based,backup=1,max_gap=8"):
        run = train_job_live(job(policy, 8, cluster, 25, workload="quadratic"))
        each = apartness(run.trace).iteration_s
        means[policy] = sum(each.values()) / len(each)
    standard, backup = means.values()
    assert backup < 0.95 * standard, means


def test_memory_of_a_peer_stays_within_the_bound_when_one_is_slow() -> None:
    """In slots, parameters among them, and a gradient."""
    policy = "hop:graph=ring-based,backup=1,max_gap=2"

    def work() -> None:
        model = nn.Linear(50, 20)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        while opt.global_step < 40:
            step(opt, model, torch.ones(4, 50))
        live = world().live
        assert live is not None
        paceline.log(loss=len(list(live.run.folder.glob(f"slot-{live.run.rank}.*"))), accuracy=live.run.rank)

    run = paceline.launch(work, workers=6, policy=policy, cluster="one-slow:factor=8,compute_s=0.005")
    parsed = policies.parse(policy)
    assert isinstance(parsed, policies.CATALOGUE["hop"])
    ins = neighbours(parsed.topology(6), frozenset(range(6))).ins
    assert len(run.history) == 6
    for point in run.history:
        assert point.loss is not None
        assert 2 <= point.loss + 1 <= len(ins[int(point.accuracy or 0)]) * (1 + 2) + 3
    assert max(point.loss or 0 for point in run.history) > 2, "somebody was ahead: the bound was worth a test"


def test_kill_9_again_and_again_stops_nobody() -> None:
    """Peers, peer 0 too, are killed at random moments and started again; the last with parameters is spared."""
    kills = 6
    driver, _ = driver_of(digits(10_000), BACKUP, 5, care=FaultPolicy(restarts=kills, timeout_s=60))
    chance = random.Random(3)

    def kill() -> None:
        for _ in range(kills):
            time.sleep(chance.uniform(0.02, 0.25))
            while not driver.parts.state.begun or len(driver.parts.peers.holding) < 3:
                time.sleep(0.005)
            chance.choice(driver.parts.workers.live()).kill()
        while driver.parts.worker_restarts.due or len(driver.parts.peers.holding) < 5:
            time.sleep(0.005)
        driver.parts.interrupts.count = 1

    run = meanwhile(driver, kill)
    assert run.failures == []
    assert run.replay() == []
    assert run.evaluated.endswith("the average of 5 peers")


def test_neighbours_know_of_a_death_at_once_and_go_on() -> None:
    driver, said = driver_of(digits(60), "hop:graph=ring", 4)
    killed: list[float] = []

    def kill() -> None:
        (victim,) = [child for child in driver.parts.workers.live() if child.rank == 2]
        killed.append(time.monotonic() - driver.parts.state.epoch_s)
        victim.kill()

    run = meanwhile(driver, kill, points=10)
    seen = [r.event.at for r in run.trace if isinstance(r.event, ViewChanged) and len(r.event.view.members) == 3]
    assert len(seen) >= 3
    assert max(seen[:3]) - killed[0] < 10, "they hear it at their next step"
    assert any("worker 2 was killed" in line for line in said)
    assert run.evaluated.endswith("the average of 3 peers")


def test_if_all_who_had_parameters_are_killed_the_run_says_so() -> None:
    driver, _ = driver_of(digits(10_000), "hop:graph=ring", 2, care=FaultPolicy(restarts=2, timeout_s=60))

    def kill() -> None:
        for child in driver.parts.workers.live():
            child.kill()

    with pytest.raises(RunFailed, match="every peer that had parameters was killed"):
        meanwhile(driver, kill, points=5)


def test_the_model_is_the_average_and_buffers_too(tmp_path: Path) -> None:
    """Peers that never step differ by what they are set to: nothing but the last average mixes them."""

    def work() -> None:
        rank = paceline.init().rank
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        model[1].running_mean.fill_(float(rank))
        model[0].weight.grad = torch.full((2, 2), -float(rank))
        opt.step()

    def initial() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(2, 2, bias=False)

    start = initial().weight.detach().clone()

    def seeded() -> None:
        torch.manual_seed(0)
        work()

    run = paceline.launch(seeded, workers=3, policy="hop:graph=complete")
    assert torch.allclose(run.parameters["0.weight"], start + 1.0), "the mean of 0, 1 and 2"
    assert run.consensus == [(run.time_s, pytest.approx((2.0 + 0.0 + 2.0) / 3))], "how far they are from it"
    run_folder.write_config(tmp_path, {})
    run_folder.save(tmp_path, run)
    assert run_folder.load(tmp_path).consensus == run.consensus
    view = run.view().peers
    assert view is not None
    assert view.consensus[-1]["distance"] == pytest.approx(4 / 3)
    assert run.others["1.running_mean"].tolist() == [1.0, 1.0]


def test_a_gradient_that_is_not_finite_is_left_out_and_parameters_are_exchanged() -> None:
    def work() -> None:
        rank = paceline.init().rank
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        model.weight.grad = torch.full((1, 2), float("nan") if rank == 0 else -2.0)
        opt.step()
        assert opt.step_was_dropped == (rank == 0)
        opt.skip_step()

    run = paceline.launch(work, workers=2, policy="hop:graph=complete,order=serial")
    assert run.parameters["weight"].tolist() == [[1.0, 1.0]]
    assert run.metrics.iterations == 2
    assert run.metrics.dropped == 3, "the one that was not finite, and the two skipped"
    assert [len(record.actions) for record in run.trace if isinstance(record.event, GradientRejected)]
    assert sum(isinstance(action, Apply) for record in run.trace for action in record.actions) == 1
    assert run.replay() == []


def test_a_script_that_raises_ends_alone() -> None:
    def work() -> None:
        rank = paceline.init().rank
        model = nn.Linear(4, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), policy=BACKUP, model=model)
        for number in range(20):
            if rank == 1 and number == 5:
                raise ValueError("on purpose")
            step(opt, model, torch.ones(2, 4))
        assert opt.global_step >= 20
        assert opt.state_dict()["param_groups"][0]["lr"] == 0.01

    run = paceline.launch(work, workers=4)
    assert run.failures == ["worker 1 failed with exit code 1"], "and its policy, the script's, has no servers"
    assert run.policy == BACKUP
    assert run.evaluated.endswith("the average of 3 peers")


def test_schedulers_change_the_rate_and_who_joins_takes_it_over() -> None:
    def work() -> None:
        run = paceline.init().run
        model = nn.Linear(4, 1)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = paceline.Optimizer(inner, model=model)
        joined = run is not None and run.incarnation > 0
        if joined:
            paceline.log(loss=opt.param_groups[0]["lr"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda number: 0.5 if not joined else 1.0)
        while opt.global_step < 150:
            step(opt, model, torch.zeros(2, 4))
            if not joined:
                scheduler.step()

    restart = Fault("restart", 1, at_iteration=60, for_s=0.05)
    cluster = replace(load("steady:compute_s=0.01"), faults=(restart,))
    run = paceline.launch(work, workers=3, policy="hop:graph=ring", cluster=cluster)
    assert [point.loss for point in run.history] == [0.5]


@pytest.mark.parametrize("policy", ["hop:graph=complete", "adpsgd:graph=complete"])
def test_a_checkpoint_at_the_end_and_a_run_that_goes_on_from_it(policy: str, tmp_path: Path) -> None:
    def work(until: int) -> None:
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), model=model)
        while opt.global_step < until:
            model.weight.grad = -torch.ones(1, 3)
            opt.step()

    def run(until: int, resume: bool) -> Run:
        checkpointing = CheckpointOptions(tmp_path, resume=resume)
        return driver_of(partial(work, until), policy, 2, checkpointing=checkpointing)[0].run()

    first = run(2, resume=False)
    assert first.parameters["weight"].tolist() == [[2.5] * 3]  # 1, then 1 + 0.5
    path, manifest = checkpoint.latest(tmp_path / checkpoint.FOLDER)
    assert [shard.iteration for shard in manifest.shards] == [2]
    assert path.name == "000000"
    again = run(3, resume=True)
    assert again.parameters["weight"].tolist() == [[4.25] * 3], "momentum went on, and one iteration was left to do"


@pytest.mark.parametrize("policy", [BACKUP, "adpsgd:graph=complete"])
def test_ctrl_c_ends_the_run_with_what_there_is(policy: str) -> None:
    driver, said = driver_of(digits(10_000), policy, 4)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    run = meanwhile(driver, interrupt, points=10)
    assert any("stopping after the current iterations" in line for line in said)
    assert run.evaluated.endswith("the average of 4 peers")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"servers": 2}, "servers=2: hop:graph=ring has no servers"),
        ({"slicing": "key-range"}, "no servers to cut the parameters for"),
        ({"policy": "hop:graph=ring,backup=2,max_gap=3"}, "leaves peer 0 nobody to wait for"),
    ],
)
def test_what_needs_servers_is_refused_in_one_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        paceline.launch(lambda: None, **{"workers": 3, "policy": "hop:graph=ring", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"), [({"overlap": True}, "overlap=True"), ({"options": "ema=0.9"}, "ema is a moving average")]
)
def test_what_only_servers_do_is_refused_by_the_optimizer(
    options: dict[str, object], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        model = nn.Linear(2, 1)
        paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)  # type: ignore[arg-type]

    with pytest.raises(ConfigError):
        paceline.launch(work, workers=2, policy="hop:graph=ring")
    assert words in capfd.readouterr().err


def test_a_parameter_changed_by_the_script_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        model = nn.Linear(2, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        step(opt, model, torch.ones(1, 2))
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1)
        step(opt, model, torch.ones(1, 2))

    with pytest.raises(RunFailed, match="no peer came to its end"):
        paceline.launch(work, workers=2, policy="hop:graph=ring")
    assert "weight was changed by the script" in capfd.readouterr().err
