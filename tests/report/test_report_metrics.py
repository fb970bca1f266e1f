"""Numbers worked out by hand, on runs small enough to follow with a pencil."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paceline.core.actions import Answer, Apply, Compute, Drop, Park
from paceline.core.events import GradientReady, ParametersArrived, PullArrived, PushArrived, ViewChanged
from paceline.core.messages import Handle, Members, Node, Parameters, Pull, Push, View
from paceline.core.progress import name_workers
from paceline.core.trace import Header, Record, Trace
from paceline.report.metrics import Span, measure, spans, template
from paceline.report.staleness import staleness_by_shard

POLICIES = ["bsp", "asp", "ssp:staleness=0", "ssp:staleness=2", "backup:extra=1"]


def lane(trace, worker, **options):
    return [
        (span.kind, span.start_s, span.end_s, span.iteration, span.cause)
        for span in spans(trace, **options)
        if span.worker == worker
    ]


def test_bsp_two_workers(simulate):
    """Worker 0 takes 1 s, worker 1 takes 3 s: worker 0 waits from 1 to 3 and from 4 to 6."""
    metrics = measure(simulate("bsp", [1.0, 3.0], until_s=6.0))
    assert metrics.iterations == 2
    assert isinstance(metrics.iterations, int)
    assert metrics.updates == 2
    assert metrics.time_s == 6.0
    assert metrics.wait_share == pytest.approx(4 / 12)
    assert metrics.dpr_per_100 == 100.0
    assert metrics.staleness == {"min": 0, "mean": 0.0, "median": 0.0, "max": 0}
    assert metrics.dropped == 0
    assert metrics.bytes == {"push": 4 * 10, "pull": 2 * 100 + 4 * 10}, "whole at first, then coded as pushes are"
    assert metrics.waiting_caused_by == {1: 4.0}
    assert metrics.waiting_by_reason == {"iteration # lacks worker #": 4.0}


def test_latency_is_push_or_pull_and_a_run_may_end_while_a_worker_waits(simulate):
    trace = simulate("bsp", [1.0, 3.0], servers=2, latency_s=0.5, until_s=7.0)
    assert lane(trace, 0, time_s=7.0) == [
        ("pull", 0.0, 1.0, -1, -1),
        ("compute", 1.0, 2.0, 0, -1),
        ("push", 2.0, 2.5, 0, -1),
        ("wait", 2.5, 4.5, 0, 1),
        ("pull", 4.5, 5.0, 0, -1),
        ("compute", 5.0, 6.0, 1, -1),
        ("push", 6.0, 6.5, 1, -1),
        ("wait", 6.5, 7.0, 1, -1),
    ]
    assert lane(trace, 1, time_s=7.0)[-1] == ("compute", 5.0, 7.0, 1, -1)
    metrics = measure(trace, time_s=7.0)
    assert (metrics.gradients, metrics.iterations) == (3, 2)
    assert metrics.updates == 1
    assert metrics.time_s == 7.0
    assert metrics.wait_share == pytest.approx(2.5 / 14)
    assert metrics.dpr_per_100 == pytest.approx(100 * 4 / 1.5)
    assert metrics.bytes == {"push": 6 * 10, "pull": 2 * (100 + 200) + 2 * 2 * 10}
    assert metrics.waiting_caused_by == {1: 2.0, -1: 0.5}


def test_without_a_time_the_run_ends_with_its_last_record(simulate):
    trace = simulate("bsp", [1.0, 3.0], servers=2, latency_s=0.5, until_s=7.0)
    assert measure(trace).time_s == 6.5
    assert measure(trace, time_s=5.0).time_s == 5.0
    assert measure(trace).wait_share == pytest.approx(2.0 / 13)
    assert max(span.end_s for span in spans(trace)) == 6.5


def test_asp_staleness(simulate):
    """Pushes at 1, 2, 2.5 (worker 1), 3, 4, 5 (worker 1), 5 are 0, 0, 2, 1, 0, 2, 1 versions behind."""
    metrics = measure(simulate("asp", [1.0, 2.5], until_s=5.0))
    assert metrics.staleness == {"min": 0, "mean": pytest.approx(6 / 7), "median": 1.0, "max": 2}
    assert metrics.updates == 7
    assert metrics.wait_share == 0.0
    assert metrics.dpr_per_100 == 0.0
    assert metrics.waiting_caused_by == {}


def test_median_between_two(simulate):
    """Pushes at 1, 2, 2.5, 3: 0, 0, 2, 1."""
    metrics = measure(simulate("asp", [1.0, 2.5], until_s=3.0))
    assert metrics.staleness == {"min": 0, "mean": 0.75, "median": 0.5, "max": 2}


def test_ssp_waits_at_its_bound(simulate):
    """With s = 1 worker 0 may push 0 and 1, then waits from 2 to 3; pushes 2 at 4 and waits to 6."""
    trace = simulate("ssp:staleness=1", [1.0, 3.0], until_s=6.0)
    assert [span[1:3] for span in lane(trace, 0) if span[0] == "wait"] == [(2.0, 3.0), (4.0, 6.0)]
    metrics = measure(trace)
    assert metrics.waiting_by_reason == {"# ahead of worker #, bound #": 3.0}
    assert metrics.dpr_per_100 == pytest.approx(100 * 2 / (5 / 2))


@pytest.mark.parametrize("servers", [1, 3])
def test_a_late_gradient_is_dropped_once_whatever_the_shards(simulate, servers):
    """Backup with 1 of 2: worker 1's pushes, at 2.5 and 5, are late."""
    metrics = measure(simulate("backup:extra=1", [1.0, 2.5], servers=servers, until_s=5.0))
    assert metrics.dropped == 2
    assert metrics.updates == 5
    assert metrics.staleness["max"] == 0


