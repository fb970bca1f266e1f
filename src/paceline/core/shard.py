"""The machine of one shard: a parameter server with conditions on push and pull (FluentPS, Algorithm 1).

A push either counts (applied on arrival, or held for the mean of its iteration) or is dropped because its
iteration is finished. A pull is answered or parked. When enough members have passed iteration V, the mean of
the held gradients is applied, V rises, and the pulls that waited for that V are answered, before the pull of
the worker whose push raised it. Parked pulls are in buckets by the V that frees them: looking at all of them at each
rise would cost more the more workers wait.

Three things keep the shards of a run in step without talking to each other:

- views are complete and numbered, only a newer one counts, and a pull of a worker that no view has named yet is
  kept until one does;
- a push or a pull is a promise (see `core/progress.py`);
- an answer names the iteration the worker is to compute: its own, or the shard's V if that is ahead, so a
  late or joining worker adopts the shard's iteration instead of staying late for ever.

The policy in force may change when V rises (`switch`). Everything held is applied, V jumps to where the fastest
worker stands, and the others adopt it like late ones, so that nobody waits for what lies between; but the one
gradient each of them is still to send, being late through no fault of its own, is applied when it comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from paceline.core import events
from paceline.core.actions import Action, Answer, Apply, Drop, Measure, Park, Send, SetTimer
from paceline.core.machine import IllegalEvent, Machine, require
from paceline.core.messages import Handle, Members, Parameters, Pull, SliceNorm, View, in_rank_order
from paceline.core.norm_reducer import REDUCER
from paceline.core.progress import Progress
from paceline.core.push_weights import PushWeights

if TYPE_CHECKING:
    from paceline.core.policy import CentralPolicy

NOBODY = -1
NOTHING = (-1, 0)
"""An (iteration, attempt) below any that a worker asks for."""


class Shard(Machine):
    def __init__(self, policy: CentralPolicy, rank: int, members: Members, seed: int = 0) -> None:
        super().__init__()
        self.plan = policy
        """All policies of the run; `policy` is the one in force here and now."""
        self.rank = rank
        self.members = members
        self.seed = seed
        self.workers = members.workers
        self.adopt(policy.in_force(rank, 0))
        self.now = 0.0
        self.overtime = False
        """Whether the time given to iteration V is over."""
        self.owing: set[int] = set()
        """Workers whose next gradient is late only because the policy changed: it is applied when it comes."""
        self.view = View(0, ())
        self.incarnations: dict[int, int] = {}
        """The live members and their incarnations."""
        self.progress = Progress()
        self.weights = PushWeights()
        self.version = 0
        self.held: dict[int, list[Handle]] = {}
        """iteration -> the gradients that wait for its mean."""
        self.parked: dict[int, list[Pull]] = {}
        """Pulls not answered yet, by the V that frees them. At release those that no longer wait are skipped."""
        self.waiting: dict[int, Pull] = {}
        """The parked pull of each worker that waits."""
        self.asked: dict[int, tuple[int, int]] = {}
        """The last (iteration, attempt) each live worker asked for. They rise: a pull that does not is a copy."""
        self.early: dict[int, Pull] = {}
        """Pulls of workers that no view has named yet."""
        self.departed: dict[tuple[int, int], int] = {}
        """(worker, incarnation) that left -> the first iteration of which no push has come from it."""
        self.dropped: set[int] = set()
        """Workers whose last push did not count here."""
        self.mover = NOBODY
        """The worker whose event is being handled: whoever is released now is released by it."""
        self.clips_mean = False
        """Whether a step on a mean needs its norm over all shards (`core/norm_reducer.py`); set by the runtime."""
        self.servers = members.servers
        self.measuring = False
        """Whether iteration V waits only for the norm of its mean, to be stepped on."""
        self.measured_by = NOBODY
        """The worker whose push finished iteration V."""
        self.said = -1
        """The largest iteration that was reported to the reducer."""

    def adopt(self, policy: CentralPolicy) -> None:
        self.policy = policy
        self.gate = policy.gate(self.rank, self.members, self.seed)
        self.scaled = getattr(policy, "scale", "workers") != "none"
        self.weighted = bool(getattr(policy, "staleness_weighted", False))

    def on_restored(self, event: events.Restored) -> None:
        if self.view.number or self.version:
            raise IllegalEvent(f"shard {self.rank} has begun already: it cannot be restored")
        self.progress.V = event.iteration
        self.version = event.version
        self.adopt(self.plan.in_force(self.rank, event.iteration))

    def on_servers_changed(self, event: events.ServersChanged) -> None:
        """Takes over another part of the parameters. Progress stays; a new shard learns it from the event."""
        if self.held or self.waiting:
            raise IllegalEvent(f"shard {self.rank} holds gradients or pulls: the servers cannot change now")
        new = not self.view.number
        if new:
            self.progress.V = event.V
            self.adopt(self.plan.in_force(self.rank, event.V))
        self.version = max(event.versions)
        self.servers = len(event.nbytes)
        self.on_view_changed(events.ViewChanged(event.at, event.view))
        for worker, at in event.next if new else ():
            self.progress.stand_at(worker, at)

    def on_view_changed(self, event: events.ViewChanged) -> None:
        if not self.is_newer(event.view):
            return
        self.view = event.view
        self.now = event.at
        self.mover = NOBODY
        named = dict(event.view.members)
        for worker, incarnation in list(self.incarnations.items()):
            if named.get(worker) != incarnation:
                del self.incarnations[worker]
                self.departed[worker, incarnation] = self.progress.next[worker]
                self.progress.leave(worker)
                if worker not in event.view.finished:
                    self.weights.forget(worker)
                self.gate.forget(worker)
                self.dropped.discard(worker)
                self.owing.discard(worker)
                self.waiting.pop(worker, None)
                self.asked.pop(worker, None)
        # Those who waited for somebody lost are released by the view, before those who join are answered.
        self.settle()
        for worker, incarnation in named.items():
            if worker not in self.incarnations:
                self.incarnations[worker] = incarnation
                self.weights.forget(worker)
                self.progress.join(worker)
        for worker, pull in list(self.early.items()):
            if worker in named and pull.incarnation <= named[worker]:
                del self.early[worker]
                if pull.incarnation == named[worker]:
                    self.handle_pull(pull)

    def is_newer(self, view: View) -> bool:
        return view.number > self.view.number

    def on_push_arrived(self, event: events.PushArrived) -> None:
        handle = event.push.handle
        self.now = event.at
        if not self.counts(handle, good=True, significance=event.significance):
            return
        if self.policy.on_arrival or handle.iteration < self.progress.V:
            weight = self.weights.of(handle.source) / self.sharing if self.scaled else 1.0
            if self.weighted:
                # A shard that was restored may be behind what its workers have read.
                weight /= 1 + max(0, self.version - handle.version)
            self.apply((handle,), weight)
        else:
            self.held.setdefault(handle.iteration, []).append(handle)

    @property
    def sharing(self) -> int:
        """N, the number of workers that share a step. Workers that have finished still count, lost ones do not."""
        return len(self.incarnations) + len(self.view.finished)

    def on_push_rejected(self, event: events.PushRejected) -> None:
        handle = event.push.handle
        self.now = event.at
        if self.counts(handle, good=False):
            self.drop(handle, event.reason)

    def on_timer_fired(self, event: events.TimerFired) -> None:
        self.now = event.at
        self.mover = NOBODY
        if event.timer == self.progress.V:
            self.overtime = True

    def counts(self, handle: Handle, good: bool, significance: float | None = None) -> bool:
        """Takes note of a push; False if its gradient must not be used, which then has been dropped.

        A gradient that is not `good` counts as skipped: nobody waits for it, and it is not among those that are there.
        A duplicate names a handle that was consumed or is held already: it is ignored, not dropped.
        """
        worker, iteration = handle.source, handle.iteration
        if self.incarnations.get(worker) != handle.incarnation:
            sender = (worker, handle.incarnation)
            if iteration >= self.departed.get(sender, 0):
                self.departed[sender] = iteration + 1
                self.actions.append(Drop(handle, f"worker {worker} left before its push of iteration {iteration} came"))
            return False
        progress = self.progress
        if iteration < progress.next[worker]:
            return False
        self.mover = worker
        self.dropped.discard(worker)
        owing = worker in self.owing
        self.owing.discard(worker)
        if good:
            self.weights.note(handle)
            self.gate.note_push(handle, self.now, significance)
            self.note_push(worker, iteration)
        else:
            progress.promise(worker, iteration + 1)
        too_late = self.measuring if iteration == progress.V else not owing
        if iteration <= progress.V and too_late:
            self.drop(handle, f"late: iteration {iteration}, the shard is at {progress.V}")
            return False
        return True

    def note_push(self, worker: int, iteration: int) -> None:
        self.progress.push(worker, iteration)

    def drop(self, handle: Handle, reason: str) -> None:
        self.dropped.add(handle.source)
        self.actions.append(Drop(handle, reason))

    def apply(self, handles: tuple[Handle, ...], weight: float, norm: float | None = None) -> None:
        self.version += 1
        self.actions.append(Apply(handles, weight, self.version, norm))

    def on_pull_arrived(self, event: events.PullArrived) -> None:
        pull = event.pull
        self.now = event.at
        if self.incarnations.get(pull.worker) == pull.incarnation:
            self.handle_pull(pull)
        elif self.is_early(pull):
            self.early[pull.worker] = pull

    def on_pull_repeated(self, event: events.PullRepeated) -> None:
        """Answers a worker that asks again after a restart of this server: it waits, for the old answer may be lost.

        Any other pull that does not rise is a copy: its worker may be computing, on memory that is its own again.
        """
        pull = event.pull
        known = self.incarnations.get(pull.worker) == pull.incarnation
        if known and self.asked.get(pull.worker) == (pull.iteration, pull.attempt) and pull.worker not in self.waiting:
            self.now = event.at
            self.mover = pull.worker
            self.answer(pull, "", NOBODY)
        else:
            self.on_pull_arrived(events.PullArrived(event.at, pull))

    def is_early(self, pull: Pull) -> bool:
        """Whether a view may still name the sender: it is a later incarnation of the worker than any known."""
        newest = self.early.get(pull.worker)
        known = self.incarnations.get(pull.worker, -1)
        return (
            pull.incarnation > known
            and (pull.worker, pull.incarnation) not in self.departed
            and (newest is None or pull.incarnation >= newest.incarnation)
        )

    def handle_pull(self, pull: Pull) -> None:
        asked = (pull.iteration, pull.attempt)
        if asked <= self.asked.get(pull.worker, NOTHING):
            return
        self.asked[pull.worker] = asked
        self.mover = pull.worker
        self.note_promise(pull)
        self.settle()
        self.owing.discard(pull.worker)
        i = pull.iteration - 1
        # Whoever asks again for the same iteration was allowed to begin it: it waits for nobody.
        if pull.attempt or self.gate.may_pull(pull.worker, i, self.progress):
            self.answer(pull, "", NOBODY)
        else:
            self.park(pull, i, self.progress.V)

    def note_promise(self, pull: Pull) -> None:
        self.progress.promise(pull.worker, pull.iteration)

    def answer(self, pull: Pull, reason: str, released_by: int) -> None:
        iteration = max(pull.iteration, self.progress.V)
        self.progress.promise(pull.worker, iteration)
        worker, dropped = pull.worker, pull.worker in self.dropped
        parameters = Parameters(self.rank, worker, pull.incarnation, iteration, self.version, dropped)
        self.actions.append(Answer(parameters, reason, released_by))

    def park(self, pull: Pull, i: int, V: int) -> None:
        self.waiting[pull.worker] = pull
        self.parked.setdefault(self.gate.freed_at(pull.worker, i, V), []).append(pull)
        names, count = self.progress.missing()
        why = f"the norm of iteration {V} is not known yet" if self.measuring else self.policy.why(i, self.progress)
        self.actions.append(Park(pull, why, names, count))

    def settle(self) -> None:
        progress = self.progress
        while (progress.moved or self.overtime) and not self.measuring:
            progress.moved = False
            if not self.is_finished():
                break
            if self.clips_mean and self.servers > 1 and progress.V in self.held:
                self.measuring, self.measured_by = True, self.mover
                self.said = progress.V
                self.actions.append(self.measure())
            else:
                self.finish()
        if self.clips_mean and self.servers > 1 and self.said < progress.V - 1:
            self.said = progress.V - 1
            self.actions.append(Send(REDUCER, SliceNorm(self.rank, self.said, None)))

    def measure(self) -> Measure:
        return Measure(self.progress.V, in_rank_order(self.held[self.progress.V]))

    def on_norm_arrived(self, event: events.NormArrived) -> None:
        """Takes the step on the mean of V, whose norm is known now. Norms of other iterations are copies."""
        if self.measuring and event.norm.iteration == self.progress.V:
            self.now = event.at
            self.mover = self.measured_by
            self.measuring = False
            self.finish(event.norm.norm)

    def reports_to_repeat(self) -> list[Action]:
        """Returns what a restarted server must report to the reducer again, which may not have it from before."""
        if self.measuring:
            return [self.measure()]
        return [Send(REDUCER, SliceNorm(self.rank, self.said, None))] if self.said >= 0 else []

    def finish(self, norm: float | None = None) -> None:
        """Finishes iteration V: takes one step on its mean, if the policy has one, and goes on to the next."""
        progress = self.progress
        handles = self.held.pop(progress.V, None)
        if handles:
            weight = self.weights.share_of_mean(handles, self.incarnations.keys(), self.view.finished)
            self.apply(in_rank_order(handles), weight, norm)
        progress.rise()
        self.overtime = False
        while (policy := self.plan.in_force(self.rank, progress.V)) is not self.policy and policy != self.policy:
            self.switch(policy)
        for pull in self.parked.pop(progress.V, ()):
            if self.waiting.get(pull.worker) == pull:
                self.release(pull, f"iteration {progress.V - 1} is finished")
        allowed_s = self.gate.note_rise(progress.V, self.now)
        if allowed_s is not None:
            self.actions.append(SetTimer(progress.V, allowed_s))

    def release(self, pull: Pull, reason: str) -> None:
        del self.waiting[pull.worker]
        self.gate.note_release(pull.worker, self.now)
        self.answer(pull, reason, self.mover)

    def switch(self, policy: CentralPolicy) -> None:
        """Puts another policy in force: no gradient is lost, no pull waits for the old one, nobody is ahead of V."""
        progress = self.progress
        for iteration in sorted(self.held):
            handles = self.held.pop(iteration)
            weight = self.weights.sum_of(handle.source for handle in handles) / self.sharing
            self.apply(in_rank_order(handles), min(1.0, weight))
        V = progress.V
        to = max(V, *progress.next.values())
        # Whoever is parked has pushed already: what it computes next, it computes under the new policy.
        self.owing |= {worker for worker, at in progress.next.items() if V <= at < to and worker not in self.waiting}
        progress.jump(to)
        self.adopt(policy)
        self.parked.clear()
        for pull in list(self.waiting.values()):
            i = pull.iteration - 1
            if self.gate.may_pull(pull.worker, i, progress):
                self.release(pull, f"{policy} is in force from iteration {to} on")
            else:
                self.parked.setdefault(self.gate.freed_at(pull.worker, i, to), []).append(pull)

    def is_finished(self) -> bool:
        """Whether iteration V is finished; never beyond what some live worker has passed, whatever a policy says."""
        progress = self.progress
        passed = progress.passed_V()
        if not passed:
            return False
        skipped = len(progress.skipped.get(progress.V, ()))
        there, expected = passed - skipped, len(progress.next) - skipped
        if self.policy.finishes(there, expected, self.workers):
            return True
        return self.overtime and self.policy.finishes_overtime(there, expected, self.workers)

    def held_handles(self) -> Iterator[Handle]:
        """Yields the gradients that wait for their iteration's mean."""
        return chain.from_iterable(self.held.values())

    def check(self) -> None:
        progress = self.progress
        require(progress.next.keys() == self.incarnations.keys(), "progress is kept for exactly the live members")
        for iteration, passed in progress.passed.items():
            require(iteration >= progress.V, f"passed[{iteration}] is kept although V is {progress.V}")
            counted = sum(at > iteration for at in progress.next.values())
            require(passed == counted, f"passed[{iteration}] is {passed}, members say {counted}")
        require(self.measuring or not self.is_finished(), f"iteration {progress.V} is finished, yet V did not rise")
        require(all(at >= progress.V for at in self.held), f"a gradient older than V={progress.V} is held")
        require(not self.measuring or progress.V in self.held, "a mean is measured without gradients")
        require(not (self.policy.on_arrival and self.held), "a gradient is held although it applies on arrival")
        parked = {pull.worker: freed_at for freed_at, pulls in self.parked.items() for pull in pulls}
        for worker, pull in self.waiting.items():
            require(self.incarnations.get(worker) == pull.incarnation, f"worker {worker} waits but is no member")
            freed_at = parked.get(worker, -1)
            require(freed_at > progress.V, f"worker {worker} is parked for V={freed_at}, V is {progress.V}")
