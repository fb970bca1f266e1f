"""When a virtual run is over, how long it took, and what is said when nobody can go on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline import simulate
from paceline.cluster import Cluster, Fault
from paceline.core.messages import Members
from paceline.errors import PacelineError
from paceline.policies import CentralPolicy, parse
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan

ONE_SECOND = 1.0


def time_s(policy: str = "bsp", workers: int = 2, iterations: int = 6, **options: object) -> float:
    run = simulate("quadratic", policy, workers=workers, iterations=iterations, **options)  # type: ignore[arg-type]
    assert run.metrics.time_s == run.time_s == run.history[-1].time_s
    return run.time_s


def test_a_timer_that_nobody_lives_to_see_takes_no_time() -> None:
    assert time_s("deadline:factor=50") == time_s("bsp")


def test_nor_does_a_fault_after_the_end() -> None:
    for kind in ("crash", "pause", "leave", "restart", "join"):
        late = Cluster(faults=(Fault(kind, 1, at_s=500.0, for_s=3.0),))  # type: ignore[arg-type]
        assert time_s(cluster=late) == time_s()
        assert time_s("hop:graph=ring", workers=4, cluster=late) == time_s("hop:graph=ring", workers=4)


def test_who_is_to_join_is_waited_for_when_all_are_lost() -> None:
    gone = Cluster(faults=(*(Fault("crash", rank, at_s=0.15) for rank in range(2)), Fault("join", 1, at_s=3.0)))
    run = simulate("quadratic", "bsp", workers=2, iterations=6, cluster=gone)
    assert run.time_s == pytest.approx(3.0 + 5 * 0.1, abs=0.05)
    back = Cluster(faults=tuple(Fault("restart", rank, at_s=0.15, for_s=2.0) for rank in range(2)))
    assert simulate("quadratic", "bsp", workers=2, iterations=6, cluster=back).time_s > 2.5


def test_without_tensors_too() -> None:
    def end(policy: str) -> float:
        simulation = Simulation(SimulationPlan(parse(policy), Cluster(), Members(2, 1), 6))
        simulation.run()
        return simulation.engine.now

    assert end("deadline:factor=50") == end("bsp")


class TestPause:
    @pytest.mark.parametrize("for_s", [0.3, 0.7, 2.5])
    def test_the_computation_under_way_takes_as_much_longer(self, for_s: float) -> None:
        def took(*faults: Fault) -> float:
            return time_s(workers=1, cluster=Cluster(compute_s=ONE_SECOND, faults=faults))

        assert took(Fault("pause", 0, at_s=3.2, for_s=for_s)) == pytest.approx(took() + for_s)
        twice = took(Fault("pause", 0, at_s=3.2, for_s=for_s), Fault("pause", 0, at_s=3.4, for_s=0.5))
        assert twice == pytest.approx(took() + for_s + 0.5)

    def test_layer_by_layer_too(self) -> None:
        def took(*faults: Fault) -> float:
            cluster = Cluster(compute_s=ONE_SECOND, faults=faults)
            return simulate("digits-mlp", "asp", workers=1, iterations=4, by_layer=True, cluster=cluster).time_s

        assert took(Fault("pause", 0, at_s=2.2, for_s=0.25)) == pytest.approx(took() + 0.25)


@dataclass(frozen=True)
class Stuck(CentralPolicy):
    """Nobody reads beyond iteration 3."""

    on_arrival = True

    def may_pull(self, i: int, V: int) -> bool:
        return i < 3

    def freed_at(self, i: int, V: int) -> int:
        return i + 100


def test_a_deadlock_is_an_error_that_names_who_is_parked() -> None:
    with pytest.raises(PacelineError, match=r"stuck: nobody can go on after 0\.4. s: worker 0 is parked by server 0, "):
        simulate("quadratic", Stuck(), workers=3, iterations=8)
    with pytest.raises(PacelineError, match="worker 0 is without an answer; worker 1 is"):
        Simulation(SimulationPlan(Stuck(), Cluster(), Members(3, 1), 8)).run()
