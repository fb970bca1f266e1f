"""backup-staleness: what stale gradients cost.

Chen et al. 2016, section 2, Figure 2 and Table 1.

The paper. A CNN on MNIST is trained with gradients that are some steps old. Its test error rises from 0.36 % at
staleness 0 to 0.47 % at 20 and 0.79 % at 50 (Fig. 2). Above 15 training is unstable: staleness had to be raised slowly
over the first three epochs, and from 20 on the learning rate had to be lowered, or the error went to 90 %. Table 1:
in an 18-layer network with 40 asynchronous workers the bottom layer's gradients are 39 updates old in the mean, the
top layer's 14.5, for parameters are read going up and gradients sent coming down.

Here, Figure 2. digits-cnn, ASP. With s + 1 workers of nearly equal speed a gradient is s updates old, and a step of
(s + 1) lr, which ASP divides by s + 1, is as long as with one worker. 25 epochs, the error is that of the moving
average of the parameters, as in the paper; the rate falls to 0 along a line. The whole row of learning rates is
shown; the best is picked on the test set (the paper picks on a validation set, which digits is too small for).

Here, Table 1. A chain of 19 small layers, 40 workers that read and push layer by layer (`by_layer`).

What differs. 1 437 images instead of 60 000: one test error is 0.28 %. Staleness cannot be raised slowly here, since
ASP with fewer workers takes longer steps; the learning rate rises from 0 over the first three epochs instead. The
moving average is shorter (0.99), for there are 50 times fewer updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from torch import nn

from paceline import workloads
from paceline.api import simulate
from paceline.reproductions.base import Claim, Findings, Reproduction, Row, Say
from paceline.workloads import Workload

BATCH = 32
RISING = 3 / 25
"""The part of a run in which the learning rate rises."""
CLUSTER = "lognormal:sigma=0.1"
FIGURE_2 = {0: 0.36, 20: 0.47, 50: 0.79}
BLOWN_UP = 50.0
"""The test error in percent from which on a run counts as blown up."""


@dataclass(frozen=True)
class BackupStaleness(Reproduction, name="backup-staleness", paper="Chen et al. 2016, Fig. 2, Table 1"):
    """Test error grows with the staleness of gradients, and lower layers have staler ones."""

    staleness: tuple[int, ...] = (0, 5, 10, 20, 50)
    rates: tuple[float, ...] = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
    epochs: int = 25
    seeds: int = 2
    """The errors are means over so many seeds."""
    workers: int = 40
    layers: int = 19

    @property
    def steps(self) -> int:
        return len(self.staleness) * len(self.rates) + 1

    def measure(self, seed: int, say: Say) -> Findings:
        workload = workloads.load("digits-cnn")
        rows = [self.row(workload, staleness, seed, say) for staleness in self.staleness]
        layers = self.by_layer(seed)
        say(f"{self.workers} workers, {self.layers} layers: {layers[0]['mean']:.1f} updates at the bottom")
        return Findings([*rows, *layers], [*claims_of_errors(rows), claim_of_layers(layers)])

    def row(self, workload: Workload, staleness: int, seed: int, say: Say) -> Row:
        """Measures the test error in percent with each learning rate, and the best."""
        errors, measured = {}, 0.0
        for rate in self.rates:
            runs = [self.error(workload, staleness, rate, each) for each in range(seed, seed + self.seeds)]
            errors[rate] = fmean(error for error, _ in runs)
            measured = runs[0][1]
            say(f"staleness {staleness}, learning rate {rate}: error {errors[rate]:.2f} %")
        best = min(errors, key=lambda rate: errors[rate])
        return {
            "staleness": staleness, "measured": measured, **{f"lr {rate}": errors[rate] for rate in self.rates},
            "best_lr": best, "best_error_%": errors[best], "paper_error_%": FIGURE_2.get(staleness),
        }  # fmt: skip

    def error(self, workload: Workload, staleness: int, rate: float, seed: int) -> tuple[float, float]:
        """Returns the test error of the averaged model in percent, and the mean staleness of its gradients."""
        workers, samples = staleness + 1, len(workload.train[0])
        rising = round(RISING * self.epochs * samples)
        schedule = f"linear(warmup={rising},samples={self.epochs * samples - rising})"
        run = simulate(
            workload, "asp", workers=workers, cluster=CLUSTER, batch=BATCH, seed=seed, device=self.device,
            iterations=max(1, round(self.epochs * samples / (BATCH * workers))),
            optimizer=f"sgd:lr={rate * workers},ema=0.99,schedule={schedule}",
        )  # fmt: skip
        module = workload.module(seed)
        module.load_state_dict(run.averaged_model())
        accuracy = workload.evaluate(module)["accuracy"]
        assert accuracy is not None
        return 100 * (1 - accuracy), run.metrics.staleness["mean"]

    def by_layer(self, seed: int) -> list[Row]:
        """Returns the staleness of each layer's gradients, bottom first."""

        def chain() -> nn.Module:
            sizes = [64, *[16] * (self.layers - 1), 10]
            pairs = pairwise(sizes)
            return nn.Sequential(*[part for pair in pairs for part in (nn.Linear(*pair), nn.ReLU())][:-1])

        workload = replace(workloads.load("digits-mlp"), name="chain", make_module=chain, batch=4)
        run = simulate(
            workload, "asp", workers=self.workers, cluster=CLUSTER, iterations=20, optimizer="sgd:lr=0.1",
            by_layer=True, seed=seed, device=self.device,
        )  # fmt: skip
        numbers = list(run.staleness_by_layer().values())
        shown = sorted({0, self.layers // 3, 2 * self.layers // 3, self.layers - 1})
        columns = ("min", "mean", "median", "max", "deviation", "count")
        return [{"layer": layer, **{name: numbers[layer][name] for name in columns}} for layer in shown]


def claims_of_errors(rows: list[Row]) -> list[Claim]:
    best = [row["best_error_%"] for row in rows]
    rates = [row["best_lr"] for row in rows]
    fresh, stalest = rows[0], rows[-1]
    at_fresh_rate = stalest[f"lr {fresh['best_lr']}"]
    growing = all(earlier <= later for earlier, later in pairwise(best))
    ours = ", ".join(f"{row['best_error_%']:.2f} % at {row['staleness']}" for row in rows)
    return [
        Claim(
            "Test error grows with staleness, each at its best learning rate",
            "0.36 % at staleness 0, 0.47 % at 20, 0.79 % at 50",
            ours,
            best[-1] > best[0] and growing,
            "but far steeper: so few updates do not make up for a low rate" if growing else "not at every step",
        ),
        Claim(
            "Stale gradients need a lower learning rate",
            "from staleness 20 on",
            ", ".join(f"{rate} at {row['staleness']}" for rate, row in zip(rates, rows, strict=True)),
            rates[-1] < rates[0] and rates == sorted(rates, reverse=True),
        ),
        Claim(
            "At the rate that suits fresh gradients training blows up",
            "error 90 % in many runs at large staleness",
            f"error {at_fresh_rate:.0f} % at staleness {stalest['staleness']}, learning rate {fresh['best_lr']}",
            at_fresh_rate > BLOWN_UP,
        ),
    ]


def claim_of_layers(layers: list[Row]) -> Claim:
    bottom, top = layers[0], layers[-1]
    return Claim(
        "Lower layers have staler gradients",
        "with 40 workers 39.0 updates in the mean at the bottom (layer 0), 14.5 at the top (layer 18)",
        f"{bottom['mean']:.1f} at the bottom (layer {bottom['layer']}), {top['mean']:.1f} at the top "
        f"(layer {top['layer']})",
        bottom["mean"] > top["mean"],
        "the top is fresher than in the paper: here a message takes next to no time",
    )