def test_a_rejected_gradient_is_dropped_and_its_bytes_arrived(simulate):
    metrics = measure(simulate("bsp", [1.0, 1.0], servers=2, until_s=2.0, reject=[(0, 0, 1)]))
    assert metrics.dropped == 1
    assert metrics.bytes["push"] == 2 * 2 * 2 * 10


def test_a_ghost_is_not_dropped_work(simulate):
    """Worker 1 is dropped at 2 but pushes at 2.5. The view releases worker 0: nobody's push did."""
    trace = simulate("bsp", [1.0, 2.5], until_s=3.0, views=[(2.0, ((0, 0),))])
    assert any(isinstance(action, Drop) for record in trace for action in record.actions)
    metrics = measure(trace)
    assert metrics.dropped == 0
    assert metrics.waiting_caused_by == {-1: 1.0}
    assert lane(trace, 1) == [("compute", 0.0, 2.0, 0, -1), ("dead", 2.0, 3.0, -1, -1)]


def test_a_worker_that_died_and_came_back(simulate):
    trace = simulate(
        "bsp", [1.0, 3.0], until_s=8.0, kill=[(2.0, 1, 0)], views=[(4.0, ((0, 0),)), (5.0, ((0, 0), (1, 1)))]
    )
    assert lane(trace, 1) == [
        ("compute", 0.0, 4.0, 0, -1),
        ("dead", 4.0, 5.0, -1, -1),
        ("compute", 5.0, 8.0, 1, -1),
    ]
    assert [span.incarnation for span in spans(trace) if span.worker == 1] == [0, 0, 1]
    metrics = measure(trace)
    assert metrics.waiting_caused_by == {-1: 3.0, 1: 3.0}
    assert metrics.wait_share == pytest.approx(6 / (8 + 4 + 3))


def record(role, rank, event, *actions, incarnation=0):
    return Record(Node(role, rank), incarnation, event, actions)


def by_hand(*records, servers=2):
    view = record("worker", 0, ViewChanged(0.0, View(1, ((0, 0),))))
    return Trace(Header("live", "bsp", Members(2, servers), 0, (8,) * servers), [view, *records])


def parked(at, shard, reason):
    pull = Pull(0, 0, 1)
    return record("server", shard, PullArrived(at, pull), Park(pull, reason, (1,), 1))


def released(at, shard, by):
    push = Push(Handle(by, 0, 0, 0, 4))
    answer = Answer(Parameters(shard, 0, 0, 1, 1, False), "iteration 0 is finished", by)
    return record("server", shard, PushArrived(at, push), answer)


def compute(at, iteration):
    parameters = Parameters(0, 0, 0, iteration, iteration, False)
    return record("worker", 0, ParametersArrived(at, parameters), Compute(iteration, 0))


def ready(at, iteration):
    return record("worker", 0, GradientReady(at, iteration, 0, (4, 4)))


def test_waits_on_several_shards_are_one_wait_with_the_last_answer_s_reason():
    trace = by_hand(
        compute(0.0, 0), ready(1.0, 0), parked(1.1, 0, "first"), parked(1.5, 1, "second"),
        released(2.0, 0, 1), released(3.0, 1, 2), compute(3.5, 1),
    )  # fmt: skip
    assert spans(trace)[1:] == [
        Span(0, 0, "push", 1.0, 1.1, 0),
        Span(0, 0, "wait", 1.1, 3.0, 0, "second", 2, 1),
        Span(0, 0, "pull", 3.0, 3.5, 0),
    ]


