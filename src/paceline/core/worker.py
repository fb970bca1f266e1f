"""The machine of one worker: pull from every shard, compute, push to every shard, and again.

Each shard answers by itself, so the shards overlap: the next iteration starts when the last one has answered
(FluentPS, III.D). Answers may name different iterations, after a join or a drop. The worker's iteration is
the largest any shard answered, and it pulls again from the shards that answered less: their parameters would
otherwise miss updates the others already hold, and they would wait for pushes that never come.

Between push and pull a worker may pause: with `rest_s` it rests for so long (naive waiting), and `core/scheduler.py`
has one that waits for a scheduler. A worker starts when a view names it.
"""

from __future__ import annotations

from bisect import bisect_left

from paceline.core.actions import Compute, Send, SetTimer
from paceline.core.events import GradientReady, ParametersArrived, ServersChanged, TimerFired, ViewChanged
from paceline.core.machine import IllegalEvent, Machine, require
from paceline.core.messages import Handle, Members, Node, Pull, Push

NOT_STARTED = -1


class Worker(Machine):
    def __init__(self, rank: int, members: Members, rest_s: float = 0.0) -> None:
        super().__init__()
        self.rank = rank
        self.rest_s = rest_s
        self.pausing = False
        """Whether it has pushed and does not pull yet."""
        self.incarnation = NOT_STARTED
        self.view_number = 0
        self.iteration = 0
        """The iteration that is computed or asked for."""
        self.attempt = 0
        """Above 0 if a computation of this iteration was given up (`core/speculation.py`)."""
        self.computing = False
        self.waiting: set[int] = set()
        """Shards that have not answered yet."""
        self.begin_with(members.servers, 0)

    def begin_with(self, servers: int, version: int) -> None:
        """Begins with so many shards, whose slices this worker holds in this version."""
        self.shards = [Node("server", shard) for shard in range(servers)]
        self.answered = [self.iteration] * servers
        """The last iteration each shard answered."""
        self.versions = [version] * servers
        """The version of each slice this worker holds."""
        self.dropped = [False] * servers
        """Whether the last push did not count, for each shard."""

    def on_view_changed(self, event: ViewChanged) -> None:
        if event.view.number <= self.view_number:
            return
        self.view_number = event.view.number
        members = event.view.members
        at = bisect_left(members, (self.rank,))
        named = at < len(members) and members[at][0] == self.rank
        incarnation = members[at][1] if named else NOT_STARTED
        if self.incarnation == NOT_STARTED and incarnation != NOT_STARTED:
            self.incarnation = incarnation
            self.pull(list(range(len(self.shards))), 0)

    def on_servers_changed(self, event: ServersChanged) -> None:
        """Keeps the parameters as they are, and counts all of them as stale as the stalest."""
        if self.incarnation != NOT_STARTED and not self.computing:
            raise IllegalEvent(f"worker {self.rank} is not computing: the servers cannot change now")
        behind = 0
        if self.computing:
            behind = max(then - held for then, held in zip(event.versions, self.versions, strict=True))
        self.begin_with(len(event.nbytes), max(event.versions) - behind)

    def on_parameters_arrived(self, event: ParametersArrived) -> None:
        parameters = event.parameters
        shard = parameters.shard
        if parameters.incarnation != self.incarnation or shard not in self.waiting:
            return
        if parameters.iteration < self.iteration:
            return  # a second answer to an earlier pull
        self.waiting.discard(shard)
        self.answered[shard] = parameters.iteration
        self.versions[shard] = parameters.version
        self.dropped[shard] = parameters.dropped

    def on_gradient_ready(self, event: GradientReady) -> None:
        if not self.computing or (event.iteration, event.attempt) != (self.iteration, self.attempt):
            raise IllegalEvent(
                f"worker {self.rank} is not computing attempt {event.attempt} of iteration {event.iteration}"
            )
        if len(event.nbytes) != len(self.shards):
            raise IllegalEvent(f"a gradient in {len(event.nbytes)} slices for {len(self.shards)} shards")
        self.computing = False
        pauses = self.pauses()
        for shard, node in enumerate(self.shards):
            version, nbytes = self.versions[shard], event.nbytes[shard]
            handle = Handle(self.rank, self.incarnation, self.iteration, version, nbytes, event.weight)
            self.actions.append(Send(node, Push(handle)))
            if not pauses:
                self.actions.append(Send(node, Pull(self.rank, self.incarnation, self.iteration + 1)))
        self.iteration += 1
        self.attempt = 0
        if pauses:
            self.pausing = True
            self.pause()
        else:
            self.waiting.update(range(len(self.shards)))

    def pauses(self) -> bool:
        """Whether something comes between push and pull."""
        return self.rest_s > 0

    def pause(self) -> None:
        """Pauses after a push; `resume` must be called some time."""
        self.actions.append(SetTimer(self.iteration, self.rest_s))

    def resume(self) -> None:
        self.pausing = False
        self.pull(list(range(len(self.shards))), self.iteration)

    def on_timer_fired(self, event: TimerFired) -> None:
        if self.pausing and event.timer == self.iteration:
            self.resume()

    def settle(self) -> None:
        if self.waiting or self.computing or self.pausing or self.incarnation == NOT_STARTED:
            return
        agreed = self.agree(self.answered)
        if agreed != self.iteration:
            self.iteration, self.attempt = agreed, 0
        behind = [shard for shard, answered in enumerate(self.answered) if answered < self.iteration]
        if behind:
            self.pull(behind, self.iteration)
        else:
            self.start()

    def start(self) -> None:
        """Starts to compute: all parameters of the iteration are there."""
        self.computing = True
        self.actions.append(Compute(self.iteration, self.attempt))

    def agree(self, answered: list[int]) -> int:
        """Returns the iteration to compute, given the iterations that the shards answered."""
        return max(answered)

    def pull(self, shards: list[int], iteration: int) -> None:
        for shard in shards:
            self.actions.append(Send(self.shards[shard], Pull(self.rank, self.incarnation, iteration, self.attempt)))
        self.waiting.update(shards)

    def check(self) -> None:
        require(not (self.computing and self.waiting), f"worker {self.rank} computes while it waits")
        if self.computing:
            same = all(answered == self.iteration for answered in self.answered)
            require(same, f"worker {self.rank} computes {self.iteration} on answers for {self.answered}")
