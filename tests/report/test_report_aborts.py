"""Computations that were given up: their spans, their price, what they uncovered, their bytes."""

from __future__ import annotations

import msgspec
import pytest

import paceline
from paceline.core.actions import Answer, Compute, Send
from paceline.core.events import (
    ComputeAborted,
    GradientReady,
    NotifyArrived,
    ParametersArrived,
    PullArrived,
    ResyncArrived,
    TimerFired,
    ViewChanged,
)
from paceline.core.messages import Members, Node, Notify, Parameters, Pull, Resync, View
from paceline.core.scheduler import SCHEDULER
from paceline.core.trace import Header, Record, Trace
from paceline.report.chrome import chrome_trace
from paceline.report.html import render
from paceline.report.metrics import measure, spans

WORKER, SERVER = Node("worker", 0), Node("server", 0)


def answer(at: float, shard: int, version: int) -> Record:
    return Record(WORKER, 0, ParametersArrived(at, Parameters(shard, 0, 0, 1, version, False)), ())


def by_hand() -> Trace:
    """One iteration on two shards: begun at 1, given up at 3, begun again at 4, done at 8."""
    given = Answer(Parameters(0, 0, 0, 1, 9, False), "", -1)
    order = (Compute(1, 0),)
    again = Compute(1, 1)
    records = [
        Record(WORKER, 0, ViewChanged(0.0, View(1, ((0, 0),))), ()),
        answer(0.5, 0, 4),
        Record(WORKER, 0, ParametersArrived(1.0, Parameters(1, 0, 0, 1, 5, False)), order),
        Record(SCHEDULER, 0, NotifyArrived(1.0, Notify(0, 0, 1)), ()),
        Record(SCHEDULER, 0, TimerFired(2.5, 1), (Send(WORKER, Resync(0, 0, 1)),)),
        Record(WORKER, 0, ResyncArrived(3.0, Resync(0, 0, 1)), ()),
        Record(WORKER, 0, ComputeAborted(3.0, 1, 0), ()),
        Record(SERVER, 0, PullArrived(3.1, Pull(0, 0, 1, 1)), (given,)),
        Record(SERVER, 0, PullArrived(3.1, Pull(1, 0, 1)), (given,)),
        answer(3.5, 0, 9),
        Record(WORKER, 0, ParametersArrived(4.0, Parameters(1, 0, 0, 1, 8, False)), (again,)),
        Record(WORKER, 0, GradientReady(8.0, 1, 1, (10, 10)), ()),
    ]
    return Trace(Header("virtual", "specsync", Members(1, 2), 0, (100, 200)), records)


def test_the_lane_has_what_was_lost_and_what_it_was_for() -> None:
    found = [(s.kind, s.start_s, s.end_s, s.iteration, s.uncovered) for s in spans(by_hand())]
    assert found == [
        ("pull", 0.0, 1.0, -1, 0),
        ("aborted", 1.0, 3.0, 1, 4.0),
        ("pull", 3.0, 4.0, 1, 0),
        ("compute", 4.0, 8.0, 1, 0),
    ]


def test_the_numbers() -> None:
    metrics = measure(by_hand())
    assert metrics.aborts == {"count": 1, "seconds": 2.0, "uncovered": 4.0}
    small = len(msgspec.msgpack.encode(Notify(0, 0, 1))) + len(msgspec.msgpack.encode(Resync(0, 0, 1)))
    assert metrics.bytes == {"push": 0, "pull": 100, "resync_pull": 100, "notices": small}
    assert metrics.iterations == 1


def test_a_run_tells_of_it() -> None:
    policy = "specsync:abort_time=0.03,abort_rate=0.2"
    run = paceline.simulate("quadratic", policy, workers=4, servers=2, cluster="lognormal:sigma=0.3", iterations=20)
    counted = sum(isinstance(record.event, ComputeAborted) for record in run.trace)
    summary = run.summary()
    assert summary["aborts"]["count"] == counted > 10
    assert summary["aborts"]["seconds"] == pytest.approx(0.03 * counted, rel=0.2), "each ABORT_TIME and two latencies"
    assert summary["aborts"]["uncovered"] >= 1, "more than a fifth of four workers had pushed"
    assert summary["bytes"]["resync_pull"] == counted * sum(run.trace.header.slice_bytes)
    assert summary["bytes"]["notices"] > 0
    page = render([run.view()], {})
    assert "What was begun again" in page
    assert "given up and begun again" in page
    assert b"updates uncovered" in chrome_trace([(run.policy, run.trace)])


def test_other_runs_do_not() -> None:
    run = paceline.simulate("quadratic", "asp", workers=2, iterations=5)
    assert "aborts" not in run.summary()
    assert set(run.metrics.bytes) == {"push", "pull"}
    page = render([run.view()], {})
    assert "begun again" not in page
    assert "given up" not in page
