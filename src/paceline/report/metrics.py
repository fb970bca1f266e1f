"""The numbers of a run, from its trace alone: one pass, whatever the runtime.

A *DPR* (delayed pull request, Yao et al. 2019, Table IV) is a pull that was parked, counted on every shard, or once
where a scheduler parks. *Staleness* of a gradient slice is how many versions its shard made between the version it was
computed on and the one it went into. A gradient counts as *dropped* when at least one shard dropped its slice for being
late or not finite; what arrives from a worker after it was lost is a ghost's, and is not counted.

Of peers (report/peers.py): staleness is how many iterations older an update was than the average it went into, dropped
are the updates that came too late for any and the gradients that were not finite or skipped, updates the steps of each
peer's optimizer, in the mean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import TypeVar

import msgspec
from msgspec import Struct

from paceline.core.actions import Answer, Apply, Drop, Park, Send
from paceline.core.events import (
    GradientReady,
    GradientRejected,
    NotifyArrived,
    PullArrived,
    PushArrived,
    PushRejected,
    ServersChanged,
    ViewChanged,
)
from paceline.core.messages import Handle, Resync
from paceline.core.trace import Record, Trace
from paceline.report.peers import PeerCounts
from paceline.report.worker_spans import Span, TimelineBuilder, spans

K = TypeVar("K")
NO_VIEW: tuple[int, frozenset[tuple[int, int]]] = (0, frozenset())

WORKERS = re.compile(r"\b(worker|peer)s? \d+(?:, \d+)*(?: and \d+ others?)?")
NUMBERS = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Metrics(Struct):
    """The numbers of one run. `iterations` is gradients computed per configured worker.

    `bytes` counts tensors: pushes that arrived and answers sent, `pull`. Where computations may be given up, answers to
    those who begin again are apart (`resync_pull`), and so are notices and re-syncs as they are encoded (`notices`); a
    trace has no sizes of other small messages. `aborts`, if there are any: how many computations were given up, the
    seconds they had taken, and the updates that beginning again has uncovered, in the mean.
    """

    iterations: int
    gradients: int
    updates: int
    time_s: float
    wait_share: float
    dpr_per_100: float
    staleness: dict[str, float]
    dropped: int
    bytes: dict[str, int]
    waiting_caused_by: dict[int, float]
    waiting_by_reason: dict[str, float]
    aborts: dict[str, float]
    staleness_counts: dict[int, int]
    """staleness -> how many gradients had it."""
    slowest_worker: float
    """How many times as long as the others' a computation of the slowest worker took, in the mean."""
    local_steps: int = 0
    """How many steps workers have done alone, in rounds that count as iterations; 0 if they exchange at every step."""


def measure(trace: Trace, time_s: float | None = None) -> Metrics:
    """Measures a run. `time_s` is its length where that is known better than by its last record."""
    lanes = TimelineBuilder()
    counts = Counts(trace.header.slice_bytes)
    peers = PeerCounts(trace.header)
    local_steps = 0
    for record in trace.records:
        lanes.take(record)
        if record.node[0] == "server":
            counts.take(record)
        elif isinstance(record.event, GradientReady | GradientRejected):
            counts.computed[record.node[1], record.incarnation] += 1
            local_steps += record.event.steps if isinstance(record.event, GradientReady) else 0
        if record.node[0] == "peer":
            peers.take(record)
        elif record.node[0] == "scheduler":
            counts.add_scheduler(record)
    end_s = max(lanes.last_s, time_s or 0.0)
    lanes.finish(end_s)
    all_spans = [span for lane in lanes.lanes.values() for span in lane.spans]
    waits = [span for span in all_spans if span.kind == "wait"]
    lifetimes_s = lanes.lifetimes_s()
    workers = trace.header.members.workers
    gradients = counts.gradients()
    staleness = counts.staleness + peers.staleness
    return Metrics(
        iterations=(2 * gradients + workers) // (2 * workers),
        gradients=gradients,
        updates=counts.updates + peers.updates,
        time_s=end_s if time_s is None else time_s,
        wait_share=sum(span.seconds for span in waits) / lifetimes_s if lifetimes_s else 0.0,
        dpr_per_100=100 * counts.parks * workers / gradients if gradients else 0.0,
        staleness=describe(staleness),
        dropped=len(counts.dropped) + peers.late + peers.rejected,
        bytes={**counts.bytes(), **peers.bytes()},
        waiting_caused_by=waiting_caused_by(waits),
        waiting_by_reason=waiting_by_reason(waits),
        aborts=describe_aborts([span for span in all_spans if span.kind == "aborted"]),
        staleness_counts=dict(sorted(staleness.items())),
        slowest_worker=slowness([span for span in all_spans if span.kind == "compute"]),
        local_steps=local_steps if trace.header.local_steps else 0,
    )


