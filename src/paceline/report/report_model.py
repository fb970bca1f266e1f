"""What a page shows of a run, and what the page says in words: labels, baseline, target, verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from paceline.report.barriers import Barrier
from paceline.report.markup import seconds
from paceline.report.peers import PeersView
from paceline.report.worker_spans import Span

BASELINE = "bsp"
USUAL = ("accuracy", "loss")
"""What simulations and comparisons measure, and most scripts log."""


class RunView(Struct):
    """One run on the page. `summary` is the run's JSON object, as `paceline compare --json` writes it."""

    policy: str
    runtime: str
    history: list[dict[str, float | None]]
    summary: dict[str, Any]
    spans: list[Span]
    barriers: list[Barrier] = []
    """The barriers that were planned and reached."""
    peers: PeersView | None = None
    """What is shown of peers, where there were no servers."""
    staleness: dict[int, int] = {}
    """staleness -> how many gradients had it."""

    def number(self, *path: str) -> float | None:
        """Returns a finite number of the summary, or None where it is missing: `run.number("final", "loss")`."""
        value: Any = self.summary
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return finite(value)


def finite(value: Any) -> float | None:
    """Returns `value` if it is a number that can be drawn. A diverged run has losses that are not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


class Target(Struct, frozen=True):
    """What the runs were to reach, `accuracy=0.95` for one."""

    text: str
    metric: str
    value: float


def target_of(config: Mapping[str, Any]) -> Target | None:
    text = config.get("target")
    if not isinstance(text, str):
        return None
    metric, _, value = text.partition("=")
    try:
        number = finite(float(value))
    except ValueError:
        return None
    return None if number is None else Target(text, metric.strip(" <>"), number)


def logged_metrics(runs: list[RunView]) -> list[str]:
    """The names of all metrics that any run has a last value of: accuracy, loss, then others as scripts log them."""
    finals = [name for run in runs for name, value in run.summary.get("final", {}).items() if value is not None]
    return [*(name for name in USUAL if name in finals), *dict.fromkeys(name for name in finals if name not in USUAL)]


def run_labels(runs: list[RunView]) -> list[str]:
    """Returns a name for each run: its policy, with the runtime where there are two, and numbered where repeated."""
    mixed = len({run.runtime for run in runs}) > 1
    names = [f"{run.policy} ({run.runtime})" if mixed else run.policy for run in runs]
    total, seen = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        seen[name] += 1
        if total[name] > 1:
            names[index] = f"{name} #{seen[name]}"
    return names


def baseline_of(run: int, runs: list[RunView]) -> int:
    """Returns what to compare with: bsp, or the first run, of the same runtime: virtual seconds are not live ones."""
    same = [index for index, other in enumerate(runs) if other.runtime == runs[run].runtime]
    return next((index for index in same if runs[index].policy.partition(":")[0] == BASELINE), same[0])


def speed_up(run: int, runs: list[RunView], target: Target | None) -> float | None:
    """Returns how many times sooner than the baseline it reached the target, or did as many iterations if there is
    none."""
    both = [runs[run], runs[baseline_of(run, runs)]]
    if target is None:
        done = [each.number("gradients") for each in both]
        if None in done or done[0] != done[1] or any(each.summary.get("diverged") for each in both):
            return None
    mine, theirs = (each.number("time_to_target_s" if target else "time_s") for each in both)
    return theirs / mine if mine and theirs is not None else None


def divergence(run: RunView) -> str:
    """Says where a run has diverged; nothing if it has not."""
    return f"diverged at iteration {run.number('iterations') or 0:.0f}" if run.summary.get("diverged") else ""


def verdict(runs: list[RunView], target: Target | None) -> str:
    """Says what came out, in one sentence for each runtime."""
    names = run_labels(runs)
    runtimes = list(dict.fromkeys(run.runtime for run in runs))
    parts = []
    for runtime in runtimes:
        group = [index for index, run in enumerate(runs) if run.runtime == runtime]
        parts.append(_race(group, runs, names, target.text) if target else _ending(group, runs, names))
    return " ".join(parts) or "No run to show."


def _race(group: list[int], runs: list[RunView], names: list[str], target: str) -> str:
    times = {index: time for index in group if (time := runs[index].number("time_to_target_s")) is not None}
    missed = [names[index] for index in group if index not in times]
    if not times:
        one = f"{names[group[0]]} did not reach {target}."
        return one if len(group) == 1 else f"None of the {len(group)} runs reached {target}."
    best = min(times, key=lambda index: times[index])
    others = sorted((index for index in times if index != best), key=lambda index: times[index])
    base = baseline_of(best, runs)
    rival = base if base != best and base in times else others[0] if others else None
    said = f"{names[best]} reached {target} in {seconds(times[best])}"
    if rival is not None:
        said += f", {sooner(times[best], times[rival])} {names[rival]}"
        said += " (the next)" if base == best and len(others) > 1 else ""
    if missed:
        said += f"; {' and '.join(missed) if len(missed) < 3 else f'{len(missed)} others'} did not reach it"
    return said + "."


def sooner(mine: float, theirs: float) -> str:
    if theirs == mine:
        return "at the same time as"
    ratio = theirs / mine if mine else math.inf
    if not math.isfinite(ratio):
        return "sooner than"
    return f"{ratio:.1f}× sooner than" if ratio >= 1.05 else f"{100 * (ratio - 1):.1f} % sooner than"


def _ending(group: list[int], runs: list[RunView], names: list[str]) -> str:
    losses = {index: loss for index in group if (loss := runs[index].number("final", "loss")) is not None}
    if not losses:
        return "No target was set and no loss was recorded."
    best = min(losses, key=lambda index: losses[index])
    time = runs[best].number("time_s")
    after = f" after {seconds(time)}" if time is not None else ""
    if len(group) == 1:
        return f"{names[best]} ended with a loss of {losses[best]:.3g}{after}."
    return f"{names[best]} ended with the lowest loss, {losses[best]:.3g}{after}; no target was set."
