"""What a run looks like at one moment, as plain data: the page, `paceline top` and `paceline explain` show this."""

from __future__ import annotations

from msgspec import Struct

Series = list[tuple[float, float | None]]
"""Values over time."""

STARTING, RUNS, ENDED, LOST = "starting", "runs", "ended", "lost"
"""What a run does; lost is one whose driver ended without saying how."""
COMPUTES, WAITS, PUSHES, READS, DONE, GONE = "computes", "waits", "pushes", "reads", "finished", "gone"
"""What a worker does; it reads while parameters are on their way to it."""


class WorkerRow(Struct):
    """One worker, or peer. Seconds of an iteration are medians of its last ten."""

    rank: int
    incarnation: int
    state: str
    since_s: float
    reason: str
    waits_for: tuple[int, ...]
    """Some of those it waits for."""
    iteration: int
    rate: float
    """Iterations a second, over its last ones."""
    own_s: float | None
    compute_s: float | None
    push_s: float | None
    answer_s: float | None
    wait_share: float
    """Of its time in the last minute."""
    caused_s: float
    """Seconds of waiting of others that its pushes ended, in the last minute."""
    staleness: float | None


class Lane(Struct, array_like=True):
    """What a worker did in the last minute: (kind, start, end) without gaps, short ones put together."""

    rank: int
    spans: list[tuple[str, float, float]]


class Happening(Struct):
    """Something to be told: a membership that changed, a fault, what the driver said."""

    at: float
    text: str
    kind: str = "said"


class Finding(Struct, frozen=True):
    """Somebody slows the run down."""

    who: str
    """`worker 2`, `server 0`."""
    rank: int
    cause: str
    """In a few words: computing, link, server."""
    since_s: float
    from_start: bool
    """Whether it was so as far back as was seen."""
    times: float
    """How many times as long as the others' its iterations take."""
    cost_s: float
    """What it costs an iteration of each other worker, in waiting."""
    saying: str
    """One sentence: who, since when, how much."""
    why: str
    evidence: tuple[str, ...]
    """The measurements behind it."""
    helps: tuple[str, ...]


class Snapshot(Struct):
    """A run at one moment."""

    name: str
    state: str
    how: str
    """How it ended, if it has."""
    policy: str
    script: str
    target: str | None
    peers: bool
    workers_wanted: int
    servers: int
    time_s: float
    gradients: int
    """Of all workers, since this was first looked at."""
    gradients_per_s: float
    iteration: int
    """The least iteration among those that take part: what has been done by all."""
    workers: list[WorkerRow]
    wait_share: float
    waiting_by_worker: list[tuple[int, float]]
    """(worker whose push ended it, seconds), most first, of the last minute."""
    waiting_by_reason: list[tuple[str, float]]
    staleness_mean: float | None
    staleness_max: int
    dropped: int
    bytes_per_s: dict[str, float]
    throughput: Series
    metrics: dict[str, Series]
    happenings: list[Happening]
    lanes: list[Lane]
    findings: list[Finding]
    healthy: str
    """What is said if there are no findings."""
    left_s: float | None
    """An estimate of the time that is left."""
    left_how: str
    """What that is an estimate from."""
    skipped: bool
    """Whether parts of the trace were passed over: numbers since the beginning lack them."""
