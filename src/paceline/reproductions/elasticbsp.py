"""elasticbsp: do barriers that are planned where all arrive together beat BSP's?

Zhao et al. 2021, section 6.2, Figures 11 to 14.

The paper. Four machines with equal GPUs on a shared switch; what makes stragglers is the network. VGG-16 on ImageNet,
three fully connected layers: many parameters and little computing for them. ElasticBSP "converges 1.77x faster" than
BSP and ends 12.6 % higher within the same 24 hours; SSP and ASP "fail to learn" (Fig. 14; the same picture for a small
network with two such layers, Fig. 11). ResNet-110: computing dominates, and "ElasticBSP converges at a similar rate
to BSP" (Fig. 13). R from 15 to 960 makes "only a small variance".

Here. Four workers whose connections differ: a push and its answer take 20, 40, 60 and 100 ms together, and computing
varies a little (log-normal, sigma 0.2). The *fully connected* model (digits-mlp) computes 20 ms an iteration, the
*convolutional* one (digits-cnn) 400 ms: the same network, and two shares of it. Time to a test accuracy, the median
of three seeds as in the paper, at several learning rates, never one chosen cell. Then, without tensors: what planning
gains as computing grows, and how much better than by the latest interval noisy workers can be predicted.

What differs. Small models and data, one server with a fast line of its own. The paper does not say how long its delays
were; ours are chosen, so the size of a gain means little and its direction much. Gradients that arrive one by one are
applied with lr/N, so that a rate means the same in every policy; in the paper asynchronous steps take the whole rate
(eq. 4 and 5), which is four times as bold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from paceline import cluster as clusters
from paceline import policies
from paceline.api import simulate
from paceline.cluster import Cluster, Link, Slowdown
from paceline.core.actions import Apply
from paceline.core.events import ViewChanged
from paceline.core.messages import Members
from paceline.core.spec import write_value
from paceline.core.trace import Trace
from paceline.report.barriers import barriers, totals
from paceline.reproductions.base import Claim, Findings, Reproduction, Row, Say
from paceline.run import Run
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan

ROUND_TRIPS_S = (0.02, 0.04, 0.06, 0.1)
"""The round trip of each of the four workers: a push and its answer together."""
LATEST, MEAN, MEDIAN = "latest", "mean", "median"


@dataclass(frozen=True)
class Model:
    """A workload that stands for a network of the paper."""

    name: str
    workload: str
    compute_s: float
    rates: tuple[float, ...]
    accuracy: float
    """The accuracy to reach."""


CONNECTED = Model("fully connected", "digits-mlp", 0.02, (0.1, 0.3, 1.0), 0.93)
CONVOLUTIONAL = Model("convolutional", "digits-cnn", 0.4, (0.1, 0.2), 0.93)


@dataclass(frozen=True)
class ElasticBSPs(Reproduction, name="elasticbsp", paper="Zhao et al. 2021, section 6.2, Fig. 11-14"):
    """ElasticBSP is 1.77x faster than BSP with fully connected layers, and little faster where computing dominates."""

    models: tuple[Model, ...] = (CONNECTED, CONVOLUTIONAL)
    lookaheads: tuple[int, ...] = (15, 60, 240)
    seeds: int = 3
    iterations: int = 600
    compute_s: tuple[float, ...] = (0.01, 0.05, 0.1, 0.2, 0.4, 0.8)
    rounds: int = 400

    @property
    def policies(self) -> dict[str, str]:
        elastic = {f"elastic R={R}": f"elastic:lookahead={R}" for R in self.lookaheads}
        return {"bsp": "bsp", **elastic, "ssp 3": "ssp:staleness=3", "dssp 3-15": "dssp:low=3,high=15", "asp": "asp"}

    @property
    def noises(self) -> dict[str, tuple[Slowdown, ...]]:
        """What makes iterations of unequal length, besides speeds that differ for good."""
        texts = {
            "none": "steady",
            "log-normal 0.1": "lognormal:sigma=0.1",
            "log-normal 0.3": "lognormal:sigma=0.3",
            "6x in 1 of 8": "random-slowdown:factor=6,probability=0.125",
        }
        return {name: (Slowdown(clusters.load(text)),) for name, text in texts.items()}

    @property
    def steps(self) -> int:
        learning = sum(len(model.rates) for model in self.models) * len(self.policies)
        return learning + len(self.compute_s) + len(self.noises)

    def measure(self, seed: int, say: Say) -> Findings:
        findings = Findings()
        for model in self.models:
            for rate in model.rates:
                findings.rows += self.learn(model, rate, seed, say)
        findings.rows += [self.throughput(compute_s, seed, say) for compute_s in self.compute_s]
        for noise, slowdowns in self.noises.items():
            findings.rows += self.predict(noise, slowdowns, seed)
            say(f"predictors, noise {noise}")
        findings.claims = claims(findings.rows, self.lookaheads)
        return findings

    def learn(self, model: Model, rate: float, seed: int, say: Say) -> list[Row]:
        """Measures the time to an accuracy with real gradients, by policy."""
        runs: dict[str, list[Run]] = {}
        for name, policy in self.policies.items():
            runs[name] = [
                simulate(
                    model.workload, policy, workers=len(ROUND_TRIPS_S), cluster=network(model.compute_s),
                    iterations=self.iterations, target=f"accuracy={model.accuracy}", optimizer=f"sgd:lr={rate}",
                    seed=seed + index, device=self.device,
                )
                for index in range(self.seeds)
            ]  # fmt: skip
            say(f"{model.name}, lr {rate:g}, {name}: {format_time(reached_s(runs[name]))}")
        base, moment_s = reached_s(runs["bsp"]), reached_s(runs[f"elastic R={self.lookaheads[0]}"])
        rows = []
        for name, several in runs.items():
            reached = reached_s(several)
            rows.append(
                {
                    "model": model.name, "lr": rate, "policy": name, "s_to_accuracy": reached,
                    "times_bsp": base / reached if base and reached else None,
                    "accuracy_then": median(accuracy_at_s(run, moment_s) for run in several),
                    "waiting_%": 100 * median(run.metrics.wait_share for run in several),
                    "staleness": median(run.metrics.staleness["mean"] for run in several),
                }
            )  # fmt: skip
        return rows

    def throughput(self, compute_s: float, seed: int, say: Say) -> Row:
        """Measures gradients per second while all four are at work, without tensors."""
        rates = {}
        for name, policy in (("bsp", "bsp"), ("elastic", "elastic")):
            trace = timed(policy, network(compute_s), len(ROUND_TRIPS_S), self.rounds, seed)
            rates[name] = gradients_per_s(trace)
        say(f"computing {compute_s:g} s: {rates['elastic'] / rates['bsp']:.2f} times as many gradients as bsp")
        slowest_to_fastest = (compute_s + ROUND_TRIPS_S[-1]) / (compute_s + ROUND_TRIPS_S[0])
        return {
            "computing_s": compute_s, "slowest/fastest": slowest_to_fastest, "bsp_gradients/s": rates["bsp"],
            "elastic_gradients/s": rates["elastic"], "times_bsp_gradients": rates["elastic"] / rates["bsp"],
        }  # fmt: skip

    def predict(self, noise: str, slowdowns: tuple[Slowdown, ...], seed: int) -> list[Row]:
        """Measures waits per iteration of the slowest of eight workers, the slowest half as fast as the fastest,
        without tensors."""
        speeds = write_value(tuple(1 + worker / 7 for worker in range(8)))
        cluster = replace(clusters.load(f"factors:by_worker={speeds}"), also=slowdowns)
        rows = []
        for predictor in (LATEST, MEAN, MEDIAN):
            trace = timed(f"elastic:predict={predictor}", cluster, 8, self.rounds, seed)
            met = totals(barriers(trace))
            each = 1000 / met["rounds"] if met["rounds"] else 0.0
            rows.append(
                {
                    "noise": noise, "predictor": predictor, "barriers": int(met["count"]),
                    "planned_ms": met["planned_wait_s"] * each, "waited_ms": met["wait_s"] * each,
                    "bsp_ms": met["bsp_wait_s"] * each,
                }
            )  # fmt: skip
        return rows


def network(compute_s: float) -> Cluster:
    links = tuple(Link((worker,), latency_s=there_and_back / 2) for worker, there_and_back in enumerate(ROUND_TRIPS_S))
    return replace(clusters.load(f"lognormal:sigma=0.2,compute_s={compute_s}"), links=links)


def timed(policy: str, cluster: Cluster, workers: int, iterations: int, seed: int) -> Trace:
    """Returns the trace of a run without tensors, up to where the first worker has done its iterations."""
    plan = SimulationPlan(policies.parse(policy), cluster, Members(workers, 1), iterations, seed, checked=True)
    simulation = Simulation(plan)
    simulation.run()
    records = simulation.trace.records
    left = (
        i for i, record in enumerate(records) if isinstance(record.event, ViewChanged) and record.event.view.number > 1
    )
    return Trace(simulation.trace.header, records[: next(left, None)])


def gradients_per_s(trace: Trace) -> float:
    used = sum(len(action.handles) for record in trace for action in record.actions if isinstance(action, Apply))
    return used / trace.records[-1].event.at


def reached_s(runs: Sequence[Run]) -> float | None:
    """Returns the median time to the target, if at least half of the runs reached it."""
    times = sorted(float("inf") if run.time_to_target_s is None else run.time_to_target_s for run in runs)
    middle = times[(len(times) - 1) // 2]
    return middle if middle < float("inf") else None


def accuracy_at_s(run: Run, time_s: float | None) -> float:
    """Returns the last accuracy measured by then."""
    points = [point for point in run.history if time_s is None or point.time_s <= time_s]
    return points[-1].accuracy or 0.0


def format_time(time_s: float | None) -> str:
    return "not reached" if time_s is None else f"{time_s:.1f} s"


def claims(rows: list[Row], lookaheads: tuple[int, ...]) -> list[Claim]:
    learned = [row for row in rows if "model" in row]
    first = f"elastic R={lookaheads[0]}"

    def column(key: str, model: Model, policy: str) -> list[float]:
        """Returns one number for each learning rate; 0 where the accuracy was not reached."""
        return [row[key] or 0.0 for row in learned if (row["model"], row["policy"]) == (model.name, policy)]

    connected = column("times_bsp", CONNECTED, first)
    convolutional = column("times_bsp", CONVOLUTIONAL, first)
    then, bsp_then = column("accuracy_then", CONNECTED, first), column("accuracy_then", CONNECTED, "bsp")
    ssp, asp = column("times_bsp", CONNECTED, "ssp 3"), column("times_bsp", CONNECTED, "asp")
    by_R = [column("times_bsp", model, f"elastic R={R}") for model in (CONNECTED, CONVOLUTIONAL) for R in lookaheads]
    spreads = [max(times) / min(times) if all(times) else 0.0 for times in zip(*by_R[: len(lookaheads)], strict=True)]
    gradients = [(row["computing_s"], row["times_bsp_gradients"]) for row in rows if "computing_s" in row]
    waited = {(row["noise"], row["predictor"]): row for row in rows if "noise" in row}
    worst = waited["log-normal 0.3", LATEST]
    better = waited["log-normal 0.3", MEDIAN]
    return [
        Claim(
            "With fully connected layers it converges faster than BSP",
            "1.77x (VGG-16)",
            f"{spread_of(connected)} over the learning rates",
            min(connected) > 1.1,
        ),
        Claim(
            "and has learned more in the same time",
            "12.6 % higher accuracy after 24 hours",
            ", ".join(f"{mine:.3f} against {theirs:.3f}" for mine, theirs in zip(then, bsp_then, strict=True)),
            all(mine > theirs for mine, theirs in zip(then, bsp_then, strict=True)),
            "when it reaches its accuracy; BSP gets there later",
        ),
        Claim(
            "Where computing dominates it converges at a similar rate to BSP",
            "about equal (ResNet-110)",
            f"{spread_of(convolutional)}; gradients per second "
            + ", ".join(f"{times:.2f}x with {1000 * compute_s:g} ms of computing" for compute_s, times in gradients),
            min(convolutional) > 0.85 and max(convolutional) < 1.15,
        ),
        Claim(
            "With fully connected layers SSP and ASP do worse: they fail to learn",
            "ASP unable to learn, SSP hardly",
            f"SSP {spread_of(ssp)}, ASP {spread_of(asp)} as fast as BSP, ElasticBSP {spread_of(connected)}",
            all(mine > max(others) for mine, *others in zip(connected, ssp, asp, strict=True)),
            "both learn. SSP waits nearly as long as BSP for the slow connection; ASP waits for nobody, and with four "
            "workers and steps of lr/N a staleness of 3 does no harm",
        ),
        Claim(
            "How far it looks ahead makes only a small difference",
            "R from 15 to 960",
            f"R from {lookaheads[0]} to {lookaheads[-1]}: the slowest takes "
            + ", ".join(f"{spread:.2f}" for spread in spreads)
            + " times as long as the fastest",
            all(0 < spread < 1.3 for spread in spreads),
            "with the largest R the accuracy may be reached before the first barrier",
        ),
        Claim(
            "A wrong prediction has a negligible effect",
            "the latest interval is taken, in a stable environment (4.1)",
            f"under log-normal noise of 0.3: planned {worst['planned_ms']:.0f} ms of waiting an iteration, waited "
            f"{worst['waited_ms']:.0f}, BSP {worst['bsp_ms']:.0f}; predicted by the median {better['waited_ms']:.0f}",
            worst["waited_ms"] < 2 * worst["planned_ms"],
            "where iterations vary by themselves the latest one predicts little, and the gain is lost; "
            "predict=mean and predict=median keep more of it",
        ),
    ]


def spread_of(times: list[float]) -> str:
    low, high = f"{min(times):.2f}x", f"{max(times):.2f}x"
    return low if low == high else f"{low} to {high}"
