"""What can be counted where there are no servers: how far apart peers were, what lay in their queues, who jumped."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from paceline.core.actions import Apply, Compute, Drop, Reduce, Send
from paceline.core.events import GradientRejected, UpdateArrived, ViewChanged
from paceline.core.messages import Offer, Reply, Update
from paceline.core.trace import Header, Record, Trace

Process = tuple[int, int]


class PeerCounts:
    """Counts what happens on peers, record by record."""

    def __init__(self, header: Header) -> None:
        self.peers = header.members.workers
        self.nbytes = sum(header.slice_bytes)
        self.steps = 0
        self.late = 0
        self.rejected = 0
        self.sent = 0
        self.staleness: Counter[int] = Counter()

    @property
    def updates(self) -> int:
        return self.steps // self.peers if self.peers else 0

    def take(self, record: Record) -> None:
        self.rejected += isinstance(record.event, GradientRejected)
        for action in record.actions:
            if isinstance(action, Apply):
                self.steps += 1
            elif isinstance(action, Reduce):
                for handle in action.handles:
                    self.staleness[max(0, action.iteration - handle.iteration)] += 1
            elif isinstance(action, Drop):
                self.late += action.reason.startswith("late")
            elif isinstance(action, Send) and isinstance(action.message, Update | Offer | Reply):
                self.sent += action.message.handle is not None

    def bytes(self) -> dict[str, int]:
        """Returns the bytes of parameters sent from peer to peer; nothing where there are no peers."""
        return {"update": self.sent * self.nbytes} if self.sent else {}


class Apartness(Struct):
    """How far peers were apart in iterations, over time, and the consequences."""

    times_s: list[float]
    gaps: list[int]
    """The largest difference of iterations between any two peers, after each of `times_s`."""
    queues: list[int]
    """The longest queue of updates at each of `times_s`."""
    queued: int
    """The most updates that were in one peer's queue."""
    jumps: list[tuple[float, int, int, int]]
    """The jumps over iterations: (when, who, from, to)."""
    iteration_s: dict[int, float]
    """peer -> the mean seconds from one iteration to the next, those it skipped counted too."""


class PeersView(Struct):
    """What a page shows of the peers of a run. A bound of None means that there is none."""

    gaps: list[dict[str, float | None]]
    """Rows of time_s, gap and queue."""
    consensus: list[dict[str, float | None]]
    """Rows of time_s and distance."""
    bound: float | None
    room: int | None
    jumps: int


def peers_view(
    trace: Trace, consensus: list[tuple[float, float]], bound: float | None, room: int | None
) -> PeersView | None:
    """Returns what the page shows of peers; None where there were none."""
    found = apartness(trace)
    if not found.times_s:
        return None
    rows = zip(found.times_s, found.gaps, found.queues, strict=True)
    gaps: list[dict[str, float | None]] = [{"time_s": at, "gap": gap, "queue": queue} for at, gap, queue in rows]
    return PeersView(gaps, [{"time_s": at, "distance": far} for at, far in consensus], bound, room, len(found.jumps))


def apartness(trace: Trace) -> Apartness:
    """Measures how far peers were apart, from their trace."""
    at: dict[Process, int] = {}
    """The iteration each live peer is in, as far as the records show."""
    held: Counter[Process] = Counter()
    first: dict[int, tuple[float, int]] = {}
    last: dict[int, tuple[float, int]] = {}
    found = Apartness([], [], [], 0, [], {})
    for record in trace:
        if record.node[0] != "peer":
            continue
        peer, process, now = record.node[1], (record.node[1], record.incarnation), record.event.at
        if isinstance(record.event, ViewChanged):
            members = set(record.event.view.members)
            for gone in [known for known in at if known not in members]:
                del at[gone]
                held.pop(gone, None)
        if isinstance(record.event, UpdateArrived):
            held[process] += 1
        for action in record.actions:
            if isinstance(action, Reduce):
                held[process] -= len(action.handles)
            elif isinstance(action, Drop) and action.handle.source != peer:
                held[process] -= 1
            elif isinstance(action, Compute):
                if process in at and action.iteration > at[process] + 1:
                    found.jumps.append((now, peer, at[process], action.iteration))
                at[process] = action.iteration
                first.setdefault(peer, (now, action.iteration))
                last[peer] = (now, action.iteration)
                found.times_s.append(now)
                found.gaps.append(max(at.values()) - min(at.values()))
                found.queues.append(max(held.values(), default=0))
        found.queued = max(found.queued, held[process])
    for peer, (since_s, start) in first.items():
        until_s, end = last[peer]
        if end > start:
            found.iteration_s[peer] = (until_s - since_s) / (end - start)
    return found