class Counts:
    """Counts what happens on the servers, record by record."""

    def __init__(self, slice_bytes: tuple[int, ...]) -> None:
        self.slice_bytes = slice_bytes
        self.sent: dict[tuple[int, int], int] = {}
        """(shard, worker) -> the bytes of its last push, which may be fewer than the slice's (`--wire`)."""
        self.computed: Counter[tuple[int, int]] = Counter()
        """(worker, incarnation) -> how many gradients it has recorded as computed."""
        self.pushed: Counter[tuple[int, int]] = Counter()
        """(worker, incarnation) -> how many different gradients of it came to shard 0."""
        self.newest: dict[tuple[int, int], int] = {}
        self.updates = 0
        self.parks = 0
        self.staleness: Counter[int] = Counter()
        self.dropped: set[tuple[int, int, int]] = set()
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self.resync_bytes = 0
        self.notice_bytes = 0
        self.views: dict[int, tuple[int, frozenset[tuple[int, int]]]] = {}
        """shard -> the number and the members of the newest view it has seen."""

    def take(self, record: Record) -> None:
        shard = record.node[1]
        event = record.event
        again = type(event) is PullArrived and event.pull.attempt > 0
        if type(event) is PushArrived or type(event) is PushRejected:
            self.pushed_bytes += event.push.handle.nbytes
            self.sent[shard, event.push.handle.source] = event.push.handle.nbytes
            if shard == 0:
                self.take_push(event.push.handle)
        elif type(event) is ServersChanged:
            self.slice_bytes = event.nbytes
            self.sent.clear()
        elif type(event) is ViewChanged and event.view.number > self.views.get(shard, NO_VIEW)[0]:
            self.views[shard] = (event.view.number, frozenset(event.view.members))
        for action in record.actions:
            kind = type(action)
            if isinstance(action, Answer):
                # An answer is as long as a push: the first, before any push, comes whole.
                nbytes = self.sent.get((shard, action.parameters.worker), self.slice_bytes[shard])
                if again:
                    self.resync_bytes += nbytes
                else:
                    self.pulled_bytes += nbytes
            elif kind is Park:
                self.parks += 1
            elif isinstance(action, Apply):
                self.updates += shard == 0
                for handle in action.handles:
                    self.staleness[action.staleness(handle)] += 1
            elif isinstance(action, Drop) and not self.is_ghost(shard, action.handle):
                handle = action.handle
                self.dropped.add((handle.source, handle.incarnation, handle.iteration))

    def take_push(self, handle: Handle) -> None:
        process = (handle.source, handle.incarnation)
        if handle.iteration > self.newest.get(process, -1):
            self.newest[process] = handle.iteration
            self.pushed[process] += 1

    def gradients(self) -> int:
        """Returns how many were computed. What a killed worker had not recorded was seen by the shards, if it was
        sent."""
        return sum((self.computed | self.pushed).values())

    def add_scheduler(self, record: Record) -> None:
        if type(record.event) is NotifyArrived:
            self.notice_bytes += len(msgspec.msgpack.encode(record.event.notify))
        for action in record.actions:
            if type(action) is Park:
                self.parks += 1
            elif isinstance(action, Send) and type(action.message) is Resync:
                self.notice_bytes += len(msgspec.msgpack.encode(action.message))

    def bytes(self) -> dict[str, int]:
        usual = {"push": self.pushed_bytes, "pull": self.pulled_bytes}
        if not self.notice_bytes:
            return usual
        return {**usual, "resync_pull": self.resync_bytes, "notices": self.notice_bytes}

    def is_ghost(self, shard: int, handle: Handle) -> bool:
        """Whether the shard had seen this incarnation leave, or not yet join, when its gradient arrived."""
        known = self.views.get(shard)
        return known is not None and (handle.source, handle.incarnation) not in known[1]


def describe(counts: Counter[int]) -> dict[str, float]:
    """Returns the smallest, mean, median and largest of counted whole numbers; zeros when there are none."""
    total = counts.total()
    if not total:
        return {"min": 0, "mean": 0.0, "median": 0.0, "max": 0}
    ordered = sorted(counts)
    return {
        "min": ordered[0],
        "mean": sum(value * count for value, count in counts.items()) / total,
        "median": (_at(counts, ordered, (total - 1) // 2) + _at(counts, ordered, total // 2)) / 2,
        "max": ordered[-1],
    }


def describe_aborts(aborted: list[Span]) -> dict[str, float]:
    """Returns what giving computations up has cost and gained; nothing if none was given up."""
    if not aborted:
        return {}
    seconds, uncovered = sum(span.seconds for span in aborted), sum(span.uncovered for span in aborted)
    return {"count": len(aborted), "seconds": seconds, "uncovered": uncovered / len(aborted)}


def slowness(computed: list[Span]) -> float:
    """How many times as long as the others' a computation of the slowest worker took, in the mean; 1 if it is alone."""
    spent: dict[int, list[float]] = {}
    for span in computed:
        spent.setdefault(span.worker, []).append(span.seconds)
    means = sorted(fmean(seconds) for seconds in spent.values())
    others = fmean(means[:-1]) if means[1:] else 0.0
    return means[-1] / others if others else 1.0


def _at(counts: Counter[int], ordered: list[int], position: int) -> int:
    """Returns the value at `position` if all were written out in order."""
    for value in ordered:
        position -= counts[value]
        if position < 0:
            return value
    raise IndexError(position)


def waiting_caused_by(spans: Iterable[Span]) -> dict[int, float]:
    """Returns seconds of waiting by the worker whose push ended it, most first; -1 where no push did."""
    return _add_up((span.cause, span.seconds) for span in spans if span.kind == "wait")


def waiting_by_reason(spans: Iterable[Span]) -> dict[str, float]:
    """Returns seconds of waiting by reason, numbers taken out, most first."""
    return _add_up((template(span.reason), span.seconds) for span in spans if span.kind == "wait")


def _add_up(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    seconds: dict[K, float] = {}
    for key, value in pairs:
        seconds[key] = seconds.get(key, 0.0) + value
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def template(reason: str) -> str:
    """Replaces numbers: '2 ahead of workers 1, 4, bound 1' -> '# ahead of worker #, bound #'."""
    return NUMBERS.sub("#", WORKERS.sub(r"\1 #", reason))


__all__ = ["Metrics", "Span", "measure", "spans", "template", "waiting_by_reason", "waiting_caused_by"]
