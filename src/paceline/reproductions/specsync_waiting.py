"""specsync-waiting: does it help to wait a little before reading?

Zhang et al. 2018, section III, Figures 3 and 5.

The paper. ASP on 40 machines, iterations of about 14 s. In every second after a worker has pulled, about as many pushes
of others arrive (Fig. 3); the median of the first two seconds together is over 6. So the pull is delayed by a constant,
"naive waiting": 1 s helps, 3 s hardly, 5 s does harm (Fig. 5a, CIFAR-10).

Here. digits-mlp, plain SGD, one image batch as usual for it, 40 workers with log-normal iterations of 14 s
(`specsync_clusters.py`). `waiting` with the paper's delays against `asp`, for a row of learning rates: the whole row is
shown, since what fresher parameters are worth depends on how near the rate is to where ASP diverges. Medians of a few
seeds, none picked.

What differs. A small model in virtual time; what the paper calls a learning rate is for a 110-layer network.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.api import simulate
from paceline.core.actions import Answer
from paceline.core.events import PushArrived
from paceline.reproductions.base import Claim, Findings, Reproduction, Row, Say
from paceline.reproductions.specsync_clusters import (
    ITERATION_S,
    converged,
    format_ratio,
    format_time,
    homogeneous,
    median_time,
    speed_up,
)
from paceline.run import Run

PERCENTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class SpecSyncWaiting(Reproduction, name="specsync-waiting", paper="Zhang et al. 2018, Fig. 3, 5"):
    """Waiting a second before each pull helps, waiting five does harm; pushes arrive evenly after a pull."""

    workers: int = 40
    rates: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5)
    delays_s: tuple[float, ...] = (0.0, 1.0, 3.0, 5.0)
    iterations: int = 140
    seeds: int = 3
    loss: float = 0.4
    """The loss that counts as converged."""

    @property
    def steps(self) -> int:
        return len(self.rates) * len(self.delays_s)

    def measure(self, seed: int, say: Say) -> Findings:
        rows = [self.row(rate, seed, say) for rate in self.rates]
        arrivals = arrivals_after_pulls(self.run_one(self.rates[0], 0.0, seed))
        spread = [
            {"seconds_after_pull": f"{second}-{second + 1}", **percentiles(counts)}
            for second, counts in enumerate(arrivals)
        ]
        return Findings([*rows, *spread], [self.claim_of_arrivals(arrivals), *self.claims_of_waiting(rows)])

    def run_one(self, rate: float, delay_s: float, seed: int) -> Run:
        return simulate(
            "digits-mlp", f"waiting:delay_s={delay_s:g}" if delay_s else "asp", workers=self.workers,
            cluster=homogeneous(), iterations=self.iterations, optimizer=f"sgd:lr={rate},momentum=0", seed=seed,
            device=self.device,
        )  # fmt: skip

    def row(self, rate: float, seed: int, say: Say) -> Row:
        times: Row = {}
        staleness: Row = {}
        for delay_s in self.delays_s:
            runs = [self.run_one(rate, delay_s, seed + offset) for offset in range(self.seeds)]
            points = [converged(run, self.loss) for run in runs]
            times[f"s_at_{delay_s:g}_s"] = median_time([point and point.time_s for point in points])
            staleness[f"staleness_{delay_s:g}_s"] = fmean(run.metrics.staleness["mean"] for run in runs)
            say(f"learning rate {rate}, delay {delay_s:g} s: {format_time(times[f's_at_{delay_s:g}_s'])}")
        return {"lr": rate, **times, **staleness}

    def claim_of_arrivals(self, arrivals: list[list[int]]) -> Claim:
        means = [fmean(counts) for counts in arrivals]
        two = float(np.median([first + second for first, second in zip(*arrivals[:2], strict=True)]))
        even = max(means) < 1.25 * min(means)
        return Claim(
            "In every second after a pull about as many pushes of others arrive",
            "approximately uniform; the median of the first two seconds is over 6",
            f"{min(means):.2f} to {max(means):.2f} in the mean; the median of the first two seconds is {two:g}",
            even,
            "" if even else "the largest is more than 1.25 times the smallest",
        )

    def claims_of_waiting(self, rows: list[Row]) -> list[Claim]:
        """Makes one claim for each delay, over the whole row of rates."""
        paper = {1.0: ("helps", "significantly faster"), 3.0: ("makes little difference", "little benefit")}
        claims = []
        for delay_s in self.delays_s[1:]:
            verb, figure = paper.get(delay_s, ("does harm", "more harm than good"))
            ratios = {row["lr"]: speed_up(row["s_at_0_s"], row[f"s_at_{delay_s:g}_s"]) for row in rows}
            known = [ratio for ratio in ratios.values() if ratio is not None]
            holds = bool(known) and all(
                ratio > 1 if verb == "helps" else ratio < 1 if verb == "does harm" else 0.9 < ratio < 1.1
                for ratio in known
            )
            ours = ", ".join(f"{format_ratio(ratio)} at lr {rate}" for rate, ratio in ratios.items())
            some = "it depends on the learning rate: fresh parameters matter near where ASP diverges"
            title = f"Waiting {delay_s:g} s of {ITERATION_S:g} {verb}"
            claims.append(Claim(title, figure, ours, holds, "" if holds else some))
        return claims


def arrivals_after_pulls(run: Run) -> list[list[int]]:
    """Returns, for each second after a pull, up to an iteration, how many pushes of others came in it, pull by pull."""
    pushes: list[float] = []
    by_worker: dict[int, list[float]] = {}
    pulls: list[tuple[float, int]] = []
    for record in run.trace:
        if isinstance(record.event, PushArrived):
            pushes.append(record.event.at)
            by_worker.setdefault(record.event.push.handle.source, []).append(record.event.at)
        if record.node.role == "server":
            pulls += [(record.event.at, a.parameters.worker) for a in record.actions if isinstance(a, Answer)]
    # Everybody starts together: let that die away, and leave out pulls whose iteration goes beyond the end.
    seconds = int(ITERATION_S)
    pulls = [(at, worker) for at, worker in pulls if 20 * ITERATION_S < at < pushes[-1] - 3 * ITERATION_S]

    def between(times: list[float], low: float, high: float) -> int:
        return bisect_right(times, high) - bisect_right(times, low)

    return [
        [
            between(pushes, at + second, at + second + 1) - between(by_worker[worker], at + second, at + second + 1)
            for at, worker in pulls
        ]
        for second in range(seconds)
    ]


def percentiles(counts: list[int]) -> Row:
    values = np.percentile(counts, PERCENTILES)
    return {"mean": fmean(counts)} | {f"p{name}": float(v) for name, v in zip(PERCENTILES, values, strict=True)}
