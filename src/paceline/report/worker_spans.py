"""What each worker did when: its lane, cut into spans that touch and never overlap.

    start ─ pull ─ compute ─ push ─ wait ─ pull ─ compute ─ ... ─ end (─ dead ─ start ...)

A lane is one incarnation of one worker. It computes from a `Compute` order to its `GradientReady`, or to its
`ComputeAborted`: then that time was lost, and what the next attempt has for it are the updates that the shards'
answers have uncovered since. What lies between is a gap: the gradient and the pull are on their way, or the pull is
parked on some shard. A worker may be parked on several shards at once and goes on when the last one answers, so
waiting is the union of those times and its reason and cause are those of the shard that answered last.

A lane begins when a view names the incarnation, or with its first record: of a worker that was killed, some or all
records may be lost. It ends when a view drops the incarnation, when the next one starts, or with the run. What came
from it afterwards is a ghost's and is not drawn.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from paceline.core.actions import Answer, Compute, Park, Send, SetTimer
from paceline.core.actions import Wait as PeerWait
from paceline.core.events import (
    ComputeAborted,
    Event,
    GradientReady,
    GradientRejected,
    ParametersArrived,
    PushArrived,
    PushRejected,
    RiseArrived,
    ServersChanged,
    TimerFired,
    ViewChanged,
)
from paceline.core.messages import Release, View
from paceline.core.trace import Record, Trace

Kind = Literal["compute", "aborted", "wait", "push", "pull", "exchange", "dead"]
NOBODY = -1
NO_ITERATION = -1
RESTS = "rests before it pulls"
"""The reason of a wait for a timer that the worker has set itself."""


class Span(Struct, frozen=True, gc=False):
    """A stretch of one worker's time.

    `iteration` is the one being computed or, after that, the one just pushed; -1 before the first. `reason` is why the
    pull was parked, `cause` the worker whose push released it: -1 if a change of membership did, or the end of the
    lane. `uncovered` belongs to a computation that was aborted: how many updates more a shard had, in the mean, when
    the iteration was begun again.
    """

    worker: int
    incarnation: int
    kind: Kind
    start_s: float
    end_s: float
    iteration: int = NO_ITERATION
    reason: str = ""
    cause: int = NOBODY
    shard: int = NOBODY
    uncovered: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Wait(Struct, frozen=True, gc=False):
    """The time one pull was parked on one shard."""

    start_s: float
    end_s: float
    shard: int
    reason: str
    cause: int


class WorkerTimeline:
    """One incarnation of one worker, while its records are read."""

    def __init__(self, worker: int, incarnation: int, at: float) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.start_s = at
        self.end_s: float | None = None
        self.last_s = at
        """The time of its own last record."""
        self.since_s = at
        """The start of the stretch that is not a span yet."""
        self.computing = False
        self.own_records = False
        """Whether there are records of the worker's own: without them, and without servers, what travels is an
        exchange."""
        self.sent = False
        """Whether this gap began with a push."""
        self.pushed_s: float | None = None
        """When the push had come to all shards, so far."""
        self.first_reply_s = math.inf
        """When a shard parked or answered first in this gap: the push was there then, if nothing else says so."""
        self.iteration = NO_ITERATION
        self.parked: dict[int, tuple[float, str]] = {}
        """shard -> since when, and why."""
        self.waits: list[Wait] = []
        """The waits of this gap that are over."""
        self.spans: list[Span] = []
        self.versions: dict[int, int] = {}
        """shard -> the version it answered last."""
        self.aborted: tuple[int, dict[int, int]] | None = None
        """The place of the last aborted computation among the spans, and the versions it was on."""

    def start_compute(self, at: float, iteration: int) -> None:
        self.close(at)
        self.computing = True
        self.sent = False
        self.iteration = iteration
        if self.aborted is not None:
            place, stale = self.aborted
            uncovered = sum(self.versions[shard] - version for shard, version in stale.items()) / len(stale)
            self.spans[place] = replace(self.spans[place], uncovered=uncovered)
            self.aborted = None

    def abort_compute(self, at: float) -> None:
        before = len(self.spans)
        self.add("aborted", at)
        self.computing = False
        if len(self.spans) > before and self.versions:
            self.aborted = (before, dict(self.versions))

    def finish_compute(self, at: float) -> None:
        self.close(at)
        self.computing = False
        self.sent = True
        self.pushed_s, self.first_reply_s = None, math.inf

    def push(self, at: float, iteration: int) -> None:
        """Notes that a shard has got the gradient, or its slice of it."""
        if not self.computing and iteration == self.iteration:
            self.pushed_s = at

    def park(self, at: float, shard: int, reason: str) -> None:
        self.first_reply_s = min(self.first_reply_s, at)
        self.parked[shard] = (at, reason)

    def answer(self, at: float, shard: int, released_by: int) -> None:
        self.first_reply_s = min(self.first_reply_s, at)
        parked = self.parked.pop(shard, None)
        if parked is not None:
            self.waits.append(Wait(parked[0], at, shard, parked[1], released_by))

    def end(self, at: float) -> None:
        """Ends the lane: what was under way ends here, unfinished."""
        self.close(at)
        self.end_s = max(at, self.since_s)

    def close(self, at: float) -> None:
        """Turns everything up to `at` into spans."""
        if self.computing:
            self.add("compute", at)
        elif not self.waits and not self.parked:
            self.travel(at)
        else:
            self.close_gap(at)
            self.waits.clear()

    def close_gap(self, at: float) -> None:
        open_ = [Wait(since, at, shard, why, NOBODY) for shard, (since, why) in self.parked.items()]
        for wait in union(self.waits + open_):
            self.travel(min(wait.start_s, at))
            self.add("wait", min(wait.end_s, at), wait.reason, wait.cause, wait.shard)
        self.travel(at)

    def travel(self, to: float) -> None:
        """Adds time in which something travels: the gradient until the last shard has it, then parameters."""
        if not self.own_records:
            self.add("exchange", to)
            return
        if self.sent:
            self.add("push", min(to, self.first_reply_s if self.pushed_s is None else self.pushed_s))
        self.add("pull", to)

    def add(self, kind: Kind, to: float, reason: str = "", cause: int = NOBODY, shard: int = NOBODY) -> None:
        """Adds the time from where the spans end up to `to`. With clocks that disagree that may be none or less."""
        if to > self.since_s:
            who, since_s = (self.worker, self.incarnation), self.since_s
            self.spans.append(Span(*who, kind, since_s, to, self.iteration, reason, cause, shard))
            self.since_s = to


def union(waits: list[Wait]) -> list[Wait]:
    """Joins waits that overlap, with the reason and cause of the one that ended last."""
    if len(waits) < 2:
        return waits
    merged: list[Wait] = []
    for wait in sorted(waits, key=lambda wait: wait.start_s):
        if merged and wait.start_s < merged[-1].end_s:
            before = merged[-1]
            last = wait if wait.end_s >= before.end_s else before
            merged[-1] = Wait(before.start_s, last.end_s, last.shard, last.reason, last.cause)
        else:
            merged.append(wait)
    return merged


class TimelineBuilder:
    """Reads the records of a trace in order and keeps the lanes of all workers."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, int], WorkerTimeline] = {}
        self.of_worker: dict[int, list[WorkerTimeline]] = {}
        """The lanes of each rank, in the order they started."""
        self.view = View(0, ())
        self.last_s = 0.0
        self.last_ordered: dict[tuple[int, int], float] = {}
        """When each peer began what it computed last."""

    def take(self, record: Record) -> None:
        event = record.event
        at = event.at
        if at > self.last_s:
            self.last_s = at
        if type(event) is ViewChanged:
            self.add_view(at, event.view)
        role, rank = record.node
        if role == "worker":
            lane = self.lanes.get((rank, record.incarnation)) or self.start(rank, record.incarnation, at)
            lane.last_s = at
            lane.own_records = True
            if lane.end_s is not None:
                return
            if type(event) is ParametersArrived:
                lane.versions[event.parameters.shard] = event.parameters.version
            elif type(event) is GradientReady:
                lane.finish_compute(at)
            elif type(event) is ComputeAborted:
                lane.abort_compute(at)
            elif type(event) is TimerFired:
                lane.answer(at, NOBODY, NOBODY)
            elif type(event) is ServersChanged and lane.computing:
                lane.add("compute", event.since)
                lane.add("wait", at, "the number of servers changes")
            for action in record.actions:
                if type(action) is Compute:
                    lane.start_compute(at, action.iteration)
                elif type(action) is SetTimer:
                    lane.park(at, NOBODY, RESTS)
        elif role == "peer":
            self.add_peer(record)
        elif role == "scheduler":
            self.add_scheduler(record)
        elif role == "server":
            if type(event) is PushArrived or type(event) is PushRejected:
                handle = event.push.handle
                if pushing := self.lanes.get((handle.source, handle.incarnation)):
                    pushing.push(at, handle.iteration)
            for action in record.actions:
                if type(action) is Answer:
                    parameters = action.parameters
                    if answered := self.lanes.get((parameters.worker, parameters.incarnation)):
                        answered.answer(at, rank, action.released_by)
                elif type(action) is Park and (parked := self.lanes.get((action.pull.worker, action.pull.incarnation))):
                    parked.park(at, rank, action.reason)

    def add_peer(self, record: Record) -> None:
        """Reads a record of a peer, which has its own reason to wait, ended by the sender of the event."""
        at, event = record.event.at, record.event
        process = (record.node[1], record.incarnation)
        lane = self.lanes.get(process) or self.start(*process, at)
        lane.last_s = at
        if lane.end_s is not None:
            return
        if isinstance(event, GradientReady | GradientRejected):
            lane.finish_compute(at)
        for action in record.actions:
            if type(action) is PeerWait:
                lane.answer(at, NOBODY, sender_of(event))
                lane.park(at, NOBODY, action.reason)
            elif type(action) is Compute:
                lane.answer(at, NOBODY, sender_of(event))
                lane.start_compute(at, action.iteration)
                self.last_ordered[process] = at

    def add_scheduler(self, record: Record) -> None:
        """Reads a record of the scheduler: a pull it holds waits for all shards, until the rise that lets it pass."""
        at, event = record.event.at, record.event
        for action in record.actions:
            if isinstance(action, Send) and isinstance(action.message, Release):
                lane = self.lanes.get((action.message.worker, action.message.incarnation))
                if lane is not None:
                    lane.answer(at, NOBODY, event.rise.by if isinstance(event, RiseArrived) else NOBODY)
            elif isinstance(action, Park):
                lane = self.lanes.get((action.pull.worker, action.pull.incarnation))
                if lane is not None:
                    lane.park(at, NOBODY, action.reason)

    def add_view(self, at: float, view: View) -> None:
        """Reads a view. Views reach each node in its own time, and are complete: the first sight of a newer one
        counts."""
        if view.number <= self.view.number:
            return
        for member in set(self.view.members).difference(view.members):
            lane = self.lanes.get(member)
            if lane is not None and lane.end_s is None:
                lane.end(at)
        self.view = view
        for rank, incarnation in view.members:
            if (rank, incarnation) not in self.lanes:
                self.start(rank, incarnation, at)

    def start(self, worker: int, incarnation: int, at: float) -> WorkerTimeline:
        lane = self.lanes[worker, incarnation] = WorkerTimeline(worker, incarnation, at)
        earlier = self.of_worker.setdefault(worker, [])
        before = earlier[-1] if earlier else None
        if before is not None and before.incarnation > incarnation:
            lane.end(at)
            return lane
        if before is not None and before.end_s is None:
            before.end(before.last_s)
        earlier.append(lane)
        return lane

    def finish(self, end_s: float) -> None:
        """Ends all lanes: the run ended at `end_s`."""
        for process, lane in self.lanes.items():
            if lane.end_s is None:
                # A peer that has done its iterations stays a member, and does not compute what it enters last.
                lane.end(
                    min(end_s, self.last_ordered[process]) if lane.computing and process in self.last_ordered else end_s
                )

    def lifetimes_s(self) -> float:
        return sum(lane.end_s - lane.start_s for lane in self.lanes.values() if lane.end_s is not None)

    def spans(self, end_s: float) -> list[Span]:
        """Returns the spans by worker, then by time; after `finish`."""
        spans: list[Span] = []
        for worker in sorted(self.of_worker):
            lanes = self.of_worker[worker]
            for lane, after in zip(lanes, [*lanes[1:], None], strict=True):
                spans += lane.spans
                died, until = lane.end_s or 0.0, end_s if after is None else after.start_s
                if died < until:
                    spans.append(Span(worker, lane.incarnation, "dead", died, until))
        return spans


def sender_of(event: Event) -> int:
    """Returns the peer whose message an event is; -1 if it is none."""
    for name in ("update", "offer"):
        if hasattr(event, name):
            return int(getattr(event, name).handle.source)
    for name in ("token", "ack", "hello", "reply"):
        if hasattr(event, name):
            return int(getattr(event, name).peer)
    return NOBODY


def spans(trace: Trace, time_s: float | None = None) -> list[Span]:
    """Returns the spans of all workers, by worker and time. `time_s` is the run's end, if after its last record."""
    lanes = TimelineBuilder()
    for record in trace.records:
        lanes.take(record)
    end_s = max(lanes.last_s, time_s or 0.0)
    lanes.finish(end_s)
    return lanes.spans(end_s)
