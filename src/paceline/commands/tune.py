"""`paceline tune specsync`: both numbers of SpecSync tried on a grid, the baseline of Zhang et al. 2018, VI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from paceline import policies
from paceline.api import Job, simulate_job
from paceline.commands.options import Training
from paceline.commands.tables import dash, print_table, write_json
from paceline.commands.terminal import console, count
from paceline.core.spec import write_value
from paceline.errors import ConfigError
from paceline.policies import SpecSync
from paceline.report.worker_spans import spans
from paceline.run import Run

STEPS = 5
"""If no values of ABORT_TIME are named, so many steps up to half the mean span of an iteration are tried."""

Row = dict[str, Any]


@dataclass(kw_only=True)
class Tune(Training):
    """Try SpecSync with a grid of ABORT_TIME and ABORT_RATE, in virtual time; beside it its base and what tunes itself.

    paceline tune specsync --workers 16 --cluster lognormal:sigma=0.3 --target accuracy=0.9 --optimizer sgd:lr=1

    The time to the target decides. Each pair is a run of its own, which is what makes this way of tuning expensive.
    """

    policy: Annotated[str, tyro.conf.Positional] = ""
    """specsync, or specsync:base=ssp(staleness=3)."""
    times: tuple[float, ...] = ()
    """Values of ABORT_TIME in seconds; if none, five up to half the mean span of an iteration."""
    rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4)
    """Values of ABORT_RATE."""

    def main(self) -> int:
        self.check()
        policy = policies.parse(self.policy) if self.policy else None
        if not isinstance(policy, SpecSync):
            raise ConfigError(f"tune what? {self.policy or 'nothing was named'}: only specsync has a grid to try")
        if policy.abort_time is not None:
            raise ConfigError(f"{policy} is fixed already: name specsync without abort_time and abort_rate")
        if self.target is None:
            raise ConfigError("tune compares times to a target: name one, as --target accuracy=0.9")
        if not self.rates:
            raise ConfigError("--rates needs at least one value")

        def pairs(times: Sequence[float]) -> list[SpecSync]:
            tried = [(abort_time, abort_rate) for abort_time in times for abort_rate in self.rates]
            return [SpecSync(base=policy.base, abort_time=time_s, abort_rate=rate) for time_s, rate in tried]

        pairs(self.times or [1.0])  # what cannot be is refused before anything runs
        base = self.run(str(policy.base_policy))
        rows = [row_of(str(policy.base_policy), base, base)]
        grid = pairs(self.times or steps_for(base))
        rows.append(row_of("tuned by itself", self.run(str(policy)), base))
        rows += [row_of(f"{tried.abort_time:g} s, {tried.abort_rate:g}", self.run(str(tried)), base) for tried in grid]
        self.show(rows)
        config = Job(policy=policy, **self.arguments()).config()
        write_json(self.json, {"rows": rows, "best": best_of(rows), "config": config})
        return 0

    def run(self, policy: str) -> Run:
        run = simulate_job(Job(policy=policy, **self.arguments()))
        reached = f"{run.time_to_target_s:.2f} s" if run.time_to_target_s is not None else "missed"
        console.print(f"{policy}: {reached}", soft_wrap=True)
        return run

    def show(self, rows: list[Row]) -> None:
        title = f"{self.workload}, {count(self.workers, 'worker')}, in virtual time"
        headings = (
            "abort time, rate",
            f"time to\n{self.target}",
            "speed-up\nover base",
            "aborted\nof begun",
            "updates stale\nmean",
        )
        cells = [
            (
                row["tried"], "missed" if row["time_to_target_s"] is None else f"{row['time_to_target_s']:.2f} s",
                dash(row["speed_up"], ".2f", "x"), f"{100 * row['aborted_share']:.0f} %", f"{row['staleness']:.1f}",
            )
            for row in rows
        ]  # fmt: skip
        missing = f"it or the base did not reach {self.target}"
        print_table(title, headings, cells, text=headings[:1], bold=True, missing=missing)
        best = best_of(rows)
        console.print(f"best: {best}" if best else f"nothing reached {self.target}", soft_wrap=True)


def steps_for(base: Run) -> list[float]:
    """Returns values up to half the mean span of an iteration (Zhang et al. 2018, VI.E), from the base's run."""
    spent = spans(base.trace, base.time_s)
    computed = sum(span.kind == "compute" for span in spent)
    mean_s = sum(span.seconds for span in spent if span.kind != "dead") / max(1, computed)
    return [float(write_value(round(0.5 * mean_s * step / STEPS, 6))) for step in range(1, STEPS + 1)]


def row_of(tried: str, run: Run, base: Run) -> Row:
    aborted = run.metrics.aborts.get("count", 0)
    begun = aborted + run.metrics.gradients
    mine, theirs = run.time_to_target_s, base.time_to_target_s
    return {
        "tried": tried,
        "policy": run.policy,
        "time_to_target_s": mine,
        "speed_up": theirs / mine if mine and theirs else None,
        "aborted_share": aborted / begun if begun else 0.0,
        "staleness": run.metrics.staleness["mean"],
        "final_accuracy": run.summary()["final"]["accuracy"],
    }


def best_of(rows: list[Row]) -> str | None:
    there = [row for row in rows if row["time_to_target_s"] is not None]
    return min(there, key=lambda row: float(row["time_to_target_s"]))["policy"] if there else None
