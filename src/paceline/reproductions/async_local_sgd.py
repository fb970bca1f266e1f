"""async-local-sgd: local steps without barriers, and what becomes of momentum.

Liu et al. 2024.

The paper. Workers of unequal speed train language models alone for some steps and push what they have learned; the
server applies each push when it comes. That is worse at equal updates than synchronous local SGD, and most so with
momentum on the server, which is what makes the synchronous one good. *Delayed Nesterov* moves the momentum once for N
pushes; *dynamic local updates* (DyLU) give each worker steps in proportion to its speed, so that pushes come equally
often. Both together nearly match the synchronous one at equal updates, and beat it by the clock.

Here. digits-mlp, four and eight workers of speeds 8:4:2:1, rounds of 16 steps; under DyLU the fastest does 16. `asp`
with four outer optimizers: plain, Nesterov momentum that moves with each push, delayed Nesterov, and that with DyLU;
beside it `bsp`. Beyond the paper: `bsp` with rounds by ZipLine's plan. The loss after equal local steps, and the time
to 95 %. Claims are about eight workers: the more there are, the further momentum goes between two looks at the model.

What differs. A small model; SGD as inner optimizer, where the paper has AdamW; no grace period for pushes.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from paceline.api import simulate
from paceline.core.local_steps import OUTER
from paceline.reproductions.base import Claim, Findings, Reproduction, Row, Say

AT_EACH_PUSH = "sgd(lr=0.7,momentum=0.9,nesterov=true)"
SYNCHRONOUS, PLAIN, NAIVE, DELAYED, DYLU, PLANNED = (
    "synchronous", "no momentum", "Nesterov at each push", "delayed Nesterov", "delayed, DyLU", "synchronous, auto",
)  # fmt: skip


@dataclass(frozen=True)
class AsyncLocalSGD(Reproduction, name="async-local-sgd", paper="Liu et al. 2024, sections 4 to 6"):
    """Momentum spoils asynchronous local SGD; delayed, with steps in proportion to speed, it beats the synchronous."""

    speeds: tuple[int, ...] = (8, 4, 2, 1)
    of_each: tuple[int, ...] = (1, 2)
    """How many workers there are of each speed, one run after the other."""
    length: int = 16
    iterations: int = 256
    seeds: int = 3
    accuracy: float = 0.95

    @property
    def settings(self) -> dict[str, tuple[str, str, str]]:
        """Returns the settings: policy, local steps, outer optimizer."""
        fixed, dylu = str(self.length), f"proportional(at_most={self.length})"
        planned = f"auto(at_least={max(1, self.length // 8)},at_most={2 * self.length})"
        return {
            SYNCHRONOUS: ("bsp", fixed, OUTER),
            PLAIN: ("asp", fixed, "sgd(lr=0.7)"),
            NAIVE: ("asp", fixed, AT_EACH_PUSH),
            DELAYED: ("asp", fixed, OUTER),
            DYLU: ("asp", dylu, OUTER),
            PLANNED: ("bsp", planned, OUTER),
        }

    @property
    def steps(self) -> int:
        return len(self.settings) * self.seeds * len(self.of_each)

    def measure(self, seed: int, say: Say) -> Findings:
        findings = Findings()
        for of_each in self.of_each:
            speeds = [speed for speed in self.speeds for _ in range(of_each)]
            rows = [self.row(name, speeds, seed, say) for name in self.settings]
            findings.rows += rows
        findings.claims += self.claims({row["way"]: row for row in rows})
        return findings

    def row(self, name: str, speeds: list[int], seed: int, say: Say) -> Row:
        policy, local, outer = self.settings[name]
        factors = ":".join(f"{max(speeds) / speed:g}" for speed in speeds)
        losses, times = [], []
        for each in range(seed, seed + self.seeds):
            run = simulate(
                "digits-mlp", policy, workers=len(speeds), cluster=f"factors:by_worker={factors}", seed=each,
                iterations=self.iterations, local_steps=local, outer=outer, device=self.device,
            )  # fmt: skip
            losses.append(run.final["loss"])
            reached = (point.time_s for point in run.history if (point.accuracy or 0.0) >= self.accuracy)
            times.append(next(reached, None))
            say(f"{len(speeds)} workers, {name}, seed {each}: loss {losses[-1]:.4f} after {run.time_s:.0f} s")
        there = [time_s for time_s in times if time_s is not None]
        return {
            "workers": len(speeds), "way": name, "policy": policy, "local_steps": local, "loss": fmean(losses),
            "to_target_s": median(there) if 2 * len(there) > len(times) else None,
        }  # fmt: skip

    def claims(self, rows: dict[str, Row]) -> list[Claim]:
        loss = {name: float(row["loss"]) for name, row in rows.items()}
        took = {name: row["to_target_s"] for name, row in rows.items()}
        times = took[SYNCHRONOUS] / took[DYLU] if took[SYNCHRONOUS] and took[DYLU] else None
        planned = took[DYLU] / took[PLANNED] if took[DYLU] and took[PLANNED] else None
        return [
            Claim(
                "At equal updates asynchronous local SGD is worse than synchronous",
                "a worse perplexity, by the curves",
                f"Nesterov at each push: loss {loss[NAIVE]:.3f} against {loss[SYNCHRONOUS]:.3f}",
                loss[NAIVE] > 1.1 * loss[SYNCHRONOUS],
            ),
            Claim(
                "Delaying the momentum mends most of that",
                "delayed Nesterov is better than Nesterov momentum at each push",
                f"delayed {loss[DELAYED]:.3f}, at each push {loss[NAIVE]:.3f}, none {loss[PLAIN]:.3f}",
                loss[DELAYED] < min(loss[NAIVE], loss[PLAIN]),
            ),
            Claim(
                "With DyLU besides it nearly matches the synchronous at equal updates",
                "about the same perplexity",
                f"loss {loss[DYLU]:.3f} against {loss[SYNCHRONOUS]:.3f}",
                loss[DYLU] < 1.1 * loss[SYNCHRONOUS],
            ),
            Claim(
                "By the clock it is much sooner there",
                "far ahead, by the curves",
                "missed" if times is None else f"{times:.2f}x as fast to {self.accuracy:.0%}",
                times is not None and times > 1.5,
            ),
            Claim(
                "Rounds that end together are as soon there, without staleness",
                "not examined",
                "missed" if planned is None else f"{planned:.2f}x as fast as delayed Nesterov with DyLU",
                planned is not None and planned >= 1,
            ),
        ]