def test_a_wait_inside_a_longer_one_takes_the_longer_one_s_reason():
    trace = by_hand(
        compute(0.0, 0), ready(1.0, 0), parked(1.0, 0, "long"), parked(1.5, 1, "short"),
        released(2.0, 1, 1), released(3.0, 0, 2), compute(3.0, 1),
    )  # fmt: skip
    assert spans(trace)[1:] == [Span(0, 0, "wait", 1.0, 3.0, 0, "long", 2, 0)]


def test_waits_apart_stay_apart():
    trace = by_hand(
        compute(0.0, 0), ready(1.0, 0), parked(1.0, 0, "a"), released(1.5, 0, 1),
        parked(2.0, 1, "b"), released(3.0, 1, 2), compute(3.0, 1),
    )  # fmt: skip
    assert [(s.kind, s.start_s, s.end_s, s.cause) for s in spans(trace)[1:]] == [
        ("wait", 1.0, 1.5, 1), ("pull", 1.5, 2.0, -1), ("wait", 2.0, 3.0, 2),
    ]  # fmt: skip


def test_clocks_that_disagree_make_no_overlap():
    """A shard whose clock is behind parks before the gradient is ready; waiting never overlaps computing."""
    trace = by_hand(
        compute(0.0, 0), parked(0.9, 0, "early"), ready(1.0, 0), released(2.0, 0, 1), compute(2.5, 1)
    )  # fmt: skip
    assert [(s.kind, s.start_s, s.end_s) for s in spans(trace)] == [
        ("compute", 0.0, 1.0), ("wait", 1.0, 2.0), ("pull", 2.0, 2.5),
    ]  # fmt: skip


def test_the_last_shard_to_get_the_gradient_ends_the_push():
    push = Push(Handle(0, 0, 0, 0, 4))
    answer = Answer(Parameters(0, 0, 0, 1, 1, False), "", -1)
    trace = by_hand(
        compute(0.0, 0), ready(1.0, 0), record("server", 0, PushArrived(1.25, push), answer),
        record("server", 1, PushArrived(1.75, push)), compute(2.0, 1),
    )  # fmt: skip
    assert [(s.kind, s.start_s, s.end_s) for s in spans(trace)] == [
        ("compute", 0.0, 1.0), ("push", 1.0, 1.75), ("pull", 1.75, 2.0),
    ]  # fmt: skip


def test_an_old_view_that_comes_late_kills_nobody(simulate):
    trace = simulate("bsp", [1.0, 1.0], until_s=3.0)
    trace.records.append(record("server", 0, ViewChanged(3.0, View(0, ((0, 0),)))))
    assert not [span for span in spans(trace, time_s=4.0) if span.kind == "dead"]


def test_an_empty_trace():
    header = Header("virtual", "bsp", Members(2, 1), 0, (8,))
    metrics = measure(Trace(header))
    assert (metrics.iterations, metrics.wait_share, metrics.dpr_per_100) == (0, 0.0, 0.0)
    assert metrics.staleness == {"min": 0, "mean": 0.0, "median": 0.0, "max": 0}
    assert spans(Trace(header)) == []


def uneven(seed):
    def compute_s(worker, iteration):
        return random.Random(f"{seed}/{worker}/{iteration}").choice([0.25, 0.5, 1.0, 3.0])

    return compute_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_spans_cover_each_life_and_never_overlap(simulate, policy, seed):
    trace = simulate(
        policy, uneven(seed), workers=4, servers=2, latency_s=0.125 * (seed % 2), until_s=20.0,
        kill=[(6.0, 2, 0)], views=[(7.0, ((0, 0), (1, 0), (3, 0))), (9.0, ((0, 0), (1, 0), (2, 1), (3, 0)))],
    )  # fmt: skip
    lanes = {}
    for span in spans(trace, time_s=20.0):
        lanes.setdefault(span.worker, []).append(span)
    assert sorted(lanes) == [0, 1, 2, 3]
    for of_worker in lanes.values():
        assert of_worker[0].start_s == 0.0
        assert of_worker[-1].end_s == 20.0
        assert all(span.end_s > span.start_s for span in of_worker)
        assert [span.start_s for span in of_worker[1:]] == [span.end_s for span in of_worker[:-1]]
    assert [span.kind for span in lanes[2]].count("dead") == 1
    assert sum(s.seconds for s in spans(trace) if s.kind == "dead") == 2.0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_metrics_agree_with_a_slow_reading_of_the_trace(simulate, policy, seed):
    """Waiting by small steps: a moment counts when some shard has the worker's pull parked."""
    trace = simulate(policy, uneven(seed), workers=3, servers=2, latency_s=0.125, until_s=12.0)
    step, waiting, open_ = 1 / 16, Counter(), {}
    moments = {record.event.at: [] for record in trace}
    for each in trace:
        moments[each.event.at].append(each)
    for tick in range(int(12 / step)):
        for each in moments.get(tick * step, ()):
            for action in each.actions:
                if isinstance(action, Park):
                    open_[action.pull.worker, each.node.rank] = True
                elif isinstance(action, Answer):
                    open_.pop((action.parameters.worker, each.node.rank), None)
        waiting.update({worker for worker, _ in open_})
    metrics = measure(trace, time_s=12.0)
    assert metrics.wait_share == pytest.approx(waiting.total() * step / 36)
    assert sum(metrics.waiting_caused_by.values()) == pytest.approx(waiting.total() * step)
    assert sum(metrics.waiting_by_reason.values()) == pytest.approx(waiting.total() * step)
    applied = [
        (action.version - 1 - handle.version)
        for each in trace
        for action in each.actions
        if isinstance(action, Apply)
        for handle in action.handles
    ]
    assert metrics.staleness["max"] == max(applied)
    assert metrics.staleness["mean"] == pytest.approx(sum(applied) / len(applied))
    ordered = sorted(applied)
    assert metrics.staleness["median"] == (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("2 ahead of worker 1, bound 1", "# ahead of worker #, bound #"),
        *(
            (f"12 ahead of {name_workers((1, 2, 5, 6), count)}, bound 10", "# ahead of worker #, bound #")
            for count in (4, 5, 7)
        ),
        ("iteration 7 lacks workers 1, 2", "iteration # lacks worker #"),
        ("rand 0.25 below 1e-05", "rand # below #"),
        ("no numbers", "no numbers"),
    ],
)
def test_template(reason, expected):
    assert template(reason) == expected


