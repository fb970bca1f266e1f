"""Timelines as Chrome trace JSON, for Perfetto (ui.perfetto.dev) or chrome://tracing, beside torch.profiler.

One process per run, named after its policy; one thread per server with a mark for each step and each dropped
gradient, one thread per worker with its spans. All incarnations of a worker share its thread: they do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from paceline.core.actions import Apply, Drop
from paceline.core.events import ServersChanged, ViewChanged
from paceline.core.trace import Trace
from paceline.report.worker_spans import Span, spans

Entry = dict[str, Any]


def chrome_trace(runs: list[tuple[str, Trace]]) -> bytes:
    """Writes the runs side by side, each named."""
    entries: list[Entry] = []
    for pid, (name, trace) in enumerate(runs, start=1):
        entries += _names(pid, name, trace)
        entries += _marks(pid, trace)
        first = servers_of(trace) + 1
        entries += [_slice(pid, first, span) for span in spans(trace)]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": entries})


def _names(pid: int, name: str, trace: Trace) -> Iterator[Entry]:
    members = trace.header.members
    yield _meta(pid, 0, "process_name", {"name": name})
    yield _meta(pid, 0, "process_sort_index", {"sort_index": pid})
    servers = servers_of(trace)
    yield from _thread_names(pid, {shard + 1: f"server {shard}" for shard in range(servers)})
    views = (record.event.view for record in trace.records if isinstance(record.event, ViewChanged))
    joined = {rank for view in views for rank, _ in view.members}
    ranks = sorted(joined.union(range(members.workers)))
    yield from _thread_names(pid, {servers + 1 + rank: f"worker {rank}" for rank in ranks})


def _thread_names(pid: int, names: dict[int, str]) -> Iterator[Entry]:
    for tid, thread in names.items():
        yield _meta(pid, tid, "thread_name", {"name": thread})
        yield _meta(pid, tid, "thread_sort_index", {"sort_index": tid})


def servers_of(trace: Trace) -> int:
    """Returns the most servers there were at a time: their number may change in a live run."""
    changes = [len(record.event.nbytes) for record in trace.records if isinstance(record.event, ServersChanged)]
    return max([trace.header.members.servers, *changes])


def _meta(pid: int, tid: int, name: str, args: Entry) -> Entry:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _marks(pid: int, trace: Trace) -> Iterator[Entry]:
    for record in trace.records:
        role, rank = record.node
        if role != "server":
            continue
        for action in record.actions:
            if isinstance(action, Apply):
                pushed = [f"worker {each.source}, iteration {each.iteration}" for each in action.handles]
                args: Entry = {"version": action.version, "weight": action.weight, "gradients": pushed}
                yield _mark(pid, rank + 1, "apply", record.event.at, args)
            elif isinstance(action, Drop):
                handle = action.handle
                args = {"worker": handle.source, "iteration": handle.iteration, "reason": action.reason}
                yield _mark(pid, rank + 1, "drop", record.event.at, args)


def _mark(pid: int, tid: int, name: str, at: float, args: Entry) -> Entry:
    return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": _us(at), "args": args}


def _slice(pid: int, first: int, span: Span) -> Entry:
    start = _us(span.start_s)
    args: Entry = {"incarnation": span.incarnation}
    if span.iteration >= 0:
        args["iteration"] = span.iteration
    if span.kind == "wait":
        args["reason"] = span.reason
        args["shard"] = span.shard
        args["released by"] = f"worker {span.cause}" if span.cause >= 0 else "nobody's push"
    if span.kind == "aborted":
        args["updates uncovered"] = span.uncovered
    # The end is rounded, not the length: neighbours in a thread must touch, or the viewer nests them.
    entry: Entry = {"ph": "X", "pid": pid, "tid": first + span.worker, "name": span.kind, "cat": span.kind}
    return entry | {"ts": start, "dur": max(0.0, round(_us(span.end_s) - start, 3)), "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
