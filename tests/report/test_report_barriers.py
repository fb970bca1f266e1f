"""Planned barriers, from a trace worked out by hand, and on the page."""

from __future__ import annotations

import pytest

from paceline import simulate as simulate_run
from paceline.core.actions import Answer
from paceline.core.events import PlanArrived, PullArrived, PushArrived, ViewChanged
from paceline.core.messages import Handle, Members, Node, Parameters, Plan, Pull, Push, View
from paceline.core.trace import Header, Record, Trace
from paceline.report.barriers import Barrier, barriers, totals
from paceline.report.html import RunView, render


class Shard:
    """Writes down what shard 0 would have seen."""

    def __init__(self) -> None:
        self.trace = Trace(Header("virtual", "elastic", Members(2, 1), 0, (8,)))
        self.see(0.0, ViewChanged(0.0, View(1, ((0, 0), (1, 0)))))

    def see(self, at, event, *answered) -> None:
        answers = tuple(Answer(Parameters(0, worker, 0, iteration, 0, False), "", -1) for worker, iteration in answered)
        self.trace.records.append(Record(Node("server", 0), 0, event, answers))

    def push(self, at, worker, iteration, answer=True, released=()) -> None:
        self.see(at, PushArrived(at, Push(Handle(worker, 0, iteration, 0, 8))), *released)
        self.see(at, PullArrived(at, Pull(worker, 0, iteration + 1)), *([(worker, iteration + 1)] if answer else []))


def hand_made() -> Shard:
    """Worker 0 takes 1 s, worker 1 takes 2.5 s. Planned at 5: 0 stops at 7, 1 at 3, by 7.5 and a wait of 0.5."""
    shard = Shard()
    shard.see(0.0, PullArrived(0.0, Pull(0, 0, 0)), (0, 0))
    shard.see(0.0, PullArrived(0.0, Pull(1, 0, 0)), (1, 0))
    pushes = [(float(k), 0, k - 1) for k in range(1, 6)] + [(2.5, 1, 0), (5.0, 1, 1)]
    for at, worker, iteration in sorted(pushes):
        shard.push(at, worker, iteration)
    shard.see(5.0, PlanArrived(5.0, Plan(1, ((0, 0, 7), (1, 0, 3)), 7.5, 0.5)))
    shard.push(6.0, 0, 5)
    shard.push(7.0, 0, 6, answer=False)
    return shard


def test_a_barrier_is_reached_when_the_last_one_is_at_its_stop() -> None:
    shard = hand_made()
    assert barriers(shard.trace) == [], "worker 1 is not there"
    shard.push(8.0, 1, 2, released=[(0, 7)])
    assert barriers(shard.trace) == [
        Barrier(
            number=1, planned_s=5.0, due_s=7.5, planned_wait_s=0.5, reached_s=8.0, wait_s=1.0, rounds=3,
            bsp_wait_s=1.5 + 1.5 + 2.0,
        )
    ]  # fmt: skip


def test_the_wait_at_a_barrier_is_no_part_of_the_next_iteration() -> None:
    shard = hand_made()
    shard.push(8.0, 1, 2, released=[(0, 7)])
    for at, worker, iteration in ((9.0, 0, 7), (10.0, 0, 8), (10.5, 1, 3)):
        shard.push(at, worker, iteration)
    shard.see(10.5, PlanArrived(10.5, Plan(2, ((0, 0, 10), (1, 0, 5)), 13.0, 2.0)))
    shard.push(11.0, 0, 9, answer=False)
    shard.push(13.0, 1, 4, released=[(0, 10)])
    second = barriers(shard.trace)[1]
    assert (second.wait_s, second.rounds, second.bsp_wait_s) == (2.0, 2, 3.0)


def test_the_lost_are_not_waited_for() -> None:
    shard = hand_made()
    shard.see(7.25, ViewChanged(7.25, View(2, ((0, 0),))), (0, 7))
    [barrier] = barriers(shard.trace)
    assert (barrier.reached_s, barrier.wait_s) == (7.25, 0.25)


def test_who_had_passed_when_the_plan_came_was_there_from_then_on() -> None:
    shard = hand_made()
    shard.see(7.0, PlanArrived(7.0, Plan(2, ((0, 0, 7), (1, 0, 3)), 7.5, 0.5)))
    shard.push(8.0, 1, 2)
    [barrier] = barriers(shard.trace)
    assert (barrier.number, barrier.wait_s) == (2, 1.0)


@pytest.fixture(scope="module")
def view() -> RunView:
    run = simulate_run(
        "quadratic", "elastic:lookahead=4", workers=3, cluster="factors:by_worker=1:1.5:2.3", iterations=40
    )
    assert run.summary()["barriers"] == totals(run.barriers)
    assert run.summary()["barriers"]["count"] > 3
    return run.view()


def test_the_page_shows_planned_and_actual_barriers_and_what_was_saved(view: RunView) -> None:
    page = render([view], {})
    for words in ("Planned barriers", "wait under BSP", f"all {len(view.barriers)} barriers", "where it was planned"):
        assert words in page
    assert page.count('<line class="barrier"') >= 2
    assert page.count('<line class="due"') >= 2


def test_a_run_without_plans_has_no_such_section(view: RunView) -> None:
    without = RunView("asp", "virtual", view.history, {}, view.spans)
    page = render([without], {})
    assert "Planned barriers" not in page
    assert "where it was planned" not in page
    assert render([without, view], {}).count('<table class="barriers"') == 1