def test_a_life_without_a_farewell_ends_with_its_last_record():
    """No view dropped incarnation 0, yet incarnation 1 is there."""
    trace = by_hand(compute(0.5, 0), ready(1.0, 0))
    trace.records.append(record("worker", 0, ViewChanged(4.0, View(1, ((0, 0),))), incarnation=1))
    assert [(s.kind, s.start_s, s.end_s, s.incarnation) for s in spans(trace, time_s=5.0)] == [
        ("pull", 0.0, 0.5, 0), ("compute", 0.5, 1.0, 0), ("dead", 1.0, 4.0, 0), ("pull", 4.0, 5.0, 1),
    ]  # fmt: skip


def test_a_shard_whose_clock_is_ahead_answers_after_the_worker_goes_on():
    trace = by_hand(
        compute(0.0, 0), ready(1.0, 0), parked(1.5, 0, "late"), compute(2.0, 1), released(2.25, 0, 1),
        ready(3.0, 1), compute(3.5, 2),
    )  # fmt: skip
    assert [(s.kind, s.start_s, s.end_s) for s in spans(trace)] == [
        ("compute", 0.0, 1.0), ("push", 1.0, 1.5), ("wait", 1.5, 2.0),
        ("compute", 2.0, 3.0), ("push", 3.0, 3.5),
    ]  # fmt: skip


def test_records_out_of_order_make_no_overlap():
    trace = by_hand(
        compute(0.0, 0), ready(1.0, 0), parked(1.5, 0, "x"), released(2.5, 0, 1), compute(2.0, 1), ready(3.0, 1)
    )  # fmt: skip
    assert [(s.kind, s.start_s, s.end_s) for s in spans(trace)] == [
        ("compute", 0.0, 1.0), ("push", 1.0, 1.5), ("wait", 1.5, 2.0), ("compute", 2.0, 3.0),
    ]  # fmt: skip


def test_a_shard_that_was_restored_behind_its_workers_makes_nothing_less_than_fresh():
    applied = Record(
        Node("server", 0),
        1,
        PushArrived(1.0, Push(Handle(0, 0, 9, 18, 10))),
        (Apply((Handle(0, 0, 9, 18, 10),), 1.0, 11),),
    )
    trace = Trace(Header("live", "asp", Members(1, 1), 0, (100,)), [applied])
    assert measure(trace).staleness["min"] == 0
    assert staleness_by_shard(trace)[0]["min"] == 0


def test_a_worker_whose_records_were_lost_has_its_lane_and_its_iterations(simulate):
    """Killed before it had written anything down: the shards saw it."""
    whole = simulate("asp", [1.0, 1.0], until_s=9.0, views=[(4.5, ((0, 0),))], kill=[(4.5, 1, 0)])
    lost = Trace(whole.header, [record for record in whole if record.node != Node("worker", 1)])
    assert measure(lost).iterations == measure(whole).iterations
    mine = [(span.kind, span.start_s, span.end_s) for span in spans(lost) if span.worker == 1]
    assert mine == [("exchange", 0.0, 4.5), ("dead", 4.5, 9.0)]
