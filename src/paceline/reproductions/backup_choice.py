"""backup-choice: of 100 machines, how many should be backups?

Chen et al. 2016, section 3.1, Figures 3 to 6.

The paper. An iteration of 100 machines waits long for its last few gradients (Fig. 3, 4). Doing without b of them
makes iterations shorter, but the batch smaller, so that more of them are needed: 76 200 with N = 100, 137 500 with
N = 50 (Fig. 5). Iterations needed times the mean time of the N-th gradient is smallest with N = 96, b = 4 (Fig. 6).
The paper estimates this product, from a run with b = 0 and five runs with other N; it does not run N = 96.

Here. digits-mlp on 100 virtual machines with stragglers as Figure 3 has them (`revisiting_cluster.py`), to a test loss
of 0.2; learning rate proportional to N, as in the paper (A.2). Each N is really run, with `backup:extra=100-N`, so
there is a *measured* time beside the paper's *estimated* one. The same estimate for two other clusters, whose iteration
times are log-normal or Pareto on every machine, shows how far the answer depends on the stragglers.

What differs. A small model; plain SGD where the paper has RMSProp with momentum; the speed of the machines is drawn
from a model that was fitted to three numbers of the paper's text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline import cluster as clusters
from paceline.api import simulate
from paceline.cluster import Cluster
from paceline.reproductions.base import Claim, Findings, Reproduction, Say
from paceline.reproductions.revisiting_cluster import RareStragglers

RATE = 0.002
"""The learning rate for each gradient of the mean."""
DRAWN = 1000
"""So many iterations are drawn for the mean time of the N-th gradient."""
PAPER_ITERATIONS = {50: 137_500, 100: 76_200}


@dataclass(frozen=True)
class BackupChoice(Reproduction, name="backup-choice", paper="Chen et al. 2016, Fig. 3-6"):
    """Of 100 machines, 96 and 4 backups converge fastest."""

    machines: int = 100
    waited_for: tuple[int, ...] = (50, 70, 80, 90, 92, 94, 95, 96, 97, 98, 99, 100)
    """N, the number of gradients an iteration waits for; the last is all of them."""
    interpolated: tuple[int, ...] = (50, 70, 80, 90, 100)
    """Those of `waited_for` that the estimate is made from, as in the paper."""
    loss: float = 0.2

    @property
    def steps(self) -> int:
        return len(self.waited_for)

    def measure(self, seed: int, say: Say) -> Findings:
        rare, iterations, measured_s = RareStragglers(), {}, {}
        for n in self.waited_for:
            run = simulate(
                "digits-mlp", f"backup:extra={self.machines - n}", workers=self.machines, cluster=rare, batch=4,
                optimizer=f"sgd:lr={RATE * n}", target=f"loss={self.loss}", seed=seed, device=self.device,
            )  # fmt: skip
            iterations[n] = run.history[-1].updates
            measured_s[n] = run.time_s
            say(f"N = {n}, b = {self.machines - n}: {iterations[n]} iterations, {run.time_s:.0f} s")
        every = np.arange(self.interpolated[0], self.machines + 1)
        needed = np.interp(every, self.interpolated, [iterations[n] for n in self.interpolated])
        arrivals = {
            "rare stragglers": self.arrivals(rare, seed),
            "log-normal": self.arrivals(clusters.load("lognormal:sigma=0.5,compute_s=1.5"), seed),
            "pareto": self.arrivals(clusters.load("pareto:shape=2,compute_s=1.5"), seed),
        }
        estimated_s = {name: needed * there.mean(1)[every - 1] for name, there in arrivals.items()}
        best = {name: int(every[seconds.argmin()]) for name, seconds in estimated_s.items()}
        rows = [
            {
                "N": n, "b": self.machines - n, "iterations": iterations[n],
                "nth_gradient_s": float(arrivals["rare stragglers"].mean(1)[n - 1]), "measured_s": measured_s[n],
                **{f"estimate_s {name}": float(seconds[n - every[0]]) for name, seconds in estimated_s.items()},
            }
            for n in self.waited_for
        ]  # fmt: skip
        return Findings(rows, self.claims(iterations, measured_s, best, arrivals["rare stragglers"]))

    def arrivals(self, cluster: Cluster, seed: int) -> NDArray[np.float64]:
        """Returns, at [k, i], the seconds until k + 1 gradients of iteration i are there when everybody waits for
        all."""
        durations = [cluster.durations(worker, self.machines, seed) for worker in range(self.machines)]
        return np.sort([[draw() for _ in range(DRAWN)] for draw in durations], axis=0)

    def claims(
        self,
        iterations: dict[int, int],
        measured_s: dict[int, float],
        best: dict[str, int],
        arrivals: NDArray[np.float64],
    ) -> list[Claim]:
        few, every = self.waited_for[0], self.machines
        third, last = ((arrivals[every - 1 - left] < 2).mean() for left in (2, 0))
        ratio = iterations[few] / iterations[every]
        fastest = min(measured_s, key=lambda n: measured_s[n])
        near = range(round(0.94 * every), every)
        paper_ratio = PAPER_ITERATIONS[50] / PAPER_ITERATIONS[100]
        return [
            Claim(
                "The last gradients of an iteration are the ones that take long",
                "the 98th of 100 within 2 s in 80 % of iterations, the last in 30 %; the latest took 310 s",
                f"the third last within 2 s in {100 * third:.0f} %, the last in {100 * last:.0f} %; the latest took "
                f"{arrivals.max():.0f} s",
                bool(third > 0.7 and last < 0.4),
                "put into the model, so no finding",
            ),
            Claim(
                "Half as many gradients in the mean: nearly twice as many iterations",
                f"N = 50 needs {paper_ratio:.2f}x as many as N = 100",
                f"N = {few} needs {ratio:.2f}x as many as N = {every}",
                1.5 < ratio < 2.2,
            ),
            Claim(
                "A few backups are best, by the paper's estimate",
                "N = 96, b = 4",
                f"N = {best['rare stragglers']}, b = {every - best['rare stragglers']}",
                best["rare stragglers"] in near,
            ),
            Claim(
                "A few backups are best, measured",
                "not measured",
                f"N = {fastest}, b = {every - fastest}: {measured_s[every] / measured_s[fastest]:.2f}x as fast as "
                "without backups",
                fastest in near,
                "" if fastest in near else "a straggler is still busy in the iterations after, so more are needed",
            ),
            Claim(
                "Some backups beat none on other clusters too, by the same estimate",
                "not examined",
                f"N = {best['log-normal']} for log-normal times, N = {best['pareto']} for Pareto times",
                best["pareto"] < every and best["log-normal"] < every,
                "but how many depends on the stragglers: 96 is no constant of the method",
            ),
        ]
