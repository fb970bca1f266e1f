"""Why a worker takes longer between two steps: which of the parts that it has measured itself is longer than theirs.

A part is loading data (until the closure or `zero_grad` is called), forward and backward, what a scenario adds, garbage
collection, and checking and copying the gradient. Of the time in which the process did not use the processor nothing
more is known: its host had no core for it, or it waited for a disk, a network or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from paceline.core.step_times import StepRow
from paceline.watching.iterations import Iteration

MAIN = 0.6
"""A part with this share of the excess is the cause."""
COMPUTING, LOADING, COLLECTING, COPYING, INJECTED, HOST = (
    "computing", "loading data", "garbage collection", "copying", "injected", "host",
)  # fmt: skip
UNKNOWN = (
    "it takes longer between two steps of the script; whether it loads data, computes, collects garbage or shares its "
    "host with something, the trace does not say"
)
PARTS: dict[str, Callable[[StepRow], float]] = {
    LOADING: lambda row: row.data_s,
    COMPUTING: lambda row: row.compute_s - min(row.gc_s, row.compute_s),
    COLLECTING: lambda row: min(row.gc_s, row.compute_s),
    INJECTED: lambda row: row.injected_s,
    COPYING: lambda row: row.copy_s + row.push_s,
}


def computing_cause(mine: list[Iteration], others: Mapping[int, list[Iteration]]) -> tuple[str, str]:
    """Returns the cause in a few words, and in a sentence."""
    rows = [each.row for each in mine if each.row is not None]
    theirs = [measured for recent in others.values() if (measured := [i.row for i in recent if i.row is not None])]
    if len(rows) < 3 or not theirs:
        return COMPUTING, UNKNOWN

    def more(value: Callable[[StepRow], float]) -> float:
        return median(map(value, rows)) - median(median(map(value, measured)) for measured in theirs)

    longer = {name: more(value) for name, value in PARTS.items()}
    total = sum(each for each in longer.values() if each > 0)
    if total <= 0:
        return COMPUTING, UNKNOWN
    part = max(longer, key=lambda each: longer[each])
    off = more(lambda row: max(0.0, row.seconds - row.answer_s - row.cpu_s))
    by_part = f"more than the others': {described(longer)}"
    if longer[part] < MAIN * total:
        if off >= MAIN * total:
            return HOST, f"all parts take longer, and without the processor: its host has no core for it ({by_part})"
        return COMPUTING, f"several parts of what it does between two steps take longer ({by_part})"
    if part == INJECTED:
        return COMPUTING, f"the scenario slows it down: it adds {ms(longer[part])} to each iteration"
    if part == COMPUTING and off >= MAIN * longer[part]:
        return HOST, (
            f"forward and backward take {ms(longer[part])} longer, and without the processor: its host has no core for "
            "it, or they wait for something (a disk, a network, a GPU)"
        )
    said = {
        LOADING: f"it loads data for {ms(longer[part])} longer in each iteration",
        COMPUTING: f"forward and backward take {ms(longer[part])} longer, on the processor: more work, or a slow core",
        COLLECTING: f"garbage collection takes {ms(longer[part])} longer in each iteration",
        COPYING: f"checking, copying and handing over the gradient take {ms(longer[part])} longer",
    }
    return part, f"{said[part]} ({by_part})"


def described(parts: Mapping[str, float]) -> str:
    """Returns the parts of an iteration, longest first."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ms(value)}" for name, value in ordered)


def ms(value: float) -> str:
    """Returns a duration as it is told."""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{1000 * value:.0f} ms" if abs(value) >= 0.01 else f"{1000 * value:.1f} ms"
