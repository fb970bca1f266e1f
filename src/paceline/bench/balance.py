"""`paceline bench balance`: what workers of unequal speed do together, with equal and with balanced batches, live.

Each worker sleeps as long as its batch takes at its speed, so what is measured is who waits for whom and what an
exchange costs. The throughput of a run is what all push a second, the summed throughput what they would push if nobody
waited and an exchange took no time. The first iterations, in which speeds are not known, do not count. A second run has
the fastest worker become slower in the middle, a third replays the step times of a production job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline import cluster as clusters
from paceline.api import launch
from paceline.bench.drawing import Step
from paceline.cluster import Cluster
from paceline.cluster.models import Factors, OneSlow, Slowdown
from paceline.core.actions import Compute
from paceline.core.events import GradientReady
from paceline.optim import Optimizer
from paceline.run import Run
from paceline.sampling import BatchSampler

WARM_UP = 12
"""The first iterations do not count."""
SLOWER = 3.0
"""How many times slower the fastest worker becomes."""
FOLLOWS_WITHIN = 15
"""In so many iterations sizes are to have followed."""
GOOD = 0.93
"""The share of the summed throughput that balanced batches are to have."""
LOOKS_AT = 3
"""So many iterations together are good again, or are not."""
PRODUCTION = "production-one-slow-rank"


@dataclass(frozen=True)
class Setting:
    speeds: tuple[float, ...]
    """Of each worker, in any unit."""
    batch: int
    compute_s: float
    """How long the fastest worker takes for an equal batch."""
    iterations: int

    def cluster(self) -> Cluster:
        fastest = max(self.speeds)
        return Factors(compute_s=self.compute_s, by_worker=tuple(fastest / speed for speed in self.speeds))

    @property
    def summed(self) -> float:
        """What all workers compute together if nobody waits, in samples a second."""
        return sum(self.speeds) / max(self.speeds) * self.batch / self.compute_s


@dataclass
class Result:
    """Shares are of the summed throughput."""

    speeds: tuple[float, ...]
    balanced: float
    equal: float
    again: float
    """The share after a worker has become slower, from the iteration on in which sizes are to have followed."""
    followed_after: int | None
    """After how many iterations it was good again."""
    production: float
    """How many times as fast as with equal batches a production job with one slow rank is."""


def train(batch: int, balance: bool, samples: int) -> None:
    """Draws its batches and does next to nothing with them: computing is a sleep of the scenario."""
    data = range(samples)
    model = nn.Linear(1, 1)
    opt = Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
    for drawn in DataLoader(data, batch_sampler=BatchSampler(data, batch, balance)):  # type: ignore[arg-type]
        opt.zero_grad()
        model(drawn[:1, None].float()).sum().backward()
        opt.step()


def steps_of(run: Run) -> list[list[Step]]:
    """Returns every worker's steps, by rank."""
    began: dict[tuple[int, int], float] = {}
    steps: dict[int, list[Step]] = {}
    for record in run.trace:
        rank, event = record.node.rank, record.event
        if record.node.role != "worker":
            continue
        if isinstance(event, GradientReady):
            steps.setdefault(rank, []).append(Step(began[rank, event.iteration], event.at, event.weight))
        for action in record.actions:
            if isinstance(action, Compute):
                began[rank, action.iteration] = event.at
    return [steps[rank] for rank in sorted(steps)]


def pushed_a_second(steps: list[list[Step]], first: int, last: int) -> float:
    """Returns the samples pushed a second from the beginning of iteration `first` to that of `last`."""
    last = min(last, min(map(len, steps)) - 1)
    samples = sum(step.samples for mine in steps for step in mine[first:last])
    return samples / (min(mine[last].began for mine in steps) - min(mine[first].began for mine in steps))


def run_once(setting: Setting, balance: bool, cluster: Cluster, iterations: int) -> list[list[Step]]:
    samples = len(setting.speeds) * setting.batch * iterations
    work = partial(train, setting.batch, balance, samples)
    return steps_of(launch(work, workers=len(setting.speeds), policy="bsp", cluster=cluster))


def measure(setting: Setting) -> tuple[Result, list[list[Step]], list[list[Step]]]:
    """Returns the result, and the steps of the runs with equal and with balanced batches."""
    equal = run_once(setting, False, setting.cluster(), setting.iterations // 2)
    balanced = run_once(setting, True, setting.cluster(), setting.iterations)
    again, followed_after = change(setting)
    jobs = clusters.load(f"{PRODUCTION}:compute_s={setting.compute_s}")
    production = [
        pushed_a_second(run_once(four, balance, jobs, setting.iterations), WARM_UP, setting.iterations)
        for four in [replace(setting, speeds=(1.0,) * 4)]
        for balance in (False, True)
    ]
    result = Result(
        setting.speeds,
        pushed_a_second(balanced, WARM_UP, setting.iterations) / setting.summed,
        pushed_a_second(equal, 1, setting.iterations) / setting.summed,
        again,
        followed_after,
        production[1] / production[0],
    )
    return result, equal, balanced


def change(setting: Setting) -> tuple[float, int | None]:
    """Has the fastest worker become slower; returns the share afterwards, and when it was good again."""
    at, last = setting.iterations // 2, setting.iterations // 2 + 2 * FOLLOWS_WITHIN
    fastest = setting.speeds.index(max(setting.speeds))
    slower = Slowdown(OneSlow(factor=SLOWER, worker=fastest), from_iteration=at)
    steps = run_once(setting, True, replace(setting.cluster(), also=(slower,)), last + 1)
    speeds = [speed / (SLOWER if rank == fastest else 1) for rank, speed in enumerate(setting.speeds)]
    summed = setting.summed * sum(speeds) / sum(setting.speeds)
    shares = {each - at: pushed_a_second(steps, each, each + LOOKS_AT) / summed for each in range(at, last - LOOKS_AT)}
    followed = next((after for after, share in shares.items() if share >= GOOD), None)
    return pushed_a_second(steps, at + FOLLOWS_WITHIN, last) / summed, followed
