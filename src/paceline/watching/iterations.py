"""A worker's iterations, cut out of its lane: how long each part took, and for whom it waited.

An iteration begins when the worker begins to compute and ends when it begins to compute the next. Its parts are those
of the report's lanes: computing (all the script does between two steps, data loading too), the gradient on its way
until the last shard has it, waiting, parameters on their way. What a process has measured itself is kept with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from paceline.core.step_times import StepRow
from paceline.report.worker_spans import NOBODY, Span, WorkerTimeline

KEPT = 128
"""So many iterations of a worker are kept."""
WINDOW_S = 60.0
"""So long spans are kept."""
MOST_SPANS = 2400
MOST_ROWS = 64


@dataclass(slots=True)
class Iteration:
    """One iteration of one worker, in seconds."""

    index: int
    start_s: float
    end_s: float = 0.0
    compute_s: float = 0.0
    push_s: float = 0.0
    wait_s: float = 0.0
    answer_s: float = 0.0
    row: StepRow | None = None
    """What the process itself has measured of it. Of a long run only some iterations have that."""
    shards: dict[int, float] = field(default_factory=dict)
    """shard -> how long its slice of the gradient and its answer were on their way, or in its hands."""

    @property
    def own_s(self) -> float:
        """What it would have taken if nobody had been waited for."""
        return self.compute_s + self.push_s + self.answer_s


class IterationCutter:
    """Takes the spans of one lane as they come, and drops those that are old."""

    def __init__(self, lane: WorkerTimeline) -> None:
        self.lane = lane
        self.taken = 0
        """So many spans of the lane are in an iteration."""
        self.current: Iteration | None = None
        self.done: list[Iteration] = []
        """The last iterations that are over, newest last."""
        self.waits: list[Span] = []
        """The waits since they were last taken."""
        self.recent: deque[tuple[float, float]] = deque()
        """The waits of the last minute: when each ended, and its seconds."""
        self.waited_s = 0.0
        """The sum of these."""
        self.shards: dict[int, float] = {}
        self.rows: dict[int, StepRow] = {}
        """iteration -> what was measured of it, until it is over."""
        self.has_dropped = False
        """Whether there were iterations before those that are kept."""

    def cut(self) -> list[Iteration]:
        """Takes the spans that are new; returns the iterations that they have ended."""
        ended: list[Iteration] = []
        lane = self.lane
        for span in lane.spans[self.taken :]:
            if span.kind == "compute":
                current = self.current
                if current is not None and current.index != span.iteration:
                    ended.append(self.end(current, span.start_s))
                    current = None
                if current is None:
                    current = self.current = Iteration(span.iteration, span.start_s)
                current.compute_s += span.seconds
            elif self.current is not None:
                self.add(self.current, span)
            if span.kind == "wait":
                self.waits.append(span)
                self.recent.append((span.end_s, span.seconds))
                self.waited_s += span.seconds
        self.taken = len(lane.spans)
        current = self.current
        if current is not None and lane.computing and lane.iteration != current.index:
            ended.append(self.end(current, lane.since_s))
            self.current = None
        if ended:
            self.done += ended
            self.has_dropped |= len(self.done) > KEPT
            del self.done[:-KEPT]
        return ended

    def add(self, iteration: Iteration, span: Span) -> None:
        if span.kind == "push":
            iteration.push_s += span.seconds
        elif span.kind == "wait":
            iteration.wait_s += span.seconds
        elif span.kind in ("pull", "exchange"):
            iteration.answer_s += span.seconds

    def end(self, iteration: Iteration, at: float) -> Iteration:
        iteration.end_s = at
        iteration.shards, self.shards = self.shards, {}
        iteration.row = self.rows.pop(iteration.index, None)
        return iteration

    def take_row(self, row: StepRow) -> None:
        """Keeps what the process has measured of an iteration."""
        for iteration in reversed(self.done[-16:]):
            if iteration.index == row.iteration:
                iteration.row = row
                return
        self.rows[row.iteration] = row
        while len(self.rows) > MOST_ROWS:
            del self.rows[next(iter(self.rows))]

    def forget(self, before_s: float) -> None:
        """Drops the spans that ended before, which must have been cut, and more if there are too many."""
        while self.recent and self.recent[0][0] < before_s:
            self.waited_s -= self.recent.popleft()[1]
        spans = self.lane.spans
        keep = next((index for index, span in enumerate(spans) if span.end_s >= before_s), len(spans))
        keep = max(keep, len(spans) - MOST_SPANS)
        if keep and self.lane.aborted is None:
            del spans[:keep]
            self.taken -= keep

    def typical_s(self, last: int = 10) -> float | None:
        """Returns the median of what its last iterations took without waiting, if there are some."""
        recent = [each.own_s for each in self.done[-last:]]
        return median(recent) if recent else None


def caused(waits: list[Span]) -> dict[int, float]:
    """Adds up waits by the worker whose push ended them; those that no push ended are left out."""
    seconds: dict[int, float] = {}
    for wait in waits:
        if wait.cause != NOBODY:
            seconds[wait.cause] = seconds.get(wait.cause, 0.0) + wait.seconds
    return seconds
