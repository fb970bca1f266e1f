"""`paceline bench` without processes: the virtual runtime, its gradients, and what a scheduler searches for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.bench import gradients, local_rounds, simulator, tuner, zipline
from paceline.commands.benchmark import Benchmark, print_rows
from paceline.commands.terminal import print_plain
from paceline.tensors.devices import check_device


@dataclass(kw_only=True)
class BenchGradients(Benchmark):
    """Gradients of many virtual workers, computed in one go and one by one: what batching saves the simulator.

    paceline bench gradients --workload digits-mlp digits-cnn --workers 100 --json gradients.json
    paceline bench gradients --device cuda
    """

    workload: tuple[str, ...] = ()
    """Which workloads; if none, small ones on the CPU, larger ones with synthetic data on a GPU."""
    device: str = "cpu"
    """Where gradients are computed: cpu, cuda, cuda:1."""
    workers: int = 100
    """Gradients computed together."""
    rounds: int = 15
    """Interleaved rounds; the fastest of each counts."""

    def measure(self) -> dict[str, Any]:
        device = check_device(self.device)
        rows = gradients.run(list(self.workload), self.workers, self.rounds, device, print_plain)
        columns = {
            "workload": "{0.workload}", "by": "{0.way}", "batched": "{0.batched_us:.0f}",
            "one by one": "{0.loop_us:.0f}", "ratio": "{0.ratio:.1f}x",
        }  # fmt: skip
        title = f"us per gradient, {self.workers} workers, {device}, {rows[0].threads} threads"
        print_rows(title, columns, rows, text=("workload", "by"))
        return {"rows": rows}


@dataclass(kw_only=True)
class BenchSimulator(Benchmark):
    """Events that the virtual runtime handles in a second of one core, timing only: ASP, SSP, SSP with one slow worker.

    paceline bench simulator --workers 10 100 1000 10000 --json simulator.json
    """

    workers: tuple[int, ...] = (10, 100, 1_000, 10_000)
    """How many workers, one after the other."""
    rounds: int = 3
    """Rounds of each; the best counts."""

    def measure(self) -> dict[str, Any]:
        rows = simulator.run(list(self.workers), self.rounds, print_plain)
        columns = {
            "policy": "{0.policy}", "cluster": "{0.cluster}", "workers": "{0.workers}",
            "us/event": "{0.us_per_event:.2f}", "events/s": "{0.events_per_s:,.0f}",
            "checked": "{0.checked_events_per_s:,.0f}", "memory": "{0.peak_mb:.0f} MB",
        }  # fmt: skip
        print_rows("virtual runtime, timing only", columns, rows, text=("policy", "cluster"))
        return {"rows": rows}


@dataclass(kw_only=True)
class BenchTuner(Benchmark):
    """SpecSync's ABORT_TIME and ABORT_RATE for an epoch of many workers, beside Algorithm 1 as the paper has it.

    paceline bench tuner --workers 40 100 1000 --json tuner.json
    """

    workers: tuple[int, ...] = (40, 100, 1_000)
    """How many workers, one after the other."""
    rounds: int = 5
    """Interleaved rounds; medians are compared."""
    seed: int = 0
    """The seed of the workers' speeds."""

    def measure(self) -> dict[str, Any]:
        rows = tuner.run(list(self.workers), self.rounds, self.seed, print_plain)
        columns = {
            "workers": "{0.workers}", "pushes": "{0.notices}", "tuner": "{0.tune_ms:.2f}",
            "paper's form": "{0.paper_form_ms:.1f}", "ratio": "{0.ratio:.0f}x",
        }  # fmt: skip
        print_rows(
            f"ms an epoch, median of {self.rounds}", columns, rows,
            missing=f"the paper's form takes too long with more than {tuner.MOST} workers",
        )  # fmt: skip
        return {"rows": rows}


@dataclass(kw_only=True)
class BenchZipline(Benchmark):
    """The plan of ElasticBSP's next barrier for many workers, beside ZipLineOptBS compiled from C++.

    paceline bench zipline --workers 1000 10000 --iterations 150 --json zipline.json
    """

    workers: tuple[int, ...] = (1_000, 10_000)
    """How many workers, one after the other."""
    iterations: int = 150
    """How many iterations of each are predicted: the paper's R."""
    rounds: int = 9
    """Interleaved rounds; medians are compared."""
    seed: int = 0
    """The seed of the workers' speeds."""

    def measure(self) -> dict[str, Any]:
        rows = zipline.run(list(self.workers), self.iterations, self.rounds, self.seed, print_plain)
        columns = {
            "workers": "{0.workers}", "iterations": "{0.iterations}", "plan": "{0.plan_ms:.2f}",
            "ZipLineOptBS in C++": "{0.opt_bs_ms:.1f}", "ratio": "{0.ratio:.1f}x",
            "the paper's": "{0.paper_opt_bs_ms:g}",
        }  # fmt: skip
        print_rows(
            f"ms a plan, median of {self.rounds}", columns, rows,
            missing="there is no compiler for the search in C++, or the paper has no figure for this size",
        )  # fmt: skip
        return {"rows": rows}


@dataclass(kw_only=True)
class BenchRounds(Benchmark):
    """Rounds of local steps under bsp: a fixed number, by time, in proportion to speed, as ZipLine plans.

    paceline bench rounds --json rounds.json                      # some minutes
    paceline bench rounds --cluster lognormal:sigma=0.5 --rounds 32 "auto(at_least=8,at_most=64)" --target none
    """

    cluster: tuple[str, ...] = (
        "factors:by_worker=1:1:1.5:2,compute_s=0.02",
        "factors:by_worker=1:2:4:8,compute_s=0.02",
        "lognormal:sigma=0.5,compute_s=0.02",
        "random-slowdown:factor=6,compute_s=0.02",
        "production-healthy:compute_s=0.02",
        "production-one-slow-rank:compute_s=0.02",
        "production-uneven-sequences:compute_s=0.02",
    )
    """Who is slow, and when."""
    rounds: tuple[str, ...] = ("32", local_rounds.BY_TIME, "proportional(at_most=48)", "auto")
    """The rules, as after local_steps=; every_s is the time of 32 steps in the mean."""
    workers: int = 8
    """How many workers train, where the scenario does not say."""
    steps: int = 4000
    """Local steps of each worker in the runs that waiting is measured in."""
    seeds: int = 3
    """How many seeds; the median time to the target counts."""
    workload: str = "digits-mlp"
    """What is trained to the target."""
    target: str = "accuracy=0.95"
    """What to reach; none measures waiting alone."""

    def measure(self) -> dict[str, Any]:
        target = "" if self.target == "none" else self.target
        setting = local_rounds.Setting(self.workers, self.steps, tuple(range(self.seeds)), self.workload, target)
        rows = local_rounds.run(setting, self.cluster, self.rounds, print_plain)
        columns = {
            "rounds": "{0.rounds}", "waiting": "{0.waiting:.1%}", "a round": "{0.wait_s:.3f} s",
            "steps": "{0.steps:.0f}", "to target": "{0.time_to_target_s:.2f} s",
            "local steps": "{0.local_steps:.0f}", "bytes": "{0.bytes:,.0f}",
        }  # fmt: skip
        for scenario in self.cluster:
            mine = [row for row in rows if row.cluster == scenario]
            title = f"{scenario}: rounds under bsp{f', to {target}' if target else ''}"
            print_rows(title, columns, mine, text=("rounds",), missing="not measured, or most runs missed it")
            for row in mine:
                if row.why:
                    print_plain(f"{row.rounds} waits no less than others: {row.why}")
        return {"rows": rows}
