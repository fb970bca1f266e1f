"""How long SpecSync's tuner takes for an epoch of many workers, beside the form the paper gives.

The paper's Algorithm 1 evaluates the whole of equation 7 for each of O(m^2) candidates, a count for each worker:
O(m^3). Here that is done with a binary search for each count, so it is faster than written there; still it is only
measured up to `MOST` workers. Both must find the same, or there is no result. Rounds are interleaved, medians count.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from paceline.bench.rounds import in_turn, milliseconds
from paceline.core.speculation import Iteration, Notices, Speculation
from paceline.errors import PacelineError
from paceline.policies.specsync_tuning import LARGEST, tune

MOST = 100


@dataclass(frozen=True)
class Row:
    """One size: milliseconds an epoch's tuning takes."""

    workers: int
    notices: int
    tune_ms: float
    paper_form_ms: float | None
    ratio: float | None


def run(workers: list[int], rounds: int, seed: int, say: Callable[[str], None]) -> list[Row]:
    return [measure(count, rounds, seed, say) for count in workers]


def measure(workers: int, rounds: int, seed: int, say: Callable[[str], None]) -> Row:
    notices, iterations = epoch(workers, seed)
    forms: dict[str, Callable[[], Speculation | None]] = {"tuner": partial(tune, notices, iterations, len(iterations))}
    if workers <= MOST:
        forms["paper"] = partial(as_in_the_paper, notices, iterations)
    found, *same = (form() for form in forms.values())
    if any(other != found for other in same):
        raise PacelineError(f"the tuner found {found}, the paper's form {same[0]}: one of them is wrong")
    took = in_turn({name: partial(milliseconds, form) for name, form in forms.items()}, rounds)
    tune_ms = statistics.median(took["tuner"])
    paper_ms = statistics.median(took["paper"]) if "paper" in took else None
    beside = f", in the paper's form {paper_ms:.1f} ms" if paper_ms is not None else ""
    say(f"{workers} workers, {len(notices.times)} pushes: {tune_ms:.2f} ms{beside}")
    return Row(workers, len(notices.times), tune_ms, paper_ms, paper_ms / tune_ms if paper_ms is not None else None)


def epoch(workers: int, seed: int) -> tuple[Notices, dict[int, Iteration]]:
    """Everybody's last two iterations: spans log-normal around a second, starts spread over one."""
    random = np.random.default_rng(seed)
    began = random.uniform(0.0, 1.0, workers)
    spans = np.exp(0.3 * random.standard_normal((workers, 2)))
    iterations = {rank: Iteration(float(began[rank]), float(spans[rank, 0])) for rank in range(workers)}
    times = np.concatenate([began, began + spans[:, 0], began + spans.sum(1)])
    order = np.argsort(times, kind="stable")
    return Notices(times[order].tolist(), np.tile(np.arange(workers), 3)[order].tolist()), iterations


def as_in_the_paper(notices: Notices, iterations: dict[int, Iteration]) -> Speculation | None:
    """Algorithm 1, candidate by candidate."""
    m = len(iterations)
    span_s = sum(iteration.span_s for iteration in iterations.values()) / m
    lost_per_s = (m - 1) * sum(1 / iteration.span_s for iteration in iterations.values())
    missed = [
        sorted(
            at - iteration.began_s
            for at, owner in zip(notices.times, notices.workers, strict=True)
            if owner != worker and 0 < at - iteration.began_s <= LARGEST * span_s
        )
        for worker, iteration in iterations.items()
    ]
    best, found = 0.0, None
    for candidate in sorted({difference for mine in missed for difference in mine}):
        improvement = sum(bisect_right(mine, candidate) for mine in missed) - candidate * lost_per_s
        if improvement > best:
            best, found = improvement, Speculation(candidate, candidate * (m - 1) / (span_s * m))
    return found
