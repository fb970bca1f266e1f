"""The judge: what one shard was told and what it ordered, kept apart from the machine, the naive way, and slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from paceline.core import actions as orders
from paceline.core import events
from paceline.core.formatting import name, requester, source_process, to_text
from paceline.core.messages import Handle, Parameters, Plan, Process, Pull, Rise, SliceNorm, View
from paceline.core.policy import CentralPolicy
from paceline.testing.story import Story


class ClippedMean:
    """What is known of the step on the mean of V, if it waits for the norm over all shards."""

    def __init__(self, clips: bool) -> None:
        self.clips = clips
        """Whether steps on a mean need its norm over all shards."""
        self.handles: tuple[Handle, ...] | None = None
        """The gradients whose norm is measured, while that of V is not known."""
        self.measuring = self.was_measuring = False
        """Whether V is finished but for its norm, now and before this event."""
        self.overtaken: dict[Process, int] = {}
        """Who joined while the norm of an iteration was not known, and that iteration: it is not waited for there."""
        self.norm: float | None = None
        """The norm that arrived with this event."""


class PlannedStops:
    """The last plan that the shard was told, and where it has the members stop."""

    def __init__(self) -> None:
        self.number = 0
        self.stops: dict[Process, int] = {}

    def __str__(self) -> str:
        return f"plan {self.number}, {self.stops}"

    def note(self, plan: Plan, next: dict[Process, int]) -> None:
        self.number = plan.number
        named = {(worker, incarnation): stop for worker, incarnation, stop in plan.stops}
        self.stops = {process: stop for process, stop in named.items() if process in next}

    def forbid(self, process: Process, iteration: int, next: dict[Process, int]) -> bool:
        """Whether a plan that is not over forbids this worker to have the parameters of `iteration`."""
        over = all(next.get(other, stop) >= stop for other, stop in self.stops.items())
        return not over and iteration >= self.stops.get(process, 0)


class Ledger:
    """Keeps the books of one shard: `note` an event, then `judge` what the shard ordered, by the rules in
    `paceline.testing`."""

    def __init__(self, plan: CentralPolicy, rank: int, story: Story, patience: int) -> None:
        self.plan = plan
        self.rank = rank
        self.policy = plan.in_force(rank, 0)
        """The policy in force."""
        self.switched = False
        """Whether the policy came into force with this very event."""
        self.overtime = False
        """Whether the time given to iteration V is over."""
        self.owing: set[Process] = set()
        """Processes whose next gradient a change of policy has made late."""
        self.changed_at = -1
        """The V at which the policy changed last: gradients of that iteration were computed under the one before."""
        self.owed_versions: set[int] = set()
        """Versions made by gradients that were owed."""
        header = story.trace.header
        self.workers = header.members.workers
        self.mean = ClippedMean(header.clips_mean and header.members.servers > 1)
        self.expect = story.expect
        self.patience = patience
        self.view = View(0, ())
        self.next: dict[Process, int] = {}
        """member -> the first iteration that it has neither pushed nor skipped."""
        self.pushed: set[tuple[Process, int]] = set()
        """(process, iteration) whose push came from a member -> whether it was good."""
        self.V = self.V_before = 0
        self.enough: dict[int, int] = {}
        """finished iteration -> how many live members' gradients its step is on, under a policy with `extra`."""
        self.heard: dict[Process, tuple[int, int]] = {}
        """The last (iteration, attempt) each process asked for. They rise: a pull that does not is a copy."""
        self.asked: dict[Process, Pull] = {}
        """Pulls that are not answered yet."""
        self.parked: set[Process] = set()
        self.repeated: set[Process] = set()
        """Processes that ask for an answer again, which was lost with the server that gave it."""
        self.lowest: dict[Process, tuple[int, int | None]] = {}
        """The smallest `next` of all members at the last answer to each process, and the bound then in force."""
        self.fate: dict[Handle, str] = {}
        """gradient -> good, owed (late by a change of policy), bad (rejected, or from a stranger) or consumed."""
        self.dropped: set[Process] = set()
        self.version = 0
        self.samples: dict[int, float] = {}
        """rank -> how many samples the latest good push of it stands for, while it takes part or has finished."""
        self.stops = PlannedStops()
        self.given: dict[Process, int] = {}
        """The version each process was answered last."""
        self.computes: dict[Process, int] = {}
        """The iteration each process was answered last."""

    def note(self, event: events.Event) -> None:
        self.V_before, self.mean.was_measuring = self.V, self.mean.measuring
        self.switched = False
        self.mean.norm = None
        match event:
            case events.NormArrived(norm=norm) if self.mean.measuring and norm.iteration == self.V:
                self.mean.norm = norm.norm
            case events.ViewChanged(view=view) if view.number > self.view.number:
                self.view = view
                self.next = {process: at for process, at in self.next.items() if process in view.members}
                here = {rank for rank, incarnation in self.next} | set(view.finished)
                self.samples = {rank: weight for rank, weight in self.samples.items() if rank in here}
                self.rise()
                if self.mean.measuring:
                    self.mean.overtaken |= {process: self.V for process in view.members if process not in self.next}
                self.next = dict.fromkeys(view.members, self.V) | self.next
                self.parked &= self.next.keys()
                self.owing &= self.next.keys()
                for process, pull in self.asked.items():
                    self.promise(process, pull.iteration)
            case events.PlanArrived(plan=plan) if plan.number > self.stops.number:
                self.stops.note(plan, self.next)
            case events.TimerFired(timer=timer):
                self.overtime |= timer == self.V
            case events.PushArrived(push=push) | events.PushRejected(push=push) if push.handle not in self.fate:
                self.note_push(push.handle, good=isinstance(event, events.PushArrived))
            case events.PullRepeated(pull=pull) if self.was_answered(pull):
                self.asked[requester(pull)] = pull
                self.repeated.add(requester(pull))
            case events.PullArrived(pull=pull) | events.PullRepeated(pull=pull) if self.is_new(pull):
                self.heard[requester(pull)] = (pull.iteration, pull.attempt)
                self.asked[requester(pull)] = pull
                self.parked.discard(requester(pull))
                self.owing.discard(requester(pull))
                self.promise(requester(pull), pull.iteration)
        self.asked = {process: pull for process, pull in self.asked.items() if not self.is_ghost(process)}
        self.rise()

    def is_new(self, pull: Pull) -> bool:
        return (pull.iteration, pull.attempt) > self.heard.get(requester(pull), (-1, 0))

    def was_answered(self, pull: Pull) -> bool:
        """Whether the pull is of a member, and was answered last."""
        process = requester(pull)
        same = self.heard.get(process) == (pull.iteration, pull.attempt)
        return same and process in self.next and process not in self.asked

    def note_push(self, handle: Handle, good: bool) -> None:
        process = source_process(handle)
        fresh = handle.version == self.given.get(process)
        self.expect(fresh, "fresh", f"{handle}, but it was given version {self.given.get(process)} last")
        self.fate[handle] = "good" if good and process in self.next else "bad"
        if self.fate[handle] == "good" and process in self.owing and handle.iteration < self.V:
            self.fate[handle] = "owed"
        self.owing.discard(process)
        self.dropped.discard(process)
        if process in self.next and good:
            self.pushed.add((process, handle.iteration))
            self.samples[process[0]] = handle.weight
        self.promise(process, handle.iteration + 1)

    def promise(self, process: Process, iteration: int) -> None:
        if process in self.next:
            self.next[process] = max(self.next[process], iteration)

    def rise(self) -> None:
        while self.mean.measuring or any(at > self.V for at in self.next.values()):
            there = sum((process, self.V) in self.pushed for process in self.next)
            passed = sum(at > self.V for at in self.next.values())
            expected = len(self.next) - (passed - there)
            finished = self.policy.finishes(there, expected, self.workers)
            if not finished and self.overtime:
                finished = self.policy.finishes_overtime(there, expected, self.workers)
            if self.mean.measuring and self.mean.norm is None:
                break
            if not finished and not self.mean.measuring:
                break
            if (extra := getattr(self.policy, "extra", None)) is not None:
                self.enough.setdefault(self.V, min(self.workers - extra, expected))
            if self.mean.clips and not self.mean.measuring and self.good_of(self.V):
                self.mean.measuring = True
                break
            self.mean.measuring = False
            self.overtime = False
            self.V += 1
            while (policy := self.plan.in_force(self.rank, self.V)) != self.policy:
                self.switch(policy)

    def good_of(self, iteration: int) -> set[Handle]:
        """Returns the gradients of an iteration that are to be used."""
        return {handle for handle, fate in self.fate.items() if fate == "good" and handle.iteration == iteration}

    def switch(self, policy: CentralPolicy) -> None:
        """Moves everybody to where the fastest is; who was behind, but neither late nor asking, owes one gradient."""
        self.policy = policy
        self.switched = True
        to = max(self.V, *self.next.values())
        behind = {process for process, at in self.next.items() if self.V <= at < to}
        self.owing |= behind - self.asked.keys()
        self.next = {process: max(at, to) for process, at in self.next.items()}
        self.V = self.changed_at = to

    def is_ghost(self, process: Process) -> bool:
        """Whether the process is no member, and a later incarnation of its rank was named or has asked."""
        incarnations = [incarnation for rank, incarnation in (*self.view.members, *self.asked) if rank == process[0]]
        return process not in self.next and process[1] < max(incarnations)

    def judge(self, actions: list[orders.Action]) -> None:
        for action in actions:
            what = to_text(action)
            match action:
                case orders.Apply():
                    self.judge_apply(action, what)
                case orders.Drop(handle):
                    fate = self.fate.get(handle, "not here")
                    self.expect(fate in ("good", "owed", "bad"), "handles", f"{what}, but it is {fate}")
                    late = handle.iteration < self.V_before + self.mean.was_measuring and fate != "owed"
                    self.expect(late or fate == "bad", "late", f"{what}, at V={self.V_before}")
                    self.fate[handle] = "consumed"
                    self.dropped.add(source_process(handle))
                case orders.Measure():
                    self.judge_measure(action, what)
                case orders.Send(message=SliceNorm(iteration=iteration, squared=None)) if self.mean.clips:
                    passed = iteration == self.V - 1
                    self.expect(passed, "norm", f"{what}, it is at V={self.V}")
                case orders.Answer(parameters):
                    self.judge_answer(parameters, what)
                case orders.Park():
                    self.judge_park(action, what)
                case orders.SetTimer(after_s=after_s):
                    self.expect(after_s >= 0, "answer", f"a time cannot be negative: {what}")
                case orders.Send(message=Rise(V=V)) if self.plan.has_scheduler:
                    self.expect(V == self.V, "together", f"{what}, it is at V={self.V}")
                case orders.Compute() | orders.AbortCompute() | orders.Send() | orders.Reduce() | orders.Wait():
                    self.expect(False, "answer", f"a shard may not {what}")
                case _:
                    assert_never(action)
        for process, pull in self.asked.items():
            if process in self.next:
                self.expect(process in self.parked, "parked", f"not even parked: {to_text(pull)}")
                others_at = [at for other, at in self.next.items() if other != process]
                waits = any(at < pull.iteration + self.patience for at in others_at)
                waits |= self.mean.measuring
                if self.stops.number:
                    waits = self.stops.forbid(process, pull.iteration, self.next)
                self.expect(waits, "parked", f"waits for nobody: {to_text(pull)}")

    def judge_apply(self, apply: orders.Apply, what: str) -> None:
        owed = [self.fate.get(handle) for handle in apply.handles] == ["owed"]
        if apply.norm is not None:
            same = apply.handles == self.mean.handles and apply.norm == self.mean.norm
            self.expect(
                same, "norm", f"{what}, but {self.mean.handles} were measured, and the norm is {self.mean.norm}"
            )
            self.mean.handles = None
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
            if not self.mean.clips:
                self.judge_enough(apply.handles, what)
            self.expect(self.mean.clips == (apply.norm is not None), "norm", f"{what}, clipped: {self.mean.clips}")
            self.V_before = min(iterations) + 1
        if self.plan.in_step and not self.mean.clips:
            computing = [name(process) for process, at in self.computes.items() if self.next.get(process, at + 1) <= at]
            self.expect(not computing, "in step", f"{what} while {', '.join(computing)} compute")
        if not self.switched:
            arrived = self.policy.on_arrival or owed
            right = self.weight_of(apply.handles[0]) if arrived else self.share_of_mean(apply.handles)
            self.expect(abs(apply.weight - right) < 1e-9, "weight", f"{what} with weight {apply.weight}, not {right}")
        if owed:
            self.owed_versions.add(apply.version)
        self.version = apply.version

    def weight_of(self, handle: Handle) -> float:
        """Returns the weight of a step on arrival: 1/N, N being members and those that have finished, by the policy's
        options."""
        scaled = getattr(self.policy, "scale", "workers") != "none"
        weight = self.part_of([handle.source]) if scaled else 1.0
        stale = max(0, self.version - handle.version) if getattr(self.policy, "staleness_weighted", False) else 0
        return weight / (1 + stale)

    def share_of_mean(self, handles: tuple[Handle, ...]) -> float:
        """Returns the weight of a mean: those who have finished keep their share of it, though most add nothing."""
        last = {handle.source for handle in handles}.intersection(self.view.finished)
        return self.part_of([*(rank for rank, _ in self.view.members), *last])

    def part_of(self, ranks: Iterable[int]) -> float:
        """Returns the part of all samples behind everybody's latest push that is behind those of some ranks."""
        sharing = {rank for rank, _ in self.view.members} | set(self.view.finished)
        known = [weight for rank, weight in self.samples.items() if rank in sharing]
        mean = sum(known) / len(known) if known else 1.0
        counted = {rank: self.samples.get(rank, mean) for rank in sharing}
        return sum(counted[rank] for rank in ranks) / sum(counted.values())

    def judge_enough(self, handles: tuple[Handle, ...], what: str) -> None:
        there = sum(source_process(handle) in self.next for handle in handles)
        enough = self.enough.get(handles[0].iteration, there)
        self.expect(there == enough, "enough", f"{what}: {there} live members' gradients instead of {enough}")

    def judge_measure(self, measure: orders.Measure, what: str) -> None:
        due = self.mean.clips and self.mean.measuring and self.mean.handles is None and measure.iteration == self.V
        self.expect(due, "norm", f"{what}, at V={self.V}")
        self.expect(set(measure.handles) == self.good_of(self.V), "norm", f"{what}, not {self.good_of(self.V)}")
        self.judge_enough(measure.handles, what)
        self.mean.handles = measure.handles

    def is_stale(self, handle: Handle) -> bool:
        """Whether the parameters have changed since the gradient's were read, other than by a change of policy."""
        since = set(range(handle.version + 1, self.version + 1))
        return handle.iteration != self.changed_at and not since <= self.owed_versions

    def judge_answer(self, parameters: Parameters, what: str) -> None:
        process = requester(parameters)
        pull = self.asked.pop(process, None)
        self.parked.discard(process)
        asked = process in self.next and pull is not None and pull.iteration <= parameters.iteration
        self.expect(asked, "answer", f"{what}, which asked for {pull}")
        if pull is not None and process not in self.repeated:
            stopped = self.stops.forbid(process, pull.iteration, self.next)
            self.expect(not stopped, "stop", f"{what}, but {self.stops} is not over")
        self.expect(parameters.version == self.version, "answer", f"{what}, the version is {self.version}")
        self.expect(parameters.dropped == (process in self.dropped), "answer", f"{what}, not so")
        self.repeated.discard(process)
        self.given[process] = parameters.version
        self.computes[process] = parameters.iteration
        waited_for = [at for other, at in self.next.items() if at != self.mean.overtaken.get(other)]
        self.lowest[process] = (min(waited_for, default=parameters.iteration), self.policy.bound)
        self.judge_bound(process, parameters.iteration)

    def judge_bound(self, process: Process, iteration: int) -> None:
        lowest, bound = self.lowest.get(process, (0, None))
        fine = bound is None or lowest >= iteration - bound
        self.expect(fine, "bound", f"worker {name(process)} at {iteration}, a member at {lowest} (s={bound})")

    def judge_park(self, park: orders.Park, what: str) -> None:
        process = requester(park.pull)
        asked = self.asked.get(process) == park.pull and process not in self.parked
        self.expect(asked, "parked", f"nobody asked, or it is parked already: {what}")
        self.expect(park.pull.attempt == 0, "parked", f"it was let through before: {what}")
        others = {rank for rank, _ in self.next} - {park.pull.worker}
        some = self.mean.measuring or park.waits_for_count > 0
        known = set(park.waits_for) <= others and some and park.waits_for_count <= len(others) and park.reason
        self.expect(bool(known), "parked", f"for whom? {what}")
        self.parked.add(process)

    def left(self) -> list[Handle]:
        """Returns gradients that were neither applied nor dropped."""
        return [handle for handle, fate in self.fate.items() if fate != "consumed"]
