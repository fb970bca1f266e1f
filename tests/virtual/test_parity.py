"""BSP in virtual time is single-process training on the joined batch, whatever the delays and shards."""

from __future__ import annotations

import pytest
import torch

from paceline import simulate
from paceline.core.actions import Apply
from tests.reference import largest_difference, train_alone

DELAYS = ["steady", "random-slowdown:factor=6", "one-slow:factor=4", "pareto:shape=1.2,latency_s=0.05,bandwidth=1e5"]
FLOAT32 = ["sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9", "sgd:lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.001"]
FLOAT64 = [*FLOAT32, "adam:lr=0.002", "adamw:lr=0.002,weight_decay=0.05"]


@pytest.mark.parametrize("servers", [3, *(pytest.param(servers, marks=pytest.mark.ci) for servers in (1, 2))])
@pytest.mark.parametrize("optimizer", FLOAT32)
def test_bsp_equals_single_process_in_float32(servers: int, optimizer: str) -> None:
    alone = train_alone("digits-mlp", 4, 60, optimizer, torch.float32)
    for cluster in DELAYS:
        run = simulate(policy="bsp", workers=4, servers=servers, cluster=cluster, iterations=60, optimizer=optimizer)
        assert largest_difference(run.parameters, alone) < 1e-5, cluster


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", FLOAT64)
def test_bsp_equals_single_process_in_float64(servers: int, optimizer: str) -> None:
    alone = train_alone("digits-mlp", 4, 100, optimizer, torch.float64)
    run = simulate(
        policy="bsp", workers=4, servers=servers, cluster="lognormal:sigma=1", iterations=100, optimizer=optimizer,
        dtype="float64",
    )  # fmt: skip
    assert largest_difference(run.parameters, alone) < 1e-9


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9", "adam:lr=0.002,eps=1e-5"])
def test_bsp_on_unequal_batches_equals_single_process_on_the_joined_batch(
    optimizer: str, dtype: str, most: float
) -> None:
    batch = (40, 24, 7, 1)
    alone = train_alone("digits-mlp", 4, 60, optimizer, getattr(torch, dtype), batch=batch)
    for servers, cluster in ((1, "steady"), (3, "random-slowdown:factor=6")):
        run = simulate(
            policy="bsp", workers=4, servers=servers, cluster=cluster, iterations=60, optimizer=optimizer, batch=batch,
            dtype=dtype,
        )  # fmt: skip
        assert largest_difference(run.parameters, alone) < most
        assert run.replay() == []


def test_a_clipped_mean_of_unequal_batches_has_the_norm_of_the_joined_batch() -> None:
    batch, optimizer = (40, 7, 1), "sgd:lr=0.1,clip_mean=0.05"
    alone = train_alone("digits-mlp", 3, 60, optimizer, torch.float64, batch=batch)
    for servers in (1, 3):
        run = simulate(workers=3, servers=servers, iterations=60, optimizer=optimizer, batch=batch, dtype="float64")
        assert largest_difference(run.parameters, alone) < 1e-9


def test_within_an_iteration_steps_on_arrival_of_unequal_batches_add_up_to_one_of_the_mean() -> None:
    """Once everybody's weight is known: the first iteration takes the unknown ones to be like the mean of those
    known. The smaller a batch, the sooner its gradient comes."""
    batch = (40, 24, 7, 1)
    ssp = simulate(policy="ssp:staleness=0", workers=4, iterations=1, dtype="float64", batch=batch)
    weights = [action.weight for record in ssp.trace for action in record.actions if isinstance(action, Apply)]
    assert weights == pytest.approx([1 / 4, 7 / 4 / 4, 24 / 4 / (32 / 3), 40 / 72])
    ssp = simulate(policy="ssp:staleness=0", workers=4, iterations=20, dtype="float64", batch=batch)
    weights = [action.weight for record in ssp.trace for action in record.actions if isinstance(action, Apply)]
    assert weights[4:] == pytest.approx([1 / 72, 7 / 72, 24 / 72, 40 / 72] * 19)


