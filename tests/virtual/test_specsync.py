"""SpecSync in virtual time: what is given up took its time, and what is computed again is computed on fresh values."""

from __future__ import annotations

import pytest
import torch

from paceline import simulate
from paceline.cluster import Fault
from paceline.cluster.models import LogNormal
from paceline.core.actions import Compute, Park
from paceline.core.events import ComputeAborted, GradientReady, PushArrived
from paceline.run import Run
from paceline.runtime.virtual.gradients import Gradients
from paceline.tensors.shard_optimizer import ShardOptimizer

FIXED = "specsync:abort_time=0.03,abort_rate=0.2"


def run_one(policy: str = FIXED, servers: int = 1, **more: object) -> Run:
    given = {"workers": 5, "cluster": "lognormal:sigma=0.3", "iterations": 25} | more
    return simulate("quadratic", policy, servers=servers, **given)  # type: ignore[arg-type]


def aborted(run: Run) -> int:
    return sum(isinstance(record.event, ComputeAborted) for record in run.trace)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_gradient_is_of_the_parameters_its_handle_names(monkeypatch: pytest.MonkeyPatch, servers: int) -> None:
    """Slice by slice: what it was computed from is what the shard had when it had answered for the last time."""
    ordered: dict[tuple[int, int, int], torch.Tensor] = {}
    had: dict[tuple[int, int], torch.Tensor] = {}
    order, apply = Gradients.order, ShardOptimizer.apply
    shards: dict[int, tuple[int, int]] = {}

    def note_order(self, key, parameters, samples) -> None:
        ordered[key] = parameters.clone()
        order(self, key, parameters, samples)

    def note_apply(self, *arguments, **named) -> None:
        shard, version = shards.setdefault(id(self), (len(shards), 0))
        had.setdefault((self.values.data_ptr(), 0), self.values.clone())
        apply(self, *arguments, **named)
        shards[id(self)] = (shard, version + 1)
        had[self.values.data_ptr(), version + 1] = self.values.clone()

    monkeypatch.setattr(Gradients, "order", note_order)
    monkeypatch.setattr(ShardOptimizer, "apply", note_apply)
    run = simulate(
        "digits-mlp", FIXED, workers=4, servers=servers, cluster="lognormal:sigma=0.3", iterations=10, batch=4
    )
    assert aborted(run) > 10
    places = sorted({place for place, _ in had})
    sizes = [had[place, 0].numel() for place in places]
    for record in run.trace:
        if isinstance(record.event, PushArrived):
            handle, shard = record.event.push.handle, record.node.rank
            start = sum(sizes[:shard])
            used = ordered[handle.source, handle.incarnation, handle.iteration][start : start + sizes[shard]]
            assert torch.equal(used, had[places[shard], handle.version])


def test_what_is_given_up_took_its_time() -> None:
    """Of each attempt: how long it took, and that the second takes as long as any other."""
    run = run_one(cluster="factors:by_worker=1:1.13:0.91:1.05,compute_s=0.1")
    began = {
        (r.node.rank, a.iteration, a.attempt): r.event.at for r in run.trace for a in r.actions if type(a) is Compute
    }
    given_up = [r for r in run.trace if isinstance(r.event, ComputeAborted)]
    assert given_up
    for record in given_up:
        event = record.event
        assert isinstance(event, ComputeAborted)
        assert event.at - began[record.node.rank, event.iteration, 0] == pytest.approx(0.03 + 2 * 0.0005)
    factors = (1, 1.13, 0.91, 1.05, 1)
    for record in run.trace:
        if isinstance(record.event, GradientReady):
            event = record.event
            took = event.at - began[record.node.rank, event.iteration, event.attempt]
            assert took == pytest.approx(0.1 * factors[record.node.rank])


def test_parameters_are_fresher_and_iterations_longer() -> None:
    plain, fresh = run_one("asp", cluster="lognormal:sigma=0.3"), run_one(FIXED)
    assert fresh.metrics.staleness["mean"] < 0.9 * plain.metrics.staleness["mean"]
    assert fresh.time_s > 1.05 * plain.time_s
    assert fresh.metrics.iterations == plain.metrics.iterations


def test_nobody_is_parked_for_beginning_again() -> None:
    run = run_one("specsync:base=pssp(staleness=1,c=0.5),abort_time=0.03,abort_rate=0.2", servers=2)
    assert aborted(run) > 10
    parked = [action.pull for record in run.trace for action in record.actions if isinstance(action, Park)]
    assert parked
    assert not any(pull.attempt for pull in parked)


def test_one_worker_never_speculates() -> None:
    assert aborted(run_one("specsync", workers=1)) == 0


@pytest.mark.parametrize("policy", [FIXED, "specsync"])
def test_losses_joins_and_pauses(policy: str) -> None:
    faults = (Fault("crash", 1, at_s=0.7), Fault("join", 1, at_s=1.3), Fault("restart", 2, at_iteration=9, for_s=0.2))
    cluster = LogNormal(sigma=0.3, faults=(*faults, Fault("pause", 3, at_iteration=5, for_s=0.5)))
    run = run_one(policy, servers=2, cluster=cluster)
    assert run.replay() == []
    assert aborted(run) > 5
