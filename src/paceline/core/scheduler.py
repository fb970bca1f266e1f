"""One node decides for all shards: synchronization that does not overlap, the baseline of FluentPS.

(Yao et al. 2019, III.D.) Usually each shard answers by itself, so that one slice is read while another is still being
written. In ps-lite and its like a scheduler stands between: nobody reads anything before iteration V is finished on
*every* shard.

    worker       pushes its slices to all shards, and sends its pull to the scheduler instead
    shard        finishes iterations as ever, and tells the scheduler each time its V has risen
    scheduler    has the smallest V it was told; parks the pull until the policy's condition holds for that V, then
                 releases the worker
    worker       pulls from all shards

That is three messages one after the other (rise, release, pull) where an overlapping run has none, and reading begins
when the last shard is done instead of each when it is ready itself.

What keeps it harmless. A scheduler can only delay: the shards keep their own conditions, and theirs hold by the
time it releases anybody. It delays nobody for ever: who has asked it for c has pushed c - 1 everywhere, which is
all that a pull for c would promise (`core/progress.py`); the first pull of an incarnation, and those from shards
that answered less than others, promise more and go straight to the shards. So the slowest on the shard with the
smallest V is never held. A shard that comes back from a checkpoint says where it stands; if that is below what the
scheduler has let pass already, the shard itself parks.

The three machines here are what differs from `core/worker.py` and `core/shard.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.actions import Park, Send
from paceline.core.events import PullArrived, ReleaseArrived, RiseArrived, ServersChanged, ViewChanged
from paceline.core.machine import IllegalEvent, Machine, require
from paceline.core.messages import Members, Node, Pull, Release, Rise
from paceline.core.progress import Progress
from paceline.core.shard import Shard
from paceline.core.worker import Worker

if TYPE_CHECKING:
    from paceline.core.policy import CentralPolicy

SCHEDULER = Node("scheduler", 0)


class ScheduledWorker(Worker):
    """A worker that sends its pull to the scheduler, and pulls from the shards when the scheduler releases it."""

    def pauses(self) -> bool:
        return True

    def pause(self) -> None:
        self.actions.append(Send(SCHEDULER, Pull(self.rank, self.incarnation, self.iteration)))

    def on_release_arrived(self, event: ReleaseArrived) -> None:
        release = event.release
        if self.pausing and (release.incarnation, release.iteration) == (self.incarnation, self.iteration):
            self.resume()


class ReportingShard(Shard):
    """A shard that tells the scheduler its V: at the start, and after each event that raised it."""

    def __init__(self, policy: CentralPolicy, rank: int, members: Members, seed: int = 0) -> None:
        super().__init__(policy, rank, members, seed)
        self.reported = -1
        """The V that the scheduler was told last."""

    def settle(self) -> None:
        super().settle()
        if self.reported != self.progress.V:
            self.reported = self.progress.V
            self.actions.append(Send(SCHEDULER, Rise(self.rank, self.reported, self.mover)))


class Scheduler(Machine):
    """Knows the V of every shard and all pulls, and releases those for whom the policy's pull condition holds."""

    def __init__(self, policy: CentralPolicy, members: Members) -> None:
        super().__init__()
        self.policy = policy
        self.finished = [0] * members.servers
        """The last V of each shard."""
        self.view_number = 0
        self.incarnations: dict[int, int] = {}
        """The live members and their incarnations."""
        self.progress = Progress()
        """Its V is the largest that all shards have reached; `next` has what the live workers have asked for."""
        self.asked: dict[int, Pull] = {}
        """The last pull of each worker. Incarnations and iterations rise: a pull that does not is a copy."""
        self.parked: dict[int, dict[int, Pull]] = {}
        """The pulls that wait, by the V that frees them, then by worker."""

    def on_view_changed(self, event: ViewChanged) -> None:
        """Learns who is alive, to name those who are waited for and to forget those who are gone. It decides
        nothing."""
        if event.view.number <= self.view_number:
            return
        before, named = self.incarnations, dict(event.view.members)
        self.view_number, self.incarnations = event.view.number, named
        for worker, incarnation in before.items():
            if named.get(worker) != incarnation:
                self.progress.leave(worker)
                self.forget(worker, incarnation)
        for worker, incarnation in named.items():
            if before.get(worker) != incarnation:
                self.progress.join(worker)
                asked = self.asked.get(worker)
                if asked is not None and asked.incarnation == incarnation:
                    self.progress.promise(worker, asked.iteration)

    def forget(self, worker: int, incarnation: int) -> None:
        for pulls in self.parked.values():
            if worker in pulls and pulls[worker].incarnation == incarnation:
                del pulls[worker]

    def on_pull_arrived(self, event: PullArrived) -> None:
        pull = event.pull
        before = self.asked.get(pull.worker)
        if before is not None and (before.incarnation, before.iteration) >= (pull.incarnation, pull.iteration):
            return
        if before is not None:
            self.forget(pull.worker, before.incarnation)
        self.asked[pull.worker] = pull
        if self.incarnations.get(pull.worker) == pull.incarnation:
            self.progress.promise(pull.worker, pull.iteration)
        i, V = pull.iteration - 1, self.progress.V
        if self.policy.may_pull(i, V):
            self.release(pull)
        else:
            self.parked.setdefault(self.policy.freed_at(i, V), {})[pull.worker] = pull
            names, count = self.progress.missing()
            self.actions.append(Park(pull, self.why(), names, count))

    def on_rise_arrived(self, event: RiseArrived) -> None:
        rise = event.rise
        if not 0 <= rise.shard < len(self.finished):
            raise IllegalEvent(f"there is no shard {rise.shard}: there are {len(self.finished)}")
        self.finished[rise.shard] = rise.V

    def on_servers_changed(self, event: ServersChanged) -> None:
        servers = len(event.nbytes)
        self.finished = [*self.finished[:servers], *[event.V] * (servers - len(self.finished))]

    def settle(self) -> None:
        """Releases those who wait for a V that all shards have reached by now."""
        while min(self.finished) > self.progress.V:
            self.progress.rise()
            for pull in self.parked.pop(self.progress.V, {}).values():
                self.release(pull)

    def release(self, pull: Pull) -> None:
        self.actions.append(Send(Node("worker", pull.worker), Release(pull.worker, pull.incarnation, pull.iteration)))

    def why(self) -> str:
        """Says which shards everybody waits for."""
        V = self.progress.V
        behind = [str(shard) for shard, finished in enumerate(self.finished) if finished <= V]
        if len(behind) == len(self.finished):
            return f"no shard has finished iteration {V}"
        have = "has" if len(behind) == 1 else "have"
        return f"shard{'s' * (len(behind) > 1)} {', '.join(behind)} {have} not finished iteration {V}"

    def check(self) -> None:
        V = self.progress.V
        require(min(self.finished) <= V, f"all shards are at {min(self.finished)}, the scheduler at {V}")
        waiting = [pull.worker for pulls in self.parked.values() for pull in pulls.values()]
        require(len(waiting) == len(set(waiting)), f"somebody waits twice: {waiting}")
        for freed_at, pulls in self.parked.items():
            require(freed_at > V or not pulls, f"{list(pulls)} wait for V={freed_at}, V is {V}")
