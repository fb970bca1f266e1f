"""A judge of the sample dispatcher, which keeps a list of where every position is.

The judge is the specification: a position is unassigned, in one lease, or consumed. It knows nothing of stripes and
strides, watches every action, and goes on at the end until everything must have been consumed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import strategies as st

from paceline.core.events import ViewChanged
from paceline.core.messages import View
from paceline.core.sample_dispatch import (
    CloseEpoch,
    DispatchAction,
    DispatchEvent,
    GrantLease,
    LeaseAcknowledged,
    LeaseRequested,
    LeaseReturned,
    SampleDispatcher,
    SkipEpoch,
)

from .dispatch_by_hand import Process, footprint


def flat(ranges: Iterable[range]) -> list[int]:
    return [position for each in ranges for position in each]


class Worker:
    """A worker process as the dispatcher sees it: it asks, computes what it was granted in order, and reports."""

    def __init__(self, rank: int, incarnation: int) -> None:
        self.process = (rank, incarnation)
        self.ticket = 0
        self.epoch = 0
        self.granted: list[tuple[int, int]] = []
        """(ticket, index within the lease) of what was granted and is not computed."""
        self.computed: list[tuple[int, int, int]] = []
        """(ticket, start, stop) of what was computed and is not reported."""

    def compute(self, batch: int) -> None:
        now, self.granted = self.granted[:batch], self.granted[batch:]
        for ticket in dict.fromkeys(ticket for ticket, _ in now):
            indices = [index for of, index in now if of == ticket]
            self.computed.append((ticket, indices[0], indices[-1] + 1))


UNASSIGNED = "unassigned"
CONSUMED = "consumed"


class Broken(AssertionError):
    """The dispatcher broke a rule."""


def rule(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


class DispatchJudge:
    """A dispatcher, its workers, and where every position of every epoch is."""

    def __init__(self, size: int, lead: int, checks: bool = True) -> None:
        self.dispatcher = SampleDispatcher(size, lead)
        self.dispatcher.checks = checks
        self.size = size
        self.lead = lead
        self.where: dict[int, list[object]] = {}
        self.leases: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
        self.answers: dict[Process, GrantLease | SkipEpoch] = {}
        self.closed: set[int] = set()
        self.members: dict[int, int] = {}
        self.number = 0
        self.incarnations: Counter[int] = Counter()
        self.workers: dict[Process, Worker] = {}
        self.told: list[DispatchEvent] = []
        self.done: list[list[DispatchAction]] = []
        self.grants: Counter[tuple[int, int]] = Counter()
        self.seen: Counter[str] = Counter()

    # What may happen.

    def step(self, what: str, a: int, b: int) -> None:
        """One step of a random run; a step that makes no sense now is left out."""
        worker = self.workers.get((a, self.incarnations[a] - 1))
        match what:
            case "ask" if worker is not None:
                self.ask(worker, b + 1)
            case "compute" if worker is not None:
                worker.compute(b + 1)
            case "acknowledge" | "return":
                waiting = [
                    (each, part) for each in self.workers.values() if each.process[0] == a for part in each.computed
                ]
                if waiting:
                    self.report(*waiting[b % len(waiting)], counted=what == "acknowledge")
            case "join" if a not in self.members:
                self.incarnations[a] += 1
                worker = self.workers[a, self.incarnations[a] - 1] = Worker(a, self.incarnations[a] - 1)
                if b % 2:
                    self.ask(worker, b)
                self.show({**self.members, a: self.incarnations[a] - 1})
            case "lose" if a in self.members:
                if b % 3 == 0:  # it is back before anybody has noticed that it was gone
                    self.incarnations[a] += 1
                    self.workers[a, self.incarnations[a] - 1] = Worker(a, self.incarnations[a] - 1)
                    self.show({**self.members, a: self.incarnations[a] - 1})
                else:
                    self.show({rank: process for rank, process in self.members.items() if rank != a})
            case "copy" if self.told:
                self.seen["copies"] += 1
                self.tell(self.told[-1 - (a + 7 * b) % len(self.told)])
            case _:
                return

    def ask(self, worker: Worker, count: int) -> GrantLease | SkipEpoch | None:
        rank, incarnation = worker.process
        self.tell(LeaseRequested(0.0, rank, incarnation, worker.ticket, worker.epoch, count))
        worker.ticket += 1
        return self.answers.get(worker.process)

    def report(self, worker: Worker, part: tuple[int, int, int], counted: bool) -> None:
        worker.computed.remove(part)
        kind = LeaseAcknowledged if counted else LeaseReturned
        self.tell(kind(0.0, *worker.process, *part))

    def show(self, members: dict[int, int]) -> None:
        self.number += 1
        self.tell(ViewChanged(0.0, View(self.number, tuple(sorted(members.items())))))

    def run_to_the_end(self) -> None:
        """No more faults: when nobody gets anything any more, everything must have been consumed."""
        if not self.members:
            self.step("join", 0, 0)
        living = [self.workers[process] for process in self.members.items()]
        last = max(self.where, default=0)
        for _ in range(3 * (self.size + 2) * (last + 2)):
            for worker in living:
                worker.epoch = min(worker.epoch, last)
            answers = [self.ask(worker, 3) for worker in living]
            for worker in living:
                worker.compute(len(worker.granted))
                for part in list(worker.computed):
                    self.report(worker, part, counted=True)
            if all(isinstance(answer, SkipEpoch) and answer.epoch == last for answer in answers):
                break
        rule(self.closed == set(self.where), f"epochs {set(self.where) - self.closed} are never finished")
        rule(
            footprint(self.dispatcher) == len(self.members) + len(self.dispatcher.early),
            "something is kept of closed epochs",
        )

    # What must hold.

    def tell(self, event: DispatchEvent) -> None:
        actions = self.dispatcher.handle(event)
        self.told.append(event)
        self.done.append(actions)
        answers = [action for action in actions if isinstance(action, GrantLease | SkipEpoch)]
        match event:
            case ViewChanged(view=view):
                self.judge_view(view)
                self.judge_early(answers)
            case LeaseRequested():
                self.judge_request(event, answers)
            case LeaseAcknowledged() | LeaseReturned():
                self.judge_report(event)
                rule(not answers, "a report was answered")
        closed = [action.epoch for action in actions if isinstance(action, CloseEpoch)]
        full = {epoch for epoch, places in self.where.items() if all(place == CONSUMED for place in places)}
        rule(not self.closed & set(closed) and self.closed | set(closed) == full, f"{closed} closed, {full} are full")
        self.closed = full

    def judge_view(self, view: View) -> None:
        if view.number < self.number:
            return
        self.members = dict(view.members)
        for places in self.where.values():
            for position, place in enumerate(places):
                if isinstance(place, tuple) and self.members.get(place[0]) != place[1]:
                    places[position] = UNASSIGNED
                    self.seen["positions of the lost"] += 1

    def judge_early(self, answers: list[GrantLease | SkipEpoch]) -> None:
        for answer in answers:
            self.seen["early requests answered"] += 1
            self.judge_answer(answer, count=self.size)
        for process in self.members.items():
            if process not in self.answers:
                rule(self.workers[process].ticket == 0, f"the early request of {process} was forgotten")

    def judge_request(self, event: LeaseRequested, answers: list[GrantLease | SkipEpoch]) -> None:
        process = (event.worker, event.incarnation)
        last = self.answers.get(process)
        if self.members.get(event.worker) != event.incarnation or (last is not None and event.ticket < last.ticket):
            rule(not answers, f"a ghost was answered: {answers}")
            return
        rule(len(answers) == 1, f"{len(answers)} answers to {event}: a member is answered, once and at once")
        rule(
            (answers[0].worker, answers[0].incarnation, answers[0].ticket) == (*process, event.ticket), "wrong address"
        )
        if last is not None and event.ticket == last.ticket:
            rule(answers[0] == last, f"{event} was answered by {last}, and now by {answers[0]}")
            self.seen["answers repeated"] += 1
            return
        if event.epoch not in self.where:
            self.where[event.epoch] = [UNASSIGNED] * self.size
        self.judge_answer(answers[0], event.count, event.epoch)

    def judge_answer(self, answer: GrantLease | SkipEpoch, count: int, asked: int = 0) -> None:
        process = (answer.worker, answer.incarnation)
        worker = self.workers[process]
        rule(self.members.get(process[0]) == process[1], f"a ghost was answered: {answer}")
        self.answers[process] = answer
        if not self.where:
            self.where[0] = [UNASSIGNED] * self.size
        if isinstance(answer, SkipEpoch):
            rule(answer.epoch == worker.epoch, f"{answer}, asked for {worker.epoch}")
            reach = answer.epoch if len(self.members) == 1 else answer.epoch - self.lead - 1
            for epoch in range(reach + 1):
                rule(UNASSIGNED not in self.where[epoch], f"{answer} although something of epoch {epoch} is unassigned")
            worker.epoch += 1
            return
        positions = list(answer.positions())
        rule(0 < len(positions) <= count, f"{len(positions)} granted, {count} asked for")
        rule(answer.epoch <= asked, f"granted of epoch {answer.epoch}, asked for {asked}")
        key = (*process, answer.ticket)
        rule(key not in self.leases, f"ticket {key} was granted twice")
        self.leases[key] = (answer.epoch, positions)
        for position in positions:
            place = self.where[answer.epoch][position]
            rule(place == UNASSIGNED, f"position {position} of epoch {answer.epoch} granted to {process} is {place}")
            self.where[answer.epoch][position] = key
            self.grants[answer.epoch, position] += 1
            self.seen["positions granted again"] += self.grants[answer.epoch, position] > 1
        self.seen["leases of an epoch before the lead"] += answer.epoch < asked - self.lead
        worker.granted += [(answer.ticket, index) for index in range(len(positions))]

    def judge_report(self, event: LeaseAcknowledged | LeaseReturned) -> None:
        key = (event.worker, event.incarnation, event.ticket)
        epoch, positions = self.leases[key]
        for position in positions[event.start : event.stop]:
            if self.where[epoch][position] == key:
                self.where[epoch][position] = CONSUMED if isinstance(event, LeaseAcknowledged) else UNASSIGNED
            else:
                self.seen["positions reported in vain"] += 1


KINDS = ["ask"] * 5 + ["compute"] * 5 + ["acknowledge"] * 5 + ["return", "join", "lose", "copy", "copy"]
Step = tuple[str, int, int]

steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 7)), max_size=120)
peaceful = st.lists(
    st.tuples(st.sampled_from(["ask", "compute", "acknowledge", "copy"]), st.integers(0, 3), st.integers(0, 7)),
    max_size=150,
)


def run(judge: DispatchJudge, steps: Iterable[Step], workers: int) -> DispatchJudge:
    for rank in range(workers):
        judge.step("join", rank, 0)
    for step in steps:
        judge.step(*step)
    judge.run_to_the_end()
    return judge


def random_run(seed: int, checks: bool = True) -> DispatchJudge:
    """A run that is longer than those above, and does more in an epoch."""
    chance = random.Random(seed)
    steps = [(chance.choice(KINDS), chance.randrange(4), chance.randrange(8)) for _ in range(300)]
    return run(DispatchJudge(chance.randrange(1, 30), chance.randrange(3), checks), steps, chance.randrange(5))
