"""A run as it goes on, from the records of its trace and of its driver, in the order of time: `take`, then `snapshot`.

It keeps the last minute and the last iterations of each worker, so what it holds does not grow with the run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median

from paceline.core.actions import Answer, Apply, Compute, Drop, Park, Reduce, Send
from paceline.core.actions import Wait as PeerWait
from paceline.core.events import (
    GradientReady,
    GradientRejected,
    ParametersArrived,
    PullArrived,
    PullRepeated,
    PushArrived,
    PushRejected,
    ServersChanged,
    ViewChanged,
)
from paceline.core.messages import Offer, Reply, Update
from paceline.core.step_times import Row, StepRow, TurnRow
from paceline.core.trace import Record
from paceline.report.worker_spans import TimelineBuilder, WorkerTimeline
from paceline.watching import snapshot as shown
from paceline.watching.diagnosis import Seen, explain
from paceline.watching.driver_records import Begun, DriverRecord, Ended, Logged, Said
from paceline.watching.iterations import WINDOW_S, IterationCutter
from paceline.watching.lanes import drawn
from paceline.watching.snapshot import Finding, Happening, Lane, Snapshot, WorkerRow
from paceline.watching.time_left import time_left
from paceline.watching.waiting import WaitSums

MOST_POINTS = 400
"""Points of a metric that are shown; older ones are thinned out."""
MOST_HAPPENINGS = 200
MOST_LANES = 32
MOST_TURNS = 512
RATE_S = 5.0
ALL_SHARDS = -1

Process = tuple[int, int]


class RunWatch:
    """What is known of a run."""

    def __init__(self, name: str, script: str = "", iterations: int | None = None) -> None:
        self.name = name
        self.script = script
        self.iterations = iterations
        """How many iterations each worker is to do, if somebody has said so."""
        self.begun: Begun | None = None
        self.ended: Ended | None = None
        self.builder = TimelineBuilder()
        self.cutters: dict[Process, IterationCutter] = {}
        self.parked: dict[tuple[int, int], tuple[int, ...]] = {}
        """(shard, worker) -> for whom it waits."""
        self.asked: dict[Process, set[int]] = {}
        """The shards that have not answered."""
        self.ready_s: dict[Process, float] = {}
        self.pushed_to: dict[tuple[int, int], float] = {}
        self.answered: dict[tuple[int, int], float] = {}
        """(shard, worker) -> when it was answered, until it has heard that."""
        self.waiting = WaitSums()
        self.finished: set[int] = set()
        self.staleness: deque[tuple[float, int, int]] = deque()
        """(when, worker, versions), of the last minute."""
        self.counted: Counter[int] = Counter()
        """second -> gradients."""
        self.sent: dict[str, Counter[int]] = {"push": Counter(), "pull": Counter()}
        """What -> second -> bytes."""
        self.gradients = 0
        self.dropped = 0
        self.newest: dict[Process, int] = {}
        self.nbytes: dict[tuple[int, int], int] = {}
        self.slices: tuple[int, ...] = ()
        self.metrics: dict[str, list[tuple[float, float | None]]] = {}
        self.happenings: deque[Happening] = deque(maxlen=MOST_HAPPENINGS)
        self.turns: dict[int, deque[TurnRow]] = {}
        """shard -> what it did in its last turns."""
        self.peers = False
        self.servers = 0
        self.skipped = False
        self.found: dict[str, Finding] = {}
        """What was found last."""

    # What is told.

    def take_driver(self, record: DriverRecord) -> None:
        if isinstance(record, Begun):
            self.begun, self.ended = record, None
            self.servers, self.slices = record.servers, record.slice_bytes
            self.peers = not record.servers
        elif isinstance(record, Logged):
            for name, value in record.values.items():
                series = self.metrics.setdefault(name, [])
                series.append((record.at, value))
                if len(series) > 2 * MOST_POINTS:  # every other one of the older half
                    del series[1:MOST_POINTS:2]
        elif isinstance(record, Said):
            self.happenings.append(Happening(record.at, record.text))
        elif isinstance(record, Ended):
            self.ended = record

    def take(self, record: Record) -> None:
        role, rank = record.node
        at = record.event.at
        if type(record.event) is ViewChanged:
            self.take_view(record.event, at)
        if role == "server":
            self.take_server(record, rank, at)
            self.builder.take(record)
        elif role in ("worker", "peer"):
            process = (rank, record.incarnation)
            self.take_worker(record, process, at)
            self.builder.take(record)
            if any(type(action) is Compute for action in record.actions) and (cutter := self.cutter(process)):
                cutter.cut()
        else:
            self.builder.take(record)

    def take_row(self, row: Row) -> None:
        """Takes what a process has measured of itself."""
        if isinstance(row, StepRow) and (cutter := self.cutter((row.rank, row.incarnation))) is not None:
            cutter.take_row(row)
        elif isinstance(row, TurnRow):
            self.turns.setdefault(row.shard, deque(maxlen=MOST_TURNS)).append(row)

    def take_view(self, event: ViewChanged, at: float) -> None:
        view, before = event.view, self.builder.view
        if view.number <= before.number:
            return
        members, were = dict(view.members), dict(before.members)
        noun = "peer" if self.peers else "worker"
        for rank in were.keys() - members.keys():
            how = "has finished" if rank in view.finished else "is gone"
            self.happenings.append(Happening(at, f"{noun} {rank} {how}", "membership"))
        for rank, incarnation in members.items():
            if rank not in were and before.number:
                self.happenings.append(Happening(at, f"{noun} {rank} takes part", "membership"))
            elif were.get(rank, incarnation) != incarnation:
                self.happenings.append(Happening(at, f"{noun} {rank} takes part again", "membership"))
        self.finished = set(view.finished)

    def take_worker(self, record: Record, process: Process, at: float) -> None:
        event = record.event
        if type(event) is ParametersArrived:
            shard = event.parameters.shard
            sent_s = self.answered.pop((shard, process[0]), None)
            if sent_s is not None:
                self.add_travel(process, shard, at - sent_s)
        elif isinstance(event, GradientReady | GradientRejected):
            self.ready_s[process] = at
            if record.node[0] == "peer":
                self.peers = True
                self.count(at)
        if record.node[0] != "peer":
            return
        for action in record.actions:
            if isinstance(action, Reduce):
                for handle in action.handles:
                    self.staleness.append((at, process[0], max(0, action.iteration - handle.iteration)))
            elif isinstance(action, PeerWait):
                self.parked[ALL_SHARDS, process[0]] = action.waits_for
            elif isinstance(action, Drop):
                self.dropped += action.reason.startswith("late")
            elif isinstance(action, Send) and isinstance(action.message, Update | Offer | Reply):
                self.sent.setdefault("update", Counter())[int(at)] += sum(self.slices)

    def take_server(self, record: Record, shard: int, at: float) -> None:
        event = record.event
        if isinstance(event, PushArrived | PushRejected):
            self.take_push(event, shard, at)
        elif isinstance(event, PullArrived | PullRepeated):
            self.asked.setdefault((event.pull.worker, event.pull.incarnation), set()).add(shard)
        elif type(event) is ServersChanged:
            if self.servers and self.servers != len(event.nbytes):
                count = len(event.nbytes)
                text = f"{count} server{'s' * (count != 1)} instead of {self.servers}"
                self.happenings.append(Happening(at, text, "membership"))
            self.servers, self.slices = len(event.nbytes), event.nbytes
        self.servers = max(self.servers, shard + 1)
        for action in record.actions:
            if isinstance(action, Park):
                self.parked[shard, action.pull.worker] = action.waits_for
            elif isinstance(action, Answer):
                parameters = action.parameters
                worker = parameters.worker
                self.parked.pop((shard, worker), None)
                self.answered[shard, worker] = at
                nbytes = self.nbytes.get((shard, worker), self.slices[shard] if shard < len(self.slices) else 0)
                self.sent["pull"][int(at)] += nbytes
                process = (worker, parameters.incarnation)
                asked = self.asked.get(process)
                if asked is not None:
                    asked.discard(shard)
                    lane = self.builder.lanes.get(process)
                    if not asked and lane is not None and not lane.own_records and lane.end_s is None:
                        # What it writes is on another host: it is with the worker until it pushes.
                        lane.answer(at, shard, action.released_by)
                        lane.start_compute(at, parameters.iteration)
                        if cutter := self.cutter(process):
                            cutter.cut()
            elif isinstance(action, Apply):
                if not shard:
                    self.staleness.extend((at, each.source, action.staleness(each)) for each in action.handles)
            elif isinstance(action, Drop) and not shard:
                self.dropped += 1

    def take_push(self, event: PushArrived | PushRejected, shard: int, at: float) -> None:
        handle = event.push.handle
        process = (handle.source, handle.incarnation)
        self.sent["push"][int(at)] += handle.nbytes
        self.nbytes[shard, handle.source] = handle.nbytes
        lane = self.builder.lanes.get(process)
        if lane is not None and not lane.own_records and lane.computing:
            lane.finish_compute(at)
        if process in self.ready_s:
            self.add_travel(process, shard, at - self.ready_s[process])
        if not shard and handle.iteration > self.newest.get(process, -1):
            self.newest[process] = handle.iteration
            self.count(at)

    def add_travel(self, process: Process, shard: int, seconds: float) -> None:
        if (cutter := self.cutter(process)) is not None:
            cutter.shards[shard] = cutter.shards.get(shard, 0.0) + max(0.0, seconds)

    def count(self, at: float) -> None:
        self.gradients += 1
        self.counted[int(at)] += 1

    def cutter(self, process: Process) -> IterationCutter | None:
        cutter = self.cutters.get(process)
        if cutter is None and (lane := self.builder.lanes.get(process)) is not None:
            cutter = self.cutters[process] = IterationCutter(lane)
        return cutter

    def tidy(self, now: float) -> None:
        """Cuts what is new, and drops what is old."""
        before = now - WINDOW_S
        for process in self.builder.lanes:
            if (cutter := self.cutter(process)) is not None:
                cutter.cut()
                self.waiting.add(cutter.waits)
                cutter.waits.clear()
                cutter.forget(before)
        self.waiting.forget(before)
        while self.staleness and self.staleness[0][0] < before:
            self.staleness.popleft()
        for counts in (self.counted, *self.sent.values()):
            for second in [each for each in counts if each < now - 10 * WINDOW_S]:
                del counts[second]

    # What is shown.

    def snapshot(self, now: float, state: str, lanes: tuple[int, ...] | None = None) -> Snapshot:
        """Returns the run as it looks at `now`; with the lanes of these workers, or of those that matter most."""
        self.tidy(now)
        waits_for: dict[int, set[int]] = {}
        for (_, worker), named in self.parked.items():
            waits_for.setdefault(worker, set()).update(named)
        rows = [
            self.row(lanes_, now, waits_for.get(worker, set()))
            for worker, lanes_ in sorted(self.builder.of_worker.items())
        ]
        blame = self.waiting.by_worker()
        for row in rows:
            row.caused_s = blame.get(row.rank, 0.0)
        present = [row for row in rows if row.state not in (shown.DONE, shown.GONE)]
        judged = present or [row for row in rows if row.state == shown.DONE]
        since = max(0.0, now - WINDOW_S)
        lifetime_s = sum(self.alive_s(row, since, now) for row in rows)
        seen = Seen(
            self.policy, self.peers, now, self.servers, {row.rank: self.recent(row) for row in judged},
            {row.rank: row for row in judged}, list(self.waiting.waits), since,
            state == shown.RUNS, self.found, self.turns,
        )  # fmt: skip
        findings, healthy = explain(seen)
        self.found = {found.who: found for found in findings}
        left_s, left_how = time_left(
            now, self.begun.target if self.begun else None, self.metrics, self.iterations,
            [(row.iteration, row.rate) for row in present],
        )  # fmt: skip
        stale = [versions for _, _, versions in self.staleness]
        return Snapshot(
            name=self.name, state=state, how=self.ended.how if self.ended else "", policy=self.policy,
            script=self.script, target=self.begun.target if self.begun else None, peers=self.peers,
            workers_wanted=self.begun.workers if self.begun else len(rows), servers=self.servers, time_s=now,
            gradients=self.gradients, gradients_per_s=self.per_second(self.counted, now),
            iteration=min((row.iteration for row in present), default=max((row.iteration for row in rows), default=0)),
            workers=rows,
            wait_share=sum(row.wait_share * self.alive_s(row, since, now) for row in rows) / lifetime_s
            if lifetime_s else 0.0,
            waiting_by_worker=list(blame.items())[:20],
            waiting_by_reason=list(self.waiting.by_reason().items())[:12],
            staleness_mean=sum(stale) / len(stale) if stale else None, staleness_max=max(stale, default=0),
            dropped=self.dropped,
            bytes_per_s={what: self.per_second(counts, now) for what, counts in self.sent.items() if counts},
            throughput=self.series(now), metrics={name: thinned(points) for name, points in self.metrics.items()},
            happenings=list(self.happenings), lanes=self.lanes(rows, lanes, since, now), findings=findings,
            healthy=healthy, left_s=left_s if state == shown.RUNS else None, left_how=left_how, skipped=self.skipped,
        )  # fmt: skip

    @property
    def policy(self) -> str:
        return self.begun.policy if self.begun is not None else ""

    def recent(self, row: WorkerRow) -> IterationCutter:
        return self.cutters[row.rank, row.incarnation]

    def alive_s(self, row: WorkerRow, since: float, now: float) -> float:
        lane = self.builder.lanes[row.rank, row.incarnation]
        return max(0.0, min(now, lane.end_s if lane.end_s is not None else now) - max(since, lane.start_s))

    def row(self, lanes: list[WorkerTimeline], now: float, waits_for: set[int]) -> WorkerRow:
        lane = lanes[-1]
        process = (lane.worker, lane.incarnation)
        cutter = self.cutter(process)
        assert cutter is not None
        state, since_s, reason = self.state_of(lane)
        done = cutter.done
        until = lane.end_s if lane.end_s is not None else now
        recent = [each for each in done if each.end_s > until - RATE_S] or done[-2:]
        passed_s = until - recent[0].start_s if recent else 0.0
        last = done[-10:]
        since = max(now - WINDOW_S, lane.start_s)
        waited = max(0.0, cutter.waited_s)
        if state == shown.WAITS:
            waited += max(0.0, now - max(since_s, since))
        stale = [versions for _, worker, versions in self.staleness if worker == lane.worker][-20:] if (
            len(self.builder.of_worker) <= MOST_LANES) else []  # fmt: skip
        lived = max(until - since, 1e-9)
        own_s, compute_s, push_s, answer_s = (
            median(getattr(each, part) for each in last) if last else None
            for part in ("own_s", "compute_s", "push_s", "answer_s")
        )
        waits = state == shown.WAITS
        return WorkerRow(
            rank=lane.worker, incarnation=lane.incarnation, state=state, since_s=since_s,
            reason=reason if waits else "", waits_for=tuple(sorted(waits_for)) if waits else (),
            iteration=lane.iteration + (0 if lane.computing else 1) if lane.iteration >= 0 else 0,
            rate=len(recent) / passed_s if passed_s > 0 else 0.0,
            own_s=own_s, compute_s=compute_s, push_s=push_s, answer_s=answer_s,
            wait_share=min(1.0, waited / lived), caused_s=0.0, staleness=sum(stale) / len(stale) if stale else None,
        )  # fmt: skip

    def state_of(self, lane: WorkerTimeline) -> tuple[str, float, str]:
        """Returns what a worker does, since when, and why."""
        if lane.end_s is not None:
            return (shown.DONE if lane.worker in self.finished else shown.GONE), lane.end_s, ""
        if lane.parked:
            since_s, reason = max(lane.parked.values())
            return shown.WAITS, since_s, reason
        if lane.computing:
            return shown.COMPUTES, lane.since_s, ""
        if lane.sent and lane.pushed_s is None and lane.first_reply_s == math.inf:
            return shown.PUSHES, lane.since_s, ""
        return shown.READS, lane.since_s, ""

    def per_second(self, counts: Counter[int], now: float) -> float:
        """Returns how many in a second, of the last whole ones."""
        last = int(now)
        first = max(0, last - int(RATE_S))
        return sum(counts[second] for second in range(first, last)) / max(1, last - first)

    def series(self, now: float) -> list[tuple[float, float | None]]:
        seconds = range(max(0, int(now) - int(5 * WINDOW_S)), int(now))
        return [(float(second), float(self.counted[second])) for second in seconds]

    def lanes(self, rows: list[WorkerRow], wanted: tuple[int, ...] | None, since: float, now: float) -> list[Lane]:
        if wanted is None and len(rows) > MOST_LANES:
            slowest = sorted(rows, key=lambda row: (-row.caused_s, -(row.own_s or 0.0)))
            wanted = tuple(row.rank for row in slowest[:MOST_LANES])
        chosen = [row.rank for row in rows if wanted is None or row.rank in wanted][:MOST_LANES]
        return [Lane(rank, drawn(self.builder.of_worker[rank], since, now)) for rank in chosen]


def thinned(points: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Returns so few points that a page can show them, the last one among them."""
    step = len(points) // MOST_POINTS + 1
    return points[(len(points) - 1) % step :: step]