def test_equal_batches_by_worker_are_batches_of_one_size_to_the_bit() -> None:
    for policy in ("bsp", "asp", "hop:graph=ring-based"):
        one, each = (
            simulate(policy=policy, workers=4, cluster="random-slowdown", iterations=30, batch=batch)
            for batch in (32, (32, 32, 32, 32))
        )
        assert one.trace.to_bytes() == each.trace.to_bytes()
        assert largest_difference(one.parameters, each.parameters) == 0.0


@pytest.mark.parametrize("servers", [2, 4])
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1,momentum=0.9", "adam:lr=0.002", "lars:lr=0.1"])
def test_bsp_with_key_range_slicing_equals_single_process(servers: int, optimizer: str) -> None:
    alone = train_alone("digits-mlp", 4, 60, optimizer, torch.float64)
    run = simulate(
        policy="bsp", workers=4, servers=servers, cluster="lognormal:sigma=1", iterations=60, optimizer=optimizer,
        dtype="float64", slicing="key-range",
    )  # fmt: skip
    assert largest_difference(run.parameters, alone) < 1e-9
    assert run.summary()["slices"]["imbalance"] > 1.3


@pytest.mark.parametrize("slicing", ["eps", "key-range"])
def test_bsp_decided_by_a_scheduler_equals_single_process(slicing: str) -> None:
    optimizer = "sgd:lr=0.1,momentum=0.9"
    alone = train_alone("digits-mlp", 4, 60, optimizer, torch.float64)
    for cluster in ("random-slowdown", "pareto:shape=1.2,latency_s=0.05,bandwidth=1e5,scheduler_s=0.01"):
        run = simulate(
            policy="scheduled", workers=4, servers=3, cluster=cluster, iterations=60, optimizer=optimizer,
            dtype="float64", slicing=slicing,
        )  # fmt: skip
        assert largest_difference(run.parameters, alone) < 1e-9
        assert run.replay() == []


def test_the_delays_do_not_touch_the_result_at_all() -> None:
    runs = [simulate(policy="bsp", workers=5, servers=2, cluster=cluster, iterations=30) for cluster in DELAYS]
    for run in runs[1:]:
        assert largest_difference(run.parameters, runs[0].parameters) == 0.0


def test_ssp_with_staleness_0_is_not_bsp_but_has_its_gate() -> None:
    """The gate is BSP's; gradients are applied on arrival with lr/N, so within an iteration order matters not at all
    for plain SGD: everybody reads the same parameters and the N steps of lr/N add up to one of the mean."""
    bsp = simulate(policy="bsp", workers=4, iterations=50, dtype="float64")
    ssp = simulate(policy="ssp:staleness=0", workers=4, iterations=50, cluster="random-slowdown", dtype="float64")
    assert largest_difference(bsp.parameters, ssp.parameters) < 1e-9


def test_backup_with_no_extra_workers_is_bsp() -> None:
    bsp = simulate(policy="bsp", workers=4, servers=2, iterations=30)
    backup = simulate(policy="backup:extra=0", workers=4, servers=2, iterations=30, cluster="random-slowdown")
    assert largest_difference(bsp.parameters, backup.parameters) == 0.0


def test_one_step_of_sgd_on_the_quadratic_by_hand() -> None:
    from paceline import workloads
    from paceline.sample_order import SampleOrder

    workload = workloads.load("quadratic")
    w0 = workload.module(0, torch.float64).weight.detach()[0]
    samples = torch.from_numpy(SampleOrder(256, 2, workload.batch, 0).joined(0))
    x, y = workload.train[0][samples].double(), workload.train[1][samples].double()[:, 0]
    gradient = 2 * ((x @ w0 - y) @ x) / len(x)
    run = simulate("quadratic", "bsp", workers=2, iterations=1, optimizer="sgd:lr=0.05", dtype="float64")
    assert torch.allclose(run.parameters["weight"][0], w0 - 0.05 * gradient, atol=1e-12)
