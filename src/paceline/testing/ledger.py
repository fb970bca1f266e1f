"""The judge: what one shard was told and what it ordered, kept apart from the machine, the naive way, and slow."""

from __future__ import annotations

from typing import assert_never

from paceline.core.actions import AbortCompute, Action, Answer, Apply, Compute, Drop, Park, Reduce, Send, SetTimer, Wait
from paceline.core.events import (
    Event,
    PlanArrived,
    PullArrived,
    PullRepeated,
    PushArrived,
    PushRejected,
    TimerFired,
    ViewChanged,
)
from paceline.core.messages import Handle, Parameters, Plan, Pull, Rise, View
from paceline.core.policy import CentralPolicy
from paceline.core.words import Process, asker, author, in_words, name
from paceline.testing.story import Story


class Ledger:
    """`note` an event, then `judge` what the shard ordered. The rules are those listed in `paceline.testing`."""

    def __init__(self, plan: CentralPolicy, rank: int, story: Story, patience: int) -> None:
        self.plan = plan
        self.rank = rank
        self.policy = plan.in_force(rank, 0)
        """The one in force."""
        self.switched = False
        """It came into force with this very event."""
        self.overtime = False
        """The time given to iteration V is over."""
        self.owing: set[Process] = set()
        """Those whose next gradient a change of policy has made late."""
        self.changed_at = -1
        """The V at which the policy changed last: gradients of that iteration were computed under the one before."""
        self.owed_versions: set[int] = set()
        """Versions made by gradients that were owed."""
        self.workers = story.trace.header.members.workers
        self.expect = story.expect
        self.patience = patience
        self.view = View(0, ())
        self.next: dict[Process, int] = {}
        """Of the members: the first iteration that was neither pushed nor skipped."""
        self.pushed: set[tuple[Process, int]] = set()
        """(process, iteration) whose push came from a member -> whether it was good."""
        self.V = self.V_before = 0
        self.enough: dict[int, int] = {}
        """Of each finished iteration: how many live members' gradients its step is on, under a policy with `extra`."""
        self.heard: dict[Process, tuple[int, int]] = {}
        """The iteration each process asked for last, and the attempt at it. They rise: what does not is a copy."""
        self.asked: dict[Process, Pull] = {}
        """Pulls not answered yet."""
        self.parked: set[Process] = set()
        self.repeated: set[Process] = set()
        """Those that ask for an answer they were given, and which was lost with the server that gave it."""
        self.lowest: dict[Process, tuple[int, int | None]] = {}
        """The smallest `next` of all members at the answer each process got last, and the bound then in force."""
        self.fate: dict[Handle, str] = {}
        """Of each gradient that arrived: good, owed (late by a change of policy), bad (rejected, or from a stranger),
        consumed."""
        self.dropped: set[Process] = set()
        self.version = 0
        self.planned = 0
        """The number of the last plan."""
        self.stops: dict[Process, int] | None = None
        """Where its members are to stop; None before the first."""
        self.given: dict[Process, int] = {}
        """The version each process was answered last."""
        self.computes: dict[Process, int] = {}
        """The iteration each process was answered last."""

    def note(self, event: Event) -> None:
        self.V_before = self.V
        self.switched = False
        match event:
            case ViewChanged(view=view) if view.number > self.view.number:
                self.view = view
                self.next = {process: at for process, at in self.next.items() if process in view.members}
                self.rise()
                self.next = dict.fromkeys(view.members, self.V) | self.next
                self.parked &= self.next.keys()
                self.owing &= self.next.keys()
                for process, pull in self.asked.items():
                    self.promise(process, pull.iteration)
            case PlanArrived(plan=plan) if plan.number > self.planned:
                self.note_plan(plan)
            case TimerFired(timer=timer):
                self.overtime |= timer == self.V
            case PushArrived(push=push) | PushRejected(push=push) if push.handle not in self.fate:
                self.note_push(push.handle, good=isinstance(event, PushArrived))
            case PullRepeated(pull=pull) if self.was_answered(pull):
                self.asked[asker(pull)] = pull
                self.repeated.add(asker(pull))
            case PullArrived(pull=pull) | PullRepeated(pull=pull) if self.is_new(pull):
                self.heard[asker(pull)] = (pull.iteration, pull.attempt)
                self.asked[asker(pull)] = pull
                self.parked.discard(asker(pull))
                self.owing.discard(asker(pull))
                self.promise(asker(pull), pull.iteration)
        self.asked = {process: pull for process, pull in self.asked.items() if not self.is_ghost(process)}
        self.rise()

    def is_new(self, pull: Pull) -> bool:
        return (pull.iteration, pull.attempt) > self.heard.get(asker(pull), (-1, 0))

    def was_answered(self, pull: Pull) -> bool:
        """Whether it is the pull of a member that was answered last."""
        process = asker(pull)
        same = self.heard.get(process) == (pull.iteration, pull.attempt)
        return same and process in self.next and process not in self.asked

    def note_push(self, handle: Handle, good: bool) -> None:
        process = author(handle)
        fresh = handle.version == self.given.get(process)
        self.expect(fresh, "fresh", f"{handle}, but it was given version {self.given.get(process)} last")
        self.fate[handle] = "good" if good and process in self.next else "bad"
        if self.fate[handle] == "good" and process in self.owing and handle.iteration < self.V:
            self.fate[handle] = "owed"
        self.owing.discard(process)
        self.dropped.discard(process)
        if process in self.next and good:
            self.pushed.add((process, handle.iteration))
        self.promise(process, handle.iteration + 1)

    def note_plan(self, plan: Plan) -> None:
        self.planned = plan.number
        named = {(worker, life): stop for worker, life, stop in plan.stops}
        self.stops = {process: stop for process, stop in named.items() if process in self.next}

    def is_stopped(self, process: Process, iteration: int) -> bool:
        """Whether a plan that is not over forbids this worker to have the parameters of `iteration`."""
        stops = self.stops or {}
        over = all(self.next.get(other, stop) >= stop for other, stop in stops.items())
        return not over and iteration >= stops.get(process, 0)

    def promise(self, process: Process, iteration: int) -> None:
        if process in self.next:
            self.next[process] = max(self.next[process], iteration)

    def rise(self) -> None:
        while any(at > self.V for at in self.next.values()):
            there = sum((process, self.V) in self.pushed for process in self.next)
            passed = sum(at > self.V for at in self.next.values())
            expected = len(self.next) - (passed - there)
            finished = self.policy.finishes(there, expected, self.workers)
            if not finished and self.overtime:
                finished = self.policy.finishes_overtime(there, expected, self.workers)
            if not finished:
                break
            self.overtime = False
            if (extra := getattr(self.policy, "extra", None)) is not None:
                self.enough[self.V] = min(self.workers - extra, expected)
            self.V += 1
            while (policy := self.plan.in_force(self.rank, self.V)) != self.policy:
                self.switch(policy)

    def switch(self, policy: CentralPolicy) -> None:
        """Everybody stands where the fastest does; whoever was behind, but not late, nor asking, owes one gradient."""
        self.policy = policy
        self.switched = True
        to = max(self.V, *self.next.values())
        behind = {process for process, at in self.next.items() if self.V <= at < to}
        self.owing |= behind - self.asked.keys()
        self.next = {process: max(at, to) for process, at in self.next.items()}
        self.V = self.changed_at = to

    def is_ghost(self, process: Process) -> bool:
        """Not a member, and a later life of the same rank was named or has asked."""
        lives = [life for rank, life in (*self.view.members, *self.asked) if rank == process[0]]
        return process not in self.next and process[1] < max(lives)

    def judge(self, actions: list[Action]) -> None:
        for action in actions:
            what = in_words(action)
            match action:
                case Apply():
                    self.judge_apply(action, what)
                case Drop(handle):
                    fate = self.fate.get(handle, "not here")
                    self.expect(fate in ("good", "owed", "bad"), "handles", f"{what}, but it is {fate}")
                    late = handle.iteration < self.V_before and fate != "owed"
                    self.expect(late or fate == "bad", "late", f"{what}, at V={self.V_before}")
                    self.fate[handle] = "consumed"
                    self.dropped.add(author(handle))
                case Answer(parameters):
                    self.judge_answer(parameters, what)
                case Park():
                    self.judge_park(action, what)
                case SetTimer(after_s=after_s):
                    self.expect(after_s >= 0, "answer", f"a time cannot be negative: {what}")
                case Send(message=Rise(V=V)) if self.plan.has_scheduler:
                    self.expect(V == self.V, "together", f"{what}, it is at V={self.V}")
                case Compute() | AbortCompute() | Send() | Reduce() | Wait():
                    self.expect(False, "answer", f"a shard may not {what}")
                case _:
                    assert_never(action)
        for process, pull in self.asked.items():
            if process in self.next:
                self.expect(process in self.parked, "parked", f"not even parked: {in_words(pull)}")
                others_at = [at for other, at in self.next.items() if other != process]
                waits = any(at < pull.iteration + self.patience for at in others_at)
                if self.stops is not None:
                    waits = self.is_stopped(process, pull.iteration)
                self.expect(waits, "parked", f"waits for nobody: {in_words(pull)}")

    def judge_apply(self, apply: Apply, what: str) -> None:
        owed = [self.fate.get(handle) for handle in apply.handles] == ["owed"]
        for handle in apply.handles:
            fate = self.fate.get(handle, "not here")
            self.expect(fate == "good" or owed, "handles", f"{what}, but {handle} is {fate}")
            self.fate[handle] = "consumed"
        sound = apply.handles and apply.version == self.version + 1 and 0 < apply.weight <= 1
        self.expect(bool(sound), "handles", f"{what}, the version was {self.version}")
        if not self.policy.on_arrival and not owed and not self.switched:
            iterations = {handle.iteration for handle in apply.handles}
            finished = len(iterations) == 1 and self.V_before <= min(iterations) < self.V
            self.expect(finished, "mean", f"{what}, V rose from {self.V_before} to {self.V}")
            stale = [handle for handle in apply.handles if self.is_stale(handle)]
            self.expect(not stale, "mean", f"{what} has stale gradients: {stale}")
            there = sum(author(handle) in self.next for handle in apply.handles)
            enough = self.enough.get(min(iterations), there)
            self.expect(there == enough, "enough", f"{what}: {there} live members' gradients instead of {enough}")
            self.V_before = min(iterations) + 1
        if self.plan.in_step:
            computing = [name(process) for process, at in self.computes.items() if self.next.get(process, at + 1) <= at]
            self.expect(not computing, "in step", f"{what} while {', '.join(computing)} compute")
        if owed:
            self.owed_versions.add(apply.version)
        self.version = apply.version

    def is_stale(self, handle: Handle) -> bool:
        """Whether the parameters have changed since those it was computed on, other than by a change of policy."""
        since = set(range(handle.version + 1, self.version + 1))
        return handle.iteration != self.changed_at and not since <= self.owed_versions

    def judge_answer(self, parameters: Parameters, what: str) -> None:
        process = asker(parameters)
        pull = self.asked.pop(process, None)
        self.parked.discard(process)
        asked = process in self.next and pull is not None and pull.iteration <= parameters.iteration
        self.expect(asked, "answer", f"{what}, which asked for {pull}")
        if pull is not None and process not in self.repeated:
            stopped = self.is_stopped(process, pull.iteration)
            self.expect(not stopped, "stop", f"{what}, but plan {self.planned} is not over: {self.stops}")
        self.expect(parameters.version == self.version, "answer", f"{what}, the version is {self.version}")
        self.expect(parameters.dropped == (process in self.dropped), "answer", f"{what}, not so")
        self.repeated.discard(process)
        self.given[process] = parameters.version
        self.computes[process] = parameters.iteration
        self.lowest[process] = (min(self.next.values()), self.policy.bound)
        self.judge_bound(process, parameters.iteration)

    def judge_bound(self, process: Process, iteration: int) -> None:
        lowest, bound = self.lowest.get(process, (0, None))
        fine = bound is None or lowest >= iteration - bound
        self.expect(fine, "bound", f"worker {name(process)} at {iteration}, a member at {lowest} (s={bound})")

    def judge_park(self, park: Park, what: str) -> None:
        process = asker(park.pull)
        asked = self.asked.get(process) == park.pull and process not in self.parked
        self.expect(asked, "parked", f"nobody asked, or it is parked already: {what}")
        self.expect(park.pull.attempt == 0, "parked", f"it was let through before: {what}")
        others = {rank for rank, _ in self.next} - {park.pull.worker}
        known = set(park.waits_for) <= others and 0 < park.waits_for_count <= len(others) and park.reason
        self.expect(bool(known), "parked", f"for whom? {what}")
        self.parked.add(process)

    def left(self) -> list[Handle]:
        """Gradients that were neither applied nor dropped."""
        return [handle for handle, fate in self.fate.items() if fate != "consumed"]
