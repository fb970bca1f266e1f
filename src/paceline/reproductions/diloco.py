"""diloco: train alone for many steps, exchange rarely, and lose nothing?

Douillard et al. 2023.

The paper. Eight workers train a language model of 150 million parameters with AdamW, each alone for H = 500 steps, and
exchange what they have learned; servers step with Nesterov momentum (0.7 and 0.9). It does as well as exchanging at
every step, with 500 times fewer bytes. Of the outer optimizers tried Nesterov momentum is the best; exchanging less
often costs little, up to H = 1000.

Here. A transformer of a few thousand parameters that predicts letters, AdamW on eight virtual workers, some hundred
steps each, so H is smaller too: 8, 16, 64. The loss on letters not trained on, at equal steps, beside `bsp` with the
same AdamW on the server, on the mean gradient of all.

What differs. The paper starts from a model that was trained for 24 000 steps; here all begin at random, where outer
gradients turn most. And H times the rounds is what the paper has by the ten thousand, here by the hundred.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.api import simulate
from paceline.core.local_steps import OUTER
from paceline.reproductions.base import Claim, Findings, Reproduction, Row, Say

OUTERS = {
    "Nesterov": OUTER,
    "average": "average",
    "SGD": "sgd(lr=0.7)",
    "momentum": "sgd(lr=0.7,momentum=0.9)",
    "Adam": "adam(lr=0.03)",
}
AS_GOOD = 1.02
"""A loss that is so many times another is as good."""


@dataclass(frozen=True)
class DiLoCo(Reproduction, name="diloco", paper="Douillard et al. 2023, sections 2 and 3"):
    """Workers that exchange every H steps learn as much as workers that exchange at each, with H times fewer bytes."""

    workload: str = "char-transformer:width=16,layers=1,context=16"
    workers: int = 8
    iterations: int = 1024
    lengths: tuple[int, ...] = (8, 16, 64)
    """The steps of a round; the second is the one that outer optimizers are compared with."""
    batch: int = 8

    @property
    def settings(self) -> list[tuple[int, str]]:
        """Returns the settings as (steps of a round, outer optimizer); one step is no local steps at all."""
        others = [name for name in OUTERS if name != "Nesterov"]
        return [(1, "-"), *((length, "Nesterov") for length in self.lengths), *((self.lengths[1], o) for o in others)]

    @property
    def steps(self) -> int:
        return len(self.settings)

    def measure(self, seed: int, say: Say) -> Findings:
        findings = Findings()
        for length, outer in self.settings:
            policy = f"bsp:local_steps={length},outer={OUTERS[outer]}" if outer in OUTERS else "bsp"
            run = simulate(
                self.workload, policy, workers=self.workers, iterations=self.iterations, batch=self.batch, seed=seed,
                optimizer="adamw:lr=0.003", device=self.device,
            )  # fmt: skip
            row: Row = {
                "H": length, "outer": outer, "exchanges": run.metrics.updates, "loss": run.final["loss"],
                "bytes": sum(run.metrics.bytes.values()),
            }  # fmt: skip
            findings.rows.append(row)
            say(f"H = {length}, outer {outer}: loss {row['loss']:.4f}")
        findings.claims += self.claims(findings.rows)
        return findings

    def claims(self, rows: list[Row]) -> list[Claim]:
        always, *rest = rows
        lengths = {row["H"]: row for row in rest if row["outer"] == "Nesterov"}
        outers = {row["outer"]: row["loss"] for row in rest if row["H"] == self.lengths[1]}
        worse = {length: row["loss"] / always["loss"] for length, row in lengths.items()}
        fewer = {length: always["bytes"] / row["bytes"] for length, row in lengths.items()}
        good = [length for length in lengths if worse[length] <= AS_GOOD]
        best = min(outers, key=lambda name: outers[name])
        longest, shortest = lengths[max(lengths)], lengths[min(lengths)]
        change = longest["loss"] / shortest["loss"]
        early = "in longer rounds, from random parameters and few of them, an exchange at every step is ahead"
        return [
            Claim(
                "As good as an exchange at every step, with H times fewer bytes",
                "as good as fully synchronous optimization, with 500 times fewer bytes",
                "at equal steps "
                + ", ".join(f"{worse[each]:.3f} times the loss with {fewer[each]:.0f}" for each in lengths)
                + " times fewer bytes",
                bool(good),
                f"up to H = {max(good)}; {early}" if good else early,
            ),
            Claim(
                "Nesterov momentum is the best outer optimizer",
                "better than SGD, SGD with momentum and Adam",
                ", ".join(f"{name} {loss:.4f}" for name, loss in sorted(outers.items(), key=lambda item: item[1])),
                best == "Nesterov",
                "" if best == "Nesterov" else f"{best} is, here",
            ),
            Claim(
                "Exchanging much less often costs little",
                "a mild degradation up to H = 1000",
                f"H = {max(lengths)} instead of {min(lengths)}: {change:.3f} times the loss",
                change <= 1.1,
                "" if change <= 1.1 else f"with H = {max(lengths)} there are only {longest['exchanges']} exchanges",
            ),
        ]
